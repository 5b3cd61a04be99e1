"""The control plane between hosts with networks of their own: cuts, one-way cuts, blips, zombies, loss, delay.

Processes are those of `tests/view/runtime_processes.py`, told what to do one task at a time.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from epee.view.protocol.messages import DEAD, UNREACHABLE, Decision
from epee.view.transport.auth import JOB_ID_BYTES
from tests.harness import Worker, collect
from tests.hosts import Hosts
from tests.view.runtime_processes import PATIENT, Process

pytestmark = pytest.mark.hosts
TIMEOUT_S = 3
ANSWER_S = 30.0
_process: list[Process] = []


def enter(slot: int, job_id: bytes, address: str) -> Any:
    os.environ["EPEE_HOST_TIMEOUT_S"] = str(TIMEOUT_S)
    _process[:] = [Process(slot, "", PATIENT._replace(no_quorum_s=1.0))]
    return _process[0].enter(job_id, address)


def do(name: str, *args: Any) -> Any:
    return getattr(_process[0], name)(*args)


def brief(view: Decision) -> str:
    gone = {removal.slot: removal.cause for removal in view.removed}
    return f"epoch {view.epoch}, {[member.slot for member in view.members]}, gone {gone}"


class Job:
    """Two ranks on each host."""

    def __init__(self, hosts: Hosts, placement: tuple[int, ...]) -> None:
        self.hosts = hosts
        self.ranks = [hosts.worker(host) for host in placement]
        job_id = secrets.token_bytes(JOB_ID_BYTES)
        for slot, (rank, host) in enumerate(zip(self.ranks, placement, strict=True)):
            rank.start(enter, slot, job_id, hosts.address(host))
        members = collect(self.ranks, (), ANSWER_S)
        self.ask(self.ranks, "start", members)
        self.await_that(self.ranks, lambda: all(self.ask(self.ranks[:1], "healths", len(placement))[0]))

    def ask(self, ranks: list[Worker], name: str, *args: Any) -> list[Any]:
        for rank in ranks:
            rank.start(do, name, *args)
        return collect(ranks, (), ANSWER_S)

    def await_that(self, ranks: list[Worker], is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + ANSWER_S
        while not is_so():
            assert time.monotonic() < deadline, [brief(view) for view in self.ask(self.ranks, "call", "view")]
            time.sleep(0.02)

    def await_slots(self, ranks: list[Worker], slots: set[int]) -> Decision:
        def views() -> list[Decision]:
            return self.ask(ranks, "call", "view")

        self.await_that(ranks, lambda: all({m.slot for m in view.members} == slots for view in views()))
        found = views()
        assert all(view == found[0] for view in found)
        return found[0]

    def await_error(self, ranks: list[Worker], error: str) -> None:
        self.await_that(ranks, lambda: self.ask(ranks, "error") == [error] * len(ranks))


@contextlib.contextmanager
def job(placement: tuple[int, ...], wire: str = "tun") -> Iterator[Job]:
    with Hosts(max(placement) + 1, wire, seed=5) as hosts:
        yield Job(hosts, placement)


def test_a_host_that_is_cut_goes_and_its_zombies_learn_it_when_it_heals() -> None:
    with job((0, 0, 1, 1)) as one:
        one.hosts.cut(1)
        view = one.await_slots(one.ranks[:2], {0, 1})
        assert {removal.cause for removal in view.removed} == {UNREACHABLE}
        one.await_error(one.ranks[2:], "NoQuorumError")
        one.hosts.heal(1)
        one.await_error(one.ranks[2:], "EvictedError")
        assert one.ask(one.ranks[:2], "error") == ["NoneType"] * 2


@pytest.mark.parametrize(("src", "dst"), [(0, 1), (1, 0)])
def test_a_cut_in_one_direction_is_a_cut(src: int, dst: int) -> None:
    with job((0, 0, 1, 1)) as one:
        one.hosts.set_link(src, dst, is_cut=True)
        one.await_slots(one.ranks[:2], {0, 1})
        one.hosts.set_link(src, dst)
        one.await_error(one.ranks[2:], "EvictedError")


def test_a_blip_changes_nothing() -> None:
    with job((0, 1)) as one:
        one.hosts.cut(1)
        time.sleep(TIMEOUT_S / 2)
        one.hosts.heal(1)
        assert one.ask(one.ranks, "call", "await_decision", 1, 2.0 * TIMEOUT_S) == [None, None]
        assert one.ask(one.ranks, "error") == ["NoneType"] * 2


def test_a_cut_between_two_of_three_hosts_puts_one_of_them_out() -> None:
    with job((0, 1, 1, 2)) as one:
        one.hosts.set_link(1, 2, is_cut=True)
        one.hosts.set_link(2, 1, is_cut=True)
        view = one.await_slots(one.ranks[:3], {0, 1, 2})
        assert [(removal.slot, removal.cause) for removal in view.removed] == [(3, UNREACHABLE)]
        one.await_error(one.ranks[3:], "EvictedError")  # the third host tells it


def test_a_host_is_killed_and_its_kernel_says_so() -> None:
    with job((0, 0, 1, 1), "veth") as one:
        one.hosts.kill(1)
        view = one.await_slots(one.ranks[:2], {0, 1})
        assert {removal.cause for removal in view.removed} <= {UNREACHABLE, DEAD}


def test_a_death_is_agreed_on_over_a_bad_network_and_nobody_else_goes() -> None:
    with job((0, 0, 1, 1)) as one:
        for src, dst in ((0, 1), (1, 0)):
            one.hosts.set_link(src, dst, delay_s=0.1, loss=0.2)
        one.ranks.pop(3).process.kill()
        view = one.await_slots(one.ranks, {0, 1, 2})
        assert [(removal.slot, removal.cause) for removal in view.removed] == [(3, DEAD)]
