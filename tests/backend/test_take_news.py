"""Taking a decision over may be broken off at any line, by an interrupt or a shortage, and nothing of it is lost.

One process plays all ranks: it makes their outboxes, and a stand-in for the control plane tells it what was decided.
Rank 1 dies, another process takes its place and a third rank comes in beyond the end, in three decisions.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import epee.engine
from epee.backend.collectives.arguments import barrier
from epee.engine.bootstrap.group_note import OutboxLocator, pack_extra
from epee.engine.engine import Engine
from epee.engine.entry import CHANGING, NEWS
from epee.engine.membership.group_membership import GroupMembership
from epee.engine.outbox import OutboxOwner, PeerRegions, outbox_layout
from epee.engine.p2p.message import Message
from epee.errors import RankFailedError, ResourceError
from epee.memory.shared import BLOB_BYTES, SharedRegion, process_start_time
from epee.view.job import JobHandle
from epee.view.process import detector
from epee.view.process.board import GroupRow
from epee.view.process.detector import DeathWatch
from epee.view.protocol import outcome
from epee.view.protocol.messages import DEAD, Cut, Decision, Member, Part, Removal, Start
from epee.view.transport.wire import Endpoint, pack_endpoint
from tests import shortage

LANE, CAPACITY, STAGING = 7, 5, 1 << 16
STRIDE = 3  # lines; so many tests share them
NBYTES = outbox_layout(CAPACITY, STAGING).nbytes
_PARTS = (
    "group_membership.py",
    "agent_hooks.py",
    "rank_table.py",
    "call_outcome.py",
    "members.py",
    "sizes.py",
)
_FILES = (*_PARTS, "outcome.py", "detector.py")
_FOLDERS = tuple(str(Path(module.__file__ or "").parent) for module in (epee.engine, detector, outcome))


class Process:
    """A rank: an outbox of this process."""

    def __init__(self, slot: int, incarnation: int, num_ranks: int) -> None:
        self.region = SharedRegion.create(NBYTES, f"outbox{slot}")
        blob, extra = bytes(BLOB_BYTES), pack_extra(LANE, num_ranks, self.region.blob)
        endpoint = Endpoint(os.getpid(), process_start_time(os.getpid()), 0, blob, blob, extra)
        self.member = Member(slot, incarnation, bytes([slot, incarnation]) * 8, pack_endpoint(endpoint))
        OutboxOwner(self.member.nonce, LANE, slot).sign(self.region)


class Case:
    """Rank 0 of a group of two, and five decisions that it has not taken over yet."""

    def __init__(self, processes: list[Process], mode: str, is_told: bool = True) -> None:
        zero, one, again, beyond = (process.member for process in processes)
        locator = OutboxLocator(2, 3, processes[3].region.blob, 0).pack()
        self.decisions = (
            Decision(2, (zero,), (Removal(1, 1, DEAD),), (), (Start(LANE, 1),)),
            Decision(3, (zero, again), (), (), (Start(LANE, 2),)),
            Decision(4, (zero, again, beyond), (), (), (Start(LANE, 3),)),
            Decision(
                5, (zero, again, beyond), (), (Cut(LANE, 2),), (Start(LANE, 3),), (Part(LANE, 2, 4, -5),), (LANE,)
            ),
            Decision(6, (zero, again, beyond), (), (), (Start(LANE, 4),), (Part(LANE, 2, 4, 6, locator),), (LANE,)),
        )
        runtime = SimpleNamespace(
            view=lambda: Decision(1, (zero, one)),
            register=lambda *hooks: GroupRow(memoryview(bytearray(64)), LANE),
            unregister=lambda group_id: None,
            told=lambda group_id: {},
            error=None,
            lost_at=0.0,
            look_at=lambda slot: None,
        )
        job: Any = SimpleNamespace(runtime=runtime, release=lambda cause: None)
        self.membership = GroupMembership(JobHandle(job, [0, 1], LANE, True, True), mode)
        regions = [processes[0].region, SharedRegion.attach(processes[1].region.blob)]
        self.engine = Engine(PeerRegions(0, regions, STAGING, 1, CAPACITY), DeathWatch(), 5.0, self.membership)
        for decision in self.decisions if is_told else ():
            self.membership.hooks.decided(decision)

    def result(self) -> dict[str, Any]:
        """Return what is left of taking them over."""
        membership, engine = self.membership, self.engine
        rank_table, epoch_regions, intake = membership._rank_table, membership._epoch_regions, membership._intake
        return {
            "flags": engine.flags,
            "epoch": rank_table.epoch,
            "left": len(membership.hooks.decisions),
            "removed": rank_table.removed,
            "incarnations": rank_table.incarnations,
            "since": rank_table.since,
            "joined": (intake.join_epoch, intake.first_call, epoch_regions.sizes._changes),
            "turns": [(turn.epoch, turn.removed, turn.limit, turn.cap, turn.last) for turn in membership._course.turns],
            "present": membership._course.present(),
            "epoch_regions": {
                epoch: [
                    (first, peer_regions.members, peer_regions.group_size, peer_regions.epoch)
                    for first, peer_regions in stretches
                ]
                for epoch, stretches in epoch_regions._epoch_regions.items()
            },
            "outboxes": [region.blob for region in epoch_regions.full.regions],
            "words": [len(words) for words in epoch_regions.full.words],
            "full": (
                epoch_regions.full.num_ranks,
                epoch_regions.full.members,
                epoch_regions.full.peers,
                epoch_regions.full.blanks,
            ),
            "channels": {peer: channel.next_slot for peer, channel in engine.mail._receiver._channels.items()},
            "verdicts": [engine.peer_regions.own[engine.peer_regions.verdict_base[peer]] for peer in range(CAPACITY)],
            "watched": sorted(engine.watch._rank_of_fd.values()),
        }

    def close(self) -> None:
        self.engine.watch.close()
        self.membership.close()


@pytest.fixture(scope="module")
def processes() -> Iterator[list[Process]]:
    made = [Process(0, 1, 2), Process(1, 1, 2), Process(1, 3, 2), Process(2, 4, 3)]
    yield made
    for process in made:
        process.region.close()


class Interrupt:
    """Raises `TimeoutError`, an `OSError`, before the `at`-th line that taking a decision over runs."""

    def __init__(self, at: int) -> None:
        self.left = at
        self.where = ""

    def _trace(self, frame: Any, event: str, _: Any) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith(_FOLDERS) or not name.endswith(_FILES):
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                self.where = f"{Path(name).name}:{frame.f_lineno} {frame.f_code.co_name}"
                sys.settrace(None)
                raise TimeoutError("raised by a signal handler")
        return self._trace

    def run(self, engine: Engine) -> bool:
        """Look at the news; True when that was interrupted."""
        sys.settrace(self._trace)
        try:
            engine.look(lambda: None)
        except TimeoutError:
            return True
        finally:
            sys.settrace(None)
        assert self.left > 0, f"the exception was swallowed: {self.where}"
        return False


@pytest.mark.parametrize("start", range(1, 1 + STRIDE))
@pytest.mark.parametrize("mode", ["mask/error", "raise/error"])
def test_an_interrupt_before_any_line_loses_no_decision(processes: list[Process], mode: str, start: int) -> None:
    case = Case(processes, mode)
    case.engine.look(lambda: None)
    wanted = case.result()
    case.close()
    assert wanted["epoch"] == 6
    assert wanted["left"] == 0
    assert wanted["flags"] == CHANGING
    assert wanted["epoch_regions"][4][-1][1] == wanted["epoch_regions"][6][-1][1] == (0, 1, 2)
    assert wanted["epoch_regions"][5][-1][1] == (0, 1), "rank 2 was put out, and is still in the job"
    assert wanted["since"] == {0: 1, 1: 3, 2: 6}
    at, was_interrupted = start, True
    while was_interrupted:
        case, interrupt = Case(processes, mode), Interrupt(at)
        was_interrupted = interrupt.run(case.engine)
        if was_interrupted:
            assert not case.engine.entry._lock._is_owned(), interrupt.where
            claimed = case.membership.hooks.freeze()  # an agreement may begin at once; it says the same as before
            case.membership.hooks.thaw()
            assert claimed.issued == (3 if mode.startswith("raise") else 0), interrupt.where
            if case.engine.num_retired == 0 and case.membership.hooks.decisions:
                assert case.engine.flags & NEWS, interrupt.where
            case.engine.look(lambda: None)
        assert case.result() == wanted, interrupt.where
        case.close()
        at += STRIDE
    assert at > 150, "hardly a line was tried"


def test_a_call_that_news_will_move_accuses_nobody(processes: list[Process]) -> None:
    """A look at a call whose time is over comes between the news and the call's move to the new epoch."""
    case = Case(processes, "mask/evict", is_told=False)
    accused: list[tuple[int, ...]] = []
    case.membership.runtime.accuse = lambda *what: accused.append(what)  # type: ignore[method-assign]
    case.membership.runtime.settings = SimpleNamespace(no_quorum_s=60.0)  # type: ignore[assignment]
    case.engine.helper.kick = lambda *_, **__: None  # type: ignore[method-assign]  # the thread would take the news too
    op = case.engine.start(barrier)
    op.started = time.monotonic() - 2.0
    op.deadline = op.started + 1.0
    assert case.membership.insist(op, [1], time.monotonic())
    assert accused == [(1, LANE, 1, 1)], "behind in the epoch that the call runs in"
    case.membership._awaited._accused_at = 0.0
    for decision in case.decisions:
        case.membership.hooks.decided(decision)
    case.engine.look(lambda: None)
    assert op.peer_regions.epoch == 1, "the news is known, the call not judged"
    assert case.membership.insist(op, [1], time.monotonic()), "its time begins anew"
    assert len(accused) == 1, "the process that has the rank now was never waited for"
    assert op.peer_regions.epoch > 1
    case.close()


def test_a_shortage_is_an_error_and_the_next_call_takes_the_decision_over(processes: list[Process]) -> None:
    case = Case(processes, "mask/error")
    errors: list[str] = []
    states: list[Any] = []
    num_free = 0
    while case.membership.hooks.decisions and num_free < 20:
        with shortage.descriptors(num_free):
            try:
                case.engine.look(lambda: None)
            except ResourceError as exc:
                errors.append(str(exc))
                assert case.engine.flags & NEWS
        freezer = threading.Thread(target=lambda: states.append(case.membership.hooks.freeze()))
        freezer.start()
        freezer.join(10)  # the lock is free, and who is short answers all the same
        case.membership.hooks.thaw()
        num_free += 1
    assert len(errors) >= 2
    assert all("has joined in epoch" in error and "Too many open files" in error for error in errors)
    assert [state.issued for state in states] == [0] * num_free
    assert case.membership._rank_table.epoch == 6
    assert case.membership._epoch_regions.full.num_ranks == 3
    assert not case.membership._epoch_regions.full.blanks
    case.close()


def test_an_outbox_that_cannot_be_opened_is_not_taken_for_that_of_a_dead_process(
    processes: list[Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(processes, "mask/error")
    attach = SharedRegion.attach

    def forbidden(blob: bytes, is_writable: bool = True) -> SharedRegion:
        raise ResourceError("opening it is forbidden")

    with monkeypatch.context() as patch:
        patch.setattr(SharedRegion, "attach", forbidden)
        with pytest.raises(ResourceError, match="forbidden"):
            case.engine.look(lambda: None)
        monkeypatch.setattr("epee.engine.membership.members.is_leaving", lambda pid, start_time: True)
        patch.setattr(SharedRegion, "attach", lambda blob, is_writable=True: _only_blank(attach, blob, processes))
        case.engine.look(lambda: None)
    assert case.membership._epoch_regions.full.regions[1].blob != processes[2].region.blob, (
        "it is dying: a blank stands for it"
    )
    case.close()


def _only_blank(attach: Any, blob: bytes, processes: list[Process]) -> SharedRegion:
    if blob in [process.region.blob for process in processes]:
        raise ResourceError("opening it is forbidden")
    return attach(blob)  # type: ignore[no-any-return]


def test_messages_with_a_replaced_rank_are_failed_once_whatever_interrupts(processes: list[Process]) -> None:
    at, was_interrupted, num_told = 1, True, 0
    while was_interrupted:
        case, interrupt = Case(processes, "mask/error", is_told=False), Interrupt(at)
        told: list[Message] = []
        message = _receive(case, told)
        for decision in case.decisions:
            case.membership.hooks.decided(decision)
        was_interrupted = interrupt.run(case.engine)
        case.engine.look(lambda: None)
        assert isinstance(message.error, RankFailedError), interrupt.where
        assert told == [message], interrupt.where
        assert not case.engine.mail._receiver._posted, interrupt.where
        num_told += 1
        case.close()
        at += 1
    assert num_told > 50


def _receive(case: Case, told: list[Message]) -> Message:
    message = Message(False, 1, 0, 1, np.zeros(4))
    message.on_done = [told.append]
    case.engine.helper.kick = lambda *_, **__: None  # type: ignore[method-assign]  # the thread would take the news too
    case.engine.post(message)
    return message
