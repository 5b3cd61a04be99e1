"""The errors of a buffer's calls that lose a rank, or wait for one too long."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..errors import CommTimeoutError, PeerError, RankFailedError, context
from ..view.awaited import kind_of_loss


class Loss(NamedTuple):
    """A lost rank: the epoch that began without it, and the cause."""

    rank: int
    epoch: int
    cause: str


def failure(losses: list[Loss], op: str, rank: int, seq: int, epoch: int, elapsed: float) -> PeerError:
    """Return the error that reports `losses`: `RankFailedError`, or `PeerError` if all have left in order."""
    ranks = sorted({loss.rank for loss in losses})
    kind, cause = kind_of_loss(loss.cause for loss in losses)
    names = ", ".join(map(str, ranks))
    where = context(op, rank=rank, peer=names, seq=seq, epoch=epoch, elapsed=elapsed)
    return kind(
        f"{where}: rank {names}: {cause}; results are untouched, handles of earlier calls are stale; the next "
        f"call runs in epoch {epoch} without them",
        ranks,
        op,
        seq,
        epoch,
        cause,
    )


def silent(told: str, rank: int) -> CommTimeoutError:
    """Return the error of a wait for a rank that has become too long."""
    return CommTimeoutError(
        f"{told}; others may have completed this call, so do not repeat the step; raise timeout= if the peer is "
        "only slow",
        [rank],
    )


def death(where: str, dead: Sequence[int], op: str, seq: int, epoch: int, remedy: str) -> RankFailedError:
    """Return the error of call `seq` at `where`, for which ranks of the epoch are dead."""
    names = ", ".join(str(rank) for rank in dead)
    text = f"{where}: rank {names} is dead (its process ended); {remedy}"
    return RankFailedError(text, tuple(dead), op, seq, epoch, "process ended")
