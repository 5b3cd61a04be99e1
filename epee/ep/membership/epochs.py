"""How a CPU buffer goes on when ranks of its group die, are voted out or put out, or come back.

A buffer is in one **epoch** at a time: that of the newest view that concerned its ranks (`group_view.py`). Each epoch
has inboxes and arenas of its own, made by its members for its members, and its calls are counted from 1. What a zombie
may still write lies in memory of an epoch that is over: nobody reads it or uses it again, and the system frees it when
the last process that has mapped it lets go. That is the quarantine.

**A call meets a new view.** Each call has two parts: rows are exchanged until everybody has seen everybody's
(*gathered*), then the payload moves. A rank that has gathered a call when the view changes ends it in the old epoch;
else `call_outcome.py` says what becomes of it, out of the records that all who stay have stamped with the new view. The
stamp is set on the agent thread, so nobody waits for a rank that computes.

    gathered by somebody    all rows are there. A dispatch counts the sources whose payload has arrived whole (`got`);
                            mode "raise" makes it an error where one has not. A combine reads what all had put.
    not gathered            mode "raise": `RankFailedError` on all. Mode "mask": the call is made again in the new
                            epoch; a combine that all had begun ends over those who have.

In mode "raise" every rank raises once for each loss, in the call that meets it or in its next one. So the ranks are in
step without another word: the first call after that is call 1 of the new epoch for everybody. In mode "mask" it is so
because the verdicts are equal. A call that was given up (a time-out, a refusal) before it was gathered and that moves
is announced again as a refusal.

**Entering an epoch.** Each rank lends a new inbox and maps those of the others (`inboxes.py`); then it is in. It makes
its inbox when it is through with the old epoch, so once somebody is in, nobody asks about the old one any more. Every
wait ends with the time-out of the call, by the policy for silent ranks (`on_stall`), or with the next view, which
begins the same again.

Who writes: each rank its own line and inbox blob; inboxes as in `control/inbox.py`. A crash between two steps: the rank
is not in the next view; its line says how far it was. A replacement process begins like everybody else: with the epoch
that its view names and a line of its own.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable

from ...errors import (
    EvictedError,
    NoQuorumError,
    PeerError,
    context,
)
from ...memory.claim import has_ended
from ...memory.signals import futex_sleep
from ...view.process.detector import is_torn_down
from ...view.protocol.messages import PUT_OUT, STALLED
from ..config import BufferConfig
from ..control.inbox import OP_COMBINE, OP_NAMES, Exchange, Header, Moved, Turned, Withdrawn, inbox_layout
from ..control.membership import Agreed
from .birth import Begun
from .call_outcome import Contest, Record, Verdict, after, judge, missing
from .group_view import Loss, View, failure
from .inboxes import Met, Peer
from .lane import BufferLane, silent
from .registry import FRESH_NS, GATHERED, ISSUED, VIEW, WITHDRAWN, Line, at_fault

logger = logging.getLogger("epee")

HEAR_S = 0.15  # how long a time-out waits to hear for whom the others wait


class Survivor(BufferLane):
    """The part of a throughput buffer that knows of views."""

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
        self._peers: dict[int, Peer] = {}  # of the epoch; this rank's own line included
        self._refusal: tuple[Header, bytes] | None = None  # to be announced in the next epoch
        self._told = begun.roster.heard  # losses up to this epoch have been raised
        self._is_coming_in = False

    def close(self) -> None:
        """As `BufferLane.close`."""
        super().close()
        if os.getpid() == self._pid:
            self._peers.clear()

    # ---- in a call

    @property
    def has_turned(self) -> bool:
        """Whether there is a view that the buffer is not in yet."""
        return self.roster.newest != self._exchange.epoch

    def check(self, src: int, is_data: bool) -> None:
        """Look around while waiting for the row of `src`, or for its payload.

        Raises:
            Turned: the view has changed; where a payload is waited for: that rank is gone.
            EvictedError, NoQuorumError: this process cannot go on.
        """
        self._check()
        if self.is_gone(src) if is_data else self.has_turned:
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
        """
        if self._is_coming_in:
            return False
        late_s, evicts = time.monotonic() - deadline, self.roster.seat.on_stall == "evict"
        found = at_fault(self._rank, ranks, {rank: peer.line for rank, peer in self._peers.items()})
        if evicts and (late_s < HEAR_S or (not found and late_s < HEAR_S + FRESH_NS / 1e9)):
            return True
        return self.roster.insist(found or ranks, what, seq, deadline)

    def issue(self, seq: int) -> bool:
        """Note that call `seq` is made; False when the view has changed, and it must not be."""
        return self._note(ISSUED, seq)

    def gather(self, seq: int) -> bool:
        """Note that all rows of call `seq` have been seen; False when the view has changed: `decide` what it means."""
        return self._note(GATHERED, seq)

    def withdraw(self, seq: int) -> bool:
        """Note that call `seq` is given up on all ranks; False when the view has changed: `decide` what it means."""
        return self._note(WITHDRAWN, seq)

    def _note(self, word: int, seq: int) -> bool:
        """Store a call's number in a word of the own record, unless that is stamped with a new view already."""
        with self._lock:
            if self.roster.newest != self._exchange.epoch:
                return False
            self._words[word] = seq
            return True

    def decide(self, op: str, seq: int, is_pull: bool, deadline: float) -> tuple[int, ...]:
        """Say which ranks have a part in a call of the old epoch that goes on there.

        Raises:
            Moved: none; it is to be made again.
            Withdrawn: none; it is given up.
            RankFailedError, PeerError: a loss ends it (mode "raise").
            CommTimeoutError: who stays does not say what has become of it there.
        """
        contest = Contest(self._exchange.epoch, seq, is_pull)
        started = time.monotonic()
        self._op, view = op, None
        while True:
            newest = self.roster.view
            self.roster.require_part(self._rank, newest)
            if view is not newest:
                view, deadline = newest, self.patience(deadline)
            stayed, ended = self._records(view)
            lost = self.raises and len(stayed) < len(self._peers)
            verdict = judge(contest, view.epoch, stayed, ended, lost)
            if verdict is None:
                self._await_stamp(missing(view.epoch, stayed)[0], view, op, seq, started, deadline)
                continue
            with self.roster.lock:
                if self.roster.view.epoch != view.epoch:
                    continue
                self._line.set_record(after(verdict, seq, self._line.record()))
            if verdict is Verdict.WHOLE:
                return self._exchange.members
            if verdict is Verdict.AMONG and self._await_rows(view, list(stayed), op, started, deadline):
                issued = [rank for rank in ended if self._exchange.has_row_of(rank)]
                return tuple(sorted([*stayed, *issued]))
            if verdict is Verdict.AMONG:
                continue
            self._exchange.gathered = seq
            if verdict is Verdict.MOVE:
                raise Moved
            if verdict is Verdict.GIVEN_UP:
                raise Withdrawn
            raise self._failure(view, op, seq, time.monotonic() - started)

    def _records(self, view: View) -> tuple[dict[int, Record], dict[int, Record]]:
        """Return the records of those of the epoch who stay in `view`, and of those who have died or left."""
        stayed, ended = {}, {}
        for rank, peer in self._peers.items():
            member = view.members.get(rank)
            if member is not None and member.incarnation == peer.incarnation:
                stayed[rank] = peer.line.record_of(self._number)
            elif self.roster.cause(rank, peer.incarnation) not in (STALLED, PUT_OUT):
                ended[rank] = peer.line.record_of(self._number)
        return stayed, ended

    def _await_stamp(self, rank: int, view: View, op: str, seq: int, started: float, deadline: float) -> None:
        """Wait until a rank's record may be of `view`, or the view has changed again."""
        line = self._peers[rank].line
        seen = line.words[VIEW]
        if seen != view.epoch:
            self._nap(line, VIEW, seen)
        self._look(rank, f"{op}: rank {rank} does not say where it is", seq, started, deadline)

    def _await_rows(self, view: View, ranks: list[int], op: str, started: float, deadline: float) -> bool:
        """Wait until the rows of all who have issued the call are there; False when the view has changed again."""
        for rank in ranks:
            while not self._exchange.has_row_of(rank):
                if self.roster.view.epoch != view.epoch:
                    return False
                self._nap(self._line, VIEW, view.epoch)
                self._look(rank, f"{op}: the row of rank {rank} does not come", self._exchange.seq, started, deadline)
        return True

    def _nap(self, line: Line, word: int, seen: int) -> None:
        futex_sleep(line.address + 8 * word, seen)

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

    def _failure(self, view: View, op: str, seq: int, elapsed: float) -> PeerError:
        """Return the error for the losses that have not been raised yet; those that came after `view` are in it."""
        losses = self._losses(self._told) or self._losses(self._exchange.epoch)
        epoch = max([view.epoch, *(loss.epoch for loss in losses)])
        self._told = max(self._told, epoch)
        return failure(losses, op, self._rank, seq, epoch, elapsed)

    def await_end_of(self, rank: int, deadline: float) -> bool:
        """Wait until a rank of the epoch is gone from the view; False when it is still there at the deadline."""
        incarnation = self._peers[rank].incarnation
        while not self.roster.is_gone(rank, incarnation):
            self._interrupt()
            self._check()
            if time.monotonic() > deadline or self.roster.is_alive(rank):
                return False
            self._nap(self._line, VIEW, self.roster.newest)
        return True

    def unfinished(self, op: str) -> PeerError:
        """Return the error of a dispatch of whose sources some died in the midst of it (mode "raise")."""
        return self._failure(self.roster.view, op, self._exchange.seq, 0.0)

    # ---- between two calls

    def offer(self) -> None:
        """Lend this rank's inbox for the first epoch, while the buffer is made: all do before one comes in. Local."""
        self._inboxes.offer(self.roster.view.epoch)

    def come_in(self, deadline: float) -> None:
        """Enter the first epoch while the buffer is made. If the view changes meanwhile, the first call does it.

        Who is in already must not be waited for in another epoch: it waits in the last round of the construction.

        Raises:
            ResourceError: no memory or descriptor is left here.
            CommTimeoutError: a member does not come; nobody is accused of that while the buffer is made.
            EvictedError, NoQuorumError: this process cannot go on.
        """
        self._entered = {rank: member.incarnation for rank, member in self.roster.view.members.items()}
        told, self._is_coming_in = self._told, True
        try:
            self.roster.check()
            self._op = "Buffer"
            self._enter(self.roster.view, "Buffer", deadline)
        except (EvictedError, NoQuorumError):
            raise
        except PeerError:
            self._told = told  # the first call meets it again, as on all ranks
        finally:
            self._is_coming_in = False
            self.hide()

    def turn(self, op: str, deadline: float) -> None:
        """Bring the buffer into the newest epoch; costs nothing when it is there.

        Raises:
            RankFailedError, PeerError: somebody was lost, and it has not been told yet (mode "raise").
            CommTimeoutError: a member does not come.
            EvictedError, NoQuorumError: this process cannot go on.
        """
        if self.roster.newest == self._exchange.epoch:
            return
        self._check()
        self._op = op
        if self.roster.view.agreed.epoch > self._exchange.epoch:
            self._drop_last()
        else:
            self._settle_last(deadline)
        while not self._enter(self.roster.view, op, deadline):
            deadline = self.patience(deadline)
        if self._refusal is not None:
            header, reason = self._refusal
            self._exchange.publish(header, None, reason, deadline)
            self._refusal = None

    def has_losses_to_tell(self) -> bool:
        """Return whether the next call will raise a loss."""
        return self.raises and bool(self._losses(self._told))

    def _losses(self, after: int) -> list[Loss]:
        """Return what was lost in epochs later than `after`; that this rank was put out itself is no loss here."""
        return [loss for loss in self.roster.losses(after) if loss.rank != self._rank]

    def note_agreed(self, agreed: Agreed) -> None:
        """As `BufferLane.note_agreed`; the losses that it shows are told."""
        self._told = max(self._told, agreed.epoch)
        super().note_agreed(agreed)

    def _drop_last(self) -> None:
        """Forget the calls before a `sync`: nobody waits for them any more, here or elsewhere."""
        exchange = self._exchange
        exchange.end.close()
        exchange.end.lost = ""
        exchange.gathered = exchange.seq
        self._refusal = None

    def _settle_last(self, deadline: float) -> None:
        """Find out about a call that was refused or given up before it was gathered; if it moves it is refused again.

        One that others have completed, and that has raised here, leaves the buffer unusable on this rank.
        """
        exchange = self._exchange
        if exchange.gathered >= exchange.seq:
            exchange.end.miss()
            return
        header, reason, epoch = exchange.header, exchange.reason(), exchange.epoch
        try:
            self.decide(OP_NAMES[header.op], exchange.seq, header.op == OP_COMBINE, deadline)
            exchange.end.miss()
        except Withdrawn:
            pass
        except Moved:
            text = reason if header.refused else f"it gave up this call in epoch {epoch}".encode()
            self._refusal = header._replace(refused=1), text
        exchange.gathered = exchange.seq

    def _enter(self, view: View, op: str, deadline: float) -> bool:
        """Enter the epoch of `view`; False when there is a newer one."""
        started = time.monotonic()
        self.roster.require_part(self._rank, view)
        if self.has_losses_to_tell():
            raise self._failure(view, op, self._exchange.seq, 0.0)
        met = self._inboxes.meet(view, started, deadline)
        if met is None:
            return False
        try:
            with self.roster.lock:
                if self.roster.view.epoch != view.epoch:
                    return False
                self._line.set_record(Record(view.epoch, view.epoch))
            self._begin(view, met)
            return True
        finally:
            if self._inboxes.own is not met.regions[self._rank]:
                self._inboxes.give_back(met)

    def _begin(self, view: View, met: Met) -> None:
        """Make the mapped memory that of the buffer, and drop the old epoch's."""
        old = self._exchange.epoch
        self.forget()
        self._inboxes.use(met)
        self._peers = met.peers
        self._entered = {rank: peer.incarnation for rank, peer in met.peers.items()}
        self._exchange.begin(view.epoch, met.regions)
        if old and len(met.peers) < self._config.num_ranks:
            logger.warning(
                "a buffer goes on in epoch %d with ranks %s (rank %d)", view.epoch, sorted(met.peers), self._rank
            )
