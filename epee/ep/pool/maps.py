"""Routing that is given as a map of tokens and experts: turned into top-k ids and weights, and weights back into a map.

A map has True if a token goes to an expert. All ranks need the same top-k: the most experts that any token of any rank
has, which they exchange (`BufferPool.most`), or a number that they have agreed on before. Plain tensors, or a kernel
on GPUs; only `most_experts` makes the CPU wait for one.
"""

from __future__ import annotations

import torch

from ...errors import InvalidArgument
from ...gpu.routing_map import map_kernels


def map_of(
    topk_idx: torch.Tensor, topk_weights: torch.Tensor | None, num_tokens: int, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the map `[num_tokens, num_experts]` bool of top-k ids (-1: none), and their weights in it, float32."""
    chosen = topk_idx >= 0
    idx = topk_idx.to(torch.int64).masked_fill(~chosen, num_experts)  # a column more, for what goes nowhere
    shape = num_tokens, num_experts + 1
    routing_map = torch.zeros(shape, dtype=torch.bool, device=idx.device).scatter_(1, idx, True)[:, :num_experts]
    return routing_map, None if topk_weights is None else dense_weights(topk_idx, topk_weights, num_experts)


def dense_weights(topk_idx: torch.Tensor, topk_weights: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Return `[num_tokens, num_experts]` float32: each token's weights at its experts, 0 elsewhere."""
    if topk_idx.is_cuda:
        return map_kernels(topk_idx.get_device()).dense(topk_idx, topk_weights, num_experts)
    idx = topk_idx.to(torch.int64).masked_fill(topk_idx < 0, num_experts)
    dense = torch.zeros(len(idx), num_experts + 1, dtype=torch.float32, device=idx.device)
    return dense.scatter_(1, idx, topk_weights.to(torch.float32))[:, :num_experts].contiguous()


def check_map(routing_map: object, num_tokens: int, num_experts: int, device: torch.device) -> torch.Tensor:
    """Return a map as bool; `InvalidArgument` unless it is bool or integer `[num_tokens, num_experts]` on `device`."""
    is_map = isinstance(routing_map, torch.Tensor) and not routing_map.is_floating_point()
    if not is_map or routing_map.shape != (num_tokens, num_experts) or routing_map.device != device:  # type: ignore[attr-defined]
        raise InvalidArgument(
            f"routing_map must be bool [{num_tokens}, {num_experts}] on {device}, a True for each expert of a token, "
            f"got {routing_map if not isinstance(routing_map, torch.Tensor) else list(routing_map.shape)}"
        )
    assert isinstance(routing_map, torch.Tensor)
    return routing_map.to(torch.bool)


def most_experts(counts: torch.Tensor) -> int:
    """Return the most experts of a token, at least 1, from the counts of `topk_of_map`. The CPU waits for them."""
    return max(1, *(most for most, _ in counts.tolist()))


def num_left_out(counts: torch.Tensor) -> torch.Tensor:
    """Return how many experts of a map's tokens `topk_of_map` has left out; a number on the device."""
    return counts[:, 1].sum()


def topk_of_map(
    routing_map: torch.Tensor, probs: torch.Tensor | None, num_topk: int
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Return `[num_tokens, num_topk]` int64 ids, ascending, -1 after them; their weights, float32; and counts.

    Args:
        routing_map: `[num_tokens, num_experts]` bool.
        probs: `[num_tokens, num_experts]`, or None.
        num_topk: columns of the result; further experts of a token are left out.

    Returns:
        The counts are `[parts, 2]` int32: for each part of the tokens the most experts of one, and how many experts
        are left out.
    """
    if routing_map.is_cuda:
        return map_kernels(routing_map.get_device()).topk(routing_map, probs, num_topk)
    num_tokens, num_experts = routing_map.shape
    columns = torch.arange(num_experts, dtype=torch.int64, device=routing_map.device)
    ids = torch.where(routing_map, columns, num_experts)
    num_kept = min(num_topk, num_experts)
    found = ids.topk(num_kept, dim=1, largest=False, sorted=True).values
    if num_kept < num_topk:
        found = torch.cat([found, found.new_full((num_tokens, num_topk - num_kept), num_experts)], 1)
    is_none = found == num_experts
    weights = None
    if probs is not None:
        at = found.clamp(max=num_experts - 1)
        weights = probs.to(torch.float32).gather(1, at).masked_fill_(is_none, 0)
    num_chosen = routing_map.sum(1)
    most = num_chosen.amax() if num_tokens else num_chosen.sum()
    counts = torch.stack([most, (num_chosen - num_topk).clamp(min=0).sum()]).to(torch.int32)
    return found.masked_fill_(is_none, -1), weights, counts[None]


def clipped_counts(num_tokens_per_expert: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return how many of each expert's rows lie among the first `num_rows`; the experts' rows follow each other."""
    ends = num_tokens_per_expert.cumsum(0).clamp(max=num_rows)
    return torch.diff(ends, prepend=ends.new_zeros(1))
