"""The common end of a low-latency call that a rank aborts before it has seen all parts; words as in
`view/protocol/withdrawal.py`. "Row" here is a rank's part of a call, "inbox" the memory that it lends to an epoch.

The causes are a timeout and every other error that makes a caller leave the wait for the rows; after a call with two
different ends each of its calls would meet the next one of the others.

Each rank writes these words in its own inbox, each the tag of a call; the other members read them.

    ABORTED   its caller has left, or it has found that a peer's has; stored, then a fence, then a check of the others
    GATHERED  it has seen the rows of all and then, in a second check, no peer that aborted the call: it continues
    FAILED    it knows that no rank has gathered the call, and none will: also a rank that refuses the call

A fourth word, LOST, has a bit for each rank whose loss is the reason of the abort, and is stored before it: a rank that
finds the abort names these ranks as well, whether it has found their loss or has their rows. `LatencyBuffer` sets it.

Differences from a collective: a row is in all inboxes and is never removed (it is read in its writer's own inbox, where
it is stored first), so an abort must stay visible. A rank is one call ahead at most, because the row after the next one
is stored when all rows of the next have been seen: so GATHERED is still the call's tag when it matters, and a rank that
has aborted the next call and has not gathered this one knows that it failed. A rank makes its next call only after it
has stored one of the three words, so nothing is unreadable here, and a rank that knows that a call has failed publishes
that (of a collective only a refusal does).

If a call stays open the error says so, and the buffer does not continue before its end is known. A crash leaves the
words as they were; the next epoch has inboxes of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, MutableSequence

from ...memory.signals import fence
from ...view.protocol.withdrawal import Look, Stance, end_of

LINE_WORDS = 8  # of a rank in an inbox: one cache line
# offsets in the rank's own line of its inbox; the first two words are free
ABORTED, GATHERED, FAILED, LOST = 2, 3, 4, 5


class EndWords:
    """The words of all members, as read by one rank.

    Args:
        rank: this rank.
        words: of each member's inbox, this rank's included; read at each use, so that their owner can release them.
        line: index of a rank's line for the call, alike in all inboxes; it begins with the tag of the rank's row.

    Attributes:
        lost: bits of the ranks whose loss is this rank's reason to abort the call.
    """

    lost = 0

    def __init__(self, rank: int, words: Mapping[int, MutableSequence[int] | memoryview], line: int) -> None:
        self._rank = rank
        self._words = words
        self._line = line
        self._peers = [peer for peer in sorted(words) if peer != rank]

    @property
    def has_peers(self) -> bool:
        """Whether any other rank can have completed a call."""
        return bool(self._peers)

    def aborted_by(self, mark: int) -> list[int]:
        """Return the peers that have aborted the call with tag `mark`; a later one counts, too: this one is over for
        them.
        """
        at = self._line
        return [
            peer
            for peer in self._peers
            if self._words[peer][at + ABORTED] >= mark and self._words[peer][at + GATHERED] != mark
        ]

    def abort(self, mark: int) -> None:
        """Publish that this rank leaves the call; `poll` follows."""
        self._words[self._rank][self._line + LOST] = self.lost
        self._words[self._rank][self._line + ABORTED] = mark
        fence()

    def lost_by_peers(self, mark: int) -> list[int]:
        """Return the ranks for whose loss peers have aborted a call; this rank is none of them."""
        bits, at = 0, self._line
        for peer in self._peers:
            words = self._words[peer]
            bits |= words[at + LOST] if words[at + ABORTED] == mark else 0  # stored in the opposite order
        return [peer for peer in self._peers if bits >> peer & 1]

    def has_gathered(self, mark: int) -> None:
        """Publish that this rank continues the call."""
        self._words[self._rank][self._line + GATHERED] = mark

    def has_failed(self, mark: int) -> None:
        """Publish that no rank has gathered the call, and none will."""
        self._words[self._rank][self._line + FAILED] = mark

    def is_failed_by_peer(self, mark: int) -> bool:
        """Return whether a peer has published that the call has failed."""
        return any(self._words[peer][self._line + FAILED] >= mark for peer in self._peers)

    def is_gathered(self, mark: int) -> bool:
        """Return whether this rank has published that it continues the call."""
        return self._words[self._rank][self._line + GATHERED] == mark

    def poll(self, mark: int, dead: Collection[int] = ()) -> Look:
        """Return how a call ends that this rank has aborted.

        Args:
            mark: its tag.
            dead: peers that decide nothing more, as known before.
        """
        return end_of({peer: self._stance_of(peer, mark) for peer in self._peers}, dead)

    def _stance_of(self, peer: int, mark: int) -> Stance:
        """Return the state in a peer's words; each is loaded before those that were stored before it."""
        words, at = self._words[peer], self._line
        failed, aborted = words[at + FAILED], words[at + ABORTED]
        if words[at + GATHERED] == mark:
            return Stance.COMPLETES
        if failed >= mark or aborted > mark:
            return Stance.FAILED
        if words[at] != mark:
            return Stance.MISSING
        return Stance.GAVE_UP if aborted == mark else Stance.OPEN
