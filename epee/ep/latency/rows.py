"""The arithmetic of `LatencyBuffer` on the CPU: quantise rows, place received rows with their experts, sum them back.

Pure functions of tensors; `epee/reference/latency.py` defines the result of each of them, bit for bit.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ..throughput.placement import Ints
from .types import SCALE_BLOCK, Quantisation

FP8 = torch.float8_e4m3fn
_FP8_MAX = 448.0
_LEAST_AMAX = 1e-4
Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]


class WireRows(NamedTuple):
    """Rows as they cross: bytes, and scales as 4-byte words when they are FP8.

    Attributes:
        data: `[num_rows, hidden]` bfloat16 or float8_e4m3fn.
        scales: `[num_rows, num_scales]` float32 or int32, or None.
    """

    data: torch.Tensor
    scales: torch.Tensor | None


class Source(NamedTuple):
    """The rows sent by one rank: a row for each of its tokens that has an expert here.

    Attributes:
        tokens: `[num_rows]` int64, ascending.
        local: `[num_rows, num_topk]` int64, ids among this rank's experts, -1 elsewhere.
        weights: `[num_rows, num_topk]` float32.
        place: `[num_rows, num_topk]` int64: `local * capacity + row in the expert's block`, -1 where not local.
    """

    tokens: Ints
    local: Ints
    weights: Floats
    place: Ints


class Placed(NamedTuple):
    """The placement of all received rows.

    Attributes:
        sources: for each rank the rows that it sent, None if nothing arrived.
        num_tokens_per_expert: `[num_local]` int32.
        layout_range: `[num_local, num_ranks]` int64.
        src_token: `[num_local, capacity]` int32, -1 after the rows.
    """

    sources: list[Source | None]
    num_tokens_per_expert: npt.NDArray[np.int32]
    layout_range: Ints
    src_token: npt.NDArray[np.int32]


def as_sent(x: torch.Tensor, how: Quantisation) -> WireRows:
    """Return the rows as they cross, each quantised once."""
    if not how.use_fp8:
        return WireRows(x, None)
    num_tokens, hidden = x.shape
    wide = x.to(torch.float32, memory_format=torch.contiguous_format).view(
        num_tokens, hidden // SCALE_BLOCK, SCALE_BLOCK
    )
    amax = wide.abs().nan_to_num_(nan=0.0, posinf=float("inf")).amax(2).clamp_(min=_LEAST_AMAX)
    largest = torch.full_like(amax, _FP8_MAX)  # a number on the left of `/` would become a reciprocal and a product
    scales, factor = amax / largest, largest / amax
    if how.round_scale:
        bits = scales.view(torch.int32)
        exponents = bits.bitwise_right_shift(23).add_(bits.bitwise_and(0x7FFFFF).ne(0))
        scales = exponents.bitwise_left_shift(23).view(torch.float32)
        factor = torch.ones_like(scales).div_(scales)
    eights = wide.mul_(factor.unsqueeze(2)).view(num_tokens, hidden).to(FP8)
    if how.use_ue8m0:
        bytes_ = scales.view(torch.int32).bitwise_right_shift(23).to(torch.uint8).contiguous()
        return WireRows(eights, bytes_.view(torch.int32))
    return WireRows(eights, scales)


def num_scales(hidden: int, how: Quantisation) -> int:
    """Return the 4-byte words of scales beside a row."""
    if not how.use_fp8:
        return 0
    return hidden // (4 * SCALE_BLOCK if how.use_ue8m0 else SCALE_BLOCK)


def place_rows(sources: list[tuple[Ints, Ints, Floats] | None], num_local: int, capacity: int) -> Placed:
    """Compute the offset of every received row with each of its experts.

    Args:
        sources: for each rank its tokens, local ids and weights (see `Source`), None if nothing arrived.
        num_local: experts of this rank.
        capacity: rows of an expert's block.
    """
    counts = np.zeros((num_local, len(sources)), dtype=np.int64)
    members: list[Bools] = []
    for src, given in enumerate(sources):
        member = np.zeros((0, num_local), dtype=np.bool_)
        if given is not None:
            local = given[1]
            member = np.zeros((len(local), num_local + 1), dtype=np.bool_)
            np.put_along_axis(member, np.where(local < 0, num_local, local), True, axis=1)
            member = member[:, :num_local]
        counts[:, src] = member.sum(0)
        members.append(member)
    begins = counts.cumsum(1) - counts
    src_token = np.full((num_local, capacity), -1, dtype=np.int32)
    placed: list[Source | None] = []
    for src, given in enumerate(sources):
        if given is None:
            placed.append(None)
            continue
        tokens, local, weights = given
        rank_in_block = members[src].cumsum(0) - 1 + begins[:, src]
        where = np.take_along_axis(rank_in_block, np.maximum(local, 0), axis=1) if len(local) else local
        place = np.where(local < 0, -1, np.maximum(local, 0) * capacity + where)
        rows, ks = (place >= 0).nonzero()
        src_token.reshape(-1)[place[rows, ks]] = tokens[rows]
        placed.append(Source(tokens, local, weights, place))
    ranges = begins << 32 | counts
    return Placed(placed, counts.sum(1).astype(np.int32), ranges, src_token)


def expand(source: Source, rows: WireRows, x: torch.Tensor, scales: torch.Tensor | None) -> None:
    """Copy a source's rows to their offsets.

    Args:
        source: the source.
        rows: of it, in shared memory.
        x: `[num_local * capacity, hidden]`, written.
        scales: `[num_local, num_scales, capacity]`, written; None without.
    """
    index, ks = (source.place >= 0).nonzero()
    row, place = torch.from_numpy(index), torch.from_numpy(source.place[index, ks])
    words = rows.data.view(torch.int64)  # torch cannot index FP8
    x.view(torch.int64).index_copy_(0, place, words.index_select(0, row))
    if scales is not None and rows.scales is not None:
        capacity = scales.shape[2]
        scales[place // capacity, :, place % capacity] = rows.scales.index_select(0, row)


def partial_sums(source: Source, weights: Floats, y: torch.Tensor) -> torch.Tensor:
    """Return `[num_rows, hidden]` float32: each row's experts here, weighted and summed, k ascending.

    Args:
        source: whose rows.
        weights: `[num_rows, num_topk]` float32.
        y: `[num_local * capacity, hidden]` bfloat16.
    """
    total = torch.full((len(source.tokens), y.shape[1]), -0.0, dtype=torch.float32, device="cpu")
    for k in range(source.place.shape[1]):
        index = (source.place[:, k] >= 0).nonzero()[0]
        if not len(index):
            continue
        rows = torch.from_numpy(index)
        products = y.index_select(0, torch.from_numpy(source.place[index, k])).to(torch.float32)
        products.mul_(torch.from_numpy(weights[index, k])[:, None])
        total.index_add_(0, rows, products)  # a row occurs once in `rows`: one addition each
    return total


def sum_over_ranks(parts: list[tuple[Ints, torch.Tensor]], num_tokens: int, hidden: int) -> torch.Tensor:
    """Return `[num_tokens, hidden]` bfloat16.

    Args:
        parts: for the ranks ascending, tokens and their partial rows (bfloat16 or float32).
        num_tokens, hidden: of the result.
    """
    total = torch.full((num_tokens, hidden), -0.0, dtype=torch.float32, device="cpu")
    is_empty = np.ones(num_tokens, dtype=np.bool_)
    for tokens, rows in parts:
        total.index_add_(0, torch.from_numpy(tokens), rows.to(torch.float32))
        is_empty[tokens] = False
    total[torch.from_numpy(is_empty)] = 0.0
    return total.to(torch.bfloat16)


def lost_weight(owners: Ints, weights: Floats, got: Bools) -> torch.Tensor:
    """Return `[num_tokens]` float32: the sum, k ascending, of the weights whose owner is not in `got`.

    Args:
        owners: `[num_tokens, num_topk]` ranks, -1 for none.
        weights: `[num_tokens, num_topk]`.
        got: `[num_ranks]`.
    """
    lost = np.zeros(len(owners), dtype=np.float32)
    gone = (owners >= 0) & ~got[np.maximum(owners, 0)]
    for k in range(owners.shape[1]):
        lost[gone[:, k]] += weights[gone[:, k], k]
    return torch.from_numpy(lost)
