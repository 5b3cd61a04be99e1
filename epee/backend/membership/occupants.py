"""Which process has which rank of a group: what this rank has taken over of the view.

A rank of the group is a slot of the job. Who is in the view has a part in the group only if it was born into it or was
taken in with an outbox for it (`bootstrap/home.py`): the slots of a group made with `new_group` may be taken by
processes that know nothing of it.

Who writes, who reads: written where decisions are taken over (`epochs.py`, `intake.py`), under the engine's lock; every
step of that may run twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ...errors import PeerError
from ...view.awaited import kind_of_loss
from ...view.job import Seat
from ...view.protocol.messages import DEAD, Decision, Member
from ..bootstrap.home import OutboxEndpoint, outbox_of
from ..options import MAX_RANKS


class Occupants:
    """The processes of one group's ranks.

    Attributes:
        lane: id of the group's lane.
        is_home: the group is the first of its job: processes that join the job join it.
        slot_of: of each rank, and of those that may come beyond the last one.
        rank_of: slot -> rank.
        known: the view in which the lane begins.
        epoch: of the last decision that has been taken over in whole.
        incarnations: slot -> incarnation that has a part in this lane.
        removed: rank -> (epoch that began without it, cause).
    """

    def __init__(self, seat: Seat, known: Decision) -> None:
        self.lane = seat.lane
        self.is_home = seat.is_home
        self.slot_of = list(range(MAX_RANKS)) if seat.is_home else seat.slots  # who is beyond may come
        self.rank_of = {slot: rank for rank, slot in enumerate(self.slot_of)}
        self.known = known
        self.epoch = 0
        self.incarnations: dict[int, int] = {}
        self.removed: dict[int, tuple[int, str]] = {}

    def begin(self, ranks: Iterable[int], joined: bool) -> list[int]:
        """Begin with the view that is known; return who of the group is in it. `ranks`: those that have an outbox."""
        known = self.known
        self.epoch = known.epoch
        self.incarnations = {m.slot: m.incarnation for m in known.members if m.slot in self.rank_of}
        present = {member.slot for member in self.ours(known).members}
        members = [rank for rank, slot in enumerate(self.slot_of) if slot in present]
        self.removed = {rank: (self.epoch, DEAD) for rank in ranks if rank not in members}
        for removal in known.removed if joined else ():  # one of them had this process's own rank, maybe
            if removal.slot in self.rank_of:
                self.removed[self.rank_of[removal.slot]] = (self.epoch, removal.cause)
        return members

    def ours(self, decision: Decision) -> Decision:
        """Return `decision` without processes that have taken a slot but have no part in this lane."""
        members = tuple(member for member in decision.members if self._has_part(member))
        return Decision(decision.epoch, members, *decision[2:])

    def _has_part(self, member: Member) -> bool:
        is_known = self.incarnations.get(member.slot, member.incarnation) == member.incarnation
        return is_known or self.part_of_newcomer(member) is not None

    def part_of_newcomer(self, member: Member) -> OutboxEndpoint | None:
        """Return the part of a process that has taken a rank of this group and is not known here yet; else None."""
        if member.slot not in self.rank_of or self.incarnations.get(member.slot) == member.incarnation:
            return None
        return outbox_of(member, self.lane)  # None: it came to the job without a part in this group

    def remove(self, decision: Decision) -> Iterator[int]:
        """Note whom a decision removes, and yield the rank of each."""
        for removal in decision.removed:
            if removal.slot in self.rank_of and self.incarnations.get(removal.slot) == removal.incarnation:
                rank = self.rank_of[removal.slot]
                self.removed[rank] = (decision.epoch, removal.cause)
                yield rank

    def removed_in(self, epoch: int) -> list[int]:
        """Return the ranks that the decision of `epoch` has removed, as far as it is still known."""
        return sorted(rank for rank, (when, _) in self.removed.items() if when == epoch)

    def removed_after(self, epoch: int) -> set[int]:
        """Return the ranks that later decisions than that of `epoch` have removed."""
        return {rank for rank, (when, _) in self.removed.items() if when > epoch}

    def kind_of_loss(self, ranks: Iterable[int]) -> tuple[type[PeerError], str]:
        """Return the type of the error that tells of the loss of these ranks, and the causes in words."""
        return kind_of_loss(self.removed[rank][1] for rank in ranks)
