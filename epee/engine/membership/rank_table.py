"""The rank table of a group: the process of each rank, as far as this rank has applied the decisions of the view.

A rank of the group is a slot of the job. A process in the view has a part in the group only if it was an initial
member, joined the job with an outbox for it (`bootstrap/group_note.py`), or was taken in by a decision that says so
(`Part`): the slots of a group made with `new_group` may be taken by processes that are not in it. A member that was
evicted from the group stays in the job; if it returns it is as new to the group as a new process. So for a group a
member is its slot and the epoch since which it takes part.

The rank of a slot follows from the decision alone, so it is the same at all ranks, whatever they have seen before:

    the first group of a job    its slot
    a slot of initial members   the rank that it began with; it keeps that, and no other slot gets it
    any other                   the rank in its locator, which is in the decision as long as it takes part

Ranks beyond the initial ones are unassigned while no process has them: a slot that had one may return with another, and
another slot may have it. So queries about the past of a slot take an epoch (`rank_at`).

The table is written where decisions are applied (`group_membership.py`, `members.py`), under the engine's lock; every
step of that may run twice. Views that are not applied yet are only read.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from typing import NamedTuple

from ...errors import PeerError
from ...view.awaited import kind_of_loss
from ...view.job import JobHandle
from ...view.protocol.decision import parts_of
from ...view.protocol.messages import DEAD, PUT_OUT, Decision, Member
from ..bootstrap.group_note import OutboxEndpoint, OutboxLocator, locators_of, outbox_of
from ..limits import MAX_RANKS
from ..outbox import OutboxOwner

Locators = Mapping[int, OutboxLocator]  # by slot


class Coming(NamedTuple):
    """A process that joins a group by a decision.

    Attributes:
        member: the process.
        since: the epoch since which it takes part.
        rank: in the group.
        part: its outbox; None: it has left already.
    """

    member: Member
    since: int
    rank: int
    part: OutboxEndpoint | None


class RankTable:
    """The processes of one group's ranks.

    Args:
        job_handle: the job handle of the group; the slots of its initial members are the first ones of it.
        known: the view in which the group begins, as far as it is known.
        joined: this process joins the running group.

    Attributes:
        group_id: id of the group.
        is_home: the group is the first of its job: processes that join the job join it.
        founders: slots of the initial members of a group that is not the first.
        slot_of: per rank the slot that has it, or had it last; no slot of the job where no process is known.
        rank_of: slot -> the rank that it has, or had last, as far as decisions have been applied.
        known: the view in which the group begins.
        epoch: of the last decision that has been applied completely.
        incarnations: slot -> incarnation of the process that has a part in this group, or had one and is in the job.
        since: slot -> the epoch since which it takes part.
        removed: rank -> (epoch that began without it, cause).
    """

    def __init__(self, job_handle: JobHandle, known: Decision, joined: bool = False) -> None:
        self.group_id = job_handle.group_id
        self.is_home = job_handle.is_home
        self.founders = () if job_handle.is_home else tuple(job_handle.slots)
        nobody = range(MAX_RANKS, 2 * MAX_RANKS)
        self.slot_of = list(range(MAX_RANKS)) if job_handle.is_home else [*self.founders, *nobody[len(self.founders) :]]
        self.rank_of = {slot: rank for rank, slot in enumerate(self.slot_of) if slot < MAX_RANKS}
        self._had = {slot: [(0, rank)] for slot, rank in self.rank_of.items()}  # since when, which rank; ascending
        self.known = known
        self.epoch = 0
        self.incarnations: dict[int, int] = {}
        self.since: dict[int, int] = {}
        self.removed: dict[int, tuple[int, str]] = {}
        self._joined, self._has_begun = joined, False
        self._outsiders: frozenset[int] = frozenset()  # slots of ranks that take no part

    def begin_with(self, view: Decision) -> None:
        """Let the group begin with the members of a view, and without the slots of others."""
        self.known = view
        self._outsiders = frozenset(self.rank_of).difference(member.slot for member in view.members)

    def begin(self, ranks: Iterable[int]) -> list[int]:
        """Begin with the known view; return the ranks of the group that are in it.

        `ranks`: those that have an outbox.
        """
        known = self.known
        self.epoch = known.epoch
        if self._joined:
            parts = self.parts(known)
            self.incarnations = {m.slot: m.incarnation for m in known.members if m.slot in parts}
        else:
            self.incarnations = {m.slot: m.incarnation for m in known.members if m.slot in self.rank_of}
        self._has_begun = True
        self.since = parts_of(self.ours(known), self.group_id)
        for slot, rank in self.ranks_in(known).items():
            self._note(slot, rank, self.since[slot])
        members = sorted(self.rank_of[slot] for slot in self.since)
        self.removed = {rank: (self.epoch, DEAD) for rank in ranks if rank not in members}
        for removal in known.removed if self._joined else ():  # one of them had this process's own rank, maybe
            if removal.slot in self.rank_of:
                self.removed[self.rank_of[removal.slot]] = (self.epoch, removal.cause)
        return members

    # ---- contents of decisions, applied or not

    def ranks_in(self, decision: Decision) -> dict[int, int]:
        """Return the members of the group in a decision's view: slot -> rank; of several for a rank the oldest."""
        parts, locators = parts_of(decision, self.group_id), locators_of(decision, self.group_id)
        told = {part[1:3] for part in decision.parts if part.group_id == self.group_id}
        taken: dict[int, int] = {}
        for member in sorted(decision.members, key=lambda member: (parts.get(member.slot, 0), member.slot)):
            rank = self._rank(member.slot, locators.get(member.slot))
            if rank is not None and member.slot in parts and self._is_ours(member, member[:2] in told):
                taken.setdefault(rank, member.slot)
        return {slot: rank for rank, slot in taken.items()}

    def _rank(self, slot: int, locator: OutboxLocator | None) -> int | None:
        """Return the rank of a slot if it takes part."""
        if self.is_home:
            return slot if slot < MAX_RANKS else None
        if slot in self.founders:
            return self.founders.index(slot)
        return None if locator is None or locator.rank < len(self.founders) else locator.rank

    def _is_ours(self, member: Member, is_told: bool) -> bool:
        """Return whether a process of the view, which may have taken a slot of the group, belongs to the group."""
        if is_told:
            return True
        if self.is_home and outbox_of(member, self.group_id) is not None:
            return True
        if self._has_begun:
            return self.incarnations.get(member.slot) == member.incarnation
        return not self._joined and member.slot not in self._outsiders

    def fits(self, slot: int, rank: int) -> bool:
        """Return whether a slot may have a rank, if no process takes part with it."""
        if self.is_home:
            return slot == rank
        if slot in self.founders:
            return self.founders.index(slot) == rank
        return len(self.founders) <= rank < MAX_RANKS

    def parts(self, known: Decision) -> dict[int, OutboxEndpoint]:
        """Return the outboxes of all members of the group in a view, by slot, for a process that joins with it."""
        found, since, locators = {}, parts_of(known, self.group_id), locators_of(known, self.group_id)
        ranks = self.ranks_in(known)
        for member in known.members:
            part = self._part(member, since[member.slot], locators) if member.slot in ranks else None
            if part is not None:
                found[member.slot] = part
        return found

    def _part(self, member: Member, when: int, locators: Locators) -> OutboxEndpoint | None:
        """Return the outbox of a member that takes part since epoch `when`, if the group has it."""
        if self.is_home and when == member.incarnation:
            return outbox_of(member, self.group_id)
        locator = locators.get(member.slot)
        return None if locator is None else locator.endpoint(member, self.group_id)

    def ours(self, decision: Decision) -> Decision:
        """Return `decision` without processes that have taken a slot but have no part in this group."""
        ranks = self.ranks_in(decision)
        members = tuple(member for member in decision.members if member.slot in ranks)
        removed = tuple(removal for removal in decision.removed if removal.slot in self.rank_of)
        return Decision(decision.epoch, members, removed, *decision[3:])

    def newcomers(self, decision: Decision, since: Mapping[int, int] | None = None) -> Iterator[Coming]:
        """Yield the processes that join this group by `decision`.

        `since`: of the members before it; None: as far as decisions have been applied.
        """
        parts, known = parts_of(decision, self.group_id), self.since if since is None else since
        locators, ranks = locators_of(decision, self.group_id), self.ranks_in(decision)
        for member in decision.members:
            when = parts.get(member.slot)
            if member.slot not in ranks or when is None or known.get(member.slot) == when:
                continue
            part = self._part(member, when, locators)
            if when != member.incarnation or (self.is_home and part is not None):
                yield Coming(member, when, ranks[member.slot], part)

    def present(self, view: Decision) -> dict[int, int]:
        """Return the members in a view, which may be newer than the applied one: rank -> slot."""
        return {rank: slot for slot, rank in self.ranks_in(view).items()}

    def since_in(self, view: Decision) -> dict[int, int]:
        """Return since which epoch each rank takes part in a view."""
        parts = parts_of(view, self.group_id)
        return {rank: parts[slot] for slot, rank in self.ranks_in(view).items()}

    def owners(self, decision: Decision, ranks: Container[int]) -> Iterator[OutboxOwner]:
        """Yield the owners of the outboxes of these ranks in a view."""
        found = self.ranks_in(decision)
        for member in decision.members:
            if found.get(member.slot) in ranks:
                yield OutboxOwner(member.nonce, self.group_id, member.slot)

    # ---- applied decisions

    def note_before(self, previous: Decision) -> None:
        """Note the rank table before the decision that takes this process in: it may remove some ranks."""
        for slot, rank in self.ranks_in(previous).items():
            self._note(slot, rank, 0)

    def take_in(self, one: Coming) -> None:
        """Note that a member takes part."""
        slot = one.member.slot
        self._note(slot, one.rank, one.since)
        self.incarnations[slot] = one.member.incarnation
        self.since[slot] = one.since

    def _note(self, slot: int, rank: int, since: int) -> None:
        """Note which rank a slot has since an epoch."""
        had = self._had.setdefault(slot, [])
        if not had or had[-1][1] != rank:
            had.append((since, rank))
        before = self.rank_of.get(slot, rank)
        if before != rank and self.slot_of[before] == slot:
            self.slot_of[before] = MAX_RANKS + before  # assigned to no slot
        self.rank_of[slot], self.slot_of[rank] = rank, slot

    def slots_of(self, ranks: Iterable[int]) -> dict[int, int]:
        """Return the slot of each of these ranks that has one, or had it last and got no other rank."""
        return {rank: self.slot_of[rank] for rank in ranks if self.slot_of[rank] < MAX_RANKS}

    def rank_at(self, slot: int, epoch: int) -> int | None:
        """Return the rank that a slot had in an epoch, or before it; None where that is not known."""
        return next((rank for since, rank in reversed(self._had.get(slot, [])) if since <= epoch), None)

    def remove(self, decision: Decision) -> Iterator[int]:
        """Note the processes that a decision removes, or evicts, and yield the rank of each."""
        causes = {removal.slot: removal.cause for removal in decision.removed}
        parts = parts_of(decision, self.group_id)
        for slot, when in list(self.since.items()):
            if slot in causes or parts.get(slot) != when:
                rank = self.rank_of[slot]
                self.removed[rank] = (decision.epoch, causes.get(slot, PUT_OUT))
                yield rank

    def is_over(self, decision: Decision) -> None:
        """Note that a decision has been applied completely."""
        parts = parts_of(decision, self.group_id)
        self.since = {slot: when for slot, when in self.since.items() if parts.get(slot) == when}
        self.epoch = decision.epoch

    def removed_in(self, epoch: int) -> list[int]:
        """Return the ranks that the decision of `epoch` has removed, as far as it is still known."""
        return sorted(rank for rank, (when, _) in self.removed.items() if when == epoch)

    def removed_after(self, epoch: int) -> set[int]:
        """Return the ranks that later decisions than that of `epoch` have removed."""
        return {rank for rank, (when, _) in self.removed.items() if when > epoch}

    def was_put_out(self, rank: int) -> bool:
        """Return whether a rank that takes no part was excluded on request, and is no loss."""
        return self.removed.get(rank, (0, ""))[1] == PUT_OUT

    def kind_of_loss(self, ranks: Iterable[int]) -> tuple[type[PeerError], str]:
        """Return the type of the error that reports the loss of these ranks, and the causes in words."""
        return kind_of_loss(self.removed[rank][1] for rank in ranks)
