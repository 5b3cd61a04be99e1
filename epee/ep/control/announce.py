"""The announcement of a CPU call: the header of its row, made from a checked call. Pure functions."""

from __future__ import annotations

import torch

from ...gpu.payload import DTYPE_CODES, LAYOUTS
from ..checks import CombineCall, DispatchCall
from .header import OP_COMBINE, OP_DISPATCH, Header

_SCALE_KINDS = {None: 0, torch.float32: 1, torch.int32: 2}


def dispatch_header(call: DispatchCall, rank: int, slot: int, arena_alignment: int) -> Header:
    """Return what a rank announces of a dispatch."""
    payload = call.payload
    return Header(
        op=OP_DISPATCH,
        layout=LAYOUTS.index(call.layout),
        dtype=DTYPE_CODES.index(payload.dtype),
        handle=call.handle.seq if call.handle is not None else 0,
        with_topk=int(call.topk_idx is not None),
        with_weights=call.topk_weights.element_size() if call.topk_weights is not None else 0,
        scale_words=payload.scales.shape[1] if payload.scales is not None else 0,
        scale_kind=_SCALE_KINDS[payload.scale_dtype],
        expert_alignment=call.expert_alignment,
        capacity=call.capacity or 0,
        arena_alignment=arena_alignment,
        refused=0,
        num_tokens=payload.rows.shape[0],
        slot=slot,
        rank=rank,
    )


def combine_header(call: CombineCall, rank: int, slot: int, arena_alignment: int) -> Header:
    """Return what a rank announces of a combine."""
    handle = call.handle
    return Header(
        op=OP_COMBINE,
        layout=LAYOUTS.index(handle.layout),
        dtype=DTYPE_CODES.index(call.y.dtype),
        handle=handle.seq,
        with_topk=0,
        with_weights=call.topk_weights.element_size() if call.topk_weights is not None else 0,
        scale_words=0,
        scale_kind=0,
        expert_alignment=handle.expert_alignment,
        capacity=0,
        arena_alignment=arena_alignment,
        refused=0,
        num_tokens=handle.num_tokens,
        slot=slot,
        rank=rank,
    )
