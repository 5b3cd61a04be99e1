"""Survival of a `Buffer` on CPUs: it goes on when ranks of its group die, are voted out or put out, or come back.

A buffer is in one **epoch** at a time: that of a view that concerned its ranks. Each epoch has inboxes and arenas of
its own, made by its members for its members; calls are counted through all of them. What a zombie may still write lies
in memory of an epoch that is over: nobody reads it or uses it again, and the system frees it when the last process that
has mapped it lets go. That is the quarantine.

**A call meets a new view.** Each call has two parts: rows are exchanged until everybody has seen everybody's
(*gathered*), then the payload moves. Which epoch a call runs in is the collectives' rule (`call_course.py`): those to
which all who are gone had contributed, by their rows, end where they are, and from the next one on

    mode "raise"    the first call fails on all (`RankFailedError`); later ones run in the new epoch.
    mode "mask"     calls run in the new epoch, those that were begun once more; a combine that all who stay had begun
                    ends where it is, among them.

A dispatch that ends where it is counts the sources whose payload has arrived whole (`got`); in mode "raise" it is an
error where one has not. A combine reads what all had put. Every rank raises once for each loss: whose dispatch has told
it already uses up the number of the call that fails with the others. A call that was given up (a time-out, a refusal)
and that runs again with the others is announced again as a refusal.

**Entering an epoch.** Each rank lends a new inbox and maps those of the others (`inboxes.py`), says so (`READY`), and
makes no call before all have said so. Else one that dies early would have a part in the call in the eyes of those who
had mapped its inbox, and none in those of the others. It makes its inbox when it is through with the old epoch, so once
somebody is in, nobody asks about the old one any more. Who is taken in by a decision that also removes somebody may
have a part from a later call on than the others: then they enter the same epoch once more, with it. Every wait ends
with the time-out of the call, by the policy for silent ranks (`on_stall`), or with the next view, which begins the same
again.

Who writes: each rank its own line and inbox blob; inboxes as in `control/inbox.py`. A crash between two steps: the rank
is not in the next view. A replacement process begins like everybody else, with the call that its view names.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable

from ...errors import EvictedError, NoQuorumError, PeerError, context
from ...memory.claim import has_ended
from ...memory.signals import futex_sleep, tag
from ...view.process.detector import is_torn_down
from ...view.protocol.messages import Member
from ...view.protocol.outcome import CallState
from ..config import BufferConfig
from ..control.header import GIVEN_UP, Header
from ..control.inbox import Exchange, Moved, Turned
from ..control.membership import Agreed, Parties
from ..control.words import inbox_layout
from .birth import Begun
from .call_course import CallCourse
from .group_view import Loss, failure
from .inboxes import EpochMember, Met, Wait
from .lane import BufferLane, silent
from .registry import FRESH_NS, READY, at_fault

logger = logging.getLogger("epee")

HEAR_S = 0.15  # how long a time-out waits to hear for whom the others wait
THAW_S = 0.002  # between two looks around during an agreement
_LOOK_S = 0.001


class EpochLane(BufferLane):
    """The lane of a `Buffer` on CPUs: its calls move from epoch to epoch as ranks are lost and come back."""

    def __init__(
        self,
        config: BufferConfig,
        rank: int,
        begun: Begun,
        exchange: Exchange,
        timeout_s: float,
        interrupt: Callable[[], None],
    ) -> None:
        super().__init__(config, rank, begun, exchange, timeout_s, interrupt, inbox_layout(config).nbytes)
        assert begun.roster.calls is not None
        self._calls: CallCourse = begun.roster.calls
        self._peers: dict[int, EpochMember] = {}  # of the epoch; this rank's own line included
        self._next = self._calls.first_seq  # number of the next call where it is not the one after the last; else 0
        self._asked = 0  # the last call that the course was asked about
        self._seen = -1  # its version then
        self._came_with = 0  # the epoch, and the call with which this rank has entered it
        self._is_ready = False  # all who have a part in the next call are known to have entered it
        self._refusal: tuple[int, Header, bytes] | None = None  # of a call, to be announced in the next epoch
        self._told = begun.roster.heard  # losses up to this epoch have been raised
        self._is_coming_in = False
        self._patience = 0, -1, 0.0  # call, version and end of the time that a change of the view has given it

    def close(self) -> None:
        """As `BufferLane.close`."""
        super().close()
        if os.getpid() == self._pid:
            self._peers.clear()

    # ---- in a call

    counts_entering = True

    @property
    def has_turned(self) -> bool:
        """Whether the lane has changed since its calls were last asked about, or is about to."""
        return self._seen != self._calls.version or self._calls.frozen

    @property
    def must_turn(self) -> bool:
        """Whether there is something to do before the next call: it must be asked about, told of, or entered for."""
        if self.has_turned or not self._is_ready or self._next:
            return True
        return self._calls.changes(self._exchange.epoch) and self._asked != self._exchange.seq + 1

    @property
    def is_in_place(self) -> bool:
        """As `BufferLane.is_in_place`; also before the first call, which has to be asked about first."""
        seq = self._exchange.seq + 1
        is_asked = self._asked == seq or not self._calls.changes(self._exchange.epoch)
        return not self.has_turned and is_asked and self._next in (0, seq)

    def check(self, src: int, is_data: bool) -> None:
        """Look around while waiting for the row of `src`, or for its payload.

        Raises:
            Turned: the view has changed; where a payload is waited for: that rank is gone.
            EvictedError, NoQuorumError: this process cannot go on.
        """
        self._check()
        if self.is_gone(src) if is_data else self._seen != self._calls.version:
            raise Turned
        pid, start_time = self._peers[src].process
        if has_ended(pid, start_time) or is_torn_down(pid, start_time):
            self.roster.look_at(src)  # the agent's own sources may be later

    def patience(self, deadline: float) -> float:
        """Return until when to wait now that the view has changed: the others begin anew, and so does the time-out.

        The old deadline may be over because of those who are gone, which must not speak against those who are left.
        """
        return max(deadline, time.monotonic() + self._timeout_s)

    def is_gone(self, rank: int) -> bool:
        """Return whether a member of the buffer's epoch is not in the newest view."""
        return self.roster.is_gone(rank, self._peers[rank].incarnation)

    def insist(self, ranks: list[int], what: str, seq: int, deadline: float) -> bool:
        """At a time-out: True while it may help to wait on (`Roster.insist`); never while the buffer is made.

        Who is behind may itself wait for somebody, and shows it in time (HEAR_S). Then that one is accused. What a rank
        showed that was stopped in a wait runs out; until then it may look as if all waited for each other.

        Where the view has changed behind the deadline, the others begin anew, and so does their time, once for each
        change. Else who was behind would be accused, by news that came since it was looked at, in a view in which its
        time has just begun.
        """
        if self._is_coming_in:
            return False
        heard = self.roster.heard  # first: it is written behind the version
        deadline = self._renewed(seq, deadline)
        late_s, evicts = time.monotonic() - deadline, self.roster.seat.on_stall == "evict"
        if late_s < 0:
            return True
        lines = {rank: peer.line for rank, peer in self._peers.items() if peer.line.number == self._number}
        found = at_fault(self._rank, ranks, lines)
        if evicts and (late_s < HEAR_S or (not found and late_s < HEAR_S + FRESH_NS / 1e9)):
            return True
        return self.roster.insist(found or ranks, what, seq, deadline, heard)

    def _renewed(self, seq: int, deadline: float) -> float:
        """Return until when call `seq` waits for the others in the view that is known now."""
        version = self._calls.version
        if version == self._seen:
            return deadline
        if self._patience[:2] != (seq, version):
            self._patience = seq, version, self.patience(deadline)
        return max(deadline, self._patience[2])

    def issue(self, seq: int, is_pull: bool, publish: Callable[[], None]) -> bool:
        """Make call `seq`; False when the view changes, and it must not be."""
        return self._calls.issue(seq, is_pull, self._seen, publish)

    def gather(self, seq: int, note: Callable[[], None]) -> bool:
        """Note that all rows of call `seq` have been seen; False when the view changes: `decide` what it means."""
        return self._calls.complete(seq, self._seen, note)

    def withdraw(self) -> bool:
        """Note that the last call has failed; False when the view changes, which may make it one of those who stay."""
        return self._calls.withdraw(self._seen)

    def decide(self, op: str, seq: int, deadline: float) -> Parties:
        """Say which ranks have a part in the last call, which goes on where it is.

        Raises:
            Moved: it is to be made again, in another epoch.
            RankFailedError, PeerError: a loss ends it (mode "raise").
            EvictedError, NoQuorumError: this process cannot go on.
        """
        self._op = op
        place = self._place(seq, deadline if self._exchange.settled >= seq else 0.0)
        if not place.failed and place.epoch == self._exchange.epoch:
            return self._parties(place)
        self._next = seq + place.failed
        self._exchange.gathered = seq  # last: it says that the call is over
        if not place.failed:
            raise Moved
        raise self._failure(place.epoch, op, seq, time.monotonic() - self._exchange.began)

    def _place(self, seq: int, patience: float = 0.0) -> CallState:
        """Return where a call stands, as soon as no agreement is under way.

        Until `patience` a lack of quorum is no error: others may have ended the call.
        """
        started = time.monotonic()
        settings = self.roster.seat.runtime.settings
        last = max(patience, started + settings.no_quorum_s + settings.patience_s + self._timeout_s)
        while not self._calls.await_thaw(THAW_S):
            self._interrupt()
            now = time.monotonic()
            try:
                self._check()
            except NoQuorumError:
                if now > patience:
                    raise
            if now > last:
                elapsed = now - started
                where = context(self._op, rank=self._rank, seq=seq, epoch=self._exchange.epoch, elapsed=elapsed)
                raise NoQuorumError(f"{where}: an agreement is under way and does not end; make the step again")
        place, self._seen = self._calls.place(seq, self._is_whole, self._exchange.epoch)
        self._asked = seq
        self.roster.require_part(
            self._rank
        )  # behind the lock that `place` takes: the view is of this version, or later
        return place

    def _is_whole(self, slot: int, epoch: int, seq: int) -> bool:
        """Return whether a rank has contributed to a call; nobody has in an epoch that this rank is not in."""
        rank = self.roster.seat.slots.index(slot)
        return epoch == self._exchange.epoch and rank in self._peers and self._exchange.has_row_of(rank, seq)

    def _parties(self, place: CallState) -> Parties:
        """Return who has a part in a call of the buffer's epoch."""
        without = {self.roster.seat.slots.index(slot) for slot in place.without}
        gone = frozenset(rank for rank in self._exchange.members if self.is_gone(rank))
        return Parties(tuple(rank for rank in self._exchange.members if rank not in without), gone)

    def _look(self, rank: int, what: str, seq: int, started: float, deadline: float) -> None:
        """Between two looks at what a rank does: see whether to go on waiting."""
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
        """Return the error for the losses not raised yet, those of `epoch` at least; all that came since are in it."""
        losses = self._losses(self._told) or self._losses(epoch - 1)
        epoch = max([epoch, *(loss.epoch for loss in losses)])
        self._told = max(self._told, epoch)
        return failure(losses, op, self._rank, seq, epoch, elapsed)

    def await_end_of(self, rank: int, deadline: float) -> bool:
        """Wait until a rank of the epoch is gone from the view; False when it is still there at the deadline."""
        while not self.is_gone(rank):
            self._interrupt()
            self._check()
            if time.monotonic() > deadline or self.roster.is_alive(rank):
                return False
            time.sleep(_LOOK_S)
        return True

    def unfinished(self, op: str) -> PeerError:
        """Return the error of a dispatch of whose sources some died in the midst of it (mode "raise")."""
        exchange = self._exchange
        return self._failure(self.roster.newest, op, exchange.seq, time.monotonic() - exchange.began)

    # ---- between two calls

    def offer(self) -> None:
        """Lend this rank's inbox for the first epoch, while the buffer is made: all do before one comes in. Local."""
        self._inboxes.offer(self._begun.first)

    def come_in(self, deadline: float) -> None:
        """Enter the first epoch while the buffer is made. If the view changes meanwhile, the first call does it.

        Who is in already must not be waited for in another epoch: it waits in the last round of the construction.

        Raises:
            ResourceError: no memory or descriptor is left here.
            CommTimeoutError: a member does not come; nobody is accused of that while the buffer is made.
            EvictedError, NoQuorumError: this process cannot go on.
        """
        self._entered = {rank: member.incarnation for rank, member in self.roster.view.members.items()}
        self._is_coming_in, self._op = True, "Buffer"
        try:
            self.roster.check()
            place = self._place(self._next)
            if not place.failed and place.epoch == self._begun.first:
                self._enter(place.epoch, self._next, deadline)
        except (EvictedError, NoQuorumError):
            raise
        except PeerError:
            self._seen = -1  # the first call meets it again, as on all ranks
        finally:
            self._is_coming_in = False
            self.hide()

    def turn(self, op: str, deadline: float) -> None:
        """Bring the buffer into the epoch of the next call; costs nothing when it is there.

        Raises:
            RankFailedError, PeerError: somebody was lost, and it has not been told yet (mode "raise").
            CommTimeoutError: a member does not come.
            EvictedError, NoQuorumError: this process cannot go on.
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
            if seq == self._exchange.seq + 1:  # else an interrupt came when it was announced
                self._exchange.publish(header, None, reason, deadline)
            self._refusal = None

    def turn_to_refuse(self, op: str, deadline: float) -> PeerError | None:
        """As `turn`, for a call that this rank refuses; return the loss that fails it everywhere, if one does.

        One error is raised for each number on all ranks, so a loss that has failed a call which raises something else
        here is not raised again.
        """
        number = self._first_of_new() or self._next or self._exchange.seq + 1
        while True:
            try:
                self.turn(op, deadline)
                return None
            except (EvictedError, NoQuorumError):
                raise
            except PeerError as error:
                if self._next > number:
                    return error

    def _come_to_next(self, op: str, deadline: float) -> bool:
        """Be where the next call runs, with all who have a part in it; False when the view has changed meanwhile."""
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
        slots = self.roster.seat.slots
        return {slots.index(slot): member for slot, member in self._calls.members(seq, epoch).items()}

    def _await_ready(self, deadline: float) -> bool:
        """Wait until all who take part have mapped each other; False when the view has changed meanwhile."""
        started, version, mark = time.monotonic(), self._seen, self._came_with
        if self._line.words[READY] != mark:  # an interrupt came before it was said
            self._line.show_ready(mark)
        for rank, peer in self._peers.items():
            line = peer.line
            while line.number == self._number and line.words[READY] < mark and not self.is_gone(rank):
                if self._calls.version != version:
                    return False
                futex_sleep(line.address + 8 * READY, line.words[READY])
                self._look(rank, f"{self._op}: rank {rank} does not come into its epoch", 0, started, deadline)
        return True

    def _losses(self, after: int) -> list[Loss]:
        """Return what was lost in epochs later than `after`; that this rank was put out itself is no loss here."""
        return [loss for loss in self.roster.losses(after) if loss.rank != self._rank]

    def note_agreed(self, agreed: Agreed) -> None:
        """As `BufferLane.note_agreed`; the losses that it shows are told."""
        self._told = max(self._told, agreed.epoch)
        super().note_agreed(agreed)

    def _first_of_new(self) -> int:
        """Return the number with which calls begin after a `sync` that no call has followed yet; 0 without one.

        Under the lock, for view and course are told of a decision one after the other.
        """
        with self.roster.lock:
            return self._calls.first_seq if self.roster.view.agreed.epoch > self._exchange.epoch else 0

    def _drop_last(self, first: int) -> None:
        """Forget the calls before a `sync`, `first` is the one after it: nobody waits for them any more."""
        exchange = self._exchange
        exchange.end.close()
        exchange.end.lost = ""
        exchange.gathered = exchange.seq
        self._next = first
        self._refusal = None
        if self.raises and self._losses(
            self._told
        ):  # an error has taken this rank out of the sync that would have shown them
            raise self._failure(self.roster.newest, self._op, self._next, 0.0)

    def _settle_last(self, deadline: float) -> None:
        """Find out about a call that was refused or given up before it was gathered; if it moves it is refused again.

        If it stays, all its rows must have come before the next one is asked about: calls are asked about in order. One
        that others have completed, and that has raised here, leaves the buffer unusable on this rank.
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
            text = reason if header.refused else f"gave up this call in epoch {exchange.epoch}".encode()
            self._refusal = seq, header._replace(refused=header.refused or GIVEN_UP), text
        self._next = seq + place.failed
        exchange.end.close()
        exchange.gathered = seq
        if place.failed and place.epoch > self._told:
            raise self._failure(place.epoch, self._op, seq, 0.0)

    def _enter(self, epoch: int, seq: int, deadline: float) -> bool:
        """Enter an epoch, with those who have a part in call `seq`; False when the view has changed meanwhile."""
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
        self._peers = {}  # nobody is known until all is done: an interrupt before that enters once more
        self._inboxes.use(met)
        self._exchange.begin(epoch, met.regions, seq)
        self._entered = {rank: peer.incarnation for rank, peer in met.peers.items()}
        self._peers = met.peers
        self._next = 0
        self._line.show_ready(self._came_with)
        if old and len(met.peers) < self._config.num_ranks:
            logger.warning("a buffer goes on in epoch %d with ranks %s (rank %d)", epoch, sorted(met.peers), self._rank)
