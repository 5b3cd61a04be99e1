"""A network that is cut, loses and delays, and hosts that come back: one of each kind that the campaign draws."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.harness import collect, take_until, tell

from . import Hosts, soak, started_on_hosts
from .calls import full
from .cut_steps import CutRound
from .cuts import play

pytestmark = pytest.mark.timeout(150)
BOUND_S = 100.0
HOST_TIMEOUT_S = 2


@pytest.mark.hosts
@pytest.mark.parametrize(
    "spec",
    [
        CutRound("zombie", (0, 1, 0, 1), 1, 0, "mask", 1, 6.0, 0.2, 0.3, 5),
        CutRound("stopped", (0, 0, 1, 2), 1, 0, "mask", 1, 5.0, 0.1, 0.2, 6),
    ],
    ids=lambda spec: spec.kind,
)
def test_a_host_that_comes_back_learns_that_it_is_out_and_changes_nothing(spec: CutRound) -> None:
    play(spec)


@pytest.mark.hosts("tun")
def test_of_two_hosts_that_lose_each_other_a_third_host_keeps_one() -> None:
    play(CutRound("one way", (0, 0, 1, 2), 1, 2, "raise", 1, 6.0, 0.3, 0.0, 7))


@pytest.mark.hosts("tun")
def test_a_network_that_loses_and_delays_much_loses_nobody() -> None:
    told = soak.play(soak.SoakRound((0, 0, 1, 1), 8.0, 3))
    assert told["calls"] > 0
    assert told["steps"] > 0


def read_for_a_while(rank: int, num_ranks: int) -> tuple[int, int]:
    """Rank 0 tells the others large vectors, as fast as they are read, until it has done so for a while."""
    group: Any = dist.group.WORLD
    number, until = 0, time.monotonic() + 3 * HOST_TIMEOUT_S
    is_over = False
    while not is_over:
        number += 1
        x = full(6_000_000, number if rank == 0 else -1)  # more than the kernel keeps for a reader
        x[0] = float(rank == 0 and time.monotonic() > until)
        dist.broadcast(x, 0)
        assert torch.equal(x[1:], full(len(x) - 1, number))
        is_over = bool(x[0])
        if number == 3:
            tell("going")
    return int(group.epoch), number


@pytest.mark.hosts
def test_a_stopped_reader_with_a_full_window_is_not_voted_out() -> None:
    env = {"EPEE_HOST_TIMEOUT_S": str(HOST_TIMEOUT_S)}
    with (
        Hosts(2) as hosts,
        started_on_hosts(hosts, read_for_a_while, (0, 0, 1, 1), timeout_s=BOUND_S, env=env) as workers,
    ):
        assert take_until(workers, lambda: all("going" in worker.told for worker in workers), BOUND_S)
        for _ in range(10):  # a reader that stops between two vectors leaves nothing to be sent: it stops once more
            hosts.stop(1)
            time.sleep(0.3)
            if _queued_bytes(hosts.processes(0)[0]) > 1 << 16:
                break
            hosts.cont(1)
        time.sleep(HOST_TIMEOUT_S)
        queued = _queued_bytes(hosts.processes(0)[0])
        time.sleep(HOST_TIMEOUT_S)
        assert _queued_bytes(hosts.processes(0)[0]) == queued > 1 << 16, "no reader holds anybody up"
        hosts.cont(1)
        told = collect(workers, (), BOUND_S)
    assert told == [(1, told[0][1])] * 4


def _queued_bytes(pid: int) -> int:
    """Return how many bytes wait in the sockets of a host for their readers."""
    lines = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
    return sum(int(line.split()[4].partition(":")[0], 16) for line in lines)
