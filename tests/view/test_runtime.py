"""The control plane with real processes: deaths, stalls, joins, leaves. Every survivor is told the same views."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from epee.view.loop import IDLE_S
from epee.view.protocol.messages import DEAD, LEFT, STALLED, Ask, GroupState
from epee.view.report import look_at_job
from epee.view.runtime import Runtime
from tests.survive import stages
from tests.view.runtime_processes import EVICT, PATIENT, Rank, Refusal, decide, group, same_history, settle


def slots(decision: object) -> list[int]:
    return [member.slot for member in decision.members]  # type: ignore[attr-defined]


@pytest.mark.parametrize(("num_ranks", "victim"), [(2, 0), (2, 1), (3, 0), (4, 3), (5, 2)])
def test_a_kill_is_decided_by_all_survivors_alike(tmp_path: Path, num_ranks: int, victim: int) -> None:
    with group(tmp_path / "run") as job:
        ranks = job.born(num_ranks)
        at = time.monotonic()
        ranks[victim].kill()
        rest = [rank for rank in ranks if rank.slot != victim]
        view = settle(rest, {rank.slot for rank in rest})
        assert [(removal.slot, removal.cause) for removal in view.removed] == [(victim, DEAD)]
        assert view.epoch == 2
        late = max(rank.ask("decided_at") for rank in rest) - at
        print(f"\n{num_ranks} ranks, slot {victim} killed: decided everywhere after {late * 1e3:.1f} ms")
        same_history(rest)
        for rank in rest:
            assert rank.ask("lane_facts")[0] is False, "groups go on"
            assert rank.ask("lane_facts")[1] == 1


def test_several_killed_at_once_and_one_after_the_other(tmp_path: Path) -> None:
    with group(tmp_path / "run") as job:
        ranks = job.born(5)
        for rank in ranks[:2]:
            rank.signal(signal.SIGKILL)
        settle(ranks[2:], {2, 3, 4})
        ranks[2].kill()
        settle(ranks[3:], {3, 4})
        ranks[4].kill()
        view = settle([ranks[3]], {3})
        assert [member.slot for member in view.members] == [3]
        same_history([ranks[3]])


def test_a_cut_and_a_start_come_from_the_lanes(tmp_path: Path) -> None:
    with group(tmp_path / "run", EVICT) as job:
        ranks = job.born(3)
        ranks[2].signal(signal.SIGSTOP)
        for rank in ranks[:2]:
            rank.tell("accuse_until", 2, 1, 20.0)
        views = [rank.answer() for rank in ranks[:2]]
        assert views[0] == views[1]
        assert [(removal.slot, removal.cause) for removal in views[0].removed] == [(2, STALLED)]
        assert [cut.seq for cut in views[0].cuts] == [11], "the last call that slot 1 has completed"
        assert [start.seq for start in views[0].starts] == [13]


def test_a_zombie_learns_that_it_was_voted_out_and_a_successor_takes_its_slot(tmp_path: Path) -> None:
    with group(tmp_path / "run", EVICT) as job:
        ranks = job.born(3)
        zombie, rest = ranks[0], ranks[1:]
        zombie.signal(signal.SIGSTOP)
        for rank in rest:
            rank.tell("accuse_until", 0, 1, 20.0)
        assert [slots(rank.answer()) for rank in rest] == [[1, 2], [1, 2]]
        successor = job.joiner(0)
        joined = successor.ask("join", 20.0)
        assert slots(joined) == [0, 1, 2]
        zombie.signal(signal.SIGCONT)
        deadline = time.monotonic() + 20
        while zombie.ask("error") != "EvictedError":
            assert time.monotonic() < deadline
            time.sleep(0.01)
        while zombie.ask("lane_facts")[2] != ["EvictedError"]:  # groups are told a moment later
            assert time.monotonic() < deadline
            time.sleep(0.01)
        settle([successor, *rest], {0, 1, 2})
        same_history(ranks[1:])
        zombie.end()
        settle([successor, *rest], {0, 1, 2})


def test_an_accusation_alone_removes_nobody_where_stalls_are_errors(tmp_path: Path) -> None:
    with group(tmp_path / "run", PATIENT) as job:
        ranks = job.born(3)
        ranks[2].signal(signal.SIGSTOP)
        for rank in ranks[:2]:
            rank.tell("accuse_until", 2, 1, 1.5)
        assert [rank.answer() for rank in ranks[:2]] == [None, None]
        ranks[2].signal(signal.SIGCONT)
        assert ranks[2].ask("call", "view").epoch == 1


def test_a_replacement_joins_in_the_same_slot(tmp_path: Path) -> None:
    with group(tmp_path / "run") as job:
        ranks = job.born(3)
        ranks[1].kill()
        rest = [ranks[0], ranks[2]]
        settle(rest, {0, 2})
        new = job.joiner(1)
        joined = new.ask("join", 20.0)
        view = settle([*rest, new], {0, 1, 2})
        assert view == joined
        assert view.members[1].incarnation == view.epoch
        same_history([*rest, new])


def test_a_group_grows_and_shrinks(tmp_path: Path) -> None:
    with group(tmp_path / "run") as job:
        ranks = job.born(2)
        new = [job.joiner(slot) for slot in (2, 3)]
        for rank in new:
            rank.tell("join", 20.0)
        for rank in new:
            rank.answer()
        settle([*ranks, *new], {0, 1, 2, 3})
        for rank in new:
            rank.tell("call", "leave")
            rank.answer()
        view = settle(ranks, {0, 1})
        assert {removal.cause for removal in view.removed} == {LEFT}
        same_history(ranks)


def test_a_slot_that_is_occupied_is_refused(tmp_path: Path) -> None:
    with group(tmp_path / "run") as job:
        ranks = job.born(2)
        with pytest.raises(Refusal, match="slot taken") as refusal:
            job.joiner(1).ask("join", 20.0)
        assert refusal.value.kind == "SlotTakenError"
        assert all(rank.ask("call", "view").epoch == 1 for rank in ranks)


def test_joiners_wait_until_they_are_admitted_where_that_is_asked_for(tmp_path: Path) -> None:
    with group(tmp_path / "run", PATIENT._replace(admit="ask")) as job:
        ranks = job.born(2)
        new = job.joiner(2)
        new.tell("join", 30.0)
        deadline = time.monotonic() + 20
        while not all(rank.ask("call", "waiting") == (2,) for rank in ranks):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert ranks[0].ask("call", "view").epoch == 1
        ranks[1].ask("call", "admit", (2,))
        new.answer()
        settle([*ranks, new], {0, 1, 2})
        assert ranks[0].ask("call", "waiting") == ()


def test_nobody_answers_a_joiner_of_a_dead_job(tmp_path: Path) -> None:
    with group(tmp_path / "run") as job:
        ranks = job.born(2)
        new = job.joiner(1)
        for rank in ranks:
            rank.kill()
        with pytest.raises(
            Refusal, match=r"no member has called group.recover_ranks\(\[1\]\) within 1.5 s, or"
        ) as refusal:
            new.ask("join", 1.5)
        assert refusal.value.kind == "CommTimeoutError"


def test_a_minority_of_stopped_and_living_learns_that_it_has_no_quorum(tmp_path: Path) -> None:
    with group(tmp_path / "run", EVICT._replace(no_quorum_s=1.0)) as job:
        ranks = job.born(4)
        for rank in ranks[:3]:
            rank.signal(signal.SIGSTOP)
        with pytest.raises(Refusal) as refusal:
            ranks[3].ask("accuse_until", 0, 1, 15.0)
        assert refusal.value.kind == "NoQuorumError"
        assert "no answer from slot(s) 0 (stopped), 1 (stopped), 2 (stopped)" in str(refusal.value)
        assert ranks[3].ask("call", "view").epoch == 1
        for rank in ranks[:3]:
            rank.signal(signal.SIGCONT)
        deadline = time.monotonic() + 20
        while ranks[3].ask("error") not in ("NoneType", "EvictedError"):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        same_history(ranks)


def test_a_process_that_exits_without_close_has_left(tmp_path: Path) -> None:
    with group(tmp_path / "run") as job:
        ranks = job.born(3)
        ranks[1].tell("exit")
        view = settle([ranks[0], ranks[2]], {0, 2})
        assert view.removed[0].cause in (LEFT, DEAD)
        ranks[1].process.join(20)
        assert ranks[1].process.exitcode == 0


def hold_the_gil(runtime: Runtime, fifo: str) -> None:
    stages.hold_the_gil_until(fifo)


def health_of(watcher: Rank, slot: int, wanted: str) -> None:
    deadline = time.monotonic() + 30
    seen = set()
    while True:
        seen.add(watcher.ask("call", "health", slot))
        if wanted in seen:
            return
        assert time.monotonic() < deadline, seen
        time.sleep(0.02)


def test_stopped_busy_and_dead_are_told_apart_and_nobody_is_voted_out_for_it(tmp_path: Path) -> None:
    with group(tmp_path / "run", EVICT) as job:
        ranks = job.born(3)
        health_of(ranks[0], 1, "running")
        assert ranks[0].ask("call", "health", 0) == "running"
        assert ranks[0].ask("call", "health", 9) == "unknown"
        ranks[1].signal(signal.SIGSTOP)
        health_of(ranks[0], 1, "stopped")
        ranks[1].signal(signal.SIGCONT)
        health_of(ranks[0], 1, "running")
        fifo = tmp_path / "fifo"
        os.mkfifo(fifo)
        ranks[1].tell("run", hold_the_gil, str(fifo))
        health_of(ranks[0], 1, "busy")
        fifo.write_bytes(b"x")
        ranks[1].answer()
        assert ranks[0].ask("call", "view").epoch == 1
        assert ranks[1].ask("call", "view").epoch == 1


def test_a_dead_rank_is_found_while_another_holds_the_gil(tmp_path: Path) -> None:
    with group(tmp_path / "run") as job:
        ranks = job.born(4)
        fifo = tmp_path / "fifo"
        os.mkfifo(fifo)
        ranks[0].tell("run", hold_the_gil, str(fifo))
        ranks[1].kill()
        view = settle(ranks[2:], {0, 2, 3})
        assert view.epoch == 2
        fifo.write_bytes(b"x")
        ranks[0].answer()
        settle([ranks[0], *ranks[2:]], {0, 2, 3})
        same_history([ranks[0], *ranks[2:]])


def ask_with_lost_questions(runtime: Runtime) -> int:
    """Catch up while the first two questions are lost, and answers to somebody else's come; return how many it took."""
    loop, num_asked = runtime._loop, 0
    assert loop is not None
    ask = loop.ask_members

    def lose(*question: int) -> None:
        nonlocal num_asked
        num_asked += 1
        if num_asked > 2:
            ask(*question)
        for member in runtime.view().members[1:]:
            loop.switchboard.send(member, Ask(runtime.view().epoch - 1), time.monotonic())

    loop.ask_members = lose  # type: ignore[method-assign]
    try:
        runtime.catch_up(20.0)
    finally:
        loop.ask_members = ask  # type: ignore[method-assign]
    return num_asked


def test_only_an_answer_to_its_own_question_lets_a_process_catch_up(tmp_path: Path) -> None:
    with group(tmp_path / "run") as job:
        ranks = job.born(3)
        assert ranks[0].ask("run", ask_with_lost_questions) >= 3
        assert ranks[0].ask("call", "catch_up", 20.0) is None


def test_nothing_stays_after_a_clean_end_and_a_killed_job_is_swept_by_the_next(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with group(run) as job:
        for rank in job.born(3):
            rank.tell("exit")
        for rank in job.ranks:
            rank.process.join(20)
    assert list(run.iterdir()) == []
    with group(run) as job:
        job.born(3)
        for rank in job.ranks:
            rank.kill()
    assert len(list(run.iterdir())) == 1
    with group(run) as job:
        ranks = job.born(2)
        assert [str(path) for path in run.iterdir()] == [job.path]
        for rank in ranks:
            rank.end()
    assert list(run.iterdir()) == []


def test_sockets_of_the_dead_leave_the_folder(tmp_path: Path) -> None:
    with group(tmp_path / "run") as job:
        ranks = job.born(3)
        ranks[2].kill()
        settle(ranks[:2], {0, 1})
        deadline = time.monotonic() + 20
        while sorted(name.split("-")[0] for name in os.listdir(job.path) if "-" in name) != ["0", "1"]:
            assert time.monotonic() < deadline, os.listdir(job.path)
            time.sleep(0.01)


@pytest.mark.slow
def test_kill_and_rejoin_grows_neither_descriptors_nor_threads(tmp_path: Path) -> None:
    with group(tmp_path / "run") as job:
        ranks = job.born(2)
        usage = []
        for _ in range(30):
            new = job.joiner(2)
            new.ask("join", 20.0)
            settle([*ranks, new], {0, 1, 2})
            new.kill()
            settle(ranks, {0, 1})
            usage.append(ranks[0].ask("usage"))
        assert usage[-1][0] <= usage[2][0] + 2
        assert usage[-1][1] <= usage[2][1] + 1, "a tick of the heartbeat may be under way"
        same_history(ranks)
        assert decide(ranks, 60).epoch >= 61  # more where a rank answered late


def show_a_wait(runtime: Runtime) -> None:
    runtime.register(99, lambda: GroupState(99, 0, 0), print, print, print).show(b"all_reduce", 17, 1, 0b10)


def test_a_report_from_outside_says_what_every_rank_does(tmp_path: Path) -> None:
    with group(tmp_path / "run") as job:
        ranks = job.born(3)
        ranks[0].ask("run", show_a_wait)
        ranks[1].signal(signal.SIGSTOP)
        report = look_at_job(ranks[0].pid)
        assert [rank.health for rank in report.ranks] == ["running", "stopped", "running"]
        assert [rank.pid for rank in report.ranks] == [rank.pid for rank in ranks]
        text = str(report)
        assert "group 99: all_reduce seq 17 epoch 1, waits for 1 since" in text
        assert f"rank 1 (process {ranks[1].pid}, epoch 1): stopped" in text
        assert str(look_at_job(ranks[1].pid)).count("running") == 2, "a stopped rank can be asked for, too"
        ranks[1].kill()
        settle([ranks[0], ranks[2]], {0, 2})
        assert [rank.slot for rank in look_at_job(ranks[2].pid, look_s=0.0).ranks] == [0, 2]


def mapped_boards(pid: int) -> set[str]:
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "/memfd:epee-board" in line}  # inodes


def test_a_joiner_maps_the_boards_of_the_members_before_it_is_one(tmp_path: Path) -> None:
    with group(tmp_path / "run", PATIENT._replace(admit="ask")) as job:
        ranks = job.born(2)
        new = job.joiner(2)
        new.tell("join", 30.0)
        deadline = time.monotonic() + 20
        while ranks[0].ask("call", "waiting") != (2,):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert ranks[0].ask("call", "view").epoch == 1
        assert len(mapped_boards(new.pid)) == 3, "its own and those of the members"
        assert len(mapped_boards(ranks[0].pid)) == 3, "members have mapped the joiner's, too"
        ranks[0].ask("call", "admit", (2,))
        new.answer()
        settle([*ranks, new], {0, 1, 2})


# ---- the job's folder vanishes (review A5)


def test_a_death_is_decided_when_the_folder_was_removed(tmp_path: Path) -> None:
    with group(tmp_path / "run") as job:
        ranks = job.born(3)
        shutil.rmtree(tmp_path / "run")
        ranks[2].kill()
        assert settle(ranks[:2], {0, 1}).epoch == 2
        same_history(ranks[:2])


def test_who_has_seen_the_folder_is_taken_in_when_it_was_removed(tmp_path: Path) -> None:
    with group(tmp_path / "run", PATIENT._replace(admit="ask")) as job:
        ranks = job.born(3)
        new = job.joiner(2)
        ranks[2].kill()
        settle(ranks[:2], {0, 1})
        new.tell("join", 20.0)
        deadline = time.monotonic() + 20
        while ranks[1].ask("call", "waiting") != (2,):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        shutil.rmtree(tmp_path / "run")
        time.sleep(2 * IDLE_S)  # the joiner has to ask again without the folder
        ranks[0].kill()
        settle([ranks[1]], {1})
        ranks[1].ask("call", "admit", [2])
        new.answer()
        settle([ranks[1], new], {1, 2})
