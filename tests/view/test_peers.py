"""`view.peers`: a process that cannot be watched now is not dead, and is watched as soon as it can be."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from epee.memory.shared import process_start_time
from epee.view.process.machine import own_host_key
from epee.view.process.peers import Peers, process_state
from epee.view.protocol.messages import Decision, Member
from epee.view.runtime import Runtime
from epee.view.transport.directory import JobDirectory
from epee.view.transport.wire import BEGIN, END, MAX_GROUPS, MAX_MEMBERS, PING, pack_endpoint, parse_endpoint
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


def told(peers: Peers, nonce: bytes, groups: range) -> dict[int, bytes]:
    peer = peers.get(nonce)
    assert peer is not None
    return {group_id: peer.told(group_id) for group_id in groups if peer.told(group_id)}


def test_what_is_told_by_a_process_that_is_met_later_is_kept(rank: Runtime, peers: Peers) -> None:
    """Of two who join by one view, one may take it over and tell before the other has heard of it."""
    other = Member(1, 0, OTHER, rank.member.endpoint, "elsewhere")
    peers.note_told(OTHER, *PING)
    peers.note_told(OTHER, 7, b"asks")
    peers.note_told(OTHER, 7, b"in")
    peers.note_told(OTHER, 8, b"gone")
    peers.note_told(OTHER, 8, b"")
    assert peers.add(other)
    peers.note_told(OTHER, 9, b"more")
    assert told(peers, OTHER, range(20)) == {7: b"in", 9: b"more"}


def test_what_strangers_tell_is_bounded(rank: Runtime, peers: Peers) -> None:
    for number in range(2 * MAX_MEMBERS):
        peers.note_told(number.to_bytes(16, "little"), 7, b"told")
    assert len(peers._early) == MAX_MEMBERS
    for group_id in range(2 * MAX_GROUPS):
        peers.note_told(OTHER, group_id, b"told")
    assert peers.add(Member(1, 0, OTHER, rank.member.endpoint, "elsewhere"))
    assert len(told(peers, OTHER, range(2 * MAX_GROUPS))) == MAX_GROUPS
    assert OTHER not in peers._early
    first = (0).to_bytes(16, "little")
    assert peers.add(Member(2, 0, first, rank.member.endpoint, "elsewhere"))
    assert told(peers, first, range(10)) == {}, "the oldest made room"


def test_what_is_not_told_again_on_a_new_connection_was_taken_back(rank: Runtime, peers: Peers) -> None:
    assert peers.add(Member(1, 0, OTHER, rank.member.endpoint, "elsewhere"))
    for group_id in (7, 8):
        peers.note_told(OTHER, group_id, b"old")
    peers.note_told(OTHER, *BEGIN)
    peers.note_told(OTHER, 7, b"new")
    assert told(peers, OTHER, range(20)) == {7: b"new", 8: b"old"}, "nothing that stands is missing in between"
    peers.note_told(OTHER, *END)
    assert told(peers, OTHER, range(20)) == {7: b"new"}
    peers.note_told(OTHER, *PING)
    peers.note_told(OTHER, *END)
    assert told(peers, OTHER, range(20)) == {7: b"new"}
