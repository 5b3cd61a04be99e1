"""How a call that a rank gives up before it has seen all rows ends alike on all: given up everywhere, or nowhere.

A rank gives a call up when its time-out has passed, or when any other error takes its caller out of the wait for the
rows. It must not just leave: the rank that it waited for may come a moment later, find every row in its place and
return a result that the others never had; after that each of its calls would meet the next one of the others (ADR 46
has the same for collectives).

Who writes, who reads: each rank has three words in its own inbox, each the tag of a call; the other members read them.

    GAVE_UP   its caller has left, or it has found that a peer's has; stored, then a fence, then a look at the others
    GATHERED  it has seen the rows of all and then, in a second look, no peer that gave the call up: it goes on
    FAILED    it knows that nobody has gathered the call, and nobody will: also one that refuses it

What one that gave up sees then, of each peer's row in that peer's own inbox (where it is stored first) and words:

    a row is missing        who finds that row later finds this rank's GAVE_UP: the call has failed.
    a peer has gathered it  all rows are there: this rank goes on with the call, too.
    a peer says FAILED      so it has; also one that has given up the next call and has not gathered this one.
    all have given it up    nobody has gathered it by itself, so nobody has: it has failed.
    else                    somebody is between its two looks and its word: look again.

Each word is loaded before those that were stored before it, and a rank can be one call ahead at most (the row after
the next one is stored when all have been seen of the next): so GATHERED is still the call's tag when it matters.

Who has no part in the call any more (a view has put it out of it, while those who stay go on) is not looked at. So that
nobody takes its missing row for the end of a call that the others go on with, a rank finds a call failed only while no
agreement is under way of which it has not heard the end: what it gave up before that, the others see behind it.

What is left open: a rank that has stopped between its second look and its word. The error says so, and the buffer does
not go on before it is known. A crash leaves the words as they were; the next epoch has inboxes of its own.

`tests/ep/test_row_withdrawal.py` runs this code in all kinds of orders of its loads and stores.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, MutableSequence
from enum import Enum
from typing import NamedTuple

from ...memory.signals import fence

LINE_WORDS = 8  # of a rank in an inbox: one cache line
GAVE_UP, GATHERED, FAILED = 2, 3, 4  # offsets in the rank's own line of its inbox, behind the two of a source


class End(Enum):
    """How a call ends, as far as one look tells."""

    GATHERED = "gathered"
    FAILED = "failed"
    OPEN = "open"


class Look(NamedTuple):
    """What a rank that has given a call up sees; `ranks` are those that have gathered it, or have not decided."""

    end: End
    ranks: tuple[int, ...]


class EndWords:
    """The words of all members, seen from one rank.

    Args:
        rank: this rank.
        words: of each member's inbox, this rank's included; looked up at each use, so that their owner can let go.
        end_at: index of a rank's line in its own inbox.
        row_at: index of the tag of a rank's row of a call with a number of that parity, in any inbox.
    """

    def __init__(
        self,
        rank: int,
        words: Mapping[int, MutableSequence[int] | memoryview],
        end_at: Callable[[int], int],
        row_at: Callable[[int, int], int],
    ) -> None:
        self._rank = rank
        self._words = words
        self._own_at = end_at(rank)
        self._peers = [(peer, end_at(peer)) for peer in sorted(words) if peer != rank]
        self._row_at = row_at

    def withdrawn(self, mark: int) -> list[int]:
        """Return the peers that have given up the call with tag `mark`; a later one counts, too: they are through."""
        return [
            peer
            for peer, at in self._peers
            if self._words[peer][at + GAVE_UP] >= mark and self._words[peer][at + GATHERED] != mark
        ]

    def give_up(self, mark: int) -> None:
        """Say that this rank leaves the call; `look` follows."""
        self._words[self._rank][self._own_at + GAVE_UP] = mark
        fence()

    def has_gathered(self, mark: int) -> None:
        """Say that this rank goes on with the call."""
        self._words[self._rank][self._own_at + GATHERED] = mark

    def has_failed(self, mark: int) -> None:
        """Say that nobody has gathered the call, and nobody will."""
        self._words[self._rank][self._own_at + FAILED] = mark

    def is_gathered(self, mark: int) -> bool:
        """Return whether this rank has said that it goes on with the call."""
        return self._words[self._rank][self._own_at + GATHERED] == mark

    def look(self, parity: int, mark: int, dead: Collection[int] = (), absent: Collection[int] = ()) -> Look:
        """Return how a call ends that this rank has given up.

        Args:
            parity: of its number; `mark` is its tag.
            dead: peers that decide nothing more, as known before.
            absent: peers without a part in it.
        """
        undecided = []
        has_failed = False
        for peer, at in self._peers:
            if peer in absent:
                continue
            words = self._words[peer]
            failed, gave_up = words[at + FAILED], words[at + GAVE_UP]
            if words[at + GATHERED] == mark:
                return Look(End.GATHERED, (peer,))
            has_failed |= failed >= mark or gave_up > mark or words[self._row_at(parity, peer)] != mark
            if gave_up != mark and peer not in dead:
                undecided.append(peer)
        if has_failed or not undecided:
            return Look(End.FAILED, ())
        return Look(End.OPEN, tuple(undecided))
