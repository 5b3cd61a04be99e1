"""Whom the kernels of a group in mode "mask" have left out, as its host sees it; and when the hosts must meet.

Kernels decide about a death by themselves, alike on all survivors (`csrc/kernels/collective/mask`), and write who is
out into the program's mask, where that lies on their GPU, and into a word of pinned memory. This module reads the
word at each touch of the host: who is out is shown in a mask that lies elsewhere. Nobody waits for the GPU for that, so
the host may be behind it; what the GPU's calls do never depends on what the host has seen.

The group's view takes a loss over with its next call of the engine, as ever. The hosts need not meet for it: a rank
that the view has lost is out for the kernels, or will be when a call asks for it. They meet when somebody has come, for
its memory must be mapped, or has been taken out and lives.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from ....engine.ending import leavers
from ....engine.engine import Engine
from ....view.process.detector import is_leaving
from ..machine import Collectives

logger = logging.getLogger("epee")


class Losses:
    """See above.

    Args:
        engine: of the group.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._seen = 0
        self._met: dict[int, bytes] = {}  # whose outboxes were there when the hosts met last

    def look(self, machine: Collectives) -> None:
        """Show whom the kernels have left out since the last look."""
        told = machine.told.words[0]
        if told == self._seen:
            return
        new, self._seen = told & ~self._seen, told
        for rank in ranks_of(new):
            logger.warning("rank %d is dead or has left, and is out of the group's calls on CUDA tensors", rank)
            self._engine.mask.foreshow(rank)

    def lost(self) -> tuple[int, ...]:
        """Return the ranks that calls have left out since the hosts met last, as of the last look."""
        return ranks_of(self._seen)

    def met(self) -> None:
        """Note that the hosts have met: the view has taken over what the kernels knew."""
        if self._seen:
            self._engine.mask.rewrite()
        self._seen = 0
        self._met = self._outboxes()

    def needs_meeting(self, processes: Mapping[int, tuple[int, int]]) -> bool:
        """Tell whether the view, which has changed, has more than lost ranks that are dead, or have left the group.

        Args:
            processes: number and start time of each other rank's at the last meeting.
        """
        now = self._outboxes()
        if any(self._met.get(rank) != blob for rank, blob in now.items()):
            return True
        known = {*ranks_of(self._seen), *leavers(self._engine.box)}
        return any(rank not in known and not is_leaving(*processes[rank]) for rank in self._met if rank not in now)

    def _outboxes(self) -> dict[int, bytes]:
        box = self._engine.members
        return {rank: region.blob for rank, region in zip(box.members, box.regions, strict=True)}


def ranks_of(bits: int) -> tuple[int, ...]:
    """Return the ranks whose bits are set."""
    return tuple(rank for rank in range(bits.bit_length()) if bits >> rank & 1)
