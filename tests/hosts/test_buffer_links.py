"""`Buffer` and `LatencyBuffer` over real links when ranks die or are late: each row of what can fail, in both modes.

What is checked is said in `ep_kills.py`, which draws many more (`python -m tests.hosts.campaign --ep-kills 200`): never
half a source, `got` and `lost_weight` right, survivors alike.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from tests.harness import Pool, run_mortal
from tests.loopback import settle
from tests.survive.buffer_rounds import make_buffer, make_step, refused, routing, rows, start

from .ep_kills import EpRound, play

TWO_BY_TWO, ONE_AND_THREE, ONE_ONE_TWO = (0, 0, 1, 1), (0, 1, 1, 1), (0, 1, 2, 2)
MODES = ("raise", "mask")
ROWS: dict[str, tuple[tuple[int, ...], dict[int, tuple[int, Any]]]] = {
    "a source with half of its records out": (TWO_BY_TWO, {1: (1, "records: second put")}),
    "a gateway in dispatch, and the one that takes its place": (
        ONE_AND_THREE,
        {1: (1, "records: taken"), 2: (3, "records: before take")},
    ),
    "a gateway with sums that nobody has": (TWO_BY_TWO, {2: (2, "sums: merged")}),
    "a destination that is nobody's gateway": (ONE_AND_THREE, {3: (2, "records: before take")}),
    "who lends to those who sum": (TWO_BY_TWO, {3: (3, "combine rows: put")}),
    "a host": (TWO_BY_TWO, {2: (2, "records: put"), 3: (2, "sums: put")}),
    "the host of rank 0": (ONE_ONE_TWO, {0: (2, "records: taken")}),
}


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool() as found:
        yield found


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("row", ROWS)
def test_what_dies_is_in_a_step_as_a_whole_or_not_at_all(pool: Pool, row: str, mode: str) -> None:
    placement, victims = ROWS[row]
    play(pool, EpRound("points", mode, placement, victims))


@pytest.mark.parametrize("victims", [{2: (1, 4.0)}, {2: (2, 9.0), 3: (2, 9.5)}], ids=["gateway", "host"])
def test_a_latency_buffer_goes_on_without(pool: Pool, victims: dict[int, tuple[int, float]]) -> None:
    play(pool, EpRound("latency", "mask", TWO_BY_TWO, victims))


def given_up(rank: int, num_ranks: int, folder: str, mode: str) -> list[Any]:
    """Rank 3 comes to a dispatch, and later to a combine, when the others have given it up; say how calls ended."""
    settle(TWO_BY_TWO[rank])
    group = start(rank, num_ranks, folder, mode, on_stall="error")
    idx, weights = routing(rank, num_ranks, 1)
    told = []
    with make_buffer(group) as buffer:
        assert (buffer.config.fault_mode, buffer.config.on_stall) == (mode, "error"), "the group's"
        make_step(buffer, 0, "rank")
        if rank == 3:
            time.sleep(2.5)
        told.append(refused(lambda: buffer.dispatch(rows(rank, 1), idx, weights, timeout=1.0)))
        dist.barrier()
        told.append(make_step(buffer, 2, "expert"))
        d = buffer.dispatch(rows(rank, 1), idx, weights)
        if rank == 3:
            time.sleep(2.5)
        told.append(refused(lambda: buffer.combine(d.x, d.handle, timeout=1.0)))  # type: ignore[arg-type]
        dist.barrier()
        told.append(make_step(buffer, 3, "rank"))
    dist.destroy_process_group()
    return told


@pytest.mark.parametrize("mode", MODES)
def test_a_call_that_is_given_up_leaves_nothing_behind(mode: str) -> None:
    told = run_mortal(given_up, 4, mode, dead=set())
    late, everybody = "CommTimeoutError", (1, 1, 1, 1)
    assert told == [[late, (2, 1, everybody), late, (3, 1, everybody)]] * 4


def says_policy(rank: int, num_ranks: int, folder: str, mode: str) -> tuple[str, str]:
    settle(TWO_BY_TWO[rank])
    with make_buffer(start(rank, num_ranks, folder, mode)) as buffer:
        return buffer.config.fault_mode, buffer.config.on_stall


@pytest.mark.parametrize(("mode", "on_stall"), [("raise", "error"), ("mask", "evict")])
def test_a_buffer_over_hosts_has_the_policy_of_its_group(mode: str, on_stall: str) -> None:
    assert run_mortal(says_policy, 4, mode, dead=set()) == [(mode, on_stall)] * 4
