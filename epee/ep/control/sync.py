"""The call `sync` of a buffer: what its caller gives and gets, whatever the membership is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...arrays import writing
from ..handle import mask_of
from ..hosts.member_sync import MembersOfEngine
from .messages import ControlPlaneOver, refused_alike


def sync(
    control: ControlPlaneOver[Any],
    members: MembersOfEngine,
    marks: Sequence[int],
    active_ranks: torch.Tensor | None,
    used: int,
    deadline: float,
) -> torch.Tensor:
    """Agree on the members, and enter the epoch; raises as `Buffer.sync`.

    Args:
        control: of the buffer.
        members: the buffer's membership, which changes in `sync`.
        marks: for each rank whether this one counts on it.
        active_ranks: `[num_ranks or more]` int32 that the agreed mask is written into; on any device.
        used: the last number that calls of this rank have used.
        deadline: `time.monotonic()` value.

    Returns:
        `[num_ranks]` int32 on the CPU, 1 = takes part.
    """
    num_ranks = control.config.num_ranks
    with refused_alike(control, deadline):
        counted = sum(1 << rank for rank, mark in enumerate(marks[:num_ranks]) if mark)
        agreed = members.sync(counted, used, deadline)
    mask = mask_of(agreed.ranks, num_ranks)
    if active_ranks is not None:
        with writing(active_ranks):
            active_ranks[:num_ranks] = mask.to(active_ranks.device)
    members.note_agreed()  # last: a rank interrupted before it gets the same result again
    return mask
