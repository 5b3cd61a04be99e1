"""Combine over several hosts, one token at a time: the sum of each host is rounded, then the hosts are added up.

For token t every destination rank that has rows of it contributes one value, as in `exchange.py`: its row (rank
layout), or the sum of its `weight * row` for k ascending (expert layout). The values of the ranks of a host are added,
ranks ascending. The sum of a host is rounded to the payload's dtype, in which it is sent, unless `wide_partials`; so is
that of the token's own host. Then the hosts are added, in order of their lowest rank, and the biases. All in float32
(float64 for float64), each sum from -0.0; a token without rows is +0.0 before the biases.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .exchange import Received, Routed, combine


def combine_by_host(
    inputs: Sequence[Routed],
    received: Sequence[Received],
    y: Sequence[Tensor],
    host_of: Sequence[int],
    *,
    wide_partials: bool = False,
    bias: Sequence[Sequence[Tensor]] | None = None,
) -> list[Tensor]:
    """Return each rank's combined tokens `[num_tokens, hidden]`, in rank order, of the dtype of `y`.

    Args:
        inputs: each rank's input of `dispatch`.
        received: the result of `dispatch`.
        y: for each rank, one row per row that it received.
        host_of: the host of each rank.
        wide_partials: hosts' sums are not rounded.
        bias: for each rank zero, one or two tensors `[num_tokens, hidden]`, added one after the other after the sum.
    """
    dtype = y[0].dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    hosts = sorted(set(host_of), key=list(host_of).index)
    here = {host: [rank for rank, place in enumerate(host_of) if place == host] for host in hosts}
    # one host's part of all tokens: `combine` of the rows received by its ranks only, from values that are wide already
    values = [rows.to(wide) for rows in y]
    sums = {host: combine(inputs, _only(received, here[host]), values) for host in hosts}
    has = {host: _has_rows(inputs, received, here[host]) for host in hosts}
    results = []
    for me in range(len(inputs)):
        total = torch.full_like(sums[hosts[0]][me], -0.0)
        for host in hosts:
            part = sums[host][me] if wide_partials else sums[host][me].to(dtype).to(wide)
            mine = has[host][me]
            total[mine] = total[mine] + part[mine]
        total[~torch.stack([has[host][me] for host in hosts]).any(0)] = 0.0
        for tensor in bias[me] if bias is not None else ():
            total = total + tensor.to(wide)
        results.append(total.to(dtype))
    return results


def combine_weights_by_host(
    inputs: Sequence[Routed], received: Sequence[Received], topk_weights: Sequence[Tensor], host_of: Sequence[int]
) -> list[Tensor]:
    """Return each rank's weights `[num_tokens, num_topk]` as they are sent back: summed by rank in a host, then by
    host.

    Args:
        inputs, received, topk_weights: as of `exchange.combine_weights`.
        host_of: the host of each rank.
    """
    shapes = [(len(given.topk_idx), given.topk_idx.shape[1]) for given in inputs if given.topk_idx is not None]
    results = [torch.zeros(shape, dtype=topk_weights[0].dtype, device="cpu") for shape in shapes]
    for host in sorted(set(host_of), key=list(host_of).index):
        parts = [torch.zeros_like(total) for total in results]
        for dst in (rank for rank, place in enumerate(host_of) if place == host):
            there = received[dst]
            for row, (src, token, k) in enumerate(
                zip(there.src_rank.tolist(), there.src_token.tolist(), there.src_k.tolist(), strict=True)
            ):
                if src >= 0 and k < 0:
                    parts[src][token] = parts[src][token] + topk_weights[dst][row]
                elif src >= 0:
                    parts[src][token, k] = parts[src][token, k] + topk_weights[dst][row]
        results = [total + part for total, part in zip(results, parts, strict=True)]
    return results


def _only(received: Sequence[Received], ranks: Sequence[int]) -> list[Received]:
    """Return the ranks' received rows, and empty results for the others."""
    return [there if rank in ranks else _without_rows(there) for rank, there in enumerate(received)]


def _without_rows(there: Received) -> Received:
    nothing = torch.full_like(there.src_rank, -1)
    return Received(
        x=there.x,
        topk_idx=there.topk_idx,
        topk_weights=there.topk_weights,
        num_tokens_per_expert=there.num_tokens_per_expert,
        src_rank=nothing,
        src_token=there.src_token,
        src_k=there.src_k,
        layout=there.layout,
        num_dropped=there.num_dropped,
    )


def _has_rows(inputs: Sequence[Routed], received: Sequence[Received], ranks: Sequence[int]) -> list[Tensor]:
    """Return for each source `[num_tokens]` bool: whether one of the ranks has a row of the token."""
    found = []
    for given in inputs:
        rows = given.x[0] if isinstance(given.x, tuple) else given.x
        found.append(torch.zeros(len(rows), dtype=torch.bool, device="cpu"))
    for rank in ranks:
        for src, token in zip(received[rank].src_rank.tolist(), received[rank].src_token.tolist(), strict=True):
            if src >= 0:
                found[src][token] = True
    return found
