"""Dispatch and combine by their definition, one token at a time.

Data path: the inputs of *all* ranks are passed as a list (index = rank), the outputs of all ranks are returned as a
list. There is no communication, no shared memory and no crash; nothing here is fast.

Dispatch. Expert `e` is on rank `e // num_local_experts`. A token is sent to every rank that has one of its experts (or
that `is_token_in_rank` names), once per rank.

- Rank layout: one row per token that arrives, in (source rank, token) order.
  With a `capacity` only the first so many rows arrive; of the others nothing does, and nothing is sent back.
- Expert layout: one row per (local expert, source rank, token, k), ascending in that order; the block of each expert is
  filled up with zero rows to a multiple of `expert_alignment`.

Combine. Every accumulation is in float32 (float64 for float64 payload) and rounded to the payload's dtype once, at the
end. For token t: `acc = -0.0` (the neutral element: a sum of one row is that row, bit for bit); for each destination
rank with rows of t, ascending, `acc = acc + row` (rank layout) or `acc = acc + partial`, where `partial = -0.0` and,
for k ascending over the token's experts on that rank, `partial = partial + weight * row` with the product rounded
before it is added (expert layout); a token without any row has `acc = +0.0`; then the biases are added one after the
other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Payload = Tensor | tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Routed:
    """One rank's input of dispatch.

    Attributes:
        x: `[num_tokens, hidden]`, or a pair (values `[num_tokens, hidden]`, scales `[num_tokens, num_scales]`).
        topk_idx: `[num_tokens, num_topk]` integer expert ids, -1 = none; None when `is_token_in_rank` is given.
        topk_weights: `[num_tokens, num_topk]` floating point, or None.
        is_token_in_rank: `[num_tokens, num_ranks]` bool, or None.
    """

    x: Payload
    topk_idx: Tensor | None = None
    topk_weights: Tensor | None = None
    is_token_in_rank: Tensor | None = None


@dataclass(frozen=True)
class Received:
    """One rank's expected result of dispatch.

    Attributes:
        x: `[num_recv, hidden]`, or the pair.
        topk_idx: `[num_recv, num_topk]` int64 local expert ids, -1 elsewhere; None in the expert layout and without
            top-k routing.
        topk_weights: rank layout `[num_recv, num_topk]`, 0 where the expert is not local, None when none were given;
            expert layout `[num_recv]`, 0 in padding, ones when none were given.
        num_tokens_per_expert: (token, k) pairs per local expert, each rounded up to the alignment; empty without top-k.
        src_rank: `[num_recv]` int64, -1 in padding.
        src_token: `[num_recv]` int64, -1 in padding.
        src_k: `[num_recv]` int64: the k of the token that the row is for; -1 in padding and in the rank layout.
        layout: "rank" or "expert".
        num_dropped: rows beyond the capacity.
    """

    x: Payload
    topk_idx: Tensor | None
    topk_weights: Tensor | None
    num_tokens_per_expert: list[int]
    src_rank: Tensor
    src_token: Tensor
    src_k: Tensor
    layout: str
    num_dropped: int = 0


def dispatch(
    inputs: Sequence[Routed],
    num_experts: int,
    *,
    layout: str = "rank",
    expert_alignment: int = 1,
    capacity: int | None = None,
) -> list[Received]:
    """Return the expected results of all ranks, in rank order.

    Args:
        inputs: of each rank; `len(inputs)` is the number of ranks and divides `num_experts`.
        num_experts: over all ranks.
        layout: "rank" or "expert" (needs `topk_idx`).
        expert_alignment: rows per block of the expert layout; both layouts round `num_tokens_per_expert` up to it.
        capacity: the most rows that a rank receives (rank layout only), None for all.
    """
    ranks = range(len(inputs))
    if layout == "rank":
        return [_receive_by_rank(inputs, num_experts, me, expert_alignment, capacity) for me in ranks]
    if capacity is not None:
        raise ValueError("capacity is of the rank layout")
    if layout == "expert":
        return [_receive_by_expert(inputs, num_experts, me, expert_alignment) for me in ranks]
    raise ValueError(f"layout must be 'rank' or 'expert', got {layout!r}")


def combine(
    inputs: Sequence[Routed],
    received: Sequence[Received],
    y: Sequence[Tensor],
    *,
    bias: Sequence[Sequence[Tensor]] | None = None,
) -> list[Tensor]:
    """Return each rank's combined tokens `[num_tokens, hidden]`, in rank order, of the dtype of `y`.

    Args:
        inputs: each rank's input of `dispatch`.
        received: the result of `dispatch` (the expert layout multiplies by its weights).
        y: for each rank, one row per row that it received, `[num_recv, hidden]`; padding rows are not read.
        bias: for each rank zero, one or two tensors `[num_tokens, hidden]`, added one after the other after the sum.
    """
    where = _row_of(received)
    wide = torch.float64 if y[0].dtype == torch.float64 else torch.float32
    hidden = y[0].shape[1]
    results = []
    for me, given in enumerate(inputs):
        num_tokens = _num_tokens(given)
        total = torch.zeros(num_tokens, hidden, dtype=wide, device="cpu")
        for token in range(num_tokens):
            parts = []
            for dst, there in enumerate(received):
                if there.layout == "rank":
                    row = where.get((dst, me, token, -1))
                    if row is not None:
                        parts.append(y[dst][row].to(wide))
                    continue
                rows = [where.get((dst, me, token, k)) for k in range(_num_topk(given))]
                products = [_weighted(there, y[dst], row, wide) for row in rows if row is not None]
                if products:
                    parts.append(_sum(products))
            if parts:
                total[token] = _sum(parts)
        for tensor in bias[me] if bias is not None else ():
            total = total + tensor.to(wide)
        results.append(total.to(y[0].dtype))
    return results


def combine_weights(
    inputs: Sequence[Routed], received: Sequence[Received], topk_weights: Sequence[Tensor]
) -> list[Tensor]:
    """Return each rank's weights `[num_tokens, num_topk]` as `combine(topk_weights=...)` sends them back.

    Args:
        inputs: each rank's input of `dispatch`.
        received: the result of `dispatch`.
        topk_weights: for each rank `[num_recv, num_topk]` (rank layout: rows are summed over the destination ranks,
            ascending) or `[num_recv]` (expert layout: the value of the row of (token, k); 0 if there is none).
    """
    where = _row_of(received)
    results = []
    for me, given in enumerate(inputs):
        num_tokens, num_topk = _num_tokens(given), _num_topk(given)
        total = torch.zeros(num_tokens, num_topk, dtype=topk_weights[0].dtype, device="cpu")
        for token in range(num_tokens):
            for dst in range(len(received)):
                if received[dst].layout == "rank":
                    row = where.get((dst, me, token, -1))
                    if row is not None:
                        total[token] = total[token] + topk_weights[dst][row]
                    continue
                for k in range(num_topk):
                    row = where.get((dst, me, token, k))
                    if row is not None:
                        total[token, k] = topk_weights[dst][row]
        results.append(total)
    return results


def lost_weight(inputs: Sequence[Routed], received: Sequence[Received], num_experts: int) -> list[Tensor]:
    """Return, for each rank, `[num_tokens]` float32: the weights of each token's experts whose rank has dropped it.

    Rank layout. Without weights an expert counts 1; where ranks were chosen, and no experts, a rank counts 1.
    """
    where, num_local = _row_of(received), num_experts // len(inputs)
    results = []
    for me, given in enumerate(inputs):
        lost = torch.zeros(_num_tokens(given), dtype=torch.float32, device="cpu")
        for token in range(len(lost)):
            if given.topk_idx is None:
                assert given.is_token_in_rank is not None
                chosen = [(dst, 1.0) for dst in range(len(inputs)) if given.is_token_in_rank[token, dst]]
            else:
                weights = [1.0] * _num_topk(given) if given.topk_weights is None else given.topk_weights[token].tolist()
                experts = zip(given.topk_idx[token].tolist(), weights, strict=True)
                chosen = [(expert // num_local, weight) for expert, weight in experts if expert >= 0]
            for dst, weight in chosen:
                if (dst, me, token, -1) not in where:
                    lost[token] += weight
        results.append(lost)
    return results


def tokens_per_expert(inputs: Sequence[Routed], num_experts: int, rank: int, expert_alignment: int = 1) -> list[int]:
    """Return, for each expert on `rank`, its number of (token, k) pairs, rounded up to the alignment."""
    num_local = num_experts // len(inputs)
    counts = [0] * num_local
    for given in inputs:
        if given.topk_idx is None:
            return []
        for row in given.topk_idx.tolist():
            for expert in row:
                if expert // num_local == rank and expert >= 0:
                    counts[expert - rank * num_local] += 1
    return [-(-count // expert_alignment) * expert_alignment for count in counts]


def _receive_by_rank(
    inputs: Sequence[Routed], num_experts: int, me: int, expert_alignment: int, capacity: int | None
) -> Received:
    num_local = num_experts // len(inputs)
    first, last = me * num_local, (me + 1) * num_local
    num_dropped = 0
    sources: list[tuple[int, int, int]] = []
    idx_rows: list[list[int]] = []
    weight_rows: list[Tensor] = []
    for src, given in enumerate(inputs):
        for token in range(_num_tokens(given)):
            if given.topk_idx is None:
                assert given.is_token_in_rank is not None
                if given.is_token_in_rank[token, me]:
                    if len(sources) == capacity:
                        num_dropped += 1
                    else:
                        sources.append((src, token, -1))
                continue
            experts = [int(expert) for expert in given.topk_idx[token]]
            local = [expert - first if first <= expert < last else -1 for expert in experts]
            if all(expert == -1 for expert in local):
                continue
            if len(sources) == capacity:
                num_dropped += 1
                continue
            sources.append((src, token, -1))
            idx_rows.append(local)
            if given.topk_weights is not None:
                keep = torch.tensor([expert != -1 for expert in local], dtype=torch.bool, device="cpu")
                weights = given.topk_weights[token]
                weight_rows.append(torch.where(keep, weights, torch.zeros_like(weights)))
    has_topk = inputs[0].topk_idx is not None
    weights_of = inputs[0].topk_weights
    num_topk = _num_topk(inputs[0])
    counts = [sum(row.count(expert) for row in idx_rows) for expert in range(num_local)] if has_topk else []
    return Received(
        x=_gather(inputs, sources),
        topk_idx=torch.tensor(idx_rows, dtype=torch.int64, device="cpu").reshape(-1, num_topk) if has_topk else None,
        topk_weights=None if weights_of is None else _stack(weight_rows, (num_topk,), weights_of.dtype),
        num_tokens_per_expert=[-(-count // expert_alignment) * expert_alignment for count in counts],
        src_rank=_column(sources, 0),
        src_token=_column(sources, 1),
        src_k=_column(sources, 2),
        layout="rank",
        num_dropped=num_dropped,
    )


def _receive_by_expert(inputs: Sequence[Routed], num_experts: int, me: int, expert_alignment: int) -> Received:
    num_local = num_experts // len(inputs)
    sources: list[tuple[int, int, int]] = []
    weights: list[Tensor] = []
    one = torch.ones((), dtype=torch.float32, device="cpu")
    for expert in range(me * num_local, (me + 1) * num_local):
        for src, given in enumerate(inputs):
            assert given.topk_idx is not None, "the expert layout needs topk_idx"
            for token, row in enumerate(given.topk_idx.tolist()):
                for k, chosen in enumerate(row):
                    if chosen == expert:
                        sources.append((src, token, k))
                        weights.append(one if given.topk_weights is None else given.topk_weights[token, k])
        while len(sources) % expert_alignment:
            sources.append((-1, -1, -1))
            weights.append(torch.zeros_like(weights[-1]))
    weights_of = inputs[0].topk_weights
    return Received(
        x=_gather(inputs, sources),
        topk_idx=None,
        topk_weights=_stack(weights, (), torch.float32 if weights_of is None else weights_of.dtype),
        num_tokens_per_expert=tokens_per_expert(inputs, num_experts, me, expert_alignment),
        src_rank=_column(sources, 0),
        src_token=_column(sources, 1),
        src_k=_column(sources, 2),
        layout="expert",
    )


def _weighted(there: Received, y: Tensor, row: int, wide: torch.dtype) -> Tensor:
    assert there.topk_weights is not None
    return there.topk_weights[row].to(wide) * y[row].to(wide)


def _sum(parts: list[Tensor]) -> Tensor:
    """Add the parts one after the other, starting from -0.0."""
    total = torch.full_like(parts[0], -0.0)
    for part in parts:
        total = total + part
    return total


def _row_of(received: Sequence[Received]) -> dict[tuple[int, int, int, int], int]:
    """Map (destination rank, source rank, token, k) to the row; k is -1 in the rank layout."""
    where = {}
    for dst, there in enumerate(received):
        triples = zip(there.src_rank.tolist(), there.src_token.tolist(), there.src_k.tolist(), strict=True)
        for row, (src, token, k) in enumerate(triples):
            if src >= 0:
                where[dst, src, token, k] = row
    return where


def _gather(inputs: Sequence[Routed], sources: list[tuple[int, int, int]]) -> Payload:
    """Stack the source rows, zero rows where the source is -1; a pair gives a pair."""
    if isinstance(inputs[0].x, tuple):
        values, scales = (_gather_part(inputs, sources, part) for part in (0, 1))
        return values, scales
    return _gather_part(inputs, sources, None)


def _gather_part(inputs: Sequence[Routed], sources: list[tuple[int, int, int]], part: int | None) -> Tensor:
    tensors = [given.x if part is None else given.x[part] for given in inputs]
    like = tensors[0]
    assert isinstance(like, Tensor)
    out = torch.zeros(len(sources), like.shape[1], dtype=like.dtype, device="cpu")
    for row, (src, token, _) in enumerate(sources):
        if src >= 0:
            out[row] = tensors[src][token]
    return out


def _stack(rows: list[Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.stack(rows) if rows else torch.empty(0, *shape, dtype=dtype, device="cpu")


def _column(sources: list[tuple[int, int, int]], which: int) -> Tensor:
    return torch.tensor([source[which] for source in sources], dtype=torch.int64, device="cpu")


def _num_tokens(given: Routed) -> int:
    return (given.x[0] if isinstance(given.x, tuple) else given.x).shape[0]


def _num_topk(given: Routed) -> int:
    return 0 if given.topk_idx is None else given.topk_idx.shape[1]
