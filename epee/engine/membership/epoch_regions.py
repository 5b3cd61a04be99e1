"""The peer regions with which each call of a group runs.

Members of an epoch take part in it from some call on, and the group counts some number of ranks from some call on; so
an epoch has peer regions of its members (`members.narrow`) for each stretch of calls in which both stay the same. They
are made when a decision is applied, and kept until no call that ran in the epoch can be asked about any more.

The state is this process's own, under the engine's lock.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ...view.protocol.outcome import Course
from ..outbox import PeerRegions
from .members import narrow
from .rank_table import RankTable
from .sizes import Sizes

if TYPE_CHECKING:
    from ..engine import Engine


class EpochRegions:
    """The peer regions of one group's epochs.

    Args:
        members: the ranks of the view in which the group begins.
        joined_in: the epoch in which this process took a lost rank; 0 for initial members.

    Attributes:
        full: peer regions of all ranks that have ever been here.
        peer_regions: of the members with which this rank's next call is planned.
        sizes: the number of ranks that the group counts.
        joined_in: as the argument.
        shown_epoch: of the newest view that `show` was about.
    """

    def __init__(
        self, engine: Engine, rank_table: RankTable, course: Course, members: list[int], joined_in: int
    ) -> None:
        self._engine = engine
        self._rank_table = rank_table
        self._course = course
        self.full = engine.peer_regions
        self.joined_in = joined_in
        self.shown_epoch = 0
        self.sizes = Sizes(engine.peer_regions.group_size)
        self.peer_regions = narrow(engine.peer_regions, members, rank_table.epoch)
        self._epoch_regions = {rank_table.epoch: [(1, self.peer_regions)]}  # see `_of_epoch`
        engine.plan_with(self.peer_regions)

    def all(self) -> Iterator[PeerRegions]:
        """Yield the peer regions of all epochs that calls are asked about."""
        for epoch_regions in self._epoch_regions.values():
            for _, peer_regions in epoch_regions:
                yield peer_regions
        yield self.peer_regions

    def add(self, epoch: int) -> None:
        """Make the peer regions of an epoch whose members the epoch plan knows."""
        self._epoch_regions[epoch] = self._of_epoch(epoch)

    def _of_epoch(self, epoch: int) -> list[tuple[int, PeerRegions]]:
        """Return (first call, peer regions) of an epoch: a joiner takes part from a later call than the others."""
        next_seq = self._engine.num_retired + 1  # not that of the pending call: it may move here without them
        firsts = {start for start in self._course.starts(epoch) if start > next_seq} | self.sizes.firsts(next_seq)
        epoch_regions = []
        for first in (1, *sorted(firsts)):
            seq = max(first, next_seq)
            ranks = sorted(self._rank_table.rank_of[slot] for slot in self._course.contributors(seq, epoch))
            epoch_regions.append((first, narrow(self.full, ranks, epoch, self.sizes.at(seq))))
        return epoch_regions

    def regions_for(self, epoch: int, seq: int) -> PeerRegions:
        """Return the peer regions of the ranks that take part in call `seq` when it runs in `epoch`."""
        return next(peer_regions for first, peer_regions in reversed(self._epoch_regions[epoch]) if first <= seq)

    def _first_epoch(self) -> int:
        """Return the epoch below which no call is asked about any more."""
        return max(self._course.base, self.joined_in)

    def _next_regions(self) -> PeerRegions:
        """Return the peer regions with which this rank's next call is planned."""
        seq, epoch = self._engine.seq + 1, self._course.planned_in(self._engine.num_retired + 1)
        epoch, shown = max(epoch, self.joined_in), self.shown_epoch
        if shown > epoch and shown in self._epoch_regions and self._course.passes(seq, shown):
            epoch = shown
        return self.regions_for(epoch, seq)

    def _plan_on(self) -> None:
        """Plan calls with the peer regions of the next one from now on, and show their members."""
        peer_regions = self._next_regions()
        if peer_regions is not self.peer_regions:
            self.peer_regions = peer_regions
            self._engine.plan_with(peer_regions)
            for rank in range(self.full.group_size):
                is_in, is_asked = int(rank in peer_regions.members), self._rank_table.was_put_out(rank)
                self._engine.mask.put(rank, is_in, is_asked, peer_regions.epoch)

    def retired(self, seq: int) -> bool:
        """Note that calls up to `seq` have ended: later ones are planned for the remaining ranks.

        True: no change is known to come.
        """
        self.sizes.forget(seq)
        self._plan_on()
        epoch = self._first_epoch()
        if min(self._epoch_regions) < epoch:
            self._epoch_regions = {
                later: epoch_regions for later, epoch_regions in self._epoch_regions.items() if later >= epoch
            }
        return self.peer_regions is self._epoch_regions[epoch][-1][1] and not self._course.turns

    def show(self, epoch: int) -> None:
        """Plan this rank's next call with those taken in by `epoch`, if it is surely theirs. The lock is held."""
        self.shown_epoch = epoch
        self._plan_on()

    def set_size(self, size: int) -> None:
        """From this rank's next call on the group counts `size` ranks. The engine's lock is held."""
        first = self._engine.seq + 1
        if self.sizes.at(first) == size:
            return
        self.sizes.put(first, size)
        for epoch, epoch_regions in self._epoch_regions.items():
            _, peer_regions = next(entry for entry in reversed(epoch_regions) if entry[0] <= first)
            kept = [entry for entry in epoch_regions if entry[0] != first]
            self._epoch_regions[epoch] = sorted(
                [*kept, (first, narrow(self.full, peer_regions.members, epoch, size))], key=_by_first
            )
        self._plan_on()


def _by_first(entry: tuple[int, PeerRegions]) -> int:
    return entry[0]
