"""Calls that ended here without a result: the record of them that later decisions and later calls need.

When a member dies, the calls of a group are divided by the first one to which it has not contributed completely
(`view/protocol/outcome.py`): every rank asks about its calls in order and must find the same one. A call that a rank
has aborted (`withdrawal.py`) or refused has ended there, while it may still be open at others, which ask about it. So
it is remembered until a later call has a result, and is

    asked about     before the calls that are open, whenever a decision has come. Its answer about the dead rank comes
                    from words that no longer change, so all ranks that ask find the same.
    waited for      a later call is completed only when every member has settled the earlier one: its contribution is
                    complete, or it has aborted the call, or it has ended it. So a result implies for all its members
                    that all calls before are settled, and a rank that asks about one of them after a death finds it
                    complete.

The words are those of `operation.py`, each rank's own; none is added. No rank waits for ever: one that has put a part
of the later call into its outbox has the earlier one before it, finds it aborted or refused when it gets there, and
ends it. The later call's timeout names a rank that stalls on the way.

A rank has ended a call before its cell is used again, so older calls than there are cells are settled by the one
that has the cell now, and NUM_CELLS of them are enough.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from ...errors import PeerError
from ...memory.signals import tag
from ...view.protocol.outcome import is_whole
from ..operation import Operation
from ..outbox import (
    FILLED,
    GAVE_UP,
    MERGED,
    NUM_CELLS,
    SIGNATURE,
    PeerRegions,
    consumed_of,
    count_of,
    failed_by_view,
)
from ..plan import RefusedPlan
from ..signature import REFUSED, unpack


class Past(NamedTuple):
    """A call that ended without a result, or an open one, with the words of its members that would settle it.

    Attributes:
        seq: its number; its words begin at `cell`.
        peer_regions: the outboxes with which it ran.
        rounds: how many it has; 0: not known here (refused, or ended before all headers had come).
        is_merged: its reduced shares are fetched as well.
        root: the rank that is its root, as far as it is known here; -1: none. Where that is lost, it ends for all.
    """

    seq: int
    cell: int
    peer_regions: PeerRegions
    rounds: int
    is_merged: bool
    root: int = -1

    def has_ended(self, words: memoryview) -> bool:
        """Return whether the rank of these words contributes nothing more: it has ended or aborted the call."""
        wanted = tag(self.peer_regions.epoch, self.seq)
        if consumed_of(words) >= self.seq or words[self.cell + GAVE_UP] in (wanted, failed_by_view(wanted)):
            return True
        return words[self.cell] == wanted and words[self.cell + SIGNATURE] & 63 == REFUSED

    def is_settled(self, words: memoryview) -> bool:
        """Return whether the rank has contributed all that the call needs of it, for sure, or never will."""
        return self.has_ended(words) or (self.rounds > 0 and self._is_whole(words))

    def counts_as_settled(self, words: memoryview) -> bool:
        """Return the same for a dead rank; where the rounds are not known, one of them is enough."""
        return self.has_ended(words) or self._is_whole(words)

    def _is_whole(self, words: memoryview) -> bool:
        has_counts = self.rounds > 1 or self.is_merged  # else the counters are not written
        filled = count_of(words[self.cell + FILLED]) if has_counts else 1
        merged = count_of(words[self.cell + MERGED]) if has_counts else 1
        wanted = tag(self.peer_regions.epoch, self.seq)
        return is_whole(words[self.cell], wanted, filled, merged, self.rounds, self.is_merged)

    def moved(self, peer_regions: PeerRegions) -> Past:
        """Return the call as it would run with other peer regions, for which it has not been planned here."""
        return (
            self
            if peer_regions is self.peer_regions
            else self._replace(peer_regions=peer_regions, rounds=0, is_merged=False)
        )


def past_of(op: Operation) -> Past:
    """Return the conditions to check in the words of the members of a call."""
    plan, is_refused = op.plan, isinstance(op.plan, RefusedPlan)
    is_known = op.rounds_known and not is_refused
    root = -1 if is_refused else unpack(plan.signature).root
    return Past(op.seq, op.cell, op.peer_regions, plan.rounds * is_known, is_known and plan.merge_bytes > 0, root)


class UnresolvedCalls:
    """The calls of one rank that ended without a result since the last one that has one, in order.

    Attributes:
        calls: what their members' words must show.
        loss: a loss that no call could report, because the call that it would fail had ended before; the next one does.
    """

    def __init__(self) -> None:
        self.calls: deque[Past] = deque(maxlen=NUM_CELLS)
        self.loss: PeerError | None = None

    def note(self, op: Operation) -> None:
        """Take note of a call that has just ended here; may run again after an interrupt."""
        if op.error is None:
            self.calls.clear()
        elif (op.told is not None or not op.by_view) and (not self.calls or self.calls[-1].seq < op.seq):
            self.calls.append(past_of(op))

    def keep(self, calls: Iterable[Past]) -> None:
        """Replace the record of these calls."""
        self.calls = deque(calls, NUM_CELLS)

    def note_loss(self, loss: PeerError) -> None:
        """Have the next call report a loss."""
        self.loss = loss

    def has_reported(self, epoch: int) -> None:
        """Note that an open call reports the losses with which an epoch begins."""
        if self.loss is not None and self.loss.epoch == epoch:
            self.loss = None

    def raise_loss(self) -> None:
        """Raise the loss that no call could report, once."""
        loss, self.loss = self.loss, None
        if loss is not None:
            raise loss

    def behind(self, peer_regions: PeerRegions, lost: Collection[int] = ()) -> list[int]:
        """Return the ranks of `peer_regions`, with which a later call runs, that have not settled all of these calls.

        Ranks in `lost` settle nothing any more: these calls have been asked about since, and need nothing of them.
        """
        return sorted({rank for past in self.calls for rank in _behind(past, peer_regions) if rank not in lost})


def _behind(past: Past, peer_regions: PeerRegions) -> Iterator[int]:
    for position in past.peer_regions.peers:
        rank, words = past.peer_regions.members[position], past.peer_regions.words[position]
        if (
            rank in peer_regions.members
            and peer_regions.words[peer_regions.members.index(rank)] is words
            and not past.is_settled(words)
        ):
            yield rank
