"""The interface by which a path prepares its memory for an epoch (`synced.py` documents when, and what orders it)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch

from ...errors import InvalidState
from ...memory.shared import SharedRegion
from ..control.membership import Agreed

MAX_BLOB_BYTES = 504  # by which memory on a GPU is mapped; followed by its length
TAG_JUMP = 1 << 20  # between the calls of two epochs on GPUs: an excluded process may continue for so many


class Memory:
    """The interface; does nothing, for a path without such memory."""

    def follow(self, rank: int, process: tuple[int, int]) -> None:
        """Watch another process (number, start time) for the death of `rank`."""

    def prepare(self, agreed: Agreed, fresh: Collection[int]) -> None:
        """Prepare the memory that the others access as soon as this rank lends it.

        Args:
            agreed: the epoch.
            fresh: ranks with another process than in the previous epoch.

        Raises:
            Outrun: this rank cannot enter.
            InvalidState: not now: a graph is recorded.
        """

    def fill(self, region: SharedRegion) -> None:
        """Write into this rank's new region the data that the others read there."""

    def move(self, regions: Mapping[int, SharedRegion]) -> None:
        """Let calls use the epoch's regions; the old ones are unmapped afterwards. May be repeated.

        Raises:
            EpeeError: it cannot; then this rank has not entered, and tries again with its next call.
        """


def lend_blob(region: SharedRegion, at: int, blob: bytes) -> None:
    """Write at byte `at` of this rank's region the blob by which its memory on the GPU is mapped."""
    mine = torch.frombuffer(bytearray(blob), dtype=torch.uint8)
    region.tensor(torch.uint8, at, (MAX_BLOB_BYTES,))[: len(blob)] = mine
    region.words(at + MAX_BLOB_BYTES, 1)[0] = len(blob)


def lent_blob(region: SharedRegion, at: int) -> bytes:
    """Return the blob that a peer has written there."""
    size = region.words(at + MAX_BLOB_BYTES, 1)[0]
    return bytes(region.tensor(torch.uint8, at, (MAX_BLOB_BYTES,)).numpy())[:size]


class CallNumbers:
    """The check of a GPU path before it prepares its memory for an epoch: whether its calls can continue there.

    Args:
        used: returns the highest call number that this rank has used; waits for the GPU.
        is_capturing: whether the current stream is recording a graph.
    """

    def __init__(self, used: Callable[[], int], is_capturing: Callable[[], bool]) -> None:
        self._used, self._is_capturing = used, is_capturing
        self._judged = 0  # the last epoch

    def judge(self, agreed: Agreed) -> None:
        """Check, once per epoch: numbers that an attempt to enter has stored are no calls.

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
    """Raise `Outrun` if calls of this rank have used numbers that the others do not know of.

    An error had ended its `sync`, and it had made calls, before the decision that includes it.
    """
    if used > agreed.used:
        raise Outrun(
            f"this rank has made calls (up to number {used}) since an error took it out of the sync that the others "
            f"have ended with it (up to {agreed.used}); call buffer.sync() on all ranks"
        )
