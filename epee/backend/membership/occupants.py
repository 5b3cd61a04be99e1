"""Which process has which rank of a group: what this rank has taken over of the view.

A rank of the group is a slot of the job. Who is in the view has a part in the group only if it was born into it, joined
the job with an outbox for it (`bootstrap/home.py`), or was taken in by a decision that says so (`Part`): the slots of a
group made with `new_group` may be taken by processes that know nothing of it. A member that was put out of the group
stays in the job; if it comes back it is as new to the group as a new process. So for a group a member is its slot and
the epoch since which it takes part.

Which rank has a slot that comes new to a group made with `new_group` says its notice, which stands in the decision.

Who writes, who reads: written where decisions are taken over (`epochs.py`, `intake.py`), under the engine's lock; every
step of that may run twice.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping

from ...errors import PeerError
from ...view.awaited import kind_of_loss
from ...view.job import Seat
from ...view.protocol.decision import parts_of
from ...view.protocol.messages import DEAD, PUT_OUT, Decision, Member
from ..bootstrap.home import OutboxEndpoint, OutboxNotice, notices_of, outbox_of
from ..options import MAX_RANKS
from ..outbox import OutboxOwner

Notices = Mapping[int, OutboxNotice]  # by slot


class Occupants:
    """The processes of one group's ranks.

    Attributes:
        lane: id of the group's lane.
        is_home: the group is the first of its job: processes that join the job join it.
        slot_of: of each rank, and of those that may come beyond the last one; no slot of the job where none is known.
        rank_of: slot -> rank, where it is known.
        known: the view in which the lane begins.
        epoch: of the last decision that has been taken over in whole.
        incarnations: slot -> incarnation of the process that has a part in this lane, or had one and is in the job.
        since: slot -> the epoch since which it takes part.
        removed: rank -> (epoch that began without it, cause).
    """

    def __init__(self, seat: Seat, known: Decision) -> None:
        self.lane = seat.lane
        self.is_home = seat.is_home
        nobody = range(MAX_RANKS, 2 * MAX_RANKS)
        self.slot_of = list(range(MAX_RANKS)) if seat.is_home else [*seat.slots, *nobody[len(seat.slots) :]]
        self.rank_of = {slot: rank for rank, slot in enumerate(self.slot_of) if slot < MAX_RANKS}
        self.known = known
        self.epoch = 0
        self.incarnations: dict[int, int] = {}
        self.since: dict[int, int] = {}
        self.removed: dict[int, tuple[int, str]] = {}

    def begin(self, ranks: Iterable[int], joined: bool) -> list[int]:
        """Begin with the view that is known; return who of the group is in it. `ranks`: those that have an outbox."""
        known = self.known
        self.epoch = known.epoch
        if joined:
            parts = self.parts(known)
            self.incarnations = {m.slot: m.incarnation for m in known.members if m.slot in parts}
        else:
            self.incarnations = {m.slot: m.incarnation for m in known.members if m.slot in self.rank_of}
        self.since = parts_of(self.ours(known), self.lane)
        members = sorted(self.rank_of[slot] for slot in self.since)
        self.removed = {rank: (self.epoch, DEAD) for rank in ranks if rank not in members}
        for removal in known.removed if joined else ():  # one of them had this process's own rank, maybe
            if removal.slot in self.rank_of:
                self.removed[self.rank_of[removal.slot]] = (self.epoch, removal.cause)
        return members

    def parts(self, known: Decision) -> dict[int, OutboxEndpoint]:
        """Return the outboxes of all who have a part in the lane in a view, by slot, for who comes in with it."""
        found, since, notices = {}, parts_of(known, self.lane), notices_of(known, self.lane)
        for member in known.members:
            when = since.get(member.slot)
            part = None if when is None else self._part(member, when, notices)
            if part is not None and self._knows_rank(member.slot, notices):
                found[member.slot] = part
        return found

    def _part(self, member: Member, when: int, notices: Notices) -> OutboxEndpoint | None:
        """Return the outbox of a member that takes part since epoch `when`, if the lane belongs to it."""
        if self.is_home and when == member.incarnation:
            return outbox_of(member, self.lane)
        notice = notices.get(member.slot)
        return None if notice is None else notice.endpoint(member, self.lane)

    def _knows_rank(self, slot: int, notices: Notices) -> bool:
        """Return whether the rank of a slot is known, or its notice says which and nobody else has it."""
        notice = notices.get(slot)
        if slot not in self.rank_of and notice is not None and self.slot_of[notice.rank] >= MAX_RANKS:
            self.slot_of[notice.rank] = slot
            self.rank_of[slot] = notice.rank
        return slot in self.rank_of

    def ours(self, decision: Decision) -> Decision:
        """Return `decision` without processes that have taken a slot but have no part in this lane."""
        told = {part[1:3] for part in decision.parts if part.lane == self.lane}
        notices = notices_of(decision, self.lane)
        members = tuple(member for member in decision.members if self._is_ours(member, member[:2] in told, notices))
        return Decision(decision.epoch, members, *decision[2:])

    def _is_ours(self, member: Member, is_told: bool, notices: Notices) -> bool:
        if not self._knows_rank(member.slot, notices):
            return False
        if is_told or not self.incarnations or self.incarnations.get(member.slot) == member.incarnation:
            return True
        return self.is_home and outbox_of(member, self.lane) is not None

    def newcomers(
        self, decision: Decision, since: Mapping[int, int] | None = None
    ) -> Iterator[tuple[Member, int, OutboxEndpoint | None]]:
        """Yield who comes into this lane by `decision`: the member, since when, its outbox; None: it is gone again.

        `since`: of those who take part before it; None: as far as decisions have been taken over.
        """
        parts, known = parts_of(decision, self.lane), self.since if since is None else since
        notices = notices_of(decision, self.lane)
        for member in decision.members:
            when = parts.get(member.slot)
            if when is None or known.get(member.slot) == when:
                continue
            if when == member.incarnation:  # else it came to the job without a part in this group
                if self.is_home and member.slot in self.rank_of:
                    part = outbox_of(member, self.lane)
                    if part is not None:
                        yield member, when, part
            elif self._knows_rank(member.slot, notices):
                yield member, when, self._part(member, when, notices)

    def owners(self, decision: Decision, ranks: Container[int]) -> Iterator[OutboxOwner]:
        """Yield whose the outboxes of these ranks are in a view."""
        for member in decision.members:
            if self.rank_of.get(member.slot) in ranks:
                yield OutboxOwner(member.nonce, self.lane, member.slot)

    def take_in(self, member: Member, when: int) -> None:
        """Note that a member takes part since epoch `when`."""
        self.incarnations[member.slot] = member.incarnation
        self.since[member.slot] = when

    def remove(self, decision: Decision) -> Iterator[int]:
        """Note whom a decision removes, or puts out, and yield the rank of each."""
        causes = {removal.slot: removal.cause for removal in decision.removed}
        parts = parts_of(decision, self.lane)
        for slot, when in list(self.since.items()):
            if slot in causes or parts.get(slot) != when:
                rank = self.rank_of[slot]
                self.removed[rank] = (decision.epoch, causes.get(slot, PUT_OUT))
                yield rank

    def is_over(self, decision: Decision) -> None:
        """Note that a decision has been taken over in whole."""
        parts = parts_of(decision, self.lane)
        self.since = {slot: when for slot, when in self.since.items() if parts.get(slot) == when}
        self.epoch = decision.epoch

    def present(self, view: Decision) -> dict[int, int]:
        """Return who takes part in a view, which may be newer than what was taken over: rank -> slot."""
        return {self.rank_of[slot]: slot for slot in parts_of(self.ours(view), self.lane) if slot in self.rank_of}

    def removed_in(self, epoch: int) -> list[int]:
        """Return the ranks that the decision of `epoch` has removed, as far as it is still known."""
        return sorted(rank for rank, (when, _) in self.removed.items() if when == epoch)

    def removed_after(self, epoch: int) -> set[int]:
        """Return the ranks that later decisions than that of `epoch` have removed."""
        return {rank for rank, (when, _) in self.removed.items() if when > epoch}

    def was_put_out(self, rank: int) -> bool:
        """Return whether a rank that takes no part was put out as somebody asked, and is no loss."""
        return self.removed.get(rank, (0, ""))[1] == PUT_OUT

    def kind_of_loss(self, ranks: Iterable[int]) -> tuple[type[PeerError], str]:
        """Return the type of the error that tells of the loss of these ranks, and the causes in words."""
        return kind_of_loss(self.removed[rank][1] for rank in ranks)
