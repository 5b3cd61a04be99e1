"""What is written into a slot and read from it: rows, and what travels beside them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ...memory.arena import Arena, Slots
from ...memory.layout import Field
from ..checks import DispatchCall, PayloadRows
from ..handle import HostHandle
from .placement import Ints, Segment


def rows_of(slots: Slots, slot: int, name: str, first: int, count: int, width: int) -> torch.Tensor:
    """Return rows `first ... first + count - 1` of a slot field that is cut into rows of `width` elements."""
    return slots.field(slot, name)[first * width : (first + count) * width].view(count, width)


def typed(arena: Arena, slot: int, field: Field) -> torch.Tensor:
    """Return a slot field, read with another dtype and shape."""
    raw = arena.field(slot, field.name).view(torch.uint8)
    return raw[: field.nbytes].view(field.dtype).view(field.shape)


def write_rows(payload: PayloadRows, handle: HostHandle, segment: Segment, target: Slots, slot: int) -> None:
    """Copy the rows (and scales) of one segment to their final place, each of them once."""
    tokens = handle.plan.tokens[segment.first : segment.first + segment.num_rows]
    for name, source in (("payload", payload.rows), ("scales", payload.scales)):
        if source is not None:
            width = source.shape[1]
            place = rows_of(target, slot, name, segment.dst_row, segment.num_rows, width)
            torch.index_select(source, 0, tokens, out=place)


def pack_meta(call: DispatchCall, handle: HostHandle, words: int) -> Ints | None:
    """Return what travels beside the rows, `[n, words]` int64, or None when nothing does.

    Rank layout, a row per token: token, expert ids, weights. Expert layout, a row per row of the plan:
    `token * num_topk + k`, weight. Weights keep their dtype and fill their words from the left.
    """
    weights = None if call.topk_weights is None else call.topk_weights.numpy()
    if handle.layout == "expert":
        assert handle.plan.slots is not None
        slots = handle.plan.slots.numpy()
        packed = np.zeros((len(slots), words), dtype=np.int64)
        packed[:, 0] = slots
        if weights is not None:
            packed[:, 1:].view(weights.dtype)[:, 0] = weights.reshape(-1)[slots]
        return packed
    if call.handle is not None and weights is None:
        return None
    packed = np.zeros((call.payload.rows.shape[0], words), dtype=np.int64)
    packed[:, 0] = np.arange(len(packed))
    if call.topk_idx is not None:
        packed[:, 1 : 1 + handle.num_topk] = call.topk_idx.numpy()
    if weights is not None:
        packed[:, 1 + handle.num_topk :].view(weights.dtype)[:, : handle.num_topk] = weights
    return packed


def write_meta(packed: Ints, handle: HostHandle, segment: Segment, target: Slots, slot: int) -> None:
    """Copy what travels beside the rows of one destination, in the plan's order."""
    part = slice(segment.first, segment.first + segment.num_rows)
    words = packed.shape[1]
    place = target.array(slot, "meta")[segment.dst_row * words : (segment.dst_row + segment.num_rows) * words]
    if handle.layout == "expert":
        place.reshape(-1, words)[:] = packed[part]
    else:
        # "clip" cannot clip here, tokens are in range; the default mode would go through a temporary copy
        np.take(packed, handle.plan.tokens.numpy()[part], axis=0, out=place.reshape(-1, words), mode="clip")


def received_meta(call: DispatchCall, handle: HostHandle, meta: Ints, first_expert: int) -> HostHandle:
    """Copy what travelled beside the rows out of the slot, and return the handle that knows it.

    That is `handle` itself where this dispatch has made it, else (a cached dispatch) a new one.

    Expert ids become ids among this rank's experts (the first one is `first_expert`), -1 where not local. Ids and
    source tokens are a peer's word: the former cannot leave the local range, the latter are only handed on.

    Args:
        meta: `[rows, words]`, the received rows of `pack_meta`, in (source rank, plan) order.
    """
    news: dict[str, torch.Tensor | None] = {}
    weights = call.topk_weights
    dtype = None if weights is None else weights.numpy().dtype
    if handle.layout == "expert":
        if call.handle is None:
            token, k = np.divmod(meta[:, 0], handle.num_topk)
            news.update(recv_src_token=torch.from_numpy(token), recv_src_k=torch.from_numpy(k))
        news["recv_weights"] = _expert_weights(handle, None if dtype is None else meta[:, 1:].view(dtype)[:, 0])
        news["sent_weights"] = None if weights is None else weights.clone()
        return _with(handle, call, news)
    local = None if handle.recv_topk_idx is None else handle.recv_topk_idx.numpy()
    if call.handle is None:
        news["recv_src_token"] = torch.from_numpy(meta[:, 0].copy())
        if call.topk_idx is not None:
            local = meta[:, 1 : 1 + handle.num_topk] - first_expert
            # as unsigned numbers, ids below 0 are too large as well
            np.putmask(local, local.view(np.uint64) >= len(handle.num_tokens_per_expert), -1)
            news["recv_topk_idx"] = torch.from_numpy(local)
    news["recv_weights"] = None
    if dtype is not None:
        assert local is not None
        received = meta[:, 1 + handle.num_topk :].view(dtype)[:, : handle.num_topk]
        news["recv_weights"] = torch.from_numpy(np.where(local < 0, dtype.type(0), received))
    return _with(handle, call, news)


def _with(handle: HostHandle, call: DispatchCall, news: dict[str, torch.Tensor | None]) -> HostHandle:
    if call.handle is not None:
        return replace(handle, **news)  # type: ignore[arg-type]
    for name, value in news.items():
        setattr(handle, name, value)
    return handle


def _expert_weights(handle: HostHandle, received: npt.NDArray[np.floating[Any]] | None) -> torch.Tensor:
    rows = handle.placement.recv_rows
    assert rows is not None
    weights = np.zeros(handle.num_recv, dtype=np.float32 if received is None else received.dtype)
    weights[rows.numpy()] = 1 if received is None else received
    return torch.from_numpy(weights)
