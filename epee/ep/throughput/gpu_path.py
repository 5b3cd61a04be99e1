"""Dispatch and combine for CUDA tensors: a `Buffer`'s calls handed to throughput mode.

Data path: `throughput/gpu/core.py` and its kernels move the rows, from GPU to GPU. The host side
(`control/messages.py`) serves to attach memory at construction, `all_gather_bytes`, and the reasons of refusals; no
call that moves rows waits for it.

Protocol: GPU calls are counted by the kernels themselves. Every call that one rank makes, the others make as well, so a
rank whose call fails before its first kernel takes part by a refusal (`Throughput.refuse`), which ends the peers' call
whatever it is. Failures that kernels meet later lie in pinned memory until the host looks: at the end of the call, at
the start of the next one, or in `check`. A call that finds such a failure at its start takes place on no rank.

A crash leaves kernels of the peers waiting; a thread that sees the death tells them (`gpu/death_notifier.py`),
and the call ends with an error that names it. `sync` agrees on who is left and goes on from a common call number in a
new epoch: the kernels read the mask from memory, host-side exchanges are among its members, older handles are stale.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial

import torch

from ...errors import (
    AbortedError,
    CommTimeoutError,
    EpeeError,
    InvalidArgument,
    InvalidState,
    MismatchError,
    PeerError,
    RankFailedError,
    context,
)
from ...view.process.detector import DeathWatch
from ..checks import CombineCall, DispatchCall
from ..config import BufferConfig
from ..control.inbox import OP_GATHER, OP_NAMES
from ..control.membership import Agreed
from ..control.messages import ControlPlane, reason_bytes
from ..gpu.death_notifier import DeathNotifier
from ..gpu.params import REMEMBERED_CALLS
from ..gpu.platform import Platform
from ..handle import Combined, Dispatched, Handle, Payload, Routing
from ..membership import path_lane
from ..membership.memory import CallNumbers, Memory
from ..streams import Lane, RunOptions
from .gpu.core import Throughput
from .gpu.types import CombineOptions, DispatchOptions, Received
from .gpu_handle import CudaHandle
from .order import RANKS_THEN_BIAS
from .partial import lost_weight
from .shapes import ThroughputConfig

CLOSE_GRACE_S = 2.0  # how long `close` lets kernels in flight go on before it aborts them
_LEAST_TIMEOUT_S = 1e-3


def throughput_config(config: BufferConfig, rank: int) -> ThroughputConfig:
    """Return what throughput mode is made for."""
    return ThroughputConfig(
        rank=rank,
        num_ranks=config.num_ranks,
        num_experts=config.num_experts,
        hidden=config.hidden,
        num_topk=config.num_topk,
        max_tokens=config.max_tokens_per_rank,
        dtype=config.dtype,
        # no call brings more than each rank's tokens, also where the expert layout is given more rows
        max_recv_rows=min(config.capacity("rank"), config.num_ranks * config.max_tokens_per_rank),
        max_expanded_rows=config.capacity("expert"),
        num_slots=config.num_slots,
    )


class CudaPath(Memory):
    """The GPU end of one buffer. Collective to make.

    Args:
        config: of the buffer.
        rank: this rank.
        control: its host side.
        buffer_id: goes into handles.
        platform: the GPU.
        watch: knows which ranks are dead.
        is_closing: whether somebody wants to close the buffer.
        timeout: seconds that ranks wait for each other here, and later when memory is attached.

    Attributes:
        num_copied: results that were copied out because no slot was free.
    """

    def __init__(
        self,
        config: BufferConfig,
        rank: int,
        control: ControlPlane,
        buffer_id: int,
        platform: Platform,
        watch: DeathWatch,
        is_closing: Callable[[], bool],
        timeout: float,
    ) -> None:
        self.config = config
        self.rank = rank
        self.control = control
        self.num_copied = 0
        self._buffer_id = buffer_id
        self._platform = platform
        self._watch = watch
        self._lane = path_lane.lane_of(control)
        self._is_closing = is_closing
        self._timeout = timeout
        self._require_all()
        try:
            with path_lane.told_alike(self._lane):
                self._core = Throughput(platform, throughput_config(config, rank), self._all_gather)
        except (CommTimeoutError, PeerError, AbortedError):
            raise
        except Exception as error:
            control.refuse(OP_GATHER, error, time.monotonic() + timeout)
            raise
        self._numbers = CallNumbers(self._core.tags, platform.is_capturing)
        self._core.set_hooks(self._interrupt, control.exchange.reason_of)
        self._notifier = DeathNotifier(self._core.mark_dead, self._core.waiting, f"epee-throughput-{rank}")
        try:
            self._notifier.start(self._lane.processes)
        except BaseException:
            self._notifier.stop()
            self._core.close()
            raise
        self._lane.memory = self

    def _require_all(self) -> None:
        """Raise where the group has lost ranks: all memory is mapped when the buffer is made."""
        members = self.control.exchange.members
        lost = [rank for rank in range(self.config.num_ranks) if rank not in members]
        if lost:
            raise RankFailedError(
                f"Buffer: rank(s) {', '.join(map(str, lost))} of the group are lost, and a buffer of this device "
                "needs all; make a group of the others (new_group) for it",
                lost,
                "Buffer",
            )

    def set_poison(self, is_poisoned: bool) -> None:
        """Fill receive memory with 0xFF before each use, or not."""
        self._core.set_poison(is_poisoned)

    @property
    def max_num_sms(self) -> int:
        """Multiprocessors of the GPU."""
        return self._platform.limits.num_sms

    @property
    def nbytes(self) -> int:
        """Bytes of GPU memory that this rank lends."""
        return self._core.nbytes

    def num_announced(self, op: int) -> int:
        """Return how many calls of this kind the peers have heard of: on the host, or on the GPU."""
        return self.control.exchange.seq if op == OP_GATHER else self._core.num_calls

    def is_told(self, error: Exception) -> bool:
        """Tell whether the peers cannot be told: the buffer is done. An earlier call's error they do not know of."""
        return isinstance(error, PeerError) or self._is_closing()

    def dispatch(self, call: DispatchCall, deadline: float, lane: Lane, run: RunOptions) -> Dispatched:
        """Run one dispatch; raises as `Buffer.dispatch`."""
        known = None if call.handle is None else _own(call.handle)
        is_capturing = self._platform.is_capturing()
        if run.sync and known is None and is_capturing:
            raise InvalidState(
                "a dispatch that waits for its counts cannot be recorded in a CUDA graph; pass sync=False"
            )
        is_exact = run.sync if known is None else known.core.num_recv is not None
        options = DispatchOptions(call.layout, call.expert_alignment, is_exact, run.num_sms, _seconds_to(deadline))
        route = call.topk_idx if call.mask is None else call.mask
        payload = call.payload
        core = self._core
        num_copies = core.num_copies
        self._face_death("dispatch", is_capturing)
        try:
            got = core.dispatch(
                payload.rows, payload.scales, route, call.topk_weights, None if known is None else known.core, options
            )
            if not is_capturing:
                core.check()  # what the kernels of this call have reported already
        except EpeeError as error:
            self._blame_death("dispatch", error, is_capturing)
            raise
        self.num_copied += core.num_copies - num_copies
        handle = self._handle(call, got, known)
        x = _payload(got, payload.scale_dtype)
        if lane.is_own:
            inputs = (payload.rows, payload.scales, route, call.topk_weights)
            values = x if isinstance(x, tuple) else (x,)
            kept = (handle.core.words, handle.row_src_rank, handle.row_src_token, handle.row_src_k)
            got.readers.extend(lane.keep(inputs, (*values, got.topk_idx, got.topk_weights, *kept)))
        return Dispatched(
            x=x,
            topk_idx=got.topk_idx,
            topk_weights=got.topk_weights,
            num_tokens_per_expert=handle.num_tokens_per_expert,
            handle=handle,
            event=lane.event(self.config.device, got.readers[0]),
            num_ranks=self.config.num_ranks,
            readers=got.readers,
            epoch=self.control.exchange.epoch,
            lost_ranks=self._lost,
        )

    def combine(self, call: CombineCall, deadline: float, lane: Lane, run: RunOptions) -> Combined:
        """Run one combine; raises as `Buffer.combine`."""
        handle = _own(call.handle)
        bias = call.bias
        if len(bias) > 1 and bias[0].dtype != bias[1].dtype:
            bias = tuple(item.float() for item in bias)  # exact, and what the sum is in
        order = None if call.order is RANKS_THEN_BIAS else call.order
        options = CombineOptions(run.num_sms, _seconds_to(deadline), order)
        is_capturing = self._platform.is_capturing()
        self._face_death("combine", is_capturing)
        try:
            out, weights = self._core.combine(call.y, handle.core, call.topk_weights, bias, call.out, options)
            if not is_capturing:
                self._core.check()  # what the kernels of this call have reported already
        except EpeeError as error:
            self._blame_death("combine", error, is_capturing)
            raise
        if lane.is_own:
            lane.keep((call.y, call.topk_weights, *bias, handle.core.words), (out, weights))
        lost, routing = self._lost, handle.routing
        return Combined(
            out,
            weights,
            lane.event(self.config.device, self._platform.stream()),
            num_ranks=self.config.num_ranks,
            epoch=self.control.exchange.epoch,
            lost_ranks=lost,
            lost=None if routing is None else partial(lost_weight, routing, lost, self.config),
        )

    def barrier(self, deadline: float) -> None:
        """Let the ranks meet on their current streams; raises as `Buffer.barrier`."""
        is_capturing = self._platform.is_capturing()
        self._face_death("barrier", is_capturing)
        try:
            self._core.barrier(_seconds_to(deadline))
        except EpeeError as error:
            self._blame_death("barrier", error, is_capturing)
            raise

    def combine_input(self, handle: Handle, dtype: torch.dtype) -> torch.Tensor:
        """Return uninitialised `[num_recv, hidden]`: lent memory, or ordinary memory when none is free."""
        is_capturing = self._platform.is_capturing()
        self._face_death("combine_input", is_capturing, needs_all=False)
        try:
            place = self._core.combine_input(_own(handle).core, dtype)
        except EpeeError as error:
            self._blame_death("combine_input", error, is_capturing)
            raise
        if place is not None:
            return place
        return torch.empty(handle.num_recv, self.config.hidden, dtype=dtype, device=self.config.device)

    def sync(self, active_ranks: torch.Tensor | None, deadline: float) -> torch.Tensor:
        """Agree on who takes part and go on in a new epoch; raises as `Buffer.sync`. Waits for the GPU."""
        if self._platform.is_capturing():
            raise InvalidState("sync waits for the GPU, so it cannot be recorded in a CUDA graph; call it before")
        marks = [1] * self.config.num_ranks if active_ranks is None else active_ranks.tolist()
        return path_lane.sync(self.control, self._lane, marks, active_ranks, self._core.tags(), deadline)

    def prepare(self, agreed: Agreed, fresh: Collection[int]) -> None:
        """Let the kernels go on in the epoch's view, above all call numbers that were used (`Memory`)."""
        self._numbers.judge(agreed)
        self._core.bury(self._watch.dead())  # ended, with their GPUs' work; the notifier knows of some before
        active = [rank in agreed.ranks for rank in range(self.config.num_ranks)]
        self._core.set_view(active, agreed.used + REMEMBERED_CALLS)

    def refuse(self, op: int, error: Exception, deadline: float) -> None:
        """Take part in the peers' next call as the rank that cannot make it. Nothing while a graph is recorded."""
        if op == OP_GATHER:
            self.control.refuse(op, error, deadline)
        elif not self._platform.is_capturing():
            reason = reason_bytes(error)
            self._core.refuse(_seconds_to(deadline), lambda call: self.control.exchange.post_reason(call, reason))

    def check(self) -> None:
        """Raise what the kernels have reported since the last look."""
        is_capturing = self._platform.is_capturing()
        self._face_death("check", is_capturing, needs_all=False)
        try:
            self._core.check()
        except EpeeError as error:
            self._blame_death("check", error, is_capturing)
            raise

    def join(self) -> None:
        """Let the current stream go on behind everything that this buffer has put on any other."""
        self._core.join()

    def abort(self) -> None:
        """End the waits of the kernels in flight, from any thread."""
        self._core.abort()

    def close(self) -> None:
        """Give back all memory, behind the kernels in flight; they are aborted when they wait for peers. Idempotent."""
        self._notifier.stop()
        self._core.drain(CLOSE_GRACE_S)
        self._core.close()
        self._lane.memory = Memory()  # no circle keeps a closed path

    def _all_gather(self, data: bytes) -> list[bytes]:
        return self.control.all_gather_bytes(data, time.monotonic() + self._timeout)

    def _interrupt(self) -> None:
        """Called while the host waits for the GPU: a death, or the wish to close, ends the kernels' waits."""
        if self._is_closing():
            self._core.abort()
        elif self._dead():
            self._core.mark_dead(self._watch.dead())

    @property
    def _lost(self) -> tuple[int, ...]:
        """Ranks that the view leaves out."""
        exchange = self.control.exchange
        if not exchange.is_reduced:
            return ()
        return tuple(rank for rank in range(self.config.num_ranks) if rank not in exchange.members)

    def _dead(self) -> tuple[int, ...]:
        """Return the members that are dead."""
        dead = self._watch.dead()
        if not dead:
            return ()
        self._core.bury(dead)
        return tuple(rank for rank in dead if rank in self.control.exchange.members)

    def _face_death(self, op: str, is_capturing: bool, needs_all: bool = True) -> None:
        """Refuse a call once a rank is dead or, if it `needs_all`, gone from the epoch in another way."""
        if is_capturing:
            return
        told = self._notifier.told  # before the kernel of the system says so; what kernels were told stays true
        if dead := self._dead() or tuple(rank for rank in told if rank in self.control.exchange.members):
            raise self._death(op, dead)
        self._lane.require_place(is_masked=False)
        if needs_all:
            self._lane.require_members(op, self._core.num_calls)

    def _blame_death(self, op: str, error: EpeeError, is_capturing: bool) -> None:
        """Raise that a rank is dead where that is the cause of `error`.

        A peer that refused its call and ended its process right after is no such case: the refusal is what happened.
        """
        has_cause = isinstance(error, (PeerError, InvalidArgument, MismatchError))
        if not (has_cause or is_capturing or self._is_closing()) and (dead := self._dead()):
            raise self._death(op, dead) from error

    def _death(self, op: str, dead: Sequence[int]) -> RankFailedError:
        seq, epoch = self._core.num_calls, self.control.exchange.epoch
        names = ", ".join(str(rank) for rank in dead)
        return RankFailedError(
            f"{context(op, rank=self.rank, peer=dead[0], seq=seq, epoch=epoch)}: rank {names} is dead (its process "
            "ended); call buffer.sync() on all survivors, then the next call runs without it",
            dead,
            op,
            seq,
            epoch,
            "process ended",
        )

    def _handle(self, call: DispatchCall, got: Received, known: CudaHandle | None) -> CudaHandle:
        if known is not None:
            return known if got.handle is known.core else replace(known, core=got.handle)
        return CudaHandle(
            buffer_id=self._buffer_id,
            seq=got.handle.call_idx,
            epoch=self.control.exchange.epoch,
            layout=call.layout,
            expert_alignment=call.expert_alignment,
            num_tokens=got.handle.num_tokens,
            num_topk=self.config.num_topk,
            with_topk=got.handle.has_topk,
            core=got.handle,
            rank=self.rank,
            num_ranks=self.config.num_ranks,
            num_local_experts=self.config.num_local_experts,
            num_rows=got.x.shape[0],
            row_src_rank=got.src_rank,
            row_src_token=got.row_src_token,
            row_src_k=got.src_k,
            kept=got.kept,
            routing=self._routing(call),
        )

    def _routing(self, call: DispatchCall) -> Routing | None:
        """Return a copy of the routing where the view leaves ranks out, for `lost_weight`."""
        if not self.control.exchange.is_reduced:
            return None
        return Routing(
            *(None if given is None else given.clone() for given in (call.topk_idx, call.topk_weights, call.mask))
        )


def _own(handle: Handle) -> CudaHandle:
    """Return a handle as what this path makes; checked handles are of this buffer, so it is one."""
    assert isinstance(handle, CudaHandle), OP_NAMES
    return handle


def _payload(got: Received, scale_dtype: torch.dtype | None) -> Payload:
    if got.scales is None:
        return got.x
    assert scale_dtype is not None
    return got.x, got.scales.view(scale_dtype)


def _seconds_to(deadline: float) -> float:
    return max(_LEAST_TIMEOUT_S, deadline - time.monotonic())
