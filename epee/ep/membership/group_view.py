"""Who takes part in a buffer: the view of its group's job, as far as it concerns the buffer's ranks.

Data path: the agent thread tells every decision in order (`decided`). One that changes nothing for the buffer's ranks
is passed over; any other begins a new epoch of the buffer, which has the decision's number: so all members call an
epoch by the same name, whoever else comes and goes in the job. In the same step, under `lock`, it is told to what
knows where the buffer's calls run (`call_course.py`), if these are the lane's.

Who calls: `decided` and `trouble` on the agent thread; all else on the thread of a call. The lock is held for some
microseconds at a time and nobody waits under it.

A process that has a rank's slot in the job but no part in the group (it joined for another group) does not count; nor
does one of another host, in a group over several: a buffer that was made on one host stays there. Who was put out of
the buffer (`sync.py`) is out of its epochs, but stays known; for the buffer, the incarnation of a member is the epoch
since which it takes part.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ...errors import EvictedError, InvalidState, NoQuorumError, PeerError, context
from ...view.awaited import Awaited, kind_of_loss
from ...view.founding import GroupSeat
from ...view.group import GroupInView
from ...view.process.detector import is_leaving
from ...view.process.endpoint import parse_endpoint
from ...view.protocol.decision import BLANK, parts_of
from ...view.protocol.messages import PUT_OUT, STALLED, Decision, LaneState, Member, Want
from ..control.membership import Agreed
from .call_course import CallCourse

logger = logging.getLogger("epee")

NO_QUORUM_PAUSE_S = 0.2
NEWS_LOOK_S = 0.005
_LANE_SALT = 0x9E3779B97F4A7C15


def seat_of(group: Any, num_ranks: int) -> GroupInView | None:
    """Return the seat of a group of the backend "epee", None for groups of other backends and of one rank."""
    in_view = getattr(group, "in_view", None)
    return None if in_view is None else in_view(num_ranks)


def seat_at(place: GroupSeat, fault_mode: str, on_stall: str) -> GroupInView:
    """Return the seat of a buffer on a group of another backend, whose ranks have found `place`; nobody joins there."""
    seat = place.seat
    return GroupInView(
        seat.job.runtime,
        seat.lane,
        tuple(seat.slots),
        fault_mode == "raise",
        on_stall,
        dict(zip(seat.slots, place.incarnations, strict=True)),
        lambda _: False,
        False,
        False,
        seat.job,
    )


class Loss(NamedTuple):
    """A rank that is gone: the epoch that began without it, and why."""

    rank: int
    epoch: int
    cause: str


class View(NamedTuple):
    """The present epoch.

    Attributes:
        epoch: its number.
        members: the member that has each rank.
        out: members of the job that were put out, by rank.
        agreed: the newest epoch that ended a `sync`, and the ranks that it began with; 0 before the first.
    """

    epoch: int
    members: Mapping[int, Member]
    out: Mapping[int, Member]
    agreed: Agreed


class Roster:
    """See above.

    Attributes:
        seat: of the buffer's group.
        state: the newest epoch of the job and the view of the buffer then; replaced as a whole.
        newest: epoch of the view.
        lock: for steps that must not be divided by a new view.
        calls: says where calls run, once the roster is watched; None where the lane has none.
    """

    def __init__(self, seat: GroupInView) -> None:
        """Begin with what the runtime remembers; `watch` follows."""
        self.seat = seat
        self.lock = threading.Lock()
        self._lane = 0
        self._awaited = Awaited(seat.runtime, seat.on_stall)
        self._rank_of = {slot: rank for rank, slot in enumerate(seat.slots)}
        self._host = seat.runtime.member.host
        self._elsewhere: set[tuple[int, int]] = set()  # processes of other hosts: slot, incarnation
        self._causes: dict[tuple[int, int], tuple[int, str]] = {}  # (rank, incarnation) -> epoch, cause
        self.calls: CallCourse | None = None
        self._is_registered = False
        self._last = BLANK
        self._is_over = False
        self._trouble: Exception | None = None
        self.newest = 0
        self.state = (0, View(0, {}, {}, Agreed(0, ())))
        self._replay()

    def watch(self, number: int, rank: int, first: int, has_calls: bool, timeout_s: float) -> None:
        """Follow the decisions from now on.

        Args:
            number: of the buffer among those of the group.
            rank: this process's.
            first: the epoch in which all ranks begin, which others have heard of; 0 for a replacement.
            has_calls: the lane has calls that go on in later epochs.
            timeout_s: how long to wait until that epoch is known here.

        Raises:
            InvalidState: what took this replacement in is not known any more.
        """
        runtime = self.seat.runtime
        if runtime.view().epoch < first:
            runtime.await_decision(first - 1, timeout_s)
        self._lane = (self.seat.lane ^ number * _LANE_SALT) & ((1 << 62) - 1)
        known = (*runtime.since(0), runtime.view())
        past = [decision.epoch for decision in known if self._lane in decision.met]
        with self.lock:
            now = self._view_of(self._last)  # who is out could not be known without the buffer's number
            before = Agreed(max((epoch for epoch in past if epoch <= self.heard), default=0), ())  # of others
            self.state = self.heard, now._replace(epoch=max(now.epoch, self.view.epoch), agreed=max(now.agreed, before))
            if has_calls:
                heard = {decision.epoch: decision for decision in known if decision.epoch <= self.heard}
                self.calls = CallCourse(
                    self._lane,
                    self.seat.slots,
                    self.seat.slots[rank],
                    self.seat.raises,
                    self._is_ours,
                    self.lock,
                    [heard[epoch] for epoch in sorted(heard)],
                    first,
                )
        state = LaneState(self._lane, 0, 0)
        freeze, thaw = (lambda: state, _nothing) if self.calls is None else (self.calls.freeze, self.calls.thaw)
        row = runtime.register(self._lane, freeze, thaw, self.decided, self.trouble)
        self._is_registered = True
        self._awaited.begin(self._lane, row)
        self._replay()
        # what was met before the lane was known here leaves no trace in the decisions after it
        met = max((decision.epoch for decision in runtime.since(0) if self._lane in decision.met), default=0)
        with self.lock:
            self.newest = max(self.view.epoch, first, met)
            self.state = self.heard, self.view._replace(epoch=self.newest)

    def _replay(self) -> None:
        """Take over what was decided so far; what is decided meanwhile comes twice, and counts once."""
        runtime = self.seat.runtime
        for decision in (*runtime.since(0), runtime.view()):
            self.decided(decision)

    def close(self) -> None:
        """Follow no more; idempotent."""
        if not self._is_over:
            self._is_over = True
            self._awaited.end()
            if self._is_registered:
                self.seat.runtime.unregister(self._lane)

    # ---- on the agent thread

    def decided(self, decision: Decision) -> None:
        """Take note of a decision, and of those before it that came while the lane was being registered."""
        heard = self.heard
        if 0 < heard < decision.epoch - 1:
            for missed in self.seat.runtime.since(heard):
                if missed.epoch < decision.epoch:
                    self._take(missed)
        self._take(decision)

    def _take(self, decision: Decision) -> None:
        with self.lock:
            if decision.epoch <= self.heard:
                return
            self._last = decision
            old, new = self.view, self._view_of(decision)
            if old.epoch:
                has_changed = new.agreed.epoch or _incarnations(new.members) != _incarnations(old.members)
                new = new._replace(epoch=decision.epoch if has_changed else old.epoch)
            if new.agreed.epoch:
                is_fresh = any(member.incarnation > old.agreed.epoch for member in new.members.values())
                new = new._replace(agreed=new.agreed._replace(is_fresh=is_fresh))
            new = new._replace(agreed=max(new.agreed, old.agreed))
            self._note_causes(old, new, decision)
            if self.calls is not None:
                self.calls.add(decision)  # first: who reads that it has been heard finds what it means for calls
            self.state = decision.epoch, new
            self.newest = new.epoch

    def _view_of(self, decision: Decision) -> View:
        """Return what a decision says by itself; its epoch is the first in which it can have been so."""
        since = parts_of(decision, self._lane)
        ours = {self._rank_of[m.slot]: m for m in decision.members if self._is_ours(m)}
        members = {rank: m._replace(incarnation=since[m.slot]) for rank, m in ours.items() if m.slot in since}
        out = {rank: m for rank, m in ours.items() if rank not in members}
        changed = [abs(part.since) for part in decision.parts if part.lane == self._lane]
        epochs = [*changed, *(member.incarnation for member in members.values())]
        is_agreed = self._lane in decision.met
        used = next((start.seq - 1 for start in decision.starts if start.lane == self._lane), 0)
        agreed = Agreed(decision.epoch, tuple(sorted(members)), used) if is_agreed else Agreed(0, ())
        return View(max(epochs, default=0), members, out, agreed)

    def _note_causes(self, old: View, new: View, decision: Decision) -> None:
        removed = {removal.slot: removal for removal in decision.removed}
        for rank, member in old.members.items():
            if rank in new.members and new.members[rank].incarnation == member.incarnation:
                continue
            cause = removed[member.slot].cause if member.slot in removed else PUT_OUT
            self._causes.setdefault((rank, member.incarnation), (decision.epoch, cause))
        if not old.epoch:
            for removal in decision.removed:
                rank = self._rank_of.get(removal.slot, -1)
                self._causes.setdefault((rank, removal.incarnation), (decision.epoch, removal.cause))

    def trouble(self, error: Exception) -> None:
        """Take note that the agent thread has failed; all else is in `Runtime.error`."""
        if not isinstance(error, PeerError):
            self._trouble = error

    @property
    def lane(self) -> int:
        """The id of the buffer's lane, once it is watched."""
        return self._lane

    def _is_ours(self, member: Member) -> bool:
        if member.slot not in self._rank_of:
            return False
        if member.host != self._host:
            self._note_elsewhere(member)
            return False
        if self.seat.known.get(member.slot) == member.incarnation:
            return True
        return self.seat.takes_part(member)

    def _note_elsewhere(self, member: Member) -> None:
        """Say once that the process which has a rank now is of another host."""
        who = member.slot, member.incarnation
        if who not in self._elsewhere:
            self._elsewhere.add(who)
            logger.warning(
                "rank %d is a process of host %s now; a buffer that was made on one host (%s) stays there and goes on "
                "without it; close it on all ranks and make it anew to take it in",
                self._rank_of[member.slot],
                member.host,
                self._host,
            )

    # ---- on the thread of a call

    @property
    def heard(self) -> int:
        """The newest epoch of the job."""
        return self.state[0]

    @property
    def view(self) -> View:
        """The newest view; replaced as a whole."""
        return self.state[1]

    def check(self) -> None:
        """Raise why a call cannot end well: `EvictedError` for good, `NoQuorumError` for the time being."""
        error = self.seat.runtime.error
        until = time.monotonic() + NO_QUORUM_PAUSE_S  # so that calls which are repeated without a quorum do not spin
        while isinstance(error, NoQuorumError) and time.monotonic() < until:
            time.sleep(NEWS_LOOK_S)
            error = self.seat.runtime.error
        if error is not None:
            raise _renewed(error)
        if self._trouble is not None:
            raise InvalidState(str(self._trouble))

    def require_part(self, rank: int, view: View | None = None) -> None:
        """Raise `EvictedError` when this process's rank was put out of the buffer and may come back.

        Args:
            rank: this process's.
            view: to be looked at, where it is used afterwards; the newest by default.
        """
        view = self.view if view is None else view
        if rank in view.out:
            raise EvictedError(
                f"rank {rank} was put out of this buffer in epoch {view.epoch}: it did not come to sync; call "
                "buffer.sync(active_ranks) together with the others to come back",
                [rank],
                epoch=view.epoch,
                cause=PUT_OUT,
            )

    def want(self, members: Iterable[int], out: Iterable[int], least: int, used: int, heard: int) -> None:
        """Ask that these ranks take part and those do not (`Want`).

        Args:
            members, out: of these ranks.
            least: how many of those who take part must stay.
            used: the last number that calls of these members have used.
            heard: the newest epoch of the job when that was found.
        """
        taking, going = (tuple(sorted(self.seat.slots[rank] for rank in ranks)) for ranks in (members, out))
        self.seat.runtime.want(Want(self._lane, taking, going, least, used), heard)

    def is_gone(self, rank: int, incarnation: int) -> bool:
        """Return whether the process that had `rank` is a member no more."""
        member = self.view.members.get(rank)
        return member is None or member.incarnation != incarnation

    def show(self, op: str, seq: int, ranks: Sequence[int]) -> None:
        """Show in hang reports that a call waits for ranks."""
        self._awaited.show(op, seq, self.view.epoch, map(self.seat.slots.__getitem__, ranks))

    def hide(self) -> None:
        """Show that no call waits."""
        self._awaited.hide()

    def call_it(self, name: str) -> None:
        """Show the buffer's name in hang reports."""
        self._awaited.call_it(name)

    def look_at(self, rank: int) -> None:
        """Tell the agent that a rank's process seems to have ended; it looks for itself."""
        self.seat.runtime.look_at(self.seat.slots[rank])

    def is_alive(self, rank: int) -> bool:
        """Return whether the process of a member lives; one that is dying has no descriptors, but ends in a moment."""
        member = self.view.members.get(rank)
        return member is not None and not is_leaving(*process_of(member))

    def cause(self, rank: int, incarnation: int) -> str:
        """Return why a process is gone (`view.messages`); who is not known counts as voted out."""
        return self._causes.get((rank, incarnation), (0, STALLED))[1]

    def losses(self, after: int) -> list[Loss]:
        """Return who was lost in epochs later than `after`."""
        with self.lock:
            found = [Loss(rank, *what) for (rank, _), what in self._causes.items() if what[0] > after]
        return sorted(found)

    def insist(self, ranks: Sequence[int], what: str, seq: int, deadline: float, heard: int) -> bool:
        """At a time-out: do what the group's policy is with ranks that are silent in the view of epoch `heard`.

        True while waiting on may still help.
        """
        slots = {rank: self.seat.slots[rank] for rank in ranks}
        return self._awaited.insist(slots, lambda: what, seq, heard, deadline)


def failure(losses: list[Loss], op: str, rank: int, seq: int, epoch: int, elapsed: float) -> PeerError:
    """Return the error that tells of `losses`: `RankFailedError`, or `PeerError` where all have left in order."""
    ranks = sorted({loss.rank for loss in losses})
    kind, cause = kind_of_loss(loss.cause for loss in losses)
    names = ", ".join(map(str, ranks))
    where = context(op, rank=rank, peer=names, seq=seq, epoch=epoch, elapsed=elapsed)
    return kind(
        f"{where}: rank {names}: {cause}; results are untouched, handles of earlier calls are stale; the next "
        f"call runs in epoch {epoch} without them",
        ranks,
        op,
        seq,
        epoch,
        cause,
    )


def process_of(member: Member) -> tuple[int, int]:
    """Return number and start time of a member's process."""
    endpoint = parse_endpoint(member.endpoint)
    return endpoint.pid, endpoint.start_time


def _incarnations(members: Mapping[int, Member]) -> dict[int, int]:
    return {rank: member.incarnation for rank, member in members.items()}


def _renewed(error: PeerError) -> PeerError:
    """Return an error of its own for each call that raises it."""
    kind = EvictedError if isinstance(error, EvictedError) else NoQuorumError
    return kind(str(error), error.ranks, error.op, error.seq, error.epoch, error.cause)


def _nothing() -> None:
    """Calls of a lane whose epochs begin with `sync` alone need not stop while the ranks agree."""
