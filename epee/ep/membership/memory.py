"""What a path does with its memory when its buffer enters an epoch (`synced.py` says when, and what orders it)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch

from ...errors import InvalidState
from ...memory.host import HostRegion
from ..control.membership import Agreed

MAX_BLOB_BYTES = 504  # by which memory on a GPU is mapped; the length stands behind it
TAG_JUMP = 1 << 20  # between the calls of two epochs on GPUs: a process that was left out may go on for so many


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
        """Let calls use the epoch's regions; the old ones are unmapped afterwards. May be repeated.

        Raises:
            EpeeError: it cannot; then this rank has not entered, and tries again with its next call.
        """


def lend_blob(region: HostRegion, at: int, blob: bytes) -> None:
    """Write at byte `at` of this rank's region by what its memory on the GPU is mapped."""
    mine = torch.frombuffer(bytearray(blob), dtype=torch.uint8)
    region.tensor(torch.uint8, at, (MAX_BLOB_BYTES,))[: len(blob)] = mine
    region.words(at + MAX_BLOB_BYTES, 1)[0] = len(blob)


def lent_blob(region: HostRegion, at: int) -> bytes:
    """Return what a peer has written there."""
    size = region.words(at + MAX_BLOB_BYTES, 1)[0]
    return bytes(region.tensor(torch.uint8, at, (MAX_BLOB_BYTES,)).numpy())[:size]


class CallNumbers:
    """What a GPU path looks at before it makes its memory ready for an epoch: whether its calls can go on there.

    Args:
        used: returns the highest call number that this rank has used; waits for the GPU.
        is_capturing: whether the current stream is recording a graph.
    """

    def __init__(self, used: Callable[[], int], is_capturing: Callable[[], bool]) -> None:
        self._used, self._is_capturing = used, is_capturing
        self._judged = 0  # the last epoch

    def judge(self, agreed: Agreed) -> None:
        """Look, once per epoch: numbers that an attempt to enter has stored are no calls.

        Raises:
            As `Memory.prepare`.
        """
        if self._is_capturing():
            raise InvalidState("a sync has begun an epoch, which this rank enters by a call outside of a graph")
        if self._judged != agreed.epoch:
            _require_below(self._used(), agreed)
            self._judged = agreed.epoch


class Outrun(InvalidState):
    """This rank cannot enter what was agreed; its caller sees an `InvalidState`."""


def _require_below(used: int, agreed: Agreed) -> None:
    """Raise `Outrun` where calls of this rank have used numbers that the others do not know of.

    It had left its `sync` by an error, and made calls, before the decision came that has it in.
    """
    if used > agreed.used:
        raise Outrun(
            f"this rank has made calls (up to number {used}) since an error took it out of the sync that the others "
            f"have ended with it (up to {agreed.used}); call buffer.sync() on all ranks"
        )
