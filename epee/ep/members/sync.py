"""The call `sync` of a buffer: what its caller gives and gets, whatever the membership is."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence

import torch

from ...arrays import writing
from ...errors import EpeeError, MismatchError, expected
from ..handle import mask_of
from .header import OP_SYNC, Moved
from .member_sync import MembersOfEngine
from .rows import RowExchange

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def _refused_alike(exchange: RowExchange, deadline: float) -> Iterator[None]:
    """Notify the peers of a `MismatchError` in the body: they are in another call, and get it there."""
    try:
        yield
    except expected(MismatchError) as error:
        try:
            exchange.refuse(OP_SYNC, error, deadline)
        except expected(EpeeError, Moved) as problem:
            _log.warning("could not tell the peers about a refused sync: %s", problem)
        raise


def sync(
    exchange: RowExchange,
    members: MembersOfEngine,
    marks: Sequence[int],
    active_ranks: torch.Tensor | None,
    used: int,
    deadline: float,
) -> torch.Tensor:
    """Agree on the members, and enter the epoch; raises as `Buffer.sync`.

    Args:
        exchange: of the buffer's rows.
        members: the buffer's membership, which changes in `sync`.
        marks: for each rank whether this one counts on it.
        active_ranks: `[num_ranks or more]` int32 that the agreed mask is written into; on any device.
        used: the last number that calls of this rank have used.
        deadline: `time.monotonic()` value.

    Returns:
        `[num_ranks]` int32 on the CPU, 1 = takes part.
    """
    num_ranks = exchange.config.num_ranks
    with _refused_alike(exchange, deadline):
        counted = sum(1 << rank for rank, mark in enumerate(marks[:num_ranks]) if mark)
        agreed = members.sync(counted, used, deadline)
    mask = mask_of(agreed.ranks, num_ranks)
    if active_ranks is not None:
        with writing(active_ranks):
            active_ranks[:num_ranks] = mask.to(active_ranks.device)
    members.note_agreed()  # last: a rank interrupted before it gets the same result again
    return mask
