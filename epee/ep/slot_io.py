"""What is written into a slot and read from it: rows, and what travels beside them."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..memory.arena import Arena, Slots
from ..memory.layout import Field
from .checks import DispatchCall, PayloadRows
from .handle import Handle
from .layout import Segment


def rows_of(slots: Slots, slot: int, name: str, first: int, count: int, width: int) -> torch.Tensor:
    """Return rows `first ... first + count - 1` of a slot field that is cut into rows of `width` elements."""
    return slots.field(slot, name)[first * width : (first + count) * width].view(count, width)


def typed(arena: Arena, slot: int, field: Field) -> torch.Tensor:
    """Return a slot field, read with another dtype and shape."""
    raw = arena.field(slot, field.name).view(torch.uint8)
    return raw[: field.nbytes].view(field.dtype).view(field.shape)


def write_rows(payload: PayloadRows, handle: Handle, segment: Segment, target: Slots, slot: int) -> None:
    """Copy the rows (and scales) of one segment to their final place, each of them once."""
    tokens = handle.plan.tokens[segment.first : segment.first + segment.num_rows]
    for name, source in (("payload", payload.rows), ("scales", payload.scales)):
        if source is not None:
            width = source.shape[1]
            place = rows_of(target, slot, name, segment.dst_row, segment.num_rows, width)
            torch.index_select(source, 0, tokens, out=place)


def write_meta(call: DispatchCall, handle: Handle, segment: Segment, target: Slots, slot: int) -> None:
    """Write what travels beside the rows of one destination, in the plan's order."""
    part = slice(segment.first, segment.first + segment.num_rows)
    tokens = handle.plan.tokens[part]
    end = segment.dst_row + segment.num_rows
    if call.handle is None:
        target.field(slot, "src_token")[segment.dst_row : end].copy_(tokens)
        if call.layout == "rank" and call.topk_idx is not None:
            width = call.topk_idx.shape[1]
            place = rows_of(target, slot, "topk_idx", segment.dst_row, segment.num_rows, width)
            torch.index_select(call.topk_idx, 0, tokens, out=place)
    if call.topk_weights is None:
        return
    if call.layout == "rank":
        width = call.topk_weights.shape[1]
        place = rows_of(target, slot, "topk_weights", segment.dst_row, segment.num_rows, width)
        place.copy_(call.topk_weights.index_select(0, tokens))
    else:
        assert handle.plan.slots is not None
        values = call.topk_weights.view(-1).index_select(0, handle.plan.slots[part])
        target.field(slot, "topk_weights")[segment.dst_row : end].copy_(values)


def received_meta(call: DispatchCall, handle: Handle, arena: Arena, slot: int, first_expert: int) -> Handle:
    """Copy what travelled beside the rows out of the slot, and return the handle that knows it.

    Expert ids become ids among this rank's experts (the first one is `first_expert`), -1 where not local. Ids and
    source tokens are a peer's word: the former cannot leave the local range, the latter are only handed on.
    """
    total = sum(handle.num_received)
    src_token = handle.recv_src_token
    if call.handle is None:
        src_token = arena.field(slot, "src_token")[:total].clone()
    if handle.layout == "expert":
        weights = _expert_weights(call.topk_weights, handle, arena.field(slot, "topk_weights")[:total])
        sent = None if call.topk_weights is None else call.topk_weights.clone()
        return replace(handle, recv_src_token=src_token, recv_weights=weights, sent_weights=sent)
    local = handle.recv_topk_idx
    if call.topk_idx is not None:
        local = rows_of(arena, slot, "topk_idx", 0, total, handle.num_topk) - first_expert
        local.masked_fill_((local < 0).logical_or_(local >= len(handle.num_tokens_per_expert)), -1)
    received = None
    if call.topk_weights is not None:
        assert local is not None
        weights = rows_of(arena, slot, "topk_weights", 0, total, handle.num_topk).to(call.topk_weights.dtype)
        received = torch.where(local < 0, 0.0, weights)
    return replace(handle, recv_src_token=src_token, recv_topk_idx=local, recv_weights=received)


def _expert_weights(sent: torch.Tensor | None, handle: Handle, received: torch.Tensor) -> torch.Tensor:
    rows = handle.placement.recv_rows
    assert rows is not None
    weights = torch.zeros(handle.num_recv, dtype=torch.float32 if sent is None else sent.dtype)
    if sent is None:
        return weights.index_fill_(0, rows, 1)
    return weights.index_copy_(0, rows, received.to(sent.dtype))
