"""Which rank holds which experts, and whose copy is where, when ranks may be lost.

Every rank's experts are copied to its *holder*, the next rank of the ring. When a rank is lost, its holder serves its
experts beside its own, until a replacement takes them back. A `Buffer` gives every rank equally many experts, so ranks
with fewer than the most have empty places; no token is ever sent there. A placement is a value: all ranks compute it
from the same members and get the same.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import InvalidState


class Placement(NamedTuple):
    """The experts of each rank of the job, ascending; a rank that is lost has none."""

    experts: tuple[tuple[int, ...], ...]

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that hold experts, ascending."""
        return tuple(rank for rank, experts in enumerate(self.experts) if experts)

    @property
    def num_places(self) -> int:
        """Places for experts on each member."""
        return max(map(len, self.experts))

    def holder(self, rank: int) -> int:
        """Return the member that keeps the copy of `rank`'s experts: the next one of the ring."""
        num_ranks = len(self.experts)
        return next(
            (rank + step) % num_ranks for step in range(1, num_ranks + 1) if self.experts[(rank + step) % num_ranks]
        )

    def without(self, lost: int) -> Placement:
        """Return the placement in which the holder of `lost` serves its experts as well.

        Raises:
            InvalidState: nobody else is left.
        """
        holder = self.holder(lost)
        if holder == lost:
            raise InvalidState(f"rank {lost} was the last one; nobody holds a copy of its experts")
        moved = {lost: (), holder: tuple(sorted(self.experts[holder] + self.experts[lost]))}
        return Placement(tuple(moved.get(rank, experts) for rank, experts in enumerate(self.experts)))

    def place_of(self) -> Tensor:
        """Return int64 `[num_experts]`: the place of each expert in a buffer over the members."""
        places = torch.full((sum(map(len, self.experts)),), -1, dtype=torch.int64, device="cpu")
        for position, rank in enumerate(self.members):
            for index, expert in enumerate(self.experts[rank]):
                places[expert] = position * self.num_places + index
        return places


def even(num_ranks: int, num_experts: int) -> Placement:
    """Return the placement at the start: equally many on each rank, in order."""
    share = num_experts // num_ranks
    return Placement(tuple(tuple(range(rank * share, (rank + 1) * share)) for rank in range(num_ranks)))
