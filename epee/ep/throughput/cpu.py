"""Dispatch and combine for CPU tensors: rows are copied once, straight to their final offset in shared memory.

Dispatch: every rank gives its counts and a slot of its arena to all; from the counts of all ranks each one computes
where its rows go (`placement.py`) and copies each row there. The source rank writes, into segments that no other rank's
segments overlap. Order: the exchange of rows (`members/direct.py`) comes before the first store into a peer's slot, the
data call, which all ranks make, after the last one.

Combine pulls: a rank puts its expert outputs into a slot of its own arena (or finds them there already, see
`combine_input`), publishes the slot, and reads the rows of its own tokens out of the slots of all ranks. It sums in
float32 in ascending rank order and rounds once. A slot stays untouched until all peers have passed the call.

A crash between two steps leaves half-written rows in a slot of an epoch that is over: the dispatch is made again
without the rank (`members/direct.py`), in other arenas; nothing half-written is ever returned. A result that all
sources have completed stays in its slot: no rank has a grant to write there again.

Arguments are checked in `checks.py`; data of peers is checked here and in `members/rows.py`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

import torch

from ...arrays import Array, array_of, writing
from ...errors import NoQuorumError, PeerError, is_own
from ...memory.arena import Arena, Slots
from ...memory.layout import Field
from ..checks import CombineCall, DispatchCall
from ..handle import Combined, CpuHandle, Dispatched, Handle
from ..members.direct import DirectExchange
from ..members.header import ExchangedRows, Moved, combine_header, dispatch_header
from ..members.sync import sync
from ..paths import Making, Path
from ..streams import CallStream, RunOptions
from .arenas import Arenas, clear_padding
from .order import RANKS_THEN_BIAS
from .partial import lost_weight, without_destinations
from .placement import Ints, Segment, by_rank
from .reduce import (
    combine_expert_rows,
    combine_expert_rows_in_order,
    combine_rank_rows,
    combine_rank_rows_in_order,
    return_expert_weights,
    return_rank_weights,
)
from .rows import (
    CallPlace,
    dispatched,
    new_handle,
    pack_meta,
    rows_of,
    with_meta,
    write_rows,
)


def _own(handle: Handle) -> CpuHandle:
    """Return a handle as the type of this path; checked handles are of this buffer, so it is one."""
    assert isinstance(handle, CpuHandle)
    return handle


class CpuPath(Path):
    """Moves rows through the arenas of one buffer.

    Args:
        making: the parts that it is made of; the exchange of rows orders the calls.
        poison: fill slots with 0xFF before each use.

    Attributes:
        arenas: this rank's, and what it has mapped of the peers'.
    """

    exchange: DirectExchange

    def __init__(self, making: Making, poison: bool) -> None:
        self.config = config = making.config
        self.rank = making.rank
        self.exchange = making.exchange
        self._buffer_id = making.buffer_id
        self.arenas = Arenas(config, making.rank, self.exchange, poison)

    @property
    def num_copied(self) -> int:
        """Results that were copied out because no slot was free."""
        return self.arenas.num_copied

    def sync(self, active_ranks: torch.Tensor | None, deadline: float) -> torch.Tensor:
        """Agree on the members; raises as `Buffer.sync`."""
        assert active_ranks is not None
        marks = active_ranks.tolist()
        return sync(self.exchange, self.exchange.membership, marks, active_ranks, 0, deadline)

    def num_announced(self, op: int) -> int:
        """Return how many calls have been announced to the peers."""
        return self.exchange.seq

    @property
    def nbytes(self) -> int:
        """Bytes that this rank's arenas map; pages never touched cost nothing."""
        return self.arenas.nbytes

    def dispatch(self, call: DispatchCall, deadline: float, call_stream: CallStream, run: RunOptions) -> Dispatched:
        """Run one dispatch (see the module's docstring); raises as `Buffer.dispatch`."""
        limit_s = deadline - time.monotonic()
        exchange, last_seq = self.exchange, self.exchange.engine.seq
        arena, alignment = self.arenas.of(call.layout, call.expert_alignment, last_seq, exchange.settled)
        slot = self.arenas.take(arena)
        counts = call.plan.counts if call.plan is not None else None
        try:
            header = dispatch_header(call, self.rank, slot, alignment)
            rows = exchange.call(header, counts, arena.region.blob, deadline)
            if call.handle is None:
                place = CallPlace(self._buffer_id, exchange.engine.seq, exchange.epoch, self.rank)
                may_lose = exchange.reduced_members is not None or not exchange.membership.raises
                handle = new_handle(call, rows, place, self.config, may_lose)
            else:
                handle = _own(call.handle)
            # Ranks that have the payload of all complete the call, so one that times out now is alone with that: a
            # rank whose row came late has the whole timeout for its payload.
            deadline = max(deadline, time.monotonic() + limit_s)
            slots = self.arenas.attach(call.layout, rows, deadline)
            self._send(call, handle, rows, slots)
            exchange.wait_data(deadline)
            result = self._receive(call, handle, arena, slot)
            exchange.close_call()
            return result
        except BaseException as error:
            self.arenas.let_go(arena, slot, last_seq)
            # a loss ends it on all ranks, and an excluded rank must get that error, not one of another rank
            is_loss = isinstance(error, Moved) or (
                isinstance(error, PeerError) and is_own(error) and not isinstance(error, NoQuorumError)
            )
            if exchange.engine.seq > last_seq and not is_loss:
                exchange.abandon()  # peers may wait for rows that will not arrive
            raise

    def combine(self, call: CombineCall, deadline: float, call_stream: CallStream, run: RunOptions) -> Combined:
        """Run one combine (see the module's docstring); raises as `Buffer.combine`."""
        layout, last_seq = call.handle.layout, self.exchange.engine.seq
        arena, alignment = self.arenas.of(layout, call.handle.expert_alignment, last_seq, self.exchange.settled)
        slot = arena.leased_input(call.y) if call.y.numel() else None
        is_staged = slot is not None
        slot = self.arenas.take(arena) if slot is None else slot
        try:
            self._stage(call, arena, slot, is_staged)
            header = combine_header(call, self.rank, slot, alignment)
            rows = self.exchange.call(header, None, arena.region.blob, deadline)
            result = self._pull(call, self.arenas.attach(layout, rows, deadline), rows)
            self.exchange.close_call()
            return result
        finally:
            self.arenas.let_go(arena, slot, last_seq)

    def combine_input(self, handle: Handle, dtype: torch.dtype) -> torch.Tensor:
        """Return uninitialised `[num_recv, hidden]`: a leased slot, or ordinary memory when none is free."""
        shape = (handle.num_recv, self.config.hidden)
        seq = self.exchange.engine.seq
        arena, _ = self.arenas.of(handle.layout, handle.expert_alignment, seq, self.exchange.settled)
        if handle.num_recv == 0 or not arena.pool.can_lease("input"):
            return torch.empty(shape, dtype=dtype, device="cpu")
        slot = self.arenas.take(arena)
        return arena.lease(slot, [Field("payload", dtype, shape)], "input")[0]

    def abort(self) -> None:
        """End a call in progress in another thread."""
        self.exchange.abort()

    def close(self) -> None:
        """Drop all memory; tensors that the user still holds keep theirs. Idempotent.

        Also between two epochs: the arenas of the next one are made by its calls.
        """
        self.arenas.close()

    # -- dispatch

    def _send(self, call: DispatchCall, handle: CpuHandle, rows: ExchangedRows, slots: dict[int, Slots]) -> None:
        """Write this rank's rows at their destinations, the next rank first and this one last."""
        tokens, segments = array_of(handle.plan.tokens), by_rank(handle.placement.segments)
        parts: list[tuple[str, Array, Ints | None, dict[int, list[Segment]]]]
        parts = [("payload", array_of(call.payload.rows), tokens, segments)]
        if call.payload.scales is not None:
            parts.append(("scales", array_of(call.payload.scales), tokens, segments))
        packed = pack_meta(call, handle, self.config.meta_words[handle.layout])
        if packed is not None and handle.layout == "rank":
            parts.append(("meta", packed, tokens, segments))
        elif packed is not None:
            parts.append(("meta", packed, None, by_rank(handle.placement.meta_segments)))
        for step in range(1, self.config.num_ranks + 1):
            dst_rank = (self.rank + step) % self.config.num_ranks
            if dst_rank not in slots:
                continue
            target, slot = slots[dst_rank], rows.headers[dst_rank].slot
            for name, source, index, segments in parts:
                if dst_rank in segments:
                    field, width = target.array(slot, name), source.shape[1]
                    places = field[: len(field) // width * width].reshape(-1, width)
                    for segment in segments[dst_rank]:
                        place = places[segment.dst_row : segment.dst_row + segment.num_rows]
                        write_rows(source, index, segment, place)

    def _receive(self, call: DispatchCall, handle: CpuHandle, arena: Arena, slot: int) -> Dispatched:
        if call.handle is None or call.topk_weights is not None:
            words = self.config.meta_words[handle.layout]
            meta = arena.array(slot, "meta")[: sum(handle.placement.num_received) * words].reshape(-1, words)
            handle = with_meta(call, handle, meta, self.rank * self.config.num_local_experts)
        clear_padding(call.payload, handle.placement.padding, arena, slot)
        x = self.arenas.result(call.payload, handle.placement.num_recv, arena, slot)
        return dispatched(call, handle, x, self._lost())

    def _lost(self, missing: Sequence[int] = ()) -> tuple[int, ...]:
        """Return the ranks that are not members, and those of `missing`."""
        if not missing and self.exchange.reduced_members is None:
            return ()
        there = set(self.exchange.members) - set(missing)
        return tuple(rank for rank in range(self.config.num_ranks) if rank not in there)

    # -- combine

    def _stage(self, call: CombineCall, arena: Arena, slot: int, is_staged: bool) -> None:
        """Bring y, unless it lies in the slot already, and the weights to where peers may read them."""
        for first, end in () if is_staged else self._rows_for_others(_own(call.handle)):
            if first < end:
                self._payload(call.y, arena, slot, first, end - first).copy_(call.y[first:end])
        if call.topk_weights is not None:
            flat = call.topk_weights.reshape(-1)
            arena.field(slot, "topk_weights")[: flat.numel()].copy_(flat)

    @staticmethod
    def _payload(y: torch.Tensor, slots: Slots, slot: int, first: int, count: int) -> torch.Tensor:
        """Return `count` rows of a slot from row `first` on, as those of `y`."""
        words = y.shape[1] * y.element_size() // 8
        return torch.from_numpy(rows_of(slots, slot, "payload", first, count, words)).view(y.dtype)

    def _rows_for_others(self, handle: CpuHandle) -> tuple[tuple[int, int], ...]:
        """Return which rows of y the peers will read: in the rank layout, all but those of this rank's tokens."""
        if handle.layout == "expert":
            return ((0, handle.placement.num_recv),)
        first = sum(handle.placement.num_received[: self.rank])
        return (0, first), (first + handle.placement.num_received[self.rank], handle.placement.num_recv)

    def _pull(self, call: CombineCall, slots: dict[int, Slots], rows: ExchangedRows) -> Combined:
        handle, hidden = _own(call.handle), self.config.hidden
        missing = [rank for rank in self.exchange.members if rank not in rows.parties or rank not in slots]
        if missing:
            handle = without_destinations(handle, missing)
            call = CombineCall(call.y, handle, *call[2:])
        dtype = call.y.dtype
        out = call.out if call.out is not None else torch.empty(handle.num_tokens, hidden, dtype=dtype, device="cpu")
        granted = [header.slot for header in rows.headers]
        with writing(out):
            self._add_up(call, slots, granted, out)
        lost = self._lost(missing)
        return Combined(
            out,
            self._returned_weights(call, slots, granted),
            num_ranks=self.config.num_ranks,
            epoch=self.exchange.epoch,
            lost_ranks=lost,
            lost=None
            if handle.routing is None
            else partial(lost_weight, handle.routing, lost, self.config, handle.dropped),
        )

    def _add_up(self, call: CombineCall, slots: dict[int, Slots], granted: list[int], out: torch.Tensor) -> None:
        """Write the sums of the rows that lie in the granted slots to `out`."""
        handle, dtype = _own(call.handle), call.y.dtype
        if handle.layout == "rank":
            parts = [self._segment_rows(call, segment, slots, granted) for segment in handle.placement.segments]
            if call.order is RANKS_THEN_BIAS:
                combine_rank_rows(handle, parts, call.bias, out)
            else:
                combine_rank_rows_in_order(handle, parts, call.bias, out, call.order, call.last_k)
        else:
            views = [self._whole(slots.get(src), granted[src], dtype) for src in range(self.config.num_ranks)]
            if call.order is RANKS_THEN_BIAS:
                combine_expert_rows(handle, views, call.bias, out)
            else:
                combine_expert_rows_in_order(handle, views, call.bias, out, call.order)

    def _whole(self, slots: Slots | None, slot: int, dtype: torch.dtype) -> torch.Tensor:
        """Return all rows of a slot; none of a rank without a part."""
        hidden = self.config.hidden
        if slots is None:
            return torch.empty(0, hidden, dtype=dtype, device="cpu")
        flat = slots.field(slot, "payload").view(dtype)
        return flat[: flat.numel() // hidden * hidden].view(-1, hidden)

    def _segment_rows(
        self, call: CombineCall, segment: Segment, slots: dict[int, Slots], granted: list[int]
    ) -> torch.Tensor:
        if segment.dst_rank == self.rank:
            return call.y[segment.dst_row : segment.dst_row + segment.num_rows]
        target, slot = slots[segment.dst_rank], granted[segment.dst_rank]
        return self._payload(call.y, target, slot, segment.dst_row, segment.num_rows)

    def _returned_weights(self, call: CombineCall, slots: dict[int, Slots], granted: list[int]) -> torch.Tensor | None:
        if call.topk_weights is None:
            return None
        handle, num_topk = _own(call.handle), self.config.num_topk
        width = num_topk if handle.layout == "rank" else 1
        dtype = call.topk_weights.dtype  # a float64 buffer carries float32 weights widened: narrowing them is exact
        parts = []
        for dst_rank, _, count, first in handle.placement.segments:
            rows = rows_of(slots[dst_rank], granted[dst_rank], "topk_weights", first, count, width)
            parts.append(torch.from_numpy(rows).to(dtype))
        if handle.layout == "rank":
            return return_rank_weights(handle, parts, num_topk, dtype)
        return return_expert_weights(handle, [part.view(-1) for part in parts], num_topk, dtype)
