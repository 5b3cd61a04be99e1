"""How a call that a rank gives up before it has seen all rows ends alike on all: `view/protocol/withdrawal.py`'s words.

The errors are a time-out and whatever else takes a caller out of the wait for the rows; after a call with two ends each
of its calls would meet the next one of the others.

Who writes, who reads: each rank has three words in its own inbox, each the tag of a call; the other members read them.

    GAVE_UP   its caller has left, or it has found that a peer's has; stored, then a fence, then a look at the others
    GATHERED  it has seen the rows of all and then, in a second look, no peer that gave the call up: it goes on
    FAILED    it knows that nobody has gathered the call, and nobody will: also one that refuses it

What differs from a collective: a row lies in all inboxes and is never taken back (it is looked for in its writer's own
inbox, where it is stored first), so a withdrawal must stay to be seen. A rank is one call ahead at most, for the row
after the next one is stored when all have been seen of the next: so GATHERED is still the call's tag when it matters,
and who has given up the next call and has not gathered this one knows that it failed. A rank comes to its next call
behind one of the three words only, so nothing is unreadable here, and one that knows that a call has failed says so
(of a collective only a refusal does).

Who has no part in the call any more (a view has put it out of it, while those who stay go on) is not looked at. So that
nobody takes its missing row for the end of a call that the others go on with, a rank finds a call failed only while no
agreement is under way of which it has not heard the end: what it gave up before that, the others see behind it.

Where a call stays open the error says so, and the buffer does not go on before its end is known. A crash leaves the
words as they were; the next epoch has inboxes of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, MutableSequence

from ...memory.signals import fence
from ...view.protocol.withdrawal import Look, Stance, end_of

LINE_WORDS = 8  # of a rank in an inbox: one cache line
GAVE_UP, GATHERED, FAILED = 2, 3, 4  # offsets in the rank's own line of its inbox, behind the two of a source


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

    @property
    def has_peers(self) -> bool:
        """Whether anybody else can have completed a call."""
        return bool(self._peers)

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

    def is_failed_by_peer(self, mark: int) -> bool:
        """Return whether a peer has said that the call has failed."""
        return any(self._words[peer][at + FAILED] >= mark for peer, at in self._peers)

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
        parties = [(peer, at) for peer, at in self._peers if peer not in absent]
        return end_of({peer: self._stance_of(peer, at, parity, mark) for peer, at in parties}, dead)

    def _stance_of(self, peer: int, at: int, parity: int, mark: int) -> Stance:
        """Return what a peer's words say; each is loaded before those that were stored before it."""
        words = self._words[peer]
        failed, gave_up = words[at + FAILED], words[at + GAVE_UP]
        if words[at + GATHERED] == mark:
            return Stance.COMPLETES
        if failed >= mark or gave_up > mark:
            return Stance.FAILED
        if words[self._row_at(parity, peer)] != mark:
            return Stance.MISSING
        return Stance.GAVE_UP if gave_up == mark else Stance.OPEN
