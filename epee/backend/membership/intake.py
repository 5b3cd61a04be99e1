"""How a group takes processes in: in the place of lost ranks, or beyond its end, where nobody has been before.

A rank that was never there is the same as a lost one: both wait for a process that asks for the slot. Members admit it
(`recover`), the view that has it says with which call it begins, and everybody reads its outbox from then on. Those who
are there map nothing else anew: outboxes have room for all ranks that may ever come (decision 42).

What follows from a decision belongs to calls: who takes part in call s, and how many ranks the group counts in it. It
shows with the newcomers' first call, on all ranks after the same call, whenever they heard of the decision. Ranks that
let the group grow at the same point of their program see it before that call (`show_joined`).

Who writes, who reads: decisions come from the agent thread as news and are taken over under the engine's lock; all else
is this process's own. A newcomer that dies on the way is lost like any other.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence, Sized
from typing import Any, Protocol

from ...errors import CommTimeoutError, InvalidState, PeerError, RankFailedError, ResourceError
from ...view.process.detector import DeathWatch
from ...view.protocol.messages import Decision, Member
from ...view.protocol.outcome import Course, first_seq
from ...view.runtime import Runtime
from ..bootstrap.home import OutboxEndpoint, outbox_of
from ..engine.entry import ENDED, Entry
from ..engine.operation import Operation
from ..engine.waiting import Waiting
from ..outbox import Outboxes
from ..p2p.channel import Mailroom, first_number
from ..p2p.message import Absence, Message
from .members import attach_outbox, make_blank, narrow, replace
from .sizes import Mask, Sizes
from .unsettled import UnsettledCalls

ADMIT_PAUSE_S = 0.2  # a process that asks later is admitted by the next round
ASK_PAUSE_S = 0.02
UNSEEN_DEATH_S = 3.0  # a process of some GB takes that long to end on a busy machine


class EngineOfLane(Protocol):
    """What a lane asks of its engine, here and in `epochs.py`."""

    entry: Entry
    waits: Waiting
    flags: int
    seq: int
    box: Outboxes
    members: Outboxes
    queue: deque[Operation]
    survival: Any  # the lane
    unsettled: UnsettledCalls
    untold: PeerError | None
    mask: Mask
    mail: Mailroom
    watch: DeathWatch

    @property
    def num_retired(self) -> int:
        """Calls up to this number have ended on this rank."""

    def look(self, step: Callable[[], None]) -> None:
        """Run `step` with the lock held, when all news is taken over and the lane is not frozen."""

    def retire(self, op: Message) -> None:
        """Have the listeners of an ended call told."""

    def raise_flag(self, bit: int) -> None:
        """Set a bit of `flags`, from any thread."""

    def lower_flag(self, bit: int, unless: Sized = ()) -> None:
        """Clear a bit of `flags`, from any thread; not where something is in `unless`, which was put there before."""

    def leave_out(self, rank: int, absence: Absence, is_told: bool) -> None:
        """End the messages of a rank without which a view has begun."""


class Intake:
    """Part of `survival.Survival`, which has the state.

    Attributes:
        is_home: the group is the first of its job: processes that join the job join it.
    """

    runtime: Runtime
    lane: int
    is_home: bool
    box: Outboxes
    _full: Outboxes
    _course: Course
    _sizes: Sizes
    _boxes: dict[int, list[tuple[int, Outboxes]]]
    _slot_of: list[int]
    _rank_of: dict[int, int]
    _incarnations: dict[int, int]
    _epoch: int
    _joined_in: int

    def __init__(self) -> None:
        self._join_epoch = 0  # of the newest view that took somebody in
        self._shown_epoch = 0  # of the newest one that `show_joined` was about
        self._later: tuple[str, dict[tuple[int, ...], int]] = ("", {})  # see `name_later`
        self._first_call: dict[int, int] = {}  # rank -> call with which the process that last took it begins

    @property
    def _owner(self) -> EngineOfLane:
        raise NotImplementedError

    def take_news(self) -> None:
        """Take over the decisions that have come. The engine's lock is held."""
        raise NotImplementedError

    # ---- what users ask for

    def waiting(self) -> tuple[int, ...]:
        """Return the ranks for which a process asks to come in."""
        if not self.is_home:
            return ()
        return tuple(self._rank_of[slot] for slot in self.runtime.waiting() if slot in self._rank_of)

    def ready(self) -> set[int]:
        """Return the ranks for which a process asks to come in, or has been taken into the newest view."""
        if not self.is_home:
            return set()
        asking = self.waiting()  # before the view, see `Loop._decide`
        return {*asking, *(self._rank_of[member.slot] for member in self.runtime.view().members)}

    def recover(self, ranks: Sequence[int], timeout_s: float) -> None:
        """Admit the processes that wait for `ranks`, all at once; returns when views have had them.

        Where a process waits for the place of a member, that member may have died unseen: it is given some time to
        prove it, else it has its place by right.

        Raises:
            CommTimeoutError: they do not come.
            InvalidState: the group takes nobody in.
        """
        began = time.monotonic()
        deadline = began + timeout_s
        first = {member.slot: member.nonce for member in self.runtime.view().members}
        while True:
            missing = self._missing(ranks, deadline)
            if self.is_home and time.monotonic() - began < UNSEEN_DEATH_S:
                there = {member.slot: member.nonce for member in self.runtime.view().members}
                asked_for = {self._slot_of[rank] for rank in ranks}.intersection(self.runtime.waiting())
                unseen = {slot for slot in asked_for if slot in there and there[slot] == first.get(slot)}
                missing = sorted({*missing, *(self._rank_of[slot] for slot in unseen)})
            if not missing:
                return
            if not self.is_home:
                raise InvalidState(
                    f"rank {missing[0]} is lost, and a group made with new_group takes nobody in: recover the rank in "
                    "the default group, then make this one again with new_group on all its ranks"
                )
            if time.monotonic() > deadline:
                raise CommTimeoutError(
                    f"rank(s) {', '.join(map(str, missing))} did not come within {timeout_s:.1f} s; start a process "
                    "with is_extension=True for each",
                    missing,
                )
            slots = {self._slot_of[rank] for rank in missing}
            all_ask = slots <= set(self.runtime.waiting())
            if all_ask:
                self.runtime.admit(sorted(slots))
            self.runtime.await_decision(self._epoch, ADMIT_PAUSE_S if all_ask else ASK_PAUSE_S)

    def _missing(self, ranks: Sequence[int], deadline: float) -> list[int]:
        """Return which of `ranks` are not in the newest view and have not just been: such a one is lost again."""
        epoch = self.runtime.view().epoch
        while True:  # the view is told to the lanes a moment after it is shown
            self._owner.look(self.take_news)
            if self._epoch >= epoch or time.monotonic() > deadline:
                break
            time.sleep(0.001)
        present = set(self._course.present())
        seq = self._owner.seq
        return [rank for rank in ranks if self._slot_of[rank] not in present and self._first_call.get(rank, 0) <= seq]

    def name_later(self, ranks: Sequence[int]) -> str:
        """Return under which name the members among global `ranks` meet to make a group now; "" if nobody ever joined.

        All members ask at the same point of their program, so they have made equally many calls, and know of the same
        newcomers. The last part counts groups of the same ranks between two calls.
        """
        engine = self._owner
        if engine.flags & ENDED or not (engine.flags or self._join_epoch):
            return ""
        engine.look(self.take_news)
        if not self._join_epoch:
            return ""
        number = max(engine.seq, max(self._first_call.values()) - 1)
        place = f"epee/later/{self.lane}/{self._join_epoch}/{number}"
        if place != self._later[0]:
            self._later = (place, {})
        counts = self._later[1]
        counts[tuple(ranks)] = counts.get(tuple(ranks), 0) + 1
        return f"{place}/{'_'.join(map(str, ranks))}/{counts[tuple(ranks)]}"

    def is_settled(self) -> bool:
        """Return whether this rank's next call is that of those for whom `show_joined` was called, or a later one."""
        return self.box.epoch >= self._shown_epoch

    def show_joined(self) -> None:
        """Plan this rank's next call with those who have been taken in, if it is surely theirs. The lock is held."""
        self._shown_epoch = self._join_epoch
        self.plan_with(self.next_box())

    def set_size(self, size: int) -> None:
        """From this rank's next call on the group counts `size` ranks. The engine's lock is held."""
        first = self._owner.seq + 1
        if self._sizes.at(first) == size:
            return
        self._sizes.put(first, size)
        for epoch, boxes in self._boxes.items():
            _, box = next(entry for entry in reversed(boxes) if entry[0] <= first)
            kept = [entry for entry in boxes if entry[0] != first]
            self._boxes[epoch] = sorted([*kept, (first, narrow(self._full, box.members, epoch, size))], key=_by_first)
        self.plan_with(self.next_box())

    # ---- what decisions mean

    def adopt(self, decision: Decision) -> None:
        """Read the outboxes of processes that have come into this group by `decision`.

        May be repeated from any line on (an interrupt, a shortage): that a process was taken in is noted last of all.

        Raises:
            ResourceError: no memory or descriptor is left; nothing of the rest has begun for that process.
        """
        for member in decision.members:
            part = self._part_of_newcomer(member)
            if part is None:
                continue
            start = first_seq(decision, self.lane)
            self._adopt(self._rank_of[member.slot], part, decision.epoch)
            self._join_epoch = decision.epoch
            self._first_call[self._rank_of[member.slot]] = start
            if self.is_home:
                self._sizes.grow(start, part.num_ranks)
            self._incarnations[member.slot] = member.incarnation

    def _part_of_newcomer(self, member: Member) -> OutboxEndpoint | None:
        """Return the part of a process that has taken a rank of this group and is not known here yet; else None."""
        if member.slot not in self._rank_of or self._incarnations.get(member.slot) == member.incarnation:
            return None
        return outbox_of(member, self.lane)  # None: it came to the job without a part in this group

    def _adopt(self, rank: int, part: OutboxEndpoint, epoch: int) -> None:
        """Read the outbox of a process that has taken `rank`: what may fail first."""
        engine, nbytes = self._owner, self._full.payload_bytes
        try:
            region = attach_outbox(part, nbytes) or make_blank(nbytes)
            engine.watch.watch(rank, part.pid, part.start_time)
        except ResourceError as exc:
            raise ResourceError(
                f"rank {rank} (process {part.pid}) has joined in epoch {epoch}, but cannot be taken in here yet (the "
                f"next call tries again): {exc}"
            ) from exc
        for message in engine.mail.involving(rank):  # out of the books last: then nobody comes back to it
            message.fail(RankFailedError(f"{message.name}: rank {rank} was replaced by another process", [rank]))
            engine.retire(message)
            engine.mail.cancel(message)
        replace(self._full, rank, region)
        engine.waits.count_ranks(self._full.num_ranks)
        engine.mail.renew(rank, first_number(epoch))

    def boxes_of(self, epoch: int) -> list[tuple[int, Outboxes]]:
        """Return (first call, outboxes) of an epoch: who joins in it takes part from a later call than the others."""
        next_seq = self._owner.num_retired + 1  # not that of the call in flight: it may move here without them
        firsts = {start for start in self._course.starts(epoch) if start > next_seq} | self._sizes.firsts(next_seq)
        boxes = []
        for first in (1, *sorted(firsts)):
            seq = max(first, next_seq)
            ranks = sorted(self._rank_of[slot] for slot in self._course.contributors(seq, epoch))
            boxes.append((first, narrow(self._full, ranks, epoch, self._sizes.at(seq))))
        return boxes

    def box_for(self, epoch: int, seq: int) -> Outboxes:
        """Return the outboxes of those who take part in call `seq` when it runs in `epoch`."""
        return next(box for first, box in reversed(self._boxes[epoch]) if first <= seq)

    def first_epoch(self) -> int:
        """Return the epoch below which no call is asked about any more."""
        return max(self._course.base, self._joined_in)

    def next_box(self) -> Outboxes:
        """Return the outboxes with which this rank's next call is planned."""
        seq, epoch = self._owner.seq + 1, self.first_epoch()
        shown = self._shown_epoch
        if shown > epoch and shown in self._boxes and self._course.passes(seq, shown):
            epoch = shown
        return self.box_for(epoch, seq)

    def plan_with(self, box: Outboxes) -> None:
        """Plan calls with `box` from now on, and show who is in it."""
        if box is not self.box:
            self._owner.members = self.box = box
            for rank in range(self._full.group_size):
                self._owner.mask[rank] = int(rank in box.members)


def _by_first(entry: tuple[int, Outboxes]) -> int:
    return entry[0]
