"""Dispatch and combine for CUDA tensors: the GPU side of a `Buffer`.

Data path: a call finds its plan (`gpu/dispatch.py`, `gpu/combine.py`), which launches the kernels; these move the rows,
from GPU to GPU. The CPU waits for nothing but a dispatch's counts, and only when asked to. The exchange of the CPUs
(`members/epoch_members.py`) attaches memory at construction, and serves `all_gather_bytes` and the reasons of refusals;
no call that moves rows waits for it.

Protocol: GPU calls are counted by the kernels themselves. Every call that one rank makes, the others make as well, so a
rank whose call fails before its first kernel takes part by a refusal (`combine.refuse`), which ends the peers' call
whatever it is. Failures that kernels meet later stay in pinned memory until the CPU reads them: at the end of the call,
at the start of the next one, or in `check`. A call that finds such a failure at its start takes place on no rank.

Members, deaths and the mapped memory are handled by `gpu/epochs.py`.

Shapes. Another `CudaPath` over the same memory serves calls of other sizes (`of_sizes`). Nothing above depends on
sizes: only the buffer's own path enters epochs, and all of them share its state (`gpu/shape.py`).
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ...errors import AbortedError, CommTimeoutError, EpeeError, InvalidState, PeerError, RankFailedError, expected
from ...gpu.platform import Platform
from ...gpu.report import NO_REPORTS, REFUSED_INVALID_ARGUMENT, REFUSED_NO_ROOM, NoRoomError
from ...gpu.shapes import ThroughputConfig, slots_of
from ..checks import CombineCall, DispatchCall
from ..config import BufferConfig
from ..handle import Combined, Dispatched, Handle
from ..handle import Payload as GivenPayload
from ..making import told_alike
from ..members.gpu_members import GpuMembers
from ..members.header import OP_DISPATCH, OP_GATHER, OP_NAMES, OPS_OF_CPUS, reason_bytes
from ..members.sync import sync
from ..paths import GpuPath, Making
from ..plans import ALIGNMENT, KnownPlans
from ..streams import CURRENT, CallStream, RunOptions
from .gpu.combine import combine, combine_input, refuse
from .gpu.dispatch import DispatchPlan, plan_of
from .gpu.epochs import AnyEpochs, Epochs
from .gpu.machine import Machine
from .gpu.place import ExpertPlace
from .gpu.shape import PlanKinds, Shape
from .gpu.types import CombineOptions, DispatchOptions, DispatchResult
from .gpu_handle import CudaCombined, CudaDispatched, CudaHandle, HandleMaker
from .order import RANKS_THEN_BIAS
from .partial import lost_weight

CLOSE_GRACE_S = 2.0  # how long `close` lets kernels in flight run before it aborts them
_LEAST_TIMEOUT_S = 1e-3


def throughput_config(config: BufferConfig, rank: int, islands: Sequence[tuple[int, ...]] = ()) -> ThroughputConfig:
    """Return the sizes for which the throughput kernels are made; `islands` as of `Making`."""
    return ThroughputConfig(
        rank=rank,
        num_ranks=config.num_ranks,
        num_experts=config.num_experts,
        hidden=config.hidden,
        num_topk=config.num_topk,
        max_tokens=config.max_tokens_per_rank,
        dtype=config.dtype,
        # no call brings more than each rank's tokens, even if the expert layout is given more rows
        max_recv_rows=min(config.capacity("rank"), config.num_ranks * config.max_tokens_per_rank),
        max_expanded_rows=config.capacity("expert"),
        num_slots=config.num_slots,
        room_slot_bytes=slots_of(config.room_bytes, config.num_slots + 1),
        room_expert_slot_bytes=slots_of(config.room_expert_bytes, ExpertPlace.num_slots),
        islands=tuple(islands),
    )


class CudaPath(GpuPath):
    """The GPU side of one buffer. Construction is collective, except in a replacement that joins a running buffer.

    Args:
        making: the parts that it is made of.
        platform: the GPU.
        timeout: seconds that ranks wait for each other here, and later when memory is attached.

    Attributes:
        machine: kernels, memory, and the order of calls, on the GPU.
        core: the same.
        shape: the sizes of calls.
        num_copied: results that were copied out because no slot was free.
    """

    barrier_op = OP_DISPATCH
    _plan_kinds: PlanKinds | None = None
    _handle_kind = CudaHandle

    def __init__(self, making: Making, platform: Platform, timeout: float) -> None:
        self.config, self.rank, self.exchange, buffer_id, self._watch, self._closing, islands, _ = making
        self._handles = HandleMaker(self.config, self.rank, buffer_id, self.exchange, self._handle_kind)
        super().__init__(platform)
        self._members: GpuMembers = self.exchange.membership
        self._making = making
        self._timeout = timeout
        deadline = time.monotonic() + timeout
        config = throughput_config(self.config, self.rank, islands)
        self.core = self.machine = machine = self._make_machine(config, deadline)
        try:
            self.shape = Shape(machine, config, self._plan_kinds)
            self._epochs = self._make_epochs()
        except BaseException:
            machine.close()  # proxies over hosts live as long as the process otherwise
            raise
        self._notifier = self._epochs.notifier
        machine.interrupt = self._epochs.interrupt
        try:
            self._epochs.begin(deadline)
        except BaseException:
            self._leave()  # before its memory is freed: a rank that can no longer map it sees the reason
            self.close()
            raise

    def _make_epochs(self) -> AnyEpochs:
        """Return the epochs of the buffer."""
        self.machine.reason_of = self._members.reason_of
        return Epochs(self._making, self._members, self.machine)

    def _leave(self) -> None:
        """Report that this rank lends nothing."""
        self._members.leave()

    def _make_machine(self, config: ThroughputConfig, deadline: float) -> Machine:
        if not self._members.is_in:  # receives the others' memory of expert-layout rows with its first combine
            return Machine(self._platform, replace(config, room_expert_slot_bytes=0), self._all_gather)
        self._require_all()
        try:
            with told_alike(self._members.death_in_birth):
                return Machine(self._platform, config, self._all_gather)
        except expected(CommTimeoutError, PeerError, AbortedError):
            raise
        except expected(Exception) as error:
            self.exchange.refuse(OP_GATHER, error, deadline)
            raise

    def _require_all(self) -> None:
        """Raise if the group has lost ranks: ranks that make a buffer together map all memory then."""
        lost = [rank for rank in range(self.config.num_ranks) if rank not in self._members.entered]
        if lost:
            raise RankFailedError(
                f"Buffer: rank(s) {', '.join(map(str, lost))} of the group are lost, and a buffer of this device "
                "needs all when it is made; make a group of the others (new_group) for it, or replace the lost first",
                lost,
                "Buffer",
            )

    def of_sizes(self, config: BufferConfig, buffer_id: int) -> CudaPath:
        """Return a path for calls of other sizes over the same memory, with everything shared but the sizes. Local.

        Args:
            config: the sizes.
            buffer_id: goes into handles.

        Raises:
            InvalidArgument: the kernels cannot do it, or a slot has no room for it.
        """
        shape = self.shape.beside(throughput_config(config, self.rank))
        other = copy.copy(self)
        other.config, other.shape = config, shape
        other._handles = HandleMaker(config, self.rank, buffer_id, self.exchange, self._handle_kind)
        return other

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot of the rank layout."""
        return self.shape.config.slot_bytes

    def set_poison(self, is_poisoned: bool) -> None:
        """Fill receive memory with 0xFF before each use, or not."""
        self.machine.is_poisoned = is_poisoned

    @property
    def num_copied(self) -> int:
        """Results that were copied out because no slot was free."""
        return self.machine.pool.num_copies

    @property
    def nbytes(self) -> int:
        """Bytes of GPU memory that this rank lends."""
        return self.machine.nbytes

    def is_told(self, error: Exception) -> bool:
        """Return whether the peers cannot be notified because the buffer is finished. An earlier call's error is
        unknown to them.
        """
        return isinstance(error, PeerError) or self._closing.asked

    def dispatch(self, call: DispatchCall, deadline: float, run_on: CallStream, run: RunOptions) -> Dispatched:
        """Run one dispatch; raises as `Buffer.dispatch`."""
        known = None if call.handle is None else _own(call.handle)
        is_capturing = self._platform.is_capturing()
        if run.sync and known is None and is_capturing:
            raise InvalidState(
                "a dispatch that waits for its counts cannot be recorded in a CUDA graph; pass sync=False"
            )
        is_exact = run.sync if known is None else known.core.num_recv is not None
        timeout_s = seconds_to(deadline)
        options = DispatchOptions(call.layout, call.expert_alignment, is_exact, run.num_sms, timeout_s, call.capacity)
        route = call.topk_idx if call.mask is None else call.mask
        payload = call.payload
        given, known_core = (payload.rows, payload.scales, call.topk_weights), None if known is None else known.core
        machine = self.machine
        self._epochs.face_death("dispatch", is_capturing)
        try:
            stream = machine.begin()
            plan = plan_of(self.shape, known_core, given, route, options, call.memo)
            got = plan.start(given, route, known_core, timeout_s, stream, is_late=True)
            if not is_capturing:
                machine.check()  # reports of this call's kernels so far
        except expected(EpeeError) as error:
            self._epochs.blame_death("dispatch", error, is_capturing)
            raise
        exchange = self.exchange
        handle = self._handles.made(call, got, known)
        result = CudaDispatched(got, payload.scale_dtype, handle, exchange.epoch, self._epochs.lost)
        if run_on.is_own:
            self._end_dispatch(run_on, (payload.rows, payload.scales, route, call.topk_weights), got, result)
        return result

    def _end_dispatch(
        self, run_on: CallStream, inputs: tuple[torch.Tensor | None, ...], got: DispatchResult, result: CudaDispatched
    ) -> None:
        """Record what a dispatch on the buffer's own stream reads and returns, and its event."""
        handle: Any = result.handle
        kept = (handle.core.words, handle.row_src_rank, handle.row_src_token, handle.row_src_k)
        got.readers.extend(run_on.keep(inputs, (*result.values, got.topk_idx, got.topk_weights, *kept)))
        result.event = run_on.event(self.config.device, got.readers[0])

    def combine(self, call: CombineCall, deadline: float, run_on: CallStream, run: RunOptions) -> Combined:
        """Run one combine; raises as `Buffer.combine`."""
        handle = _own(call.handle)
        bias = call.bias
        if len(bias) > 1 and bias[0].dtype != bias[1].dtype:
            bias = tuple(item.float() for item in bias)  # exact; the dtype of the sum
        order = None if call.order is RANKS_THEN_BIAS else call.order
        options = CombineOptions(run.num_sms, seconds_to(deadline), order)
        is_capturing = self._platform.is_capturing()
        self._epochs.face_death("combine", is_capturing)
        try:
            self.machine.begin()
            out, weights = combine(
                self.shape, call.y, handle.core, call.topk_weights, bias, call.out, options, call.memo
            )
            if not is_capturing:
                self.machine.check()  # reports of this call's kernels so far
        except expected(EpeeError) as error:
            self._epochs.blame_death("combine", error, is_capturing)
            raise
        if run_on.is_own:
            run_on.keep((call.y, call.topk_weights, *bias, handle.core.words), (out, weights))
        lost = self._epochs.lost
        return Combined(
            out,
            weights,
            run_on.event(self.config.device, self.machine.stream),
            self.config.num_ranks,
            self.exchange.epoch,
            lost,
            self._lost_weight(handle, lost),
        )

    def barrier_again(self, timeout_s: float) -> bool:
        """Let the streams meet if the fast path is allowed; else return False."""
        if self.quiet_stream() is None:
            return False
        try:
            self.machine.barrier(timeout_s)
        except expected(EpeeError) as error:
            self._epochs.blame_death("barrier", error, is_capturing=False)
            raise
        return True

    def barrier(self, deadline: float) -> None:
        """Let the ranks meet on their current streams; raises as `Buffer.barrier`."""
        is_capturing = self._platform.is_capturing()
        self._epochs.face_death("barrier", is_capturing)
        try:
            self.machine.begin()
            self.machine.barrier(seconds_to(deadline))
        except expected(EpeeError) as error:
            self._epochs.blame_death("barrier", error, is_capturing)
            raise

    def combine_input(self, handle: Handle, dtype: torch.dtype) -> torch.Tensor:
        """Return uninitialised `[num_recv, hidden]`: lent memory, or ordinary memory when none is free."""
        is_capturing = self._platform.is_capturing()
        self._epochs.face_death("combine_input", is_capturing, needs_all=False)
        try:
            place = combine_input(self.shape, _own(handle).core, dtype)
        except expected(EpeeError) as error:
            self._epochs.blame_death("combine_input", error, is_capturing)
            raise
        if place is not None:
            return place
        return torch.empty(handle.num_recv, self.config.hidden, dtype=dtype, device=self.config.device)

    def sync(self, active_ranks: torch.Tensor | None, deadline: float) -> torch.Tensor:
        """Agree on the members and continue in a new epoch; raises as `Buffer.sync`. Waits for the GPU."""
        if self._platform.is_capturing():
            raise InvalidState("sync waits for the GPU, so it cannot be recorded in a CUDA graph; call it before")
        marks = [1] * self.config.num_ranks if active_ranks is None else active_ranks.tolist()
        return sync(self.exchange, self._members, marks, active_ranks, self.machine.tags(), deadline)

    def refuse(self, op: int, error: Exception, deadline: float) -> None:
        """Take part in the peers' next call as the rank that cannot make it. Does nothing while a graph is recorded."""
        if op in OPS_OF_CPUS:
            self.exchange.refuse(op, error, deadline)
        elif self._platform.is_capturing():
            return
        elif isinstance(error, NoRoomError):
            refuse(self.shape, REFUSED_NO_ROOM, seconds_to(deadline))
        else:
            reason, members = reason_bytes(error), self._members
            code, timeout_s = REFUSED_INVALID_ARGUMENT, seconds_to(deadline)
            refuse(self.shape, code, timeout_s, lambda call: members.post_reason(call, reason))

    def check(self) -> None:
        """Raise what the kernels have reported since the last check."""
        is_capturing = self._platform.is_capturing()
        self._epochs.face_death("check", is_capturing, needs_all=False)
        try:
            self.machine.check()
        except expected(EpeeError) as error:
            self._epochs.blame_death("check", error, is_capturing)
            raise

    def close(self) -> None:
        """Free all memory after the kernels in flight; they are aborted if they wait for peers. Idempotent."""
        self._notifier.stop()
        self.machine.device.drain(CLOSE_GRACE_S)
        self.machine.close()
        self._epochs.close()

    def _all_gather(self, data: bytes) -> list[bytes]:
        if not self._members.is_in:  # a replacement maps the others' memory when they have admitted it
            return [data] * self.config.num_ranks
        return self.exchange.all_gather_bytes(data, time.monotonic() + self._timeout)

    def quiet_stream(self) -> int | None:
        """Return the current stream if a cached call needs no checks (fast path allowed), else None.

        Then nothing has happened since the last check. The call itself meets a death that has not been reported yet,
        and its kernels are notified of it.
        """
        is_quiet = (
            not (self._closing.asked or self._notifier.told)
            and self._members.is_calm()
            and self.exchange.reduced_members is None
        )
        return self.machine.quiet_stream() if is_quiet else None

    def dispatch_again(
        self,
        known: KnownPlans,
        x: GivenPayload,
        topk_idx: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        others: tuple[torch.Tensor | None, Handle | None, int | None],
        layout: str,
        expert_alignment: int,
        num_sms: int | None,
        sync: bool,
        run_on: CallStream = CURRENT,
    ) -> CudaDispatched | None:
        """Run a cached dispatch if the fast path is allowed; otherwise return None without side effects.

        Args:
            known: the cached plans of the buffer.
            others: the mask, the handle and the capacity.
            run_on: the stream of the call.
            Others as of `Buffer.dispatch`.
        """
        stream = self.quiet_stream()
        if stream is None:
            return None
        plan = known.dispatch(x, topk_idx, topk_weights, others, (layout, expert_alignment), num_sms, sync)
        if plan is None:
            return None
        mask, given, _ = others
        handle: Any = given  # as all of these, it has the properties of a handle whose call has passed the checks
        route = mask if topk_idx is None else topk_idx
        known_core = None if handle is None else handle.core
        values, scales = (x, None) if isinstance(x, torch.Tensor) else x
        got = plan.start((values, scales, topk_weights), route, known_core, self._timeout, stream, is_late=True)
        if self.machine.codes != NO_REPORTS:
            self.machine.check()  # reports of this call's kernels so far
        epoch = self.exchange.epoch
        if handle is None:
            made = self._handles.like(plan, got, epoch)
        else:
            made = handle if got.handle is known_core else replace(handle, core=got.handle)
        result = CudaDispatched(got, None if scales is None else scales.dtype, made, epoch, ())
        if run_on.is_own:
            self._end_dispatch(run_on, (values, scales, route, topk_weights), got, result)
        return result

    def dispatch_like(
        self, plan: DispatchPlan, x: GivenPayload, topk_idx: torch.Tensor, topk_weights: torch.Tensor
    ) -> CudaDispatched | None:
        """Run a dispatch of a plan, as `dispatch_again`; all of the result is made at once.

        Args:
            plan: of a call whose arguments equal these, but for addresses.
            x, topk_idx, topk_weights: as of `Buffer.dispatch`.
        """
        stream, machine = self.quiet_stream(), self.machine
        values, scales = (x, None) if isinstance(x, torch.Tensor) else x
        if stream is None or plan.max_sms != machine.max_sms or values.data_ptr() % ALIGNMENT:
            return None
        got = plan.start((values, scales, topk_weights), topk_idx, None, self._timeout, stream, is_late=False)
        if machine.codes != NO_REPORTS:
            machine.check()
        epoch = self.exchange.epoch
        handle = self._handles.like(plan, got, epoch)
        result = CudaDispatched(got, None if scales is None else scales.dtype, handle, epoch, ())
        result.topk_idx, result.topk_weights = got.topk_idx, got.topk_weights
        result.num_tokens_per_expert = handle.num_tokens_per_expert
        return result

    def combine_again(
        self,
        known: KnownPlans,
        y: torch.Tensor,
        handle: object,
        topk_weights: torch.Tensor | None,
        num_sms: int | None,
        run_on: CallStream = CURRENT,
    ) -> Combined | None:
        """Run a cached combine without bias and `out`, as `dispatch_again`."""
        stream = self.quiet_stream()
        if stream is None or type(handle) is not CudaHandle:
            return None
        epoch = self.exchange.epoch
        if handle.buffer_id != known.buffer_id or handle.epoch != epoch:
            return None
        found = known.combine(y, handle, topk_weights, num_sms)
        if found is None:
            return None
        plan, slot = found
        out = plan.new_out()
        weights = None if topk_weights is None or plan.new_weights is None else plan.new_weights()
        plan.start((y, topk_weights, ()), handle.core, slot, out, weights, self._timeout, stream)
        if self.machine.codes != NO_REPORTS:
            self.machine.check()
        lost = None if handle.capacity is None and handle.routing is None else self._lost_weight(handle, ())
        result = CudaCombined(out, weights, self.config, stream, epoch, lost)
        if run_on.is_own:
            run_on.keep((y, topk_weights, handle.core.words), (out, weights))
            result.event = run_on.event(self.config.device, stream)
        return result

    def blame(self, op: int, error: Exception) -> None:
        """Raise that a rank is dead if that is why a call has failed."""
        if isinstance(error, EpeeError):
            self._epochs.blame_death(OP_NAMES[op], error, is_capturing=False)

    def _lost_weight(self, handle: CudaHandle, lost: Sequence[int]) -> Callable[[], torch.Tensor] | None:
        """Return a function that computes the weights that a combine has lost, or None if nothing can be lost."""
        if handle.routing is None and handle.capacity is None:
            return None

        def weigh() -> torch.Tensor:
            """Compute them on demand, because few programs ask."""
            routing = handle.kept_routing if handle.routing is None else handle.routing
            return lost_weight(routing, lost, self.config, handle.dropped)

        return weigh


def _own(handle: Handle) -> CudaHandle:
    """Return a handle as the type of this path; checked handles are of this buffer, so it is one."""
    assert isinstance(handle, CudaHandle), OP_NAMES
    return handle


def seconds_to(deadline: float) -> float:
    """Return the timeout for kernels of a call that ends at `deadline`."""
    return max(_LEAST_TIMEOUT_S, deadline - time.monotonic())
