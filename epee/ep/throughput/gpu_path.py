"""Dispatch and combine for CUDA tensors: a `Buffer`'s calls handed to the GPU core.

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

Replacements. The kernels' arguments, in graphs as well, hold addresses of the peers' memory. So a newcomer's memory is
mapped where that of the process before it was, and a graph from before serves on. It goes by `membership/synced.py`:

    newcomer            makes its memory, with stand-ins where the others' will be (`gpu/lent.py`), and
                        waits in `sync`
    every member        prepares: its GPU is idle; it clears the words that others have stored for a rank which has
                        another process now, and goes on `TAG_JUMP` above all call numbers that anybody has used
                        (`REMEMBERED_CALLS` where nobody is new); from here on its memory serves the new epoch
    every member        lends: blobs of the two regions that it has had from the beginning lie behind its inbox
    every member        waits for the others' inboxes, maps what differs from what it has, and enters; its kernels run
                        only then, and reach only who is prepared
    expert layout       its memory is lent at the first combine; the first one of an epoch maps it with newcomers, too
                        (`throughput/gpu/place.py`)

Who dies between two of these steps is lost in the calls of the epoch, and so is a newcomer whose constructor fails
there, until it comes again and all sync. Who cannot map a living newcomer's memory does not enter: its call says so,
which nobody else hears of, the next one tries again, and the others wait for it meanwhile, up to their time-outs.
Graphs that are replayed between preparing and entering reach nobody: their dispatches fail.
Another rank may be lost at the same time: the view leaves it out, on the newcomer a stand-in is there until it is
replaced itself.

A process that was stopped, voted out and replaced may wake up and go on. Its words bear older numbers and count for
nothing; slots that it may still write are not lent until it has ended (`slots.py`, ghosts). Not promised: that its
words do not overwrite those of its successor, whose call then times out.

Shapes. Another `CudaPath` over the same memory serves calls of other sizes (`of_sizes`). Of what is said above none has
to do with sizes: the buffer's own path alone enters epochs, and all of them see what it sees (`gpu/shape.py`).
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

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
from ...memory.host import HostRegion
from ...view.process.detector import DeathWatch, is_leaving
from ..checks import CombineCall, DispatchCall
from ..config import BufferConfig
from ..control.inbox import OP_DISPATCH, OP_GATHER, OP_NAMES
from ..control.membership import Agreed
from ..control.messages import reason_bytes
from ..control.words import inbox_layout
from ..event import Event
from ..gpu.death_notifier import DeathNotifier
from ..gpu.params import REMEMBERED_CALLS
from ..gpu.platform import Platform
from ..gpu.report import REFUSED_NO_ROOM, NoRoomError
from ..handle import Combined, Dispatched, DispatchRouting, Handle
from ..handle import Payload as GivenPayload
from ..membership import path_lane
from ..membership.memory import TAG_JUMP, CallNumbers, Memory, lend_blob, lent_blob
from ..paths import Making
from ..streams import Lane, RunOptions
from .gpu.combine import CombinePlan
from .gpu.core import Throughput
from .gpu.dispatch import DispatchPlan
from .gpu.place import ExpertPlace
from .gpu.slots import FIRST_GHOST
from .gpu.types import CombineOptions, DispatchOptions, DispatchResult, ThroughputHandle
from .gpu_handle import CudaDispatched, CudaHandle
from .order import RANKS_THEN_BIAS
from .partial import lost_weight
from .shapes import ThroughputConfig, slots_of

_log = logging.getLogger(__name__)
CLOSE_GRACE_S = 2.0  # how long `close` lets kernels in flight go on before it aborts them
_LEAST_TIMEOUT_S = 1e-3


def throughput_config(config: BufferConfig, rank: int) -> ThroughputConfig:
    """Return the sizes for which the throughput kernels are made."""
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
        room_slot_bytes=slots_of(config.room_bytes, config.num_slots + 1),
        room_expert_slot_bytes=slots_of(config.room_expert_bytes, ExpertPlace.num_slots),
    )


class CudaPath(Memory):
    """The GPU end of one buffer. Collective to make, except where it takes part in a running buffer.

    Args:
        making: what it is made of.
        platform: the GPU.
        timeout: seconds that ranks wait for each other here, and later when memory is attached.

    Attributes:
        machine: kernels, memory, and the order of calls, on the GPU.
        num_copied: results that were copied out because no slot was free.
    """

    barrier_op = OP_DISPATCH

    def __init__(self, making: Making, platform: Platform, timeout: float) -> None:
        self.config, self.rank, self.control, self._buffer_id, self._watch, self._closing = making
        control = self.control
        self._platform = platform
        self._lane = path_lane.lane_of(control)
        self._timeout = timeout
        self._ghosts = DeathWatch()  # processes that had a rank which another one has now
        self._ghost_of: dict[tuple[int, int], int] = {}  # their numbers there
        self._fresh: dict[int, set[int]] = {}  # the ghosts of ranks that have changed hands since the last epoch
        deadline = time.monotonic() + timeout
        self._core = self._make_core(deadline)
        self.machine = self._core.machine
        self._device = self.machine.device
        self._numbers = CallNumbers(self.machine.tags, platform.is_capturing)
        self.machine.interrupt = self._interrupt
        self.machine.reason_of = lambda src, call: control.exchange.words.reason_of(src, call)
        self._notifier = DeathNotifier(self._device.mark_dead, self._device.waiting, f"epee-throughput-{self.rank}")
        try:
            self._notifier.start(self._lane.processes)
            self._lane.memory = self
            if not self._lane.is_in:
                self._lane.join(deadline)
        except BaseException:
            self._lane.leave()  # before its memory goes: who cannot map that any more sees why
            self.close()
            raise

    def _make_core(self, deadline: float) -> Throughput:
        config = throughput_config(self.config, self.rank)
        if not self._lane.is_in:  # comes to the others' place for expert-layout rows with its first combine
            return Throughput(self._platform, replace(config, room_expert_slot_bytes=0), self._all_gather)
        self._require_all()
        try:
            with path_lane.told_alike(self._lane):
                return Throughput(self._platform, config, self._all_gather)
        except (CommTimeoutError, PeerError, AbortedError):
            raise
        except Exception as error:
            self.control.refuse(OP_GATHER, error, deadline)
            raise

    def _require_all(self) -> None:
        """Raise where the group has lost ranks: who makes a buffer together maps all memory then."""
        members = self.control.exchange.members
        lost = [rank for rank in range(self.config.num_ranks) if rank not in members]
        if lost:
            raise RankFailedError(
                f"Buffer: rank(s) {', '.join(map(str, lost))} of the group are lost, and a buffer of this device "
                "needs all when it is made; make a group of the others (new_group) for it, or take others in first",
                lost,
                "Buffer",
            )

    def of_sizes(self, config: BufferConfig, buffer_id: int) -> CudaPath:
        """Return what serves calls of other sizes over the same memory, and shares all but what sizes decide. Local.

        Args:
            config: the sizes.
            buffer_id: goes into handles.

        Raises:
            InvalidArgument: the kernels cannot do it, or a slot has no room for it.
        """
        core = self._core.of_sizes(throughput_config(config, self.rank))
        other = copy.copy(self)
        other.config, other._buffer_id, other._core = config, buffer_id, core
        return other

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot of the rank layout."""
        return self._core.config.slot_bytes

    def set_poison(self, is_poisoned: bool) -> None:
        """Fill receive memory with 0xFF before each use, or not."""
        self.machine.is_poisoned = is_poisoned

    @property
    def num_copied(self) -> int:
        """Results that were copied out because no slot was free."""
        return self.machine.pool.num_copies

    @property
    def max_num_sms(self) -> int:
        """Multiprocessors of the GPU."""
        return self._platform.limits.num_sms

    @property
    def takes_replacements(self) -> bool:
        """Whether `sync` takes in processes that took the places of lost ranks."""
        return self.control.exchange.membership.takes_replacements

    @property
    def is_recorded(self) -> bool:
        """Whether a CUDA graph has recorded calls."""
        return self._device.is_recorded

    @property
    def nbytes(self) -> int:
        """Bytes of GPU memory that this rank lends."""
        return self.machine.nbytes

    def num_announced(self, op: int) -> int:
        """Return how many calls of this kind the peers have heard of: on the host, or on the GPU."""
        return self.control.exchange.seq if op == OP_GATHER else self.machine.num_calls

    def is_told(self, error: Exception) -> bool:
        """Tell whether the peers cannot be told: the buffer is done. An earlier call's error they do not know of."""
        return isinstance(error, PeerError) or self._closing.asked

    def dispatch(self, call: DispatchCall, deadline: float, lane: Lane, run: RunOptions) -> Dispatched:
        """Run one dispatch; raises as `Buffer.dispatch`."""
        known = None if call.handle is None else _own(call.handle)
        is_capturing = self._platform.is_capturing()
        if run.sync and known is None and is_capturing:
            raise InvalidState(
                "a dispatch that waits for its counts cannot be recorded in a CUDA graph; pass sync=False"
            )
        is_exact = run.sync if known is None else known.core.num_recv is not None
        timeout_s = _seconds_to(deadline)
        options = DispatchOptions(call.layout, call.expert_alignment, is_exact, run.num_sms, timeout_s, call.capacity)
        route = call.topk_idx if call.mask is None else call.mask
        payload = call.payload
        core = self._core
        self._face_death("dispatch", is_capturing)
        try:
            got = core.dispatch(
                payload.rows,
                payload.scales,
                route,
                call.topk_weights,
                None if known is None else known.core,
                options,
                call.memo,
            )
            if not is_capturing:
                self.machine.check()  # what the kernels of this call have reported already
        except EpeeError as error:
            self._blame_death("dispatch", error, is_capturing)
            raise
        exchange = self.control.exchange
        handle = self._handle(call, got, known)
        result = CudaDispatched(got, payload.scale_dtype, handle, exchange.epoch, self.lost)
        if lane.is_own:
            inputs = (payload.rows, payload.scales, route, call.topk_weights)
            kept = (handle.core.words, handle.row_src_rank, handle.row_src_token, handle.row_src_k)
            got.readers.extend(lane.keep(inputs, (*result.values, got.topk_idx, got.topk_weights, *kept)))
            result.event = lane.event(self.config.device, got.readers[0])
        return result

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
            out, weights = self._core.combine(
                call.y, handle.core, call.topk_weights, bias, call.out, options, call.memo
            )
            if not is_capturing:
                self.machine.check()  # what the kernels of this call have reported already
        except EpeeError as error:
            self._blame_death("combine", error, is_capturing)
            raise
        if lane.is_own:
            lane.keep((call.y, call.topk_weights, *bias, handle.core.words), (out, weights))
        lost = self.lost
        return Combined(
            out,
            weights,
            lane.event(self.config.device, self.machine.stream),
            self.config.num_ranks,
            self.control.exchange.epoch,
            lost,
            self._lost_weight(handle, lost),
        )

    def barrier_again(self, timeout_s: float) -> bool:
        """Let the streams meet in quiet times; else return False."""
        if self.quiet_stream() is None:
            return False
        try:
            self._core.start_barrier(timeout_s)
        except EpeeError as error:
            self._blame_death("barrier", error, is_capturing=False)
            raise
        return True

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
        return path_lane.sync(self.control, self._lane, marks, active_ranks, self.machine.tags(), deadline)

    # -- entering an epoch (`Memory`)

    def follow(self, rank: int, process: tuple[int, int]) -> None:
        """Tell kernels of the death of another process, and remember the one before."""
        before = self._lane.processes.get(rank)
        if before is not None:
            is_dead = before not in self._ghost_of and rank in self._watch.dead()  # who has the rank is watched later
            ghost = self._ghost_of.setdefault(before, FIRST_GHOST + len(self._ghost_of))
            self._ghosts.watch(ghost, *before)
            self._fresh.setdefault(rank, set()).add(ghost)
            if is_dead:
                self.machine.bury([ghost])
        self._notifier.follow(rank, process)

    def prepare(self, agreed: Agreed, fresh: Collection[int]) -> None:
        """Forget the words of who was replaced, and let kernels go on in the epoch's view, from another call number."""
        self._numbers.judge(agreed)
        self._bury()
        active = [rank in agreed.ranks for rank in range(self.config.num_ranks)]
        step = TAG_JUMP if agreed.is_fresh else REMEMBERED_CALLS
        ghosts = {rank: self._fresh.get(rank, set()) for rank in fresh}
        self.machine.set_view(active, agreed.used + step, ghosts, is_open=False)
        self._fresh.clear()

    def _bury(self) -> None:
        """Let go of what those might write whose processes have ended, with their GPUs' work.

        Not of what is put down to a rank that has changed hands since it was granted: it is its ghost's, until
        `prepare` says so, whatever has become of the process that has the rank now.
        """
        self.machine.bury([*(rank for rank in self._watch.dead() if rank not in self._fresh), *self._ghosts.dead()])

    def fill(self, region: HostRegion) -> None:
        """Lend this rank's memory on the GPU."""
        lend_blob(region, inbox_layout(self.config).nbytes, b"".join(self.machine.blobs))

    def move(self, regions: Mapping[int, HostRegion]) -> None:
        """Map the memory of those who lend another than before, where theirs was.

        Raises:
            EpeeError: that of a rank that lives, and lends it still, cannot be mapped.
        """
        at = inbox_layout(self.config).nbytes
        for rank in sorted(regions.keys() - {self.rank}):
            blob = lent_blob(regions[rank], at)
            half = len(blob) // 2
            try:
                self.machine.replace_peer(rank, (blob[:half], blob[half:]))
            except EpeeError as error:
                if self._lane.lends(rank) and not is_leaving(*self._lane.processes[rank]):
                    raise
                _log.info("rank %d has ended, or let go of its memory, before it was mapped: %s", rank, error)
        self.machine.open_view()

    def refuse(self, op: int, error: Exception, deadline: float) -> None:
        """Take part in the peers' next call as the rank that cannot make it. Nothing while a graph is recorded."""
        if op == OP_GATHER:
            self.control.refuse(op, error, deadline)
        elif self._platform.is_capturing():
            return
        elif isinstance(error, NoRoomError):
            self._core.refuse(_seconds_to(deadline), code=REFUSED_NO_ROOM)
        else:
            reason = reason_bytes(error)
            self._core.refuse(_seconds_to(deadline), lambda call: self.control.exchange.words.post_reason(call, reason))

    def check(self) -> None:
        """Raise what the kernels have reported since the last look."""
        is_capturing = self._platform.is_capturing()
        self._face_death("check", is_capturing, needs_all=False)
        try:
            self.machine.check()
        except EpeeError as error:
            self._blame_death("check", error, is_capturing)
            raise

    def join(self) -> None:
        """Let the current stream go on behind everything that this buffer has put on any other."""
        self.machine.join()

    def abort(self) -> None:
        """End the waits of the kernels in flight, from any thread."""
        self._device.abort()

    def close(self) -> None:
        """Give back all memory, behind the kernels in flight; they are aborted when they wait for peers. Idempotent."""
        self._notifier.stop()
        self._device.drain(CLOSE_GRACE_S)
        self.machine.close()
        self._ghosts.close()
        self._lane.memory = Memory()  # no circle keeps a closed path

    def _all_gather(self, data: bytes) -> list[bytes]:
        if not self._lane.is_in:  # a replacement, which maps the others' memory when they have taken it in
            return [data] * self.config.num_ranks
        return self.control.all_gather_bytes(data, time.monotonic() + self._timeout)

    def _interrupt(self) -> None:
        """Called while the host waits for the GPU: a death, or the wish to close, ends the kernels' waits."""
        if self._closing.asked:
            self._device.abort()
        elif self._dead():
            self._device.mark_dead(self._watch.dead())

    @property
    def lost(self) -> tuple[int, ...]:
        """Ranks that the view leaves out."""
        exchange = self.control.exchange
        if exchange.reduced_members is None:
            return ()
        return tuple(rank for rank in range(self.config.num_ranks) if rank not in exchange.members)

    def _dead(self) -> tuple[int, ...]:
        """Return the ranks of the view that are dead."""
        dead = self._watch.dead()
        if dead or self._ghost_of:
            self._bury()
        return tuple(rank for rank in dead if rank in self.machine.members)

    def _face_death(self, op: str, is_capturing: bool, needs_all: bool = True) -> None:
        """Refuse a call once a rank is dead or, if it `needs_all`, gone from the epoch in another way."""
        if is_capturing:
            return
        state = self._lane.state()
        told = self._notifier.told  # before the kernel of the system says so; what kernels were told stays true
        if dead := self._dead() or tuple(rank for rank in told if rank in self.machine.members):
            raise self._death(op, dead)
        self._lane.require_place(is_masked=False)
        if needs_all:
            self._lane.require_members(op, self.machine.num_calls)
            self._lane.note_calm(state)

    def quiet_stream(self) -> int | None:
        """Return the current stream where a call like an earlier one needs no look around, else None.

        Then nothing has happened since the last one looked. A death that nobody has told of yet is met by the call, and
        told to its kernels.
        """
        is_quiet = (
            not (self._closing.asked or self._notifier.told)
            and self._lane.is_calm()
            and self.control.exchange.reduced_members is None
        )
        return self.machine.quiet_stream() if is_quiet else None

    def dispatch_again(
        self,
        plan: DispatchPlan,
        x: GivenPayload,
        route: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        known: CudaHandle | None,
        stream: int,
        is_late: bool = True,
    ) -> CudaDispatched | None:
        """Run a dispatch like an earlier one on a quiet stream; None, and nothing has happened, where it cannot be.

        Args:
            plan: of the call.
            x, topk_weights, known: as they came; `known` is the handle.
            route: `topk_idx`, or the mask.
            stream: what `quiet_stream` has just returned.
            is_late: what few programs read of the result is made when it is read.
        """
        core, machine = self._core, self.machine
        before = machine.num_calls
        values, scales = (x, None) if isinstance(x, torch.Tensor) else x
        try:
            known_core = None if known is None else known.core
            payload = values, scales, topk_weights
            got = core.start_dispatch(plan, payload, route, known_core, self._timeout, stream, is_late)
            machine.check()  # what the kernels of this call have reported already
        except torch.OutOfMemoryError:
            if machine.num_calls == before:
                return None
            raise
        except EpeeError as error:
            self._blame_death("dispatch", error, is_capturing=False)
            raise
        epoch = self.control.exchange.epoch
        if known is None:
            handle = self._handle_of(plan, got, epoch)
        else:
            handle = known if got.handle is known.core else replace(known, core=got.handle)
        result = CudaDispatched(got, None if scales is None else scales.dtype, handle, epoch, ())
        if not is_late:
            result.topk_idx, result.topk_weights = got.topk_idx, got.topk_weights
            result.num_tokens_per_expert = handle.num_tokens_per_expert
        return result

    def combine_again(
        self, plan: CombinePlan, y: torch.Tensor, handle: CudaHandle, slot: int, stream: int
    ) -> Combined | None:
        """Run a combine of rows alone like an earlier one, as `dispatch_again`.

        Args:
            plan: of the call.
            y, handle: as they came.
            slot: of `combine.find_rows`.
            stream: what `quiet_stream` has just returned.
        """
        machine = self.machine
        before = machine.num_calls
        try:
            out = plan.new_out()
            plan.start(machine, y, handle.core, slot, (), out, None, self._timeout, stream)
            machine.check()
        except torch.OutOfMemoryError:
            if machine.num_calls == before:
                return None
            raise
        except EpeeError as error:
            self._blame_death("combine", error, is_capturing=False)
            raise
        config = self.config
        lost = None if handle.capacity is None and handle.routing is None else self._lost_weight(handle, ())
        epoch = self.control.exchange.epoch
        return Combined(out, None, Event(config.device, stream), config.num_ranks, epoch, (), lost)

    def known_dispatch(self, memo: dict[Any, DispatchPlan], is_exact: bool, num_sms: int | None) -> DispatchPlan | None:
        """Return the plan of a dispatch whose like has been made, or None; arguments as of `Throughput`'s."""
        plan = self._core.known_dispatch(memo, is_exact, num_sms)
        if plan is not None and not plan.handle_facts:
            plan.handle_facts = self._handle_facts(plan)
        return plan

    def known_combine(self, memo: dict[Any, CombinePlan], is_copied: bool, num_sms: int | None) -> CombinePlan | None:
        """Return the plan of a combine of rank-layout rows alone, likewise."""
        return self._core.known_combine(memo, is_copied, num_sms)

    def _handle_facts(self, plan: DispatchPlan) -> dict[str, Any]:
        """Return what the handles of a plan's dispatches have in common."""
        made = self._new_handle(plan.new_handle(0), 0)
        return {name: value for name, value in made.__dict__.items() if name not in {"core", "kept"}}

    def _handle_of(self, plan: DispatchPlan, got: DispatchResult, epoch: int) -> CudaHandle:
        """Return the handle of a dispatch like an earlier one, which has noted what all of them have in common."""
        core = got.handle
        handle = object.__new__(CudaHandle)  # and the fields at once, as one by one takes longer
        handle.__dict__.update(
            plan.handle_facts,
            seq=core.call_idx,
            epoch=epoch,
            core=core,
            num_rows=plan.most_rows if core.num_recv is None else core.num_recv,
            kept=got.kept,
        )
        if got.sources is not None:
            handle.row_src_rank, handle.row_src_token, handle.row_src_k = got.sources
        return handle

    def _lost_weight(self, handle: CudaHandle, lost: Sequence[int]) -> Callable[[], torch.Tensor] | None:
        """Return what tells the weights that a combine has lost, or None where nothing can be lost."""
        if handle.routing is None and handle.capacity is None:
            return None

        def weigh() -> torch.Tensor:
            """Work them out, late, as few programs ask."""
            routing = handle.kept_routing if handle.routing is None else handle.routing
            return lost_weight(routing, lost, self.config, handle.dropped)

        return weigh

    def _blame_death(self, op: str, error: EpeeError, is_capturing: bool) -> None:
        """Raise that a rank is dead where that is the cause of `error`.

        A peer that refused its call and ended its process right after is no such case: the refusal is what happened.
        """
        has_cause = isinstance(error, (PeerError, InvalidArgument, MismatchError))
        if not (has_cause or is_capturing or self._closing.asked) and (dead := self._dead()):
            raise self._death(op, dead) from error

    def _death(self, op: str, dead: Sequence[int]) -> RankFailedError:
        seq, epoch = self.machine.num_calls, self.control.exchange.epoch
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

    def _handle(self, call: DispatchCall, got: DispatchResult, known: CudaHandle | None) -> CudaHandle:
        if known is not None:
            return known if got.handle is known.core else replace(known, core=got.handle)
        handle = self._new_handle(got.handle, got.x.shape[0])
        handle.row_src_rank, handle.row_src_token, handle.row_src_k = got.src_rank, got.row_src_token, got.src_k
        handle.kept, handle.routing = got.kept, self._routing(call)
        return handle

    def _new_handle(self, core: ThroughputHandle, num_rows: int) -> CudaHandle:
        """Return the handle of a dispatch of now, without its sources."""
        config = self.config
        return CudaHandle(
            self._buffer_id,
            core.call_idx,
            self.control.exchange.epoch,
            core.layout,
            core.expert_alignment,
            core.num_tokens,
            config.num_topk,
            core.has_topk,
            core,
            self.rank,
            config.num_ranks,
            config.num_local_experts,
            num_rows,
            row_src_rank=None,
            row_src_token=None,
            row_src_k=None,
            kept=None,
            capacity=core.capacity,
        )

    def _routing(self, call: DispatchCall) -> DispatchRouting | None:
        """Return a copy of the routing where the view leaves ranks out, for `lost_weight`."""
        if self.control.exchange.reduced_members is None:
            return None
        return DispatchRouting(
            *(None if given is None else given.clone() for given in (call.topk_idx, call.topk_weights, call.mask))
        )


def _own(handle: Handle) -> CudaHandle:
    """Return a handle as what this path makes; checked handles are of this buffer, so it is one."""
    assert isinstance(handle, CudaHandle), OP_NAMES
    return handle


def _seconds_to(deadline: float) -> float:
    return max(_LEAST_TIMEOUT_S, deadline - time.monotonic())
