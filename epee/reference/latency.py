"""Low-latency dispatch and combine by their definition, one token at a time.

Inputs and outputs are lists over *all* ranks (index = rank); there is no communication.
R is the number of ranks, T `max_tokens`, L the experts of one rank, H the hidden size, K the columns of `topk_idx`.
Expert `e` is on rank `e // L`. CPU code and kernels must give these results, bit for bit.

**Dispatch.** The result of a rank is `x [L, R * T, H]`: block `j` holds the rows of its local expert `j`, packed from
row 0 on, in (source rank, token) order. `num_tokens_per_expert[j]` (int32) is their number; the rows after
them are undefined (zeros here) and never read.

- A row is a token: an expert that occurs twice in a token's `topk_idx` receives the token once, so that R * T rows
  always suffice. (Combine adds both weights' products all the same.) -1 selects nothing; a token of only -1 is not
  sent.
- Zero tokens are a legal batch. Ranks may have different numbers of tokens, 0 ... T.
- Weights are sent with the rows: float32, as given to dispatch, ones when none were given.
- `layout_range[j, s] = begin << 32 | count` (int64): the rows of source `s` in block `j`. `begin` is right for empty
  runs too: the rows of the sources before `s`. `src_token[j, row]` (int32) is the token's index on its source.

**FP8** (float8_e4m3fn, finite values up to 448). The sender quantises each token once; all experts receive the same
bytes. For each block of 128 channels, everything in float32, each operation rounded once (to nearest, ties to even),
true divisions, no fused multiply-add:

    amax   = max(|v| over the block, 1e-4)           NaNs do not count
    scale  = amax / 448        factor = 448 / amax       value = e4m3(v * factor)
    with `round_scale`: scale = the smallest power of two that is not below amax / 448 (from its bits: exponent, plus
    one unless the mantissa is zero), factor = 1 / scale

`v * factor` never exceeds 448 by more than rounding, so saturation does not matter. A value that is not finite
becomes a NaN, of either sign. Scales are float32 `[L, R * T, H / 128]`, or with `use_ue8m0` (needs `round_scale`, and
H a multiple of 512) int32 `[L, R * T, H / 512]`: the exponent bytes (`bits >> 23`) of four neighbouring blocks, the
first in the lowest byte. In memory they are DeepEP's: `[L, H / 128, R * T]` (`[L, H / 512, R * T]`), returned
transposed, so the row stride is 1.

**Combine.** The expert rank weights and sums its own experts' rows of a token, and sends one row back:

    partial = -0.0;  for k ascending over the token's k whose expert is on that rank:
        partial = partial + w[t, k] * row(expert, t)     in float32, the product rounded before it is added
    partial is rounded to `partial_dtype` (bfloat16 by default, float32 leaves it); also when it stays on its rank
    acc = -0.0;  for the ranks that have rows of the token, ascending:  acc = acc + partial
    a token without any row: acc = +0.0;  the result is acc rounded to bfloat16, once

-0.0 is the neutral element, so a sum of one row is that row, bit for bit. Weights are those of the dispatch, or those
given to combine (`topk_weights`, `[num_tokens, K]` float32 on the token's rank), which then replace all of them.

**Masks.** `got[me][peer]` says whether the rows of `peer` reached `me` in time. A dispatch without a source equals a
dispatch in which that source has no token: no row, no count, no range, even if a part of them had arrived. In combine,
rank `d` counts for the tokens of rank `s` only if `d` had `s` in its dispatch *and* its partials reached `s`; else all
of them are excluded. Nothing is renormalised: `lost_weight` is the sum (k ascending, float32, from +0.0) of the weights
whose expert is on a rank that did not count. A token all of whose weight is lost is +0.0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
LEAST_AMAX = 1e-4
SCALE_BLOCK = 128

Payload = Tensor | tuple[Tensor, Tensor]
Mask = Sequence[Sequence[bool]]


@dataclass(frozen=True)
class Sent:
    """One rank's input of dispatch.

    Attributes:
        x: `[num_tokens, hidden]` bfloat16.
        topk_idx: `[num_tokens, num_topk]` integer expert ids, -1 = none.
        topk_weights: `[num_tokens, num_topk]` float32, or None for ones.
    """

    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor | None = None


@dataclass(frozen=True)
class Packed:
    """One rank's expected result of dispatch.

    Attributes:
        x: `[L, R * T, H]` bfloat16, or the pair (float8_e4m3fn values, scales).
        num_tokens_per_expert: `[L]` int32.
        layout_range: `[L, R]` int64, `begin << 32 | count`.
        src_rank: `[L, R * T]` int32, -1 after the rows.
        src_token: `[L, R * T]` int32, -1 after the rows.
        got: `[R]` bool.
    """

    x: Payload
    num_tokens_per_expert: Tensor
    layout_range: Tensor
    src_rank: Tensor
    src_token: Tensor
    got: Tensor


def quantise(x: Tensor, *, round_scale: bool = False) -> tuple[Tensor, Tensor]:
    """Return `x` in FP8: values `[n, H]` float8_e4m3fn and scales `[n, H / 128]` float32.

    Args:
        x: `[n, H]` bfloat16 (or float32), H a multiple of 128.
        round_scale: powers of two only.
    """
    num_tokens, hidden = x.shape
    blocks = x.to(torch.float32).view(num_tokens, hidden // SCALE_BLOCK, SCALE_BLOCK)
    size = torch.where(blocks.isnan(), torch.zeros_like(blocks), blocks.abs())
    amax = size.amax(2).clamp(min=LEAST_AMAX)
    full = torch.full_like(amax, FP8_MAX)  # `448.0 / amax` would be a reciprocal and a product in torch
    scales = amax / full
    factor = full / amax
    if round_scale:
        scales = power_of_two_above(scales)
        factor = torch.ones_like(scales) / scales
    values = (blocks * factor[:, :, None]).view(num_tokens, hidden)
    return values.to(FP8), scales


def power_of_two_above(scales: Tensor) -> Tensor:
    """Return the smallest powers of two that are not below `scales` (float32, positive, normal)."""
    bits = scales.contiguous().view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(torch.int32)
    return (exponent << 23).view(torch.float32)


def pack_ue8m0(scales: Tensor) -> Tensor:
    """Return `[..., n / 4]` int32 of `[..., n]` float32 powers of two: four exponents each, the first lowest."""
    exponents = (scales.contiguous().view(torch.int32) >> 23).to(torch.uint8)
    return exponents.view(torch.int32)


def dispatch(
    inputs: Sequence[Sent],
    num_experts: int,
    max_tokens: int,
    *,
    use_fp8: bool = False,
    round_scale: bool = False,
    use_ue8m0: bool = False,
    got: Mask | None = None,
) -> list[Packed]:
    """Return the expected results of all ranks, in rank order.

    Args:
        inputs: of each rank; `len(inputs)` is R and divides `num_experts`.
        num_experts: over all ranks.
        max_tokens: T.
        use_fp8, round_scale, use_ue8m0: see the module docstring.
        got: `got[me][src]`; all True when None.
    """
    ranks = range(len(inputs))
    sent = [_rows(given.x, use_fp8, round_scale, use_ue8m0) for given in inputs]
    return [_receive(me, inputs, sent, num_experts, max_tokens, _row(got, me, len(inputs))) for me in ranks]


def combine(
    inputs: Sequence[Sent],
    packed: Sequence[Packed],
    y: Sequence[Tensor],
    *,
    topk_weights: Sequence[Tensor] | None = None,
    partial_dtype: torch.dtype = torch.bfloat16,
    got: Mask | None = None,
) -> list[Tensor]:
    """Return each rank's combined tokens `[num_tokens, H]` bfloat16, in rank order.

    Args:
        inputs: each rank's input of `dispatch`.
        packed: the result of `dispatch`.
        y: for each rank `[L, R * T, H]` bfloat16 expert outputs; rows after the counts are not read.
        topk_weights: for each rank `[num_tokens, K]` float32 instead of the dispatch's weights.
        partial_dtype: bfloat16 or float32: dtype of the rows that are sent back.
        got: `got[me][dst]`: whether the partials of `dst` arrived; all True when None.
    """
    where = [_row_of(there) for there in packed]
    results = []
    for me, given in enumerate(inputs):
        weights = _weights(given) if topk_weights is None else topk_weights[me]
        counts = counted(packed, me, got)
        total = torch.zeros(len(given.x), given.x.shape[1], dtype=torch.float32, device="cpu")
        for token, experts in enumerate(given.topk_idx.tolist()):
            partials = []
            for dst in range(len(inputs)):
                if counts[dst]:
                    partials += _partial(dst, me, token, experts, weights, y[dst], where[dst], partial_dtype)
            if partials:
                total[token] = _sum(partials)
        results.append(total.to(torch.bfloat16))
    return results


def counted(packed: Sequence[Packed], me: int, got: Mask | None = None) -> list[bool]:
    """Return the `got` of a combine on rank `me`: ranks that had its tokens, and whose partials arrived."""
    came = _row(got, me, len(packed))
    return [came[dst] and bool(there.got[me]) for dst, there in enumerate(packed)]


def lost_weight(given: Sent, num_local_experts: int, got: Sequence[bool], topk_weights: Tensor | None = None) -> Tensor:
    """Return `[num_tokens]` float32: the weights of each token whose expert is on a rank that did not count.

    Args:
        given: the rank's input of dispatch.
        num_local_experts: L.
        got: of its combine (`counted`).
        topk_weights: the weights of the combine, when it had its own.
    """
    weights = _weights(given) if topk_weights is None else topk_weights
    lost = torch.zeros(len(given.x), dtype=torch.float32, device="cpu")
    for token, experts in enumerate(given.topk_idx.tolist()):
        for k, expert in enumerate(experts):
            if expert >= 0 and not got[expert // num_local_experts]:
                lost[token] = lost[token] + weights[token, k]
    return lost


def _rows(x: Tensor, use_fp8: bool, round_scale: bool, use_ue8m0: bool) -> Payload:
    """Return the payload of a token: its row, or its FP8 values and scales."""
    if not use_fp8:
        return x
    values, scales = quantise(x, round_scale=round_scale)
    return values, pack_ue8m0(scales) if use_ue8m0 else scales


def _receive(
    me: int, inputs: Sequence[Sent], sent: Sequence[Payload], num_experts: int, max_tokens: int, got: Sequence[bool]
) -> Packed:
    num_ranks = len(inputs)
    num_local, capacity = num_experts // num_ranks, num_ranks * max_tokens
    counts = torch.zeros(num_local, dtype=torch.int32, device="cpu")
    ranges = torch.zeros(num_local, num_ranks, dtype=torch.int64, device="cpu")
    src_rank = torch.full((num_local, capacity), -1, dtype=torch.int32, device="cpu")
    src_token = torch.full((num_local, capacity), -1, dtype=torch.int32, device="cpu")
    parts = [_empty(part, num_local, capacity) for part in _parts(sent[0])]
    for local in range(num_local):
        row = 0
        for src, given in enumerate(inputs):
            begin = row
            for token, experts in enumerate(given.topk_idx.tolist() if got[src] else []):
                if me * num_local + local not in experts:
                    continue
                src_rank[local, row], src_token[local, row] = src, token
                for place, part in zip(parts, _parts(sent[src]), strict=True):
                    place[local, row] = part[token]
                row += 1
            ranges[local, src] = begin << 32 | row - begin
        counts[local] = row
    x = parts[0] if len(parts) == 1 else (parts[0], parts[1])
    return Packed(x, counts, ranges, src_rank, src_token, torch.tensor(got, dtype=torch.bool, device="cpu"))


def _parts(payload: Payload) -> tuple[Tensor, ...]:
    return payload if isinstance(payload, tuple) else (payload,)


def _empty(like: Tensor, num_local: int, capacity: int) -> Tensor:
    """Return zeros `[L, R * T, columns]`; scales (any 4-byte dtype) with the rows of a column adjacent."""
    columns = like.shape[1]
    if like.dtype.itemsize == 4:
        return torch.zeros(num_local, columns, capacity, dtype=like.dtype, device="cpu").transpose(1, 2)
    return torch.zeros(num_local, capacity, columns, dtype=like.dtype, device="cpu")


def _partial(
    dst: int,
    me: int,
    token: int,
    experts: list[int],
    weights: Tensor,
    y: Tensor,
    where: dict[tuple[int, int, int], int],
    partial_dtype: torch.dtype,
) -> list[Tensor]:
    """Return the row that rank `dst` sends back for a token of rank `me`, as float32: one row or none."""
    num_local = len(y)
    products = []
    for k, expert in enumerate(experts):
        if expert >= 0 and expert // num_local == dst:
            local = expert % num_local
            row = y[local, where[local, me, token]]
            products.append(weights[token, k].to(torch.float32) * row.to(torch.float32))
    return [_sum(products).to(partial_dtype).to(torch.float32)] if products else []


def _sum(parts: list[Tensor]) -> Tensor:
    """Add the parts one after the other, starting from -0.0."""
    total = torch.full_like(parts[0], -0.0)
    for part in parts:
        total = total + part
    return total


def _row_of(packed: Packed) -> dict[tuple[int, int, int], int]:
    """Map (local expert, source rank, token) to the row of the expert's block."""
    where = {}
    for local, count in enumerate(packed.num_tokens_per_expert.tolist()):
        for row in range(count):
            where[local, int(packed.src_rank[local, row]), int(packed.src_token[local, row])] = row
    return where


def _weights(given: Sent) -> Tensor:
    if given.topk_weights is None:
        return torch.ones(given.topk_idx.shape, dtype=torch.float32, device="cpu")
    return given.topk_weights


def _row(got: Mask | None, me: int, num_ranks: int) -> list[bool]:
    return [True] * num_ranks if got is None else [bool(value) for value in got[me]]
