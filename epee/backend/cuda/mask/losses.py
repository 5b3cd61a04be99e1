"""Ranks that the kernels of a group in mode "mask" have left out, as seen by the cpu; and when the ranks must meet.

Kernels decide about a death by themselves, with the same result on all survivors (`csrc/kernels/collective/mask`), and
write the excluded ranks into the program's mask, if that lies on their GPU, and into a word of pinned memory. This
module reads the word at each entry from the cpu and shows the excluded ranks in a mask that lies elsewhere. Nothing
waits for the GPU for that, so the cpu may lag behind; the GPU's calls never depend on what the cpu has seen.

The group's view takes over a loss with its next call of the engine, as always. No meeting is needed for it: a rank that
the view has lost is excluded for the kernels, or will be when a call needs it. The ranks meet when a rank has joined,
as its memory must be mapped, or when a living rank has been excluded.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from ....engine import Engine
from ....engine.outbox import leavers
from ....view.process.detector import is_leaving
from ..machine import Collectives

logger = logging.getLogger("epee")


class Losses:
    """The losses of one group in mode "mask".

    Args:
        engine: of the group.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._seen = 0
        self._met: dict[int, bytes] = {}  # processes whose regions existed at the last meeting

    def look(self, machine: Collectives) -> None:
        """Show the ranks that the kernels have left out since the last call."""
        told = machine.told.words[0]
        if told == self._seen:
            return
        new, self._seen = told & ~self._seen, told
        for rank in ranks_of(new):
            logger.warning("rank %d is dead or has left, and is out of the group's calls on CUDA tensors", rank)
            self._engine.mask.foreshow(rank)

    def lost(self) -> tuple[int, ...]:
        """Return the ranks that calls have left out since the last meeting, as of the last call of `look`."""
        return ranks_of(self._seen)

    def met(self) -> None:
        """Note that the ranks have met: the view has taken over what the kernels knew."""
        if self._seen:
            self._engine.mask.rewrite()
        self._seen = 0
        self._met = self._outboxes()

    def needs_meeting(self, processes: Mapping[int, tuple[int, int]]) -> bool:
        """Whether the view has changed by more than lost ranks that are dead or have left the group.

        Args:
            processes: number and start time of each other rank's at the last meeting.
        """
        now = self._outboxes()
        if any(self._met.get(rank) != blob for rank, blob in now.items()):
            return True
        known = {*ranks_of(self._seen), *leavers(self._engine.peer_regions)}
        return any(rank not in known and not is_leaving(*processes[rank]) for rank in self._met if rank not in now)

    def _outboxes(self) -> dict[int, bytes]:
        peer_regions = self._engine.members
        return {rank: region.blob for rank, region in zip(peer_regions.members, peer_regions.regions, strict=True)}


def ranks_of(bits: int) -> tuple[int, ...]:
    """Return the ranks whose bits are set."""
    return tuple(rank for rank in range(bits.bit_length()) if bits >> rank & 1)
