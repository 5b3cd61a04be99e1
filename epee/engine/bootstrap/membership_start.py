"""The start of a rank's membership in a group: from its creation, by a view that took it in, or by a request.

Order: the membership is registered before anything is asked of the view, so every later decision is received; then the
view in which it begins is determined. Until there is an engine (`GroupMembership.attach`) decisions are kept, and a
freeze is answered with no calls made (`membership/agent_hooks.py`).

This process writes its own board, when it asks. A crash on the way is the death of a member, or of no member.
"""

from __future__ import annotations

import time
from functools import partial

from ...errors import CommTimeoutError, RankFailedError
from ...view.awaited import Awaited
from ...view.job import JobHandle
from ...view.process.board import LaneRow
from ...view.protocol.messages import Decision
from ...view.transport.auth import Token
from ..membership.agent_hooks import AgentHooks
from ..membership.rank_table import RankTable
from .group_note import Offer, OutboxEndpoint, takes_part

ASK_SLICE_S = 0.2


class MembershipStart:
    """A group's membership up to the view in which it begins here.

    Attributes:
        runtime: the control plane of this process.
        hooks: the hooks that the agent thread calls.
    """

    def __init__(self, job_handle: JobHandle, mode: str, joined_by: Decision | None = None, asks: bool = False) -> None:
        """Take part in the control plane, which `joined_by` may have taken this process into; `attach` comes later.

        `asks`: this process, which is in the job, asks to be taken into the group (`ask`).
        """
        fault_mode, _, self._on_stall = mode.partition("/")
        self.runtime = job_handle.job.runtime
        self._takes_part = partial(takes_part, job_handle.lane)  # for buffers, which must not keep the group alive
        self._job = job_handle.job
        self._raises = fault_mode == "raise"
        self._slots = job_handle.slots  # of the ranks that this process was given
        self._is_joiner = asks or joined_by is not None
        self._rank_table = RankTable(job_handle, joined_by or self.runtime.view(), self._is_joiner)
        self.hooks = hooks = AgentHooks(self.runtime, self._rank_table, self._raises, self._is_joiner)
        if asks:
            hooks.enter_as(job_handle.job.slot)
        self._row: LaneRow | None
        called = hooks.freeze, hooks.thaw, hooks.decided, hooks.trouble, hooks.asked
        self._row = row = self.runtime.register(job_handle.lane, *called)
        self._awaited = Awaited(self.runtime, self._on_stall)
        self._awaited.begin(job_handle.lane, row)
        self._rank_table.known = joined_by or self.runtime.view()

    @property
    def epoch(self) -> int:
        """The epoch that this process knew when the membership began; it receives all that follow."""
        return self._rank_table.known.epoch

    def begin(self, epoch: int, timeout_s: float) -> None:
        """Wait until the view of `epoch`, in which the group begins on all ranks, is known here.

        Raises:
            CommTimeoutError: it does not come.
            RankFailedError: a rank of the group is not in it.
        """
        if self._rank_table.known.epoch < epoch:
            self.runtime.await_decision(epoch - 1, timeout_s)
            found = [decision for decision in list(self.hooks.decisions) if decision.epoch == epoch]
            if not found:
                text = f"init: epoch {epoch} of the view did not come; is a rank in another job?"
                raise CommTimeoutError(text, has_job=True)
            self._rank_table.known = found[0]
        present = {member.slot for member in self._rank_table.known.members}
        lost = [rank for rank in range(len(self._slots)) if self._slots[rank] not in present]
        if lost:
            names = ", ".join(map(str, lost))
            raise RankFailedError(
                f"init: rank {names} has left or died while the group was made, so it is not in the view of epoch "
                f"{epoch}; see its output, then start all ranks",
                lost,
            )

    def ask(self, offer: Offer, timeout_s: float) -> Decision:
        """Show that this process, which is in the job, asks to join; return the decision that takes it in.

        Raises:
            CommTimeoutError: no member has taken it in. EvictedError, NoQuorumError: as the agent reports.
        """
        deadline = time.monotonic() + timeout_s
        self.hooks.enter_as(self._job.slot, offer.locator.pack())
        assert self._row is not None, "`close` comes later"
        self._row.tell(offer.pack())
        while True:
            epoch = self.runtime.view().epoch
            entry = next((decision for decision in list(self.hooks.decisions) if self.hooks.is_entry(decision)), None)
            if entry is not None:
                seen = (self._rank_table.known, *list(self.hooks.decisions))
                self._rank_table.note_before(max((d for d in seen if d.epoch < entry.epoch), key=lambda d: d.epoch))
                self._rank_table.known = entry
                self.hooks.begin_with(entry)
                return entry
            if time.monotonic() > deadline:
                raise CommTimeoutError(
                    f"rank {offer.rank} asked to join, and no member has admitted it within {timeout_s:.1f} s; a "
                    "member must call recover_ranks",
                    has_job=True,
                )
            self.runtime.await_decision(epoch, ASK_SLICE_S)

    def parts(self, decision: Decision) -> dict[int, OutboxEndpoint]:
        """Return the outboxes of the members of the view that took this process in, by rank."""
        ranks = self._rank_table.ranks_in(decision)
        return {ranks[slot]: part for slot, part in self._rank_table.parts(decision).items()}

    def is_new(self, rank: int, decision: Decision) -> bool:
        """Return whether `rank` joins the group by this very decision."""
        return self._rank_table.since_in(decision).get(rank) == decision.epoch

    @property
    def place(self) -> tuple[int, list[int], bool]:
        """The group's id, slots of its initial members (in a job's first group of all), whether it is that."""
        rank_table = self._rank_table
        return rank_table.lane, rank_table.slot_of if rank_table.is_home else [*rank_table.founders], rank_table.is_home

    @property
    def token(self) -> Token:
        """The job's token, which proves records."""
        return self._job.directory.token

    def join(self, decision: Decision) -> None:
        """Begin with the view that took this process in, and fetch the decisions since."""
        self.hooks.join(decision)

    def since(self) -> dict[int, int]:
        """Return since which epoch each rank takes part, in the view in which the group begins here."""
        return self._rank_table.since_in(self._rank_table.known)

    def span(self, decision: Decision) -> None:
        """Record that the group runs over several hosts; `decision` has taken this process in."""
        self.hooks.hosts = {member.slot: member.host for member in decision.members}
