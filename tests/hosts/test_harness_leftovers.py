"""Nothing is left of hosts, however their test ends: no process, namespace, interface, mount, folder or descriptor."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from tests import conftest, hosts
from tests.harness import RankFailure
from tests.hosts import Hosts, HostsError, can_make_hosts, run_on_hosts, run_on_loopbacks
from tests.shake import checked_of

from .test_harness_groups import die_on_one, environment, hang_on_one, raise_on_one

ALL_S = 30.0


def spaces_of(pid: int | str) -> set[str]:
    """Return the network and the PID namespace of a process; none when it has ended."""
    with contextlib.suppress(OSError):
        return {os.readlink(f"/proc/{pid}/ns/{kind}") for kind in ("net", "pid")}
    return set()


def inhabited(spaces: set[str]) -> set[str]:
    """Return those of the namespaces that a process is in, be it one that nobody has taken note of the end of."""
    return spaces & set().union(*(spaces_of(path.name) for path in Path("/proc").glob("[0-9]*")))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Return the namespaces of all hosts of the test and of what is between them, as they are made."""
    noted: set[str] = set()
    ours, build = spaces_of("self"), Hosts._build

    def note(hosts: Hosts) -> None:
        build(hosts)
        for machine in hosts._machines:
            noted.update(spaces_of(machine.pid))
            noted.update(spaces_of(checked_of(machine.pid)[1]) - ours)  # the lab's

    monkeypatch.setattr(Hosts, "_build", note)
    return noted


def state() -> dict[str, Any]:
    """Return what a run must leave as it was."""
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "interfaces": os.listdir("/proc/sys/net/ipv4/conf"),
        "named": os.listdir("/run/netns") if os.path.isdir("/run/netns") else [],
        "mounts": Path("/proc/self/mountinfo").read_text(),
    }


def do_well() -> None:
    run_on_hosts(environment, (0, 1), backend="gloo")


def raise_in_a_rank() -> None:
    with pytest.raises(RankFailure):
        run_on_hosts(raise_on_one, (0, 1), 1, backend="gloo")


def hang_in_a_rank() -> None:
    with pytest.raises(RankFailure):
        run_on_hosts(hang_on_one, (0, 1), 0, backend="gloo", timeout_s=1.5)


def lose_a_rank() -> None:
    run_on_hosts(die_on_one, (0, 1), 0, backend=None, dead={0}, wire="tun")


def raise_in_the_test() -> None:
    def fail() -> None:
        with Hosts(2, "tun") as made:
            made.worker(0)
            made.stop(0)
            made.cut(1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()


def kill_a_host() -> None:
    with Hosts(2) as made:
        made.worker(1)
        made.kill(1)


def use_loopbacks() -> None:
    run_on_loopbacks(environment, (0, 1), backend="gloo")


WAYS = [do_well, raise_in_a_rank, hang_in_a_rank, lose_a_rank, raise_in_the_test, kill_a_host, use_loopbacks]


@pytest.mark.hosts
@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_left(way: Any, made: set[str]) -> None:
    can_make_hosts()
    run_on_loopbacks(environment, (0,), backend=None)  # the server of the harness and its sockets are there from now on
    made.clear()
    before = state()
    way()
    assert len(made) == (0 if way is use_loopbacks else 5)
    # All are waited for before the block ends, so there is nothing to wait for here.
    assert not inhabited(made)
    assert state() == before


def hold_hosts(connection: Connection) -> None:
    """Make hosts, say which processes they have, and stay."""
    with Hosts(2) as made:
        made.worker(1)
        connection.send([*made.processes(0), *made.processes(1)])
        time.sleep(1000)


@pytest.mark.hosts
def test_nothing_is_left_of_a_test_process_that_is_killed() -> None:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=hold_hosts, args=(theirs,))
    process.start()
    theirs.close()
    assert ours.poll(2 * ALL_S)
    pids = ours.recv()
    ours.close()
    made = set().union(*(spaces_of(pid) for pid in pids))
    assert len(pids) == 3
    assert len(made) == 4
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    process.close()
    until = time.monotonic() + ALL_S
    while inhabited(made) and time.monotonic() < until:
        time.sleep(0.01)
    assert not inhabited(made)


@pytest.mark.hosts
def test_labs_of_several_tests_do_not_meet() -> None:
    with Hosts(1) as one, Hosts(1) as other:
        assert one.address(0) == other.address(0)
        assert not set(one.processes(0)) & set(other.processes(0))


@pytest.mark.hosts
def test_hosts_that_cannot_be_made_leave_nothing_and_say_why() -> None:
    can_make_hosts()
    before = state()
    with pytest.raises(HostsError, match=r"ip: .*mtu"), Hosts(2, mtu=10_000_000):
        pass
    assert state() == before


class Item:
    """What pytest's hook needs of a test."""

    def iter_markers(self, name: str) -> list[pytest.Mark]:
        return [pytest.mark.hosts.mark] if name == "hosts" else []


@pytest.mark.parametrize(("required", "outcome"), [("1", pytest.fail.Exception), ("0", pytest.skip.Exception)])
def test_where_no_hosts_can_be_made_tests_are_skipped_but_fail_in_ci(
    monkeypatch: pytest.MonkeyPatch, required: str, outcome: type[BaseException]
) -> None:
    monkeypatch.setenv("EPEE_REQUIRE_HOSTS", required)
    monkeypatch.setattr(hosts, "can_make_hosts", lambda wire="veth": "no rights")
    with pytest.raises(outcome, match=r"no hosts can be made here.*no rights"):
        conftest.pytest_runtest_setup(Item())  # type: ignore[arg-type]
