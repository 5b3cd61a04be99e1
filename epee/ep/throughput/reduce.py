"""Sums of a combine, in the order that `reference/` fixes.

Rank layout: a token's rows are added in float32 (float64 for float64 rows), ranks ascending, then the biases, then one
rounding. Expert layout: the products `weight * row` of each rank are added first, k ascending, each product rounded
before it is added; then the ranks' sums as above. A token without rows gets +0.0.

Sums start at -0.0, which is the neutral element (`-0.0 + x` is `x` for every x, +0.0 is not: it turns -0.0 into +0.0),
so a sum of one row is that row, bit for bit.

Rows are read where the peers left them. Where the result's own dtype can hold every partial sum exactly, the sum is
built in place (`_sum_in_place`): that is so for float32 and float64, and for two ranks of any dtype, because the sum
of two rows is rounded only once anyway. Else the rows are widened in blocks of tokens that stay in the cache.

The functions named `in_order` follow an order that a caller asks for (`order.py`). Each step adds at most one value to
a token, so the order of the steps is the order of the additions. Simple and whole-tensor: those orders are there to
reproduce other libraries bit for bit, and "last_k" keeps one partial sum per rank in the expert layout
(`num_ranks * num_tokens * hidden` elements, of the payload's dtype when the partial sums are rounded).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ...arrays import array_of
from ..handle import CpuHandle, Pull
from .order import CombineOrder
from .placement import Segment


def combine_rank_rows_in_order(
    handle: CpuHandle,
    rows: Sequence[torch.Tensor],
    bias: Sequence[torch.Tensor],
    out: torch.Tensor,
    order: CombineOrder,
    last_k: torch.Tensor | None,
) -> None:
    """Sum the rank layout into `out`.

    Args:
        handle: contains the token of each row.
        rows: per segment of the handle's placement, `[num_rows, hidden]`.
        bias: up to two `[num_tokens, hidden]`.
        out: `[num_tokens, hidden]`, same dtype as the rows.
        order: by "rank" or "last_k".
        last_k: `[num_tokens, num_ranks]` int64, see `order.last_k`; None by "rank".
    """
    acc = _start(bias, out, order)
    parts = []
    for segment, part in zip(handle.placement.segments, rows, strict=True):
        tokens = handle.plan.tokens[segment.first : segment.first + segment.num_rows]
        parts.append((tokens, part, None if last_k is None else last_k[tokens, segment.dst_rank]))
    for k in range(handle.num_topk if order.by == "last_k" else 1):
        for tokens, part, lanes in parts:
            _add(acc, tokens, part, None if lanes is None else lanes == k)
    _finish_ordered(acc, handle, bias, out, order)


def combine_expert_rows_in_order(
    handle: CpuHandle,
    slots: Sequence[torch.Tensor],
    bias: Sequence[torch.Tensor],
    out: torch.Tensor,
    order: CombineOrder,
) -> None:
    """Sum the expert layout into `out`.

    Args:
        handle: routing, and the weights that this rank sent (ones when it sent none).
        slots: per rank, all its rows `[rows, hidden]`.
        bias, out: as in `combine_rank_rows_in_order`.
        order: any.
    """
    acc = _start(bias, out, order)
    if order.by == "k":
        runs = [(k, pull.dst_rank, tokens, rows) for pull in handle.pulls for k, tokens, rows in pull.runs]
        for k, dst_rank, tokens, rows in sorted(runs, key=lambda run: run[:2]):
            acc.index_add_(0, tokens, _weighted(handle, slots[dst_rank], k, tokens, rows, acc.dtype))
    elif order.by == "rank":
        for pull in handle.pulls:
            acc.add_(_partial(handle, pull, slots, out, order))
    else:
        every = torch.arange(len(out), dtype=torch.int64, device="cpu")
        partials = [(_partial(handle, pull, slots, out, order), _last_k_of(pull, len(out))) for pull in handle.pulls]
        for k in range(handle.num_topk):
            for partial, lanes in partials:
                _add(acc, every, partial, lanes == k)
    _finish_ordered(acc, handle, bias, out, order)


def _start(bias: Sequence[torch.Tensor], out: torch.Tensor, order: CombineOrder) -> torch.Tensor:
    acc = torch.full(out.shape, -0.0, dtype=accumulator_dtype(out.dtype), device="cpu")
    for item in bias if order.bias_first else ():
        acc.add_(item.to(acc.dtype))
    return acc


def _finish_ordered(
    acc: torch.Tensor, handle: CpuHandle, bias: Sequence[torch.Tensor], out: torch.Tensor, order: CombineOrder
) -> None:
    if not (order.bias_first and bias):
        acc.index_fill_(0, handle.empty_tokens, 0.0)
    for item in () if order.bias_first else bias:
        acc.add_(item.to(acc.dtype))
    out.copy_(acc)


def _add(acc: torch.Tensor, tokens: torch.Tensor, rows: torch.Tensor, chosen: torch.Tensor | None) -> None:
    """Add the chosen rows (None: all) to their tokens, which are distinct."""
    if chosen is not None:
        which = chosen.nonzero()[:, 0]
        tokens, rows = tokens[which], rows.index_select(0, which)
    acc.index_add_(0, tokens, rows.to(acc.dtype))


def _partial(
    handle: CpuHandle, pull: Pull, slots: Sequence[torch.Tensor], out: torch.Tensor, order: CombineOrder
) -> torch.Tensor:
    """Return `[num_tokens, hidden]`: the sum of one rank's weighted rows, k ascending; -0.0 where it has none."""
    partial = torch.full(out.shape, -0.0, dtype=accumulator_dtype(out.dtype), device="cpu")
    for k, tokens, rows in pull.runs:
        partial.index_add_(0, tokens, _weighted(handle, slots[pull.dst_rank], k, tokens, rows, partial.dtype))
    return partial.to(out.dtype) if order.round_partials else partial


def _weighted(
    handle: CpuHandle, slot: torch.Tensor, k: int, tokens: torch.Tensor, rows: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    values = slot.index_select(0, rows).to(dtype)
    if handle.sent_weights is not None:
        values.mul_(handle.sent_weights[:, k].index_select(0, tokens).to(dtype)[:, None])
    return values


def _last_k_of(pull: Pull, num_tokens: int) -> torch.Tensor:
    """Return `[num_tokens]` int64: the last k of each token that has a row on the rank, -1 for none."""
    last = torch.full((num_tokens,), -1, dtype=torch.int64, device="cpu")
    for k, tokens, _ in pull.runs:
        last[tokens] = k
    return last


BLOCK_BYTES = 1 << 19  # of a block's accumulator; the best of 128 KiB ... 8 MiB with 2 MiB of L2 cache per core


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which rows of `dtype` are summed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def combine_rank_rows(
    handle: CpuHandle, rows: Sequence[torch.Tensor], bias: Sequence[torch.Tensor], out: torch.Tensor
) -> None:
    """Sum the rank layout into `out`.

    Args:
        handle: contains the token of each row.
        rows: per segment of the handle's placement, `[num_rows, hidden]`.
        bias: up to two `[num_tokens, hidden]`.
        out: `[num_tokens, hidden]`, same dtype as the rows.
    """
    is_wide = out.dtype == accumulator_dtype(out.dtype)
    same_bias = all(item.dtype == out.dtype for item in bias)
    if (is_wide and same_bias) or (len(rows) <= 2 and not bias):
        _sum_in_place(handle, rows, out)
        if all(segment.num_rows < len(out) for segment in handle.placement.segments):
            _clear_empty(handle, out)
        for item in bias:
            out.add_(item)
    else:
        _sum_in_blocks(handle, rows, bias, out)


def _sum_in_place(handle: CpuHandle, rows: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    tokens = handle.plan.tokens
    if not rows:
        out.fill_(-0.0)
    for index, (segment, part) in enumerate(zip(handle.placement.segments, rows, strict=True)):
        mine = tokens[segment.first : segment.first + segment.num_rows]
        is_whole = segment.num_rows == out.shape[0]  # tokens are distinct and ascend, so these are all of them
        if index == 0:
            put(out, part, None if is_whole else mine)
        elif is_whole:
            out.add_(part)
        else:
            out.index_add_(0, mine, part)


def put(out: torch.Tensor, part: torch.Tensor, tokens: torch.Tensor | None) -> None:
    """Write rows to their tokens and -0.0 to all others. A gather is ten times faster than torch's `index_copy_`."""
    if tokens is None:
        out.copy_(part)
        return
    if not len(tokens):
        out.fill_(-0.0)
        return
    source = np.full(out.shape[0], -1)
    source[array_of(tokens)] = np.arange(len(tokens))
    missing = torch.from_numpy((source < 0).nonzero()[0])
    gather = torch.from_numpy(np.maximum(source, 0, out=source))
    if out.is_contiguous():
        torch.index_select(part, 0, gather, out=out)
    else:
        out.copy_(part.index_select(0, gather))
    out.index_fill_(0, missing, -0.0)


def _clear_empty(handle: CpuHandle, out: torch.Tensor) -> None:
    """Write +0.0 to the tokens that no rank has a row for."""
    if len(handle.empty_tokens):
        out.index_fill_(0, handle.empty_tokens, 0.0)


def _sum_in_blocks(
    handle: CpuHandle, rows: Sequence[torch.Tensor], bias: Sequence[torch.Tensor], out: torch.Tensor
) -> None:
    num_tokens, hidden = out.shape
    dtype = accumulator_dtype(out.dtype)
    step = max(1, BLOCK_BYTES // (hidden * dtype.itemsize))
    block = torch.empty(min(step, num_tokens), hidden, dtype=dtype, device="cpu")
    scratch = torch.empty_like(block)
    cuts = _cuts(handle, num_tokens, step)
    is_empty = torch.zeros(num_tokens, dtype=torch.bool, device="cpu").index_fill_(0, handle.empty_tokens, True)
    for index, first in enumerate(range(0, num_tokens, step)):
        end = min(first + step, num_tokens)
        acc = block[: end - first].fill_(-0.0)
        for part, (segment, edges) in zip(rows, cuts, strict=True):
            low, high = edges[index], edges[index + 1]
            wide = scratch[: high - low].copy_(part[low:high])
            if high - low == end - first:
                acc.add_(wide)
            elif low < high:
                tokens = handle.plan.tokens[segment.first + low : segment.first + high]
                acc.index_add_(0, tokens - first, wide)
        if len(handle.empty_tokens):
            acc.masked_fill_(is_empty[first:end, None], 0.0)
        _finish(acc, bias, first, out[first:end])


def _cuts(handle: CpuHandle, num_tokens: int, step: int) -> list[tuple[Segment, list[int]]]:
    """Return for each segment where its rows (tokens ascending) cross the edges of the token blocks."""
    edges = torch.arange(0, num_tokens + step, step, dtype=torch.int64, device="cpu")
    tokens = handle.plan.tokens
    segments = handle.placement.segments
    return [(seg, torch.searchsorted(tokens[seg.first : seg.first + seg.num_rows], edges).tolist()) for seg in segments]


def _finish(acc: torch.Tensor, bias: Sequence[torch.Tensor], first: int, out: torch.Tensor) -> None:
    for item in bias:
        acc.add_(item[first : first + len(acc)].to(acc.dtype))
    out.copy_(acc)


def combine_expert_rows(
    handle: CpuHandle, slots: Sequence[torch.Tensor], bias: Sequence[torch.Tensor], out: torch.Tensor
) -> None:
    """Sum the expert layout into `out`.

    Args:
        handle: routing, and the weights that this rank sent (ones when it sent none).
        slots: per rank, all its rows `[rows, hidden]`.
        bias, out: as in `combine_rank_rows`.
    """
    acc = torch.full(out.shape, -0.0, dtype=accumulator_dtype(out.dtype), device="cpu")
    partial = torch.empty_like(acc)
    for dst_rank, runs in handle.pulls:
        partial.fill_(-0.0)
        for k, tokens, rows in runs:
            partial.index_add_(0, tokens, _weighted(handle, slots[dst_rank], k, tokens, rows, acc.dtype))
        acc.add_(partial)
    _clear_empty(handle, acc)
    _finish(acc, bias, 0, out)


def return_rank_weights(
    handle: CpuHandle, rows: Sequence[torch.Tensor], num_topk: int, dtype: torch.dtype
) -> torch.Tensor:
    """Sum weights `[num_rows, num_topk]` of each segment into `[num_tokens, num_topk]`, ranks ascending."""
    total = torch.zeros(handle.num_tokens, num_topk, dtype=dtype, device="cpu")
    for segment, part in zip(handle.placement.segments, rows, strict=True):
        total.index_add_(0, handle.plan.tokens[segment.first : segment.first + segment.num_rows], part)
    return total


def return_expert_weights(
    handle: CpuHandle, rows: Sequence[torch.Tensor], num_topk: int, dtype: torch.dtype
) -> torch.Tensor:
    """Put weights `[num_rows]` of each segment back to their (token, k) in `[num_tokens, num_topk]`."""
    flat = torch.zeros(handle.num_tokens * num_topk, dtype=dtype, device="cpu")
    assert handle.plan.slots is not None
    for segment, part in zip(handle.placement.segments, rows, strict=True):
        flat.index_copy_(0, handle.plan.slots[segment.first : segment.first + segment.num_rows], part)
    return flat.view(handle.num_tokens, num_topk)
