"""`Buffer` over hosts goes on when ranks die: each point of a step, each role, whole hosts, both modes.

Hosts are invented (`stand_in.py`). `python -m tests.hosts.survival_rounds` draws many of them, by hand.
"""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.harness import run_mortal
from tests.survive.buffer_rounds import die, make_buffer, make_step, refused, routing, rows, start

from .stand_in import POINTS, invent_hosts
from .survival_steps import BETWEEN, check, program

NUM_STEPS = 6
DEATHS = [*POINTS, BETWEEN]
PLACEMENTS = ((0, 0, 1, 1), (0, 1, 1, 1), (0, 1, 2, 2), (0, 1, 0, 1))


def survive(mode: str, placement: tuple[int, ...], victims: dict[int, tuple[int, str]], layout: str = "both") -> None:
    told = run_mortal(program, len(placement), mode, placement, victims, layout, NUM_STEPS, dead=set(victims))
    check(told, mode, NUM_STEPS, set(victims), len(victims))


PAIRS = list(zip(DEATHS[::2], DEATHS[1::2], strict=True))


@pytest.mark.parametrize("mode", ["raise", "mask"])
@pytest.mark.parametrize("points", PAIRS, ids=" and ".join)
def test_a_death_at_each_point_of_a_step(points: tuple[str, str], mode: str) -> None:
    """One rank dies at one point, later another one at the next. Each rank is a victim in turn, so a gateway of many,
    of one, and of none; placements and layouts alternate."""
    turn = PAIRS.index(points) + 2 * (mode == "mask")
    first, second = (turn // 2) % 4, (turn // 2 + 1 + turn % 3) % 4
    survive(mode, PLACEMENTS[turn % 4], {first: (1 + turn % 2, points[0]), second: (3 + turn % 2, points[1])})


@pytest.mark.parametrize("mode", ["raise", "mask"])
@pytest.mark.parametrize("point", ["records: before take", "sums: put"])
def test_a_host_that_dies(point: str, mode: str) -> None:
    survive(mode, (0, 0, 1, 1), {2: (2, point), 3: (2, point)})


@pytest.mark.parametrize("mode", ["raise", "mask"])
def test_a_gateway_dies_and_the_one_that_takes_its_place(mode: str) -> None:
    survive(mode, (0, 1, 1, 1), {1: (1, "sums: before take"), 2: (3, "records: put")})


@pytest.mark.parametrize("mode", ["raise", "mask"])
def test_three_hosts_become_one_rank(mode: str) -> None:
    survive(mode, (0, 1, 2, 2), {0: (1, "dispatch rows: taken"), 1: (2, "sums: taken"), 3: (4, BETWEEN)})


def handles(rank: int, num_ranks: int, folder: str, mode: str, placement: tuple[int, ...]) -> Any:
    """A rank dies between a dispatch and what uses its handle; say how calls end, and what is stale."""
    invent_hosts(placement)
    group = start(rank, num_ranks, folder, mode)
    with make_buffer(group) as buffer:
        idx, weights = routing(rank, num_ranks, 0)
        old = buffer.dispatch(rows(rank, 0), idx, weights)
        if rank == 2:
            die()
        told = [refused(lambda: buffer.dispatch(rows(rank, 0), handle=old.handle))]
        told.append(refused(lambda: buffer.combine(old.x, old.handle)))
        new = buffer.dispatch(rows(rank, 0), handle=buffer.dispatch(rows(rank, 0), idx, weights).handle)
        told.append(refused(lambda: buffer.combine(new.x, old.handle)))
        told.append(refused(lambda: buffer.combine(new.x, new.handle)))
        return [*told, new.got.tolist(), buffer.epoch == new.handle.epoch > old.handle.epoch]


@pytest.mark.parametrize(("mode", "first"), [("raise", "RankFailedError"), ("mask", "StaleHandleError")])
def test_handles_of_an_older_epoch_are_stale(mode: str, first: str) -> None:
    told = run_mortal(handles, 4, mode, (0, 0, 1, 1), dead={2})
    stale = "StaleHandleError"
    for rank in (0, 1, 3):
        assert told[rank] == [first, stale, stale, "nothing", [1, 1, 0, 1], True]


def silent(rank: int, num_ranks: int, folder: str, mode: str, placement: tuple[int, ...]) -> Any:
    """A rank stops coming; the others go on without it, and it is told."""
    invent_hosts(placement)
    group = start(rank, num_ranks, folder, mode, on_stall="evict", op_timeout=3.0)
    with make_buffer(group, timeout=3.0) as buffer:
        make_step(buffer, 0, "rank")
        if rank == 1:
            time.sleep(12.0)
            return refused(lambda: buffer.dispatch(rows(1, 1), routing(1, num_ranks, 1)[0]))
        return [make_step(buffer, step, "expert")[2] for step in (1, 2)]


def test_a_silent_rank_is_voted_out_and_the_others_are_not() -> None:
    told = run_mortal(silent, 4, "mask", (0, 1, 1, 1), dead=set())
    assert told == [[(1, 0, 1, 1)] * 2, "EvictedError", [(1, 0, 1, 1)] * 2, [(1, 0, 1, 1)] * 2]
