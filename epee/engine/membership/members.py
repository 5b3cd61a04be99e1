"""The members of a group in an epoch, and peer regions of only those.

Collectives (`backend/collectives/`) use positions among the members, not ranks: shares, segments and sums run over
positions in ascending order of rank. When the group is created both are the same. When a view leaves ranks out,
`narrow` makes peer regions of the rest over the same memory; `backend/collectives/arguments.py` picks the members'
tensors out of the user's lists (one per rank that the group counts, lost ones included), and entries of lost ranks are
not touched. When a view takes in a rank that has never been in the group, `replace` extends the full peer regions; the
other ranks map nothing anew (decision 42).

Nothing here is shared with other processes; narrowing means not reading some of them any more.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence

from ...errors import AuthError, InvalidArgument, InvalidState, ProtocolError, RankFailedError, ResourceError, ignored
from ...memory.shared import SharedRegion
from ...memory.signals import tag
from ...view.process.detector import is_leaving
from ..bootstrap.group_note import OutboxEndpoint
from ..outbox import PeerRegions, open_outbox, sites_of
from ..plan import Make, Plan
from .sizes import Mask

logger = logging.getLogger("epee")

_SHARED = (
    "blanks",
    "capacity",
    "first_cell",
    "verdict_base",
    "lane_base",
    "lane_data",
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
    except InvalidArgument as exc:
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
    except (AuthError, ProtocolError) as exc:
        logger.info("the outbox of process %d is not to be had (%s); it will be seen to go", part.pid, exc)
        return None
    except ResourceError as exc:
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
