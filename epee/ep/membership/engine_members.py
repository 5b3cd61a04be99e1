"""The membership of a `Buffer` on CPUs of one host whose calls run over an engine of its own (`hosts/direct.py`).

The engine handles losses by itself: a call that loses a rank ends as its mode says, in the same epoch on all ranks.
Members that return, or join, are no matter of the engine. Instead the members make a **new engine**, of the members in
a later epoch of the view, and drop the old one with all its calls, its slots and its memory (`engine/bootstrap/
meeting.py`). That happens

    when the buffer is made     with the epoch on which the ranks have agreed
    after `sync` with a mask    with the decision that ended it, by the next call of each member. So members
                                that stand before different calls are in step again
    when a process joins        The rows of a call carry the newest epoch in which a process has joined, as far as their
                                writers know. If a row of a call names a later one than that of the engine, all ranks
                                have read it in that call: they leave the engine behind, and make the call again

The rows of a call are the same on all members, so all make the new engine of the same epoch, before the same call. A
process that joins makes no call before that: it waits until a member lends an outbox for an epoch that it is in, and
comes into that one.

**Making an engine.** Each member lends an outbox, in its line of the registry, and maps those of the others; it waits
for each until that has mapped all, too, or has left the view. Until then it may be broken off, and goes on where it was
with the next call. Nothing of the old engine is dropped before the new one is complete. The number of the epoch is part
of the engine's group id.

**Losses** are raised once (mode "raise"). Each fails one call of the engine on all ranks; the error that a rank raises
then names all losses that it knows of, and the call that another of them fails next is made again (`error_for`). A loss
that no call of the old engine could report, because all left it behind, is raised when the new one is entered.

Each rank writes its own line and outbox. A crash between two steps is a loss in the view, for whoever has come into the
new engine by then or comes into it later.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from ...engine import Engine, EngineMeeting, awaited
from ...errors import (
    CommTimeoutError,
    EvictedError,
    InvalidState,
    NoQuorumError,
    PeerError,
    ProtocolError,
    context,
    expected,
)
from ...memory.shared import SharedRegion
from ...view.protocol.messages import Member
from ..control.exchanging import EpochExchange
from ..control.header import Moved
from ..control.membership import Agreed
from .birth import Begun
from .group_view import Loss, failure
from .inboxes import Absent, Inboxes, Wait
from .lane import BufferLane, silent
from .registry import INBOX_VIEW, Line

logger = logging.getLogger("epee")

_SALT = 0xA24BAED4963EE407
_PAUSE_S = 0.0005


class _Coming(NamedTuple):
    """An engine that is being made: of which epoch, its members, and this rank's part."""

    epoch: int
    members: dict[int, Member]
    meeting: EngineMeeting


class EngineExchange(EpochExchange, Protocol):
    """A row exchange over an engine (`hosts/direct.py`)."""

    @property
    def later(self) -> object:
        """Not None if the last call has ended in a later epoch of the engine."""

    @property
    def has_engine(self) -> bool:
        """Whether there is an engine."""

    @property
    def engine(self) -> Engine:
        """The engine of the buffer's epoch."""

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's outbox."""

    def use(self, engine: Engine) -> None:
        """Run the next call with an engine of other members."""

    def enter(self) -> None:
        """Enter the later epoch of the engine, if there is one."""


class Outboxes(Inboxes):
    """The outboxes that the ranks lend for a new engine, instead of inboxes.

    Attributes:
        coming: the engine that is being made.
    """

    coming: _Coming | None = None

    def offer(self, epoch: int) -> SharedRegion:
        """Lend this rank's outbox for the engine of an epoch."""
        assert self.coming is not None, "it is made first"
        region = self.coming.meeting.region
        if self._line.words[INBOX_VIEW] != epoch:  # peers may be just reading it
            self._line.lend_inbox(epoch, region.blob)
        return region

    def _attach(self, rank: int, blob: bytes, line: Line) -> SharedRegion:
        assert self.coming is not None
        return self.coming.meeting.attach(rank, blob)


class EngineMembership(BufferLane):
    """The group of a `Buffer` on CPUs that has an engine.

    Args:
        begun: the buffer's part in its group.
        exchange: of the buffer; gets each engine from here.
        timeout_s: of the buffer's calls.
        interrupt: called while waiting; raises to end the wait.
    """

    counts_entering = True

    def __init__(self, begun: Begun, exchange: EngineExchange, timeout_s: float, interrupt: Callable[[], None]) -> None:
        super().__init__(begun, exchange, timeout_s, interrupt, 0)
        self._direct = exchange
        self._view = begun.roster
        self._outboxes = Outboxes(
            exchange.config, exchange.rank, begun.number, begun.roster, begun.line, self._look_between_calls, 0
        )
        self._inboxes = self._outboxes
        self._first = begun.first
        self._engine_epoch = 0  # of the view with whose members the engine was made; 0 before the first
        self._wanted = 0  # a later epoch that the rows of the last call have named
        self._made: Engine | None = None  # of the epoch that is being entered: not all have mapped all yet
        self._raised_to = self._view.heard  # losses up to this epoch have been raised
        self._raised_at = 0  # number of the call of the engine in which a loss was raised last
        self._is_new = False
        self._seen: object = None  # the roster's state when it was last found to need nothing
        self._joins: tuple[object, int] = None, 0  # a view, and the newest epoch in which one of its members joined
        self._label = ""

    @property
    def inbox_bytes(self) -> int:  # type: ignore[override]
        """Bytes of the memory that this rank lends beside its arenas."""
        return self._direct.nbytes

    def close(self) -> None:
        """Release all memory but the engine's, which ends with the exchange; idempotent."""
        if os.getpid() == self._pid:
            self._drop_coming()
        super().close()

    def call_it(self, text: str) -> None:
        """Show the buffer's name in hang reports."""
        super().call_it(text)
        self._label = text
        if self._direct.has_engine:
            self._direct.engine.membership.call_it(text)

    # ---- between two calls

    @property
    def newest_join(self) -> int:
        """The newest epoch in which a process has joined, as far as this rank knows; goes into each row."""
        view = self._view.view
        if view is not self._joins[0]:
            self._joins = view, max((member.incarnation for member in view.members.values()), default=0)
        return self._joins[1]

    def read_joins(self, newest: int) -> None:
        """Leave the engine behind if the rows of a call name a later epoch in which a process has joined.

        Raises:
            Moved: they do; the same on all ranks.
        """
        if newest > self._engine_epoch:
            self._wanted = newest
            raise Moved

    @property
    def must_turn(self) -> bool:  # type: ignore[override]
        """Whether there is something to do before the next call."""
        return self._view.state is not self._seen or bool(self._wanted) or self._direct.later is not None

    has_turned = must_turn

    @property
    def is_in_place(self) -> bool:
        """Whether this rank's next call is the one after its last, in the same engine, as far as is known."""
        return self._engine_epoch > 0 and self._target() == self._engine_epoch

    def turn(self, op: str, deadline: float) -> None:
        """Enter the epoch of the next call.

        Raises:
            RankFailedError, PeerError: a rank was lost, and no call could report it (mode "raise").
            CommTimeoutError: a member does not come into the engine.
            EvictedError, NoQuorumError: this process cannot continue.
        """
        state = self._view.state
        self._check()
        self._op = op
        target = self._target() or self._await_members(deadline)
        if target > self._engine_epoch:
            self._come_into(target, deadline)
        else:
            self._direct.enter()
        self._seen = state
        self._raise_losses(op)

    def turn_to_refuse(self, op: str, deadline: float) -> PeerError | None:
        """As `turn`, for a call that this rank refuses: a loss that this raises has taken no number of a call."""
        while True:
            try:
                self.turn(op, deadline)
                return None
            except expected(EvictedError, NoQuorumError, CommTimeoutError):
                raise
            except expected(PeerError) as error:
                logger.info("a call is refused, so this loss is not raised: %s", error)

    def require_part_here(self) -> None:
        """Raise `EvictedError` if a `sync` of the others has excluded this rank."""
        self._view.require_part(self._rank)

    def _target(self) -> int:
        """Return the epoch of the engine with which the next call runs; 0: this rank has joined, and does not know."""
        agreed = self._view.view.agreed
        newest = max(self._engine_epoch, self._wanted)
        if agreed.epoch > newest and self._rank in agreed.ranks:
            return agreed.epoch
        return newest

    def _await_members(self, deadline: float) -> int:
        """Return the epoch for which the members lend their outboxes to this process, which has joined."""
        started = time.monotonic()
        while not (target := self._target()):
            members = self._view.view.members
            mine = members[self._rank].incarnation
            lines = {rank: self._line_of(rank, member) for rank, member in members.items() if rank != self._rank}
            lent = [line.words[INBOX_VIEW] for line in lines.values() if line is not None]
            if (found := max(lent, default=0)) and found >= mine:
                return found
            if not any(member.incarnation < mine for member in members.values()):
                return self.newest_join  # all are new
            what = f"{self._op}: the members do not take this process in"
            for rank in lines:
                with contextlib.suppress(Absent):
                    self._look_between_calls(rank, what, started, deadline)
            time.sleep(_PAUSE_S)
        return target

    def _line_of(self, rank: int, member: Member) -> Line | None:
        return self._outboxes.line_of(rank, member)

    def _come_into(self, epoch: int, deadline: float) -> None:
        """Make the engine of an epoch, and leave the one before; raises as `turn`."""
        self._await_epoch(epoch, deadline)
        coming = self._prepared(epoch)
        started = time.monotonic()
        engine = self._made
        if engine is None:
            met = self._outboxes.meet_those(coming.members, Wait(epoch, _never, started, deadline))
            others = {rank: region for rank, region in met.regions.items() if rank != self._rank}
            try:
                engine = coming.meeting.begin(others, self._timeout_s)
            except BaseException:
                self._outboxes.give_back(met)
                raise
            self._made = engine
        while [rank for rank in awaited(engine) if self._is_late(rank, epoch, started, deadline)]:
            time.sleep(_PAUSE_S)
        old = self._engine_epoch
        self._entered = {rank: self._since(rank, member) for rank, member in coming.members.items()}
        self._direct.use(engine)
        self._engine_epoch, self._wanted, self._raised_at = epoch, 0, 0
        self._outboxes.coming = self._made = None
        if self._label:
            engine.membership.call_it(self._label)
        if old and len(coming.members) < self._config.num_ranks:
            logger.warning(
                "a buffer continues in epoch %d with ranks %s (rank %d)", epoch, sorted(coming.members), self._rank
            )

    def _is_late(self, rank: int, epoch: int, started: float, deadline: float) -> bool:
        """Return whether a member that has not mapped all outboxes is to be awaited; raises what ends the wait."""
        try:
            what = f"{self._op}: rank {rank} does not come into epoch {epoch}"
            self._look_between_calls(rank, what, started, deadline)
        except Absent:
            return False
        return True

    def _since(self, rank: int, member: Member) -> int:
        """Return since when a member of the engine takes part in the buffer."""
        now = self._view.view.members.get(rank)
        return now.incarnation if now is not None and now.nonce == member.nonce else member.incarnation

    def _await_epoch(self, epoch: int, deadline: float) -> None:
        """Wait until a decision is known here that another rank has named."""
        until = max(deadline, time.monotonic() + self._timeout_s)
        while self._view.heard < epoch:
            self._interrupt()
            self._check()
            if time.monotonic() > until:
                self._wanted = 0
                where = context(self._op, rank=self._rank, epoch=self._view.heard)
                raise ProtocolError(f"{where}: a rank has named epoch {epoch}, and the job has no such decision")
            time.sleep(_PAUSE_S)

    def _prepared(self, epoch: int) -> _Coming:
        """Return this rank's part in the engine of an epoch, the same one in each attempt."""
        coming = self._outboxes.coming
        if coming is None or coming.epoch != epoch:
            self._drop_coming()
            members, agreed = self._view.members_at(epoch), self._view.view.agreed
            if agreed.epoch == epoch:
                members = {rank: member for rank, member in members.items() if rank in agreed.ranks}
            if self._rank not in members:
                self._check()
                raise InvalidState(f"Buffer: this rank is not in epoch {epoch}; make the buffer again")
            group_id = (self._view.lane ^ epoch * _SALT) & ((1 << 62) - 1)
            handle, mode = self._view.job_handle, f"{self._config.fault_mode}/{self._config.on_stall}"
            meeting = EngineMeeting(handle.job, handle.slots, group_id, self._rank, members, epoch, mode)
            self._outboxes.coming = coming = _Coming(epoch, members, meeting)
        return coming

    def _drop_coming(self) -> None:
        coming, self._outboxes.coming = self._outboxes.coming, None
        engine, self._made = self._made, None
        if engine is not None:
            engine.close()
        if coming is not None:
            coming.meeting.close()

    def _look_between_calls(self, rank: int, what: str, started: float, deadline: float) -> None:
        """Between two polls for a member of an engine that is being made; raises what ends the wait for it."""
        self._interrupt()
        self._check()
        view = self._view.view
        coming = self._outboxes.coming
        if coming is not None and self._target() > coming.epoch:
            raise Moved  # a `sync` has agreed since
        mine = None if coming is None else coming.members.get(rank)
        member = view.members.get(rank)
        if member is None or (mine is not None and member.nonce != mine.nonce):
            raise Absent
        self.show(self._op, self._direct.seq + 1, [rank])
        now = time.monotonic()
        if now <= deadline:
            return
        text = f"{what} ({context('epoch', rank=self._rank, peer=rank, epoch=view.epoch, elapsed=now - started)})"
        heard = self._view.heard
        if self._is_new or not self._view.insist([rank], text, self._direct.seq + 1, deadline, heard):
            raise silent(text, rank)

    # ---- while the buffer is made

    def offer(self) -> None:
        """Lend this rank's outbox for the first engine; all ranks lend before one enters. Local."""
        self._prepared(self._first)
        self._outboxes.offer(self._first)

    def come_in(self, deadline: float) -> None:
        """Make the first engine.

        Raises:
            ResourceError: no memory or descriptor is left here.
            CommTimeoutError: a member does not come; no rank is accused of that while the buffer is made.
            EvictedError, NoQuorumError: this process cannot continue.
        """
        self._is_new, self._op = True, "Buffer"
        try:
            self._view.check()
            self._come_into(self._first, deadline)
        finally:
            self._is_new = False
            self.hide()

    # ---- losses

    def error_for(self, error: PeerError, seq: int) -> PeerError:
        """Return the error to raise for one of the engine's: for a loss, one that names all losses not raised yet.

        Each of these fails a call of the engine. If that is the very next one, it is made again; if calls have ended
        well in between, the ranks stand inside a step, and the loss is raised again.

        Args:
            error: of a call of the engine.
            seq: the number of the last call of the engine.

        Raises:
            Moved: it is a loss that has been raised in the call before.
        """
        if not self.raises or isinstance(error, (EvictedError, NoQuorumError, CommTimeoutError)) or not error.epoch:
            return error
        last, self._raised_at = self._raised_at, seq
        self._await_epoch(error.epoch, 0.0)
        if error.epoch > self._raised_to:
            return self._failure(error.epoch, error.op, seq) or error
        if seq <= last + 1:
            raise Moved
        return error

    def note_failed(self, error: PeerError) -> None:
        """Record that a call which this rank had refused has failed by a loss on the others: here it is not raised."""
        self._raised_to = max(self._raised_to, error.epoch)

    def _failure(self, epoch: int, op: str, seq: int) -> PeerError | None:
        """Return the error for the losses not raised yet, up to `epoch` and later; None if there are none."""
        losses = self._losses()
        self._raised_to = max([self._raised_to, epoch, *(loss.epoch for loss in losses)])
        return failure(losses, op, self._rank, seq, self._raised_to, 0.0) if losses else None

    def note_agreed(self, agreed: Agreed) -> None:
        """Record that the caller of `agree` has its result; the losses that it contains count as raised."""
        self._raised_to = max(self._raised_to, agreed.epoch)
        super().note_agreed(agreed)

    def _raise_losses(self, op: str) -> None:
        """Raise the losses that no engine can report any more, up to the epoch of this one."""
        if self.raises and any(loss.epoch <= self._engine_epoch for loss in self._losses()):
            error = self._failure(self._engine_epoch, op, self._direct.seq + 1)
            assert error is not None, "there are losses"
            self._raised_at = self._direct.seq
            raise error
        self._raised_to = max(self._raised_to, self._engine_epoch)

    def _losses(self) -> list[Loss]:
        """Return the losses that were not raised; the exclusion of this rank itself is no loss here."""
        return [loss for loss in self._view.losses(self._raised_to) if loss.rank != self._rank]

    def await_end_of(self, rank: int, deadline: float) -> bool:
        """Wait until a rank has left the view, for which there is a moment; return False when it stays."""
        while rank in self._view.view.members and rank not in self._direct.engine.watch.dead():
            self._interrupt()
            self._check()
            if time.monotonic() > deadline or self._view.is_alive(rank):
                return False
            time.sleep(_PAUSE_S)
        return True


def _never() -> bool:
    return False
