"""The device half of a group, with the kernels' own sources on the CPU."""

from __future__ import annotations

import pytest

from tests.collectives import cases
from tests.csrc.emulated import has_compiler
from tests.harness import run_mortal, run_ranks

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.timeout(240),  # the first case for a number of ranks builds the kernels
    pytest.mark.skipif(not has_compiler(), reason="no g++ here to build the kernels with"),
]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_every_collective_does_what_it_does_on_cpu_tensors(num_ranks: int) -> None:
    run_ranks(cases.same_as_cpu, num_ranks, backend="epee", timeout_s=200)


def test_a_rank_alone() -> None:
    run_ranks(cases.uneven_emulated, 1, backend="epee", timeout_s=200)


def test_every_reduction_has_the_bits_of_cpu_tensors() -> None:
    run_ranks(cases.reductions_emulated, 3, backend="epee", timeout_s=220)


def test_uneven_rows_and_overlapping_memory() -> None:
    run_ranks(cases.uneven_emulated, 3, backend="epee", timeout_s=200)


def test_refused_and_different_calls_are_errors_on_all_and_the_group_works_on() -> None:
    run_ranks(cases.refusals, 2, backend="epee", timeout_s=200)


def test_calls_without_a_kernel_go_through_cpu_memory() -> None:
    run_ranks(cases.staged, 2, backend="epee", timeout_s=200)


def test_all_ranks_take_the_same_way_when_one_has_no_memory() -> None:
    run_ranks(cases.no_memory, 2, backend="epee", timeout_s=200)


def test_survivors_of_a_kill_hear_of_it_and_go_on_without() -> None:
    results = run_ranks(cases.killed, 3, 60.0, backend="epee", timeout_s=200, dead=(2,))
    assert all(elapsed < 30 for _, elapsed in results[:2]), "long before the time-out"


def test_a_survivor_whose_host_has_not_heard_of_a_death_names_the_same_rank() -> None:
    results = run_ranks(cases.killed, 3, 60.0, 1, backend="epee", timeout_s=200, dead=(2,))
    assert all(elapsed < 30 for _, elapsed in results[:2]), "long before the time-out"


def test_a_late_rank_is_told_and_all_go_on() -> None:
    first, second = run_ranks(cases.late, 2, backend="epee", timeout_s=200)
    assert "within the time-out" in first
    assert second == "" or "rank 0" in second


def test_a_barrier_that_names_a_gpu_runs_on_its_stream() -> None:
    run_ranks(cases.barriers, 2, backend="epee", timeout_s=200)


def test_works_and_futures() -> None:
    run_ranks(cases.asynchronous, 2, backend="epee", timeout_s=200)


def test_calls_that_look_like_earlier_ones_go_a_short_way_and_no_others() -> None:
    for short in run_ranks(cases.again, 3, backend="epee", timeout_s=200):
        assert short[2:] == [10] * 3, (
            "ten of a pass look like earlier ones, and may; the others meet, or are not contiguous"
        )


@pytest.mark.parametrize("fault_mode", ["raise", "mask"])
def test_calls_of_a_group_that_waits_have_no_time_out_and_name_who_is_late(fault_mode: str) -> None:
    first, second = run_mortal(cases.waiting, 2, fault_mode, dead=set(), timeout_s=200)
    assert sum("waits for rank(s) 1 for" in line for line in first) >= 2, first
    assert second == []


def test_a_group_that_has_grown_makes_its_calls_on_the_gpus() -> None:
    run_mortal(cases.grown, 4, dead=set(), timeout_s=200)
