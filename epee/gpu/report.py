"""Conversion of a kernel's report (numbers in pinned cpu memory) to an exception with a readable message."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..errors import (
    AbortedError,
    CommTimeoutError,
    EpeeError,
    InvalidArgument,
    InvalidState,
    MismatchError,
    ProtocolError,
    RankFailedError,
    ResourceError,
    StaleHandleError,
    context,
)
from ..memory.signals import untag
from .params import NUM_REPORTS, OP_NAMES, REPORT_WORDS
from .payload import overflow
from .signature import describe_difference, is_of_losses

TIMEOUT, ABORTED, MISMATCH, REFUSED, OVERFLOW, BAD_COUNT, BAD_EXPERT, BAD_ROW, PEER_GAVE_UP, PEER_DEAD = range(1, 11)
# Reasons why a rank's call was refused; only the code is sent, the texts stay local.
REFUSED_INVALID_ARGUMENT = 1
OTHER_CALL = 2  # no refusal: that rank makes another kind of call
GAVE_UP = 3  # that rank has left the call without waiting for this one
REFUSED_BAD_HANDLE, REFUSED_BROKEN_GRID, REFUSED_OLD_HANDLE, REFUSED_HAUNTED = 4, 5, 6, 7
OTHER_BARRIER = 8  # no refusal: that rank makes a barrier
REFUSED_NO_ROOM = 9  # that rank's call needs a larger buffer
_ECHOES = ("aborted this call", "aborted the call")
_OTHER = {"dispatch": "combine", "combine": "dispatch"}
_REFUSALS = {
    REFUSED_INVALID_ARGUMENT: "an argument was invalid",
    REFUSED_BAD_HANDLE: "the dispatch whose handle it uses had failed there",
    REFUSED_OLD_HANDLE: "the handle that it uses is of an earlier view",
    REFUSED_HAUNTED: "its graph owns memory that a rank which was left out may still write",
    REFUSED_BROKEN_GRID: "the blocks of its counting kernel did not meet",
    BAD_EXPERT: "topk_idx holds a bad expert id",
}
_WAITS = {
    0: "its counts",
    1: "its rows",
    2: "more of its rows",
    3: "its expert output",
    4: "a copied row",
    5: "the end of its reading",
    6: "its arrival",
    7: "the other blocks of its counting kernel",
    8: "the other blocks of its kernel",
    9: "a load of this GPU",
}


class NoRoomError(MismatchError):
    """A rank's call needs a larger buffer. All ranks raise it in the same call and can create one together."""


NO_REPORTS = memoryview(bytes(8 * NUM_REPORTS)).cast("Q")  # the codes, every `REPORT_WORDS`th word, when all are read
Describe = Callable[["KernelReport", int], "EpeeError | None"]  # None: the report is one of those below
ReasonOf = Callable[[int, int], str]  # (rank, call) -> the reason why that rank refused it, "" if unknown


class KernelReport(NamedTuple):
    """A kernel's report of a failure, with the words in their order (`csrc/common/report.cuh`)."""

    code: int
    tag: int
    op: int
    peer: int
    expected: int
    got: int
    where: int


def take_oldest(words: memoryview) -> KernelReport | None:
    """Return the oldest unread report, and mark it as read; None when there is none."""
    pending = [i for i in range(len(words) // REPORT_WORDS) if words[i * REPORT_WORDS]]
    if not pending:
        return None
    at = min(pending, key=lambda i: words[i * REPORT_WORDS + 1]) * REPORT_WORDS
    report = KernelReport(*words[at : at + len(KernelReport._fields)])
    words[at] = 0
    return report


def take_report(
    words: memoryview, rank: int, reason_of: ReasonOf | None = None, describe: Describe | None = None
) -> EpeeError | None:
    """Return the oldest unread report as an exception and mark it as read; None when there is none.

    Args:
        words: pinned memory.
        rank: this rank.
        reason_of: returns the reasons that peers have sent for calls that they refused.
        describe: returns the errors of reports that only some kernels make, as of `rank`.
    """
    report = take_oldest(words)
    if report is None:
        return None
    if describe is not None and (error := describe(report, rank)) is not None:
        return error
    code, tag, op, peer, expected, got, where = report
    name, seq, src = OP_NAMES.get(op, f"op {op}"), untag(tag)[1], signed(peer)
    if code == REFUSED and got in (OTHER_CALL, OTHER_BARRIER):
        other = "barrier" if got == OTHER_BARRIER else _OTHER.get(name) or OP_NAMES.get(expected, "another call")
        calls = sorted([(rank, name), (src, other)])
        return MismatchError(
            f"{context(calls[0][1], seq=seq)}: ranks disagree about op: rank {calls[0][0]} has {calls[0][1]}, "
            f"rank {calls[1][0]} has {calls[1][1]}; all ranks must make the same calls in the same order"
        )
    if code == REFUSED and got == REFUSED_BAD_HANDLE and src == rank:
        return InvalidState(
            f"{context(name, rank=rank, seq=seq)}: the dispatch that made this handle has failed, so it "
            "cannot be used; dispatch again"
        )
    if code == REFUSED and got == REFUSED_OLD_HANDLE and src == rank:
        return StaleHandleError(
            f"{context(name, rank=rank, seq=seq)}: the handle is of an earlier epoch; dispatch again, and record "
            "again the graphs that use a handle made outside of them"
        )
    if code == REFUSED and got == REFUSED_HAUNTED and src == rank:
        return ResourceError(
            f"{context(name, rank=rank, seq=seq)}: this graph was recorded before a rank was left out, which "
            "lives and may still write into the graph's slot (record it again, or end that process), or was replayed "
            "before this rank had entered the view of a sync (make a call first)"
        )
    if code == PEER_DEAD:
        return RankFailedError(
            f"{context(name, rank=rank, peer=src, seq=seq)}: rank {src} is dead (its process ended) and had a part in "
            "this call; call buffer.sync() on all survivors, then the next call runs without it",
            [src],
            name,
            seq,
            cause="process ended",
        )
    if code == REFUSED and got == REFUSED_NO_ROOM:
        return NoRoomError(
            f"{context(name, seq=seq)}: rank {src} needs a larger buffer for its call, so no rank made it; make "
            "one for the largest call of any rank"
        )
    if code == REFUSED and reason_of is not None and (reason := reason_of(src, seq)):
        return MismatchError(f"{context(name, seq=seq)}: rank {src} refused its call, so no rank made it: {reason}")
    if code == REFUSED and got == GAVE_UP:
        checked = context(name, rank=rank, peer=src, seq=seq)
        return MismatchError(f"{checked}: rank {src} aborted this call after an error of its own; see its message")
    if code == MISMATCH and is_of_losses(where, expected, got):
        or_else = "" if name != "combine" else " (or they combine by handles of dispatches 32 calls apart)"
        return MismatchError(
            f"{context(name, rank=rank, peer=src, seq=seq)}: an earlier call has failed on one of rank {rank} and rank "
            f"{src} and ended well on the other{or_else}, so they may be at different calls; call buffer.sync() "
            "on all ranks and agree on the step to repeat"
        )
    if code == MISMATCH:
        ranks = sorted([(rank, expected), (src, got)])
        what, first, second = describe_difference(where, ranks[0][1], ranks[1][1])
        return MismatchError(
            f"{context(name, seq=seq)}: ranks disagree about {what}: rank {ranks[0][0]} has {first}, "
            f"rank {ranks[1][0]} has {second}; all ranks must make the same calls in the same order"
        )
    head = context(name, seq=seq) if code == OVERFLOW else context(name, rank=rank, peer=src, seq=seq)
    return described(code, head, src, (expected, signed(got), where))


def is_echo(error: EpeeError) -> bool:
    """Whether `error` only says that a peer has left the call: that peer may have detected a death first."""
    return any(words in str(error) for words in _ECHOES)


def blame(error: EpeeError, dead: Sequence[int], rank: int) -> RankFailedError:
    """Return the error to raise instead of an echo when the `dead` ranks are its cause."""
    names = ", ".join(str(peer) for peer in dead)
    return RankFailedError(
        f"{context('call', rank=rank, peer=dead[0])}: rank {names} is dead (its process ended), and others left the "
        f"call for it; call buffer.sync() on all survivors, then the next call runs without it ({error})",
        dead,
        cause="process ended",
    )


def signed(word: int) -> int:
    """Return a word as the signed number that a kernel has stored."""
    return word - (1 << 64) if word >> 63 else word


def described(code: int, head: str, peer: int, checked: tuple[int, int, int]) -> EpeeError:
    """Return the error of a report whose text begins with `head`; the last are its `expected`, `got` and `where`."""
    expected, got, where = checked
    if code == TIMEOUT:
        waited = _WAITS.get(where, f"wait {where}")
        seen = f"expected call {untag(expected)[1]}, got {untag(got)[1]}"
        return CommTimeoutError(
            f"{head}: rank {peer} was silent too long while waiting for {waited} ({seen}); the buffer can be used "
            "again where all ranks see this (else they get MismatchError until buffer.sync()): raise timeout= if the "
            "peer is only slow, or continue without it: buffer.sync() on all others",
            [peer],
        )
    if code == PEER_GAVE_UP:
        return CommTimeoutError(
            f"{head}: rank {peer} aborted the call while this rank was waiting for {_WAITS.get(where, where)}; raise "
            "timeout= there if this rank is only slow",
            [peer],
        )
    if code == ABORTED:
        return AbortedError(f"{head}: the call was aborted while waiting for rank {peer}")
    if code == REFUSED:
        reason = _REFUSALS.get(got, f"code {got}")
        return MismatchError(f"{head}: rank {peer} refused the call, {reason}; see the error there")
    if code == OVERFLOW:
        return InvalidArgument(f"{head}: {overflow(peer, got, 'expert' if where else 'rank', expected)}")
    if code == BAD_EXPERT:
        return InvalidArgument(
            f"{head}: topk_idx must hold expert ids below num_experts or -1 for none, "
            f"got {got} at token {expected}, k {where}"
        )
    what = "a count" if code == BAD_COUNT else "a row number"
    return ProtocolError(f"{head}: rank {peer} sent {what} that cannot be right: {got}, limit {expected}")


def given_up(where: str) -> str:
    """Return why no call follows one that has timed out here, before the ranks have synchronised in `sync`.

    Its kernels may have completed on other ranks, which cannot detect the timeout: later calls would be matched
    wrongly.
    """
    return (
        f"{where}: this call has timed out on this rank and may have ended well on others, so the ranks may stand "
        "before different calls; call buffer.sync() on all ranks and agree on the step to repeat"
    )
