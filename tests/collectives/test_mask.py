"""Mode "mask" of a group on the device, with the kernels' own sources on the CPU."""

from __future__ import annotations

import pytest

from tests.collectives import mask_cases as cases
from tests.csrc.emulated import has_compiler
from tests.harness import DEAD, run_mortal

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.timeout(240),  # the first case for a number of ranks builds the kernels
    pytest.mark.skipif(not has_compiler(), reason="no g++ here to build the kernels with"),
]
BACKENDS = ("epee", "mooncake")


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_collective_does_what_it_does_on_cpu_tensors(backend: str) -> None:
    run_mortal(cases.same_as_cpu, 3, backend, dead=set(), timeout_s=200)


@pytest.mark.parametrize("is_large", [False, True])
@pytest.mark.parametrize(("backend", "victim"), [("epee", 1), ("epee", 2), ("mooncake", 1), ("mooncake", 2)])
def test_the_call_that_loses_a_rank_succeeds_over_the_others(backend: str, victim: int, is_large: bool) -> None:
    results = run_mortal(cases.killed, 3, backend, victim, is_large, dead={victim}, timeout_s=200)
    want = [int(rank != victim) for rank in range(3)]
    assert results == [DEAD if rank == victim else want for rank in range(3)]


def test_a_rank_that_leaves_in_order_is_waited_for_no_more() -> None:
    run_mortal(cases.leaves, 3, dead=set(), timeout_s=200)


@pytest.mark.parametrize("count", [cases.SMALL, cases.LARGE])
def test_a_silent_rank_is_an_error_of_a_call_and_voted_out(count: int) -> None:
    first, second, _ = run_mortal(cases.silent, 3, count, dead=set(), timeout_s=200)
    assert "within the time-out" in first + second
    assert first
    assert second


def test_refused_and_different_calls_are_errors_on_all_and_the_group_works_on() -> None:
    run_mortal(cases.other_calls, 2, dead=set(), timeout_s=200)


def test_graphs_record_rows_of_all_sizes() -> None:
    run_mortal(cases.recorded, 2, dead=set(), timeout_s=200)


@pytest.mark.parametrize("count", [cases.SMALL, cases.LARGE])
@pytest.mark.parametrize(("backend", "want"), [("epee", "raised without (1,)"), ("mooncake", "told: RankFailedError")])
def test_a_lost_root_is_an_error_on_all(backend: str, want: str, count: int) -> None:
    assert run_mortal(cases.lost_root, 3, backend, count, dead={1}, timeout_s=200) == [want, DEAD, want]
