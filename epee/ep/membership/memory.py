"""What a path does with its memory when its buffer enters an epoch (`synced.py` says when, and what orders it)."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ...memory.host import HostRegion
from ..control.membership import Agreed

MAX_BLOB_BYTES = 504  # by which memory on a GPU is mapped; the length stands behind it


class Memory:
    """Does nothing, where a path has no memory to do it with."""

    def follow(self, rank: int, process: tuple[int, int]) -> None:
        """Watch another process (number, start time) for the death of `rank`."""

    def prepare(self, agreed: Agreed, fresh: Collection[int]) -> None:
        """Make ready what the others reach as soon as this rank lends it; `fresh`: ranks with another process."""

    def fill(self, region: HostRegion) -> None:
        """Write into this rank's new region what the others are to find there."""

    def move(self, regions: Mapping[int, HostRegion], fresh: Collection[int]) -> None:
        """Let calls use the epoch's regions; the old ones are unmapped afterwards."""
