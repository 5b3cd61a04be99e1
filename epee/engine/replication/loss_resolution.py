"""The data that a change of the view still waits for in a group over several hosts: mirrors, and the gate for joiners.

**Mirrors.** The gateways of a host's mirrors publish in their outboxes which mirrors they have made anew and what they
have received (`links.py`). A rank applies that here (`LossResolution`), under its engine's lock, whenever it drives a
call while the group changes:

    moves      a source has another gateway in the newest view. As soon as that one has a complete mirror this rank
               reads it, in the open calls, too; until then it reads the old one, which no longer changes.
    unsettled  a lost source of another host. Until its gateway has published that all of it is there, no call of the
               group is decided or completed here: ranks of other hosts may have found more of it, or less.

The words of a gateway count only if it plays the newest roles, too (GENERATION).

**Gate.** A joiner may get the rank of a lost one, on any host: rows and mirrors of that rank, and the roles of all
(gateways and answering ranks), change from then on. So no rank begins the new placement (`bring_in`) while another may
still need a word of the ranks that were lost by then. A rank that knows of such a view

    settles    the ranks lost by it, as after any loss; nothing is decided, begun or completed meanwhile
    turns      it reports so beside the group's row on its board (`Offer.turned`), which the agents bring to other
               hosts: no mirror has a part in it, so it does not matter whose mirrors are being made anew
    goes on    when all ranks that were there before and stay have turned

The staying ranks follow from all known decisions, also those behind the waiting view: a rank that is lost meanwhile is
not waited for, and such a decision changes which rank answers for the lost ones, and nothing else (`hear`). A rank that
has turned needs nothing of the lost ones, so a rank that goes on takes nothing away from any other. A rank that makes
no calls does not turn; the others' timeouts name it.

Mirrors are read only; of the boards each rank writes its own row. All under the engine's lock. A crash of a rank is a
later decision.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping

from ...errors import AuthError, ProtocolError, ResourceError, expected
from ...link.topology import Roles
from ...memory.shared import BLOB_BYTES, SharedRegion
from ...view.process.detector import is_leaving
from ...view.protocol.decision import parts_of
from ...view.protocol.messages import Decision
from ..bootstrap.group_note import Offer
from ..membership.rank_table import RankTable
from ..outbox import (
    GENERATION,
    MIRROR_BLOB,
    MIRROR_CUT,
    MIRROR_MADE,
    MIRROR_SETTLED,
    OutboxOwner,
    PeerRegions,
    open_outbox,
)

logger = logging.getLogger("epee")


class LossResolution:
    """The mirrors of one rank's host, as far as a change of the view concerns them: none in a group on one host.

    Args:
        peer_regions: the peer regions of all ranks.
        roles: of the view in which the group begins.
        owners: per rank the owner named in its mirrors.
        epoch_regions: returns all peer regions with which calls run, or may.

    Attributes:
        roles: of the newest view that was applied.
        unsettled: lost rank -> the view that has to be settled.
    """

    def __init__(
        self,
        peer_regions: PeerRegions,
        roles: Roles,
        owners: dict[int, OutboxOwner],
        epoch_regions: Callable[[], Iterable[PeerRegions]],
    ) -> None:
        self.roles = roles
        self._newest = 0  # epoch of the last decision that was applied
        self.unsettled: dict[int, int] = {}
        self._peer_regions, self._owners, self._epoch_regions = peer_regions, owners, epoch_regions
        self._moves: dict[int, int] = {}  # source -> the view since which it has another gateway
        self._ahead: Roles | None = None  # by which lost ranks are answered for, while a view with joiners waits
        self._generation = 0

    def begin(self, epoch: int) -> None:
        """Begin with the view of an epoch: all data of ranks of other hosts is still to be received."""
        self._generation = epoch
        self._moves = dict.fromkeys(self.roles.topology.elsewhere, epoch)

    @property
    def has_moves(self) -> bool:
        """True while mirrors are to be had."""
        return bool(self._moves)

    def hear(self, epoch: int, lost: Collection[int]) -> None:
        """Note a later loss while a view with joiners waits; may be run again."""
        self._newest = epoch
        before = self._ahead or self.roles
        self._ahead = before.without(lost)
        for source in self.unsettled:
            if self._ahead.keeper(source) != before.keeper(source):
                self._moves[source] = epoch

    def is_here(self, rank: int) -> bool:
        """Return whether a rank shares this rank's host."""
        return self.roles.topology.is_here(rank)

    def bring_in(
        self, epoch: int, keys: Mapping[int, str], since: Mapping[int, int], owners: Mapping[int, OutboxOwner]
    ) -> None:
        """Apply a view with joiners; nothing is unsettled. May be run again.

        Args:
            epoch: the epoch that the view begins.
            keys: the key of the host of every rank that takes part.
            since: the epoch since which it does.
            owners: by joiner, the owner named in its mirrors.
        """
        roles = Roles(self.roles.topology.moved(keys), [*since], {**self.roles.since, **since})
        self._peer_regions.place(roles.topology.host_of, epoch)
        self._peer_regions.exports.move(roles.topology)
        self._owners.update(owners)
        before = self.roles if epoch > self._generation else None
        self._newest = self._generation = epoch
        self._moves = {source: since for source, since in self._moves.items() if source in roles.present}
        for source in roles.topology.elsewhere:
            is_moved = before is not None and (
                source not in before.present or before.keeper(source) != roles.keeper(source)
            )
            if source in owners or is_moved:
                self._moves[source] = epoch
        self.roles, self._ahead = roles, None
        self._peer_regions.exports.looks.gone = frozenset(range(len(roles.topology.host_of))) - roles.present

    def change(self, epoch: int, present: Iterable[int]) -> None:
        """Apply a view; may be run again."""
        self._newest = epoch
        before, after = self.roles, Roles(self.roles.topology, frozenset(present), self.roles.since)
        for source in after.topology.elsewhere:
            if source in before.present and source not in after.present:
                self.unsettled[source] = epoch
            is_needed = source in after.present or source in self.unsettled
            if is_needed and after.keeper(source) != before.keeper(source):
                self._moves[source] = epoch
        self.roles = after
        self._peer_regions.exports.looks.gone = frozenset(range(len(after.topology.host_of))) - after.present

    @property
    def is_over(self) -> bool:
        """True when nothing is waited for."""
        return not self._moves and not self.unsettled

    def awaited(self) -> list[int]:
        """Return the living ranks whose reports this one waits for: gateways, and the ranks that answer them."""
        roles = self._ahead or self.roles
        keepers = {roles.keeper(source) for source in self.unsettled}
        tellers = {roles.teller(source) for source in self.unsettled}
        return sorted(rank for rank in keepers | tellers if rank is not None and rank != self.roles.topology.rank)

    def look(self) -> list[tuple[int, int]]:
        """Apply the reports of gateways.

        Return the ranks settled now, and the view whose cut counts for each (0: none).

        Raises:
            ResourceError: a new mirror cannot be mapped; to be tried again.
        """
        for source, epoch in list(self._moves.items()):
            if self._move(source, epoch):
                del self._moves[source]
        settled = []
        for source, epoch in list(self.unsettled.items()):
            words, row = self._row(source)
            if words[GENERATION] < self._generation:
                continue
            if words[row + MIRROR_SETTLED] < epoch or words[row + MIRROR_CUT] > self._newest:
                continue  # of the latter the gateway knows the decision, and this rank does not yet
            if source in self._moves and words[row + MIRROR_MADE] >= self._moves[source]:
                continue  # all of it is there, but this rank does not read it yet
            self._moves.pop(source, None)  # no rank has a better mirror than this one
            del self.unsettled[source]
            settled.append((source, words[row + MIRROR_CUT]))
        return settled

    def _row(self, source: int) -> tuple[memoryview, int]:
        keeper = self._keeper(source)
        assert keeper is not None, "this rank is in the view"
        return self._peer_regions.words[keeper], self._peer_regions.mirror_base[source]

    def _keeper(self, source: int) -> int | None:
        roles = self._ahead if self._ahead is not None and source in self.unsettled else self.roles
        return roles.keeper(source)

    def _move(self, source: int, epoch: int) -> bool:
        """Read a source in its new gateway's mirror, if there is one."""
        words, row = self._row(source)
        if words[row + MIRROR_MADE] < epoch or words[GENERATION] < self._generation:
            return False
        first = row + MIRROR_BLOB
        blob = bytes(words[first : first + BLOB_BYTES // 8])
        try:
            region = open_outbox(blob, self._owners[source])
        except expected(AuthError, ProtocolError) as exc:
            logger.info("rank %s's mirror of rank %d is not to be had: %s", self._keeper(source), source, exc)
            return False  # its gateway is dying: the next view has another
        except expected(ResourceError):
            if self._is_leaving(source):
                return False
            raise
        self._use(source, region)
        return True

    def _is_leaving(self, source: int) -> bool:
        """Return whether the gateway of a source is leaving: its death will be noticed."""
        region = self._peer_regions.regions[self._keeper(source) or 0]
        return is_leaving(region.owner_pid, region.owner_start_time)

    def _use(self, source: int, region: SharedRegion) -> None:
        """Read a source in this memory from now on, in all peer regions in which it was read in the old one."""
        old = self._peer_regions.regions[source]
        words = region.words(0, len(self._peer_regions.own))
        for peer_regions in {
            id(peer_regions): peer_regions for peer_regions in (*self._epoch_regions(), self._peer_regions)
        }.values():
            for position, rank in enumerate(peer_regions.members):
                if rank == source and peer_regions.regions[position] is old:
                    peer_regions.regions[position], peer_regions.words[position] = region, words
                    peer_regions.address[position] = region.address
                    peer_regions.peer_words = [peer_regions.words[peer] for peer in peer_regions.peers]
                    peer_regions.forget_views()


class Gate:
    """The condition that a view with joiners waits for at one rank; none waits in a group on one host.

    Args:
        tell: reports to the others that this rank has turned.

    Attributes:
        epoch: of the view that waits; 0: none does.
        newest: of the newest view received while it waits; 0: none does.
        late: the ranks that have not turned.
    """

    def __init__(self, rank_table: RankTable, resolution: LossResolution, tell: Callable[[int], None]) -> None:
        self.epoch = self.newest = 0
        self.late: tuple[int, ...] = ()
        self._rank_table, self._loss_resolution, self._tell = rank_table, resolution, tell
        self._staying: dict[int, int] = {}  # slot -> since when
        self._has_turned = False

    def begin(self, epoch: int) -> bool:
        """Wait with the view of an epoch from now on; True: it is new, or its consequences were interrupted."""
        if self.epoch == epoch:
            return False
        self._staying, self._has_turned, self.newest = dict(self._rank_table.since), False, epoch
        return True

    def begun(self, decision: Decision) -> None:
        """Note that the losses of the view that waits are being settled."""
        self._leave(decision)
        self.epoch = decision.epoch

    def _leave(self, decision: Decision) -> list[int]:
        """Stop waiting for the ranks that a decision removes; return their slots."""
        parts = parts_of(decision, self._rank_table.group_id)
        gone = [slot for slot, when in self._staying.items() if parts.get(slot) != when]
        self._staying = {slot: when for slot, when in self._staying.items() if slot not in gone}
        return gone

    def hear(self, decision: Decision) -> None:
        """Note a decision behind the one that waits."""
        if decision.epoch <= self.newest:
            return
        gone = self._leave(decision)
        self._loss_resolution.hear(decision.epoch, [self._rank_table.rank_of[slot] for slot in gone])
        self.newest = decision.epoch

    def is_open(self, offers: Callable[[], Mapping[int, Offer]]) -> bool:
        """Return whether the view may be applied. `offers`: returns the offers of the members."""
        if self._loss_resolution.unsettled:
            return False
        if not self._has_turned:
            self._tell(self.epoch)
            self._has_turned = True
        rank_of, told = self._rank_table.rank_of, offers()
        own = self._loss_resolution.roles.topology.rank
        late = [
            rank_of[s] for s in self._staying if rank_of[s] != own and (s not in told or told[s].turned < self.epoch)
        ]
        self.late = tuple(sorted(late))
        return not late

    def end(self) -> None:
        """Stop waiting with any view."""
        self.epoch = self.newest = 0
        self.late = ()
