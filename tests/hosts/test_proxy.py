"""Proxies of ranks on several hosts, whose neighbours map their pages: every byte, kills and a cut."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from epee.errors import ResourceError
from epee.link.address import own_address
from epee.link.proxy.rank import Proxy, shape_for
from epee.link.proxy.setup import parse_endpoint
from epee.link.proxy.words import island_topology
from epee.view.transport.auth import Token
from tests.harness import collect, take_until, tell
from tests.link.proxy.kernels import Neighbour, Streams, me

from . import Hosts, run_on_hosts, run_on_loopbacks, started_on_hosts

BOUND_S = 60.0
SIZES = (262_144, 1408)


def islands_of(placement: Sequence[int]) -> list[list[int]]:
    """Return the ranks of each host."""
    return [[rank for rank, host in enumerate(placement) if host == each] for each in sorted(set(placement))]


def gathered(told: Any) -> list[Any]:
    """Return what every rank says."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, told)
    return every


class Member:
    """The proxy of this rank, met with all others, and the kernels of this rank on all pages of its island."""

    def __init__(
        self, rank: int, placement: Sequence[int], num_slots: int, num_processes: int, num_chunks: int
    ) -> None:
        islands = islands_of(placement)
        island = island_topology(rank, islands).here
        shapes = [shape_for(peer, islands, num_slots, *SIZES, num_processes) for peer in range(len(placement))]
        processes = gathered(me())
        address = own_address(dist.distributed_c10d._get_default_store())
        self.proxy = Proxy(rank, islands, [processes[peer] for peer in island], shapes[rank], address=address)
        offers = gathered([each.fields() for each in self.proxy.offer()])
        secret = gathered((secrets.token_bytes(32), secrets.token_bytes(16)))[0]
        endpoints = {peer: tuple(map(parse_endpoint, offers[peer])) for peer in self.proxy.partners}
        self.proxy.meet(1, 0, endpoints, Token(secret[0]), secret[1], BOUND_S)
        blobs = gathered((self.proxy.page.blob, self.proxy.staging.blob))
        own = island.index(rank)
        self.streams = Streams(self.proxy, num_chunks, positions=(own,))
        self.neighbours = [
            Neighbour(peer, island_topology(peer, islands).partners(), shapes[peer], blobs[peer], own, num_chunks)
            for peer in island
            if peer != rank
        ]

    @property
    def is_done(self) -> bool:
        """True when this rank has sent and read everything."""
        return self.streams.is_done and all(each.is_done for each in self.neighbours)

    def run(self) -> None:
        """Send and read everything; raises what `Proxy.check` raises."""
        deadline = time.monotonic() + BOUND_S
        while not self.is_done:
            if not self.streams.step() + sum(each.step() for each in self.neighbours):
                time.sleep(0.0005)
                self.proxy.check()
            assert time.monotonic() < deadline, (self.streams.sent, self.streams.received)


def everything(rank: int, num_ranks: int, placement: Sequence[int], num_slots: int, num_processes: int) -> int:
    """Send 30 chunks to every partner, of which every rank of its island reads all."""
    member = Member(rank, placement, num_slots, num_processes, 30)
    member.run()
    dist.barrier()  # a neighbour may still be reading
    lost = len(member.proxy.lost)
    member.proxy.close()
    return lost


@pytest.mark.hosts
@pytest.mark.parametrize(
    ("placement", "num_slots", "num_processes"),
    [((0, 0, 1, 1), 4, 2), ((0, 1, 1, 1), 2, 1), ((0, 1, 0, 1), 1, 1), ((0, 1, 2), 3, 3)],
)
def test_every_rank_reads_every_byte_of_its_island(
    placement: tuple[int, ...], num_slots: int, num_processes: int
) -> None:
    done = run_on_hosts(everything, placement, placement, num_slots, num_processes, timeout_s=90)
    assert done == [0] * len(placement)


def test_every_rank_reads_every_byte_over_loopbacks() -> None:
    assert run_on_loopbacks(everything, (0, 0, 1), (0, 0, 1), 4, 1, timeout_s=90) == [0, 0, 0]


def until_it_fails(rank: int, num_ranks: int, placement: Sequence[int]) -> str:
    """Send without end; return what the proxy of this rank says then: its error, or the partners that are lost."""
    member = Member(rank, placement, 2, 1, 1 << 30)
    streams = member.streams
    tell(member.proxy._helpers[0].process.pid)
    deadline = time.monotonic() + BOUND_S
    try:
        while not member.proxy.lost and time.monotonic() < deadline:
            streams.step()
            for each in member.neighbours:
                each.step()
            member.proxy.check()
        return f"lost {member.proxy.lost}"
    except ResourceError as exc:
        return str(exc)
    finally:
        member.proxy.close()


@pytest.mark.hosts
@pytest.mark.parametrize("delay_s", [0.0, 0.02, 0.05])
def test_a_killed_proxy_is_known_to_its_rank_and_its_partner(delay_s: float) -> None:
    placement = (0, 1)
    with Hosts(2) as hosts, started_on_hosts(hosts, until_it_fails, placement, placement, timeout_s=90) as workers:
        assert take_until(workers, lambda: all(worker.told for worker in workers), 90)
        time.sleep(delay_s)
        _signal_proxies(hosts, 0, signal.SIGKILL)
        first, second = collect(workers, (), 90, 20)
    assert "rank 0 has no proxy any more" in first
    assert "killed by signal 9" in first
    assert second == "lost (0,)"


def _signal_proxies(hosts: Hosts, host: int, sign: int) -> None:
    """Send a signal to the processes of the proxies on a host; the test sees them under other numbers."""
    found = 0
    for pid in hosts.processes(host):
        with contextlib.suppress(OSError):
            if b"proxy/__main__.py" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, sign)
                found += 1
    assert found


def through_a_cut(rank: int, num_ranks: int, placement: Sequence[int]) -> bool:
    """Send more than is under way during a cut."""
    member = Member(rank, placement, 2, 1, 500)
    tell("going")
    member.run()
    dist.barrier()
    member.proxy.close()
    return True


@pytest.mark.hosts
@pytest.mark.parametrize("how", ["cut", "stop"])
def test_a_short_cut_or_stop_loses_and_doubles_nothing(how: str) -> None:
    placement = (0, 1)
    with Hosts(2) as hosts, started_on_hosts(hosts, through_a_cut, placement, placement, timeout_s=90) as workers:
        assert take_until(workers, lambda: all(worker.told for worker in workers), 90)
        for _ in range(3):
            if how == "cut":
                hosts.cut(1)
                time.sleep(0.3)
                hosts.heal(1)
            else:
                _signal_proxies(hosts, 1, signal.SIGSTOP)
                time.sleep(0.3)
                _signal_proxies(hosts, 1, signal.SIGCONT)
            time.sleep(0.1)
        assert collect(workers, (), 90, 20) == [True, True]
