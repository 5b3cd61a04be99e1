"""A rank whose caller has got another error of a call (an interrupt) finds of later calls what the other ranks find.

Ranks 2 and 3 of four die, in two decisions. Ranks 0 and 1 judge their calls by the words that both read; what differs
is that rank 0 has left a call.
"""

from __future__ import annotations

import random
from array import array
from types import SimpleNamespace
from typing import Any

import pytest

from epee.engine.engine import Engine
from epee.engine.membership.call_outcome import CallOutcome, UnresolvedCalls
from epee.engine.operation import Operation
from epee.engine.outbox import CONSUMED, CONSUMED_TOO
from epee.engine.plan import refused
from epee.engine.signature import pack
from epee.errors import RankFailedError, is_own
from epee.memory.signals import tag
from epee.view.protocol.messages import DEAD, Decision, Member, Removal, Start
from epee.view.protocol.outcome import Course
from tests.stand_in import stand_in

LANE, FIRST, LAST, CELLS = 7, 5, 8, 512
MEMBERS = tuple(Member(slot, 1, bytes([slot]) * 16, b"") for slot in range(4))
ROOT, OTHER = 2, 3  # who dies by the first and by the second decision


def decisions(issued: tuple[int | None, int | None]) -> tuple[Decision, Decision]:
    starts = [() if seq is None else (Start(LANE, seq + 1),) for seq in issued]
    lost = [Removal(slot, 1, DEAD) for slot in (ROOT, OTHER)]
    return Decision(2, (*MEMBERS[:2], MEMBERS[3]), (lost[0],), (), starts[0]), Decision(
        3, MEMBERS[:2], (lost[1],), (), starts[1]
    )


def _is_not_own(exc: BaseException) -> bool:
    return not is_own(exc)


class Call:
    """What the judge knows of a call; nothing is done but by it."""

    name, writing, rounds_known, by_view, started = "call", False, False, False, 0.0

    def __init__(self, seq: int, peer_regions: Any, root: int | None, told: BaseException | None) -> None:
        self.seq, self.cell, self.peer_regions = seq, CELLS + 64 * seq, peer_regions
        self.plan: Any = SimpleNamespace(rounds=1, merge_bytes=0, signature=pack(1, root=-1 if root is None else root))
        self.root, self.told = root, told
        self.error: BaseException | None = None
        self.lost_here: tuple[int, ...] = ()

    @stand_in
    def make(self, peer_regions: Any) -> Any:
        if self.root is not None and self.root not in peer_regions.members:
            raise RankFailedError("its root is lost", [self.root])
        return self.plan

    @property
    def done(self) -> bool:
        return self.error is not None

    def fail(self, error: BaseException) -> None:
        self.error = self.error or error

    def renew(self, peer_regions: Any, plan: Any) -> None:
        self.peer_regions = peer_regions

    def describe(self, *_: Any, **__: Any) -> str:
        return "call"


class Rank:
    """One of those who live."""

    def __init__(self, words: dict[int, array[int]], raises: bool) -> None:
        self.course = Course(LANE, Decision(1, MEMBERS), raises)
        self.epoch_regions = {
            epoch: SimpleNamespace(
                members=members,
                words=[memoryview(words[rank]) for rank in members],
                peers=tuple(range(len(members))),
                epoch=epoch,
                host_of=(),
            )
            for epoch, members in ((1, (0, 1, 2, 3)), (2, (0, 1, 3)), (3, (0, 1)))
        }
        self.engine: Any = SimpleNamespace(unsettled=UnresolvedCalls(), queue=[], is_interrupt=_is_not_own)
        gone = {ROOT: (2, DEAD), OTHER: (3, DEAD)}
        rank_table: Any = SimpleNamespace(
            rank_at=lambda slot, epoch: slot,
            was_put_out=lambda rank: False,
            removed_after=lambda epoch: {rank for rank, (when, _) in gone.items() if when > epoch},
            kind_of_loss=lambda ranks: (RankFailedError, "process ended"),
            epoch=3,
        )
        epoch_regions: Any = SimpleNamespace(
            regions_for=lambda epoch, seq: self.epoch_regions[epoch],
            joined_in=0,
            shown_epoch=0,
            full=SimpleNamespace(rank=0),
        )
        self.judge = CallOutcome(self.engine, rank_table, self.course, epoch_regions)

    def judged(self, call: Any) -> tuple[str, int]:
        """Return how a call ends by the decisions, or in which epoch it runs."""
        try:
            self.judge.raise_loss()
        except RankFailedError as error:
            return f"not made: {error}", 0
        self.judge.heed(call)
        return type(call.error).__name__, 0 if call.done else call.peer_regions.epoch

    def end(self, call: Any) -> None:
        self.engine.unsettled.note(call)
        past = self.engine.unsettled.calls
        self.course.forget(min(call.seq, past[0].seq - 1) if past else call.seq)


def put(words: array[int], through: int, begun: int, epoch: int) -> None:
    """Let a rank have ended the calls up to `through`, and have its part whole in those up to `begun`, in an epoch."""
    words[CONSUMED] = words[CONSUMED_TOO] = through
    for seq in range(through + 1, begun + 1):
        words[CELLS + 64 * seq] = tag(epoch, seq)


@pytest.mark.parametrize("raises", [False, True])
def test_who_has_left_a_call_finds_what_the_others_find(raises: bool) -> None:
    """Whatever the dead have left, and whatever roots calls have: calls end alike, and run in the same epochs."""
    dice, seen, ended = random.Random(1), set(), 0
    for _ in range(4000):
        words = {rank: array("Q", bytes(8 * 2048)) for rank in range(4)}
        for rank, epochs in ((ROOT, (1,)), (OTHER, (1, 2))):
            through = dice.randrange(FIRST - 1, LAST)
            put(words[rank], through, dice.randrange(through, LAST + 1), dice.choice(epochs))
        issued = dice.choice([(None, None), (FIRST, FIRST), (FIRST, FIRST + 1), (FIRST + 1, FIRST + 2)])
        ranks = Rank(words, raises), Rank(words, raises)
        for rank in ranks:
            for decision in decisions(issued):
                rank.course.add(decision)
        left = dice.randrange(FIRST, LAST + 1)  # by rank 0
        for seq in range(FIRST, LAST + 1):
            root = dice.choice((None, ROOT))
            calls = [Call(seq, rank.epoch_regions[max(1, rank.course.base)], root, None) for rank in ranks]
            calls[0].told = told = KeyboardInterrupt() if seq == left else None
            found = [rank.judged(call) for rank, call in zip(ranks, calls, strict=True)]
            if told is None or calls[0].error is not told:
                assert found[0] == found[1]
            elif calls[1].error is None:  # it misses the part of who has left it, and is given up
                calls[1].fail(RuntimeError("given up"))
            else:
                ended += 1
            for rank, call in zip(ranks, calls, strict=True):
                rank.end(call)
            if told is not None and isinstance(calls[0].error, RankFailedError):
                with pytest.raises(RankFailedError, match="failed here before"):  # its caller has not heard of that
                    ranks[0].judge.raise_loss()
                ranks[0].course.forget(seq)
            assert ranks[0].course.base == ranks[1].course.base, "with whom calls are planned, and what is shown of it"
            seen.add(found[1])
    assert ended > 20, "some that were left ended for all on their way"
    assert len(seen) > 2


@pytest.mark.parametrize("raises", [False, True])
def test_who_has_given_up_a_call_behind_others_finds_what_the_others_find(raises: bool) -> None:
    """Rank 0 gives a call up before the losses are heard of, and calls overlap: it is asked about with its root."""
    dice, rootless = random.Random(2), 0
    for _ in range(4000):
        words = {rank: array("Q", bytes(8 * 2048)) for rank in range(4)}
        for rank, epochs in ((ROOT, (1,)), (OTHER, (1, 2))):
            through = dice.randrange(FIRST - 1, LAST)
            put(words[rank], through, dice.randrange(through, LAST + 1), dice.choice(epochs))
        ranks = Rank(words, raises), Rank(words, raises)
        root = dice.choice((ROOT, OTHER))
        given_up, *others = (Call(FIRST, rank.epoch_regions[1], root, None) for rank in ranks)
        given_up.fail(RuntimeError("its time-out has passed"))
        ranks[0].end(given_up)
        for rank in ranks:
            for decision in decisions((FIRST + 1, FIRST + 1)):
                rank.course.add(decision)
        found = ranks[1].judged(others[0])
        if others[0].error is None:  # it misses the part of rank 0
            others[0].fail(RuntimeError("given up"))
        ranks[1].end(others[0])
        rootless += found[0] == "RankFailedError" and not raises
        if not raises:
            ranks[0].judge.raise_loss()  # it only asks again
            assert ranks[0].course.planned_in(FIRST + 1) == ranks[1].course.planned_in(FIRST + 1)
        again: list[Any] = [Call(FIRST + 1, rank.epoch_regions[1], dice.choice((None, ROOT)), None) for rank in ranks]
        again[1].root, again[1].plan = again[0].root, again[0].plan
        ends = [rank.judged(call) for rank, call in zip(ranks, again, strict=True)]
        if found[0] == "RankFailedError" and ends[0][0].startswith("not made"):
            ends[0] = ranks[0].judged(again[0])  # the loss that the others have been told by the call that it gave up
        assert ends[0] == ends[1]
    assert raises or rootless > 100


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_call_that_failed_before_it_was_told_waits_for_room_but_not_for_a_lost_rank(is_lost: bool) -> None:
    peer_regions: Any = SimpleNamespace(epoch_bits=0, first_cell=CELLS, num_ranks=2, cells_free_until=0)
    peer_regions.least_consumed = lambda: 0  # of a rank that reads nothing any more
    op = Operation(refused("all_reduce", RuntimeError("interrupted")), 1000, peer_regions, 0.0)
    op.fail(KeyboardInterrupt())
    engine: Any = SimpleNamespace(
        membership=SimpleNamespace(has_lost_one_of=lambda asked: is_lost and asked is peer_regions)
    )
    assert Engine._publish_failed(engine, op) is is_lost


@pytest.mark.parametrize("is_rootless", [False, True])
def test_a_call_that_only_this_rank_cannot_plan_again_leaves_a_header_for_the_others(is_rootless: bool) -> None:
    ended: list[tuple[int, int]] = []
    judge: Any = SimpleNamespace(
        _course=SimpleNamespace(ended_on_the_way=lambda seq, epoch: ended.append((seq, epoch))),
        _rank_table=SimpleNamespace(was_put_out=lambda rank: False),
        _engine=SimpleNamespace(is_interrupt=lambda exc: False),  # as on the background thread
    )
    call: Any = Call(5, SimpleNamespace(members=(0, 1, ROOT), epoch=1), ROOT, None)
    after: Any = SimpleNamespace(members=(0, 1) if is_rootless else (0, 1, ROOT), epoch=2)
    shortage = MemoryError("no room for a copy")
    if not is_rootless:
        call.make = lambda peer_regions: _raise(shortage)
    CallOutcome._move(judge, call, after, is_rootless)
    assert (call.by_view, call.peer_regions.epoch, ended) == ((True, 1, [(5, 2)]) if is_rootless else (False, 2, []))
    assert isinstance(call.error, RankFailedError) if is_rootless else call.error is shortage


def _raise(error: Exception) -> None:
    raise error
