"""`capacity`: a rank keeps its first rows, and everybody goes by that. Functions for CPUs and, from `tests/csrc`, GPUs.

What is dispatched and combined is compared with the reference by `check_setups`; here is what handles say, room, and
calls whose host waits for nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import epee
from epee import reference
from epee.ep.throughput.placement import SendPlan, drop_rows, kept_rows
from epee.reference import Routed
from tests.ep.buffer_cases import ROUTINGS, Call, Setup, check_setups, same_bits
from tests.ep.gpu_buffer_cases import NUM_LOCAL, make, tokens
from tests.harness import run_ranks


def setups(num_ranks: int, dtype: str = "bfloat16") -> list[Setup]:
    """Every routing, with capacities from 1 to more than enough; FP8 pairs; weights back; y copied and in place."""
    counts = tuple((9 + 5 * rank) % 12 for rank in range(num_ranks))
    calls = [
        Call(
            seed, counts, routing, expert_alignment=1 + seed % 3, num_bias=seed % 3, in_place=seed % 2 == 0,
            with_out=seed % 3 == 1, with_weights=seed != 3, with_again=seed % 2 == 1, with_weights_back=seed != 2,
            capacity=capacity,
        )
        for seed, routing in enumerate(ROUTINGS)
        for capacity in (1, 4, 3 * num_ranks, 1000)
    ]  # fmt: skip
    pairs = [
        Call(seed, counts, payload=payload, capacity=5, with_weights_back=True)
        for seed, payload in enumerate(("fp8", "fp8 strided", "fp8 packed"))
    ]
    return [
        Setup(num_ranks, 2, 16, 2, dtype, 1, tuple(calls)),
        Setup(num_ranks, 3, 512, 5, dtype, 2, (*pairs, *calls[:8])),
    ]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_agrees_with_the_reference(num_ranks: int) -> None:
    check_setups(num_ranks, setups(num_ranks), timeout_s=60)


def _exact(rank: int, num_ranks: int, capacity: int) -> list[Any]:
    """What results and handles say, with rows that are known; with `sync` both ways where that differs."""
    found = []
    with make(num_ranks) as buffer:
        for step, num_tokens in enumerate((11, 0, 15)):
            x, idx, weights = tokens(buffer, num_tokens + rank % 2, step)
            for sync in (True, False):
                d = buffer.dispatch(x, idx, weights, expert_alignment=3, capacity=capacity, sync=sync)
                handle, num_recv = d.handle, int(d.handle.recv_counts[0])
                if not sync and buffer.config.is_cuda:
                    assert len(d.x) == handle.num_recv == min(capacity, 16 * num_ranks)
                    assert bool((d.topk_idx[num_recv:] == -1).all())
                    assert bool((handle.src_rank[num_recv:] == -1).all())
                    assert d.num_tokens_per_expert == []
                else:
                    assert len(d.x) == num_recv
                    assert d.num_tokens_per_expert == handle.recv_counts[1:].tolist()
                assert d.num_dropped.device == buffer.config.device
                y = torch.full_like(d.x, torch.nan)  # rows that nobody received must not be read
                y[:num_recv] = d.x[:num_recv]
                there = buffer.combine_input(handle)
                there.copy_(y)
                results = [buffer.combine(rows, handle) for rows in (y, there, y)]
                for result in results[1:]:
                    same_bits(result.x, results[0].x, "combined")
                lists = handle.num_received, handle.num_sent, int(d.num_dropped)
                counts = handle.recv_counts, handle.recv_slots, handle.slot_ends, handle.token_ends
                assert all(count.dtype == torch.int32 for count in counts)
                parts = d.x, d.topk_idx, d.topk_weights, handle.src_rank, handle.src_token
                rest = results[2].x, results[2].lost_weight
                whole = [value.clone().cpu() for value in (*counts, *(part[:num_recv] for part in parts), *rest)]
                found.append((lists, whole))
    return found


def check_exact(run: Callable[..., list[Any]], num_ranks: int, capacity: int) -> None:
    """Compare handles and results of `run` with the CPU's, and these with counting one by one."""
    wanted = run_ranks(_exact, num_ranks, capacity)
    for mine, other in zip(run(_exact, num_ranks, capacity), wanted, strict=True):
        for (lists, whole), (want_lists, want_whole) in zip(mine, other, strict=True):
            assert lists == want_lists
            for got, want in zip(whole, want_whole, strict=True):
                same_bits(got, want, "a part of the handle")
    for rank, found in enumerate(wanted):
        for step, (lists, whole) in enumerate(found):
            num_received, num_sent, num_dropped = lists
            assert sum(num_received) <= capacity
            assert num_dropped == 0 or sum(num_received) == capacity
            assert [other[step][0][0][rank] for other in wanted] == num_sent
            ids = whole[5]
            assert whole[1].tolist() == [int((ids == expert).sum()) for expert in range(NUM_LOCAL)]
            padded = [-(-count // 3) * 3 for count in whole[1].tolist()]
            assert whole[0].tolist() == [sum(num_received), *padded]
            assert whole[2].tolist() == [sum(padded[: i + 1]) for i in range(NUM_LOCAL)]
            assert whole[3].tolist() == [sum(num_received[: src + 1]) for src in range(len(wanted))]


@pytest.mark.parametrize("capacity", [1, 6, 100])
def test_handles_know_what_was_kept(capacity: int) -> None:
    check_exact(run_ranks, 3, capacity)


def _room(rank: int, num_ranks: int) -> list[str]:
    """Nine rows for each rank, which has room for five."""
    seen = []
    with make(num_ranks, max_recv_rows=5) as buffer:
        x, idx, _ = tokens(buffer, 3)
        everywhere = torch.arange(3, device=idx.device).mul(NUM_LOCAL).expand(3, 3).contiguous()
        for capacity in (None, 6, 5, 2):
            try:
                d = buffer.dispatch(x, everywhere, capacity=capacity)
                seen.append(f"{len(d.x)} {int(d.num_dropped)}")
                back = buffer.combine(d.x, d.handle)
                want = [3 if 3 * rank + token < capacity else 0 for token in range(3)]
                same_bits(back.x, x * torch.tensor(want, dtype=x.dtype, device=x.device)[:, None] + 0.0, "combined")
                assert back.lost_weight.tolist() == [3.0 - count for count in want]
            except epee.InvalidArgument as error:
                seen.append(str(error))
    return seen


def check_room(run: Callable[..., list[Any]]) -> None:
    """Rows are dropped for the capacity alone: what is kept must have room."""
    for seen in run(_room, 3):
        assert all("would receive" in text and "holds 5" in text for text in seen[:2]), seen
        assert seen[2:] == ["5 4", "2 7"]


def test_what_is_kept_must_have_room() -> None:
    check_room(run_ranks)


def _facts_in_turn(rank: int, num_ranks: int) -> None:
    """Calls that differ in nothing but the capacity, again and again, with handles of each in between."""
    with make(num_ranks, num_slots=3) as buffer:
        x, idx, weights = tokens(buffer, 10)
        known: dict[int | None, tuple[int, torch.Tensor, epee.Handle]] = {}
        for _ in range(3):
            for capacity in (None, 4, 9, None, 1, 100):
                d = buffer.dispatch(x, idx, weights, capacity=capacity)
                back = buffer.combine(d.x, d.handle).x.clone()
                num_recv, want, handle = known.setdefault(capacity, (len(d.x), back, d.handle))
                assert len(d.x) == num_recv <= (1000 if capacity is None else capacity)
                same_bits(back, want, f"capacity {capacity}")
                again = buffer.dispatch(x, handle=handle)
                assert len(again.x) == num_recv
                assert (again.num_dropped is None) == (capacity is None)
                same_bits(buffer.combine(again.x, again.handle).x, want, f"cached, capacity {capacity}")
        bad: Any
        for bad in (1.0, True):  # equal to 1, which has passed the checks
            with pytest.raises(epee.InvalidArgument, match="capacity must be an int"):
                buffer.dispatch(x, idx, weights, capacity=bad)


def test_calls_that_differ_in_capacity_alone_are_not_taken_for_each_other() -> None:
    run_ranks(_facts_in_turn, 2)


def test_counts_and_plans_by_hand() -> None:
    assert kept_rows(np.array([[3, 0], [4, 2], [1, 9]]), 5).tolist() == [[3, 0], [2, 2], [0, 3]]
    plan = SendPlan(torch.tensor([0, 2, 3, 1, 2]), None, torch.tensor([3, 2, 7]).numpy())
    assert drop_rows(plan, [3, 2], 4) == (plan, None)
    rest, dropped = drop_rows(plan, [1, 0], 4)
    assert rest.tokens.tolist() == [0]
    assert dropped is not None
    assert dropped.tolist() == [[False, False], [False, True], [True, True], [True, False]]


def test_a_capacity_is_what_a_shorter_routing_would_be() -> None:
    inputs = [Routed(torch.arange(12.0).view(4, 3) + rank, torch.tensor([[0, 1]] * 4)) for rank in range(2)]
    short = [replace(inputs[0], topk_idx=torch.tensor([[0, 1]] * 3 + [[-1, -1]])), replace(inputs[1])]
    short[1] = replace(short[1], topk_idx=torch.full((4, 2), -1))
    for got, want in zip(reference.dispatch(inputs, 4, capacity=3), reference.dispatch(short, 4), strict=True):
        same_bits(got.x, want.x, "rows")  # type: ignore[arg-type]
        assert got.num_tokens_per_expert == want.num_tokens_per_expert
