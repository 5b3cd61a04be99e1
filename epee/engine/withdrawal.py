"""How a published collective call that a rank gives up ends alike on all: the words of `view/protocol/withdrawal.py`.

A rank gives a call up when its time-out has passed, and when any other error takes its caller out of it: too few ranks
for a view, an exception from a signal handler, a shortage of memory or descriptors.

Who writes, who reads: each rank writes its own cell only. To withdraw a call a rank stores the call's tag in GAVE_UP,
then 0 where the tag was (with a fence: both are seen before what it loads next): its part is taken back. To complete
one it reads, after everything has arrived, the tags of all ranks once more (`withdrawn`), stores COMPLETES in GAVE_UP,
and only then writes results. Cells and staging are used again only when this rank is through with the call, so its data
is there for as long as it may have to complete it.

A rank that was stopped learns of a withdrawal when it goes on. A refusal is not withdrawn: nobody can complete with it,
and its reason is for those who come late. After GRACE_S, or the time-out where that is shorter, the caller of a call
that is still open gets its error; the repetition of the call continues its number (`Engine.claim`), so nobody pairs it
with another. Who is through with the call and whose words were damaged says nothing any more: then the call is lost.

A rank in the midst of rounds that others do not need (a gather's senders) is through with the call before another's
time-out. A crash between two stores leaves a rank that the next epoch has no more.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import Protocol

from ..errors import CommTimeoutError
from ..view.protocol.withdrawal import GRACE_S, End, Look, Stance, end_of, gave_up, names_of
from .outbox import (
    COMPLETES,
    CONSUMED,
    CONSUMED_TOO,
    GAVE_UP,
    LIFE,
    SIGNATURE,
    Outboxes,
    consumed_of,
    failed_by_view,
    has_left,
)
from .signature import REFUSED
from .wake import publish_word

_MEANING = {
    End.FAILED: "the call is given up, on all ranks that began it; results are untouched; the group can be used: the "
    "next call pairs by its number",
    End.OPEN: "rank(s) {} began it and may have completed it, so it is neither given up nor complete; results are "
    "untouched; repeat the call (wait again for an asynchronous one) to go on with it",
    End.LOST: "the call is lost: rank(s) {} are through with it, and their words do not tell whether they completed it "
    "(is their memory damaged?); results are untouched; agree with them before you repeat it; the next call pairs by "
    "its number",
}


class Withdrawable(Protocol):
    """What is asked here of a collective call."""

    seq: int
    tag: int
    cell: int
    started: float
    deadline: float
    completing: bool
    lost: Collection[int]

    @property
    def name(self) -> str:
        """The collective's name."""

    def fail(self, error: BaseException) -> None:
        """End it with `error`."""

    def describe(self, box: Outboxes, **facts: object) -> str:
        """Name the call and its place for a message."""


def withdrawn(op: Withdrawable, box: Outboxes) -> list[int]:
    """Return the positions of the peers that have withdrawn the call."""
    return [peer for peer in box.peers if is_withdrawn(op, box.words[peer])]


def is_withdrawn(op: Withdrawable, words: memoryview) -> bool:
    """Return whether the rank of these words has withdrawn the call.

    The header is loaded twice: between the first load and that of GAVE_UP the rank may have begun the call and found an
    error that all find, which leaves the header in its place for them and sets GAVE_UP as well.
    """
    cell, tag = op.cell, op.tag
    return words[cell] != tag and words[cell + GAVE_UP] == tag and words[cell] != tag


class Withdrawal:
    """A call that this rank has withdrawn, until it is known how it ends.

    Attributes:
        silent: the ranks that it waited for; none where another rank had given the call up.
        cause: what this rank's caller is told instead of a time-out, if the call fails.
        undecided: the ranks that may still complete the call, as far as the last look tells.
    """

    def __init__(self, op: Withdrawable, box: Outboxes, silent: list[int], cause: BaseException | None = None) -> None:
        self.silent = silent
        self.cause = cause
        self.undecided: list[int] = []
        patience_s = op.deadline - op.started if op.deadline else GRACE_S
        self._grace_s = min(GRACE_S, patience_s)
        self._until = time.monotonic() + self._grace_s
        box.own[op.cell + GAVE_UP] = op.tag
        if box.exports is not None:
            box.exports.word(op.cell + GAVE_UP, op.tag)
        publish_word(box, op.cell, 0)

    def is_over(self, op: Withdrawable, box: Outboxes) -> bool:
        """See how the call ends. True when it does so here: it has failed, or `op.completing` says that it must be."""
        look = end_of({box.members[peer]: _stance_at(box, peer, op) for peer in box.peers}, op.lost)
        if look.end is End.FAILED and box.exports is not None:
            # a part that is missing here may yet complete the call where this withdrawal has not arrived
            unheard = [peer for peer in box.peers if _words_behind(box, peer, op) is None]
            look = Look(End.OPEN, tuple(unheard)) if unheard else look
        if look.end is End.COMPLETES:
            op.completing = True
            return True
        self.undecided = list(look.ranks) if look.end is End.OPEN else []
        if self.undecided or (look.end is End.LOST and time.monotonic() < self._until):
            return False
        op.fail(self.cause if self.cause and look.end is End.FAILED else self._error(op, box, look))
        return True

    def raise_if_open(self, op: Withdrawable, box: Outboxes) -> None:
        """Raise `CommTimeoutError` when others could have decided by now and have not; the call stays open."""
        now = time.monotonic()
        if self.undecided and now > self._until:
            self._until = now + self._grace_s  # for the next wait
            raise self._error(op, box, Look(End.OPEN, tuple(self.undecided)))

    def _error(self, op: Withdrawable, box: Outboxes, look: Look) -> CommTimeoutError:
        others = [box.members[peer] for peer in withdrawn(op, box)]
        told = [f"rank(s) {names_of(self.silent)} silent"] if self.silent else []
        told = told + gave_up(others) or ["interrupted"]
        told.append(_MEANING[look.end].format(names_of(look.ranks)))
        where = op.describe(box, elapsed=time.monotonic() - op.started if op.started else 0.0)
        return CommTimeoutError(f"{where}: {'; '.join(told)}", look.ranks or self.silent or others, has_job=True)


def _stance_at(box: Outboxes, peer: int, op: Withdrawable) -> Stance:
    """Return what becomes of the call at a peer, behind this rank's withdrawal; OPEN where that is not known yet."""
    words = _words_behind(box, peer, op)
    return Stance.OPEN if words is None else _stance_of(words, op)


def _words_behind(box: Outboxes, peer: int, op: Withdrawable) -> Mapping[int, int] | memoryview | None:
    """Return words of a peer as they are where this rank's withdrawal has arrived; None: nobody has said so yet.

    A mirror of one on another host is enough where it says what stays true: that it has given the call up, or has left
    (it has told before how its calls had ended, `Exports.tell_ends`). Else the host is asked (`hosts/looks.py`).
    """
    exports, words, rank = box.exports, box.words[peer], box.members[peer]
    if exports is None or exports.topology.is_here(rank) or words[op.cell + GAVE_UP] == op.tag or has_left(words):
        return words
    if rank in op.lost:  # all that there is of it has been told
        return words
    indices = (CONSUMED, CONSUMED_TOO, LIFE, op.cell, op.cell + GAVE_UP, op.cell + SIGNATURE)
    found: Mapping[int, int] | None = exports.looks.at(rank, indices, (op.name, op.tag))
    return found


def _stance_of(words: Mapping[int, int] | memoryview, op: Withdrawable) -> Stance:
    """Return what becomes of the call at a peer. Each word is loaded before those that were stored before it.

    A part that was taken back is told from one that never came by GAVE_UP. Who ended the call with another error, or
    has left the group, completes it no more. What fits nothing else is damaged or of a later call (this rank was voted
    out), so once the peer is through it is unreadable; before that news of a view that it has moved to may be to come.
    """
    cell, tag = op.cell, op.tag
    is_through = consumed_of(words) >= op.seq
    header = words[cell]
    mark = words[cell + GAVE_UP]
    if mark == tag:
        return Stance.GAVE_UP
    if mark == failed_by_view(tag):
        return Stance.OPEN  # here the news of that view are still to come: they decide
    if header < tag:
        return Stance.MISSING  # also where the call has ended without a header
    if header == tag and mark == COMPLETES:
        return Stance.COMPLETES
    if header == tag and words[cell + SIGNATURE] & 63 == REFUSED:
        return Stance.FAILED
    if has_left(words) or (is_through and header == tag):
        return Stance.GAVE_UP
    return Stance.UNREADABLE if is_through else Stance.OPEN
