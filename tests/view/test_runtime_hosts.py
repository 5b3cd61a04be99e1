"""The control plane over several hosts, which are one machine here: TCP on the loopback, no board of the other host."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest

from epee.view.protocol.messages import DEAD, LEFT, UNREACHABLE
from tests.view.runtime_processes import EVICT, HOST_TIMEOUT_S, LANE, PATIENT, Rank, decide, group, same_history, settle


def causes(ranks: list[Rank]) -> dict[int, str]:
    """Return why slots have gone, in whatever epoch."""
    return {removal.slot: removal.cause for decision in same_history(ranks) for removal in decision.removed}


def await_told(rank: Rank, wanted: dict[int, bytes]) -> None:
    deadline = time.monotonic() + 20
    while rank.ask("call", "told", LANE) != wanted:
        assert time.monotonic() < deadline, rank.ask("call", "told", LANE)
        time.sleep(0.01)


def test_each_host_has_its_folder_and_members_say_where_they_run(tmp_path: Path) -> None:
    with group(tmp_path) as job:
        ranks = job.born_over("aabb")
        hosts = [member.host for member in ranks[0].ask("call", "view").members]
        assert hosts[0] == hosts[1] != hosts[2] == hosts[3]
        assert ranks[3].ask("call", "host_of", 0) == hosts[0]
        folders = {path.name.split("-")[3]: path for path in tmp_path.iterdir()}
        assert set(folders) == set(hosts)
        assert all(len(list(path.glob("*-*"))) == 2 for path in folders.values())
        deadline = time.monotonic() + 20
        while [ranks[0].ask("call", "health", slot) for slot in (2, 3)] != ["reachable"] * 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        for rank in ranks:
            rank.end()
    assert list(tmp_path.iterdir()) == []


def test_what_a_lane_tells_travels_and_who_comes_later_hears_it(tmp_path: Path) -> None:
    with group(tmp_path) as job:
        ranks = job.born_over("ab")
        ranks[1].ask("tell", b"one")
        await_told(ranks[0], {1: b"one"})
        ranks[1].ask("tell", b"two")
        await_told(ranks[0], {1: b"two"})
        new = job.joiner_on("a", 2)
        new.ask("join", 20.0)
        await_told(new, {1: b"two"})
        new.ask("tell", b"new")
        await_told(ranks[1], {2: b"new"})
        deadline = time.monotonic() + 20
        while any(rank.ask("call", "unheard") for rank in (*ranks, new)):  # all is known that anybody tells
            assert time.monotonic() < deadline
            time.sleep(0.01)


def cut_and_leave_the_lane(runtime: Any) -> None:
    """Leave the group while there is no connection to anybody."""
    switchboard = runtime._loop.switchboard

    def cut(done: Any) -> None:
        for fd in list(switchboard._nonce_of):
            switchboard._close_outgoing(fd, "cut")
        switchboard.send = lambda *args: None  # nothing goes out before there is a connection again
        done()

    runtime._ask(cut)
    runtime.unregister(LANE)
    runtime._loop.post(lambda: delattr(switchboard, "send"))
    switchboard.abroad._lines[next(iter(switchboard.abroad._lines))].call_at = 0.0


def test_what_was_taken_back_while_there_was_no_connection_is_forgotten(tmp_path: Path) -> None:
    with group(tmp_path) as job:
        ranks = job.born_over("ab")
        ranks[1].ask("tell", b"asks")
        await_told(ranks[0], {1: b"asks"})
        ranks[1].ask("run", cut_and_leave_the_lane)
        await_told(ranks[0], {})


@pytest.mark.parametrize("victim", range(4))
def test_a_death_is_told_to_other_hosts(tmp_path: Path, victim: int) -> None:
    with group(tmp_path) as job:
        ranks = job.born_over("aabb")
        ranks.pop(victim).kill()
        decision = settle(ranks, {0, 1, 2, 3} - {victim})
        assert causes(ranks) == {victim: DEAD}
        (cut,) = decision.cuts
        assert cut.seq == 10 + cut.holder == max(10 + rank.slot for rank in ranks)


def test_deaths_on_both_hosts_at_once(tmp_path: Path) -> None:
    with group(tmp_path) as job:
        ranks = job.born_over("abab")
        for slot in (3, 0):
            ranks.pop(slot).kill()
        settle(ranks, {1, 2})
        assert causes(ranks) == {0: DEAD, 3: DEAD}


def test_who_leaves_another_host_says_so_though_nobody_else_is_there(tmp_path: Path) -> None:
    with group(tmp_path) as job:
        ranks = job.born_over("bba")
        ranks[2].ask("call", "leave")
        settle(ranks[:2], {0, 1})
        assert causes(ranks[:2]) == {2: LEFT}


def test_the_lowest_leaves_and_the_other_host_goes_on(tmp_path: Path) -> None:
    with group(tmp_path) as job:
        ranks = job.born_over("ab")
        ranks[0].ask("call", "leave")
        settle(ranks[1:], {1})
        assert causes(ranks[1:]) == {0: LEFT}


@pytest.mark.parametrize("settings", [PATIENT, EVICT])
def test_a_host_that_is_killed_goes_whatever_the_policy(tmp_path: Path, settings: object) -> None:
    with group(tmp_path, settings) as job:  # type: ignore[arg-type]
        ranks = job.born_over("aabb")
        for rank in ranks[2:]:
            rank.signal(signal.SIGKILL)
        settle(ranks[:2], {0, 1})
        assert set(causes(ranks[:2]).values()) <= {UNREACHABLE, DEAD}
        assert all(not rank.ask("lane_facts")[0] for rank in ranks[:2])


def test_the_half_without_the_lowest_slot_finds_no_quorum(tmp_path: Path) -> None:
    with group(tmp_path, PATIENT._replace(no_quorum_s=0.5)) as job:
        ranks = job.born_over("aabb")
        for rank in ranks[:2]:
            rank.signal(signal.SIGKILL)
        deadline = time.monotonic() + 20
        while [rank.ask("error") for rank in ranks[2:]] != ["NoQuorumError"] * 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_one_rank_per_host(tmp_path: Path) -> None:
    with group(tmp_path) as job:
        ranks = job.born_over("abc")
        ranks[1].kill()
        decision = decide([ranks[0], ranks[2]], 1)
        assert [(r.slot, r.cause) for r in decision.removed] == [(1, UNREACHABLE)]
        assert decision.cuts[0][1:] == (12, 2)


def test_a_stopped_host_is_not_lost_and_answers_when_it_goes_on(tmp_path: Path) -> None:
    with group(tmp_path) as job:
        ranks = job.born_over("aabb")
        for rank in ranks[2:]:
            rank.signal(signal.SIGSTOP)
        assert ranks[0].ask("call", "await_decision", 1, 2 * HOST_TIMEOUT_S) is None
        for rank in ranks[2:]:
            rank.signal(signal.SIGCONT)
        ranks.pop(1).kill()
        settle(ranks, {0, 2, 3})


def test_a_stopped_host_that_is_voted_out_learns_it_and_is_replaced(tmp_path: Path) -> None:
    with group(tmp_path, EVICT) as job:
        ranks = job.born_over("aabb")
        for rank in ranks[2:]:
            rank.signal(signal.SIGSTOP)
        for slot in (2, 3):
            ranks[0].ask("accuse_until", slot, ranks[0].ask("call", "view").epoch, 20.0)
        settle(ranks[:2], {0, 1})
        contacts = ranks[0].ask("call", "view").members
        new = job.joiner_on("c", 3)
        new.ask("join", 20.0, contacts)
        for rank in ranks[2:]:
            rank.signal(signal.SIGCONT)
        deadline = time.monotonic() + 20
        while [rank.ask("error") for rank in ranks[2:]] != ["EvictedError"] * 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        settle([*ranks[:2], new], {0, 1, 3})


def test_processes_join_from_other_hosts_by_those_who_live(tmp_path: Path) -> None:
    with group(tmp_path) as job:
        ranks = job.born_over("ab")
        contacts = ranks[0].ask("call", "view").members
        new = job.joiner_on("c", 2)
        new.ask("join", 20.0, contacts)
        mate = job.joiner_on("c", 3)  # finds a member in the folder
        mate.ask("join", 20.0)
        settle([*ranks, new, mate], {0, 1, 2, 3})
        ranks.pop(1).kill()
        late = job.joiner_on("b", 1)  # nobody is on its host any more, and one of its contacts is dead
        late.ask("join", 20.0, contacts)
        settle([*ranks, new, mate, late], {0, 1, 2, 3})
