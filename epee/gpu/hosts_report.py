"""The errors of reports that only kernels between hosts make, or for which there is another remedy: no `sync` here."""

from __future__ import annotations

from ..errors import (
    AbortedError,
    CommTimeoutError,
    EpeeError,
    InvalidState,
    MismatchError,
    PeerError,
    RankFailedError,
    context,
)
from ..link.proxy.words import REASONS
from ..memory.signals import untag
from .hosts import BROKEN_STREAMS_CODE
from .params import OP_NAMES
from .report import (
    ABORTED,
    GAVE_UP,
    MISMATCH,
    PEER_DEAD,
    PEER_GAVE_UP,
    REFUSED,
    REFUSED_INVALID_ARGUMENT,
    TIMEOUT,
    KernelReport,
    signed,
)
from .signature import WHERE_FACTS, describe_difference

REMEDY = "close this buffer on all ranks and make a new one, in a group of the ranks that are left"
PROXY_ENDED, CONNECTION_LOST = 38, 39  # places of reports
_WAITS = {
    9: "a load of this GPU",
    32: "a free slot for its counts",
    33: "its counts",
    35: "a free slot for its rows",
    36: "the end of its part",
    37: "the other warps of its kernel",
    40: "its rows",
    41: "its sums",
    42: "its expert output",
}
_DIFFERENCES = {
    3: "the handle of a dispatch that is made again (0: none)",
    34: "a chunk of rows",
    46: "the dispatch whose handle a combine uses",
}


def describe(report: KernelReport, rank: int) -> EpeeError | None:
    """Return the error of a report, as of this rank; None: as on one host."""
    code, tag, op, peer, wanted, got, where = report
    name, seq, src = OP_NAMES.get(op, f"op {op}"), untag(tag)[1], signed(peer)
    head = context(name, rank=rank, peer=src, seq=seq)
    if code == TIMEOUT:
        waited = _WAITS.get(where, f"wait {where}")
        return CommTimeoutError(
            f"{head}: rank {src} was silent too long while waiting for {waited}; rows may have moved, so this buffer "
            f"serves no further call: {REMEDY}, with a larger timeout= if the peer is only slow",
            [src],
        )
    if code == ABORTED and where == PROXY_ENDED:
        reason = REASONS[min(got, len(REASONS) - 1)]
        return PeerError(
            f"{head}: the proxy of rank {src}, by which its host reaches others, has ended ({reason}); {REMEDY}",
            [src],
            name,
            seq,
            cause="proxy ended",
        )
    if code == ABORTED:
        return AbortedError(f"{head}: the call was aborted while waiting for rank {src}")
    if code == PEER_DEAD:
        if where == CONNECTION_LOST:
            what = f"rank {src}, on another host, is lost: its process, its proxy or the network has ended; {REMEDY}"
            return PeerError(f"{head}: {what}", [src], name, seq, cause="connection lost")
        return RankFailedError(
            f"{head}: rank {src} is dead (its process ended) and had a part in this call; {REMEDY}",
            [src],
            name,
            seq,
            cause="process ended",
        )
    if code == PEER_GAVE_UP:
        return CommTimeoutError(
            f"{head}: rank {src} aborted the call; see its message. This buffer serves no further call: {REMEDY}", [src]
        )
    if code == REFUSED and got == BROKEN_STREAMS_CODE:
        return InvalidState(
            f"{head}: an earlier call of rank {src} has failed after rows had moved, so this buffer serves no further "
            f"call; {REMEDY}"
        )
    if code == REFUSED and got == GAVE_UP:
        return MismatchError(f"{head}: rank {src} aborted this call after an error of its own; see its message")
    if code == REFUSED and got == REFUSED_INVALID_ARGUMENT and src != rank:
        what = f"rank {src} refused its call, so no rank made it: an argument was invalid; see the error there"
        after = "" if where == 0 else f"; this buffer serves no further call: {REMEDY}"
        return MismatchError(f"{context(name, seq=seq)}: {what}{after}")
    if code == MISMATCH:
        ranks = sorted([(rank, wanted), (src, got)])
        if where in _DIFFERENCES:
            what, first, second = _DIFFERENCES[where], *(f"{value:#x}" for _, value in ranks)
        else:
            what, first, second = describe_difference(WHERE_FACTS, ranks[0][1], ranks[1][1])
        return MismatchError(
            f"{context(name, seq=seq)}: ranks disagree about {what}: rank {ranks[0][0]} has {first}, rank "
            f"{ranks[1][0]} has {second}; all ranks must make the same calls in the same order"
        )
    return None
