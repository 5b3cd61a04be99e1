"""`LatencyBuffer` for CUDA tensors: passes its calls to the GPU core.

Data path: `latency/gpu/core.py` and its kernels, from GPU to GPU; no call waits for the CPU side, which attaches memory
at construction and agrees on the members (`sync`), which admits processes that replace lost ranks
(`members/gpu_members.py`). A call brings its cache key (`plans.py`), by which what the core has prepared for equal
calls is found; small results are made when they are read (`gpu/results.py`).

Replacements. A graph contains this rank's addresses, so its memory stays, and it shows the memory's blob in its
outbox. Before it says that it is ready, all words that other ranks have stored are cleared, and the tags
continue `TAG_JUMP` above all that any rank has used (`TAG_STEP` if all were in the previous epoch): what the old
process still stores, should it be stopped and wake up, has older tags and is ignored. Its calls raise `EvictedError` as
soon as it has received the view. Not guaranteed: rows and words that it stores into slots that a current call is just
reading (a graph that it replays before it has received the view); and, if it has made more calls than that on its own,
its words.

Protocol: GPU calls are counted by the kernels. A rank whose call fails before its kernel takes part by a refusal, so
that all ranks stay in step. Reports of kernels stay in pinned memory until the CPU reads them: at the end of a call, at
the start of the next one, in `check`.

A crash of a peer leaves kernels waiting. A thread sees within milliseconds that a rank is dead and notifies the kernels
in flight (`gpu/death_notifier.py`), so their waits end long before the timeout; a source that had sent everything still
counts. With a mask of the caller's a dead rank is cleared in it by the kernel; without one, the call is an error. Such
a call asks the thread for dead ranks, and once a millisecond the system; a rank that dies in between is found like one
that dies while the kernel runs.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch

from ...engine.outbox import PeerRegions
from ...errors import (
    AbortedError,
    CommTimeoutError,
    EpeeError,
    InvalidState,
    PeerError,
    RankFailedError,
    context,
    expected,
)
from ...gpu.death_notifier import DeathNotifier
from ...gpu.platform import Platform
from ...gpu.report import NO_REPORTS, given_up
from ..config import BufferConfig
from ..epoch_memory import TAG_JUMP, CallNumbers, Memory
from ..losses import death
from ..making import told_alike
from ..members.gpu_members import GpuMembers
from ..members.header import OP_COMBINE, OP_DISPATCH, OP_GATHER, OP_NAMES, OPS_OF_CPUS
from ..members.membership import Agreed
from ..members.sync import sync
from ..paths import GpuPath, Making
from ..streams import CURRENT, CallStream
from .checks import check_hook
from .gpu.core import LatencyCore
from .gpu.half import Half
from .gpu.params import OP_COMBINE as KERNEL_COMBINE
from .gpu.params import OP_DISPATCH as KERNEL_DISPATCH
from .gpu.plan import Planner
from .gpu.results import CudaLatencyCombined, CudaLatencyDispatched, CudaLatencyHandle
from .gpu.shapes import latency_config
from .gpu.types import CoreHandle, CoreOptions
from .plans import LatencyPlans
from .types import (
    LatencyCombineCall,
    LatencyCombined,
    LatencyDispatchCall,
    LatencyDispatched,
    LatencyHandle,
)

_log = logging.getLogger(__name__)
CLOSE_GRACE_S = 2.0
LOOK_S = (
    # between a call's checks for dead ranks, each a system call; a thread detects deaths meanwhile, as later ones
    0.001
)
TAG_STEP = 1 << 12  # the same if no member is new; a rank excluded long ago shows 32 bits of a tag: no jump each time
_KERNEL_OPS = {OP_DISPATCH: KERNEL_DISPATCH, OP_COMBINE: KERNEL_COMBINE}


class ReceivePhase:
    """The receive phase of a call, before `CallsAgain` or the buffer makes it a hook.

    Args:
        path: of the call.
        op: its name.
        half: launches it.
        handle: of a dispatch.
    """

    __slots__ = ("epoch", "half", "handle", "is_done", "op", "path")

    def __init__(self, path: LatencyCudaPath, op: str, half: Half, handle: CudaLatencyHandle | None = None) -> None:
        self.path, self.op, self.half, self.handle = path, op, half, handle
        self.epoch, self.is_done = path.exchange.epoch, False

    def __call__(self) -> None:
        """Receive, after all checks."""
        self.path.receive(self, is_quiet=False)


class LatencyCudaPath(GpuPath, Memory):
    """The GPU side of one `LatencyBuffer`. Construction is collective, except in a replacement.

    The arguments are those of `CudaPath`.

    Attributes:
        core: kernels, memory, and the order of calls, on the GPU.
    """

    core: LatencyCore

    def __init__(self, making: Making, platform: Platform, timeout: float) -> None:
        self.config, self.rank, self.exchange, _, self._watch, self._closing, *_ = making
        super().__init__(platform)
        self._timeout_ns = int(timeout * 1e9)
        self._members: GpuMembers = self.exchange.membership
        self._blobs: dict[int, bytes] = {}  # by which the peers' memory is mapped
        self._given_up = ""  # why no call can be made before the next sync
        self._look_at = 0.0  # when a call checks again for dead ranks
        self._masked_look_at = 0.0  # when a call with a mask checks again whether the fast path is allowed
        deadline = time.monotonic() + timeout
        self.core = self._make_core(deadline)
        self._numbers = CallNumbers(self.core.memory.tags, platform.is_capturing)
        self._notifier = DeathNotifier(
            self.core.device.mark_dead, self.core.device.waiting, f"epee-latency-{self.rank}"
        )
        try:
            self._notifier.start(self._members.processes)
            self._members.memory = self
            if not self._members.is_in:
                self._members.join(deadline)
        except BaseException:
            self.close()
            raise

    def _make_core(self, deadline: float) -> LatencyCore:
        config = latency_config(self.config, self.rank)
        if not self._members.is_in:
            return LatencyCore(self._platform, config, self._alone)
        try:
            with told_alike(self._members.death_in_birth):
                return LatencyCore(self._platform, config, lambda data: self._gather(data, deadline))
        except expected(CommTimeoutError, PeerError, AbortedError):
            raise
        except expected(Exception) as error:
            self.exchange.refuse(OP_GATHER, error, deadline)
            raise

    def _gather(self, data: bytes, deadline: float) -> list[bytes]:
        """Gather from all ranks; the first gather exchanges how their memory is mapped."""
        parts = self.exchange.all_gather_bytes(data, deadline)
        self._blobs = self._blobs or dict(enumerate(parts))
        return parts

    def _alone(self, data: bytes) -> list[bytes]:
        """Stand in for a gather if the others' memory is mapped later."""
        return [data if rank == self.rank else b"" for rank in range(self.config.num_ranks)]

    # -- what every path has

    @property
    def nbytes(self) -> int:
        """Bytes of GPU memory that this rank lends."""
        return self.core.memory.nbytes

    def set_poison(self, is_poisoned: bool) -> None:
        """Fill results with 0xFF before each call, or not."""
        self.core.is_poisoned = is_poisoned

    def is_told(self, error: Exception) -> bool:
        """Return whether the peers know about `error`, or cannot be notified."""
        # the peers may not know of it
        is_lost = isinstance(error, InvalidState) and bool(self._given_up or self.exchange.lost)
        return not is_lost and (isinstance(error, (PeerError, AbortedError, InvalidState)) or self._closing.asked)

    def refuse(self, op: int, error: Exception, deadline: float) -> None:
        """Take part in the peers' call as the rank that cannot make it. Does nothing while a graph is recorded."""
        if op in OPS_OF_CPUS:
            self.exchange.refuse(op, error, deadline)
        elif not self._platform.is_capturing():
            self.core.refuse(_KERNEL_OPS[op])

    def check(self) -> None:
        """Raise what the kernels have reported since the last check."""
        is_capturing = self._platform.is_capturing()
        if not is_capturing:
            self._members.require_place(is_masked=True)
        try:
            self.core.check()
        except expected(CommTimeoutError) as error:
            self._note_timeout("check", error)
            raise

    def close(self) -> None:
        """Free all memory after the kernels in flight; they are aborted if they wait for peers. Idempotent."""
        self._notifier.stop()
        self.core.device.drain(CLOSE_GRACE_S)
        self.core.close()
        self._members.memory = Memory()  # no reference cycle keeps a closed path

    # -- calls

    def dispatch(self, call: LatencyDispatchCall, run_on: CallStream) -> LatencyDispatched:
        """Run one dispatch, or its send phase; raises as `Buffer.dispatch`."""
        checked, x, topk_idx, topk_weights, active_ranks, timeout_s = call
        is_capturing = self._platform.is_capturing()
        self._require("dispatch", checked.is_strict, is_capturing)
        buffer_id, config, planner = checked.sizes
        if checked.plan is None:
            how = CoreOptions(timeout_s, checked.is_strict, checked.return_hook, *checked.quantisation)
            checked.plan = planner.dispatch(checked.num_tokens, x.stride(0) * x.itemsize, how)
        try:
            got = self.core.dispatch(
                checked.plan, x, topk_idx, topk_weights, active_ranks, None, int(timeout_s * 1e9), is_capturing
            )
            if not is_capturing:
                self.core.check()
        except expected(CommTimeoutError) as error:
            self._note_timeout("dispatch", error)
            raise
        core, scales = got.handle, got.scales
        made_by = buffer_id, self.core.num_calls, self.exchange.epoch
        handle = CudaLatencyHandle(made_by, config.num_topk, core, got.hook is None)
        if run_on.is_own:
            run_on.keep((x, topk_idx, topk_weights, active_ranks), (got.x, scales, core.words))
        hook = None if got.hook is None else ReceivePhase(self, "dispatch", got.hook, handle)
        rows = got.x if scales is None else (got.x, scales)
        return CudaLatencyDispatched(rows, handle, run_on, self.config.device, got.stream, hook)

    def combine(self, call: LatencyCombineCall, run_on: CallStream) -> LatencyCombined:
        """Run one combine, or its send phase; raises as `Buffer.combine`."""
        checked, handle, y, topk_weights, out, active_ranks, timeout_s = call
        core = _core_of(handle)
        is_capturing = self._platform.is_capturing()
        self._require("combine", checked.is_strict, is_capturing)
        if checked.plan is None:
            how, is_wide = (
                CoreOptions(timeout_s, checked.is_strict, checked.return_hook),
                checked.partial_dtype == torch.float32,
            )
            checked.plan = checked.sizes.ready.combine(checked.num_tokens, how, is_wide, topk_weights is not None)
        try:
            got = self.core.combine(
                checked.plan, y, core, topk_weights, out, active_ranks, int(timeout_s * 1e9), is_capturing
            )
            if not is_capturing:
                self.core.check()
        except expected(CommTimeoutError) as error:
            self._note_timeout("combine", error)
            raise
        if run_on.is_own:
            run_on.keep((y, topk_weights, core.words, active_ranks), (got.x, got.words))
        hook = None if got.hook is None else ReceivePhase(self, "combine", got.hook)
        num_local = checked.sizes.config.num_local_experts
        return CudaLatencyCombined(got, topk_weights, core, num_local, run_on, self.config.device, got.stream, hook)

    def quiet_stream(self, op: int, is_strict: bool, is_split: bool) -> int | None:
        """Return the current stream if a cached call needs no checks (fast path allowed), else None.

        Then nothing has happened since the last check of a call, and no check for dead ranks is due.

        Args:
            op: `KERNEL_DISPATCH` or `KERNEL_COMBINE`.
            is_strict: all ranks are needed.
            is_split: the call has a hook.
        """
        is_quiet = (
            not (self._given_up or self._closing.asked or self._notifier.told)
            and (not is_strict or time.monotonic() < self._look_at)
            and self._members.is_calm()
        )
        return self.core.quiet_stream(op, is_split) if is_quiet else None

    def dispatch_again(
        self,
        known: LatencyPlans,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor | None,
        active_ranks: torch.Tensor | None,
        use_fp8: bool,
        round_scale: bool,
        use_ue8m0: bool,
        return_hook: bool,
        reads_counts: bool = False,
        run_on: CallStream = CURRENT,
    ) -> LatencyDispatched | None:
        """Run a cached dispatch if the fast path is allowed; otherwise return None without side effects.

        Args:
            known: the cached plans of calls of these sizes.
            reads_counts: the caller reads `num_tokens_per_expert` of the result at once.
            run_on: the stream of the call.
            Others as of `LatencyBuffer.dispatch`.
        """
        stream = self.quiet_stream(KERNEL_DISPATCH, active_ranks is None, return_hook)
        if stream is None:
            return None
        quantisation = use_fp8, round_scale, use_ue8m0
        checked = known.find_dispatch(x, topk_idx, topk_weights, active_ranks, quantisation, return_hook)
        if checked is None or checked.plan is None:
            return None
        core, plan, (buffer_id, config, _) = self.core, checked.plan, checked.sizes
        counts = plan.new_counts() if reads_counts else None
        got = core.dispatch(
            plan, x, topk_idx, topk_weights, active_ranks, None, self._timeout_ns, False, stream, counts
        )
        if core.device.codes != NO_REPORTS:
            core.check()
        made_by = buffer_id, core.num_calls, self.exchange.epoch
        handle = CudaLatencyHandle(made_by, config.num_topk, got.handle, got.hook is None)
        if run_on.is_own:
            run_on.keep((x, topk_idx, topk_weights, active_ranks), (got.x, got.scales, got.handle.words, counts))
        rows = got.x if got.scales is None else (got.x, got.scales)
        hook = None if got.hook is None else ReceivePhase(self, "dispatch", got.hook, handle)
        result = CudaLatencyDispatched(rows, handle, run_on, self.config.device, stream, hook)
        if counts is not None:
            result.num_tokens_per_expert = counts
        return result

    def combine_again(
        self,
        known: LatencyPlans,
        y: torch.Tensor,
        handle: object,
        topk_weights: torch.Tensor | None,
        out: torch.Tensor | None,
        partial_dtype: torch.dtype | None,
        active_ranks: torch.Tensor | None,
        return_hook: bool,
        run_on: CallStream = CURRENT,
    ) -> LatencyCombined | None:
        """Run a cached combine, as `dispatch_again`."""
        stream = self.quiet_stream(KERNEL_COMBINE, active_ranks is None, return_hook)
        if stream is None or type(handle) is not CudaLatencyHandle:
            return None
        is_own = handle.buffer_id == known.buffer_id and handle.epoch == self.exchange.epoch
        if not (is_own and handle.is_received):
            return None
        checked = known.find_combine(y, handle.num_tokens, topk_weights, out, partial_dtype, active_ranks, return_hook)
        if checked is None or checked.plan is None:
            return None
        core = self.core
        of_dispatch = handle.core
        got = core.combine(
            checked.plan, y, of_dispatch, topk_weights, out, active_ranks, self._timeout_ns, False, stream
        )
        if core.device.codes != NO_REPORTS:
            core.check()
        if run_on.is_own:
            run_on.keep((y, topk_weights, of_dispatch.words, active_ranks), (got.x, got.words))
        num_local = checked.sizes.config.num_local_experts
        hook = None if got.hook is None else ReceivePhase(self, "combine", got.hook)
        return CudaLatencyCombined(got, topk_weights, of_dispatch, num_local, run_on, self.config.device, stream, hook)

    def blame(self, op: int, error: Exception) -> None:
        """Raise that a rank is dead if that is why a call has timed out; else allow no call before a sync."""
        if isinstance(error, CommTimeoutError):
            self._note_timeout(OP_NAMES[op], error)

    def combine_input(self, config: BufferConfig) -> torch.Tensor:
        """Return uninitialised `[num_local_experts, num_ranks * max_tokens, hidden]`: y is read in place."""
        shape = (config.num_local_experts, config.num_ranks * config.max_tokens_per_rank, config.hidden)
        return torch.empty(shape, dtype=torch.bfloat16, device=self._platform.device)

    def take_sizes(self, config: BufferConfig) -> Planner:
        """Return the planner of calls of these sizes; raises `InvalidArgument` if they do not fit."""
        if config is self.config:
            return self.core.plans
        sizes = replace(latency_config(replace(config, room_bytes=0), self.rank), room=self.core.config.sections)
        return self.core.plans_of(sizes)

    def sync(self, active_ranks: torch.Tensor | None, deadline: float) -> torch.Tensor:
        """Agree on the members and continue from the same call; raises as `Buffer.sync`. Waits for the GPU."""
        if self.core.num_outstanding:
            raise InvalidState(f"{self.core.num_outstanding} calls have been sent and not received; call their hooks")
        mask = self.core.active_ranks if active_ranks is None else active_ranks
        used = self.core.memory.tags()
        return sync(self.exchange, self._members, mask.tolist(), active_ranks, used, deadline)

    # -- entering an epoch (`Memory`)

    def follow(self, rank: int, process: tuple[int, int]) -> None:
        """Notify kernels of the death of another process."""
        self._notifier.follow(rank, process)

    def prepare(self, agreed: Agreed, fresh: Collection[int]) -> None:
        """Clear all words, those of replaced ranks included, and continue from another call number."""
        self._numbers.judge(agreed)
        step = TAG_JUMP if agreed.is_fresh else TAG_STEP
        active = [rank in agreed.ranks for rank in range(self.config.num_ranks)]
        self.core.set_view(active, agreed.used + step)
        self._given_up = ""

    @property
    def blob(self) -> bytes:  # type: ignore[override]
        """The blob of this rank's memory on the GPU."""
        return self.core.memory.blob

    def move(self, blobs: Mapping[int, bytes]) -> None:
        """Map the memory of ranks that lend another than before; a rank without mappable memory is lost for now."""
        for rank, blob in blobs.items():
            if blob == self._blobs.get(rank):
                continue
            try:
                self.core.memory.replace_peer(rank, self.core.memory.attach_peer(blob))
                self._blobs[rank] = blob
            except expected(EpeeError) as error:
                _log.warning("the memory of rank %d cannot be mapped: %s", rank, error)
        self.core.memory.open_view()

    # -- errors

    def receive(self, phase: ReceivePhase, is_quiet: bool) -> bool:
        """Launch the receive phase of a call, in the epoch of its send phase only.

        Args:
            phase: of the call.
            is_quiet: only if nothing has happened since the last check of a call.

        Returns:
            Whether it was launched; else without side effects.
        """
        core, is_capturing, stream = self.core, False, None
        if is_quiet:
            has_changed = self._given_up or self._closing.asked or self._notifier.told or core.is_poisoned
            if not has_changed and self._members.is_calm():
                stream = core.device.quiet_stream()
            if stream is None:
                return False
        epoch = self.exchange.epoch
        if phase.epoch != epoch and not phase.is_done:  # a second call raises that it is one
            check_hook(phase.epoch, epoch)
        if not is_quiet:
            is_capturing = self._platform.is_capturing()
            if not is_capturing:
                self._members.require_place(is_masked=True)
        try:
            phase.half(stream)
            if not is_capturing and core.device.codes != NO_REPORTS:
                core.check()
        except expected(CommTimeoutError) as error:
            self._note_timeout(phase.op, error)
            raise
        phase.is_done = True
        if phase.handle is not None:
            phase.handle.is_received = True
        return True

    def _require(self, op: str, is_strict: bool, is_capturing: bool) -> None:
        """Raise why a call cannot begin: one has timed out, or (outside of graphs) a needed rank is lost."""
        if self._given_up:
            raise InvalidState(self._given_up)
        if is_capturing:
            return
        now = time.monotonic()
        if is_strict and (now >= self._look_at or self._notifier.told):
            self._look_at = now + LOOK_S
            if dead := self._dead():
                raise self._death(op, dead)
        if self._members.is_calm():
            return
        state = self._members.state()
        self._members.require_place(not is_strict)
        if is_strict:
            self._members.require_all(op, self.core.num_calls)
            self._note_calm(state)
        elif now >= self._masked_look_at:
            self._masked_look_at = now + LOOK_S
            with contextlib.suppress(PeerError):  # left to the mask
                self._members.require_place(is_masked=False)
                self._members.require_all(op, self.core.num_calls)
                self._note_calm(state)

    def _note_calm(self, state: tuple[int, PeerRegions]) -> None:
        """Record that nothing delays any call, strict or not (`quiet_stream`)."""
        if not self.exchange.membership.must_turn:
            self._members.note_calm(state)

    def _note_timeout(self, op: str, error: CommTimeoutError) -> None:
        """Raise that a dead rank is the cause of a timeout, if it is; else allow no call before a sync."""
        if dead := self._dead():
            raise self._death(op, dead) from error
        where = context(op, rank=self.rank, seq=self.core.num_calls, epoch=self.exchange.epoch)
        self._given_up = given_up(where)

    def _dead(self) -> tuple[int, ...]:
        """Return the dead ranks; kernels were notified of some long before their pidfds report it."""
        dead, told = self._watch.dead(), self._notifier.told
        return tuple(sorted({*dead, *told})) if told else dead

    def _death(self, op: str, dead: Sequence[int]) -> RankFailedError:
        seq, epoch = self.core.num_calls, self.exchange.epoch
        where = context(op, rank=self.rank, peer=dead[0], seq=seq, epoch=epoch)
        return death(where, dead, op, seq, epoch, "pass active_ranks= to continue without it")

    def _interrupt(self) -> None:
        if self._closing.asked:
            raise AbortedError("the buffer was closed by another thread")


def _core_of(handle: LatencyHandle) -> CoreHandle:
    """Return the core's part of a checked handle; it is of this buffer, so it was made here."""
    assert isinstance(handle, CudaLatencyHandle)
    return handle.core
