"""What a path does with its memory when its buffer enters an epoch (`synced.py` says when, and what orders it)."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ...errors import InvalidState
from ...memory.host import HostRegion
from ..control.membership import Agreed

MAX_BLOB_BYTES = 504  # by which memory on a GPU is mapped; the length stands behind it


class Memory:
    """Does nothing, where a path has no memory to do it with."""

    def follow(self, rank: int, process: tuple[int, int]) -> None:
        """Watch another process (number, start time) for the death of `rank`."""

    def prepare(self, agreed: Agreed, fresh: Collection[int]) -> None:
        """Make ready what the others reach as soon as this rank lends it.

        Args:
            agreed: the epoch.
            fresh: ranks with another process than in the epoch before.

        Raises:
            Outrun: this rank cannot enter.
            InvalidState: not now: a graph is recorded.
        """

    def fill(self, region: HostRegion) -> None:
        """Write into this rank's new region what the others are to find there."""

    def move(self, regions: Mapping[int, HostRegion]) -> None:
        """Let calls use the epoch's regions; the old ones are unmapped afterwards. May be repeated."""


class Outrun(InvalidState):
    """This rank cannot enter what was agreed; its caller sees an `InvalidState`."""


def require_below(used: int, agreed: Agreed) -> None:
    """Raise `Outrun` where calls of this rank have used numbers that the others do not know of.

    It had left its `sync` by an error, and made calls, before the decision came that has it in.
    """
    if used > agreed.used:
        raise Outrun(
            f"this rank has made calls (up to number {used}) since an error took it out of the sync that the others "
            f"have ended with it (up to {agreed.used}); call buffer.sync() on all ranks"
        )
