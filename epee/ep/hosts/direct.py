"""The exchange of rows over an engine where all ranks share a host: payload goes straight into the receivers' memory.

It serves `throughput/cpu.py` in place of `control/inbox.py`, for buffers that have an engine of their own. A call of
the buffer is one or two calls of the engine:

    every call   The **rows** of all ranks for all ranks. A row grants a slot of its writer's arena to the others.
    dispatch     Every rank then stores its rows into the slots that the others have granted, each once, at its final
                 offset. After the last store it makes the **data call**, which moves nothing: when it has completed
                 here, all ranks have made it, so all rows are here.
    combine      A rank has its expert outputs in the granted slot before it sends its row, so whoever has the rows of
                 all ranks may read. No call follows.

Who may access a slot, and when: peers write or read between the exchange of rows and their next call. An engine call
that has completed here has been made by all its members, so they have finished every earlier one: slots granted before
are free again (`settled`).

A change of the view: an engine call ends in the same peer regions on all ranks, or fails on all of them (mode "raise").
Arenas belong to an epoch, so that what a stale writer still stores hits memory that no rank reads or grants any more. A
call of the engine that ends in a later epoch than that of the buffer brings all ranks into that epoch, alike, and the
buffer's call is made again there (`Moved`). In mode "mask" a combine ends among those that are left instead, from the
memory of the old epoch, which the next call drops.

A rank that leaves a dispatch between its two calls refuses the second one, so that no rank waits for it. One that
leaves another call after its rows were exchanged, by whatever exception, does not have the result that the others have:
the ranks stand before different calls, and the buffer says so in every further one. The engine remembers which call
that is: the last one that `run` has returned (`Engine.latest`, until the caller of the buffer has its result), or one
that an exception has left open inside the engine (`unclaimed`). The next call finds out how these have ended
(`_settle`); a call that is made again never gets the rows of an earlier one.

A rank that aborts a call has ended its number. If the view changes before another rank has read the abort, that rank's
call moves to the new epoch, in which the first has nothing of it and will not. It finds that in the first's count of
ended calls (`GroupMembership.ended_without`), ends the call too, and raises `CommTimeoutError`, which names the rank
that has aborted it: the loss has only moved the call. So both go on with the next number.

A crash leaves rows in slots that nobody grants again, and an engine call that the others end without the rank.

**Members** (`EngineMembership`). The engine handles losses by itself: a call that loses a rank ends as its mode says,
in the same epoch on all ranks. Members that return, or join, are no matter of the engine. Instead the members make a
**new engine**, of the members in a later epoch of the view, and drop the old one with all its calls, its slots and its
memory (`engine/bootstrap/meeting.py`). That happens

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
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ...engine import Engine, EngineMeeting, awaited
from ...engine.entry import ENDED
from ...engine.operation import Operation
from ...engine.outbox import CELL_WORDS, GAVE_UP, NUM_CELLS, PeerRegions, has_left
from ...engine.plan import Make, Plan, refused
from ...engine.signature import OP_CODE
from ...engine.signature import pack as pack_signature
from ...engine.waiting import GAVE_THE_CALL_UP, HAS_LEFT
from ...errors import (
    AbortedError,
    CommTimeoutError,
    EpeeError,
    EvictedError,
    InvalidState,
    NoQuorumError,
    PeerError,
    ProtocolError,
    context,
    expected,
)
from ...memory.shared import SharedRegion
from ...memory.signals import SEQ_BITS
from ...view.protocol.messages import Member
from ..config import BufferConfig
from ..control.header import (
    OP_COMBINE,
    OP_DISPATCH,
    OP_NAMES,
    REASON_BYTES,
    TIMED_OUT,
    ExchangedRows,
    Header,
    Moved,
)
from ..control.membership import Agreed
from ..membership.birth import Begun
from ..membership.group_view import Loss, failure
from ..membership.inboxes import Absent, Inboxes, Wait
from ..membership.lane import BufferLane, silent
from ..membership.registry import INBOX_VIEW, Line
from ..throughput.placement import Ints
from .rows import CallPatience, RowsOverEngine, RowsPlan

logger = logging.getLogger("epee")

SEQ_MASK = (1 << SEQ_BITS) - 1
_DATA_SIGNATURE = pack_signature(OP_CODE[OP_NAMES[OP_DISPATCH]])
_SALT = 0xA24BAED4963EE407
_PAUSE_S = 0.0005


class DataPlan(Plan):
    """The data call of a dispatch: headers only."""

    def __init__(self, peer_regions: PeerRegions) -> None:
        super().__init__(OP_NAMES[OP_DISPATCH], _DATA_SIGNATURE)


class LastResult:
    """The end of the last call here: its caller has its result.

    Attributes:
        lost: why the buffer cannot be used any more; empty while it can.
    """

    def __init__(self, exchange: DirectExchange) -> None:
        self.lost = ""
        self._exchange = exchange

    def close(self) -> None:
        """Record that the caller of the last call has its result."""
        self._exchange.engine.latest = None


class DirectExchange(RowsOverEngine):
    """Row exchange through an engine, beside payload in shared memory; used as `control.inbox.Exchange`.

    Args:
        config, rank, interrupt: as of `RowsOverEngine`.

    Attributes:
        membership: makes the engines; set before the first call.
        settled: calls of the engine before this one are over on all ranks.
        peer_regions: the outboxes of the buffer's epoch.
        reduced_members: the members if these are not all ranks, else None.
        later: the peer regions with which the last call has ended, if the next one enters their epoch; else None.
        pids: the ranks' processes.
    """

    membership: EngineMembership
    settled = 0
    later: PeerRegions | None = None
    peer_regions: PeerRegions
    reduced_members: tuple[int, ...] | None = None

    def __init__(self, config: BufferConfig, rank: int, interrupt: Callable[[], None]) -> None:
        super().__init__(config, rank, interrupt)
        self.end = LastResult(self)
        self.pids: dict[int, int] = {}
        self._engine: Engine | None = None
        self._old: Engine | None = None  # the one before, which is to be closed
        self._earlier_calls = 0  # of earlier engines
        self._op, self._number = "none", 0  # of the buffer's last call, in messages
        self._begun: Operation | None = None  # the last exchange of rows
        self._refusal: Operation | None = None  # a call that this rank has refused, which may be open

    @property
    def has_engine(self) -> bool:
        """Whether there is an engine: a process that has joined gets it with its first call."""
        return self._engine is not None

    @property
    def engine(self) -> Engine:
        """The engine of the buffer's epoch."""
        assert self._engine is not None, "the membership has entered an epoch"
        return self._engine

    @property
    def seq(self) -> int:
        """Number of the last call of the engine, which others may know of; it names calls and handles."""
        return 0 if self._engine is None else self._engine.seq

    @property
    def members(self) -> tuple[int, ...]:
        """Ranks of the epoch, ascending; none before the first."""
        return self.peer_regions.members if self._engine is not None else ()

    @property
    def num_calls(self) -> int:
        """Calls that are visible to the peers, or will be."""
        return self._earlier_calls + self.seq

    def use(self, engine: Engine) -> None:
        """Run the next call with an engine of other members; the one before ends, and with it all calls of it."""
        if engine is not self._engine:  # else an interrupt came on the way
            if self._engine is not None:
                self.membership.forget()
            self._earlier_calls = self.num_calls
            self._old, self._engine = self._engine, engine
        self.settled = 0
        self.end.lost = ""
        self._refusal = None
        self._bind(engine.members)
        self._drop_old()

    def _drop_old(self) -> None:
        if self._old is not None:
            self._old.close(failed=self.is_dropped)
            self._old = None

    def _bind(self, peer_regions: PeerRegions) -> None:
        """Make an epoch that of the buffer."""
        self.later = self._begun = None
        self.peer_regions, self.epoch = peer_regions, peer_regions.epoch
        members = peer_regions.members
        self.pids = {rank: peer_regions.regions[at].owner_pid for at, rank in enumerate(members)}
        self.reduced_members = members if len(members) < self.config.num_ranks else None

    def enter(self, peer_regions: PeerRegions | None = None) -> None:
        """Enter a later epoch of the engine: the memory of the old one is dropped."""
        peer_regions = peer_regions or self.later
        if peer_regions is not None:
            self.membership.forget()
            self._bind(peer_regions)

    def waits_in_next(self, src: int) -> bool:
        """Return whether a rank has announced the call after this rank's last one, and has not aborted it."""
        peer_regions = self.engine.peer_regions
        if src not in self.members or not peer_regions.words:
            return False
        words, seq = peer_regions.words[src], self.engine.seq + 1
        cell = peer_regions.first_cell + seq % NUM_CELLS * CELL_WORDS
        return bool(words[cell] & SEQ_MASK == seq and words[cell + GAVE_UP] == 0 and not has_left(words))

    def call(self, header: Header, counts: Ints | None, text: bytes, deadline: float) -> ExchangedRows:
        """Send this rank's row and return the rows of all ranks, checked and agreed on; raises as
        `HostsExchange.call`.

        Raises:
            Moved: the call has ended in a later epoch, in which it is to be made again, or a process has joined.
            InvalidState: an earlier call has ended otherwise here than on the other ranks.
        """
        name, engine, membership = OP_NAMES[header.op], self.engine, self.membership
        row = self._row(header, counts, text, name, membership.newest_join)
        self._op, self._number = name, self._number + 1
        if engine.latest is not None or engine.unclaimed:
            self._settle(deadline)
        if self.end.lost:
            raise InvalidState(self.end.lost)
        done = self._run(row.plan, deadline)
        met = self._read(row, done)
        newest = row.newest_mark(met.members)
        is_same = done.peer_regions.epoch == self.epoch
        if newest > membership.engine_epoch or not (is_same or self._goes_on(header.op, met.members)):
            engine.latest = None  # the call is to be made again, on all ranks
            membership.read_joins(newest)
            self.enter(done.peer_regions)
            raise Moved
        if not is_same:
            self.later = done.peer_regions
        self._begun = done
        return met.rows

    def _goes_on(self, op: int, members: Sequence[int]) -> bool:
        """Return whether a call that has ended in a later epoch goes on among its members."""
        return op == OP_COMBINE and not self.membership.raises and set(members) <= set(self.members)

    def _settle(self, deadline: float) -> None:
        """Find out how the calls have ended whose results no caller has got.

        Raises:
            CommTimeoutError: the end of one is still open.
        """
        engine = self.engine
        for op in (*engine.unclaimed, engine.latest):
            if op is None or not isinstance(op.plan, RowsPlan):
                continue
            if not op.done:
                try:
                    engine.wait(op, max(1e-3, deadline - time.monotonic()))
                except BaseException as error:
                    if error is not op.error:  # that may be what a handler has raised in it
                        raise
            if op.plan.name == OP_NAMES[OP_DISPATCH]:
                self._refuse_data(op)
            elif self._has_worked(op):
                where = context(op.plan.name, rank=self.rank, seq=op.seq, epoch=op.peer_regions.epoch)
                self.end.lost = (
                    f"{where}: this call has raised an error here, and others have completed it: the ranks stand "
                    "before different calls; close this buffer on all ranks and make a new one"
                )[:REASON_BYTES]
        engine.unclaimed.clear()
        engine.latest = None

    def _has_worked(self, op: Operation) -> bool:
        """Return whether an exchange of rows has ended well on all ranks."""
        assert isinstance(op.plan, RowsPlan)
        if not op.done or op.error is not None:
            return False
        try:
            self._read(op.plan.own, op)
        except expected(EpeeError):
            return False
        return True

    def _run(self, make: Make, deadline: float) -> Operation:
        """Run a call of the engine."""
        self._interrupt()
        self._await_refusal(deadline)
        engine, started = self.engine, time.monotonic()
        try:
            done = engine.run(make, CallPatience.until(deadline))
        except expected(CommTimeoutError) as error:
            self._interrupt()
            raise self._silent(error, started, is_data=make is DataPlan) from error
        except expected(PeerError) as error:
            self._interrupt()
            self.membership.require_part_here()
            if error.cause not in (HAS_LEFT, GAVE_THE_CALL_UP) or not self._are_present(error.ranks):
                found = self.membership.error_for(error, engine.seq)
                if found is error:
                    raise
                raise found from error
            raise CommTimeoutError(
                f"{error}; its rank has closed the buffer, or gave up this call", error.ranks
            ) from error
        self.settled = done.seq
        return done

    def _silent(self, error: CommTimeoutError, started: float, is_data: bool) -> CommTimeoutError:
        """Return the error of a call that a timeout has ended."""
        if not error.ranks:
            return error
        names = ", ".join(map(str, error.ranks))
        elapsed = time.monotonic() - started
        where = context(self._op, rank=self.rank, peer=names, seq=self._number, epoch=self.epoch, elapsed=elapsed)
        return CommTimeoutError(
            f"{where}: rank {names} did not send its {'rows' if is_data else 'call'}; {TIMED_OUT}", error.ranks
        )

    def publish(self, header: Header, counts: Ints | None, text: bytes, deadline: float) -> None:
        """Send this rank's row, as one that refuses the call, and wait for no rank."""
        self._await_refusal(deadline)
        self._number += 1
        row = self._row(header, counts, text, OP_NAMES[header.op], self.membership.newest_join)
        self._refusal = self.engine.start(row.plan, CallPatience.until(deadline))

    def _await_refusal(self, deadline: float) -> None:
        """Wait for the end of a call that this rank has refused, whatever it is.

        One call at a time is issued, else a loss would fail two, and the others would raise it twice.
        """
        op = self._refusal
        if op is not None and not op.done:
            try:
                self.engine.wait(op, max(1e-3, deadline - time.monotonic()))
            except expected(EpeeError):
                if not op.done:
                    raise
        if op is not None and isinstance(op.error, PeerError):
            self.membership.note_failed(op.error)
        self._refusal = None

    def _are_present(self, ranks: Sequence[int]) -> bool:
        """Return whether the processes of these ranks are in the job."""
        return set(ranks) <= self.engine.membership.admission.present().keys()

    def release(self) -> None:
        """End the engine; idempotent."""
        self._drop_old()
        if self._engine is not None:
            self._engine.close(failed=self.is_dropped)

    # ---- payload

    def settle(self, deadline: float) -> None:
        """Do nothing: a slot that peers may still access is not free (`settled`), and no call waits for one."""

    def signal_data(self, dst_rank: int) -> None:
        """Do nothing: the data call says that all of this rank's rows are stored."""

    def wait_data(self, deadline: float, parties: Sequence[int] | None = None) -> list[int]:
        """Make the data call of a dispatch; returns when the rows of all ranks are here, always without a rank.

        Raises:
            Moved: a rank was lost before it had stored all of its rows; the dispatch is to be made again without it.
            as `engine.run`.
        """
        done = self._run(DataPlan, deadline)
        if done.peer_regions.epoch != self.epoch:
            self.enter(done.peer_regions)
            raise Moved
        return []

    def abandon(self) -> None:
        """Refuse the data call, if the others are in it: this rank's rows will not arrive."""
        for op in (*self.engine.unclaimed, self.engine.latest, self._begun):
            if op is not None and isinstance(op.plan, RowsPlan) and op.plan.name == OP_NAMES[OP_DISPATCH]:
                self._refuse_data(op)

    def _refuse_data(self, op: Operation) -> None:
        """Refuse the data call of a dispatch whose rows are those of `op`, unless that has been made, or never will."""
        if op.seq == self.engine.seq and not self.engine.flags & ENDED and self._has_worked(op):
            reason = AbortedError(f"gave up this call after an error of its own: {sys.exc_info()[1]!r}")
            plan = refused(OP_NAMES[OP_DISPATCH], reason)
            self._refusal = self.engine.start(lambda peer_regions: plan, may_claim=False)

    def abort(self) -> None:
        """End a call in progress in another thread."""
        if self._engine is not None:
            self._engine.close()


class _Coming(NamedTuple):
    """An engine that is being made: of which epoch, its members, and this rank's part."""

    epoch: int
    members: dict[int, Member]
    meeting: EngineMeeting


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

    Attributes:
        engine_epoch: of the view with whose members the engine was made; 0 before the first.
    """

    counts_entering = True

    def __init__(self, begun: Begun, exchange: DirectExchange, timeout_s: float, interrupt: Callable[[], None]) -> None:
        super().__init__(begun, exchange, timeout_s, interrupt, 0)
        self._direct = exchange
        self._view = begun.roster
        self._outboxes = Outboxes(
            exchange.config, exchange.rank, begun.number, begun.roster, begun.line, self._look_between_calls, 0
        )
        self._inboxes = self._outboxes
        self._first = begun.first
        self.engine_epoch = 0
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
        """Bytes of this rank's outbox; pages never touched cost nothing."""
        regions = self._direct.engine.peer_regions.regions if self._direct.has_engine else ()
        return regions[self._rank].mapped_bytes if regions else 0

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
        view = self._view.state[1]
        if view is not self._joins[0]:
            self._joins = view, max((member.incarnation for member in view.members.values()), default=0)
        return self._joins[1]

    def read_joins(self, newest: int) -> None:
        """Leave the engine behind if the rows of a call name a later epoch in which a process has joined.

        Raises:
            Moved: they do; the same on all ranks.
        """
        if newest > self.engine_epoch:
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
        return self.engine_epoch > 0 and self._target() == self.engine_epoch

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
        if target > self.engine_epoch:
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
        newest = max(self.engine_epoch, self._wanted)
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
        old = self.engine_epoch
        self._entered = {rank: self._since(rank, member) for rank, member in coming.members.items()}
        self._direct.use(engine)
        self.engine_epoch, self._wanted, self._raised_at = epoch, 0, 0
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
            meeting = EngineMeeting(handle.job, handle.slots, group_id, self._rank, mode)
            meeting.meet(epoch, members)
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
        except BaseException:
            coming = self._outboxes.coming
            if coming is not None and self._made is None:
                coming.meeting.fail()  # the others wait for nothing: all give up
            raise
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
        if self.raises and any(loss.epoch <= self.engine_epoch for loss in self._losses()):
            error = self._failure(self.engine_epoch, op, self._direct.seq + 1)
            assert error is not None, "there are losses"
            self._raised_at = self._direct.seq
            raise error
        self._raised_to = max(self._raised_to, self.engine_epoch)

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
