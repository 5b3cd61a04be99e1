"""Epoch changes of a group: the group's end of the control plane (`view/protocol/PROTOCOL.md`).

Data path: the agent thread calls the hooks (`agent_hooks.py`). They set a bit in the engine's `flags`, which every call
tests anyway, and leave the rest to the thread that drives the group: it applies the decisions (`take_news`), and `heed`
determines their meaning call by call. So none of this is on the path of a call without failures.

    FROZEN   an agreement is in progress: no call completes or starts. The hook takes the engine's lock to set it, so a
             call that is writing results ends first, and the state that the hook reports stays true.
    NEWS     decisions have come that are not applied.
    CHANGING a decision waits for the first call that lacks a rank (`protocol/outcome.py` determines that call).
    TROUBLED calls cannot end well: this process was voted out, or there is no quorum.

`GroupMembership` is the interface of the engine; each part has its own state and does not know it:

    AgentHooks      the agent thread's end: freezes and thaws the group, delivers decisions and errors
    RankTable       the process of each rank, as far as decisions have been applied
    EpochRegions    the peer regions with which each call runs, and the number of ranks that the group counts in it
    CallOutcome     the outcome of a call under the decisions: it continues, moves to a later epoch, or fails
    Joiners         reads the outboxes of joiners; Arrival: whether all can read each other's
    LocalState      the state of the ranks as this process knows it without a call
    Admission       requests of users: the ranks that wait to join, taking them in
    LossResolution  over several hosts: whether all data of lost ranks is here (`replication/loss_resolution.py`)
    Gate            over several hosts: when a view with joiners may be applied (`replication/loss_resolution.py`)

In a group over several hosts the agent thread also notifies the links' thread of each view (`replication/links.py`). A
decision that removes a rank of another host is applied at once, but no call is decided, begun or completed and no
message of that rank ended until the mirrors of this host are settled.

The start: the membership is registered before anything is asked of the view, so every later decision is received; then
the view in which it begins is determined: that of the creation, one that took this process in, or one that it asked
for. Until there is an engine (`attach`) decisions are kept, and a freeze is answered with no calls made
(`agent_hooks.py`). A process that asks writes its own board; a crash on the way is the death of a member, or of none.

This rank writes its own outbox only. A crash between two steps leaves a rank that is lost in the next epoch.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ...errors import (
    CommTimeoutError,
    EpeeError,
    EvictedError,
    InvalidArgument,
    InvalidState,
    NoQuorumError,
    RankFailedError,
    context,
    expected,
    ignored,
)
from ...link.topology import Roles, one_host
from ...view.awaited import Awaited, kind_of_loss
from ...view.group import GroupInView
from ...view.job import Job, JobHandle
from ...view.process.board import GroupRow
from ...view.protocol.decision import parts_of
from ...view.protocol.messages import EXITED, FOREVER, LEFT, MAY_LIVE, PUT_OUT, Decision, Removal
from ...view.protocol.outcome import Course, cut_of
from ...view.transport.auth import Token
from ..bootstrap.group_note import FOUNDER, IN, Offer, OutboxEndpoint, parse_offers, takes_part
from ..bootstrap.local_state import LocalState, Mark
from ..entry import CHANGING, ENDED, NEWS, TROUBLED
from ..operation import Operation
from ..outbox import LIFE, LIFE_READY, VIEW, OutboxOwner, PeerRegions, consumed_of
from ..p2p.message import Absence, Message
from ..replication.links import GroupLinks
from ..replication.loss_resolution import Gate, LossResolution
from .admission import Admission
from .agent_hooks import AgentHooks
from .call_outcome import LOSS, CallOutcome
from .members import Arrival, EpochRegions, Joiners, TooShort, unready
from .rank_table import RankTable

if TYPE_CHECKING:
    from ..engine import Engine

SHOWN_POLL_S, DEAD_POLL_S = 0.001, 0.005  # between checks
ASK_SLICE_S = 0.2
REFUSAL_S = 1.0  # how long before its timeout a call that waits for a loss is refused, at most


class GroupMembership:
    """The membership of one engine's group.

    Attributes:
        runtime: the control plane of this process.
        hooks: the hooks that the agent thread calls.
        admission: requests of users: the ranks that wait to join, and are to be taken in.
        local_state: the state of the ranks as this process knows it without a call.
    """

    admission: Admission
    local_state: LocalState

    def __init__(self, job_handle: JobHandle, mode: str, joined_by: Decision | None = None, asks: bool = False) -> None:
        """Take part in the control plane, which `joined_by` may have taken this process into; `attach` comes later.

        `asks`: this process, which is in the job, asks to be taken into the group (`ask`).
        """
        fault_mode, _, self._on_stall = mode.partition("/")
        self.runtime = job_handle.job.runtime
        self._takes_part = partial(takes_part, job_handle.group_id)  # for buffers, which must not keep the group alive
        self._job = job_handle.job
        self._raises = fault_mode == "raise"
        self._slots = job_handle.slots  # of the ranks that this process was given
        self._is_joiner = asks or joined_by is not None
        self._rank_table = RankTable(job_handle, joined_by or self.runtime.view(), self._is_joiner)
        self.hooks = hooks = AgentHooks(self.runtime, self._rank_table, self._raises, self._is_joiner)
        if asks:
            hooks.enter_as(job_handle.job.slot)
        self._row: GroupRow | None
        called = hooks.freeze, hooks.thaw, hooks.decided, hooks.trouble, hooks.asked
        self._row = row = self.runtime.register(job_handle.group_id, *called)
        self._awaited = Awaited(self.runtime, self._on_stall)
        self._awaited.begin(job_handle.group_id, row)
        self._rank_table.known = joined_by or self.runtime.view()
        self._links: tuple[GroupLinks, ...] = ()  # none in a group on one host
        self._owners: dict[int, OutboxOwner] = {}  # named in mirrors, by rank
        self._port = 0  # where links with this rank are made
        self._limits: list[tuple[int, int]] = []  # slot, cut: settled before the decision with that cut was applied
        self._offer: Offer | None = None
        self._cuts: dict[int, int] = {}  # by epoch, of decisions that came while ranks were not settled

    # ---- the start

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
        if self.epoch < epoch:
            self._rank_table.known = self.view_at(epoch, timeout_s)
        present = {member.slot for member in self._rank_table.known.members}
        lost = [rank for rank in range(len(self._slots)) if self._slots[rank] not in present]
        if lost:
            names = ", ".join(map(str, lost))
            raise RankFailedError(
                f"init: rank {names} has left or died while the group was made, so it is not in the view of epoch "
                f"{epoch}; see its output, then start all ranks",
                lost,
            )

    def view_at(self, epoch: int, timeout_s: float) -> Decision:
        """Return the view of an epoch that is not before `self.epoch`, once it is known here.

        Raises:
            CommTimeoutError: it does not come.
        """
        until = time.monotonic() + timeout_s
        known = (self._rank_table.known,)
        while not (found := [one for one in (*known, *list(self.hooks.decisions)) if one.epoch == epoch]):
            if time.monotonic() > until or epoch < self.epoch:
                text = f"init: epoch {epoch} of the view did not come; is a rank in another job?"
                raise CommTimeoutError(text, has_job=True)
            self.runtime.await_decision(epoch - 1, max(1e-3, until - time.monotonic()))
            time.sleep(SHOWN_POLL_S)  # it is delivered to the groups a moment after it is shown
        return found[0]

    def begin_with(self, view: Decision) -> None:
        """Begin with the members of a view that all of them know, and fetch the decisions since.

        Others take no part, also those whose process has the slot of a rank.
        """
        self._rank_table.begin_with(view)
        self.hooks.join(view)

    def ask(self, offer: Offer, timeout_s: float) -> Decision:
        """Show that this process, which is in the job, asks to join; return the decision that takes it in.

        Raises:
            CommTimeoutError: no member has taken it in. EvictedError, NoQuorumError: as the agent reports.
        """
        deadline = time.monotonic() + timeout_s
        self.hooks.enter_as(self._job.slot, offer.locator.pack())
        assert self._row is not None, "`close` comes later"
        self._row.tell(offer.after(self._told().values()).pack())
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
        return (
            rank_table.group_id,
            rank_table.slot_of if rank_table.is_home else [*rank_table.founders],
            rank_table.is_home,
        )

    @property
    def job(self) -> Job:
        """The group's job."""
        return self._job

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

    # ---- creation

    def attach(self, engine: Engine) -> None:
        """Attach the engine, which has just been made. A joiner's number of the last call is set to where it joins."""
        rank_table, peer_regions = self._rank_table, engine.peer_regions
        members = rank_table.begin(peer_regions.members)
        joined_in = rank_table.epoch if self._is_joiner else 0
        known, hosts = rank_table.ours(rank_table.known), self._hosts_of_slots(peer_regions)
        self._course = course = Course(rank_table.group_id, known, self._raises, None, self._is_joiner, hosts)
        self._arrival = Arrival(peer_regions, joined_in)
        peer_regions.exports.publish(peer_regions, VIEW, rank_table.epoch)
        if joined_in:
            engine.begin_at(course.first_seq)
        self._epoch_regions = EpochRegions(engine, rank_table, course, members, joined_in)
        self._call_outcome = CallOutcome(engine, rank_table, course, self._epoch_regions)
        since = self._since_of_ranks(rank_table.since)
        here = one_host(peer_regions.rank, peer_regions.capacity)
        topology = next((links.topology for links in self._links), here)
        roles = Roles(topology, [*since], since)
        self._loss_resolution = LossResolution(peer_regions, roles, self._owners, self._all_regions)
        self._gate = Gate(rank_table, self._loss_resolution, self._tell_turned)
        self._is_ready = not joined_in  # a joiner is when it reads all others
        self._intake = Joiners(engine, rank_table, self._epoch_regions, topology.key_of(peer_regions.rank))
        if joined_in:
            self._loss_resolution.begin(joined_in)
            self._intake.begin(joined_in, course.first_seq)
        look = partial(engine.look, self.take_news)
        self.admission = Admission(
            self.runtime, engine, rank_table, course, self._epoch_regions, self._intake, look, self._told
        )
        asked = self.admission, self._read_marks, self._publish_mark
        self.local_state = LocalState(self.runtime, engine, rank_table, *asked)
        self._engine = engine
        own = peer_regions.regions[peer_regions.rank].blob
        assert self._row is not None, "`close` comes later"
        state = IN if self._is_joiner else FOUNDER
        self._offer = Offer(state, peer_regions.rank, peer_regions.group_size, own, self._port, rank_table.epoch)
        self._row.tell(self._offer.pack())
        for rank in rank_table.removed:
            self._leave_out(rank)
        self.hooks.attach(engine, course, self._links)
        self.hooks.on_asked = self.local_state.note
        self._look_settled()

    def _since_of_ranks(self, since: Mapping[int, int]) -> dict[int, int]:
        rank_of = self._rank_table.rank_of
        return {rank_of[slot]: when for slot, when in since.items() if slot in rank_of}

    def use(self, links: GroupLinks) -> None:
        """Have this rank's part between hosts follow the view; before `attach`."""
        self._links, self._owners, self._port = (links,), links.owners, links.port
        self.hooks.hosts = self._hosts_of_slots(links.peer_regions)

    def _hosts_of_slots(self, peer_regions: PeerRegions) -> dict[int, int]:
        ranks = self._rank_table.ranks_in(self._rank_table.known)
        return {slot: peer_regions.host_of[rank] for slot, rank in ranks.items() if rank < len(peer_regions.host_of)}

    def _all_regions(self) -> Iterator[PeerRegions]:
        """Yield the outboxes with which calls run that are open, or may be asked about."""
        yield from self._epoch_regions.all()
        yield self._engine.members
        yield from (op.peer_regions for op in self._engine.queue)
        yield from (past.peer_regions for past in self._engine.unsettled.calls)

    def in_view(self, num_ranks: int) -> GroupInView:
        """Return the group's part in the view, for what is built on its first `num_ranks` ranks."""
        return GroupInView(
            self.runtime,
            self._rank_table.group_id,
            tuple(self._rank_table.slot_of[:num_ranks]),  # the group may have grown
            self._raises,
            self._on_stall,
            dict(self._rank_table.incarnations),
            self._takes_part,
            self._is_joiner and self._rank_table.is_home,  # buffers of other groups take no joiners
            True,
            self._job,
            bool(self._links),
        )

    # ---- decisions

    def take_news(self) -> None:
        """Apply the received decisions. The engine's lock is held.

        A decision stays the first in the queue, and NEWS raised, until all of it has been applied. An interrupt or a
        shortage may end this at any line: the next call begins with the same decision again, and every step of it
        may run twice (decision 17).

        Raises:
            ResourceError: no memory or descriptor is left for a joiner's outbox.
        """
        while self.hooks.decisions:
            decision = self.hooks.decisions[0]
            if decision.epoch > self._rank_table.epoch:
                if not self._may_take(decision):
                    self._engine.raise_flag(CHANGING)  # the thread that drives the group comes back here by `settle`
                    self._engine.lower_flag(NEWS)
                    return
                self._take_over(decision)
            self.hooks.decisions.popleft()
        self._engine.lower_flag(NEWS, unless=self.hooks.decisions)

    def _may_take(self, decision: Decision) -> bool:
        """Return whether a view may be applied; over several hosts those with joiners wait for the gate."""
        if not self._links:
            return True
        gate, resolution, rank_table = self._gate, self._loss_resolution, self._rank_table
        parts = parts_of(decision, rank_table.group_id)
        own = rank_table.slot_of[self._epoch_regions.full.rank]
        if parts.get(own) != rank_table.since[own] or not any(True for _ in rank_table.newcomers(decision)):
            return True
        if gate.begin(decision.epoch):
            lost = [rank for rank in rank_table.remove(decision) if resolution.is_here(rank)]
            self._change_hosts(decision)
            for rank in lost:
                self._leave_out(rank)
            gate.begun(decision)
        for later in list(self.hooks.decisions)[1:]:
            self._cuts[later.epoch] = cut_of(later, rank_table.group_id, Removal(0, 0, PUT_OUT))
            gate.hear(later)
        self._look_settled()
        return gate.is_open(self._told)

    def _told(self) -> dict[int, Offer]:
        """Return the offers of the members; nothing once this process has no agent, which its calls will raise."""
        own = {} if self._offer is None else {self._rank_table.slot_of[self._offer.rank]: self._offer}
        with ignored(InvalidState):
            return parse_offers(self.runtime.told(self._rank_table.group_id)) | own
        return {}

    def _read_marks(self) -> dict[int, Mark]:
        return {slot: Mark(*offer[-4:]) for slot, offer in self._told().items()}

    def _publish_mark(self, mark: Mark) -> None:
        if self._offer is not None and self._row is not None:
            self._offer = self._offer._replace(**mark._asdict())
            self._row.tell(self._offer.pack())

    def _tell_turned(self, epoch: int) -> None:
        """Report that this rank needs nothing of the ranks that were lost by the view of an epoch."""
        if self._offer is not None and self._row is not None:
            self._offer = self._offer._replace(turned=epoch)
            self._row.tell(self._offer.pack())

    def _change_hosts(self, decision: Decision) -> None:
        """Have the mirrors of lost ranks settled; on one host all that was stored is here."""
        if not self._links:
            return
        self._cuts[decision.epoch] = cut_of(decision, self._rank_table.group_id, Removal(0, 0, PUT_OUT))
        parts = parts_of(decision, self._rank_table.group_id)
        present = [slot for slot, when in self._rank_table.since.items() if parts.get(slot) == when]
        self._loss_resolution.change(decision.epoch, [self._rank_table.rank_of[slot] for slot in present])
        if not self._loss_resolution.is_over:
            self._engine.raise_flag(CHANGING)

    def _bring_in(self, decision: Decision, newcomers: set[int]) -> None:
        """Begin a new placement with joiners, over several hosts."""
        if not self._links:
            return
        parts = parts_of(decision, self._rank_table.group_id)
        staying = {slot: when for slot, when in self._rank_table.since.items() if parts.get(slot) == when}
        since = self._since_of_ranks(staying)
        rank_of = self._rank_table.rank_of
        keys = {rank_of[member.slot]: member.host for member in decision.members if member.slot in staying}
        owners = {rank_of[one.slot]: one for one in self._rank_table.owners(decision, newcomers)}
        self._loss_resolution.bring_in(decision.epoch, keys, since, owners)
        for links in self._links:
            links.adopted(decision.epoch)
        self._engine.raise_flag(CHANGING)

    def _take_over(self, decision: Decision) -> None:
        """Apply a decision; the rank table's `epoch` is written last and marks completion."""
        full = self._epoch_regions.full
        full.exports.publish(full, VIEW, decision.epoch)
        for rank in self._rank_table.remove(decision):
            if rank == self._epoch_regions.full.rank:
                self._end_here(decision)
                return
            if self._loss_resolution.is_here(rank):
                self._leave_out(rank)
        self._intake.adopt(decision)
        new = {slot for slot, when in self._rank_table.since.items() if when == decision.epoch}
        if new:
            self._bring_in(decision, {self._rank_table.rank_of[slot] for slot in new})
        turn = self._course.turn_of(self._rank_table.ours(decision))
        if turn is not None:
            self._epoch_regions.add(decision.epoch)  # a reader of the epoch change needs them
            self._engine.raise_flag(CHANGING)
            self._course.note(turn)
            for slot, cut in self._limits:
                turn.limit_to(slot, cut)
        self._limits.clear()
        if not new:
            self._change_hosts(decision)
        self._gate.end()
        self._rank_table.is_over(decision)

    def _end_here(self, decision: Decision) -> None:
        """End this process's calls because it was excluded from the group; later decisions do not concern it.

        Calls that a remaining rank has completed are complete here, too: the parts of all ranks are there.
        """
        rank = self._epoch_regions.full.rank
        slot = self._rank_table.slot_of[rank]
        cut = cut_of(decision, self._rank_table.group_id, Removal(slot, 0, PUT_OUT))
        for op in [op for op in self._engine.queue if op.seq <= cut and not op.done]:
            try:
                op.step(op.peer_regions)
            except expected(EpeeError) as exc:
                if self._engine.is_interrupt(exc):
                    raise
                op.fail(exc)
        self._engine.mask[rank] = 0
        self.hooks.put_out(
            EvictedError(
                f"rank {rank} was put out of this group in epoch {decision.epoch}, as a member asked; it can return "
                "(`group.join`, Mooncake: `join_group`) when a member calls recover_ranks",
                [rank],
                epoch=decision.epoch,
                cause=PUT_OUT,
            )
        )
        self._rank_table.epoch = FOREVER

    def _leave_out(self, rank: int) -> None:
        """End the messages of a rank that is not in the view."""
        epoch, cause = self._rank_table.removed[rank]
        kind, words = kind_of_loss([cause])
        absence = Absence(epoch, words, kind, cause not in (*MAY_LIVE, PUT_OUT))
        self._engine.leave_out(rank, absence, self._raises and cause != LEFT)

    # ---- losses that are shown at once

    def show_losses(self) -> None:
        """Have the engine's mask, which has just been made, show losses as soon as they are known here."""
        rank_table, mask = self._rank_table, self._engine.mask
        present = {rank_table.rank_of[slot] for slot in rank_table.since}
        for rank in self._engine.members.members:
            epoch, cause = rank_table.removed.get(rank, (0, LEFT))
            if rank not in present and cause not in (LEFT, PUT_OUT):
                mask.lose([rank], epoch, is_agreed=True)
        self.hooks.show_losses()

    def show_dead(self, ranks: Iterable[int]) -> None:
        """Show ranks of whose death there is proof, before the members have agreed on it."""
        self._engine.mask.lose(ranks, self._rank_table.epoch + 1, is_agreed=False)

    def await_shown(self, ranks: Collection[int]) -> None:
        """Wait until the members have agreed that these ranks are lost, and it is shown; at most the group's timeout.

        Without the lock.
        """
        engine, until = self._engine, time.monotonic() + self._engine.timeout_s
        mask = engine.mask
        while mask.shows_at_once and not mask.has_agreed(ranks) and not engine.flags & (ENDED | TROUBLED):
            if time.monotonic() > until:
                return
            time.sleep(SHOWN_POLL_S)
        mask.join()

    def await_lost(self, short: TooShort, timeout_s: float) -> None:
        """Wait until the members for which a call's lists have no entry are known to be lost. Without the lock.

        Args:
            short: these members.
            timeout_s: of the call.
        Raises:
            InvalidArgument: they live. It comes some time before the timeout, so that the peers get the reason.
        """
        engine = self._engine
        until = time.monotonic() + timeout_s - min(REFUSAL_S, timeout_s / 4)
        while not engine.mask.has_lost(short.members, short.epoch):
            if time.monotonic() > until:
                raise InvalidArgument(*short.args) from None
            engine.look(partial(self._check_for_deaths, short.members))
            time.sleep(DEAD_POLL_S)

    def _check_for_deaths(self, ranks: Sequence[int]) -> None:
        watch = self._engine.watch
        watch.look(ranks)
        dead = {*watch.dead()}.intersection(ranks)
        if dead:
            self.found_dead(dead)

    # ---- single calls

    def heed(self, op: Operation) -> None:
        """Decide the oldest unfinished call by the known decisions, if possible. The engine's lock is held."""
        if self.settle():
            self._call_outcome.heed(op)

    def settle(self) -> bool:
        """Apply what this host has received about lost ranks; True: calls can be decided. The engine's lock is held.

        Raises:
            ResourceError: no memory or descriptor is left for a new mirror.
        """
        resolution, gate = self._loss_resolution, self._gate
        if gate.epoch:
            self.take_news()
        if not resolution.is_over or not self._is_ready:
            self._look_settled()
        return not resolution.unsettled and not gate.epoch

    def _look_settled(self) -> None:
        resolution = self._loss_resolution
        for rank, epoch in resolution.look():
            slot = self._rank_table.slot_of[rank]
            if epoch:
                for turn in self._course.turns:
                    turn.limit_to(slot, self._cuts[epoch])
                if self._gate.epoch:
                    self._limits.append((slot, self._cuts[epoch]))
            self._leave_out(rank)
        if not self._is_ready and not resolution.has_moves:
            full = self._epoch_regions.full
            full.exports.publish(full, LIFE, LIFE_READY)
            self._is_ready = True

    def unsettled(self) -> list[int]:
        """Return the lost ranks of which this host, or one that stays, may not have received everything yet."""
        return sorted({*self._loss_resolution.unsettled, *self._gate.late})

    def tellers(self) -> list[int]:
        """Return the ranks whose reports about lost ranks this one waits for."""
        return sorted({*self._loss_resolution.awaited(), *self._gate.late})

    def insist_on_tellers(self, deadline: float) -> bool:
        """At the timeout of a wait for `settle`: apply the policy to the reporting ranks; True while that may help."""
        slots = self._rank_table.slots_of(self.tellers())
        told, seq = partial(context, LOSS, rank=self._epoch_regions.full.rank), self._engine.num_retired
        return self._awaited.insist(slots, told, seq, self._rank_table.epoch, deadline)

    def not_told(self, elapsed: float) -> CommTimeoutError:
        """Return the error of a wait for `settle` that has lasted too long."""
        told = context(LOSS, rank=self._epoch_regions.full.rank, epoch=self._rank_table.epoch, elapsed=elapsed)
        lost, tellers = self.unsettled(), self.tellers()
        return CommTimeoutError(
            f"{told}: what rank(s) {', '.join(map(str, lost))} had sent before the view changed has not all arrived, "
            f"rank(s) {', '.join(map(str, tellers)) or 'none'} can resend it; the call was not made, it may be "
            "repeated",
            tellers or lost,
            has_job=True,
        )

    def raise_loss(self) -> None:
        """Raise the loss that would fail a call which has ended here already, before a call takes its number.

        To be called when `settle` has returned that calls can be decided.
        """
        self._call_outcome.raise_loss()

    def may_publish(self, op: Operation) -> bool:
        """Return whether this rank may put its part of `op`: all its members can read each other's outboxes."""
        if self._gate.epoch or self.unsettled() or not self._is_ready:
            return False
        return self._arrival.may_publish(op)

    def unready(self, peer_regions: PeerRegions) -> list[int]:
        """Return the joiners among the members of `peer_regions` that have not mapped all others' outboxes yet."""
        return unready(peer_regions)

    def ended_without(self, op: Operation) -> list[int]:
        """Return the ranks that have ended `op`, have put nothing into it, and never will.

        They have applied no decision that this rank has not (VIEW), so they did not run it in a later epoch. It
        happens where a rank calls with another root, which is lost: a joiner, or a rank that learned of a loss later;
        and where they aborted the call in the epoch before, and this rank had not seen it when the call moved.
        """
        peer_regions = op.peer_regions
        through = [
            p
            for p in peer_regions.peers
            if consumed_of(peer_regions.words[p]) >= op.seq and op.is_missing(peer_regions.words[p])
        ]
        if not through or any(peer_regions.words[peer][VIEW] > self._rank_table.epoch for peer in through):
            return []
        self.heed(op)  # the last decision may not have been applied to this call
        return (
            [peer_regions.members[peer] for peer in through] if op.peer_regions is peer_regions and not op.done else []
        )

    def has_lost_one_of(self, peer_regions: PeerRegions) -> bool:
        """Return whether a member of `peer_regions` has been removed since."""
        return not self._rank_table.removed_after(peer_regions.epoch).isdisjoint(peer_regions.members)

    def removed_in(self, epoch: int) -> list[int]:
        """Return the ranks that the decision of `epoch` has removed, as far as it is still known."""
        return self._rank_table.removed_in(epoch)

    def retired(self, seq: int) -> None:
        """Note that calls up to `seq` have ended here: later ones are planned for the remaining ranks."""
        past = self._engine.unsettled.calls  # of these later decisions are still asked, in the epochs that they ran in
        epoch_regions = (*(call.peer_regions for call in past), *(op.peer_regions for op in self._engine.queue))
        epoch = min((peer_regions.epoch for peer_regions in epoch_regions), default=FOREVER)
        self._course.forget(min(seq, past[0].seq - 1) if past else seq, epoch)
        is_last, peer_regions = self._epoch_regions.retired(seq), self._epoch_regions.peer_regions
        is_over = is_last and not self.hooks.decisions and self._arrival.is_over(peer_regions)
        is_over = is_over and self._loss_resolution.is_over
        if is_over and all(op.peer_regions is peer_regions for op in self._engine.queue):
            self._engine.lower_flag(CHANGING)

    def insist(self, op: Operation, ranks: Sequence[int], now: float) -> bool:
        """At the timeout of a call: apply the policy to the ranks that are behind; True while that may help.

        A decision may have been applied since the call was checked, and ranks that were behind in the epoch before
        would be accused in the new one, in which their time has just begun. So the call is decided by it first.
        """
        peer_regions = op.peer_regions
        self.heed(op)
        if op.peer_regions is not peer_regions or op.done:
            return True
        if not op.plan.heeds_stalls:
            return False
        ranks = self.tellers() if self.unsettled() else ranks
        slots = self._rank_table.slots_of(ranks)
        told = partial(op.describe, self._epoch_regions.full, elapsed=now - op.started)
        epoch = max(self._rank_table.epoch, self._gate.newest)
        return self._awaited.insist(slots, told, op.seq, epoch, op.deadline, op.deadline - op.started)

    def insist_on(self, ranks: Collection[int], what: str, seq: int, deadline: float) -> bool:
        """At the timeout of a wait outside of the engine's calls: apply the policy to ranks; True while it may help."""
        slots = self._rank_table.slots_of(ranks)
        return self._awaited.insist(slots, lambda: what, seq, self.runtime.view().epoch, deadline)

    def found_dead(self, ranks: Collection[int]) -> None:
        """Report that a wait has found ranks dead; the agent's own sources may be later."""
        self.show_dead(ranks)
        for rank in ranks:
            self.runtime.look_at(self._rank_table.slot_of[rank])

    # ---- for hang reports

    def show(self, call: Operation | Message, ranks: Iterable[int]) -> None:
        """Put on this process's board that `call` waits for `ranks`. For waits that have slept, under the lock."""
        self.show_wait(call.name, call.seq, ranks)

    def show_wait(self, name: str, seq: int, ranks: Iterable[int]) -> None:
        """Do the same for a wait outside of the engine's calls, by its name and number."""
        if self._engine.flags & ENDED:
            return  # the board may be removed
        slots = self._rank_table.slots_of(ranks).values()
        self._awaited.show(name, seq, self._engine.members.epoch, slots)

    def hide(self) -> None:
        """Take it off again: the call has ended."""
        self._awaited.hide()

    # ---- the end

    def remember(self, store: Any) -> None:
        """Let later groups of the job meet through `store`, by what this group knows, if it is the first one."""
        if self._rank_table.is_home:
            self._job.store, self._job.name_later = store, weakref.WeakMethod(self.admission.name_later)

    def call_it(self, name: str) -> None:
        """Show the group's name in hang reports."""
        self._awaited.call_it(name)

    def close(self, failed: bool = False) -> None:
        """End the membership, and this process's part in the job if it was the last.

        `failed`: as a rank that has failed.
        """
        self.hide()
        if self.hooks.is_attached:
            for peer_regions in self._all_regions():
                peer_regions.forget_views()  # else mappings would live until a collection
        with ignored(NoQuorumError):  # the other ranks have left during an agreement: so does this one
            self.runtime.unregister(self._rank_table.group_id)
        self._awaited.end()
        self._row = None  # it keeps the board
        self._job.release(EXITED if failed else LEFT)
