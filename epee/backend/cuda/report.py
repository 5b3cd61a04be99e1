"""Conversion of the collective kernels' reports (numbers in pinned cpu memory) to exceptions with readable messages."""

from __future__ import annotations

from ...errors import (
    AbortedError,
    CommTimeoutError,
    EpeeError,
    MismatchError,
    ProtocolError,
    RankFailedError,
    context,
)
from ...gpu.report import ABORTED, BAD_ROW, MISMATCH, PEER_DEAD, PEER_GAVE_UP, TIMEOUT, KernelReport
from .params import OPS

_WAITS = {
    1: "its last call",
    2: "packets",
    3: "a chunk",
    4: "a credit",
    5: "its call",
    6: "its call",
    7: "its own blocks",
    8: "its own copies",
}
_LOST = "the output is lost"


def name_of(report: KernelReport) -> str:
    """Return the operation that a report is about."""
    return OPS[report.op - 1] if 1 <= report.op <= len(OPS) else f"op {report.op}"


def may_be_of_dead(report: KernelReport) -> bool:
    """Whether a death that no kernel was notified of may be the cause of a report."""
    return report.code in (TIMEOUT, PEER_GAVE_UP)


def error_of(report: KernelReport, rank: int, fate: str = _LOST) -> EpeeError:
    """Return a report as an exception, which also states the fate of the output."""
    code, tag, _, peer, _, _, where = report
    head = context(name_of(report), rank=rank, peer=peer, seq=tag)
    what = f"{_WAITS.get(where, f'wait {where}')} of rank {peer}"
    if code == TIMEOUT:
        return CommTimeoutError(f"{head}: no sign of {what} within the time-out; {fate}", [peer])
    if code == PEER_DEAD:
        return failed(report, rank, peer, fate)
    if code == PEER_GAVE_UP:
        return CommTimeoutError(
            f"{head}: rank {peer} has lost this call or an earlier one, so the ranks may stand before different steps; "
            f"{fate}; agree on the step to be made again",
            [peer],
        )
    if code == MISMATCH:
        return MismatchError(
            f"{head}: ranks disagree: rank {peer} makes another call, or one on other sizes, another dtype, reduction "
            f"or root; all ranks must make the same calls in the same order; {fate}"
        )
    if code == BAD_ROW:
        return ProtocolError(
            f"{head}: rank {peer} says that its rows lie where they would be outside of its pool; they were not "
            "read; this is a fault of epee's, or of who has written into its memory"
        )
    if code == ABORTED:
        return AbortedError(f"{head}: the call was aborted, waiting for {what}")
    return ProtocolError(f"{head}: the kernel reports code {code} about {what}")


def failed(report: KernelReport, rank: int, peer: int, fate: str = _LOST) -> RankFailedError:
    """Return the error of a call that rank `peer` has died in."""
    head = context(name_of(report), rank=rank, peer=peer, seq=report.tag)
    return RankFailedError(
        f"{head}: rank {peer} is dead (its process ended) and had a part in this call; {fate}; the next call on CUDA "
        "tensors runs without it",
        [peer],
        name_of(report),
        report.tag,
        cause="process ended",
    )
