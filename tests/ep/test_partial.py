"""Results where somebody is missing, against the placement that a call without the missing would have had."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from epee.ep.config import BufferConfig
from epee.ep.handle import CpuHandle, DispatchRouting
from epee.ep.throughput.partial import lost_weight, without_destinations
from epee.ep.throughput.placement import Counts, SendPlan, place, plan_by_expert, plan_by_rank

NUM_RANKS, LOCAL, NUM_TOPK, HIDDEN = 4, 2, 3, 8
CONFIG = BufferConfig(NUM_RANKS, NUM_RANKS * LOCAL, HIDDEN, NUM_TOPK, 16, torch.float32)


def _plans(seed: int, layout: str) -> tuple[list[SendPlan], list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    plans, ids = [], []
    for _ in range(NUM_RANKS):
        num_tokens = int(torch.randint(0, 7, (1,), generator=generator))
        idx = torch.randint(-1, NUM_RANKS * LOCAL, (num_tokens, NUM_TOPK), generator=generator)
        plans.append(plan_by_rank(idx, CONFIG) if layout == "rank" else plan_by_expert(idx, CONFIG))
        ids.append(idx)
    return plans, ids


def _counts(plans: list[SendPlan], missing: set[int]) -> Counts:
    rows = torch.stack([torch.from_numpy(plan.counts) for plan in plans])
    rows[sorted(missing)] = 0
    return Counts(rows[:, :NUM_RANKS].numpy(), rows[:, NUM_RANKS:].numpy())


def _handle(plans: list[SendPlan], rank: int, layout: str, alignment: int, missing: set[int]) -> CpuHandle:
    placement = place(_counts(plans, missing), rank, layout, alignment, CONFIG)
    num_tokens = 8
    return CpuHandle(1, 1, 1, layout, alignment, num_tokens, NUM_TOPK, True, plans[rank], placement)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1 << 30), st.sampled_from(["rank", "expert"]), st.sets(st.integers(0, NUM_RANKS - 1), min_size=1))
def test_a_combine_without_some_ranks_reads_the_others_rows_only(seed: int, layout: str, missing: set[int]) -> None:
    plans, _ = _plans(seed, layout)
    whole = _handle(plans, 1, layout, 1, set())
    less = without_destinations(whole, missing)

    def reads(handle: CpuHandle) -> list[tuple[int, int, int]]:
        found = []
        for segment in handle.placement.segments:
            tokens = handle.plan.tokens[segment.first : segment.first + segment.num_rows].tolist()
            found += [(segment.dst_rank, segment.dst_row + i, token) for i, token in enumerate(tokens)]
        return found

    assert reads(less) == [read for read in reads(whole) if read[0] not in missing]
    assert less.num_sent == [0 if rank in missing else count for rank, count in enumerate(whole.num_sent)]
    there = {token for _, _, token in reads(less)}
    assert less.empty_tokens.tolist() == [token for token in range(whole.num_tokens) if token not in there]
    if layout == "expert":
        pulled = sorted(
            (pull.dst_rank, row) for pull in less.pulls for _, _, rows in pull.runs for row in rows.tolist()
        )
        assert pulled == sorted((dst, row) for dst, row, _ in reads(less))


def test_lost_weight_counts_what_was_asked_of_the_missing() -> None:
    idx = torch.tensor([[0, 2, -1], [6, 6, 1], [-1, -1, -1]])
    weights = torch.tensor([[1.0, 2.0, float("nan")], [4.0, 8.0, float("nan")], [1.0, 1.0, 1.0]])
    assert lost_weight(DispatchRouting(idx, weights, None), (1, 3), CONFIG).tolist() == [2.0, 12.0, 0.0]
    assert lost_weight(DispatchRouting(idx, None, None), (1, 3), CONFIG).tolist() == [1.0, 2.0, 0.0]
    assert lost_weight(DispatchRouting(idx, weights, None), (), CONFIG).tolist() == [0.0, 0.0, 0.0]
    mask = torch.tensor([[True, True, False, True], [False, False, True, False]])
    assert lost_weight(DispatchRouting(None, None, mask), (1, 3), CONFIG).tolist() == [2.0, 0.0]


def test_a_row_that_was_dropped_by_a_rank_that_is_lost_counts_once() -> None:
    idx = torch.tensor([[0, 2, -1], [6, 6, 1]])
    weights = torch.tensor([[1.0, 2.0, float("nan")], [4.0, 8.0, 16.0]])
    dropped = torch.tensor([[False, True, False, False], [True, False, False, True]])
    routing = DispatchRouting(idx, weights, None)
    assert lost_weight(routing, (), CONFIG, dropped).tolist() == [2.0, 28.0]
    assert lost_weight(routing, (1, 3), CONFIG, dropped).tolist() == [2.0, 28.0]
    assert lost_weight(routing, (0, 1), CONFIG, dropped).tolist() == [3.0, 28.0]
    mask = torch.tensor([[True, True, False, True], [True, False, True, True]])
    assert lost_weight(DispatchRouting(None, None, mask), (1,), CONFIG, dropped).tolist() == [1.0, 2.0]
