"""The membership of a path: members, agreed on at `sync`; or this rank alone, for the only rank of a group.

Called on the thread of a call, or of the constructor. No state is stored here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence

from ...errors import AbortedError, MismatchError, PeerError, RankFailedError, expected
from ...memory.shared import SharedRegion
from ..control.membership import Agreed
from ..control.messages import ControlPlane
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
