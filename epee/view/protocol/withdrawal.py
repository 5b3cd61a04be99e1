"""How a call that a rank gives up ends alike on all: complete everywhere, or failed everywhere. No words, no clocks.

A rank that leaves a call for a time-out or any other error must not just leave: the rank that it waited for may come a
moment later, find everything in its place and return a result that the others never had. So it withdraws the call
first, for all to see (with a fence: before what it loads next), and looks then what the others have said of it. Who
finds a withdrawal in its wait withdraws, too. Who finds the part of every member looks once more for withdrawals; if
there is none it says that it completes the call, and only then makes use of it. What a peer says, after this rank has
withdrawn, means:

    COMPLETES   it had found all parts, and no withdrawal: its result cannot be taken back, and every part is made. This
                rank completes the call, too.
    MISSING     its part is not here, so nobody has found it yet; who finds it later finds this rank's withdrawal with
                it. Nobody completes the call by itself, so there is nobody to follow either.
    FAILED      it knows that nobody has a result, and that nobody will: it has found so itself, or it refuses the call.
    GAVE_UP     it completes the call only if it follows another that does. Where all have given it up there is none.
    OPEN        its part is here, and it may stand between its last look and its word: look again. Who is dead (known
                before the look: what it said before counts) said nothing, so it has no result, as one that gave up.
    UNREADABLE  it is through with the call, will say nothing more of it, and its words do not tell how it has ended.
                Where nobody else can tell, or still may, the call is lost.

COMPLETES and MISSING exclude each other, but COMPLETES and FAILED do not: a buffer's ranks that have found all rows
complete the exchange, and raise then alike where one of the rows refuses the call. Who follows them does as they do, so
COMPLETES comes first.

The two layouts of words say where each of these stands in memory, and why it is true: `engine/withdrawal.py`
(a part is taken back) and `ep/control/withdrawal.py` (it is not). What is left open: a rank that has stopped between
its last look and its word has not decided, and nobody can decide for it.

`tests/backend/test_withdrawal_model.py` and `tests/ep/test_row_withdrawal.py` run this rule in all orders of the loads
and stores of either layout; the simulator's lane obeys it while views change.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import Enum, auto
from typing import NamedTuple

# How long one that has withdrawn waits for those that may just be deciding, before its caller gets an error. With the
# naps of a wait that is well below the second that a time-out may be late.
GRACE_S = 0.5


class Stance(Enum):
    """What a peer's words say of a call that this rank has withdrawn."""

    MISSING = auto()
    OPEN = auto()
    COMPLETES = auto()
    GAVE_UP = auto()
    FAILED = auto()
    UNREADABLE = auto()


class End(Enum):
    """How a call ends, as far as one look tells; LOST: nobody can tell any more."""

    COMPLETES = auto()
    FAILED = auto()
    OPEN = auto()
    LOST = auto()


class Look(NamedTuple):
    """What a rank that has withdrawn a call sees; `ranks` complete it, have not decided, or are unreadable."""

    end: End
    ranks: tuple[int, ...] = ()


def end_of(stances: Mapping[int, Stance], dead: Collection[int] = ()) -> Look:
    """Return how a call ends that this rank has withdrawn, from what all peers with a part in it say."""

    def those(stance: Stance) -> tuple[int, ...]:
        """Return the ranks with a stance."""
        return tuple(rank for rank, found in stances.items() if found is stance)

    if completing := those(Stance.COMPLETES):
        return Look(End.COMPLETES, completing)
    if those(Stance.MISSING) or those(Stance.FAILED):
        return Look(End.FAILED)
    if undecided := tuple(rank for rank in those(Stance.OPEN) if rank not in dead):
        return Look(End.OPEN, undecided)
    if unreadable := those(Stance.UNREADABLE):
        return Look(End.LOST, unreadable)
    return Look(End.FAILED)


def gave_up(others: Collection[int]) -> list[str]:
    """Return what the error of a call that is given up says of ranks that gave it up before."""
    return [f"rank(s) {names_of(others)} gave the call up"] if others else []


def names_of(ranks: Collection[int]) -> str:
    """Return ranks as messages name them."""
    return ", ".join(map(str, ranks))
