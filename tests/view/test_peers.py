"""`view.peers`: a process that cannot be watched now is not dead, and is watched as soon as it can be."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from epee.memory.host import process_start_time
from epee.view.process.endpoint import pack_endpoint, parse_endpoint
from epee.view.process.machine import own_host_key
from epee.view.process.peers import Peers, process_state
from epee.view.protocol.messages import Decision, Member
from epee.view.runtime import Runtime
from epee.view.transport.directory import JobDirectory
from tests import shortage

ME, OTHER = b"m" * 16, b"o" * 16


@pytest.fixture
def poll() -> Iterator[select.epoll]:
    with select.epoll() as made:
        yield made


@pytest.fixture
def peers(poll: select.epoll) -> Iterator[Peers]:
    made = Peers(ME, poll, own_host_key())
    yield made
    made.close()


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"]) as process:
        yield process
        process.kill()


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    monkeypatch.setenv("EPEE_RUNTIME_DIR", str(tmp_path))
    runtime = Runtime(JobDirectory.create(), 1)
    yield runtime
    runtime.close()


def test_who_cannot_be_watched_is_not_dead_and_watched_later(
    rank: Runtime, peers: Peers, caplog: pytest.LogCaptureFixture
) -> None:
    """A rank that is this very process: board and beat are its own, and it surely lives."""
    member = rank.member._replace(incarnation=1)
    fds = len(os.listdir("/proc/self/fd"))
    for num_free in (0, 1, 2):
        with shortage.descriptors(num_free):
            assert peers.add(member), "it is not dead"
            assert peers.retry() == []
        peer = peers.get(member.nonce)
        assert peer is not None
        assert not peer.is_dead
    peers.retire_former(Decision(2, ()))
    assert peers.get(member.nonce) is peer, "it is not forgotten"
    assert peers.retry() == []
    assert peers.is_mapped(member.nonce)
    assert peer.pidfd >= 0
    assert not peer.is_wanting
    assert len(os.listdir("/proc/self/fd")) == fds + 3, "a pidfd, board and beat (Python's mmap keeps a copy)"
    assert sum("tried again" in record.message for record in caplog.records) == 1


def test_who_died_before_it_could_be_watched_is_found_dead(
    rank: Runtime, peers: Peers, sleeper: subprocess.Popen[bytes]
) -> None:
    endpoint = parse_endpoint(rank.member.endpoint)
    endpoint = endpoint._replace(pid=sleeper.pid, start_time=process_start_time(sleeper.pid))
    other = Member(1, 1, OTHER, pack_endpoint(endpoint), rank.member.host)
    with shortage.descriptors(0):
        assert peers.add(other)
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert [peer.member.nonce for peer in peers.retry()] == [OTHER]
    assert peers.retry() == []
    peer = peers.get(OTHER)
    assert peer is not None
    assert peer.health(0.0) == "dead"
    peers.retire(Decision(2, ()))
    assert peers.get(OTHER) is None


def test_a_state_that_cannot_be_looked_at_is_not_that_of_the_dead() -> None:
    with shortage.descriptors(0):
        assert process_state(os.getpid()) == "?"
    assert process_state((1 << 22) + 1) == "X"
