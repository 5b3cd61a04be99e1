"""The agent thread's hooks into a group: they freeze and thaw it, and deliver decisions and errors.

The hooks set a bit in the engine's `flags`, which every call tests anyway, and leave the rest to the thread that drives
the group (`group_membership.py`). `freeze` takes the engine's lock, so that a call that is writing results ends first
and the reported state of the group stays true; the other hooks never wait for a call.

Before the group has its engine there is nothing to stop, but the hooks must answer: the other ranks may die meanwhile.
"""

from __future__ import annotations

import copy
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from ...errors import EvictedError, InvalidState, NoQuorumError, PeerError, ignored
from ...link.meeting import Partner
from ...view.protocol.decision import parts_of
from ...view.protocol.messages import BY_ITSELF, FOREVER, LEFT, Decision, GroupState
from ...view.protocol.outcome import Course
from ...view.runtime import Runtime
from ...view.transport.auth import Identity
from ..entry import CHANGING, ENDED, FROZEN, NEWS, TROUBLED
from ..outbox import OutboxOwner
from ..replication.links import GroupLinks, Newcomer, Turn
from .rank_table import RankTable

if TYPE_CHECKING:
    from ..engine import Engine

LOCK_SLICE_S = 0.5
NO_QUORUM_PAUSE_S, NEWS_LOOK_S = 0.2, 0.02


class AgentHooks:
    """The agent thread's end of one group, and the actions of the group's calls on its reports.

    Args:
        is_joiner: this process has taken a rank of a running group.

    Attributes:
        decisions: received decisions that have not been applied, in order.
        hosts: slot -> its host, in a group over several.
        on_asked: called when other processes ask to join.
    """

    def __init__(self, runtime: Runtime, rank_table: RankTable, raises: bool, is_joiner: bool) -> None:
        self.decisions: deque[Decision] = deque()
        self.hosts: Mapping[int, object] = {}
        self.on_asked: Callable[[], object] | None = None
        self._put_out: EvictedError | None = None
        self._links: Sequence[GroupLinks] = ()
        self._since: dict[int, int] = {}  # the ranks that take part, as far as the links have been notified
        self._ranks: dict[int, int] = {}  # slot -> rank of these
        self._runtime = runtime
        self._rank_table = rank_table
        self._raises = raises
        self._is_joiner = is_joiner
        self._engine: Engine | None = None
        self._course: Course | None = None
        self._error: Exception | None = None
        self._entry: tuple[int, bytes] | None = None  # of a process that asks to join: its slot, and its offer
        self._is_frozen = False
        self._shown: dict[int, tuple[int, int]] | None = None  # slot -> since, rank: of those whose loss is to be shown
        self._lock = threading.Lock()  # hooks against `attach`
        self._thawed = threading.Event()
        self._has_news = threading.Event()

    def join(self, decision: Decision) -> None:
        """Begin with the view that took this process in, and fetch the decisions since."""
        later = self._runtime.since(decision.epoch)  # without the lock: the agent, which answers, may wait for it
        with self._lock:
            newest = self.decisions[0].epoch if self.decisions else FOREVER
            self.decisions.extendleft(missed for missed in reversed(later) if missed.epoch < newest)

    def attach(self, engine: Engine, course: Course, links: Sequence[GroupLinks]) -> None:
        """Connect this engine and the threads of the links (none on one host), and report to all what came before."""
        with self._lock:
            self._engine, self._course, self._links = engine, course, links
            self._since = dict(self._rank_table.since)
            self._ranks = {slot: self._rank_table.rank_of[slot] for slot in self._since}
            for decision in self.decisions:
                self._notify_links(decision)
            engine.raise_flag(
                CHANGING * self._is_joiner
                | FROZEN * self._is_frozen
                | NEWS * bool(self.decisions)
                | TROUBLED * bool(self._error)
            )

    def show_losses(self) -> None:
        """Have the engine's mask show each loss from now on as soon as a decision reports it."""
        with self._lock:
            since, rank_of = self._rank_table.since, self._rank_table.rank_of
            self._shown = {slot: (when, rank_of[slot]) for slot, when in since.items()}
            for decision in self.decisions:
                self._show_lost(self._shown, decision)

    @property
    def is_attached(self) -> bool:
        """True once there is an engine."""
        return self._engine is not None

    # ---- on the agent thread

    def freeze(self) -> GroupState:
        """Stop the group between two calls and return its progress."""
        group_id = self._rank_table.group_id
        with self._lock:
            self._is_frozen = True
            engine, course = self._engine, self._course
        if engine is None or course is None:
            return GroupState(group_id, 0, self._claimed_unborn())
        while not engine.entry.stop_calls(LOCK_SLICE_S):
            if engine.flags & ENDED:
                return GroupState(group_id, engine.seq, engine.seq)
        try:
            self._thawed.clear()
            engine.raise_flag(FROZEN)
            head = engine.queue[0] if engine.queue else None
            is_written = head is not None and head.writing
            completed = head.seq if is_written and head is not None else engine.num_retired
            return GroupState(group_id, completed, self._claimed(course, engine.seq))
        finally:
            engine.entry.let_calls()

    def _claimed(self, course: Course, issued: int) -> int:
        """Return the number to report as the last call issued, where `issued` is the actual one.

        The engine's lock is held. It depends on the failures that no call has reported yet, hence on pending decisions
        too. They are not applied here: that needs descriptors and memory, and a rank that is short of them must answer
        all the same.
        """
        course = copy.deepcopy(course) if self.decisions else course
        for decision in self.decisions:
            if decision.epoch > self._rank_table.epoch:
                course.add(self._rank_table.ours(decision))
        return course.claimed(issued)

    def _claimed_unborn(self) -> int:
        """Return the number to report as the last call issued before there is an engine: other ranks may die."""
        known, group_id = self._rank_table.known, self._rank_table.group_id
        later = self._runtime.since(known.epoch)
        if self._entry is not None:
            entries = [decision for decision in (known, *later) if self.is_entry(decision)]
            if not entries:
                return 0  # it is in no view of the group
            known = entries[0]
        ours = self._rank_table.ours
        course = Course(group_id, ours(known), self._raises, None, self._is_joiner, self.hosts)
        for decision in later:
            if decision.epoch > known.epoch:
                course.add(ours(decision))
        return course.claimed(course.first_seq - 1)

    def enter_as(self, slot: int, locator: bytes = b"") -> None:
        """Announce that this process is in the job as `slot`, and asks to be taken into the group with its offer."""
        self._entry = slot, locator

    def is_entry(self, decision: Decision) -> bool:
        """Return whether a decision takes this process, which has asked for it, into the group.

        A decision that rests on an earlier offer that was cancelled does not count.
        """
        group_id, epoch = self._rank_table.group_id, decision.epoch
        told = (p for p in decision.parts if (p.group_id, p.since) == (group_id, epoch))
        return any((p.slot, p.locator) == self._entry and p.slot in self._rank_table.ranks_in(decision) for p in told)

    def begin_with(self, decision: Decision) -> None:
        """Forget the decisions up to that which has taken this process in."""
        with self._lock:
            while self.decisions and self.decisions[0].epoch <= decision.epoch:
                self.decisions.popleft()

    def thaw(self) -> None:
        """Resume the group."""
        with self._lock:
            self._is_frozen = False
            if self._engine is not None:
                self._engine.lower_flag(FROZEN)
        self._thawed.set()

    def decided(self, decision: Decision) -> None:
        """Record a view; the thread that drives the group applies it."""
        with self._lock:
            self._notify_links(decision)
            if self._shown is not None:
                self._show_lost(self._shown, decision)
            self.decisions.append(decision)
            if self._engine is not None:
                self._engine.raise_flag(NEWS)
        self._has_news.set()

    def _show_lost(self, shown: dict[int, tuple[int, int]], decision: Decision) -> None:
        """Show the ranks that the job has lost by a decision; calls show ranks that left, or were evicted.

        The lock is held.
        """
        assert self._engine is not None, "attach comes first"
        parts = parts_of(decision, self._rank_table.group_id)
        gone = {slot: rank for slot, (when, rank) in shown.items() if parts.get(slot) != when}
        since = {slot: when for slot, (when, _) in shown.items() if slot not in gone}
        for slot in gone:
            del shown[slot]
        for one in self._rank_table.newcomers(decision, since):
            shown[one.member.slot] = one.since, one.rank
        removed = {removal.slot for removal in decision.removed if removal.cause != LEFT}
        lost = [rank for slot, rank in gone.items() if slot in removed]
        if lost:
            self._engine.mask.lose(lost, decision.epoch, is_agreed=True)

    def asked(self) -> None:
        """Publish for which ranks processes wait, once the group is ready for that (`bootstrap/local_state.py`)."""
        if self.on_asked is not None:
            with ignored(InvalidState):  # the process is leaving the job
                self.on_asked()

    def _notify_links(self, decision: Decision) -> None:
        """Notify the links' thread of a view. The lock is held."""
        for links in self._links:
            if decision.epoch > links.epoch:
                self._tell_lost(links, decision)
                self._tell_new(links, decision)

    def _tell_lost(self, links: GroupLinks, decision: Decision) -> None:
        """Notify the links' thread of the remaining members, at once: others wait for its part."""
        parts = parts_of(decision, self._rank_table.group_id)
        lost = {slot for slot, when in self._since.items() if parts.get(slot) != when}
        if lost:
            rank_of = self._ranks
            has_left = {removal.slot for removal in decision.removed if removal.cause in BY_ITSELF}
            self._since = {slot: when for slot, when in self._since.items() if slot not in lost}
            present = frozenset(rank_of[slot] for slot in self._since)
            links.decided(Turn(decision.epoch, present, frozenset(rank_of[slot] for slot in lost & has_left)))

    def _tell_new(self, links: GroupLinks, decision: Decision) -> None:
        """Notify the links' thread of joiners."""
        new = []
        for member, when, rank, part in self._rank_table.newcomers(decision, self._since):
            who = Identity(rank, 0, member.nonce)
            partner = Partner(part.address, part.port, who) if part is not None and part.port else None
            owner = OutboxOwner(member.nonce, self._rank_table.group_id, member.slot)
            new.append((member.slot, when, Newcomer(rank, member.host, partner, owner)))
        if new:
            self._since.update((slot, when) for slot, when, _ in new)
            self._ranks.update((slot, one.rank) for slot, _, one in new)
            present = frozenset(self._ranks[slot] for slot in self._since)
            links.decided(Turn(decision.epoch, present, frozenset(), tuple(one for _, _, one in new)))

    def trouble(self, error: Exception) -> None:
        """Record an error: calls cannot end well any more, or for the time being."""
        with self._lock:
            self._error = error
            if self._engine is not None:
                self._engine.raise_flag(TROUBLED)

    # ---- in the engine

    def await_thaw(self, timeout_s: float) -> None:
        """Wait until the group resumes, for some milliseconds at most. Without the engine's lock."""
        self._thawed.wait(timeout_s)

    @property
    def eviction(self) -> EvictedError | None:
        """The error of a process that was voted out, for good; else None."""
        error = self._put_out or self._runtime.error
        return error if isinstance(error, EvictedError) else None

    def put_out(self, error: EvictedError) -> None:
        """Fail calls of this group with `error` from now on: this process is not a member. The lock is held."""
        assert self._engine is not None, "attach comes first"
        self._put_out = error
        self._engine.raise_flag(TROUBLED)

    def await_quorum(self) -> None:
        """Give the agent a moment for decisions, so that repeated calls without a quorum do not spin.

        Without the lock.
        """
        assert self._engine is not None, "attach comes first"
        until = time.monotonic() + NO_QUORUM_PAUSE_S
        self._has_news.clear()  # first: a later decision is seen below, or ends the wait
        while isinstance(self._runtime.error, NoQuorumError) and not self._engine.flags & ENDED:
            if self._has_news.wait(NEWS_LOOK_S) or time.monotonic() > until:
                return

    def raise_trouble(self) -> None:
        """Raise the reason why calls cannot end well, if it still holds."""
        assert self._engine is not None, "attach comes first"
        error: Exception | None = self._put_out or self._runtime.error
        if error is None and not isinstance(self._error, PeerError):
            error = self._error  # the agent has failed; a lack of quorum ends with the next decision
        if error is not None:
            raise error
        self._error = None
        self._engine.lower_flag(TROUBLED)
