"""The rule by which an aborted call ends alike on all ranks: complete everywhere, or failed everywhere.

Pure functions: no shared memory, no clocks.

A rank that leaves a call because of a timeout or any other error must not just leave: the rank that it waited for may
arrive a moment later, find all parts and return a result that the other ranks never had. The rank therefore publishes
an abort of the call first (with a fence: before its next loads), and then reads what the other ranks have published
about it. A rank that finds an abort during its wait aborts as well. A rank that finds the part of every member checks
once more for aborts; if there is none it publishes that it completes the call, and only then uses the result. After
this rank has aborted, the state of a peer means:

    COMPLETES   the peer found all parts and no abort: its result is final, and every part has been made. This rank
                completes the call, too.
    MISSING     the part of the peer is not here, so no rank has found it yet; a rank that finds it later finds this
                rank's abort with it. No rank completes the call by itself, so there is none to follow either.
    FAILED      the peer knows that no rank has a result, nor will have one: it has found so itself, or it refuses the
                call.
    GAVE_UP     the peer completes the call only if it follows another that does. Where all have aborted there is none.
    OPEN        the part of the peer is here, and the peer may be between its last check and its announcement: check
                again. A dead peer (known before the check: what it published before counts) announced nothing, so it
                has no result, like one that aborted.
    UNREADABLE  the peer has finished the call, will publish nothing more about it, and its words do not show how the
                call ended. Where no other rank can show it, now or later, the call is lost.

COMPLETES and MISSING exclude each other, but COMPLETES and FAILED do not: the ranks of a buffer that have found all
rows complete the exchange, and then raise alike where one of the rows refuses the call. A rank that follows them does
the same, so COMPLETES comes first.

The two layouts of words define the memory of each state, with the proof: `engine/withdrawal.py` (a part is retracted)
and `ep/latency/aborts.py` (it is not). One case stays open: a rank that has stopped between its last check and its
announcement has not decided, and no other rank can decide for it.

`tests/backend/test_withdrawal_model.py` runs this rule in all orders of the loads and stores of the first layout, and
`tests/ep/test_latency_failures.py` makes real calls of the second; the group of the simulator follows it while views
change.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import Enum, auto
from typing import NamedTuple

# Time for which a rank that has aborted waits for peers that may just be deciding, before its caller gets an error.
# With the sleeps of a wait it is well below the second by which a timeout may be late.
GRACE_S = 0.5


class Stance(Enum):
    """The state of a peer in a call that this rank has aborted, as its words show it."""

    MISSING = auto()
    OPEN = auto()
    COMPLETES = auto()
    GAVE_UP = auto()
    FAILED = auto()
    UNREADABLE = auto()


class End(Enum):
    """The end of a call as far as one check shows it; LOST: no rank can determine it any more."""

    COMPLETES = auto()
    FAILED = auto()
    OPEN = auto()
    LOST = auto()


class Look(NamedTuple):
    """The result of one check by a rank that has aborted a call; `ranks` complete it, have not decided, or are
    unreadable."""

    end: End
    ranks: tuple[int, ...] = ()


def end_of(stances: Mapping[int, Stance], dead: Collection[int] = ()) -> Look:
    """Return the end of a call that this rank has aborted, from the states of all peers with a part in it."""

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


def end_behind(stances: Mapping[int, Stance | None], dead: Collection[int], is_repeated: bool) -> Look:
    """Return the end of an aborted call where peers of other hosts answer one by one, each behind the abort.

    None stands for a peer that has not answered. Answers are of different times: between that of a peer whose part is
    MISSING and that of another host, the part can come there before the abort does. So a missing part fails the call
    only if it is missing in an answer to a question that was asked when the abort had arrived everywhere.

    Args:
        stances: of all peers.
        dead: ranks that publish nothing any more.
        is_repeated: whether the answers are of such a question.
    """
    look = end_of({rank: Stance.OPEN if found is None else found for rank, found in stances.items()}, dead)
    if look.end is not End.FAILED:
        return look
    doubtful = {None} if is_repeated else {None, Stance.MISSING}
    undecided = tuple(rank for rank, found in stances.items() if found in doubtful)
    return Look(End.OPEN, undecided) if undecided else look


def gave_up(others: Collection[int]) -> list[str]:
    """Return the part of an abort error that names the ranks that aborted the call before."""
    return [f"rank(s) {names_of(others)} aborted the call"] if others else []


def names_of(ranks: Collection[int]) -> str:
    """Return ranks in the form in which messages name them."""
    return ", ".join(map(str, ranks))
