"""Sums of a combine, in the order that `reference/` fixes.

Rank layout: an accumulator in float32 (float64 for float64 rows) starts at +0.0; each destination rank's row is added,
ranks ascending; then the biases; then one rounding. Expert layout: each rank has a partial sum that starts at +0.0 and
takes `weight * row` for k ascending, the product rounded before it is added; the partial sums are added as above.

Rows are read where the peers left them. Work goes in blocks of tokens that stay in the cache: the accumulator of a
block is read and written by several operations, and would else travel to memory each time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .handle import Handle
from .layout import Segment

BLOCK_BYTES = 1 << 20  # of the accumulator; on a 2-core machine with 1 MiB L2 per core the best of 128 KiB ... 8 MiB


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which rows of `dtype` are summed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def combine_rank_rows(
    handle: Handle, rows: Sequence[torch.Tensor], bias: Sequence[torch.Tensor], out: torch.Tensor
) -> None:
    """Sum the rank layout into `out`.

    Args:
        handle: says which token each row belongs to.
        rows: per segment of the handle's placement, `[count, hidden]`.
        bias: up to two `[num_tokens, hidden]`.
        out: `[num_tokens, hidden]`, same dtype as the rows.
    """
    num_tokens, hidden = out.shape
    dtype = accumulator_dtype(out.dtype)
    step = max(1, BLOCK_BYTES // (hidden * dtype.itemsize))
    block = torch.empty(min(step, num_tokens), hidden, dtype=dtype)
    scratch = torch.empty_like(block)
    cuts = _cuts(handle, num_tokens, step)
    for index, first in enumerate(range(0, num_tokens, step)):
        end = min(first + step, num_tokens)
        acc = block[: end - first].zero_()
        for part, (segment, edges) in zip(rows, cuts, strict=True):
            low, high = edges[index], edges[index + 1]
            if low == high:
                continue
            wide = scratch[: high - low].copy_(part[low:high])
            if high - low == end - first:
                acc.add_(wide)
            else:
                tokens = handle.plan.tokens[segment.first + low : segment.first + high]
                acc.index_add_(0, tokens - first, wide)
        _finish(acc, bias, first, out[first:end])


def _cuts(handle: Handle, num_tokens: int, step: int) -> list[tuple[Segment, list[int]]]:
    """Return for each segment where its rows (tokens ascending) cross the edges of the token blocks."""
    edges = torch.arange(0, num_tokens + step, step)
    tokens = handle.plan.tokens
    segments = handle.placement.segments
    return [(seg, torch.searchsorted(tokens[seg.first : seg.first + seg.num_rows], edges).tolist()) for seg in segments]


def _finish(acc: torch.Tensor, bias: Sequence[torch.Tensor], first: int, out: torch.Tensor) -> None:
    for item in bias:
        acc.add_(item[first : first + len(acc)].to(acc.dtype))
    out.copy_(acc)


def combine_expert_rows(
    handle: Handle, slots: Sequence[torch.Tensor], bias: Sequence[torch.Tensor], out: torch.Tensor
) -> None:
    """Sum the expert layout into `out`.

    Args:
        handle: routing, and the weights that this rank sent (ones when it sent none).
        slots: per rank, all its rows `[rows, hidden]`.
        bias, out: as in `combine_rank_rows`.
    """
    acc = torch.zeros(out.shape, dtype=accumulator_dtype(out.dtype))
    partial = torch.empty_like(acc)
    weights = handle.sent_weights
    for dst_rank, runs in handle.pulls:
        partial.zero_()
        for k, tokens, rows in runs:
            values = slots[dst_rank].index_select(0, rows).to(acc.dtype)
            if weights is not None:
                values.mul_(weights[:, k].index_select(0, tokens).to(acc.dtype)[:, None])
            partial.index_add_(0, tokens, values)
        acc.add_(partial)
    _finish(acc, bias, 0, out)


def return_rank_weights(
    handle: Handle, rows: Sequence[torch.Tensor], num_topk: int, dtype: torch.dtype
) -> torch.Tensor:
    """Sum weights `[count, num_topk]` of each segment into `[num_tokens, num_topk]`, ranks ascending."""
    total = torch.zeros(handle.num_tokens, num_topk, dtype=dtype)
    for segment, part in zip(handle.placement.segments, rows, strict=True):
        total.index_add_(0, handle.plan.tokens[segment.first : segment.first + segment.num_rows], part)
    return total


def return_expert_weights(
    handle: Handle, rows: Sequence[torch.Tensor], num_topk: int, dtype: torch.dtype
) -> torch.Tensor:
    """Put weights `[count]` of each segment back to their (token, k) in `[num_tokens, num_topk]`."""
    flat = torch.zeros(handle.num_tokens * num_topk, dtype=dtype)
    assert handle.plan.slots is not None
    for segment, part in zip(handle.placement.segments, rows, strict=True):
        flat.index_copy_(0, handle.plan.slots[segment.first : segment.first + segment.num_rows], part)
    return flat.view(handle.num_tokens, num_topk)
