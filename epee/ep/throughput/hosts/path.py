"""Dispatch and combine for CPU tensors of ranks on several hosts, in calls of the buffer's own engine.

A dispatch is two of them: the rows of the call (`members/exchange.py`), from which all ranks compute all offsets and
reach the same result, then the records (`records.py`). A combine is its row and the partial sums (`partials.py`). Those
modules describe what each call writes and reads, and what a crash leaves; between two of them a rank holds nothing that
others wait for except its part of the next one. A rank that leaves in between has the engine notify the others that it
refuses that part.

The effect of a loss, the same on all ranks (`members/exchange.py`):

    dispatch    "mask": it ends over the remaining ranks; a rank whose records were whole before it died is included.
    combine     "mask": the same: of the ranks in the dispatch, over the remaining ones, without what the lost had.
    both        "raise": `RankFailedError` on all, once for each loss, in whichever of the two calls it falls.

Processes that replace lost ranks join by `sync` (`members/assembly.py`). The placement of ranks follows from the
outboxes of the call that has exchanged a step's rows (`CallPlacement`), so all that is planned with it is the same on
all ranks.

A handle belongs to the epoch of its dispatch. A call in a later epoch, not begun in the handle's, is refused with
`StaleHandleError`; so is a cached dispatch during which a rank is lost, whose rows would not fit the handle's offsets.

Results lie in slots of an arena that no other rank maps, as on one host: pages are touched once, not in every call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from ....arrays import NUMPY_DTYPES, plain_tensors, writing
from ....engine import Engine
from ....errors import (
    AbortedError,
    EvictedError,
    InvalidArgument,
    NoQuorumError,
    PeerError,
    ProtocolError,
    StaleHandleError,
    UnsupportedError,
    is_own,
)
from ....gpu.event import DONE
from ....link.topology import Roles, Topology
from ....memory.arena import Arena
from ....view.group import GroupInView
from ...checks import CombineCall, DispatchCall
from ...config import BufferConfig
from ...handle import Combined, CpuHandle, Dispatched, Handle, mask_of
from ...members.assembly import Assembly, CallPlacement
from ...members.exchange import HostsExchange
from ...members.header import ExchangedRows, combine_header, dispatch_header
from ...members.rows import MemberRows
from ...paths import PathOverHosts
from ...streams import CallStream, RunOptions
from ..arenas import OwnArenas, clear_padding
from ..order import RANKS_THEN_BIAS
from ..partial import lost_weight
from ..placement import Ints, SendPlan, aligned
from ..rows import CallPlace, dispatched, new_handle, pack_tokens, with_meta
from .host_records import HostRecords, Records, sent_records
from .layout import Chunks, Parts, dispatch_length
from .partials import PartialsPlan
from .records import Destination, LocalTokens, RecordsPlan

Planned = TypeVar("Planned")


def _own(handle: Handle) -> CpuHandle:
    """Return a handle as the type of this path; checked handles are of this buffer, so it is one."""
    assert isinstance(handle, CpuHandle)
    return handle


def _is_loss(error: Exception) -> bool:
    """Return whether an error reports lost ranks; all ranks in the same call get it, once each."""
    return isinstance(error, PeerError) and not isinstance(error, (EvictedError, NoQuorumError))


class _Begun(NamedTuple):
    """The inputs of the data call of a dispatch: its plan and handle, an arena and a slot of it."""

    plan: RecordsPlan
    handle: CpuHandle
    arena: Arena
    slot: int


def _among(plan: SendPlan, rank: int, met: MemberRows, config: BufferConfig) -> SendPlan:
    """Remove the rows for ranks that have no part in a call."""
    ranks = np.repeat(np.arange(config.num_ranks), plan.counts[: config.num_ranks])  # of each row: they are sorted so
    kept = torch.from_numpy(np.isin(ranks, met.members))
    slots = None if plan.slots is None else plan.slots[kept]
    return SendPlan(plan.tokens[kept], slots, met.rows.counts[rank])


class HostsPath(PathOverHosts):
    """Moves rows between the ranks of several hosts.

    Args:
        exchange: of the buffer's rows.
        buffer_id: goes into handles.
        topology: the placement of the ranks, as far as the outboxes do not name it.
        job_handle: job handle of the group.
        poison: fill results with 0xFF before they are written.
    """

    def __init__(
        self,
        exchange: HostsExchange,
        buffer_id: int,
        topology: Topology,
        job_handle: GroupInView,
        poison: bool,
    ) -> None:
        self.config = config = exchange.config
        self.rank = topology.rank
        self.exchange = exchange
        self._engine: Engine = exchange.engine
        self._places = CallPlacement(topology, config.num_ranks)
        self._parts: Parts | None = None  # of the last call
        self._assembly = Assembly(exchange, job_handle)
        self.takes_replacements = job_handle.is_open
        self._arenas = OwnArenas(config, topology.rank, poison)
        self._buffer_id = buffer_id
        self._kept: torch.Tensor | None = None
        self._nbytes = 0
        self._count()

    def _count(self) -> None:
        """Record how much memory this rank lends to others, or keeps for them."""
        peer_regions = self._engine.peer_regions
        topology = self._places.of(peer_regions)
        self._nbytes = sum(peer_regions.regions[rank].mapped_bytes for rank in (topology.rank, *topology.sources()))

    # ---- calls that move no rows

    def sync(self, active_ranks: torch.Tensor | None, deadline: float) -> torch.Tensor:
        """Meet, admit joiners (`members/assembly.py`), and return the members, into `active_ranks` as well.

        Living ranks are awaited, whatever the masks say, by the policy for silent ranks: none is excluded from the
        buffer alone. Raises as `Buffer.barrier`; with a mask not losses, which the mask contains.
        """
        is_masked = active_ranks is not None
        self._assembly.meet(b"", deadline, lambda error: is_masked and _is_loss(error))
        self._count()
        mask = mask_of(self.exchange.members, self.config.num_ranks)
        if active_ranks is not None:
            with writing(active_ranks):
                active_ranks[: self.config.num_ranks].copy_(mask)
        return mask

    def come_in(self, deadline: float) -> None:
        """Meet for the first time, as a process that has been admitted; raises as `Buffer.barrier`, but for losses."""
        self._assembly.meet(b"", deadline, _is_loss)
        self._count()

    def abort(self) -> None:
        """End a call in progress in another thread."""
        self._engine.close()

    @property
    def num_copied(self) -> int:
        """Results that were copied out because no slot was free."""
        return self._arenas.num_copied

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's outbox, the mirrors that it keeps and its arenas; pages never touched cost nothing."""
        return self._nbytes + self._arenas.nbytes

    def close(self) -> None:
        """End the engine and drop all memory; tensors that the user still holds keep theirs. Idempotent."""
        self.exchange.release()
        self._arenas.close()

    def combine_input(self, handle: Handle, dtype: torch.dtype) -> torch.Tensor:
        """Return uninitialised `[num_recv, hidden]` of ordinary memory."""
        return torch.empty(handle.num_recv, self.config.hidden, dtype=dtype, device="cpu")

    # ---- dispatch

    def dispatch(self, call: DispatchCall, deadline: float, group_id: CallStream, run: RunOptions) -> Dispatched:
        """Run one dispatch (see the module's docstring); raises as `Buffer.dispatch`."""
        counts = call.plan.counts if call.plan is not None else None
        header = dispatch_header(call, self.rank, 0, call.expert_alignment)
        step = self.exchange.step(header, counts, deadline)
        while True:
            met = step.met
            if call.handle is not None:
                self._check_epoch(call.handle, met)
            begun = self._planned("dispatch", partial(self._begin, call, met))
            try:
                if step.move(begun.plan):
                    return self._dispatched(call, begun, met)
            except BaseException:
                begun.arena.pool.give_back(begun.slot)  # no effect if a result has it
                raise
            begun.arena.pool.give_back(begun.slot)

    def _dispatched(self, call: DispatchCall, begun: _Begun, met: MemberRows) -> Dispatched:
        plan, handle = begun.plan, begun.handle
        if plan.meta[self.rank]:
            handle = self._with_meta(call, handle, plan)
        x = self._arenas.result(call.payload, handle.num_recv, begun.arena, begun.slot)
        return dispatched(call, handle, x, self._lost(met))

    def _lost(self, met: MemberRows) -> tuple[int, ...]:
        """Return the ranks without a part in a call."""
        return tuple(rank for rank in range(self.config.num_ranks) if rank not in met.members)

    def _parts_of(self, met: MemberRows) -> Parts:
        """Return the roles in a call and its assignment of sums; made anew when members or their placement change."""
        topology, parts = self._places.of(met.peer_regions), self._parts
        if parts is None or parts.roles.topology is not topology or parts.members != met.members:
            self._parts = parts = Parts(Roles(topology, met.members))
        return parts

    def _check_epoch(self, handle: Handle, met: MemberRows) -> None:
        """Raise, on all ranks alike, if a handle is of another epoch than the call."""
        if handle.epoch != met.epoch:
            raise StaleHandleError(
                f"handle is of epoch {handle.epoch}, the call runs in epoch {met.epoch}, without rank(s) "
                f"{', '.join(map(str, self._lost(met))) or 'none'}; dispatch again"
            )

    def _begin(self, call: DispatchCall, met: MemberRows) -> _Begun:
        """Return the inputs of the data call of a dispatch.

        The slot is taken after the exchange of rows: an earlier call that was broken off writes into its slot until the
        engine has retired it, which has happened by then.
        """
        handle = self._new_handle(call, met) if call.handle is None else _own(call.handle)
        seq = self.exchange.seq
        arena, _ = self._arenas.of(call.layout, call.expert_alignment, seq, seq + 1)  # no other rank has it mapped
        slot = self._arenas.take(arena)
        try:
            return _Begun(self._plan_records(call, handle, met, arena, slot), handle, arena, slot)
        except BaseException:
            arena.pool.give_back(slot)
            raise

    def _new_handle(self, call: DispatchCall, met: MemberRows) -> CpuHandle:
        place = CallPlace(self._buffer_id, met.seq, met.epoch, self.rank)
        if call.plan is not None and len(met.members) < self.config.num_ranks:
            call = call._replace(plan=_among(call.plan, self.rank, met, self.config))
        may_lose = self.config.fault_mode == "mask" or len(met.members) < self.config.num_ranks
        handle = new_handle(call, met.rows, place, self.config, may_lose)
        topology = self._places.of(met.peer_regions)
        handle.by_host = HostRecords(
            topology,
            handle.placement,
            first_expert=self.rank * self.config.num_local_experts,
            members=met.members,
            num_source_tokens=[header.num_tokens for header in met.rows.headers],
            sent=sent_records(handle.plan, handle.placement, handle.num_tokens, topology),
        )
        return handle

    def _planned(self, name: str, make: Callable[[], Planned]) -> Planned:
        """Make a plan; if that fails here alone, notify the peers, which are in its call or will be.

        A refusal that follows from the exchanged counts is found by all ranks alike.
        """
        try:
            return make()
        except BaseException as error:
            if isinstance(error, (InvalidArgument, ProtocolError)) and is_own(error):
                raise
            told = error if isinstance(error, Exception) else AbortedError(f"{type(error).__name__} during the call")
            self._engine.refuse(name, told)
            raise

    def _plan_records(
        self, call: DispatchCall, handle: CpuHandle, met: MemberRows, arena: Arena, slot: int
    ) -> RecordsPlan:
        payload = call.payload
        clear_padding(payload, handle.placement.padding, arena, slot)
        is_fresh = call.handle is None
        meta, roles = None, self._parts_of(met).roles
        if is_fresh or call.topk_weights is not None:
            meta = pack_tokens(call, handle.num_topk, self.config.meta_words["rank"])
        length = dispatch_length(self.config, roles.topology.num_hosts, met.peer_regions.staging_bytes)
        return RecordsPlan(
            roles,
            handle,
            is_fresh,
            LocalTokens(payload, meta),
            Destination(payload, arena, slot, handle.num_recv),
            self._starts(handle, met.rows) if is_fresh and handle.layout == "expert" else None,
            Chunks.of(length, [header.num_tokens for header in met.rows.headers]),
        )

    def _starts(self, handle: CpuHandle, rows: ExchangedRows) -> tuple[Ints, Ints]:
        """Return the first row of each (source, local expert), and how many it has."""
        first = self.config.num_ranks + handle.by_host.first_expert
        mine = rows.counts[:, first : first + self.config.num_local_experts]
        padded = aligned(mine.sum(0), handle.expert_alignment)
        return padded.cumsum() - padded + mine.cumsum(0) - mine, mine

    def _with_meta(self, call: DispatchCall, handle: CpuHandle, plan: RecordsPlan) -> CpuHandle:
        """Return the handle with the metadata that arrived beside the rows."""
        none = plan.meta[self.rank][0][:0]
        told = [np.concatenate(rounds) if rounds else none for rounds in plan.meta]  # per source
        if call.handle is None:
            received = [Records(meta[:, 1].copy(), meta[:, 0].copy()) for meta in told]
            is_expert = handle.layout == "expert"
            topk_ids = [meta[:, 2 : 2 + handle.num_topk].copy() for meta in told] if is_expert else []
            handle.by_host = replace(handle.by_host, received=received, topk_ids=topk_ids)
        by_host = handle.by_host
        if handle.layout == "rank":
            mine = [meta[sent.of(by_host.position), 1:] for meta, sent in zip(told, by_host.received, strict=True)]
        else:
            mine = [self._slots(call, handle, source, meta) for source, meta in enumerate(told)]
        return with_meta(call, handle, np.concatenate(mine), by_host.first_expert)

    def _slots(self, call: DispatchCall, handle: CpuHandle, source: int, meta: Ints) -> Ints:
        """Return slot and weight of each row of a source in the expert layout, as `with_meta` reads them."""
        records, k = handle.by_host.slots[source]
        packed = np.zeros((len(records), 2), dtype=np.int64)
        packed[:, 0] = handle.by_host.received[source].tokens[records] * handle.num_topk + k
        if call.topk_weights is not None:
            dtype = NUMPY_DTYPES[call.topk_weights.dtype]
            packed[:, 1:].view(dtype)[:, 0] = meta[:, 2 + handle.num_topk :].view(dtype)[records, k]
        return packed

    # ---- combine

    def combine(self, call: CombineCall, deadline: float, group_id: CallStream, run: RunOptions) -> Combined:
        """Run one combine (see the module's docstring); raises as `Buffer.combine`."""
        handle = _own(call.handle)
        if call.order is not RANKS_THEN_BIAS:
            raise UnsupportedError(
                "over several hosts a combine adds up by host (docs/hosts.md, Buffers); give no other order"
            )
        header = combine_header(call, self.rank, 0, handle.expert_alignment)
        step = self.exchange.step(header, None, deadline)
        while True:
            met = step.met
            is_among = self.config.fault_mode == "mask" and set(met.members) <= set(handle.by_host.members)
            if (
                not is_among or handle.epoch < met.peer_regions.placed_in
            ):  # then a member may be another process than it was
                self._check_epoch(handle, met)
            plan = self._planned("combine", partial(self._plan_partials, call, handle, met))
            if step.move(plan):
                return self._combined(call, handle, plan, met)

    def _plan_partials(self, call: CombineCall, handle: CpuHandle, met: MemberRows) -> PartialsPlan:
        """Plan a combine; a result that must not be seen before the end is made in retained memory."""
        num_tokens = [header.num_tokens for header in met.rows.headers]
        scratch = None if call.out is None else self._scratch(call.out)
        return PartialsPlan(self._parts_of(met), call, handle, num_tokens, self.config.wide_partials, scratch)

    def _combined(self, call: CombineCall, handle: CpuHandle, plan: PartialsPlan, met: MemberRows) -> Combined:
        gone, weighs = self._lost(met), None
        if handle.routing is not None:
            weighs = partial(lost_weight, handle.routing, gone, self.config, handle.dropped)
        x = plan.out if call.out is None else call.out
        return Combined(x, plan.weights, DONE, self.config.num_ranks, met.epoch, gone, weighs)

    def _scratch(self, out: torch.Tensor) -> torch.Tensor:
        """Return memory like `out` that only this path uses; retained, so that its pages are touched once."""
        kept = self._kept
        if kept is None or kept.numel() < out.numel() * out.itemsize:
            with plain_tensors():
                self._kept = kept = torch.empty(out.numel() * out.itemsize, dtype=torch.uint8, device="cpu")
        return kept[: out.numel() * out.itemsize].view(out.dtype).view(out.shape)
