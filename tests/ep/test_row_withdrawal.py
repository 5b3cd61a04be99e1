"""Calls of a buffer that are given up (`ep/control/withdrawal.py`), in all kinds of orders of loads and stores.

Ranks make two calls, one behind the other, as `Exchange` does, with the real `EndWords`, and so with the rule that
collectives share (`view/protocol/withdrawal.py`), on words whose every load and store is a step of its own: the dice
say whose step is next. A rank's program is run again from its beginning for each of its steps, with what it has loaded
so far, and stops at the first load or store that is new.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epee.ep.control.withdrawal import FAILED, GATHERED, GAVE_UP, EndWords
from epee.view.protocol.withdrawal import End, Look, Stance

NUM_CALLS = 2
ROWS = 8  # words of the end lines come first


class _Pause(Exception):
    """The program has come to a step that it has not made yet."""


class _Steps:
    """What a rank has done so far, and what it does next."""

    def __init__(self, inboxes: dict[int, list[int]], dice: random.Random) -> None:
        self.inboxes, self.dice = inboxes, dice
        self.log: list[int] = []
        self.at = 0
        self.may_step = False

    def do(self, step: Callable[[], int]) -> int:
        """Return what a step gave when it was made first; one that is new is made once for each turn of the dice."""
        if self.at == len(self.log):
            if not self.may_step:
                raise _Pause
            self.may_step = False
            self.log.append(step())
        self.at += 1
        return self.log[self.at - 1]

    def chance(self, of: float) -> bool:
        return bool(self.do(lambda: int(self.dice.random() < of)))


class _Words:
    """An inbox as a rank sees it: each load and store is a step."""

    def __init__(self, words: list[int], steps: _Steps) -> None:
        self.words, self.steps = words, steps

    def __getitem__(self, index: int) -> int:
        return self.steps.do(lambda: self.words[index])

    def __setitem__(self, index: int, value: int) -> None:
        def store() -> int:
            self.words[index] = value
            return 0

        self.steps.do(store)


def _row_at(parity: int, src: int) -> int:
    return ROWS + 8 * parity + src


class _FailsAtOnce(EndWords):
    def look(self, parity: int, mark: int) -> Look:
        return Look(End.FAILED)


class _BelievesRowsOnly(EndWords):
    def withdrawn(self, mark: int) -> list[int]:
        return []


class _LooksForThisCallOnly(EndWords):
    def withdrawn(self, mark: int) -> list[int]:
        return [p for p, at in self._peers if self._words[p][at + GAVE_UP] == mark]


class _LooksForGatheredFirst(EndWords):
    def look(self, parity: int, mark: int) -> Look:
        found = [p for p, at in self._peers if self._words[p][at + GATHERED] == mark]
        if found:
            return Look(End.COMPLETES, tuple(found))
        has_failed = [self._words[p][at + FAILED] >= mark for p, at in self._peers]
        missing = [self._words[p][self._row_at(parity, p)] != mark for p, _ in self._peers]
        withdrew = [self._words[p][at + GAVE_UP] >= mark for p, at in self._peers]
        return Look(End.FAILED if any(has_failed) or any(missing) or all(withdrew) else End.OPEN, ())


class _WaitsForNobody(EndWords):
    def _stance_of(self, *where: Any) -> Stance:
        stance = super()._stance_of(*where)
        return Stance.GAVE_UP if stance is Stance.OPEN else stance


class _Rank:
    def __init__(self, rank: int, inboxes: dict[int, list[int]], dice: random.Random, kind: type[EndWords]) -> None:
        self.rank, self.kind = rank, kind
        self.steps = _Steps(inboxes, dice)
        self.words = {peer: _Words(words, self.steps) for peer, words in inboxes.items()}
        self.ends: list[str] = []

    def step(self) -> bool:
        """Make one step; False when the program has come to its end."""
        self.steps.at, self.steps.may_step = 0, True
        self.ends = []
        try:
            self._program()
        except _Pause:
            return True
        return False

    def _program(self) -> None:
        ends = self.kind(self.rank, self.words, lambda rank: 0, _row_at)  # type: ignore[arg-type]
        for seq in range(1, NUM_CALLS + 1):
            for peer in (self.rank, *(peer for peer in self.words if peer != self.rank)):
                self.words[peer][_row_at(seq & 1, self.rank)] = seq
            self.ends.append(self._call(ends, seq))
            while not self._all_rows(seq):
                pass  # nobody publishes the next row before it has seen all of this call

    def _all_rows(self, seq: int) -> bool:
        own = self.words[self.rank]
        return all(own[_row_at(seq & 1, peer)] == seq for peer in self.words if peer != self.rank)

    def _call(self, ends: EndWords, seq: int) -> str:
        while not self._all_rows(seq):
            if ends.withdrawn(seq) or self.steps.chance(0.2):
                break  # its patience has ended
        else:
            if not ends.withdrawn(seq):
                ends.has_gathered(seq)
                return "gathered"
        ends.give_up(seq)
        while (look := ends.look(seq & 1, seq)).end is End.OPEN:
            pass
        if look.end is End.COMPLETES:
            ends.has_gathered(seq)
            return "gathered"
        ends.has_failed(seq)
        return "failed"


def _run(seed: int, num_ranks: int, kind: type[EndWords] = EndWords) -> list[str]:
    """Run it and return how the calls have ended."""
    dice = random.Random(seed)
    inboxes = {rank: [0] * (ROWS + 16) for rank in range(num_ranks)}
    ranks = [_Rank(rank, inboxes, dice, kind) for rank in range(num_ranks)]
    alive = list(ranks)
    for _ in range(3000):
        if not alive:
            break
        rank = dice.choice(alive)
        for _ in range(dice.choice((1, 1, 3, 8, 20))):  # some run far ahead of the others
            if not rank.step():
                alive.remove(rank)
                break
    assert not alive, "a rank waits for ever"
    for ends in zip(*(rank.ends for rank in ranks), strict=True):
        assert len(set(ends)) == 1, f"a call ended as {ends}"
    return ranks[0].ends


@settings(max_examples=400, deadline=None)
@given(st.integers(0, 1 << 32), st.integers(2, 4))
def test_a_call_ends_alike_on_all_ranks(seed: int, num_ranks: int) -> None:
    _run(seed, num_ranks)


def test_both_ends_come_about() -> None:
    """Else the test above would show nothing."""
    seen = {end for seed in range(60) for end in _run(seed, 2 + seed % 2)}
    assert seen == {"gathered", "failed"}


@pytest.mark.parametrize(
    "wrong", [_FailsAtOnce, _BelievesRowsOnly, _LooksForThisCallOnly, _LooksForGatheredFirst, _WaitsForNobody]
)
def test_each_part_of_the_rule_is_needed(wrong: type[EndWords]) -> None:
    for seed in range(4000):
        try:
            _run(seed, 2 + seed % 2, wrong)
        except AssertionError:
            return
    pytest.fail(f"4000 orders of steps do not show that {wrong.__name__} is wrong")
