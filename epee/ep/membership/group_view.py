"""The membership of a buffer of GPUs: the view of its group's job, restricted to the buffer's ranks.

Data path: the agent thread delivers every decision in order (`decided`). A decision that changes nothing for the
buffer's ranks is skipped; any other begins a new epoch of the buffer, numbered as the decision: so all members use the
same number for an epoch, whatever other processes join or leave the job.

The agent thread calls `decided` and `trouble`; the thread of a call calls the rest. The lock is held for some
microseconds at a time, and no wait happens under it.

A process that holds a rank's slot in the job but has no part in the group (it joined for another group) does not count;
nor, in a group over several hosts, does a process of another host: a buffer that was made on one host stays there. A
rank excluded from the buffer (`agreement.py`) is in none of its epochs but is still tracked; for the buffer, the
incarnation of a member is the epoch since which it takes part.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ...errors import EvictedError, InvalidState, NoQuorumError, PeerError
from ...view.awaited import Awaited
from ...view.group import GroupInView
from ...view.protocol.decision import BLANK, parts_of
from ...view.protocol.messages import PUT_OUT, STALLED, Decision, LaneState, Member, Want
from ..control.membership import Agreed
from ..losses import Loss

logger = logging.getLogger("epee")

NO_QUORUM_PAUSE_S = 0.2
NEWS_LOOK_S = 0.005
_LANE_SALT = 0x9E3779B97F4A7C15


class View(NamedTuple):
    """The current epoch.

    Attributes:
        epoch: its number.
        members: the member that has each rank.
        out: excluded members of the job, by rank.
        agreed: the newest epoch that ended a `sync`, and the ranks that it began with; 0 before the first.
    """

    epoch: int
    members: Mapping[int, Member]
    out: Mapping[int, Member]
    agreed: Agreed


class Roster:
    """The membership of one buffer.

    Attributes:
        lane: the id of the buffer's stream, once it is watched.
        job_handle: job handle of the buffer's group.
        state: the newest epoch of the job and the view of the buffer then; replaced as a whole.
        newest: epoch of the view.
        lock: for steps that a new view must not interrupt.
    """

    def __init__(self, job_handle: GroupInView) -> None:
        """Begin with the decisions that the runtime stores; `watch` follows."""
        self.job_handle = job_handle
        self.lock = threading.Lock()
        self.lane = 0
        self._awaited = Awaited(job_handle.runtime, job_handle.on_stall)
        self._rank_of = {slot: rank for rank, slot in enumerate(job_handle.slots)}
        self._host = job_handle.runtime.member.host
        self._elsewhere: set[tuple[int, int]] = set()  # processes of other hosts: slot, incarnation
        self._causes: dict[tuple[int, int], tuple[int, str]] = {}  # (rank, incarnation) -> epoch, cause
        self._is_registered = False
        self._last = BLANK
        self._is_over = False
        self._trouble: Exception | None = None
        self.newest = 0
        self.state = (0, View(0, {}, {}, Agreed(0, ())))
        self._replay()

    def watch(self, number: int, first: int, timeout_s: float) -> None:
        """Follow the decisions from now on.

        Args:
            number: of the buffer among those of the group.
            first: the epoch in which all ranks begin, known to the other ranks; 0 for a replacement.
            timeout_s: how long to wait until that epoch is known here.

        Raises:
            InvalidState: the decision that admitted this replacement is no longer stored.
        """
        runtime = self.job_handle.runtime
        if runtime.view().epoch < first:
            runtime.await_decision(first - 1, timeout_s)
        self.lane = (self.job_handle.lane ^ number * _LANE_SALT) & ((1 << 62) - 1)
        known = (*runtime.since(0), runtime.view())
        past = [decision.epoch for decision in known if self.lane in decision.met]
        with self.lock:
            now = self._view_of(self._last)  # the excluded ranks could not be determined without the buffer's number
            before = Agreed(max((epoch for epoch in past if epoch <= self.heard), default=0), ())  # of others
            self.state = self.heard, now._replace(epoch=max(now.epoch, self.view.epoch), agreed=max(now.agreed, before))
        state = LaneState(self.lane, 0, 0)
        row = runtime.register(self.lane, lambda: state, _nothing, self.decided, self.trouble)
        self._is_registered = True
        self._awaited.begin(self.lane, row)
        self._replay()
        # what was agreed before the stream was registered here leaves no trace in the decisions after it
        met = max((decision.epoch for decision in runtime.since(0) if self.lane in decision.met), default=0)
        with self.lock:
            self.newest = max(self.view.epoch, first, met)
            self.state = self.heard, self.view._replace(epoch=self.newest)

    def _replay(self) -> None:
        """Apply the decisions made so far; one made meanwhile arrives twice and counts once."""
        runtime = self.job_handle.runtime
        for decision in (*runtime.since(0), runtime.view()):
            self.decided(decision)

    def close(self) -> None:
        """Stop following decisions; idempotent."""
        if not self._is_over:
            self._is_over = True
            self._awaited.end()
            if self._is_registered:
                self.job_handle.runtime.unregister(self.lane)

    # ---- on the agent thread

    def decided(self, decision: Decision) -> None:
        """Apply a decision, and those before it that came while the stream was being registered."""
        heard = self.heard
        if 0 < heard < decision.epoch - 1:
            for missed in self.job_handle.runtime.since(heard):
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
            self.state = decision.epoch, new
            self.newest = new.epoch

    def _view_of(self, decision: Decision) -> View:
        """Return what a decision says by itself; its epoch is the first in which this can have been true."""
        since = parts_of(decision, self.lane)
        ours = {self._rank_of[m.slot]: m for m in decision.members if self._is_ours(m)}
        members = {rank: m._replace(incarnation=since[m.slot]) for rank, m in ours.items() if m.slot in since}
        out = {rank: m for rank, m in ours.items() if rank not in members}
        changed = [abs(part.since) for part in decision.parts if part.lane == self.lane]
        epochs = [*changed, *(member.incarnation for member in members.values())]
        is_agreed = self.lane in decision.met
        used = next((start.seq - 1 for start in decision.starts if start.lane == self.lane), 0)
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
        """Record that the agent thread has failed; other errors are in `Runtime.error`."""
        if not isinstance(error, PeerError):
            self._trouble = error

    def _is_ours(self, member: Member) -> bool:
        if member.slot not in self._rank_of:
            return False
        if member.host != self._host:
            self._note_elsewhere(member)
            return False
        if self.job_handle.known.get(member.slot) == member.incarnation:
            return True
        return self.job_handle.takes_part(member)

    def _note_elsewhere(self, member: Member) -> None:
        """Log once that the process that now has a rank is of another host."""
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
        """Raise the reason why a call cannot succeed: `EvictedError` is permanent, `NoQuorumError` temporary."""
        error = self.job_handle.runtime.error
        until = time.monotonic() + NO_QUORUM_PAUSE_S  # so that calls repeated without a quorum do not spin
        while isinstance(error, NoQuorumError) and time.monotonic() < until:
            time.sleep(NEWS_LOOK_S)
            error = self.job_handle.runtime.error
        if error is not None:
            raise _renewed(error)
        if self._trouble is not None:
            raise InvalidState(str(self._trouble))

    def require_part(self, rank: int, view: View | None = None) -> None:
        """Raise `EvictedError` if this process's rank was excluded from the buffer and may rejoin.

        Args:
            rank: this process's.
            view: the view to check, if the caller uses it afterwards; the newest by default.
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
        """Request that `members` take part and `out` do not (`Want`).

        Args:
            members, out: of these ranks.
            least: how many of the members must remain.
            used: the last number that calls of these members have used.
            heard: the newest epoch of the job when the request was computed.
        """
        taking, going = (tuple(sorted(self.job_handle.slots[rank] for rank in ranks)) for ranks in (members, out))
        self.job_handle.runtime.want(Want(self.lane, taking, going, least, used), heard)

    def is_gone(self, rank: int, incarnation: int) -> bool:
        """Return whether the process that had `rank` is no longer a member."""
        member = self.view.members.get(rank)
        return member is None or member.incarnation != incarnation

    def show(self, op: str, seq: int, ranks: Sequence[int]) -> None:
        """Show in hang reports that a call waits for ranks."""
        self._awaited.show(op, seq, self.view.epoch, map(self.job_handle.slots.__getitem__, ranks))

    def hide(self) -> None:
        """Show that no call waits."""
        self._awaited.hide()

    def call_it(self, name: str) -> None:
        """Show the buffer's name in hang reports."""
        self._awaited.call_it(name)

    def cause(self, rank: int, incarnation: int) -> str:
        """Return why a process was lost (`view.messages`); an unknown process counts as voted out."""
        return self._causes.get((rank, incarnation), (0, STALLED))[1]

    def losses(self, after: int) -> list[Loss]:
        """Return the ranks lost in epochs later than `after`."""
        with self.lock:
            found = [Loss(rank, *what) for (rank, _), what in self._causes.items() if what[0] > after]
        return sorted(found)


def _incarnations(members: Mapping[int, Member]) -> dict[int, int]:
    return {rank: member.incarnation for rank, member in members.items()}


def _renewed(error: PeerError) -> PeerError:
    """Return a new error object for each call that raises it."""
    kind = EvictedError if isinstance(error, EvictedError) else NoQuorumError
    return kind(str(error), error.ranks, error.op, error.seq, error.epoch, error.cause)


def _nothing() -> None:
    """Do nothing: calls of a buffer whose epochs begin with `sync` alone need not stop while the ranks agree."""
