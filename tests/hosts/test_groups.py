"""Groups whose ranks run on several hosts: every operation on every placement, and the bytes that cross the network."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from epee.link.topology import Topology
from tests.backend.cases import all_gather_single, reduce_scatter_single

from . import interface_bytes, run_on_hosts, run_on_loopbacks
from .calls import FLOAT, everything, full

PLACEMENTS = [(0, 1), (0, 0, 1, 1), (0, 1, 1, 1), (0, 1, 0, 1), (0, 1, 2, 3)]
SIZES = (1, 1000, 40_000, 700_000)


@pytest.mark.hosts
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_every_operation_on_hosts_equals_its_closed_form(placement: tuple[int, ...]) -> None:
    assert len(set(run_on_hosts(everything, placement, SIZES, timeout_s=80))) == 1


@pytest.mark.parametrize("placement", [(0, 1), (0, 1, 0, 1)])
def test_every_operation_on_loopbacks_equals_its_closed_form(placement: tuple[int, ...]) -> None:
    run_on_loopbacks(everything, placement, (1, 3_000_000), timeout_s=80)


@pytest.mark.hosts
def test_payloads_are_proved_where_that_is_asked_for() -> None:
    run_on_hosts(everything, (0, 0, 1), (1, 40_000, 700_000), env={"EPEE_LINK_MAC": "1"}, timeout_s=80)


# ---- bytes

COUNT = 1 << 20  # elements: 4 MiB
NBYTES = 4 * COUNT


def _all_gather(num_ranks: int, rank: int) -> None:
    rows = torch.empty(num_ranks * COUNT, dtype=FLOAT, device="cpu")
    all_gather_single(rows, full(COUNT, rank))


def _all_to_all(num_ranks: int, rank: int) -> None:
    rows = torch.empty(num_ranks * COUNT, dtype=FLOAT, device="cpu")
    dist.all_to_all_single(rows, full(num_ranks * COUNT, rank))


def _gather(num_ranks: int, rank: int) -> None:
    rows = [full(COUNT, 0) for _ in range(num_ranks)] if rank == 0 else None
    dist.gather(full(COUNT, rank), rows, dst=0)


def _scatter(num_ranks: int, rank: int) -> None:
    dist.scatter(full(COUNT, 0), [full(COUNT, 1)] * num_ranks if rank == 0 else None, src=0)


def _reduce_scatter(num_ranks: int, rank: int) -> None:
    reduce_scatter_single(full(COUNT, 0), full(num_ranks * COUNT, rank))


# what each host sends when there are two hosts with two ranks each (h = 0 has the root), in blocks of NBYTES
CALLS: dict[str, tuple[Callable[[int, int], object], tuple[float, float]]] = {
    "broadcast": (lambda n, r: dist.broadcast(full(COUNT, r), 0), (1, 0)),
    "all_gather": (_all_gather, (2, 2)),
    "all_to_all": (_all_to_all, (4, 4)),
    "gather": (_gather, (0, 2)),
    "scatter": (_scatter, (2, 0)),
    "reduce": (lambda n, r: dist.reduce(full(COUNT, r), 0), (0, 1)),
    "all_reduce": (lambda n, r: dist.all_reduce(full(COUNT, r)), (1, 1)),
    "reduce_scatter": (_reduce_scatter, (2, 2)),
}


def _sent(rank: int, num_ranks: int, names: list[str]) -> list[int]:
    """Return the bytes that this rank's host has sent for each call, at least: TCP repeats some on a busy machine."""
    found = []
    for name in names:
        call, _ = CALLS[name]
        sent = []
        for _ in range(4):
            before = interface_bytes()[1]
            dist.barrier()
            call(num_ranks, rank)
            dist.barrier()
            sent.append(interface_bytes()[1] - before)
            dist.barrier()
        found.append(min(sent))
    return found


@pytest.mark.hosts
def test_bytes_cross_the_network_once_per_host() -> None:
    names = list(CALLS)
    told: list[Any] = run_on_hosts(_sent, (0, 0, 1, 1), names, timeout_s=80)
    for number, name in enumerate(names):
        for host, rank in ((0, 0), (1, 2)):
            blocks = CALLS[name][1][host]
            assert told[rank][number] <= blocks * NBYTES * 1.08 + (64 << 10), (name, host, told[rank][number] / NBYTES)


def _hosts(rank: int, num_ranks: int) -> tuple[int, ...]:
    group: Any = dist.group.WORLD
    topology: Topology = group._engine.peer_regions.exports.routes.topology
    return topology.host_of


@pytest.mark.hosts
def test_hosts_are_told_apart_by_their_namespaces() -> None:
    assert run_on_hosts(_hosts, (0, 1, 1, 0)) == [(0, 1, 1, 0)] * 4


# ---- locks


def _lock_left(rank: int, num_ranks: int) -> None:
    """Rank 0's send ends behind the last line of a `with` block that holds the lock of the links, before the lock is
    released; another thread makes the next calls."""
    if rank == 1:
        got = full(4, 0)
        dist.recv(got, 0)
        assert got.tolist() == [7.0] * 4
        assert _total(1.0) == 2.0
        return
    group: Any = dist.group.WORLD
    exports = group._engine.peer_regions.exports
    publish = exports.publish_fragment

    def publish_and_break(*args: Any) -> None:
        exports.publish_fragment = publish
        publish(*args)
        exports.links.lock.acquire()
        raise KeyboardInterrupt

    exports.publish_fragment = publish_and_break
    with pytest.raises(KeyboardInterrupt):
        dist.send(full(4, 7), 1)
    sums: list[float] = []

    def go_on() -> None:
        dist.send(full(4, 7), 1)
        sums.append(_total(1.0))

    thread = threading.Thread(target=go_on, daemon=True)
    thread.start()
    thread.join(20.0)
    assert sums == [2.0]


def _total(value: float) -> float:
    """Return the sum of all ranks' values."""
    x = full(1, value)
    dist.all_reduce(x)
    return float(x)


def test_a_lock_of_the_links_that_an_interrupt_has_left_is_released() -> None:
    run_on_loopbacks(_lock_left, (0, 1), timeout_s=40)
