"""The interface by which a path prepares its memory for an epoch that a `sync` begins.

`latency/one_host/members.py` and `members/gpu_members.py` define when it is called, and what orders it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from ..errors import InvalidState
from .members.membership import Agreed

TAG_JUMP = 1 << 20  # between the calls of two epochs on GPUs: an excluded process may continue for so many


class Memory:
    """The interface; does nothing, for a path without such memory.

    Attributes:
        blob: by which other ranks map this rank's memory on the GPU; the same as long as the path lives.
    """

    blob = b""

    def follow(self, rank: int, process: tuple[int, int]) -> None:
        """Watch another process (number, start time) for the death of `rank`."""

    def prepare(self, agreed: Agreed, fresh: Collection[int]) -> None:
        """Prepare the memory that the others access as soon as this rank has reported that it is ready.

        Args:
            agreed: the epoch.
            fresh: ranks with another process than in the previous epoch.

        Raises:
            Outrun: this rank cannot enter.
            InvalidState: not now: a graph is recorded.
        """

    def move(self, lent: Mapping[int, Any]) -> None:
        """Let calls use what the ranks lend for an epoch, by rank: on CPUs regions, on GPUs blobs. May be repeated.

        Raises:
            EpeeError: it cannot; then this rank has not entered, and tries again with its next call.
        """


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
