"""How many ranks a group counts, call by call, and the mask that shows which of them take part.

The size of a group is the length of the user's lists with one element per rank, lost ranks included. It belongs to
calls, not to moments: a newcomer beyond the end raises it from its first call on, and a rank that shrinks the group
does so from its next call on. So it is the same for one call on all ranks, whenever they hear of a change (ADR 42).

Nothing here is shared with other processes. The user's tensor `active_ranks`, if there is one, is written here only.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection

from .options import MAX_RANKS


class Sizes:
    """The sizes of one group: `at(seq)` holds for the calls that are still to come."""

    def __init__(self, size: int) -> None:
        self._changes = [(1, size)]  # (first call, size), ascending

    def at(self, seq: int) -> int:
        """Return how many ranks the group counts in call `seq`."""
        return next(size for first, size in reversed(self._changes) if first <= seq)

    def grow(self, first: int, size: int) -> None:
        """From call `first` on the group counts at least `size` ranks."""
        self._note(first, max(size, self.at(first)))
        self._changes = [(start, max(size, old) if start >= first else old) for start, old in self._changes]

    def put(self, first: int, size: int) -> None:
        """From call `first` on the group counts `size` ranks, until a later change that is known already."""
        self._note(first, size)

    def _note(self, first: int, size: int) -> None:
        self._changes = sorted([(start, old) for start, old in self._changes if start != first] + [(first, size)])

    def firsts(self, after: int) -> set[int]:
        """Return the calls above `after` with which a size begins."""
        return {first for first, _ in self._changes if first > after}

    def forget(self, seq: int) -> None:
        """Drop what no call after `seq` needs."""
        while len(self._changes) > 1 and self._changes[1][0] <= seq + 1:
            del self._changes[0]


class Mask:
    """1 for each rank that takes part in the next call, else 0; the user's tensor shows what it has room for.

    Attributes:
        limit: the length of the user's tensor, or what it would be.
    """

    def __init__(self, limit: int, members: Collection[int], shown: memoryview | None = None) -> None:
        """`shown`: the words of the user's int32 tensor `[limit]`; all of them are written."""
        self.limit = limit
        self._words = array("i", [0] * MAX_RANKS)
        self._shown = shown
        for rank in range(MAX_RANKS):
            self[rank] = int(rank in members)

    def __getitem__(self, rank: int) -> int:
        return self._words[rank]

    def __setitem__(self, rank: int, value: int) -> None:
        self._words[rank] = value
        if self._shown is not None and rank < self.limit:
            self._shown[rank] = value

    def first(self, num_ranks: int) -> list[int]:
        """Return the values of the first `num_ranks` ranks."""
        return self._words[:num_ranks].tolist()
