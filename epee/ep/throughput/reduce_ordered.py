"""Sums of a combine in the orders that a caller may ask for (`order.py`); epee's own order is in `reduce.py`.

As there, sums start at -0.0, the neutral element, and a token without rows and biases gets +0.0. Each step adds at most
one value to a token, so the order of the steps is the order of the additions. Simple and whole-tensor: the orders are
there to reproduce other libraries bit for bit, and "last_k" keeps one partial sum per rank in the expert layout
(`num_ranks * num_tokens * hidden` elements, of the payload's dtype when the partial sums are rounded).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..handle import HostHandle, Pull
from .order import CombineOrder
from .reduce import accumulator_dtype


def combine_rank_rows_in_order(
    handle: HostHandle,
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
    _finish(acc, handle, bias, out, order)


def combine_expert_rows_in_order(
    handle: HostHandle,
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
    _finish(acc, handle, bias, out, order)


def _start(bias: Sequence[torch.Tensor], out: torch.Tensor, order: CombineOrder) -> torch.Tensor:
    acc = torch.full(out.shape, -0.0, dtype=accumulator_dtype(out.dtype), device="cpu")
    for item in bias if order.bias_first else ():
        acc.add_(item.to(acc.dtype))
    return acc


def _finish(
    acc: torch.Tensor, handle: HostHandle, bias: Sequence[torch.Tensor], out: torch.Tensor, order: CombineOrder
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
    handle: HostHandle, pull: Pull, slots: Sequence[torch.Tensor], out: torch.Tensor, order: CombineOrder
) -> torch.Tensor:
    """Return `[num_tokens, hidden]`: the sum of one rank's weighted rows, k ascending; -0.0 where it has none."""
    partial = torch.full(out.shape, -0.0, dtype=accumulator_dtype(out.dtype), device="cpu")
    for k, tokens, rows in pull.runs:
        partial.index_add_(0, tokens, _weighted(handle, slots[pull.dst_rank], k, tokens, rows, partial.dtype))
    return partial.to(out.dtype) if order.round_partials else partial


def _weighted(
    handle: HostHandle, slot: torch.Tensor, k: int, tokens: torch.Tensor, rows: torch.Tensor, dtype: torch.dtype
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
