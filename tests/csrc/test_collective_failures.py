"""Failures of the collectives with the kernels on the CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.csrc.collective_cases import ALL, Call
from tests.csrc.collective_failures import (
    CASES,
    WAYS,
    gone_on,
    left_out,
    other_call,
    other_call_told,
    root_left_out,
    silent,
    stopped,
    told_by_a_peer,
)
from tests.csrc.emulated import has_compiler
from tests.harness import run_ranks

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.timeout(240),  # the first case for a number of ranks builds the kernels
    pytest.mark.skipif(not has_compiler(), reason="no g++ here to build the kernels with"),
]


@pytest.mark.parametrize(("op", "way"), CASES)
def test_silent_rank_is_named_by_those_who_wait_for_it(op: str, way: str) -> None:
    results = run_ranks(silent, 3, op, WAYS[way], timeout_s=200)
    named = [result for result in results[:2] if result[1] == (2,)]
    assert named, results  # one of them may have failed by the other's failure only
    assert all(name == "CommTimeoutError" for name, _, _ in results[:2])
    assert any("within the time-out" in text for _, _, text in named)


@pytest.mark.parametrize(
    ("op", "way", "num_ranks"), [(*case, 3) for case in CASES] + [("all_reduce", way, 4) for way in WAYS]
)
def test_rank_outside_the_view_is_left_out(op: str, way: str, num_ranks: int) -> None:
    run_ranks(left_out, num_ranks, op, WAYS[way], timeout_s=200)


def test_broadcast_of_a_rank_outside_the_view_fails_at_once() -> None:
    results = run_ranks(root_left_out, 3, timeout_s=200)
    assert results[:2] == [("RankFailedError", (2,))] * 2, "also who begins late, and hears it from the other"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("how", ["abort", "dead"])
def test_host_ends_waits_in_flight(how: str, way: str) -> None:
    name, ranks, _ = run_ranks(stopped, 2, how, WAYS[way], timeout_s=50)[0]
    assert (name, ranks) == (("AbortedError", ()) if how == "abort" else ("RankFailedError", (1,)))


@pytest.mark.parametrize("way", WAYS)
def test_a_death_that_one_host_has_heard_of_is_told_by_all(way: str) -> None:
    results = run_ranks(told_by_a_peer, 4, WAYS[way], timeout_s=200)
    assert results[:3] == [("RankFailedError", (3,))] * 3


def test_a_lost_call_lets_the_next_one_fail_on_all_and_a_new_start_mends_it() -> None:
    (first, second), (late, after) = run_ranks(gone_on, 2, timeout_s=50)
    assert "within the time-out" in first
    assert "has lost this call or an earlier one" in late
    assert second == after == "nothing"


@pytest.mark.parametrize(
    "others",
    [
        Call("all_reduce", 500, torch.float16),
        Call("all_reduce", 500, reduction="max"),
        Call("all_reduce", 499),
        Call("all_reduce", 9000),
        Call("all_reduce", 9000, torch.float16, in_pool=ALL),
        Call("all_gather", 500),
        Call("broadcast", 500, root=1),
        Call("reduce", 500, root=1),
    ],
)
@pytest.mark.parametrize("way", WAYS)
def test_ranks_that_make_different_calls_are_told(others: Call, way: str) -> None:
    mine = Call("all_reduce", **WAYS[way])
    if replace(mine, in_pool=0) == replace(others, in_pool=0):
        return
    told = run_ranks(other_call, 2, mine, others, timeout_s=50)
    assert told == ["MismatchError"] * 2, "who finds that the other has lost the call finds why, too"


@pytest.mark.parametrize(
    ("way", "is_masked"), [*((way, False) for way in WAYS), ("one shot", True), ("pipeline", True)]
)
@pytest.mark.parametrize("is_late", [False, True])
def test_a_call_that_differs_is_told_by_who_has_found_it(way: str, is_masked: bool, is_late: bool) -> None:
    told = run_ranks(other_call_told, 3, WAYS[way], is_late, is_masked, timeout_s=100)
    assert all(text.startswith("MismatchError") for text in told), told
    assert "rank 2 makes another call" in told[0], "of which rank 0 has no word"
