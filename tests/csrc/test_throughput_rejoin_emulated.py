"""A process takes a lost rank's place in a throughput buffer over the emulated GPU; see `throughput_rejoin.py`."""

from __future__ import annotations

from typing import Any

import pytest

from tests.csrc import throughput_rejoin
from tests.csrc.emulated import EmulatedPlatform, has_compiler
from tests.csrc.emulated_buffer import emulated
from tests.harness import DEAD, run_mortal, run_ranks

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.timeout(240),  # the first one builds the kernels
    pytest.mark.skipif(not has_compiler(), reason="no g++ here to build the kernels with"),
]


def on_gpu(slot: int, num_processes: int, folder: str, name: str, *args: Any) -> Any:
    return emulated(slot, num_processes, getattr(throughput_rejoin, name), folder, *args)


def share(by_descriptors: bool) -> None:
    """Let the memory of this process be lent so, as far as anybody asks."""
    EmulatedPlatform.keeps_addresses = by_descriptors


@pytest.mark.parametrize("victims", [(1,), (0, 0, 1), (2, 1)], ids=str)
def test_after_a_replacement_the_results_are_those_of_a_fresh_job(victims: tuple[int, ...]) -> None:
    throughput_rejoin.check_replaced(on_gpu, victims, timeout_s=200)


@pytest.mark.parametrize("point", ["its line", "hello", "decided", "offered", "mapped"])
def test_a_newcomer_that_dies_on_the_way_disturbs_nobody_and_the_next_one_comes_in(point: str) -> None:
    results = run_mortal(on_gpu, 5, "dies_halfway", point, dead={1, 3}, timeout_s=200)
    assert results == ["ok", DEAD, "ok", DEAD, "ok"]


@pytest.mark.parametrize("which", [0, 1])
def test_memory_that_could_not_be_mapped_is_mapped_at_the_next_call(which: int) -> None:
    assert run_mortal(on_gpu, 4, "attaches_late", which, dead={1}, timeout_s=200) == ["ok", DEAD, "ok", "ok"]


def test_who_cannot_enter_tells_nobody_and_its_replays_reach_nobody() -> None:
    results = run_mortal(on_gpu, 4, "attaches_at_the_third_attempt", dead={1}, timeout_s=200)
    assert results == ["ok", DEAD, "ok", "ok"]


@pytest.mark.parametrize("point", ["prepare", "move"])
def test_a_newcomer_whose_constructor_has_failed_comes_again(point: str) -> None:
    assert run_mortal(on_gpu, 4, "fails_and_comes_again", point, dead={1}, timeout_s=200) == ["ok", DEAD, "ok", "ok"]


@pytest.mark.parametrize("jump", [(1 << 31) + 64, (1 << 32) - 128], ids=hex)
def test_numbers_of_calls_that_are_far_apart_are_told_apart(jump: int) -> None:
    assert run_mortal(on_gpu, 4, "replaced_far_on", jump, dead={1}, timeout_s=200) == ["ok", DEAD, "ok", "ok"]


def test_a_newcomer_comes_in_while_another_rank_is_lost() -> None:
    results = run_mortal(on_gpu, 6, "two_after_each_other", dead={1, 3}, timeout_s=200)
    assert results == ["ok", DEAD, "ok", DEAD, "ok", "ok"]


def test_who_was_away_maps_the_newcomer_when_it_comes_back() -> None:
    results = run_mortal(on_gpu, 5, "away_meanwhile", dead={1}, timeout_s=200)
    assert results == ["ok", DEAD, "ok", "ok", "ok"]


def test_what_a_replaced_zombie_may_write_is_not_lent_before_it_has_ended() -> None:
    assert run_mortal(on_gpu, 4, "zombie", dead={1}, timeout_s=200) == ["ok", DEAD, "ok", "ok"]


def test_what_a_zombie_may_write_is_not_lent_when_its_successor_dies() -> None:
    results = run_mortal(on_gpu, 4, "zombies_successor_dies", dead={1, 3}, timeout_s=200)
    assert results == ["ok", DEAD, "ok", DEAD]


def test_all_slots_that_a_zombie_may_write_are_not_lent() -> None:
    assert run_mortal(on_gpu, 3, "zombie_of_two_slots", dead={1}, timeout_s=200) == ["ok", DEAD, "ok"]


@pytest.mark.parametrize("theirs", [False, True])
def test_a_newcomer_is_refused_where_memory_is_lent_by_cuda_ipc(theirs: bool) -> None:
    results = run_mortal(on_gpu, 4, "refused", share, theirs, dead={1}, timeout_s=200)
    assert results == ["ok", DEAD, "ok", "ok"]


def test_ranks_with_different_memory_for_expert_layout_rows_are_told() -> None:
    assert run_ranks(emulated, 2, throughput_rejoin.places_apart, timeout_s=200) == ["ok"] * 2
