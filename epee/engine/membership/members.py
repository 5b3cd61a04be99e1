"""The members of a group in an epoch: the peer regions with which each call runs, and the intake of joiners.

Collectives (`backend/collectives/`) use positions among the members, not ranks: shares, segments and sums run over
positions in ascending order of rank. When the group is created both are the same. When a view leaves ranks out,
`narrow` makes peer regions of the rest over the same memory; `backend/collectives/arguments.py` picks the members'
tensors out of the user's lists (one per rank that the group counts, lost ones included), and entries of lost ranks are
not touched. Narrowing means not reading some regions any more.

**Epochs.** Members of an epoch take part in it from some call on, and the group counts some number of ranks from some
call on; so an epoch has peer regions of its members for each stretch of calls in which both stay the same
(`EpochRegions`). They are made when a decision is applied, and kept until no call that ran in the epoch can be asked
about any more.

**Joiners** come in the rank of a lost process, or beyond the end of the group. A view with a joiner states the call
with which it begins, and all ranks read its outbox from then on. `replace` extends the full peer regions; the other
members map nothing else anew: outboxes have room for all ranks that may ever join (decision 42). The consequences of
such a view belong to calls: they take effect with the joiner's first call, on all ranks after the same call, whenever
they received the decision.

No call is published before a joiner and the other members can read each other's outboxes. Else a joiner that dies early
would have a part in the call for ranks that had mapped its outbox and none for the others. A joiner that has mapped all
other outboxes is ready (LIFE). A member that has mapped a joiner's outbox announces that in its count of freed message
slots (`Receiver.renew`).

Over several hosts a joiner of another host has a blank outbox here until its mirror is complete
(`replication/loss_resolution.py`), and the gateways of its own host request everything anew; it is ready when it reads
all other ranks' mirrors.

Decisions come from the agent thread and are applied under the engine's lock; all other state is this process's own. A
joiner that dies on the way is lost like any other rank.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ...errors import (
    AuthError,
    InvalidArgument,
    InvalidState,
    ProtocolError,
    RankFailedError,
    ResourceError,
    expected,
    ignored,
)
from ...memory.shared import SharedRegion
from ...memory.signals import tag
from ...view.process.detector import is_leaving
from ...view.protocol.messages import Decision
from ...view.protocol.outcome import Course, first_seq
from ..bootstrap.group_note import OutboxEndpoint
from ..operation import Operation
from ..outbox import LIFE, LIFE_BORN, PeerRegions, open_outbox, sites_of
from ..p2p.channel import first_number
from ..plan import Make, Plan
from .rank_table import RankTable
from .sizes import Mask, Sizes

if TYPE_CHECKING:
    from ..engine import Engine

logger = logging.getLogger("epee")

_SHARED = (
    "blanks",
    "capacity",
    "first_cell",
    "verdict_base",
    "channel_base",
    "channel_data",
    "mirror_base",
    "exports",
    "host_of",
    "placed_in",
    "here",
    "label",
    "payload_bytes",
    "staging_bytes",
    "ring",
)


def narrow(peer_regions: PeerRegions, members: Sequence[int], epoch: int, group_size: int | None = None) -> PeerRegions:
    """Return outboxes of `members` (ranks of the group, ascending, this one included) for calls of `epoch`.

    In these calls the group counts `group_size` ranks; None: as many as in `peer_regions`.

    The memory, the staging ring and the cells are those of `peer_regions`, which must contain all members and must stay
    open; a call of the new epoch has the old cell of its number and another tag.

    Raises:
        InvalidState: this rank is not among the members, or a member is not in `peer_regions`.
    """
    own = peer_regions.members[peer_regions.rank]
    if own not in members or list(members) != sorted(set(members)) or not set(members) <= set(peer_regions.members):
        raise InvalidState(
            f"rank {own} cannot make outboxes of ranks {list(members)} out of {list(peer_regions.members)}"
        )
    positions = [peer_regions.members.index(rank) for rank in members]
    new: PeerRegions = object.__new__(PeerRegions)
    for name in _SHARED:
        setattr(new, name, getattr(peer_regions, name))
    new.group_size = peer_regions.group_size if group_size is None else group_size
    new.members = tuple(members)
    new.sites = sites_of(new.members, peer_regions.host_of)
    new.num_ranks = len(positions)
    new.rank = new.members.index(own)
    new.epoch = epoch
    new.epoch_bits = tag(epoch, 0)
    new.regions = [peer_regions.regions[position] for position in positions]
    new.words = [peer_regions.words[position] for position in positions]
    new.address = [peer_regions.address[position] for position in positions]
    new.own, new.own_address = peer_regions.own, peer_regions.own_address
    new.peers = tuple(position for position in range(new.num_ranks) if position != new.rank)
    new.peer_words = [new.words[position] for position in new.peers]
    new.cells_free_until = 0  # found out at the first call
    new.forget_views()
    return new


def counting(peer_regions: PeerRegions, group_size: int) -> PeerRegions:
    """Return the same outboxes for the plan of a call with `group_size` entries in its lists, zeros for excluded ranks.

    They must be as many as the highest member needs; if they are fewer the plan's own checks fail.
    """
    if peer_regions.num_ranks == peer_regions.group_size == group_size:
        return peer_regions
    new = copy.copy(peer_regions)
    new.group_size = max(group_size, 1 + peer_regions.members[-1])
    new.num_roots = peer_regions.group_size
    new.zeroes = True
    return new


class TooShort(InvalidArgument):
    """The lists of a call would fit if some members were lost, which is not known here.

    Attributes:
        members: these ranks.
        epoch: in which they are members.
    """

    def __init__(self, error: InvalidArgument, members: Sequence[int], epoch: int) -> None:
        super().__init__(*error.args)
        self.members, self.epoch = members, epoch


def fitted(make: Make, size: list[int], mask: Mask, peer_regions: PeerRegions) -> Plan:
    """Plan a call of a group whose size follows the ranks that take part, for the length of the given lists.

    A program may have asked for the size before a loss was shown or afterwards, and a rank may take part in the call
    that is lost before it ends. So lists may have an entry for each rank that the group counts, or for those below the
    lost ranks at its end. What lost ranks put into the call has no place in shorter lists, and is dropped.

    Args:
        make: plans the call.
        size: one element, how many entries are expected; what has fitted is noted, and holds when the call is planned
            again.
        mask: knows who is lost.
        peer_regions: the outboxes with which the call is to run.

    Raises:
        TooShort: the lists end before members that are not known to be lost.
    """
    try:
        beyond = (
            [rank for rank in peer_regions.members if rank >= size[0]] if size[0] <= peer_regions.members[-1] else ()
        )
        is_short = bool(beyond) and mask.has_lost(beyond, peer_regions.epoch)
        return make(_shortened(peer_regions, size[0]) if is_short else counting(peer_regions, size[0]))
    except expected(InvalidArgument) as exc:
        error = exc
    for longer in range(1 + peer_regions.members[-1], 1 + max(peer_regions.group_size, size[0])):
        with ignored(InvalidArgument):
            plan = make(counting(peer_regions, longer))
            size[0] = longer
            return plan
    own = peer_regions.members[peer_regions.rank]
    for shorter in range(peer_regions.members[-1], own, -1):
        beyond = [rank for rank in peer_regions.members if rank >= shorter]
        with ignored(InvalidArgument):
            plan = make(_shortened(peer_regions, shorter))
            if mask.has_lost(beyond, peer_regions.epoch):
                size[0] = shorter
                return plan
            error = TooShort(error, beyond, peer_regions.epoch)
            break
    raise error


def _shortened(peer_regions: PeerRegions, num_entries: int) -> PeerRegions:
    """Return the same outboxes for the plan of a call whose lists end before the highest members, which are lost."""
    new = copy.copy(counting(peer_regions, peer_regions.group_size))
    new.num_entries = num_entries
    new.zeroes = True
    return new


def attach_outbox(part: OutboxEndpoint, nbytes: int) -> SharedRegion | None:
    """Map the outbox of a process; None when it no longer exists: its owner is dying or dead, or has closed it.

    A blank one instead has the same content as the real one for ranks that have mapped it: no rank puts data into a
    call with a joiner before all ranks have mapped (`GroupMembership.may_publish`).

    Raises:
        ResourceError: it cannot be mapped now, and its owner lives. To be tried again.
    """
    try:
        region = open_outbox(part.blob, part.owner)
    except expected(AuthError, ProtocolError) as exc:
        logger.info("the outbox of process %d is not to be had (%s); it will be seen to go", part.pid, exc)
        return None
    except expected(ResourceError) as exc:
        if not is_leaving(part.pid, part.start_time):
            raise
        logger.info("the outbox of process %d cannot be mapped (%s); its death will be noticed", part.pid, exc)
        return None
    if region.owner_pid == part.pid and region.nbytes >= nbytes:
        return region
    logger.warning("process %d names an outbox of process %d; it was not used", part.pid, region.owner_pid)
    region.close()
    return None


def make_blank(nbytes: int) -> SharedRegion:
    """Return an outbox that no process writes; it costs addresses and a descriptor, no pages.

    Raises:
        ResourceError: there is no memory.
    """
    made = SharedRegion.create(nbytes, "blank")
    try:
        return SharedRegion.attach(made.blob)
    finally:
        made.close()


def replace(peer_regions: PeerRegions, rank: int, region: SharedRegion) -> None:
    """Read the outbox of `rank` in `region` from now on; `peer_regions` has all ranks. Narrowed ones keep the old.

    A rank above those that `peer_regions` has makes it longer; ranks between them are blank until a process joins. May
    be repeated where it was broken off.

    Raises:
        ResourceError: there is no memory for a blank.
    """
    if rank > peer_regions.num_ranks:
        blank = make_blank(region.nbytes)
        for hole in range(peer_regions.num_ranks, rank):
            peer_regions.blanks.add(hole)
            _put(peer_regions, hole, blank)
    _put(peer_regions, rank, region)
    peer_regions.blanks.discard(rank)
    peer_regions.num_ranks = peer_regions.group_size = len(peer_regions.regions)
    peer_regions.members = tuple(range(peer_regions.num_ranks))
    peer_regions.peers = tuple(peer for peer in peer_regions.members if peer != peer_regions.rank)
    peer_regions.peer_words = [peer_regions.words[peer] for peer in peer_regions.peers]
    peer_regions.forget_views()


def _put(peer_regions: PeerRegions, rank: int, region: SharedRegion) -> None:
    peer_regions.regions[rank : rank + 1] = [region]
    peer_regions.words[rank : rank + 1] = [region.words(0, len(peer_regions.own))]
    peer_regions.address[rank : rank + 1] = [region.address]


def position_of(peer_regions: PeerRegions, rank: int, name: str) -> int:
    """Return where `rank` of the group stands among the members.

    Raises:
        RankFailedError: it has been left out of the view.
    """
    if len(peer_regions.members) == peer_regions.group_size and rank < peer_regions.group_size:
        return rank
    if rank not in peer_regions.members:
        raise RankFailedError(
            f"{name}: rank {rank} is not in the view any more (epoch {peer_regions.epoch}, active ranks "
            f"{', '.join(map(str, peer_regions.members))}); choose one of them",
            [rank],
            name,
            0,
            peer_regions.epoch,
            "left out of the view",
        )
    return peer_regions.members.index(rank)


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


class Joiners:
    """Takes the joiners of one group in.

    Attributes:
        join_epoch: of the newest view that took a process in; 0 when none did.
        first_call: rank -> call with which the process that last took it begins.
    """

    def __init__(self, engine: Engine, rank_table: RankTable, epoch_regions: EpochRegions, host: str) -> None:
        self._host = host
        self._engine = engine
        self._rank_table = rank_table
        self._epoch_regions = epoch_regions
        self.join_epoch = 0
        self.first_call: dict[int, int] = {}

    def begin(self, epoch: int, first_call: int) -> None:
        """Note that this process has itself been taken in, by the view of `epoch`."""
        self.join_epoch = epoch
        self.first_call[self._epoch_regions.full.rank] = first_call

    def adopt(self, decision: Decision) -> None:
        """Read the outboxes of processes that have come into this group by `decision`.

        May be repeated from any line on (an interrupt, a shortage): that a process was taken in is noted last of all.

        Raises:
            ResourceError: no memory or descriptor is left; nothing of the rest has begun for that process.
        """
        for one in self._rank_table.newcomers(decision):
            start, rank, part = first_seq(decision, self._rank_table.group_id), one.rank, one.part
            self._adopt(rank, part, decision.epoch)
            self.join_epoch = decision.epoch
            self.first_call[rank] = start
            self._epoch_regions.sizes.grow(start, rank + 1 if part is None else part.num_ranks)
            self._rank_table.take_in(one)

    def _adopt(self, rank: int, part: OutboxEndpoint | None, epoch: int) -> None:
        """Read the outbox of a process that has taken `rank`: the steps that may fail come first.

        None: it has left already.
        """
        engine, nbytes = self._engine, self._epoch_regions.full.payload_bytes
        is_here = part is not None and (not self._epoch_regions.full.host_of or part.host == self._host)
        try:
            region = (is_here and part and attach_outbox(part, nbytes)) or make_blank(nbytes)
            if is_here and part is not None:
                engine.watch.watch(rank, part.pid, part.start_time)
            else:
                engine.watch.forget(rank)  # the previous owner may have been of this host
        except expected(ResourceError) as exc:
            raise ResourceError(
                f"rank {rank} (process {part.pid if part else 'gone'}) has joined in epoch {epoch}, but cannot be "
                f"admitted on this rank yet (the next call tries again): {exc}"
            ) from exc
        for message in engine.mail.involving(rank):  # out of the state last: then no path comes back to it
            message.fail(RankFailedError(f"{message.name}: rank {rank} was replaced by another process", [rank]))
            engine.retire(message)
            engine.mail.cancel(message)
        replace(self._epoch_regions.full, rank, region)
        engine.waits.count_ranks(self._epoch_regions.full.num_ranks)
        engine.mail.renew(rank, first_number(epoch))


class Arrival:
    """The readiness of one process in its group.

    Args:
        full: peer regions of all ranks.
        joined_in: the epoch that took this process in; 0 for initial members.
    """

    def __init__(self, full: PeerRegions, joined_in: int) -> None:
        self._full = full
        self._joined_in = joined_in
        self._is_adopted = not joined_in
        for peer in full.peers if joined_in else ():  # for ranks that joined in the same epoch
            # Sent, not only stored: other hosts may have received everything else in this outbox a moment before.
            full.exports.publish(full, full.verdict_base[peer], first_number(joined_in) - 1)

    def may_publish(self, op: Operation) -> bool:
        """Return whether all ranks that take part in `op` can read each other's outboxes."""
        if unready(op.peer_regions):
            return False
        if self._is_adopted:
            return True
        index, wanted = self._full.verdict_base[self._full.rank], first_number(self._joined_in) - 1
        self._is_adopted = all(words[index] >= wanted for words in op.peer_regions.peer_words)
        return self._is_adopted

    def is_over(self, peer_regions: PeerRegions) -> bool:
        """Return whether calls with `peer_regions` need not ask any more."""
        return self._is_adopted and not unready(peer_regions)


def unready(peer_regions: PeerRegions) -> list[int]:
    """Return the joiners among the members of `peer_regions` that have not mapped all others' outboxes yet."""
    return [peer_regions.members[peer] for peer in peer_regions.peers if peer_regions.words[peer][LIFE] == LIFE_BORN]
