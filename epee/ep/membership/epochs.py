"""Fault tolerance of a `Buffer` on CPUs: it continues when ranks of its group die, are excluded, or rejoin.

A buffer is in one **epoch** at a time: that of a view that concerned its ranks. Each epoch has inboxes and arenas of
its own, made by its members for its members; calls are numbered through all of them. What a stale writer may still
store lies in memory of a finished epoch: no rank reads or reuses it, and the system frees it when the last process that
maps it unmaps it. That is the quarantine.

**A call during a view change.** Each call has two parts: rows are exchanged until every rank has seen every row
(*gathered*), then the payload moves. The epoch in which a call runs follows the collectives' rule (`call_course.py`):
calls to which all lost ranks had contributed, by their rows, end in their epoch, and from the next one on

    mode "raise"    the first call fails on all ranks (`RankFailedError`); later ones run in the new epoch.
    mode "mask"     calls run in the new epoch, and those already begun are restarted there; a combine that all
                    remaining ranks had begun ends in its epoch, among them.

A dispatch that ends in its epoch counts the sources whose payload has arrived whole (`got`); in mode "raise" an
incomplete source is an error. A combine reads what all ranks had put. Every rank raises once for each loss: a rank
whose dispatch has already reported it also uses up the number of the call that fails on the others. A call that was
aborted (a timeout, a refusal) and that runs again with the others is announced again as a refusal.

**Entering an epoch.** Each rank lends a new inbox, maps those of the others (`inboxes.py`), announces that (`READY`),
and makes no call before all ranks have announced it. Otherwise a rank that dies early would have a part in the call in
the view of the ranks that had mapped its inbox, and none in that of the others. A rank makes its inbox after it has
finished the old epoch, so once one rank has entered, no rank queries the old epoch any more. A rank admitted by a
decision that also removes another may take part only from a later call than the others: then they enter the same epoch
once more, with it. Every wait ends with the timeout of the call, by the policy for silent ranks (`on_stall`), or with
the next view, which starts the same procedure again.

Each rank writes its own line and inbox blob; for inboxes see `control/inbox.py`. A crash between two steps: the rank is
not in the next view. A replacement process begins like every other rank, with the call that its view names.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable

from ...errors import EvictedError, NoQuorumError, PeerError, context, expected
from ...memory.claim import has_ended
from ...memory.signals import futex_sleep, tag
from ...view.process.detector import is_torn_down
from ...view.protocol.messages import Member
from ...view.protocol.outcome import CallState
from ..control.ending import Turned
from ..control.header import GIVEN_UP, Header, Moved
from ..control.inbox import Exchange
from ..control.membership import Agreed, Parties
from ..control.words import inbox_layout
from .birth import Begun
from .call_course import CallCourse
from .group_view import Loss, failure
from .inboxes import EpochMember, Met, Wait
from .lane import BufferLane, silent
from .registry import FRESH_NS, READY, at_fault

logger = logging.getLogger("epee")

HEAR_S = 0.15  # how long a timeout waits to learn which ranks the others wait for
THAW_S = 0.002  # between two checks during an agreement
_LOOK_S = 0.001


class EpochLane(BufferLane):
    """The group of a `Buffer` on CPUs: its calls move from epoch to epoch as ranks are lost and rejoin."""

    _exchange: Exchange

    def __init__(self, begun: Begun, exchange: Exchange, timeout_s: float, interrupt: Callable[[], None]) -> None:
        super().__init__(begun, exchange, timeout_s, interrupt, inbox_layout(exchange.config).nbytes)
        assert begun.roster.calls is not None
        self._calls: CallCourse = begun.roster.calls
        self._peers: dict[int, EpochMember] = {}  # of the epoch; includes this rank's own line
        self._next = self._calls.first_seq  # number of the next call if it is not the one after the last; else 0
        self._asked = 0  # the last call for which the epoch plan was queried
        self._seen = -1  # the plan's version then
        self._came_with = 0  # the epoch, and the call with which this rank has entered it
        self._is_ready = False  # all ranks with a part in the next call are known to have entered the epoch
        self._refusal: tuple[int, Header, bytes] | None = None  # of a call, to be announced in the next epoch
        self._told = begun.roster.heard  # losses up to this epoch have been raised
        self._is_coming_in = False
        self._patience = 0, -1, 0.0  # call, version and end of the extra time that a view change has granted it

    def close(self) -> None:
        """As `BufferLane.close`."""
        super().close()
        if os.getpid() == self._pid:
            self._peers.clear()

    # ---- in a call

    counts_entering = True

    @property
    def has_turned(self) -> bool:  # type: ignore[override]
        """Whether the plan has changed since it was last queried, or is about to."""
        return self._seen != self._calls.version or self._calls.frozen

    @property
    def must_turn(self) -> bool:  # type: ignore[override]
        """Whether the next call needs work first: querying the plan, raising a loss, or entering an epoch."""
        if self.has_turned or not self._is_ready or self._next:
            return True
        return self._calls.changes(self._exchange.epoch) and self._asked != self._exchange.seq + 1

    @property
    def is_in_place(self) -> bool:
        """As `BufferLane.is_in_place`; also before the first call, for which the plan must be queried first."""
        seq = self._exchange.seq + 1
        is_asked = self._asked == seq or not self._calls.changes(self._exchange.epoch)
        return not self.has_turned and is_asked and self._next in (0, seq)

    def check(self, src: int, is_data: bool) -> None:
        """Check for changes while waiting for the row of `src`, or for its payload.

        Raises:
            Turned: the view has changed; when waiting for a payload: that rank is lost.
            EvictedError, NoQuorumError: this process cannot continue.
        """
        self._check()
        if self.is_gone(src) if is_data else self._seen != self._calls.version:
            raise Turned
        pid, start_time = self._peers[src].process
        if has_ended(pid, start_time) or is_torn_down(pid, start_time):
            self.roster.look_at(src)  # the agent's own sources may be later

    def patience(self, deadline: float) -> float:
        """Return the deadline after a view change: the other ranks restart, and so does the timeout.

        The old deadline may have passed because of the lost ranks, which must not count against the remaining ones.
        """
        return max(deadline, time.monotonic() + self._timeout_s)

    def is_gone(self, rank: int) -> bool:
        """Return whether a member of the buffer's epoch is not in the newest view."""
        return self.roster.is_gone(rank, self._peers[rank].incarnation)

    def insist(self, ranks: list[int], what: str, seq: int, deadline: float) -> bool:
        """At a timeout: return True while waiting longer may help (`Roster.insist`); never while the buffer is made.

        A rank that is behind may itself wait for another, and publishes that in time (HEAR_S). Then that other rank is
        accused. What a rank published before it was stopped in a wait expires; until then all ranks may seem to wait
        for each other.

        If the view has changed after the deadline, the others restart and so does their time, once for each change.
        Otherwise a rank that was behind would be accused, because of a report that arrived after the check, in a view
        in which its time has just begun.
        """
        if self._is_coming_in:
            return False
        heard = self.roster.heard  # first: it is written after the version
        deadline = self._renewed(seq, deadline)
        late_s, evicts = time.monotonic() - deadline, self.roster.job_handle.on_stall == "evict"
        if late_s < 0:
            return True
        lines = {rank: peer.line for rank, peer in self._peers.items() if peer.line.number == self.number}
        found = at_fault(self._rank, ranks, lines)
        if evicts and (late_s < HEAR_S or (not found and late_s < HEAR_S + FRESH_NS / 1e9)):
            return True
        return self.roster.insist(found or ranks, what, seq, deadline, heard)

    def _renewed(self, seq: int, deadline: float) -> float:
        """Return until when call `seq` waits for the others in the view that is current now."""
        version = self._calls.version
        if version == self._seen:
            return deadline
        if self._patience[:2] != (seq, version):
            self._patience = seq, version, self.patience(deadline)
        return max(deadline, self._patience[2])

    def issue(self, seq: int, is_pull: bool, publish: Callable[[], None]) -> bool:
        """Make call `seq`; return False if the view is changing and the call must not be made."""
        return self._calls.issue(seq, is_pull, self._seen, publish)

    def gather(self, seq: int, note: Callable[[], None]) -> bool:
        """Record that all rows of call `seq` have been seen; return False if the view is changing (then see
        `decide`).
        """
        return self._calls.complete(seq, self._seen, note)

    def withdraw(self) -> bool:
        """Record that the last call has failed; return False if the view is changing, which may keep the call alive
        among the remaining ranks.
        """
        return self._calls.withdraw(self._seen)

    def decide(self, op: str, seq: int, deadline: float) -> Parties:
        """Return the ranks with a part in the last call, which continues in its epoch.

        Raises:
            Moved: the call is to be made again, in another epoch.
            RankFailedError, PeerError: a loss ends it (mode "raise").
            EvictedError, NoQuorumError: this process cannot continue.
        """
        self._op = op
        place = self._place(seq, deadline if self._exchange.settled >= seq else 0.0)
        if not place.failed and place.epoch == self._exchange.epoch:
            return self._parties(place)
        self._next = seq + place.failed
        self._exchange.gathered = seq  # last: it marks the call as finished
        if not place.failed:
            raise Moved
        raise self._failure(place.epoch, op, seq, time.monotonic() - self._exchange.began)

    def _place(self, seq: int, patience: float = 0.0) -> CallState:
        """Return the state of a call, as soon as no agreement is under way.

        Until `patience`, a lack of quorum is no error: other ranks may have ended the call.
        """
        started = time.monotonic()
        settings = self.roster.job_handle.runtime.settings
        last = max(patience, started + settings.no_quorum_s + settings.patience_s + self._timeout_s)
        while not self._calls.await_thaw(THAW_S):
            self._interrupt()
            now = time.monotonic()
            try:
                self._check()
            except expected(NoQuorumError):
                if now > patience:
                    raise
            if now > last:
                elapsed = now - started
                where = context(self._op, rank=self._rank, seq=seq, epoch=self._exchange.epoch, elapsed=elapsed)
                raise NoQuorumError(f"{where}: the ranks have not agreed on a view in time; repeat the step")
        place, self._seen = self._calls.place(seq, self._is_whole, self._exchange.epoch)
        self._asked = seq
        self.roster.require_part(self._rank)  # after the lock that `place` takes: the view is of this version, or later
        return place

    def _is_whole(self, slot: int, epoch: int, seq: int) -> bool:
        """Return whether a rank has contributed to a call; none has in an epoch that this rank has not entered."""
        rank = self.roster.job_handle.slots.index(slot)
        return epoch == self._exchange.epoch and rank in self._peers and self._exchange.has_row_of(rank, seq)

    def _parties(self, place: CallState) -> Parties:
        """Return the ranks with a part in a call of the buffer's epoch."""
        without = {self.roster.job_handle.slots.index(slot) for slot in place.without}
        gone = frozenset(rank for rank in self._exchange.members if self.is_gone(rank))
        return Parties(tuple(rank for rank in self._exchange.members if rank not in without), gone)

    def _look(self, rank: int, what: str, seq: int, started: float, deadline: float) -> None:
        """Between two polls of a rank's words: decide whether to keep waiting."""
        self._interrupt()
        self._check()
        self.show(self._op, seq or self._exchange.seq + 1, [rank])
        now = time.monotonic()
        if now <= deadline:
            return
        epoch = self.roster.view.epoch
        told = f"{what} ({context('epoch', rank=self._rank, peer=rank, epoch=epoch, elapsed=now - started)})"
        if not self.insist([rank], told, seq, deadline):
            raise silent(told, rank)

    def _look_between_calls(self, rank: int, what: str, started: float, deadline: float) -> None:
        self._look(rank, what, 0, started, deadline)

    def _failure(self, epoch: int, op: str, seq: int, elapsed: float) -> PeerError:
        """Return the error for the losses not raised yet, at least those of `epoch`; all losses since are in it."""
        losses = self._losses(self._told) or self._losses(epoch - 1)
        epoch = max([epoch, *(loss.epoch for loss in losses)])
        self._told = max(self._told, epoch)
        return failure(losses, op, self._rank, seq, epoch, elapsed)

    def await_end_of(self, rank: int, deadline: float) -> bool:
        """Wait until a rank of the epoch has left the view; return False if it is still there at the deadline."""
        while not self.is_gone(rank):
            self._interrupt()
            self._check()
            if time.monotonic() > deadline or self.roster.is_alive(rank):
                return False
            time.sleep(_LOOK_S)
        return True

    def unfinished(self, op: str) -> PeerError:
        """Return the error of a dispatch some of whose sources died during it (mode "raise")."""
        exchange = self._exchange
        return self._failure(self.roster.newest, op, exchange.seq, time.monotonic() - exchange.began)

    # ---- between two calls

    def offer(self) -> None:
        """Lend this rank's inbox for the first epoch, while the buffer is made; all ranks lend before one enters.
        Local.
        """
        self._inboxes.offer(self._begun.first)

    def come_in(self, deadline: float) -> None:
        """Enter the first epoch while the buffer is made. If the view changes meanwhile, the first call enters.

        A rank that has already entered must not be awaited in another epoch: it waits in the last round of the
        construction.

        Raises:
            ResourceError: no memory or descriptor is left here.
            CommTimeoutError: a member does not enter; no rank is accused of that while the buffer is made.
            EvictedError, NoQuorumError: this process cannot continue.
        """
        self._entered = {rank: member.incarnation for rank, member in self.roster.view.members.items()}
        self._is_coming_in, self._op = True, "Buffer"
        try:
            self.roster.check()
            place = self._place(self._next)
            if not place.failed and place.epoch == self._begun.first:
                self._enter(place.epoch, self._next, deadline)
        except expected(EvictedError, NoQuorumError):
            raise
        except expected(PeerError):
            self._seen = -1  # the first call meets it again, as on all ranks
        finally:
            self._is_coming_in = False
            self.hide()

    def turn(self, op: str, deadline: float) -> None:
        """Bring the buffer into the epoch of the next call; free of cost when it is already there.

        Raises:
            RankFailedError, PeerError: a rank was lost, and the loss has not been raised yet (mode "raise").
            CommTimeoutError: a member does not enter.
            EvictedError, NoQuorumError: this process cannot continue.
            Moved: the view has changed again.
        """
        if not self.must_turn:
            return
        self._check()
        self._op = op
        if first := self._first_of_new():
            self._drop_last(first)
        else:
            self._settle_last(deadline)
        while not self._come_to_next(op, deadline):
            deadline = self.patience(deadline)
        if self._refusal is not None:
            seq, header, reason = self._refusal
            if seq == self._exchange.seq + 1:  # otherwise an interrupt came when it was announced
                self._exchange.publish(header, None, reason, deadline)
            self._refusal = None

    def turn_to_refuse(self, op: str, deadline: float) -> PeerError | None:
        """As `turn`, for a call that this rank refuses; return the loss that fails it on all ranks, if one does.

        One error is raised for each call number on all ranks, so a loss that has failed a call which raises another
        error here is not raised again.
        """
        number = self._first_of_new() or self._next or self._exchange.seq + 1
        while True:
            try:
                self.turn(op, deadline)
                return None
            except expected(EvictedError, NoQuorumError):
                raise
            except expected(PeerError) as error:
                if self._next > number:
                    return error

    def _come_to_next(self, op: str, deadline: float) -> bool:
        """Enter the epoch of the next call, with all its participants; return False if the view has changed
        meanwhile.
        """
        exchange = self._exchange
        seq = self._next or exchange.seq + 1
        place = self._place(seq)
        if place.failed:
            self._next = seq + 1
            if place.epoch > self._told:
                raise self._failure(place.epoch, op, seq, 0.0)
            return False
        members = self._members(seq, place.epoch)
        is_there = place.epoch == exchange.epoch and members.keys() == self._peers.keys()
        if not is_there and not self._enter(place.epoch, seq, deadline):
            return False
        exchange.lose(self._parties(place))
        if not self._is_ready and not self._await_ready(deadline):
            return False
        self._is_ready = self._calls.is_complete(seq, exchange.epoch)
        return True

    def _members(self, seq: int, epoch: int) -> dict[int, Member]:
        slots = self.roster.job_handle.slots
        return {slots.index(slot): member for slot, member in self._calls.members(seq, epoch).items()}

    def _await_ready(self, deadline: float) -> bool:
        """Wait until all participants have mapped each other; return False if the view has changed meanwhile."""
        started, version, mark = time.monotonic(), self._seen, self._came_with
        if self._line.words[READY] != mark:  # an interrupt came before it was announced
            self._line.show_ready(mark)
        for rank, peer in self._peers.items():
            line = peer.line
            while line.number == self.number and line.words[READY] < mark and not self.is_gone(rank):
                if self._calls.version != version:
                    return False
                futex_sleep(line.address + 8 * READY, line.words[READY])
                self._look(rank, f"{self._op}: rank {rank} does not come into its epoch", 0, started, deadline)
        return True

    def _losses(self, after: int) -> list[Loss]:
        """Return the losses of epochs later than `after`; the exclusion of this rank itself is no loss here."""
        return [loss for loss in self.roster.losses(after) if loss.rank != self._rank]

    def note_agreed(self, agreed: Agreed) -> None:
        """As `BufferLane.note_agreed`; the losses that it contains count as raised."""
        self._told = max(self._told, agreed.epoch)
        super().note_agreed(agreed)

    def _first_of_new(self) -> int:
        """Return the number with which calls begin after a `sync` that no call has followed yet; 0 without one.

        Takes the lock, because view and plan receive a decision one after the other.
        """
        with self.roster.lock:
            return self._calls.first_seq if self.roster.view.agreed.epoch > self._exchange.epoch else 0

    def _drop_last(self, first: int) -> None:
        """Drop the calls before a `sync` (`first` is the one after it): no rank waits for them any more."""
        exchange = self._exchange
        exchange.end.close()
        exchange.end.lost = ""
        exchange.gathered = exchange.seq
        self._next = first
        self._refusal = None
        if self.raises and self._losses(self._told):  # an error interrupted the sync that would have reported them
            raise self._failure(self.roster.newest, self._op, self._next, 0.0)

    def _settle_last(self, deadline: float) -> None:
        """Settle a call that was refused or aborted before it was gathered; if it moves to another epoch it is refused
        again.

        If it stays, all its rows must have arrived before the plan is queried for the next call: queries are in order.
        A call that other ranks have completed, and that has raised here, leaves the buffer unusable on this rank.
        """
        exchange = self._exchange
        if exchange.gathered >= exchange.seq:
            exchange.end.miss()
            return
        seq, header, reason = exchange.seq, exchange.header, exchange.reason()
        place = self._place(seq)
        if not place.failed and place.epoch == exchange.epoch:
            exchange.lose(self._parties(place))
            exchange.settle(deadline)
            return
        if not place.failed:
            text = reason if header.refused else f"aborted this call in epoch {exchange.epoch}".encode()
            self._refusal = seq, header._replace(refused=header.refused or GIVEN_UP), text
        self._next = seq + place.failed
        exchange.end.close()
        exchange.gathered = seq
        if place.failed and place.epoch > self._told:
            raise self._failure(place.epoch, self._op, seq, 0.0)

    def _enter(self, epoch: int, seq: int, deadline: float) -> bool:
        """Enter an epoch, with the participants of call `seq`; return False if the view has changed meanwhile."""
        version, members = self._seen, self._members(seq, epoch)
        wait = Wait(epoch, lambda: self._calls.version != version, time.monotonic(), deadline)
        met = self._inboxes.meet(members, wait)
        if met is None:
            return False
        try:
            self._begin(epoch, seq, met)
            return True
        finally:
            if not self._inboxes.uses(met):
                self._inboxes.give_back(met)

    def _begin(self, epoch: int, seq: int, met: Met) -> None:
        """Make the mapped memory that of the buffer, and drop the old epoch's."""
        old = self._exchange.epoch
        self.forget()
        self._is_ready, self._came_with = False, tag(epoch, seq)
        self._peers = {}  # empty until all is done: an interrupt before that enters once more
        self._inboxes.use(met)
        self._exchange.begin(epoch, met.regions, seq)
        self._entered = {rank: peer.incarnation for rank, peer in met.peers.items()}
        self._peers = met.peers
        self._next = 0
        self._line.show_ready(self._came_with)
        if old and len(met.peers) < self._config.num_ranks:
            logger.warning(
                "a buffer continues in epoch %d with ranks %s (rank %d)", epoch, sorted(met.peers), self._rank
            )
