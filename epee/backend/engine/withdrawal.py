"""How a published collective call that a rank gives up ends alike on all: withdrawn everywhere, or complete everywhere.

A rank gives a call up when its time-out has passed, and when any other error takes its caller out of it: too few ranks
for a view, an exception from a signal handler, a shortage of memory or descriptors. It must not just leave: the rank
that it waited for may come a moment later, find every header in its place and return a result that the others never
had. So it takes its header back first, and looks then.

Who writes, who reads: each rank writes its own cell only. To withdraw a call a rank stores the call's tag in GAVE_UP,
then 0 where the tag was (with a fence: both are seen before what it loads next). To complete one it reads, after
everything has arrived, the tags of all ranks once more (`withdrawn`), stores COMPLETES in GAVE_UP, and only then writes
results. So one that completes has seen no withdrawal at a moment when nothing was missing, and one that withdraws knows
what the others can still do:

    someone's header is missing   nobody has completed the call, and nobody will: who finds that header later finds this
                                  rank's gone. The call fails here at once.
    nothing is missing any more   somebody may just be deciding. It waits until one of them completes the call (then it
                                  does so, too: its data is all there, for cells and staging are used again only when
                                  this rank is through) or all have given it up (then it has failed for all).

Who finds a withdrawal, in a wait or at that last look, withdraws too: whoever was called late, or timed out later, ends
with the others. A rank that was stopped learns it when it goes on. A refusal is not withdrawn: nobody can complete with
it, and its reason is for those who come late.

What is left open: a rank that has stopped between its last look and the store after it has not decided, and nobody can
decide for it. (Who is through with the call and whose words were damaged says nothing any more: then the call is lost,
and the error says so.) After GRACE_S the others' callers get their error, but the call stays open: the repetition of it
continues its number (`Engine.claim`), so nobody pairs it with another call. A rank in the midst of rounds that others
do not need (a gather's senders) is through with the call before another's time-out. A crash between two stores leaves a
rank that the next epoch has no more.

`tests/backend/test_withdrawal_model.py` runs through every interleaving of these loads and stores for three ranks.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ...errors import CommTimeoutError
from ..collectives.signature import REFUSED
from ..outbox import COMPLETES, GAVE_UP, SIGNATURE, Outboxes, consumed_of, failed_by_view, has_left
from ..wake import publish_word

if TYPE_CHECKING:
    from .operation import Operation

GRACE_S = 0.5  # or as long as the time-out; with the naps of a wait well below the second that that may be late


def withdrawn(op: Operation, box: Outboxes) -> list[int]:
    """Return the positions of the peers that have withdrawn the call."""
    return [peer for peer in box.peers if is_withdrawn(op, box.words[peer])]


def is_withdrawn(op: Operation, words: memoryview) -> bool:
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

    def __init__(self, op: Operation, box: Outboxes, silent: list[int], cause: BaseException | None = None) -> None:
        self.silent = silent
        self.cause = cause
        self.undecided: list[int] = []
        patience_s = op.deadline - op.started if op.deadline else GRACE_S
        self._grace_s = min(GRACE_S, patience_s)
        self._until = time.monotonic() + self._grace_s
        box.own[op.cell + GAVE_UP] = op.tag
        publish_word(box, op.cell, 0)

    def is_over(self, op: Operation, box: Outboxes) -> bool:
        """See how the call ends. True when it does so here: it has failed, or `op.completing` says that it must be."""
        undecided: list[int] = []
        unreadable: list[int] = []
        somebody_completes = False
        for peer in box.peers:
            state = _state_of(box.words[peer], op)
            if state == _MISSING:
                undecided, unreadable, somebody_completes = [], [], False
                break
            somebody_completes |= state == _COMPLETES
            if state == _UNREADABLE:
                unreadable.append(box.members[peer])
            if state == _OPEN and box.members[peer] not in op.lost:  # who is lost decides nothing any more
                undecided.append(box.members[peer])
        if somebody_completes:
            op.completing = True
            return True
        self.undecided = undecided
        if undecided or (unreadable and time.monotonic() < self._until):
            return False
        op.fail(self._lost(op, box, unreadable) if unreadable else self.cause or self._error(op, box))
        return True

    def _lost(self, op: Operation, box: Outboxes, unreadable: list[int]) -> CommTimeoutError:
        return CommTimeoutError(
            f"{op.describe(box)}: {self._told(op, box)}; the call is lost: rank(s) {_names(unreadable)} are through "
            "with it, and their words do not tell whether they completed it (is their memory damaged?); results are "
            "untouched; agree with them before you repeat it; the next call pairs by its number",
            unreadable,
        )

    def raise_if_open(self, op: Operation, box: Outboxes) -> None:
        """Raise `CommTimeoutError` when others could have decided by now and have not; the call stays open."""
        now = time.monotonic()
        if self.undecided and now > self._until:
            self._until = now + self._grace_s  # for the next wait
            elapsed = now - op.started if op.started else 0.0
            raise CommTimeoutError(
                f"{op.describe(box, elapsed=elapsed)}: {self._told(op, box)}; rank(s) {_names(self.undecided)} began "
                "it and may have completed it, so it is neither given up nor complete; results are untouched; repeat "
                "the call (wait again for an asynchronous one) to go on with it",
                self.undecided,
            )

    def _told(self, op: Operation, box: Outboxes) -> str:
        others = [box.members[peer] for peer in withdrawn(op, box)]
        told = [f"rank(s) {_names(self.silent)} silent"] if self.silent else []
        if others:
            told.append(f"rank(s) {_names(others)} gave the call up")
        return "; ".join(told) or "interrupted"

    def _error(self, op: Operation, box: Outboxes) -> CommTimeoutError:
        others = [box.members[peer] for peer in withdrawn(op, box)]
        elapsed = time.monotonic() - op.started if op.started else 0.0
        return CommTimeoutError(
            f"{op.describe(box, elapsed=elapsed)}: {self._told(op, box)}; the call is given up, on all ranks that "
            "began it; results are untouched; the group can be used: the next call pairs by its number",
            self.silent or others,
        )


_MISSING, _OPEN, _COMPLETES, _FAILED, _UNREADABLE = range(5)


def _state_of(words: memoryview, op: Operation) -> int:
    """Return what becomes of the call at a peer. Each word is loaded before those that were stored before it."""
    cell, tag = op.cell, op.tag
    is_through = consumed_of(words) >= op.seq
    header = words[cell]
    mark = words[cell + GAVE_UP]
    if mark == tag:
        return _FAILED
    if mark == failed_by_view(tag):
        return _OPEN  # here the news of that view are still to come: they decide
    if header < tag:
        return _MISSING  # also where the call has ended without a header
    if header == tag and mark == COMPLETES:
        return _COMPLETES
    if words[cell + SIGNATURE] & 63 == REFUSED:
        return _FAILED
    if has_left(words) or (is_through and header == tag):
        return _FAILED
    return _UNREADABLE if is_through else _OPEN  # what is through with the call will say nothing more of it


def _names(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
