"""The rule for calls that meet a new view, run in all kinds of orders of steps.

A small world of ranks that make one call in epoch 1. Each step is one that is divided from the next in the real thing:
a row stored into one inbox, a look that finds all rows, a view heard of (which stamps the record), a verdict. Deaths
and evictions begin new views, which each rank hears of when the dice say so; who was voted out goes on until it hears.
A rank may give the call up while one has not issued it (one step here; `test_row_withdrawal.py` divides it).
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epee.ep.membership.call_outcome import Contest, Record, Verdict, after, judge, missing

EPOCH, SEQ = 1, 1
WORKS, HAS_ENDED, MOVED, GAVE_UP = "works", "has ended it", "makes it again", "has given it up"


class _Rank:
    def __init__(self, num_ranks: int) -> None:
        self.record = Record(EPOCH, EPOCH)
        self.inbox: set[int] = set()
        self.unsent = list(range(num_ranks))  # inboxes that do not have its row; the own one comes first
        self.outcome = WORKS
        self.has_raised = False  # it has given the call up, and judges only what becomes of its number
        self.parties: frozenset[int] = frozenset()
        self.is_dead = self.is_out = False


class _World:
    """See above. `wrong` breaks the rule on purpose: the test must find it."""

    def __init__(self, seed: int, num_ranks: int, is_pull: bool, raises: bool, wrong: str = "") -> None:
        self.dice = random.Random(seed)
        self.num_ranks, self.raises, self.wrong = num_ranks, raises, wrong
        self.contest = Contest(EPOCH, SEQ, is_pull)
        self.ranks = [_Rank(num_ranks) for _ in range(num_ranks)]
        for me, rank in enumerate(self.ranks):
            rank.unsent.remove(me)
            rank.unsent.insert(0, me)
        self.views = [frozenset(range(num_ranks))]  # number v is epoch v + 1

    def run(self) -> None:
        """Take steps until nothing more can happen."""
        num_ends = self.dice.randrange(1, self.num_ranks)
        idle = 0
        while idle < 400:
            step = self.dice.random()
            if step < 0.03 and num_ends:
                num_ends -= 1
                self._end(self.dice.choice(sorted(self.views[-1])))
            me = self.dice.randrange(self.num_ranks)
            idle = 0 if self._step(self.ranks[me], me) else idle + 1

    def _end(self, victim: int) -> None:
        if self.dice.random() < 0.6:
            self.ranks[victim].is_dead = True
        self.ranks[victim].is_out = True
        self.views.append(self.views[-1] - {victim})

    def _step(self, rank: _Rank, me: int) -> bool:
        """Let a rank do one thing that it may do; False when there is none."""
        if rank.is_dead:
            return False
        steps = []
        record = rank.record
        if record.issued == 0 and record.view == EPOCH and rank.outcome == WORKS:
            steps.append(lambda: self._issue(rank))
        if record.issued and rank.unsent:
            steps.append(lambda: self._store(rank, me))
        if record.view == EPOCH and len(rank.inbox) == self.num_ranks and rank.outcome == WORKS:
            steps.append(lambda: self._gather(rank))
        if record.view == EPOCH and record.issued and rank.outcome == WORKS and not rank.has_raised:
            steps.append(lambda: self._give_up(rank))
        if record.view <= len(self.views) - 1 and me in self.views[record.view]:
            steps.append(lambda: self._hear(rank))
        if record.view > EPOCH and rank.outcome == WORKS:
            steps.append(lambda: self._judge(rank, me))
        return bool(steps) and self.dice.choice(steps)()

    def _issue(self, rank: _Rank) -> bool:
        if self.dice.random() < 0.7:
            return False  # it computes
        rank.record = rank.record._replace(issued=SEQ)
        return True

    def _store(self, rank: _Rank, me: int) -> bool:
        self.ranks[rank.unsent.pop(0)].inbox.add(me)
        return True

    def _give_up(self, rank: _Rank) -> bool:
        is_missing = any(not other.record.issued for other in self.ranks)
        if not (is_missing or any(other.has_raised for other in self.ranks)) or self.dice.random() < 0.8:
            return False
        rank.has_raised = True
        if self.wrong != "notes no withdrawal":
            rank.record = rank.record._replace(withdrawn=SEQ)
        return True

    def _gather(self, rank: _Rank) -> bool:
        if rank.has_raised or any(other.has_raised for other in self.ranks):
            return False
        rank.record = rank.record._replace(gathered=SEQ)
        rank.outcome, rank.parties = HAS_ENDED, self.views[0]
        return True

    def _hear(self, rank: _Rank) -> bool:
        rank.record = rank.record._replace(view=rank.record.view + 1)
        return True

    def _judge(self, rank: _Rank, me: int) -> bool:
        if rank.record.issued == 0:
            rank.outcome = MOVED  # its next call is the first of the new epoch
            return True
        view = rank.record.view
        stayed = {peer: self.ranks[peer].record for peer in self.views[view - 1]}
        gone = self.views[0] - self.views[view - 1]
        ended = {peer: self.ranks[peer].record for peer in gone if self.ranks[peer].is_dead}
        if self.wrong == "does not wait":
            stayed = {peer: record._replace(view=view) for peer, record in stayed.items()}
        if self.wrong == "believes zombies":
            ended = {peer: self.ranks[peer].record for peer in gone}
        if self.wrong == "forgets the dead":
            ended = {}
        verdict = judge(self.contest, view, stayed, ended, self.raises and bool(gone))
        if verdict is None:
            return False
        if self.wrong != "tells nobody":
            rank.record = after(verdict, SEQ, rank.record)
        if verdict is Verdict.WHOLE:
            rank.outcome, rank.parties = HAS_ENDED, self.views[0]
            assert all(self._has_row(peer) for peer in self.views[0])
        elif verdict is Verdict.AMONG:
            if not all(self._has_row(peer) for peer in self.views[view - 1]):
                return False  # the row is on its way, or the next view comes
            rank.outcome = HAS_ENDED
            rank.parties = self.views[view - 1] | {peer for peer in ended if self._has_row(peer)}
        elif verdict is Verdict.GIVEN_UP:
            rank.outcome = GAVE_UP
        else:
            rank.outcome = MOVED
        return True

    def _has_row(self, peer: int) -> bool:
        return peer in self.ranks[peer].inbox

    def check(self) -> None:
        """All who are left have come to the same end, and so had those who ended the call and died."""
        left = [self.ranks[rank] for rank in self.views[-1]]
        assert all(rank.outcome != WORKS for rank in left if rank.record.view > EPOCH), "a survivor waits for ever"
        reliable = [rank for rank in self.ranks if rank.is_dead or not rank.is_out]
        outcomes = {rank.outcome for rank in reliable if rank.outcome != WORKS and rank.record.issued}
        told = {rank.outcome for rank in left if rank.outcome != WORKS}
        assert len(told) <= 1, "survivors differ"
        if HAS_ENDED in told:
            assert not any(rank.has_raised for rank in left), "one has given up what the others have ended"
        if HAS_ENDED in outcomes:
            assert told <= {HAS_ENDED}, "one who died had ended the call, the others make it again"


def _run(seed: int, num_ranks: int, is_pull: bool, raises: bool, wrong: str = "") -> None:
    world = _World(seed, num_ranks, is_pull, raises, wrong)
    world.run()
    world.check()


@settings(max_examples=600, deadline=None)
@given(st.integers(0, 1 << 32), st.integers(2, 5), st.booleans(), st.booleans())
def test_survivors_come_to_the_same_end(seed: int, num_ranks: int, is_pull: bool, raises: bool) -> None:
    _run(seed, num_ranks, is_pull, raises)


@pytest.mark.parametrize(
    "wrong", ["does not wait", "believes zombies", "forgets the dead", "tells nobody", "notes no withdrawal"]
)
def test_each_part_of_the_rule_is_needed(wrong: str) -> None:
    """With a part of it left out some order of steps divides the survivors."""
    for seed in range(20_000):
        dice = random.Random(seed)
        try:
            _run(seed, dice.choice((3, 4, 5)), dice.random() < 0.7, dice.random() < 0.3, wrong)
        except AssertionError:
            return
    pytest.fail(f"20000 orders of steps do not show that {wrong!r} is wrong")


def test_nobody_decides_before_all_have_spoken() -> None:
    stayed = {0: Record(3, 1, 5, 4), 1: Record(2, 1, 5, 4)}
    assert missing(3, stayed) == [1]
    assert judge(Contest(1, 5, False), 3, stayed, {}, False) is None
    stayed[1] = Record(4, 1, 5, 5)  # it knows a newer view: this rank will hear of it, too
    assert judge(Contest(1, 5, False), 3, stayed, {}, False) is None


def test_the_verdicts_one_by_one() -> None:
    contest, pull = Contest(2, 5, False), Contest(2, 5, True)
    both = {0: Record(3, 2, 5, 4), 1: Record(3, 2, 5, 4)}
    late = {**both, 1: Record(3, 2, 4, 4)}
    knows = {**both, 1: Record(3, 2, 5, 5)}
    for fails, moves in ((False, Verdict.MOVE), (True, Verdict.FAIL)):
        assert judge(contest, 3, both, {}, fails) is moves
        assert judge(pull, 3, late, {}, fails) is moves
        assert judge(contest, 3, knows, {}, fails) is Verdict.WHOLE
        assert judge(contest, 3, both, {2: Record(2, 2, 5, 5)}, fails) is Verdict.WHOLE
        assert judge(contest, 3, both, {2: Record(2, 1, 9, 9)}, fails) is moves  # of another epoch
    assert judge(pull, 3, both, {}, False) is Verdict.AMONG
    assert judge(pull, 3, both, {}, True) is Verdict.FAIL
    left = {**both, 1: Record(3, 2, 5, 4, 5)}
    ahead = {**both, 1: Record(3, 2, 6, 4, 6)}
    for what in (contest, pull):
        assert judge(what, 3, left, {}, False) is judge(what, 3, ahead, {}, False) is Verdict.GIVEN_UP
        assert judge(what, 3, {**left, 2: Record(3, 2, 4, 4)}, {}, False) is Verdict.MOVE, "one has not made it yet"
        assert judge(what, 3, left, {}, True) is Verdict.FAIL
    assert judge(pull, 3, both, {2: Record(2, 2, 5, 4, 5)}, False) is Verdict.AMONG, "it died: nobody has its error"
    assert after(Verdict.GIVEN_UP, 5, both[0]) == left[1]
    assert after(Verdict.GIVEN_UP, 5, ahead[1]) == ahead[1]
    assert after(Verdict.MOVE, 5, both[0]).issued == 4
    assert after(Verdict.WHOLE, 5, both[0]).gathered == 5
    assert after(Verdict.AMONG, 5, both[0]) == both[0]
