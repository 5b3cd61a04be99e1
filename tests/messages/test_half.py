"""Messages of a group on CUDA tensors, with the kernels' own sources on the CPU."""

from __future__ import annotations

import pytest

from tests.csrc.emulated import has_compiler
from tests.harness import DEAD, run_mortal, run_ranks
from tests.messages import cases

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.timeout(240),  # the first case builds the kernels
    pytest.mark.skipif(not has_compiler(), reason="no g++ here to build the kernels with"),
]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_send_and_recv(num_ranks: int) -> None:
    run_ranks(cases.emulated, num_ranks, "blocking", backend="epee", timeout_s=200)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_batches_are_one_kernel_so_their_order_does_not_count(num_ranks: int) -> None:
    run_ranks(cases.emulated, num_ranks, "batches", backend="epee", timeout_s=200)


def test_recv_from_any_source() -> None:
    run_ranks(cases.emulated, 3, "any", backend="epee", timeout_s=200)


def test_coalescing_by_device_and_methods_of_the_group() -> None:
    run_ranks(cases.emulated, 2, "manager", backend="epee", timeout_s=200)


def test_ends_that_differ_and_refused_messages_are_told_and_the_pair_works_on() -> None:
    run_ranks(cases.refusals, 2, backend="epee", timeout_s=200)


@pytest.mark.parametrize("is_late", [False, True])
def test_a_dead_peer_is_told_and_the_others_go_on(is_late: bool) -> None:
    results = run_ranks(cases.killed, 3, is_late, backend="epee", timeout_s=200, dead=(2,))
    assert all(elapsed < 30 for elapsed in results[:2]), "long before the time-out"


@pytest.mark.parametrize(("backend", "passes"), [("epee", 40), ("epee", 333), ("mooncake", 77), ("mooncake", 501)])
def test_in_mode_mask_what_came_of_a_dead_rank_counts_and_its_other_messages_are_told(
    backend: str, passes: int
) -> None:
    *found, dead = run_mortal(cases.masked_deaths, 3, backend, passes, dead={2}, timeout_s=200)
    assert dead == DEAD
    assert all(num_came > 0 and hint == [2] for num_came, hint in found)


@pytest.mark.parametrize("how", ["send", "recv", "batch", "late"])
def test_a_message_that_fails_shows_the_death_before_its_wait_returns(how: str) -> None:
    shown = [1, 1, 0], 2, 2
    assert run_mortal(cases.shown_deaths, 3, how, dead={2}, timeout_s=200) == [shown, shown, DEAD]


def test_a_late_sender_is_told_and_both_go_on() -> None:
    sender, receiver = run_ranks(cases.late, 2, backend="epee", timeout_s=200)
    assert "within the time-out" in receiver
    assert "has given up a message" in sender


def test_both_ends_take_the_way_through_the_host_when_one_has_no_memory() -> None:
    run_ranks(cases.no_memory, 3, backend="epee", timeout_s=200)


@pytest.mark.parametrize(("num_ranks", "is_early"), [(4, True), (4, False), (12, True)])
def test_a_group_that_has_grown_sends_from_gpu_to_gpu(num_ranks: int, is_early: bool) -> None:
    run_mortal(cases.grown, num_ranks, is_early, dead=set(), timeout_s=200)


def test_a_peer_that_never_comes_to_its_first_message_is_named() -> None:
    told = run_ranks(cases.first_never_comes, 2, backend="epee", timeout_s=200)[0]
    assert "rank 1" in told
