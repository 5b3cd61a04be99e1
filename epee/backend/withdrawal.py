"""How a collective call that has waited too long ends alike on all ranks: withdrawn everywhere, or complete everywhere.

A rank whose time-out has passed must not just leave: the rank that it waited for may come a moment later, find every
header in its place and return a result that the others never had. So it takes its header back first, and looks then.

Who writes, who reads: each rank writes its own cell only. To withdraw a call a rank stores the call's tag in GAVE_UP,
then 0 where the tag was (with a fence: both are seen before what it loads next). To complete one it reads, after
everything has arrived, the tags of all ranks once more (`withdrawn`), and only then writes results and says that it is
through (CONSUMED). So one that completes has seen no withdrawal at a moment when nothing was missing, and one that
withdraws knows what the others can still do:

    someone's header is missing   nobody has completed the call, and nobody will: who finds that header later finds this
                                  rank's gone. The call fails here at once.
    nothing is missing any more   somebody may just be completing it. It waits until each of them has completed the call
                                  (then it does so, too: its data is all there, for cells and staging are used again
                                  only when this rank is through) or has withdrawn it as well (then all have failed).

Who finds a withdrawal, in a wait or at that last look, withdraws too: whoever was called late, or timed out later, ends
with the others. A rank that was stopped learns it when it goes on.

What is left open: a rank that has stopped between its last look and CONSUMED, or in the midst of rounds that others do
not need (a gather's senders), has not decided; after GRACE_S the rest end without it, and say so. A crash between two
stores leaves a rank that the next epoch has no more.

`tests/backend/test_withdrawal_model.py` runs through every interleaving of these steps for three ranks.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ..errors import CommTimeoutError
from .outbox import GAVE_UP, Outboxes, consumed_of, has_left
from .wake import publish_word

if TYPE_CHECKING:
    from .operation import Operation

GRACE_S = 0.5  # or as long as the time-out; with the naps of a wait well below the second that that may be late


def withdrawn(op: Operation, box: Outboxes) -> list[int]:
    """Return the positions of the peers that have withdrawn the call."""
    cell, tag = op.cell, op.tag
    return [p for p in box.peers if box.words[p][cell] != tag and box.words[p][cell + GAVE_UP] == tag]


class Withdrawal:
    """A call that this rank has withdrawn, until it is known how it ends.

    Attributes:
        silent: the ranks that it waited for.
    """

    def __init__(self, op: Operation, box: Outboxes, silent: list[int]) -> None:
        self.silent = silent
        patience_s = op.deadline - op.started if op.deadline else GRACE_S
        self._until = time.monotonic() + min(GRACE_S, patience_s)
        box.own[op.cell + GAVE_UP] = op.tag
        publish_word(box, op.cell, 0)

    def is_over(self, op: Operation, box: Outboxes) -> bool:
        """See how the call ends. True when it does so here: it has failed, or `op.completing` says that it must be."""
        cell, tag = op.cell, op.tag
        undecided: list[int] = []
        for peer in box.peers:
            words = box.words[peer]
            is_through = consumed_of(words) >= op.seq
            if words[cell + GAVE_UP] == tag:
                continue
            if words[cell] < tag:  # missing: also where the call has ended without a header
                undecided = []
                break
            if is_through and words[cell] == tag:
                op.completing = True
                return True
            if not has_left(words):
                undecided.append(box.members[peer])
        if undecided and time.monotonic() < self._until:
            return False
        op.fail(self._error(op, box, undecided))
        return True

    def _error(self, op: Operation, box: Outboxes, undecided: list[int]) -> CommTimeoutError:
        others = [box.members[peer] for peer in withdrawn(op, box)]
        told = f"rank(s) {_names(self.silent)} silent" if self.silent else "called too late"
        if others:
            told += f"; rank(s) {_names(others)} gave the call up"
        if undecided:
            told += f"; rank(s) {_names(undecided)} began it and may have completed it"
        elapsed = time.monotonic() - op.started if op.started else 0.0
        return CommTimeoutError(
            f"{op.describe(box, elapsed=elapsed)}: {told}; it is given up on all ranks, results are untouched; the "
            "group can be used: the next call pairs by its number",
            self.silent or others,
        )


def _names(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
