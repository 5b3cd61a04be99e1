"""The contents of a slot: writing and reading rows and their metadata, and the handle made from them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from ...arrays import NUMPY_DTYPES, Array, array_of
from ...errors import context
from ...gpu.event import DONE
from ...memory.arena import Arena, Slots
from ...memory.layout import Field
from ..checks import DispatchCall
from ..config import BufferConfig
from ..handle import CpuHandle, Dispatched, DispatchRouting, Payload
from ..members.header import ExchangedRows
from .partial import count_local
from .placement import Ints, Segment, checked_counts, drop_rows
from .placement import place as placed

THREADED_BYTES = 1 << 20  # torch divides larger copies among its threads; smaller ones cost numpy less


def rows_of(slots: Slots, slot: int, name: str, first: int, count: int, width: int) -> Array:
    """Return rows `first ... first + count - 1` of a slot field that is cut into rows of `width` elements."""
    return slots.array(slot, name)[first * width : (first + count) * width].reshape(count, width)


def typed(arena: Arena, slot: int, field: Field) -> torch.Tensor:
    """Return a slot field, read with another dtype and shape."""
    raw = arena.field(slot, field.name).view(torch.uint8)
    return raw[: field.nbytes].view(field.dtype).view(field.shape)


def write_rows(source: Array, index: Ints | None, segment: Segment, place: Array) -> None:
    """Copy the rows of one segment to their final offset, each of them once.

    Args:
        source: has a row for each token, or for each row of the plan.
        index: the row of `source` for each row of the plan; None: they are in its order.
        segment: which rows of the plan.
        place: their final memory.
    """
    part = slice(segment.first, segment.first + segment.num_rows)
    if index is None:
        place[:] = source[part]
    elif place.nbytes < THREADED_BYTES:
        # "clip" cannot clip here, tokens are in range; the default mode would go through a temporary copy
        source.take(index[part], 0, place, "clip")
    else:
        rows, tokens, target = map(torch.from_numpy, (source, index[part], place))
        torch.index_select(rows, 0, tokens, out=target)


def pack_meta(call: DispatchCall, handle: CpuHandle, words: int) -> Ints | None:
    """Return what travels beside the rows, `[n, words]` int64, or None when nothing does.

    Rank layout, a row per token: token, expert ids, weights. Expert layout, a row per row of the plan:
    `token * num_topk + k`, weight. Weights keep their dtype and fill their words from the left.
    """
    weights = None if call.topk_weights is None else array_of(call.topk_weights)
    if handle.layout == "expert":
        assert handle.plan.slots is not None
        slots = array_of(handle.plan.slots)
        packed = np.zeros((len(slots), words), dtype=np.int64)
        packed[:, 0] = slots
        if weights is not None:
            packed[:, 1:].view(weights.dtype)[:, 0] = weights.reshape(-1)[slots]
        return packed
    return None if call.handle is not None and weights is None else pack_tokens(call, handle.num_topk, words)


def pack_tokens(call: DispatchCall, num_topk: int, words: int) -> Ints:
    """Return what travels beside a token, `[num_tokens, words]` int64: token, expert ids, weights."""
    packed = np.zeros((call.payload.rows.shape[0], words), dtype=np.int64)
    packed[:, 0] = np.arange(len(packed))
    if call.topk_idx is not None:
        packed[:, 1 : 1 + num_topk] = array_of(call.topk_idx)
    if call.topk_weights is not None:
        weights = array_of(call.topk_weights)
        packed[:, 1 + num_topk :].view(weights.dtype)[:, :num_topk] = weights
    return packed


def with_meta(call: DispatchCall, handle: CpuHandle, meta: Ints, first_expert: int) -> CpuHandle:
    """Copy what travelled beside the rows out of the slot, and return the handle that knows it and what follows.

    That is `handle` itself where this dispatch has made it, else (a cached dispatch) a new one.

    Expert ids become ids among this rank's experts (the first one is `first_expert`), -1 where not local. Ids and
    source tokens are a peer's word: the former cannot leave the local range, the latter are only handed on.

    Args:
        meta: `[rows, words]`, the received rows of `pack_meta`, in (source rank, plan) order.
    """
    news: dict[str, torch.Tensor | None] = {}
    weights = call.topk_weights
    dtype = None if weights is None else NUMPY_DTYPES[weights.dtype]
    if handle.layout == "expert":
        if call.handle is None:
            token, k = np.divmod(meta[:, 0], handle.num_topk)
            news.update(recv_src_token=torch.from_numpy(token), recv_src_k=torch.from_numpy(k))
        rows = handle.placement.recv_rows
        assert rows is not None
        expanded = np.zeros(handle.placement.num_recv, dtype=np.float32 if dtype is None else dtype)
        expanded[array_of(rows)] = 1 if dtype is None else meta[:, 1:].view(dtype)[:, 0]
        news["recv_weights"] = torch.from_numpy(expanded)
        news["sent_weights"] = None if weights is None else weights.clone()
    else:
        local = None if handle.recv_topk_idx is None else array_of(handle.recv_topk_idx)
        if call.handle is None:
            news["recv_src_token"] = torch.from_numpy(meta[:, 0].copy())
            if call.topk_idx is not None:
                local = meta[:, 1 : 1 + handle.num_topk] - first_expert
                # as unsigned numbers, ids below 0 are too large as well
                local[local.view(np.uint64) >= len(handle.placement.num_tokens_per_expert)] = -1
                news["recv_topk_idx"] = torch.from_numpy(local)
        news["recv_weights"] = None
        if dtype is not None:
            assert local is not None
            received = meta[:, 1 + handle.num_topk :].view(dtype)[:, : handle.num_topk].copy()
            received[local < 0] = 0
            news["recv_weights"] = torch.from_numpy(received)
    if call.handle is None:
        handle.__dict__.update(news)
    else:
        if weights is not None and handle.routing is not None:
            handle = replace(handle, routing=handle.routing._replace(topk_weights=weights.clone()))
        handle = replace(handle, **news)  # type: ignore[arg-type]
    if handle.num_dropped_rows:
        slots = count_local(handle, slice(None))  # the exchange has counted those of dropped rows
        handle.placement = handle.placement._replace(num_tokens_per_expert=slots)
    return handle


class CallPlace(NamedTuple):
    """The call that makes a handle, on one rank.

    Attributes:
        buffer_id: of the buffer.
        seq, epoch: of the call.
        rank: this one.
    """

    buffer_id: int
    seq: int
    epoch: int
    rank: int


def new_handle(
    call: DispatchCall,
    rows: ExchangedRows,
    place: CallPlace,
    config: BufferConfig,
    may_lose: bool,
) -> CpuHandle:
    """Return the handle of a dispatch whose counts have been exchanged, without the metadata beside the rows.

    Args:
        may_lose: ranks are lost, or may be in later calls: a copy of the routing records what went with them.

    Raises:
        ProtocolError, InvalidArgument: as `checked_counts`.
    """
    assert call.plan is not None
    where = partial(context, "dispatch", seq=place.seq, epoch=place.epoch)
    num_tokens = [header.num_tokens for header in rows.headers]
    counts = checked_counts(rows.counts, num_tokens, (call.layout, call.expert_alignment, call.capacity), config, where)
    plan, dropped = call.plan, None
    if call.capacity is not None:
        plan, dropped = drop_rows(plan, counts.per_rank[place.rank].tolist(), call.payload.rows.shape[0])
    placement = placed(counts, place.rank, call.layout, call.expert_alignment, config)
    routing = None
    if dropped is not None or may_lose:
        copies = (None if given is None else given.clone() for given in (call.topk_idx, call.topk_weights, call.mask))
        routing = DispatchRouting(*copies)
    num_dropped = 0 if call.capacity is None else int(rows.counts[:, place.rank].sum()) - placement.num_recv
    return CpuHandle(
        buffer_id=place.buffer_id,
        seq=place.seq,
        epoch=place.epoch,
        layout=call.layout,
        expert_alignment=call.expert_alignment,
        num_tokens=call.payload.rows.shape[0],
        num_topk=config.num_topk,
        with_topk=call.topk_idx is not None,
        plan=plan,
        placement=placement,
        routing=routing,
        dropped=dropped,
        num_dropped_rows=num_dropped,
        capacity=call.capacity,
    )


def dispatched(call: DispatchCall, handle: CpuHandle, x: Payload, lost: tuple[int, ...]) -> Dispatched:
    """Return what the caller of a dispatch gets."""
    weights = handle.recv_weights
    if call.handle is not None and call.topk_weights is None and handle.layout == "rank":
        weights = None
    return Dispatched(
        x=x,
        # copies: the handle's own must not change with what the user does to these
        topk_idx=None if handle.recv_topk_idx is None else handle.recv_topk_idx.clone(),
        topk_weights=None if weights is None else weights.clone(),
        num_tokens_per_expert=list(handle.placement.num_tokens_per_expert) if handle.with_topk else [],
        handle=handle,
        event=DONE,
        num_ranks=len(handle.placement.num_received),
        epoch=handle.epoch,
        lost_ranks=lost,
        num_dropped=None if handle.capacity is None else handle.num_dropped,
    )
