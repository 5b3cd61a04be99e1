"""The members of a group in an epoch, and peer regions of only those.

Collectives (`backend/cuda/`) use positions among the members, not ranks: shares, segments and sums run over positions
in ascending order of rank. When the group is created both are the same. When a view leaves ranks out, `narrow` makes
peer regions of the rest over the same memory; `backend/cuda/arguments.py` picks the members' tensors out of the user's
lists (one per rank that the group counts, lost ones included), and entries of lost ranks are not touched. When a view
takes in a rank that has never been in the group, `replace` extends the full peer regions; the other ranks map nothing
anew (decision 42).

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
from ..outbox import Outboxes, open_outbox, sites_of
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


def narrow(box: Outboxes, members: Sequence[int], epoch: int, group_size: int | None = None) -> Outboxes:
    """Return outboxes of `members` (ranks of the group, ascending, this one included) for calls of `epoch`.

    In these calls the group counts `group_size` ranks; None: as many as in `box`.

    The memory, the staging ring and the cells are those of `box`, which must contain all members and must stay open; a
    call of the new epoch has the old cell of its number and another tag.

    Raises:
        InvalidState: this rank is not among the members, or a member is not in `box`.
    """
    own = box.members[box.rank]
    if own not in members or list(members) != sorted(set(members)) or not set(members) <= set(box.members):
        raise InvalidState(f"rank {own} cannot make outboxes of ranks {list(members)} out of {list(box.members)}")
    positions = [box.members.index(rank) for rank in members]
    new: Outboxes = object.__new__(Outboxes)
    for name in _SHARED:
        setattr(new, name, getattr(box, name))
    new.group_size = box.group_size if group_size is None else group_size
    new.members = tuple(members)
    new.sites = sites_of(new.members, box.host_of)
    new.num_ranks = len(positions)
    new.rank = new.members.index(own)
    new.epoch = epoch
    new.epoch_bits = tag(epoch, 0)
    new.regions = [box.regions[position] for position in positions]
    new.words = [box.words[position] for position in positions]
    new.address = [box.address[position] for position in positions]
    new.own, new.own_address = box.own, box.own_address
    new.peers = tuple(position for position in range(new.num_ranks) if position != new.rank)
    new.peer_words = [new.words[position] for position in new.peers]
    new.cells_free_until = 0  # found out at the first call
    new.forget_views()
    return new


def counting(box: Outboxes, group_size: int) -> Outboxes:
    """Return the same outboxes for the plan of a call with `group_size` entries in its lists, zeros for excluded ranks.

    They must be as many as the highest member needs; if they are fewer the plan's own checks fail.
    """
    if box.num_ranks == box.group_size == group_size:
        return box
    new = copy.copy(box)
    new.group_size = max(group_size, 1 + box.members[-1])
    new.num_roots = box.group_size
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


def fitted(make: Make, size: list[int], mask: Mask, box: Outboxes) -> Plan:
    """Plan a call of a group whose size follows the ranks that take part, for the length of the given lists.

    A program may have asked for the size before a loss was shown or afterwards, and a rank may take part in the call
    that is lost before it ends. So lists may have an entry for each rank that the group counts, or for those below the
    lost ranks at its end. What lost ranks put into the call has no place in shorter lists, and is dropped.

    Args:
        make: plans the call.
        size: one element, how many entries are expected; what has fitted is noted, and holds when the call is planned
            again.
        mask: knows who is lost.
        box: the outboxes with which the call is to run.

    Raises:
        TooShort: the lists end before members that are not known to be lost.
    """
    try:
        beyond = [rank for rank in box.members if rank >= size[0]] if size[0] <= box.members[-1] else ()
        is_short = bool(beyond) and mask.has_lost(beyond, box.epoch)
        return make(_shortened(box, size[0]) if is_short else counting(box, size[0]))
    except InvalidArgument as exc:
        error = exc
    for longer in range(1 + box.members[-1], 1 + max(box.group_size, size[0])):
        with ignored(InvalidArgument):
            plan = make(counting(box, longer))
            size[0] = longer
            return plan
    own = box.members[box.rank]
    for shorter in range(box.members[-1], own, -1):
        beyond = [rank for rank in box.members if rank >= shorter]
        with ignored(InvalidArgument):
            plan = make(_shortened(box, shorter))
            if mask.has_lost(beyond, box.epoch):
                size[0] = shorter
                return plan
            error = TooShort(error, beyond, box.epoch)
            break
    raise error


def _shortened(box: Outboxes, num_entries: int) -> Outboxes:
    """Return the same outboxes for the plan of a call whose lists end before the highest members, which are lost."""
    new = copy.copy(counting(box, box.group_size))
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


def replace(box: Outboxes, rank: int, region: SharedRegion) -> None:
    """Read `rank`'s outbox in `region` from now on; `box` has all ranks. Regions narrowed before keep the old one.

    A rank above those that `box` has makes it longer; ranks between them are blank until a process joins. May be
    repeated where it was broken off.

    Raises:
        ResourceError: there is no memory for a blank.
    """
    if rank > box.num_ranks:
        blank = make_blank(region.nbytes)
        for hole in range(box.num_ranks, rank):
            box.blanks.add(hole)
            _put(box, hole, blank)
    _put(box, rank, region)
    box.blanks.discard(rank)
    box.num_ranks = box.group_size = len(box.regions)
    box.members = tuple(range(box.num_ranks))
    box.peers = tuple(peer for peer in box.members if peer != box.rank)
    box.peer_words = [box.words[peer] for peer in box.peers]
    box.forget_views()


def _put(box: Outboxes, rank: int, region: SharedRegion) -> None:
    box.regions[rank : rank + 1] = [region]
    box.words[rank : rank + 1] = [region.words(0, len(box.own))]
    box.address[rank : rank + 1] = [region.address]


def position_of(box: Outboxes, rank: int, name: str) -> int:
    """Return where `rank` of the group stands among the members.

    Raises:
        RankFailedError: it has been left out of the view.
    """
    if len(box.members) == box.group_size and rank < box.group_size:
        return rank
    if rank not in box.members:
        raise RankFailedError(
            f"{name}: rank {rank} is not in the view any more (epoch {box.epoch}, active ranks "
            f"{', '.join(map(str, box.members))}); choose one of them",
            [rank],
            name,
            0,
            box.epoch,
            "left out of the view",
        )
    return box.members.index(rank)
