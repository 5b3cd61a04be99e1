"""Which ranks of a group take part, and outboxes of only those.

Collectives (`collectives/`) know positions among the members, not ranks: shares, segments and sums run over positions
in ascending order of rank. At birth both are the same. When a view leaves ranks out, `narrow` makes outboxes of the
rest over the same memory; `calls.py` picks the members' tensors out of the user's lists (one per rank of the group,
always) and what belongs to lost ranks is not touched.

Who writes, who reads: nothing here is shared with other processes; narrowing means not reading some of them any more.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ..errors import EpeeError, InvalidState, RankFailedError
from ..memory.host import HostRegion
from ..memory.signals import tag
from .outbox import Outboxes

logger = logging.getLogger("epee")

_SHARED = (
    "group_size",
    "first_cell",
    "verdict_base",
    "lane_base",
    "lane_data",
    "payload_bytes",
    "staging_bytes",
    "ring",
)


def narrow(box: Outboxes, members: Sequence[int], epoch: int) -> Outboxes:
    """Return outboxes of `members` (ranks of the group, ascending, this one included) for calls of `epoch`.

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
    new.members = tuple(members)
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
    new._views = {}
    return new


def attach_outbox(blob: bytes, pid: int, like: Outboxes) -> HostRegion:
    """Map the outbox of a process that joins. One that has died again already gets a blank one, which stays blank.

    Raises:
        ResourceError: there is no memory.
    """
    nbytes = like.payload_bytes
    try:
        region = HostRegion.attach(blob)
        if region.owner_pid == pid and region.nbytes >= nbytes:
            return region
        region.close()
    except EpeeError as exc:
        logger.info("the outbox of process %d cannot be mapped (%s); its death will be noticed", pid, exc)
    return HostRegion.create(nbytes, "blank")


def replace(box: Outboxes, rank: int, region: HostRegion) -> None:
    """Read `rank`'s outbox in `region` from now on; `box` has all ranks. What was narrowed before keeps the old one."""
    num_words = len(box.own)
    box.regions[rank] = region
    box.words[rank] = region.words(0, num_words)
    box.address[rank] = region.address
    box.peer_words = [box.words[peer] for peer in box.peers]
    box._views = {}


def position_of(box: Outboxes, rank: int, name: str) -> int:
    """Return where `rank` of the group stands among the members.

    Raises:
        RankFailedError: it has been left out of the view.
    """
    if len(box.members) == box.group_size:
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
