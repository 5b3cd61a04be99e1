"""The epoch in which each call of a throughput buffer on CPUs runs: the collectives' rule for calls that begin with
rows.

The calls of a buffer form a stream, as those of a group do, numbered through all its epochs; `view/protocol/outcome.py`
defines what decisions mean for them. A rank has contributed to a call when its row is in its own inbox, where it is
stored first (`control/inbox.py`); the row of a dead rank no longer changes. While an agreement is under way the stream
is frozen: this rank publishes no call, and does not complete a call whose rows it has seen (it *completes* a call
there; the payload moves after that, and is counted per source). So what it reports to the other ranks stays true until
they have decided.

A decision that ends a `sync` (`lane.py`) restarts the stream: no rank waits for earlier calls any more, and all ranks
of the decision continue above the highest number that any rank had issued.

The agent thread calls `freeze`, `thaw` and `add`; the thread of a call calls the rest. Every step holds the
membership's lock, always briefly: an agreement waits neither for a rank's payload nor for its program. A crash leaves a
rank that has promised a contribution and has failed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping

from ...errors import InvalidState
from ...view.protocol.decision import parts_of
from ...view.protocol.messages import Decision, LaneState, Member
from ...view.protocol.outcome import CallState, Course, Whole, first_seq


class CallCourse:
    """The epoch plan of one buffer's calls.

    Args:
        lane: id of the buffer's stream.
        slots: of the ranks in the job.
        slot: of this process.
        raises: a loss is an error.
        is_ours: whether a member of the job has a part in the buffer.
        lock: of the membership.
        decisions: the decisions received so far, oldest first.
        first: the epoch in which all ranks begin together; 0 for a replacement, which begins in the epoch that admitted
            it.

    Attributes:
        version: counts the changes of the stream.
        first_seq: number of the first call since the last `sync`, or of all.
        frozen: an agreement is under way.

    Raises:
        InvalidState: the decision that admitted this replacement is no longer stored.
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
                    f"Buffer: the members of the job have changed too often since this process joined in epoch "
                    f"{since}; a replacement makes its buffers when it has joined"
                )
        view = known[base]._replace(epoch=first or known[base].epoch)
        if not first and lane in view.met:  # the stream restarts with it, for all ranks
            self._begin(view, False, first_seq(view, lane))
        else:
            self._begin(view, joined=not first)
        for decision in known[base + 1 :]:
            self.add(decision)

    def _begin(self, view: Decision, joined: bool, seq: int = 0) -> None:
        """Begin the stream with a view; `seq` is the number of the first call, by default that of the view."""
        self._course = Course(self._lane, view, self._raises, self._slots, joined)
        self._views = {view.epoch: view}
        self.first_seq = seq or self._course.first_seq
        self._issued = self._completed = self.first_seq - 1
        self._pull = (0, 0)  # the last call, if it is open and may continue among the remaining ranks; the version then
        self.version += 1

    def _ours(self, decision: Decision) -> Decision:
        """Return `decision` without processes that hold, or held, a slot but have no part in the buffer."""
        self._strangers.update(member[:2] for member in decision.members if not self._is_ours(member))
        members = tuple(member for member in decision.members if member[:2] not in self._strangers)
        removed = tuple(removal for removal in decision.removed if removal[:2] not in self._strangers)
        return Decision(decision.epoch, members, removed, *decision[3:])

    # ---- on the agent thread

    def freeze(self) -> LaneState:
        """Stop the stream between two steps and return its progress."""
        with self._lock:
            self.frozen = True
            self._thawed.clear()
            # otherwise the call may have to be restarted in another epoch
            is_pull = self._pull == (self._issued, self.version)
            return LaneState(self._lane, self._completed, self._course.claimed(self._issued), is_pull)

    def thaw(self) -> None:
        """Resume the stream."""
        with self._lock:
            self.frozen = False
        self._thawed.set()

    def add(self, decision: Decision) -> None:
        """Apply the next decision. The caller holds the lock."""
        decision = self._ours(decision)
        if self._lane in decision.met and self._slot in parts_of(decision, self._lane):
            self._begin(decision, False, first_seq(decision, self._lane))
        elif self._course.add(decision):
            self._views[decision.epoch] = decision
            self.version += 1

    # ---- on the thread of a call

    def await_thaw(self, timeout_s: float) -> bool:
        """Wait for the end of an agreement; return False if it is still under way at the timeout."""
        return not self.frozen or self._thawed.wait(timeout_s)

    def changes(self, epoch: int) -> bool:
        """Return whether a later call may not run in `epoch`, in which the last one ran."""
        return bool(self._course.turns) or self._course.base > epoch

    def place(self, seq: int, whole: Whole, epoch: int) -> tuple[CallState, int]:
        """Return the state of a call and the version it belongs to; `epoch` is the buffer's current epoch."""
        with self._lock:
            place = self._course.place(seq, whole, epoch or None)
            if self._pull[0] == seq and place.epoch == epoch and not place.failed:
                self._pull = seq, self.version
            return place, self.version

    def members(self, seq: int, epoch: int) -> Mapping[int, Member]:
        """Return the members of call `seq` in `epoch`: slot -> member, with the epoch since which it takes part."""
        with self._lock:
            view, since = self._views[epoch], parts_of(self._views[epoch], self._lane)
            slots = self._course.contributors(seq, epoch)
            members = {member.slot: member for member in view.members}
            return {slot: members[slot]._replace(incarnation=since[slot]) for slot in slots}

    def is_complete(self, seq: int, epoch: int) -> bool:
        """Return whether all members of `epoch` take part in call `seq`."""
        with self._lock:
            return max(self._course.starts(epoch), default=0) <= seq

    def withdraw(self, version: int) -> bool:
        """Record that the last call has failed; return False as `issue` does."""
        with self._lock:
            if self.frozen or self.version != version:
                return False
            self._pull = (0, 0)
            return True

    def issue(self, seq: int, is_pull: bool, version: int, publish: Callable[[], None]) -> bool:
        """Publish a call; return False if the stream is frozen, or has changed since `version`."""
        with self._lock:
            if self.frozen or self.version != version:
                return False
            self._issued = seq
            publish()
            self._pull = (seq, version) if is_pull and not self._raises else (0, 0)
            return True

    def complete(self, seq: int, version: int, note: Callable[[], None]) -> bool:
        """Record that all rows of a call have been seen; return False as `issue` does."""
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
