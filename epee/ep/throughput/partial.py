"""Combines with losses: what a lost rank would have added is left out and counted, and local counts of received rows.

A rank lost in a combine adds nothing; the weights of the others stay as they are. Local work on memory of this process;
nothing is sent to peers.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch

from ...memory.layout import align_up
from ..config import BufferConfig
from ..handle import CpuHandle, DispatchRouting
from .placement import Placement, Segment, SendPlan


def count_local(handle: CpuHandle, kept: torch.Tensor | slice) -> list[int]:
    """Return the (token, k) slots of some rows of the rank layout for each local expert, rounded up."""
    num_experts = len(handle.placement.num_tokens_per_expert)
    if handle.recv_topk_idx is None:
        return [0] * num_experts
    ids = handle.recv_topk_idx[kept]
    counts = torch.bincount(ids[ids >= 0], minlength=num_experts).tolist()
    return [align_up(count, handle.expert_alignment) for count in counts]


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
