"""What goes wrong between hosts ends in an error on all ranks, within the time-out; results that come are right."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from epee.errors import CommTimeoutError, EpeeError
from tests.harness import DEAD, Worker, collect, take_until, tell

from . import Hosts, run_on_hosts, started_on_hosts
from .calls import everything, full

TIMEOUT_S = 6.0
PLACEMENT = (0, 0, 1, 1)
BOUND_S = 60.0  # of everything; what takes longer hangs


def until_it_fails(rank: int, num_ranks: int, count: int) -> tuple[str, float, int]:
    """Sum until a call fails; return the kind of error, how long that call took, and how many calls ended well."""
    group: Any = dist.group.WORLD
    group.set_timeout(timedelta(seconds=TIMEOUT_S))
    num_calls = 0
    until = time.monotonic() + BOUND_S
    while time.monotonic() < until:
        x = full(count, rank + num_calls)
        begun = time.monotonic()
        try:
            dist.all_reduce(x)
        except EpeeError as exc:
            assert torch.equal(x, full(count, rank + num_calls)), "a call that failed has written"
            again = _fails_again(num_ranks)
            return f"{type(exc).__name__} {again}", time.monotonic() - begun, num_calls
        assert torch.equal(x, full(count, sum(range(num_ranks)) + num_ranks * num_calls))
        num_calls += 1
        if num_calls == 20:
            tell("going")
    raise AssertionError("no call has failed")


def _fails_again(num_ranks: int) -> str:
    try:
        dist.all_reduce(full(1, 0.0))
    except EpeeError as exc:
        return type(exc).__name__
    return "worked"


def after_a_fault(
    fault: Callable[[Hosts, list[Worker]], None],
    count: int,
    dead: tuple[int, ...] = (),
    wire: str = "veth",
    env: dict[str, str] | None = None,
) -> list[Any]:
    """Let four ranks on two hosts go, do `fault`, and return what each has to say."""
    with (
        Hosts(2, wire) as hosts,
        started_on_hosts(hosts, until_it_fails, PLACEMENT, count, timeout_s=BOUND_S, env=env) as workers,
    ):
        assert take_until(workers, lambda: all("going" in worker.told for worker in workers), BOUND_S)
        fault(hosts, workers)
        return collect(workers, dead, BOUND_S)


def check(told: list[Any], dead: tuple[int, ...], kinds: tuple[str, ...]) -> None:
    """See that all who live have failed, in time, and fail again."""
    for rank, answer in enumerate(told):
        if rank in dead:
            assert answer == DEAD
            continue
        kind, seconds, _ = answer
        first, again = kind.split()
        assert first in kinds, (rank, kind)
        assert again != "worked", rank
        assert seconds < 4 * TIMEOUT_S


@pytest.mark.hosts
@pytest.mark.parametrize("victim", range(4))
@pytest.mark.parametrize("count", [1, 1_500_000])
def test_a_killed_rank_is_an_error_on_all(victim: int, count: int) -> None:
    def kill(_: Hosts, workers: list[Worker]) -> None:
        workers[victim].process.kill()

    check(after_a_fault(kill, count, (victim,)), (victim,), ("RankFailedError", "PeerError", "CommTimeoutError"))


@pytest.mark.hosts
@pytest.mark.parametrize("count", [1, 1_500_000])
def test_a_killed_host_is_an_error_on_the_other(count: int) -> None:
    told = after_a_fault(lambda hosts, _: hosts.kill(1), count, (2, 3))
    check(told, (2, 3), ("RankFailedError", "PeerError", "CommTimeoutError"))


@pytest.mark.hosts
@pytest.mark.parametrize("count", [1, 1_500_000])
def test_a_cut_network_is_an_error_on_all(count: int) -> None:
    check(after_a_fault(lambda hosts, _: hosts.cut(1), count), (), ("CommTimeoutError", "RankFailedError"))


@pytest.mark.hosts("tun")
def test_a_network_that_is_cut_one_way_is_an_error_on_all() -> None:
    told = after_a_fault(lambda hosts, _: hosts.set_link(0, 1, is_cut=True), 1, wire="tun")
    check(told, (), ("CommTimeoutError", "RankFailedError"))


@pytest.mark.hosts("tun")
def test_a_network_that_delays_and_loses_changes_no_result() -> None:
    with Hosts(2, "tun", seed=3) as hosts:
        hosts.set_link(0, 1, delay_s=0.003, loss=0.02)
        hosts.set_link(1, 0, delay_s=0.001, loss=0.01)
        with started_on_hosts(hosts, everything, PLACEMENT, (1, 1000, 40_000), timeout_s=100.0) as workers:
            collect(workers, (), 100.0)


def late_once(rank: int, num_ranks: int) -> list[str]:
    """Rank 3 comes after the time-out of the others; the calls after that are as ever."""
    group: Any = dist.group.WORLD
    group.set_timeout(timedelta(seconds=2.0))
    told = []
    for number in range(3):
        if rank == 3 and number == 1:
            time.sleep(3.5)
        x = full(7, rank)
        try:
            dist.all_reduce(x)
            told.append(str(x[0].item()))
        except CommTimeoutError as exc:
            assert torch.equal(x, full(7, rank))
            told.append("late" if "given up, on all ranks" in str(exc) else str(exc))
    return told


@pytest.mark.hosts
def test_a_late_rank_fails_the_call_on_all_alike_and_the_next_one_works() -> None:
    told = run_on_hosts(late_once, PLACEMENT, timeout_s=50)
    assert told == [["6.0", "late", "6.0"]] * 4


def around_the_time_out(rank: int, num_ranks: int, num_rounds: int) -> int:
    """Rank 0 comes when the others' time-out passes, a little before or after; who gets an error repeats the call.

    Were the ranks to end a call differently, the repetition of one would pair with the barrier of another.
    """
    group: Any = dist.group.WORLD
    num_late = 0
    for number in range(num_rounds):
        dist.barrier()
        group.set_timeout(timedelta(seconds=0.05))
        if rank == 0:
            time.sleep(0.04 + 0.02 * number / num_rounds)
        x = full(3, rank)
        try:
            dist.all_reduce(x)
        except CommTimeoutError:
            assert torch.equal(x, full(3, rank))
            num_late += 1
            group.set_timeout(timedelta(seconds=30.0))
            dist.all_reduce(x)
        group.set_timeout(timedelta(seconds=30.0))
        assert torch.equal(x, full(3, sum(range(num_ranks))))
    return num_late


@pytest.mark.hosts
@pytest.mark.parametrize("placement", [(0, 1), (0, 0, 1, 1), (0, 1, 2)])
def test_calls_around_their_time_out_end_alike_on_all_ranks(placement: tuple[int, ...]) -> None:
    num_late = run_on_hosts(around_the_time_out, placement, 60, timeout_s=80)
    assert max(num_late) > 0
