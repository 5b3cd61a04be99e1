"""In which epoch each call of a throughput buffer on CPUs runs: the collectives' rule, for calls that begin with rows.

The calls of a buffer are a lane as those of a group are, counted through all its epochs, and `view/protocol/outcome.py`
says what decisions mean for them. A rank has contributed to a call when its row stands in its own inbox, where it is
stored first (`control/inbox.py`); that of a dead rank changes no more. While an agreement is under way the lane is
frozen: this rank publishes nothing and goes on with nothing whose rows it has seen (it *completes* a call there; the
payload moves behind that, and is counted per source). So what it tells the others stays true until they have decided.

A decision that ends a `sync` (`sync.py`) begins the lane anew: nobody waits for earlier calls any more, and all who
are in it go on above the highest number that anybody had issued.

Who calls: `freeze`, `thaw` and `add` the agent thread, all else the thread of a call. Everything is done under the lock
of the roster, which nobody holds for long: an agreement waits neither for a rank's payload nor for its program. A crash
leaves a rank that has promised something and is gone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping

from ...errors import InvalidState
from ...view.protocol.decision import parts_of
from ...view.protocol.messages import Decision, LaneState, Member
from ...view.protocol.outcome import CallState, Course, Whole, first_seq


class CallCourse:
    """See above.

    Args:
        lane: id of the buffer's lane.
        slots: of the ranks in the job.
        slot: of this process.
        raises: a loss is an error.
        is_ours: whether a member of the job has a part in the buffer.
        lock: of the roster.
        decisions: what is known, oldest first.
        first: the epoch in which all ranks begin together; 0 for a replacement, which begins where it was taken in.

    Attributes:
        version: counts what has changed the lane.
        first_seq: number of the first call since the last `sync`, or at all.
        frozen: an agreement is under way.

    Raises:
        InvalidState: what took this replacement in is not known any more.
    """

    def __init__(
        self,
        lane: int,
        slots: Iterable[int],
        slot: int,
        raises: bool,
        is_ours: Callable[[Member], bool],
        lock: threading.Lock,
        decisions: Iterable[Decision],
        first: int,
    ) -> None:
        self.version = 0
        self.frozen = False
        self._lane = lane
        self._slots = frozenset(slots)
        self._strangers: set[tuple[int, int]] = set()  # slot and incarnation of processes without a part in the buffer
        self._slot = slot
        self._raises = raises
        self._is_ours = is_ours
        self._lock = lock
        self._thawed = threading.Event()
        known = [self._ours(decision) for decision in decisions]
        base = max((at for at, view in enumerate(known) if view.epoch <= first), default=0)
        if not first:
            since = parts_of(known[-1], lane).get(slot, 0) or known[-1].epoch
            base = next((at for at, view in enumerate(known) if view.epoch == since), -1)
            if base < 0:
                raise InvalidState(
                    f"Buffer: too much has happened in the job since this process took its place in epoch {since}; a "
                    "replacement makes its buffers when it has joined"
                )
        view = known[base]._replace(epoch=first or known[base].epoch)
        if not first and lane in view.met:  # the lane begins anew with it, for all
            self._begin(view, False, first_seq(view, lane))
        else:
            self._begin(view, joined=not first)
        for decision in known[base + 1 :]:
            self.add(decision)

    def _begin(self, view: Decision, joined: bool, seq: int = 0) -> None:
        """Begin the lane with a view; `seq` is the number of the first call, as the view has it by default."""
        self._course = Course(self._lane, view, self._raises, self._slots, joined)
        self._views = {view.epoch: view}
        self.first_seq = seq or self._course.first_seq
        self._issued = self._completed = self.first_seq - 1
        self._pull = (0, 0)  # the last call, where it is open and may go on among those who stay; version then
        self.version += 1

    def _ours(self, decision: Decision) -> Decision:
        """Return `decision` without processes that have, or had, taken a slot but no part in the buffer."""
        self._strangers.update(member[:2] for member in decision.members if not self._is_ours(member))
        members = tuple(member for member in decision.members if member[:2] not in self._strangers)
        removed = tuple(removal for removal in decision.removed if removal[:2] not in self._strangers)
        return Decision(decision.epoch, members, removed, *decision[3:])

    # ---- on the agent thread

    def freeze(self) -> LaneState:
        """Stop the lane between two steps, and say how far it is."""
        with self._lock:
            self.frozen = True
            self._thawed.clear()
            is_pull = self._pull == (self._issued, self.version)  # else it may have to be begun once more elsewhere
            return LaneState(self._lane, self._completed, self._course.claimed(self._issued), is_pull)

    def thaw(self) -> None:
        """Go on."""
        with self._lock:
            self.frozen = False
        self._thawed.set()

    def add(self, decision: Decision) -> None:
        """Take note of the next decision. Under the lock."""
        decision = self._ours(decision)
        if self._lane in decision.met and self._slot in parts_of(decision, self._lane):
            self._begin(decision, False, first_seq(decision, self._lane))
        elif self._course.add(decision):
            self._views[decision.epoch] = decision
            self.version += 1

    # ---- on the thread of a call

    def await_thaw(self, timeout_s: float) -> bool:
        """Wait for the end of an agreement; False when it is still under way at the time-out."""
        return not self.frozen or self._thawed.wait(timeout_s)

    def changes(self, epoch: int) -> bool:
        """Return whether some later call may not run in `epoch`, in which the last one did."""
        return bool(self._course.turns) or self._course.base > epoch

    def place(self, seq: int, whole: Whole, epoch: int) -> tuple[CallState, int]:
        """Return where a call stands, and the version that says so; `epoch` is the one that the buffer is in."""
        with self._lock:
            place = self._course.place(seq, whole, epoch or None)
            if self._pull[0] == seq and place.epoch == epoch and not place.failed:
                self._pull = seq, self.version
            return place, self.version

    def members(self, seq: int, epoch: int) -> Mapping[int, Member]:
        """Return who takes part in call `seq` in `epoch`: slot -> member, with the epoch since which it takes part."""
        with self._lock:
            view, since = self._views[epoch], parts_of(self._views[epoch], self._lane)
            slots = self._course.contributors(seq, epoch)
            members = {member.slot: member for member in view.members}
            return {slot: members[slot]._replace(incarnation=since[slot]) for slot in slots}

    def is_complete(self, seq: int, epoch: int) -> bool:
        """Return whether all who belong to `epoch` take part in call `seq`."""
        with self._lock:
            return max(self._course.starts(epoch), default=0) <= seq

    def withdraw(self, version: int) -> bool:
        """Note that the last call has failed; False when the lane is frozen, or has changed since `version`."""
        with self._lock:
            if self.frozen or self.version != version:
                return False
            self._pull = (0, 0)
            return True

    def issue(self, seq: int, is_pull: bool, version: int, publish: Callable[[], None]) -> bool:
        """Publish a call; False when the lane is frozen, or has changed since `version`."""
        with self._lock:
            if self.frozen or self.version != version:
                return False
            self._issued = seq
            publish()
            self._pull = (seq, version) if is_pull and not self._raises else (0, 0)
            return True

    def complete(self, seq: int, version: int, note: Callable[[], None]) -> bool:
        """Note that all rows of a call have been seen; False as from `issue`."""
        with self._lock:
            if self.frozen or self.version != version:
                return False
            note()
            self._completed, self._pull = seq, (0, 0)
            if self._course.turns or len(self._views) > 1:
                self._forget(seq)
            return True

    def _forget(self, seq: int) -> None:
        """Drop what no call after `seq` can need."""
        self._course.forget(seq)
        epochs = {self._course.base, *(turn.epoch for turn in self._course.turns)}
        if len(self._views) > len(epochs):
            self._views = {epoch: view for epoch, view in self._views.items() if epoch >= min(epochs)}
