"""The call `sync` of a buffer: what its caller gives and gets, whatever the membership is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from ...arrays import writing
from ..handle import mask_of
from .membership import Agreed
from .messages import ControlPlaneOver, refused_alike


class Synced(Protocol):
    """A membership that changes in `sync`, as `Membership`."""

    def sync(self, counted: int, used: int, deadline: float) -> Agreed:
        """Agree with the others on the members, and enter the epoch."""

    def note_agreed(self, agreed: Agreed) -> None:
        """Record that the caller of `sync` has its result."""


def sync(
    control: ControlPlaneOver[Any],
    members: Synced,
    marks: Sequence[int],
    active_ranks: torch.Tensor | None,
    used: int,
    deadline: float,
) -> torch.Tensor:
    """Agree on the members, and enter the epoch; raises as `Buffer.sync`.

    Args:
        control: of the buffer.
        members: the buffer's membership.
        marks: for each rank whether this one counts on it.
        active_ranks: `[num_ranks or more]` int32 that the agreed mask is written into; on any device.
        used: the last number that calls of this rank have used.
        deadline: `time.monotonic()` value.

    Returns:
        `[num_ranks]` int32 on the CPU, 1 = takes part.
    """
    num_ranks = control.config.num_ranks
    with refused_alike(control, deadline):
        agreed = members.sync(counted_of(marks, num_ranks), used, deadline)
    return return_agreed(members, agreed, active_ranks, num_ranks)


def counted_of(marks: Sequence[int], num_ranks: int) -> int:
    """Return the bits of the ranks that a mask counts on."""
    return sum(1 << rank for rank, mark in enumerate(marks[:num_ranks]) if mark)


def return_agreed(members: Synced, agreed: Agreed, active_ranks: torch.Tensor | None, num_ranks: int) -> torch.Tensor:
    """Write the members into the caller's mask, and return them: `[num_ranks]` int32 on the CPU."""
    mask = mask_of(agreed.ranks, num_ranks)
    if active_ranks is not None:
        with writing(active_ranks):
            active_ranks[:num_ranks] = mask.to(active_ranks.device)
    members.note_agreed(agreed)  # last: a rank interrupted before it gets the same result again
    return mask
