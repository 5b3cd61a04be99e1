"""Low-latency combine over several hosts by its definition, one token at a time; dispatch is `latency.py`'s.

Inputs and outputs are lists over all ranks, as there; `hosts[r]` is the host of rank r, an arbitrary number. The result
of a dispatch does not depend on it. A combine sums by host, so that one row per token and host crosses back:

    partial of a rank: as in `latency.py`, rounded to `partial_dtype`
    sum of a host:   acc = -0.0;  for the ranks of the host that count for the token's rank and have rows of the token,
                     ascending: acc = acc + partial, in float32; then rounded to `partial_dtype`, for every host
    result:          acc = -0.0;  for the hosts that have a sum for the token, by their lowest rank ascending:
                     acc = acc + sum;  a token without any sum: +0.0;  rounded to bfloat16, once

With one host the second rounding changes nothing for partials in float32; in bfloat16 it rounds the sum that is rounded
to bfloat16 anyway. So one host gives the bits of `latency.combine`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .latency import Mask, Packed, Sent, counted


def combine(
    inputs: Sequence[Sent],
    packed: Sequence[Packed],
    y: Sequence[Tensor],
    hosts: Sequence[int],
    *,
    topk_weights: Sequence[Tensor] | None = None,
    partial_dtype: torch.dtype = torch.bfloat16,
    got: Mask | None = None,
) -> list[Tensor]:
    """Return each rank's combined tokens `[num_tokens, H]` bfloat16, in rank order.

    Args:
        inputs, packed, y, topk_weights, partial_dtype: as of `latency.combine`.
        hosts: of each rank.
        got: `got[me][dst]`: whether the partials of `dst` arrived; all True when None.
    """
    results = []
    for me, given in enumerate(inputs):
        weights = topk_weights[me] if topk_weights is not None else given.topk_weights
        counts = counted(packed, me, got)
        result = torch.zeros(len(given.x), given.x.shape[1], dtype=torch.bfloat16, device="cpu")
        for token, experts in enumerate(given.topk_idx.tolist()):
            sums = []
            for host in sorted(set(hosts), key=list(hosts).index):
                ranks = [rank for rank, place in enumerate(hosts) if place == host and counts[rank]]
                partials = [_partial(rank, me, token, experts, weights, packed[rank], y[rank]) for rank in ranks]
                rounded = [part.to(partial_dtype) for part in partials if part is not None]
                if rounded:
                    sums.append(_added(rounded).to(partial_dtype))
            if sums:
                result[token] = _added(sums).to(torch.bfloat16)
        results.append(result)
    return results


def _partial(
    rank: int, me: int, token: int, experts: Sequence[int], weights: Tensor | None, packed: Packed, y: Tensor
) -> Tensor | None:
    """Return the weighted sum of a rank's experts' rows of a token of rank `me`, k ascending; None without any."""
    num_local = len(y)
    products = []
    for k, expert in enumerate(experts):
        local = expert - rank * num_local
        if expert >= 0 and 0 <= local < num_local:
            count = int(packed.num_tokens_per_expert[local])
            is_it = (packed.src_rank[local, :count] == me) & (packed.src_token[local, :count] == token)
            row = y[local, int(is_it.nonzero()[0, 0])].to(torch.float32)
            products.append(row if weights is None else weights[token, k].to(torch.float32) * row)
    return _added(products) if products else None


def _added(parts: Sequence[Tensor]) -> Tensor:
    """Add the parts in float32, one after the other, from -0.0."""
    total = torch.full(parts[0].shape, -0.0, dtype=torch.float32, device="cpu")
    for part in parts:
        total = total + part.to(torch.float32)
    return total
