"""How a group goes on when the view changes: the group's end of the control plane (`view/protocol/PROTOCOL.md`).

Data path: the agent thread calls the hooks here (`freeze`, `thaw`, `decided`, `trouble`). They set a bit in the
engine's `flags`, which every call looks at anyway, and leave the rest to whoever drives the group: `heed` takes the
decisions over and says, call by call, what they mean. So nothing of this is on the path of a call while all is well.

    FROZEN   an agreement is under way: no call completes or starts. The hook takes the engine's lock to set it, so a
             call that is writing results ends first, and what the hook says about the lane stays true.
    NEWS     decisions have come that nobody has looked at.
    CHANGING a decision waits for the first call that misses somebody (`protocol/outcome.py` says which that is).
    TROUBLED calls cannot end well: this process was voted out, or there is no quorum.

Only the oldest unfinished call is judged, because where a change falls must be asked in the order of calls. A call
that falls behind a change is planned again for the outboxes of those who remain, or fails (mode "raise"); the words of
lost ranks are read as they left them and never waited for again.

Who writes, who reads: this rank writes its own outbox only, as ever. A crash between two steps leaves a rank that is
lost in the next epoch.
"""

from __future__ import annotations

import copy
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from ...errors import (
    CommTimeoutError,
    EvictedError,
    InvalidArgument,
    MismatchError,
    NoQuorumError,
    PeerError,
    RankFailedError,
    context,
)
from ...view.awaited import Awaited, kind_of_loss
from ...view.group import GroupInView
from ...view.job import Seat
from ...view.protocol.messages import DEAD, FOREVER, LEFT, STALLED, Decision, LaneState, Member
from ...view.protocol.outcome import CallState, Course
from ..bootstrap.home import takes_part
from ..engine.entry import CHANGING, ENDED, FROZEN, NEWS, TROUBLED
from ..engine.operation import Operation
from ..options import MAX_RANKS
from ..outbox import CONSUMED, CONSUMED_TOO, LIFE, LIFE_BORN, Outboxes, consumed_of
from ..p2p.channel import first_number
from ..p2p.message import Absence, Message
from .intake import EngineOfLane, Intake
from .members import narrow
from .sizes import Sizes
from .unsettled import Past, past_of

logger = logging.getLogger("epee")

LOSS = "view"  # in the place of an operation's name: the error of a loss that fails no call
LOCK_SLICE_S = 0.5
NO_QUORUM_PAUSE_S, NEWS_LOOK_S = 0.2, 0.02


class Survival(Intake):
    """The lane of one engine.

    Attributes:
        box: outboxes of the members of the epoch in which the next call is planned.
        on_stall: what becomes of a rank that is silent until the time-out of a call (`BackendOptions`).
        takes_part: whether a process that comes later has a part in the lane.
    """

    def __init__(self, seat: Seat, mode: str, joined_by: Decision | None = None) -> None:
        """Take part in the control plane, which `joined_by` may have taken this process into; `attach` comes later."""
        super().__init__()
        fault_mode, _, on_stall = mode.partition("/")
        self.is_home = seat.is_home
        self.runtime = seat.job.runtime
        self.lane = seat.lane
        self.on_stall = on_stall
        self.takes_part = partial(takes_part, self.lane)  # for buffers, which must not keep the group alive
        self.error: Exception | None = None
        self._job = seat.job
        self._raises = fault_mode == "raise"
        self._slots = seat.slots  # of the ranks that this process was told of
        self._slot_of = list(range(MAX_RANKS)) if seat.is_home else seat.slots  # who is beyond may come
        self._rank_of = {slot: rank for rank, slot in enumerate(self._slot_of)}
        self._engine: EngineOfLane | None = None
        self._decisions: deque[Decision] = deque()
        self._removed: dict[int, tuple[int, str]] = {}  # rank -> (epoch that began without it, cause)
        self._is_adopted = False
        self._joined_in = 0  # the epoch in which this process took a lost rank's place; 0 for founders
        self._is_frozen = False
        self._hooks_lock = threading.Lock()  # hooks against `attach`
        self._thawed = threading.Event()
        self._has_news = threading.Event()
        self._known = joined_by or self.runtime.view()
        self._is_joiner = joined_by is not None
        row = self.runtime.register(seat.lane, self.freeze, self.thaw, self.decided, self.trouble)
        self._awaited = Awaited(self.runtime, on_stall)
        self._awaited.begin(seat.lane, row)
        self._known = joined_by or self.runtime.view()
        self._incarnations: dict[int, int] = {}  # slot -> incarnation that has a part in this lane

    # ---- birth

    @property
    def epoch(self) -> int:
        """The epoch that this process knew when the lane began; it learns all that follow."""
        return self._known.epoch

    def begin(self, epoch: int, timeout_s: float) -> None:
        """Wait until the view of `epoch`, in which the lane begins on all ranks, is known here.

        Raises:
            CommTimeoutError: it does not come.
            RankFailedError: a rank of the group is not in it.
        """
        if self._known.epoch < epoch:
            self.runtime.await_decision(epoch - 1, timeout_s)
            found = [decision for decision in list(self._decisions) if decision.epoch == epoch]
            if not found:
                raise CommTimeoutError(f"init: epoch {epoch} of the view did not come; is a rank in another job?")
            self._known = found[0]
        present = {member.slot for member in self._known.members}
        lost = [rank for rank in range(len(self._slots)) if self._slots[rank] not in present]
        if lost:
            raise RankFailedError(f"init: rank {', '.join(map(str, lost))} is not in the view of epoch {epoch}", lost)

    def join(self, decision: Decision) -> None:
        """Begin with the view that took this process in, and learn what was decided since."""
        later = self.runtime.since(decision.epoch)  # without the lock: the agent, which answers, may wait for it
        with self._hooks_lock:
            newest = self._decisions[0].epoch if self._decisions else FOREVER
            self._decisions.extendleft(missed for missed in reversed(later) if missed.epoch < newest)

    def attach(self, engine: EngineOfLane, joined: bool = False) -> None:
        """Give the lane its engine. With `joined`, its number of the last call is set to where this rank comes in."""
        epoch = self._known.epoch
        self._full = engine.box
        self._epoch = epoch
        self._incarnations = {m.slot: m.incarnation for m in self._known.members if m.slot in self._rank_of}
        known = self._ours(self._known)
        self._course = Course(self.lane, known, self._raises, frozenset(self._slot_of), joined)
        if joined:
            self._joined_in = self._join_epoch = epoch
            self._first_call[engine.box.rank] = self._course.first_seq
            for peer in engine.box.peers:  # for those who joined in the same epoch, see `may_publish`
                engine.box.own[engine.box.verdict_base[peer]] = first_number(epoch) - 1
            engine.seq = self._course.first_seq - 1
            engine.box.own[CONSUMED] = engine.box.own[CONSUMED_TOO] = engine.seq
        present = {member.slot for member in known.members}
        members = [rank for rank, slot in enumerate(self._slot_of) if slot in present]
        self._sizes = Sizes(engine.box.group_size)
        self.box = narrow(engine.box, members, epoch)
        self._boxes = {epoch: [(1, self.box)]}  # see `boxes_of`
        engine.members = self.box
        self._removed = {rank: (epoch, DEAD) for rank in engine.box.members if rank not in members}
        for removal in self._known.removed if joined else ():  # one of them had this process's own rank, maybe
            if removal.slot in self._rank_of:
                self._removed[self._rank_of[removal.slot]] = (epoch, removal.cause)
        with self._hooks_lock:
            self._engine = engine
            engine.survival = self
            for rank in self._removed:
                self._leave_out(rank)
            engine.raise_flag(
                CHANGING * joined
                | FROZEN * self._is_frozen
                | NEWS * bool(self._decisions)
                | TROUBLED * bool(self.error)
            )

    # ---- hooks, on the agent thread

    def in_view(self, num_ranks: int) -> GroupInView:
        """Return the group's part in the view, for what is built on its first `num_ranks` ranks."""
        return GroupInView(
            self.runtime,
            self.lane,
            tuple(self._slot_of[:num_ranks]),  # the group may have grown
            self._raises,
            self.on_stall,
            dict(self._incarnations),
            self.takes_part,
            bool(self._joined_in),
            True,
            self._job,
        )

    def freeze(self) -> LaneState:
        """Stop the lane between two calls and say how far it is."""
        with self._hooks_lock:
            self._is_frozen = True
            engine = self._engine
        if engine is None:
            return LaneState(self.lane, 0, self._claimed_unborn())
        while not engine.entry.stop_calls(LOCK_SLICE_S):
            if engine.flags & ENDED:
                return LaneState(self.lane, engine.seq, engine.seq)
        try:
            self._thawed.clear()
            engine.raise_flag(FROZEN)
            head = engine.queue[0] if engine.queue else None
            is_written = head is not None and head.writing
            completed = head.seq if is_written and head is not None else engine.num_retired
            return LaneState(self.lane, completed, self._claimed(engine.seq))
        finally:
            engine.entry.let_calls()

    def _claimed(self, issued: int) -> int:
        """Return what to tell as the last call issued, where `issued` is the truth. The engine's lock is held.

        It depends on the failures that no call has reported yet, so on news as well. They are not taken over here: that
        needs descriptors and memory, and who is short of them must answer all the same.
        """
        course = copy.deepcopy(self._course) if self._decisions else self._course
        for decision in self._decisions:
            if decision.epoch > self._epoch:
                course.add(self._ours(decision))
        return course.claimed(issued)

    def _claimed_unborn(self) -> int:
        """Return what to tell as the last call issued before there is an engine: the others may die and leave us."""
        course = Course(self.lane, self._known, self._raises, frozenset(self._slot_of), self._is_joiner)
        for decision in self.runtime.since(self._known.epoch):
            course.add(decision)
        return course.claimed(course.first_seq - 1)

    def thaw(self) -> None:
        """Go on."""
        with self._hooks_lock:
            self._is_frozen = False
            if self._engine is not None:
                self._engine.lower_flag(FROZEN)
        self._thawed.set()

    def decided(self, decision: Decision) -> None:
        """Take note of a view; whoever drives the group looks at it."""
        with self._hooks_lock:
            self._decisions.append(decision)
            if self._engine is not None:
                self._engine.raise_flag(NEWS)
        self._has_news.set()

    def trouble(self, error: Exception) -> None:
        """Calls cannot end well any more, or for the time being."""
        with self._hooks_lock:
            self.error = error
            if self._engine is not None:
                self._engine.raise_flag(TROUBLED)

    # ---- in the engine

    @property
    def _owner(self) -> EngineOfLane:
        assert self._engine is not None, "attach comes first"
        return self._engine

    def await_thaw(self, timeout_s: float) -> None:
        """Wait until the lane goes on, for some milliseconds at most. Without the engine's lock."""
        self._thawed.wait(timeout_s)

    @property
    def eviction(self) -> EvictedError | None:
        """The error of a process that was voted out, for good; else None."""
        error = self.runtime.error
        return error if isinstance(error, EvictedError) else None

    def await_quorum(self) -> None:
        """Give the agent a moment for news, so that repeated calls without a quorum do not spin. Without the lock."""
        until = time.monotonic() + NO_QUORUM_PAUSE_S
        self._has_news.clear()  # first: what comes after it is seen below, or ends the wait
        while isinstance(self.runtime.error, NoQuorumError) and not self._owner.flags & ENDED:
            if self._has_news.wait(NEWS_LOOK_S) or time.monotonic() > until:
                return

    def raise_trouble(self) -> None:
        """Raise why calls cannot end well, if that is still so."""
        error: Exception | None = self.runtime.error
        if error is None and not isinstance(self.error, PeerError):
            error = self.error  # the agent has failed; a lack of quorum ends with the next decision
        if error is not None:
            raise error
        self.error = None
        self._owner.lower_flag(TROUBLED)

    def take_news(self) -> None:
        """Take over the decisions that have come. The engine's lock is held.

        A decision stays the first in the queue, and NEWS raised, until all of it has been done. An interrupt or a
        shortage may end this at any line: the next call begins with the same decision again, and every step of it
        may run twice (decision 17).

        Raises:
            ResourceError: no memory or descriptor is left for a newcomer's outbox.
        """
        while self._decisions:
            decision = self._decisions[0]
            if decision.epoch > self._epoch:
                self._take_over(decision)
            self._decisions.popleft()
        self._owner.lower_flag(NEWS, unless=self._decisions)

    def _take_over(self, decision: Decision) -> None:
        """Do what a decision calls for; `_epoch` is last and says that it is done."""
        for removal in decision.removed:
            if removal.slot in self._rank_of and self._incarnations.get(removal.slot) == removal.incarnation:
                self._removed[self._rank_of[removal.slot]] = (decision.epoch, removal.cause)
                self._leave_out(self._rank_of[removal.slot])
        self.adopt(decision)
        turn = self._course.turn_of(self._ours(decision))
        if turn is not None:
            self._boxes[decision.epoch] = self.boxes_of(decision.epoch)  # whoever finds the turn needs them
            self._owner.raise_flag(CHANGING)
            self._course.note(turn)
        self._epoch = decision.epoch

    def _leave_out(self, rank: int) -> None:
        """End the messages of a rank that is not in the view."""
        epoch, cause = self._removed[rank]
        kind, words = kind_of_loss([cause])
        absence = Absence(epoch, words, kind, cause != STALLED)
        self._owner.leave_out(rank, absence, self._raises and cause != LEFT)

    def _ours(self, decision: Decision) -> Decision:
        """Return `decision` without processes that have taken a slot but have no part in this lane."""
        members = tuple(member for member in decision.members if self._has_part(member))
        return Decision(decision.epoch, members, *decision[2:])

    def _has_part(self, member: Member) -> bool:
        is_known = self._incarnations.get(member.slot, member.incarnation) == member.incarnation
        return is_known or self._part_of_newcomer(member) is not None

    def heed(self, op: Operation) -> None:
        """Judge the oldest unfinished call by the decisions known. The engine's lock is held."""
        if op.done or op.writing:
            return
        self._owner.unsettled.keep(self._ask_again(tuple(self._owner.unsettled.calls)))
        place = self._place(past_of(op))
        for epoch in place.via:
            box = self.box_for(epoch, op.seq)
            if op.box is not box and op.box.epoch <= epoch:  # else it was planned in a later one: see `show_joined`
                self._move(op, box)
            if op.done:
                return
        if place.failed:
            op.fail(self._failure(op, place))
            op.by_view = True
            if self._owner.untold is not None and self._owner.untold.epoch == place.epoch:
                self._owner.untold = None  # told now
            return
        box = self.box_for(place.epoch, op.seq)
        if op.box is box:
            self._mark_lost(op)
        else:
            self._move(op, box)

    def _ask_again(self, calls: Iterable[Past]) -> Iterator[Past]:
        """Ask about calls that have ended here, before any later one, and say where they would run now."""
        for past in calls:
            place = self._place(past)
            if place.failed:
                self._owner.untold = self._lost_by(past, place)
            else:
                box = past.box if place.epoch <= past.box.epoch else self.box_for(place.epoch, past.seq)
                yield past.moved(box)

    def raise_untold(self) -> None:
        """Raise the loss that would fail a call which has ended here already, with another error. Mode "raise".

        To be called before a call takes its number: where that call is still open, it is what fails, and the numbers
        after it are the same everywhere.
        """
        owner = self._owner
        owner.unsettled.keep(self._ask_again(tuple(owner.unsettled.calls)))
        error, owner.untold = owner.untold, None
        if error is not None and all(op.done for op in owner.queue):  # else an open call may fail for the same reason
            raise error
        owner.untold = error

    def _place(self, past: Past) -> CallState:
        ran_in = max(past.box.epoch, self._course.base)  # it may have been issued before a change long over
        if ran_in <= max(self._joined_in, self._shown_epoch):
            ran_in = 0  # it was planned in a change that no call has been asked about: ask from before that
        return self._course.place(past.seq, lambda slot, epoch, seq: self._is_whole(past, slot, epoch), ran_in)

    def _mark_lost(self, op: Operation) -> None:
        """Tell a call which of its members read nothing any more."""
        op.lost = {rank for rank, (epoch, _) in self._removed.items() if epoch > op.box.epoch}

    def _is_whole(self, past: Past, slot: int, epoch: int) -> bool:
        """True when a dead slot has done all that the call needs of it, as far as its words and ours tell.

        The outboxes of the epoch asked about have the memory of the process that died, whoever has its place now.
        """
        box = past.box if epoch == past.box.epoch else self.box_for(epoch, past.seq)
        rank = self._rank_of[slot]
        return rank not in box.members or past.moved(box).counts_as_settled(box.words[box.members.index(rank)])

    def _move(self, op: Operation, box: Outboxes) -> None:
        """Run a call again with the members of a later epoch."""
        if op.told is not None:  # nobody waits for it any more, and its tensors may hold something else by now
            op.fail(op.told)
            op.by_view = True
            return
        if op.make is None:
            op.renew(box, op.plan)
            return
        try:
            op.renew(box, op.make(box))
        except InvalidArgument as exc:  # here only: others knew that the group grows, so they must find a header
            op.renew(box, op.plan)
            op.fail(
                MismatchError(
                    f"{op.describe(box)}: the group has grown with this call, in epoch {box.epoch}, and counts "
                    f"{box.group_size} ranks (group.num_slots): {exc}"
                )
            )
        except Exception as exc:  # noqa: BLE001 - its root is lost, say: it belongs to that call
            op.fail(exc)
            op.by_view = True
        self._mark_lost(op)

    def _failure(self, op: Operation, place: CallState) -> PeerError:
        elapsed = time.monotonic() - op.started if op.started else 0.0
        told = op.describe(self._full, peer=_names(self._lost_ranks(place)), elapsed=elapsed)
        return self._loss(place, f"{told}: {{}}; results are untouched", op.name, op.seq)

    def _lost_by(self, past: Past, place: CallState) -> PeerError:
        ranks = self._lost_ranks(place)
        told = context(LOSS, rank=self._full.rank, peer=_names(ranks), epoch=place.epoch)
        return self._loss(place, f"{told}: {{}}; call {past.seq} had failed here before; nothing was called", LOSS, 0)

    def _lost_ranks(self, place: CallState) -> list[int]:
        return [self._rank_of[slot] for slot in place.lost if slot in self._rank_of]

    def _loss(self, place: CallState, told: str, name: str, seq: int) -> PeerError:
        ranks = self._lost_ranks(place)
        kind, cause = kind_of_loss(self._removed[rank][1] for rank in ranks)
        text = f"{told.format(cause)}; the next call runs in epoch {place.epoch} without them"
        return kind(text, ranks, name, seq, place.epoch, cause)

    def may_publish(self, op: Operation) -> bool:
        """True when this rank may put its part of `op`: all who take part in it can read each other's outboxes.

        Else one that dies early would have a part in the eyes of those who had mapped its outbox and none in those of
        the others. A newcomer that has mapped all others' is ready (LIFE). Who has mapped a newcomer's says so where it
        counts the message slots that it has freed (`Receiver.renew`).
        """
        if self.unready(op.box):
            return False
        if not self._joined_in or self._is_adopted:
            return True
        index, wanted = self._full.verdict_base[self._full.rank], first_number(self._joined_in) - 1
        self._is_adopted = all(words[index] >= wanted for words in op.box.peer_words)
        return self._is_adopted

    @staticmethod
    def unready(box: Outboxes) -> list[int]:
        """Return the newcomers among the members of `box` that have not mapped all others' outboxes yet."""
        return [box.members[peer] for peer in box.peers if box.words[peer][LIFE] == LIFE_BORN]

    def ended_without(self, op: Operation) -> list[int]:
        """Return the ranks that are through with `op` and have put nothing into it, nor ever will.

        They know of no decision that this rank has not heard of, so they do not run it in a later epoch. It happens
        where a newcomer calls with another root than those who did not know of it, and theirs is lost.
        """
        box = op.box
        through = [p for p in box.peers if consumed_of(box.words[p]) >= op.seq and op.is_missing(box.words[p])]
        ranks = [box.members[peer] for peer in through]
        if not ranks or any(self.runtime.epoch_of(self._slot_of[rank]) > self._epoch for rank in ranks):
            return []
        self.heed(op)  # the last decision may not have been looked at for this call
        return ranks if op.box is box and not op.done else []

    def removed_in(self, epoch: int) -> list[int]:
        """Return the ranks that the decision of `epoch` has removed, as far as it is still known."""
        return sorted(rank for rank, (when, _) in self._removed.items() if when == epoch)

    def retired(self, seq: int) -> None:
        """Calls up to `seq` have ended here: later ones are planned for who is left."""
        past = self._owner.unsettled.calls  # of these later decisions are still asked, in the epochs that they ran in
        self._course.forget(min(seq, past[0].seq - 1) if past else seq)
        self._sizes.forget(seq)
        epoch, box = self.first_epoch(), self.next_box()
        self.plan_with(box)
        if min(self._boxes) < epoch:
            self._boxes = {later: boxes for later, boxes in self._boxes.items() if later >= epoch}
        is_last = box is self._boxes[epoch][-1][1]
        is_over = is_last and not self._course.turns and not self._decisions
        is_over = is_over and (self._is_adopted or not self._joined_in) and not self.unready(box)
        if is_over and all(op.box is box for op in self._owner.queue):
            self._owner.lower_flag(CHANGING)

    def insist(self, op: Operation, ranks: Sequence[int], now: float) -> bool:
        """At the time-out of a call: do what the policy is with those who are behind; True while that may help.

        A decision may have been taken over since the call was looked at, and those who were behind in the epoch before
        would be accused in the new one, in which their time has just begun. So the call is judged by it first.
        """
        box = op.box
        self.heed(op)
        if op.box is not box or op.done:
            return True
        slots = {rank: self._slot_of[rank] for rank in ranks}
        told = partial(op.describe, self._full, elapsed=now - op.started)
        return self._awaited.insist(slots, told, op.seq, self._epoch, op.deadline, op.deadline - op.started)

    def found_dead(self, ranks: Iterable[int]) -> None:
        """Pass on that a wait has found ranks dead; the agent's own sources may be later."""
        for rank in ranks:
            self.runtime.look_at(self._slot_of[rank])

    # ---- for hang reports

    def show(self, call: Operation | Message, ranks: Iterable[int]) -> None:
        """Put on this process's board that `call` waits for `ranks`. For waits that have slept, under the lock."""
        if self._owner.flags & ENDED:
            return  # the board may be gone
        self._awaited.show(call.name, call.seq, self._owner.members.epoch, map(self._slot_of.__getitem__, ranks))

    def hide(self) -> None:
        """Take it off again: the call has ended."""
        self._awaited.hide()

    def remember(self, store: Any) -> None:
        """Let later groups of the job meet through `store`, by what this group knows, if it is the first one."""
        if self.is_home:
            self._job.store, self._job.name_later = store, weakref.WeakMethod(self.name_later)

    def close(self) -> None:
        """End the lane, and this process's part in the job if it was the last."""
        self.hide()
        self.runtime.unregister(self.lane)
        self._job.release()


def _names(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
