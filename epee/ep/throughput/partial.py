"""Results with losses: received rows are packed together in ordinary memory, lost ones are counted.

A source counts as a whole or not at all. A rank lost in a dispatch leaves no row: the rows of the others move up, in
the order that they would have had without it. They are copied out of the arena, which a stale writer may still write
to. A rank lost in a combine adds nothing; the weights of the others stay as they are.

Nothing here runs in a call without losses. Local work on memory of this process; nothing is sent to peers.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch

from ..config import BufferConfig, round_up
from ..handle import CpuHandle, DispatchRouting
from .placement import Placement, Segment, SendPlan


def without_sources(handle: CpuHandle, missing: Collection[int]) -> tuple[CpuHandle, torch.Tensor]:
    """Remove the rows of some sources from what a dispatch received.

    Returns:
        The handle of the rest, and `[num_recv]` int64: for each row of the new result its row in the slot, -1 in
        padding.
    """
    old = handle.placement
    is_there = torch.ones(len(old.num_received), dtype=torch.bool, device="cpu")
    is_there[list(missing)] = False
    kept = torch.repeat_interleave(is_there, torch.tensor(old.num_received, dtype=torch.int64, device="cpu"))
    num_received = [0 if rank in missing else count for rank, count in enumerate(old.num_received)]
    if old.recv_rows is None:
        per_expert = count_local(handle, kept)
        placement = Placement(*old[:2], num_received, sum(num_received), per_expert, *old[5:])
        source = kept.nonzero()[:, 0]
    else:
        placement, source = _by_expert(handle, kept, num_received)
    names = ("recv_topk_idx", "recv_src_token", "recv_src_k")
    news = {name: value[kept] for name in names if (value := getattr(handle, name)) is not None}
    weights = handle.recv_weights
    if weights is not None and old.recv_rows is None:
        news["recv_weights"] = weights[kept]
    elif weights is not None:
        news["recv_weights"] = torch.where(source >= 0, weights[source.clamp(min=0)], weights.new_zeros(()))
    return replace(handle, placement=placement, **news), source


def count_local(handle: CpuHandle, kept: torch.Tensor | slice) -> list[int]:
    """Return the (token, k) slots of some rows of the rank layout for each local expert, rounded up."""
    num_experts = len(handle.placement.num_tokens_per_expert)
    if handle.recv_topk_idx is None:
        return [0] * num_experts
    ids = handle.recv_topk_idx[kept]
    counts = torch.bincount(ids[ids >= 0], minlength=num_experts).tolist()
    return [round_up(count, handle.expert_alignment) for count in counts]


def _by_expert(handle: CpuHandle, kept: torch.Tensor, num_received: list[int]) -> tuple[Placement, torch.Tensor]:
    old = handle.placement
    assert old.recv_rows is not None
    ends = torch.tensor(old.num_tokens_per_expert, dtype=torch.int64, device="cpu").cumsum(0)
    rows = old.recv_rows[kept]  # in (source, plan) order
    expert = torch.searchsorted(ends, rows, right=True)
    counts = torch.bincount(expert, minlength=len(ends))
    padded = [round_up(count, handle.expert_alignment) for count in counts.tolist()]
    starts = torch.tensor([0, *padded], dtype=torch.int64, device="cpu").cumsum(0)
    order = torch.argsort(rows)  # by expert, and within one in the old order
    index = torch.arange(len(rows), dtype=torch.int64, device="cpu")
    rank_in_block = index - (counts.cumsum(0) - counts)[expert[order]]
    placed = torch.empty_like(rows)
    placed[order] = starts[expert[order]] + rank_in_block
    source = torch.full((sum(padded),), -1, dtype=torch.int64, device="cpu")
    source[placed] = rows
    filled = (starts[:-1] + counts).tolist()
    padding = [(first, end) for first, end in zip(filled, starts[1:].tolist(), strict=True) if first < end]
    placement = Placement(*old[:2], num_received, sum(padded), padded, placed, padding)
    return placement, source


def pack_rows(rows: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Return rows of a slot in their new order, in ordinary memory; -1 stands for a row of zeros."""
    packed = rows.view(torch.uint8)[source.clamp(min=0)]
    packed[source < 0] = 0
    return packed.view(rows.dtype)


def without_destinations(handle: CpuHandle, missing: Collection[int]) -> CpuHandle:
    """Return the handle of a combine that gets nothing from some ranks."""
    plan, old = handle.plan, handle.placement
    lost = torch.zeros(len(plan.tokens), dtype=torch.bool, device="cpu")
    for segment in old.meta_segments:
        if segment.dst_rank in missing:
            lost[segment.first : segment.first + segment.num_rows] = True
    kept = ~lost
    slots = None if plan.slots is None else plan.slots[kept]
    placement = Placement(_moved_up(old.segments, missing), _moved_up(old.meta_segments, missing), *old[2:])
    return replace(handle, plan=SendPlan(plan.tokens[kept], slots, plan.counts), placement=placement)


def _moved_up(segments: list[Segment], missing: Collection[int]) -> list[Segment]:
    """Return the segments of the others, which follow each other without gaps in the new plan (as they did before)."""
    moved, first = [], 0
    for segment in segments:
        if segment.dst_rank not in missing:
            moved.append(Segment(segment.dst_rank, first, segment.num_rows, segment.dst_row))
            first += segment.num_rows
    return moved


def lost_weight(
    routing: DispatchRouting, missing: Collection[int], config: BufferConfig, dropped: torch.Tensor | None = None
) -> torch.Tensor:
    """Return `[num_tokens]` float32: the sum of each token's weights whose rank is missing, or has dropped the token.

    Without weights an expert counts 1; if ranks were chosen, and no experts, a rank counts 1. `dropped` is
    `[num_tokens, num_ranks]` bool. Never waits for a GPU, which may hold invalid ids, of a failed call.
    """
    asked = routing.mask if routing.topk_idx is None else routing.topk_idx
    assert asked is not None
    is_lost = torch.zeros(config.num_ranks, dtype=torch.bool, device=asked.device)
    for rank in missing:
        is_lost[rank] = True
    is_lost = is_lost.expand(len(asked), -1) if dropped is None else is_lost | dropped
    if routing.topk_idx is None:
        return (asked & is_lost).sum(1, dtype=torch.float32)
    owner = asked.div(config.num_local_experts, rounding_mode="floor")
    lost = is_lost.gather(1, owner.clamp(0, config.num_ranks - 1).to(torch.int64)) & (owner >= 0)
    if routing.topk_weights is None:
        return lost.sum(1, dtype=torch.float32)
    return torch.where(lost, routing.topk_weights.float(), 0.0).sum(1)  # a NaN counts only where it is lost
