"""Combine in other orders of addition, one token at a time (see `exchange.py` for everything else).

For token t every destination rank that has rows of it contributes one value: its row (rank layout), or the sum of its
`weight * row` for k ascending, from -0.0 and with each product rounded first (expert layout), which `round_partials`
rounds to the payload's dtype. `by` is the order in which the values are added, in float32 (float64 for float64):

- "rank": ranks ascending.
- "last_k": ascending in the last k of the token whose expert is on the rank.
- "k" (expert layout): no values per rank; the products themselves, k ascending.

`bias_first`: the sum starts from the first bias, then the second is added, then the values. Else it starts from -0.0,
is +0.0 for a token without rows, and the biases are added at the end. The result is rounded to the payload's dtype.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .exchange import Received, Routed


def combine_in_order(
    inputs: Sequence[Routed],
    received: Sequence[Received],
    y: Sequence[Tensor],
    num_experts: int,
    *,
    by: str = "rank",
    bias_first: bool = False,
    round_partials: bool = False,
    bias: Sequence[Sequence[Tensor]] | None = None,
) -> list[Tensor]:
    """Return each rank's combined tokens `[num_tokens, hidden]`, in rank order, of the dtype of `y`.

    Args:
        inputs: each rank's input of `dispatch`, routed by `topk_idx`.
        received: the result of `dispatch`.
        y: for each rank `[num_recv, hidden]`.
        num_experts: over all ranks.
        by, bias_first, round_partials: see the module docstring.
        bias: for each rank up to two tensors `[num_tokens, hidden]`.
    """
    num_local = num_experts // len(inputs)
    results = []
    for me, given in enumerate(inputs):
        assert given.topk_idx is not None
        sums = []
        for token, experts in enumerate(given.topk_idx.tolist()):
            home = [expert // num_local if expert >= 0 else -1 for expert in experts]
            values = _values(received, y, (me, token), home, by, round_partials)
            biases = [item[token] for item in bias[me]] if bias is not None else []
            zero = torch.zeros(
                y[0].shape[1], dtype=torch.float64 if y[0].dtype == torch.float64 else torch.float32, device="cpu"
            )
            sums.append(_sum(values, [_wide(item) for item in biases], bias_first, zero).to(y[0].dtype))
        results.append(torch.stack(sums) if sums else y[0].new_empty(0, y[0].shape[1]))
    return results


def _values(
    received: Sequence[Received],
    y: Sequence[Tensor],
    source: tuple[int, int],
    home: list[int],
    by: str,
    round_partials: bool,
) -> list[Tensor]:
    """Return the values that are added for one token, in order; `home` is the rank of each k, -1 for none."""
    keyed: list[tuple[int, Tensor]] = []
    for dst in sorted(set(home) - {-1}):
        key = dst if by == "rank" else max(k for k, rank in enumerate(home) if rank == dst)
        there = received[dst]
        if there.layout == "rank":
            row = _row(there, source, -1)
            if row >= 0:
                keyed.append((key, _wide(y[dst][row])))
            continue
        assert there.topk_weights is not None
        products = []
        for k, rank in enumerate(home):
            if rank == dst:
                row = _row(there, source, k)
                products.append((k, _wide(there.topk_weights[row]) * _wide(y[dst][row])))
        if by == "k":
            keyed += products
            continue
        partial = _added([product for _, product in products])
        keyed.append((key, _wide(partial.to(y[dst].dtype)) if round_partials else partial))
    return [value for _, value in sorted(keyed, key=lambda pair: pair[0])]


def _sum(values: list[Tensor], biases: list[Tensor], bias_first: bool, zero: Tensor) -> Tensor:
    if bias_first and biases:
        return _added([*biases, *values])
    return _added([_added(values) if values else zero, *biases])


def _added(terms: list[Tensor]) -> Tensor:
    total = torch.full_like(terms[0], -0.0)
    for term in terms:
        total = total + term
    return total


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.to(torch.float32)


def _row(there: Received, source: tuple[int, int], k: int) -> int:
    """Return the row of (source rank, token) and k, -1 where it was dropped."""
    found = (there.src_rank == source[0]) & (there.src_token == source[1]) & (there.src_k == k)
    rows = found.nonzero()[:, 0].tolist()
    assert len(rows) <= 1
    return int(rows[0]) if rows else -1
