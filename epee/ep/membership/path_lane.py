"""The membership of a path: members, agreed on at `sync`; or this rank alone, for the only rank of a group.

Called on the thread of a call, or of the constructor. No state is stored here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch

from ...arrays import writing
from ...errors import AbortedError, MismatchError, PeerError, RankFailedError, expected
from ...memory.shared import SharedRegion
from ..control.membership import Agreed, Membership
from ..control.messages import ControlPlane, refused_alike
from ..handle import mask_of
from .memory import Memory
from .synced import SyncedLane


class LoneLane:
    """The membership of a rank without others: one epoch, which no rank enters, leaves or shares. As `SyncedLane`."""

    is_in = True
    takes_replacements = False

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.memory = Memory()
        self.regions: Mapping[int, SharedRegion] = {}
        self.processes: Mapping[int, tuple[int, int]] = {}

    def join(self, deadline: float) -> None:
        """Do nothing: it has entered."""

    def leave(self) -> None:
        """Do nothing: there is no other rank."""

    def lends(self, rank: int) -> bool:
        """Return True: there is no other rank."""
        return True

    def death_in_birth(self) -> PeerError | None:
        """Return None: no other rank makes the buffer."""
        return None

    def dead(self) -> Collection[int]:
        """Return no rank."""
        return ()

    def gone(self) -> Collection[int]:
        """Return no rank."""
        return ()

    def why_gone(self, rank: int) -> tuple[type[PeerError], str]:
        """Return a placeholder; never used."""
        return PeerError, "there is no such rank"

    def show(self, op: str, seq: int, ranks: list[int]) -> None:
        """Do nothing: it waits for no rank."""

    def hide(self) -> None:
        """Do nothing."""

    def is_calm(self) -> bool:
        """Return True: nothing changes."""
        return True

    def state(self) -> object:
        """Return None: nothing changes."""

    def note_calm(self, state: object) -> None:
        """Do nothing."""

    def require_place(self, is_masked: bool) -> None:
        """Do nothing: it is a member."""

    def require_members(self, op: str, seq: int) -> None:
        """Do nothing: all ranks are members."""

    require_all = require_members

    def sync(self, counted: int, used: int, deadline: float) -> Agreed:
        """Return this rank, in the only epoch."""
        return Agreed(0, (self._rank,))

    def note_agreed(self, agreed: Agreed) -> None:
        """Do nothing."""


PathLane = SyncedLane | LoneLane


def lane_of(control: ControlPlane) -> PathLane:
    """Return the membership of a buffer whose epochs begin with `sync`."""
    membership = control.exchange.membership
    return membership if isinstance(membership, SyncedLane) else LoneLane(control.rank)


def death(where: str, dead: Sequence[int], op: str, seq: int, epoch: int, remedy: str) -> RankFailedError:
    """Return the error of call `seq` at `where`, for which ranks of the epoch are dead."""
    names = ", ".join(str(rank) for rank in dead)
    text = f"{where}: rank {names} is dead (its process ended); {remedy}"
    return RankFailedError(text, tuple(dead), op, seq, epoch, "process ended")


@contextlib.contextmanager
def told_alike(members: PathLane) -> Iterator[None]:
    """Raise the same error on all ranks if a rank dies while the others make a buffer: each meets it in another step.

    A refusal stays as it is: a rank that has announced why it cannot make its part may well have ended after that.
    """
    try:
        yield
    except expected(MismatchError, AbortedError):
        raise
    except expected(Exception) as error:
        death = members.death_in_birth()
        if death is not None:
            raise death from error
        raise


def sync(
    control: ControlPlane,
    members: Membership | LoneLane,
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


def return_agreed(
    members: Membership | LoneLane, agreed: Agreed, active_ranks: torch.Tensor | None, num_ranks: int
) -> torch.Tensor:
    """Write the members into the caller's mask, and return them: `[num_ranks]` int32 on the CPU."""
    mask = mask_of(agreed.ranks, num_ranks)
    if active_ranks is not None:
        with writing(active_ranks):
            active_ranks[:num_ranks] = mask.to(active_ranks.device)
    members.note_agreed(agreed)  # last: a rank interrupted before it gets the same result again
    return mask
