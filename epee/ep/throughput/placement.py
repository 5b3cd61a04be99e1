"""The offsets of all rows: counts and prefix sums, no sorting of payload and no communication of offsets.

`C[s, d]` is the number of rows that rank s sends to rank d. Once all ranks know C, row i of s for d has the final
offset `sum of C[s', d] over s' < s, plus i`. The expert layout is the same with blocks of experts: an expert's block
holds its rows in (source rank, token, k) order and is padded to the alignment.

A `SendPlan` lists this rank's rows by destination; `Segment`s say which run of them has which offset at which rank.
Both layouts are alike from then on: a dispatch copies segments, a combine reads the same segments back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from ...arrays import array_of
from ...errors import InvalidArgument, ProtocolError
from ...gpu.payload import overflow
from ..config import BufferConfig

# Routing is small integer work: numpy does it with a third of torch's cost per operation.
Ints: TypeAlias = npt.NDArray[np.int64]


class Segment(NamedTuple):
    """A run of rows that is contiguous at its destination.

    Attributes:
        dst_rank: its destination.
        first: index of its first row in `SendPlan.tokens`.
        num_rows: at least 1.
        dst_row: its first row in the destination's slot.
    """

    dst_rank: int
    first: int
    num_rows: int
    dst_row: int


def by_rank(segments: Sequence[Segment]) -> dict[int, list[Segment]]:
    """Return the segments of each destination."""
    found: dict[int, list[Segment]] = {}
    for segment in segments:
        found.setdefault(segment.dst_rank, []).append(segment)
    return found


class SendPlan(NamedTuple):
    """This rank's rows, sorted by destination.

    Attributes:
        tokens: `[num_sent]` int64, the token of each row: by (dst rank, token), or by (expert, token, k).
        slots: expert layout only: `[num_sent]` int64, `token * num_topk + k` of each row.
        counts: `[num_ranks + num_experts]` int64: rows for each rank, then (token, k) slots for each expert.
    """

    tokens: torch.Tensor
    slots: torch.Tensor | None
    counts: Ints


def check_topk_idx(topk_idx: torch.Tensor, num_experts: int) -> None:
    """Raise `InvalidArgument` naming the first expert id outside -1 ... num_experts - 1."""
    ids = array_of(topk_idx)
    if ids.size == 0 or (ids.min() >= -1 and ids.max() < num_experts):
        return
    bad = (topk_idx < -1) | (topk_idx >= num_experts)
    token, k = bad.nonzero()[0].tolist()
    raise InvalidArgument(
        f"topk_idx must hold expert ids 0 ... {num_experts - 1} or -1 for none, "
        f"got {int(topk_idx[token, k])} at token {token}, k {k} ({int(bad.sum())} bad in all)"
    )


def _counted(topk_idx: torch.Tensor, num_experts: int) -> tuple[Ints, Ints]:
    """Return int64 ids as an array, and how many slots each expert has; raises as `check_topk_idx`."""
    ids = array_of(topk_idx)
    # as unsigned numbers, ids below -1 are too large as well; all of those are counted behind the experts
    which = np.minimum((ids + 1).view(np.uint64), num_experts + 1).view(np.int64)
    counts = np.bincount(which.reshape(-1), minlength=num_experts + 2)
    if counts[-1]:
        check_topk_idx(topk_idx, num_experts)
    return ids, counts[1:-1]


def plan_by_rank(topk_idx: torch.Tensor, config: BufferConfig) -> SendPlan:
    """Plan the rank layout: a token goes once to each rank that owns one of its experts; raises as `check_topk_idx`."""
    ids, per_expert = _counted(topk_idx, config.num_experts)
    member = np.zeros((config.num_ranks + 1, len(ids)), dtype=np.bool_)
    member[(ids // config.num_local_experts).T, np.arange(len(ids))] = True  # -1 is the last row, which is dropped
    return _plan_members(member[:-1], per_expert)


def plan_by_mask(is_token_in_rank: torch.Tensor, config: BufferConfig) -> SendPlan:
    """Plan the rank layout from `[num_tokens, num_ranks]` bool; experts are not known and count 0."""
    return _plan_members(array_of(is_token_in_rank).T, np.zeros(config.num_experts, dtype=np.int64))


def _plan_members(member: npt.NDArray[np.bool_], per_expert: Ints) -> SendPlan:
    dst, tokens = member.nonzero()
    per_rank = np.bincount(dst, minlength=len(member))
    # numpy returns the columns of one array: made dense, since every use of them reads all
    return SendPlan(torch.from_numpy(np.ascontiguousarray(tokens)), None, np.concatenate([per_rank, per_expert]))


def plan_by_expert(topk_idx: torch.Tensor, config: BufferConfig) -> SendPlan:
    """Plan the expert layout: a row for each (token, k) with an expert; raises as `check_topk_idx`."""
    ids, per_expert = _counted(topk_idx, config.num_experts)
    slots = np.argsort(ids, axis=None, kind="stable")[ids.size - per_expert.sum() :]
    per_rank = per_expert.reshape(config.num_ranks, config.num_local_experts).sum(1)
    tokens = torch.from_numpy(slots // config.num_topk)
    return SendPlan(tokens, torch.from_numpy(slots), np.concatenate([per_rank, per_expert]))


class Placement(NamedTuple):
    """The offsets of one call, computed from the counts of all ranks, for one rank.

    Attributes:
        segments: this rank's rows at their destinations, by destination rank ascending.
        meta_segments: the same rows in (source rank, order of the plan) order, one run per destination.
        num_received: rows that come from each rank, padding not counted.
        num_recv: rows of the result, padding included.
        num_tokens_per_expert: per local expert, rounded up to the alignment.
        recv_rows: expert layout only: `[sum(num_received)]` int64, final row of each row in (source, plan) order.
        padding: expert layout only: (first, end) of each run of padding rows.
    """

    segments: list[Segment]
    meta_segments: list[Segment]
    num_received: list[int]
    num_recv: int
    num_tokens_per_expert: list[int]
    recv_rows: torch.Tensor | None
    padding: list[tuple[int, int]]


def kept_rows(asked: Ints, capacity: int) -> Ints:
    """Return the rest of `Counts.per_rank` if each rank keeps the first `capacity` rows, sources ascending."""
    ends = asked.cumsum(0)
    kept: Ints = np.minimum(ends, capacity) - np.minimum(ends - asked, capacity)
    return kept


def drop_rows(plan: SendPlan, kept: list[int], num_tokens: int) -> tuple[SendPlan, torch.Tensor | None]:
    """Drop all but the first `kept[d]` rows for each rank d. Rank layout.

    Returns:
        The plan of the rest, and `[num_tokens, num_ranks]` bool: which were dropped; None if none were.
    """
    asked = plan.counts[: len(kept)]
    if asked.tolist() == kept:
        return plan, None
    dst = np.repeat(np.arange(len(kept)), asked)
    place = np.arange(len(dst)) - (asked.cumsum() - asked)[dst]
    is_kept = torch.from_numpy(place < np.array(kept)[dst])
    dropped = torch.zeros(num_tokens, len(kept), dtype=torch.bool, device="cpu")
    dropped[plan.tokens[~is_kept], torch.from_numpy(dst)[~is_kept]] = True
    return SendPlan(plan.tokens[is_kept], None, plan.counts), dropped


class Counts(NamedTuple):
    """The counts that all ranks are about to send.

    Attributes:
        per_rank: `[num_ranks, num_ranks]` int64, rows that each rank sends to each rank.
        per_expert: `[num_ranks, num_experts]` int64, (token, k) slots that each rank gives each expert.
    """

    per_rank: Ints
    per_expert: Ints


@lru_cache(maxsize=8)  # calls have the same numbers of tokens, time and again
def most_counts(num_tokens: tuple[int, ...], layout: str, config: BufferConfig) -> npt.NDArray[np.uint64]:
    """Return the highest counts that so many tokens of each rank can cause: rows for ranks, then slots for experts."""
    rows = config.num_topk if layout == "expert" else 1
    per_token = [rows] * config.num_ranks + [config.num_topk] * config.num_experts
    return np.outer(num_tokens, per_token).astype(np.uint64)


def checked_counts(
    told: Ints,
    num_tokens: Sequence[int],
    how: tuple[str, int, int | None],
    config: BufferConfig,
    where: Callable[[], str],
) -> Counts:
    """Return the counts of all ranks, if they are possible and all ranks have room.

    Args:
        told: `[num_ranks, num_ranks + num_experts]` int64, the counts of each rank's plan.
        num_tokens: of each rank.
        how: layout, alignment and capacity of the call.
        where: returns the call, for messages.

    Raises:
        ProtocolError, InvalidArgument: they are not; the same result on every rank.
    """
    num_ranks, (layout, alignment, most) = config.num_ranks, how
    per_rank, per_expert = told[:, :num_ranks], told[:, num_ranks:]
    # as unsigned numbers, counts below 0 are too large as well
    possible = not np.count_nonzero(told.view(np.uint64) > most_counts(tuple(num_tokens), layout, config))
    if layout == "expert":
        possible = possible and (per_expert.reshape(num_ranks, num_ranks, -1).sum(2) == per_rank).all()
    if not possible:
        raise ProtocolError(f"{where()}: the exchanged counts are impossible; the memory of a rank is corrupt")
    counts = Counts(per_rank if most is None else kept_rows(per_rank, most), per_expert)
    needed = num_rows_needed(counts, layout, alignment, config)
    capacity = config.capacity(layout, alignment)
    worst = max(range(num_ranks), key=needed.__getitem__)
    if needed[worst] > capacity:
        raise InvalidArgument(f"{where()}: {overflow(worst, needed[worst], layout, capacity)}")
    return counts


def num_rows_needed(counts: Counts, layout: str, alignment: int, config: BufferConfig) -> list[int]:
    """Return how many rows each rank will hold, padding included."""
    if layout == "rank":
        return counts.per_rank.sum(0).tolist()
    padded = aligned(counts.per_expert.sum(0), alignment)
    return padded.reshape(config.num_ranks, config.num_local_experts).sum(1).tolist()


def aligned(counts: Ints, alignment: int) -> Ints:
    """Return counts of the rows of experts rounded up to the alignment: the sizes of their blocks."""
    return counts if alignment == 1 else -(-counts // alignment) * alignment


def place(counts: Counts, rank: int, layout: str, alignment: int, config: BufferConfig) -> Placement:
    """Compute the offsets of `rank` from the checked counts of all ranks."""
    meta = _segments_by_rank(counts.per_rank[rank].tolist(), counts.per_rank[:rank].sum(0).tolist())
    num_received: list[int] = counts.per_rank[:, rank].tolist()
    first = rank * config.num_local_experts
    mine = counts.per_expert[:, first : first + config.num_local_experts]
    per_expert = aligned(mine.sum(0), alignment).tolist()
    if layout == "rank":
        return Placement(meta, meta, num_received, sum(num_received), per_expert, None, [])
    segments = _segments_by_expert(counts.per_expert, rank, alignment, config)
    recv_rows, padding = _receive_by_expert(mine, per_expert)
    return Placement(segments, meta, num_received, sum(per_expert), per_expert, recv_rows, padding)


def _segments_by_rank(num_sent: list[int], base: list[int]) -> list[Segment]:
    segments = []
    first = 0
    for dst_rank, count in enumerate(num_sent):
        if count:
            segments.append(Segment(dst_rank, first, count, base[dst_rank]))
        first += count
    return segments


def _segments_by_expert(per_expert: Ints, rank: int, alignment: int, config: BufferConfig) -> list[Segment]:
    padded = aligned(per_expert.sum(0), alignment).tolist()
    before = per_expert[:rank].sum(0).tolist()
    num_sent = per_expert[rank].tolist()
    segments = []
    first = block = 0
    for expert, num_rows in enumerate(padded):
        if expert % config.num_local_experts == 0:
            block = 0
        if num_sent[expert]:
            dst_rank = expert // config.num_local_experts
            segments.append(Segment(dst_rank, first, num_sent[expert], block + before[expert]))
        first += num_sent[expert]
        block += num_rows
    return segments


def _receive_by_expert(mine: Ints, padded: list[int]) -> tuple[torch.Tensor, list[tuple[int, int]]]:
    ends = np.cumsum(padded)
    block = ends - padded
    start = block + mine.cumsum(0) - mine  # [num_ranks, num_local_experts], first row of each (source, expert) run
    recv_rows = torch.from_numpy(runs(start.reshape(-1), mine.reshape(-1)))
    filled = (block + mine.sum(0)).tolist()
    padding = [(first, end) for first, end in zip(filled, ends.tolist(), strict=True) if first < end]
    return recv_rows, padding


def runs(start: Ints, count: Ints) -> Ints:
    """Return `start[0], start[0] + 1, ...` (`count[0]` of them), then the run of `start[1]`, and so on."""
    skipped = start - count.cumsum() + count
    return np.repeat(skipped, count) + np.arange(count.sum())
