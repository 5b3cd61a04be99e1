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


def test_lists_without_the_rank_that_dies_wait_until_its_death_is_known() -> None:
    first, second, dead = run_mortal(cases.early_list, 3, dead={2}, timeout_s=200)
    assert dead == DEAD
    assert first == second


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


@pytest.mark.parametrize("count", [cases.SMALL, cases.LARGE])
def test_calls_that_look_like_earlier_ones_go_a_short_way_and_no_others(count: int) -> None:
    for short in run_mortal(cases.made_again, 3, count, dead=set(), timeout_s=200):
        assert short[2:] == [10] * 3, (
            "ten of a pass look like earlier ones, and may; the others meet, or are not contiguous"
        )


def test_no_memory_for_a_copy_is_an_error_on_all_and_the_group_works_on() -> None:
    run_mortal(cases.no_room_for_a_copy, 2, dead=set(), timeout_s=200)


@pytest.mark.parametrize("count", [cases.SMALL, cases.LARGE])
def test_who_dies_behind_a_call_is_in_it_for_its_work_too(count: int) -> None:
    run_mortal(cases.dies_behind, 3, count, dead={2}, timeout_s=200)


@pytest.mark.parametrize("passes", [5, 18, 22, 70])
def test_known_calls_that_lose_a_rank_on_its_way_are_made_again_from_the_inputs(passes: int) -> None:
    dies_within(0, passes)  # in the tries of sums, at their begin or amid their chunks


@pytest.mark.parametrize(("place", "passes"), [(1, 3), (1, 4), (6, 1)])  # before its first and second word, and behind
def test_a_rank_that_dies_in_the_vote_is_in_the_call_for_its_work_too(place: int, passes: int) -> None:
    assert 2 in dies_within(place, passes)[2 * cases.NUM_WHOLE]


def dies_within(place: int, passes: int) -> list[tuple[int, ...]]:
    """Let rank 2 die at a place of the kernels of large sums; returns who was in each call."""
    (first, num_short), (second, _), _ = run_mortal(cases.dies_within, 3, place, passes, dead={2}, timeout_s=200)
    assert first == second
    assert first[-1] == (0, 1)
    assert num_short >= 2 * (cases.NUM_WHOLE - 2), "most calls look like earlier ones"
    found: list[tuple[int, ...]] = first
    return found
