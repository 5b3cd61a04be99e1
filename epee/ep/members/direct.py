"""The exchange of rows over an engine where all ranks share a host: payload goes straight into the receivers' memory.

It serves `throughput/cpu.py`. A call of the buffer is one or two calls of the engine:

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
buffer's call is made again there (`Moved`). In mode "mask" a combine that all who are left had begun before they knew
of the loss ends among them instead, from the memory of the old epoch, which the next call drops. A row says whether its
rank knew (`_LATE`). The number of a buffer's epoch is that of the view's, plus the number of agreements so far, each of
which begins an epoch as well.

A rank that leaves a dispatch between its two calls refuses the second one, so that no rank waits for it. One that
leaves another call after its rows were exchanged, by whatever exception, does not have the result that the others have:
the ranks stand before different calls, and the buffer says so in every further one. The engine remembers which call
that is: the last one that `run` has returned (`Engine.latest`, until the caller of the buffer has its result), or one
that an exception has left open inside the engine (`unclaimed`). The next call finds out how these have ended
(`settle_calls`); a call that is made again never gets the rows of an earlier one.

A rank that aborts a call has ended its number. If the view changes before another rank has read the abort, that rank's
call moves to the new epoch, in which the first has nothing of it and will not. It finds that in the first's count of
ended calls (`GroupMembership.ended_without`), ends the call too, and raises `CommTimeoutError`, which names the rank
that has aborted it: the loss has only moved the call. So both go on with the next number.

A crash leaves rows in slots that nobody grants again, and an engine call that the others end without the rank.

**Members** (`BufferMembers`). They are those of the engine, which changes them as for any group:

    losses          end a call as the engine's mode says, in the same epoch on all ranks
    `sync`          the agreement of `member_sync.py`. Members that stood before different calls are in step again: the
                    agreement is one call of the engine, and steps that were begun before it are over
    a joiner        is a process that has replaced a lost rank in the group of the buffer. It finds the buffer by a
                    notice (`notices.py`), and requests admission in its first call of the buffer (`birth.come_into`).
                    A member that has seen it join the group names the epoch of that in the row of its next call, once.
                    If a row of a call names one, all ranks have read it in that call: they wait for the process and
                    admit it, and make the call again, with it. The joiner names the epoch of its admission in its first
                    call: that one is made again as well, and then all are in the same epoch. A `sync` has admitted a
                    joiner, or has agreed without it; then it comes with another `sync`

A row carries the number of agreements as well: a rank that joins or returns begins with that of the others.

**Losses** are raised once (mode "raise"). Each fails one call of the engine on all ranks; the error that a rank raises
then names all losses that it knows of, and the call that another of them fails next is made again (`error_for`). Those
that an agreement contains are not raised.

Each rank writes its own outbox. A crash between two steps is a loss in the view.
"""

from __future__ import annotations

import struct
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import torch.distributed as dist

from ...engine import Engine
from ...engine.entry import ENDED
from ...engine.operation import Operation
from ...engine.outbox import PeerRegions
from ...engine.plan import Make, Plan, refused
from ...engine.signature import OP_CODE
from ...engine.signature import pack as pack_signature
from ...engine.waiting import GAVE_THE_CALL_UP, HAS_LEFT
from ...errors import (
    AbortedError,
    CommTimeoutError,
    EpeeError,
    EvictedError,
    NoQuorumError,
    PeerError,
    ProtocolError,
    context,
    expected,
)
from ...view.group import GroupInView
from ...view.process.detector import is_leaving
from ...view.protocol.messages import Decision
from ...view.transport.wire import parse_endpoint
from ..config import BufferConfig
from ..losses import Loss, failure, silent
from ..throughput.placement import Ints
from .birth import come_into, tell_of
from .header import (
    OP_COMBINE,
    OP_DISPATCH,
    OP_NAMES,
    TIMED_OUT,
    ExchangedRows,
    Header,
    Moved,
)
from .member_sync import SLICE_S, MembersOfEngine, SyncExchange, no_quorum
from .membership import Agreed
from .notices import BufferNotice, note_had
from .rows import MARK_BYTES, CallTimeouts, RowsPlan

_DATA_PLAN = Plan(OP_NAMES[OP_DISPATCH], pack_signature(OP_CODE[OP_NAMES[OP_DISPATCH]]))
_AGREED = struct.Struct("<QQ")  # number of the last agreement, epoch in which the newest process has joined the group
_AGREED_BITS = 32  # of a mark: the agreements so far; above them an epoch in which a process to be admitted has joined
_LATE = 1 << 31  # of a mark, the highest of these bits: the rank knew of a later epoch when it began the call
_PAUSE_S = 0.0005


def data_plan(peer_regions: PeerRegions) -> Plan:
    """Return the plan of the data call of a dispatch: headers only, so it is the same for all calls."""
    return _DATA_PLAN


class DirectExchange(SyncExchange):
    """Row exchange through an engine, beside payload in shared memory.

    Args:
        config, rank, interrupt: as of `RowExchange`.

    Attributes:
        membership: set before the first call.
        settled: calls of the engine before this one are over on all ranks.
        peer_regions: the outboxes of the buffer's epoch.
        reduced_members: the members if these are not all ranks, else None.
        later: the peer regions with which the last call has ended, if the next one enters their epoch; else None.
        pids: the ranks' processes.
    """

    membership: BufferMembers
    settled = 0
    later: PeerRegions | None = None
    peer_regions: PeerRegions
    reduced_members: tuple[int, ...] | None = None

    def __init__(self, config: BufferConfig, rank: int, interrupt: Callable[[], None]) -> None:
        super().__init__(config, rank, interrupt)
        self.pids: dict[int, int] = {}
        self._op, self._number = "none", 0  # of the buffer's last call, in messages
        self._begun: Operation | None = None  # the last exchange of rows
        self._refusal: Operation | None = None  # a call that this rank has refused, which may be open

    @property
    def seq(self) -> int:
        """Number of the last call of the engine, which others may know of; it names calls and handles."""
        return self.engine.seq if self.has_engine else 0

    @property
    def members(self) -> tuple[int, ...]:
        """Ranks of the epoch, ascending; none before the first."""
        return self.peer_regions.members if self.has_engine else ()

    def use(self, engine: Engine) -> None:
        """Run the next call with an engine: the first one, or that with which this rank has returned."""
        self.engine, self.has_engine = engine, True
        self.agree(self.num_agreed, engine.members)

    def agree(self, number: int, peer_regions: PeerRegions) -> None:
        """Enter the epoch with which an agreement begins; all calls before are over. May be repeated."""
        self.membership.forget()
        self.settled, self.num_agreed, self._refusal = self.engine.seq, number, None
        self.forget_results()
        self._bind(peer_regions)

    def _bind(self, peer_regions: PeerRegions) -> None:
        """Make an epoch that of the buffer."""
        self.later = self._begun = None
        self.peer_regions, self.epoch = peer_regions, peer_regions.epoch + self.num_agreed
        members = peer_regions.members
        self.pids = {rank: peer_regions.regions[at].owner_pid for at, rank in enumerate(members)}
        self.reduced_members = members if len(members) < self.config.num_ranks else None

    def enter(self, peer_regions: PeerRegions | None = None) -> None:
        """Enter a later epoch of the engine: the memory of the old one is dropped."""
        peer_regions = peer_regions or self.later
        if peer_regions is not None:
            self.membership.forget()
            self._bind(peer_regions)

    def call(self, header: Header, counts: Ints | None, text: bytes, deadline: float) -> ExchangedRows:
        """Send this rank's row and return the rows of all ranks, checked and agreed on; raises as
        `HostsExchange.call`.

        Raises:
            Moved: the call has ended in a later epoch, in which it is to be made again, or a process has joined.
            InvalidState: an earlier call has ended otherwise here than on the other ranks.
        """
        name, engine, membership = OP_NAMES[header.op], self.engine, self.membership
        row = self._row(header, counts, text, name, membership.mark)
        self._op, self._number = name, self._number + 1
        if engine.unclaimed or engine.latest.op is not None or self.lost:
            self.require_results(deadline)
        done = self._run(row.plan, deadline)
        met = self._read(row, done)
        marks = memoryview(row.found).cast("Q")[:: len(row.data) // MARK_BYTES]  # of each row, at its beginning
        newest = max(map(marks.__getitem__, met.members))
        wanted, is_late = newest >> _AGREED_BITS, bool(newest & _LATE)
        is_same = done.peer_regions.epoch == self.peer_regions.epoch
        if wanted or not (is_same or (self._goes_on(header.op, met.members) and not is_late)):
            engine.latest.op = None  # the call is to be made again, on all ranks
            membership.wanted = wanted
            self.enter(done.peer_regions)
            raise Moved
        if not is_same:
            self.later = done.peer_regions
        elif newest > self.num_agreed:
            self.membership.catch_up(newest)
        self._begun = done
        return met.rows

    def _goes_on(self, op: int, members: Sequence[int]) -> bool:
        """Return whether a call that has ended in a later epoch goes on among its members."""
        return op == OP_COMBINE and not self.membership.raises and set(members) <= set(self.members)

    def _run(self, make: Make, deadline: float) -> Operation:
        """Run a call of the engine."""
        self._interrupt()
        if self._refusal is not None:
            self._await_refusal(deadline)
        engine, started = self.engine, time.monotonic()
        try:
            done = engine.run(make, CallTimeouts.until(deadline))
        except expected(CommTimeoutError) as error:
            self._interrupt()
            raise self._silent(error, started, is_data=make is data_plan) from error
        except expected(PeerError) as error:
            self._interrupt()
            self.membership.require_place(is_masked=False)
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

    def run(self, make: Make, timeouts: CallTimeouts) -> Operation:
        """Run a call of a `sync`."""
        self._interrupt()
        return self.engine.run(make, timeouts)

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
        row = self._row(header, counts, text, OP_NAMES[header.op], self.membership.mark)
        self._refusal = self.engine.start(row.plan, CallTimeouts.until(deadline))

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

    # ---- payload

    def wait_data(self, deadline: float) -> None:
        """Make the data call of a dispatch; returns when the rows of all ranks are here.

        Raises:
            Moved: a rank was lost before it had stored all of its rows; the dispatch is to be made again without it.
            as `engine.run`.
        """
        done = self._run(data_plan, deadline)
        if done.peer_regions.epoch != self.peer_regions.epoch:
            self.enter(done.peer_regions)
            raise Moved

    def abandon(self) -> None:
        """Refuse the data call, if the others are in it: this rank's rows will not arrive."""
        for op in (*self.engine.unclaimed, self.engine.latest.op, self._begun):
            if op is not None and isinstance(op.plan, RowsPlan) and op.plan.name == OP_NAMES[OP_DISPATCH]:
                self._refuse_data(op)

    def _settle(self, op: Operation) -> None:
        if op.plan.name == OP_NAMES[OP_DISPATCH]:
            self._refuse_data(op)
        else:
            super()._settle(op)

    def _refuse_data(self, op: Operation) -> None:
        """Refuse the data call of a dispatch whose rows are those of `op`, unless that has been made, or never will."""
        if op.seq == self.engine.seq and not self.engine.flags & ENDED and self._has_worked(op):
            reason = AbortedError(f"gave up this call after an error of its own: {sys.exc_info()[1]!r}")
            plan = refused(OP_NAMES[OP_DISPATCH], reason)
            self._refusal = self.engine.start(lambda peer_regions: plan, may_claim=False)

    def abort(self) -> None:
        """End a call in progress in another thread."""
        if self.has_engine:
            self.engine.close()


class BufferMembers(MembersOfEngine):
    """The membership of a `Buffer` on CPUs that has an engine.

    Args:
        exchange: of the buffer.
        mode, job_handle, timeout_s, interrupt: as of `MembersOfEngine`.

    Attributes:
        wanted: the epoch in which a process has joined the group, if the rows of the last call have named one.
    """

    counts_entering = True
    _exchange: DirectExchange
    _next: tuple[int, tuple[int, ...]] | None

    def __init__(
        self,
        exchange: DirectExchange,
        mode: str,
        job_handle: GroupInView,
        timeout_s: float,
        interrupt: Callable[[], None],
    ) -> None:
        super().__init__(exchange, mode, job_handle, timeout_s, interrupt)
        self.raises = exchange.config.fault_mode == "raise"
        self.forget = _nothing
        self.wanted = 0
        self._joins_to: tuple[dist.ProcessGroup, BufferNotice] | None = None  # a running buffer, by the first call
        self._met_to = 0  # processes that have joined the group up to this epoch are admitted, or left out
        self._joined_in = 0  # epoch of the engine with which this process joined, until all have entered it
        self._raised_to = 0  # losses up to this epoch of the view have been raised
        self._raised_at = 0  # number of the call of the engine in which a loss was raised last
        self._put_out_in = 0  # the epoch of the view that has excluded this rank
        self._voters: PeerRegions | None = None  # of whose members more than half must arrive at a sync
        self._seen: object = None  # the view when it was last found to need nothing
        self._behind: PeerRegions | None = None  # the epoch that a call began in when a member was known to be lost
        self._joins: tuple[object, int] = None, 0  # a view, and the newest epoch in which one of its members joined
        self._op = ""

    def begin_first(self, deadline: float) -> None:
        """As `MembersOfEngine.begin_first`. Local."""
        self._sync.begin(self._engine.members.members)
        self._exchange.announce()

    def begin_with(self, engine: Engine) -> None:
        """As `MembersOfEngine.begin_with`."""
        super().begin_with(engine)
        self._met_to = engine.members.epoch

    def join_running(self, group: dist.ProcessGroup, running: BufferNotice) -> None:
        """Have the first call join a running buffer of this process's group."""
        note_had(self._job_handle, running)
        self._joins_to, self.number = (group, running), running.number

    def _use(self, engine: Engine) -> None:
        super()._use(engine)
        self._raised_to, self._put_out_in = engine.members.epoch, 0

    @property
    def lent_bytes(self) -> int:  # type: ignore[override]
        """Bytes of this rank's outbox; pages never touched cost nothing."""
        regions = self._engine.peer_regions.regions if self._exchange.has_engine else ()
        return regions[self._rank].mapped_bytes if regions else 0

    # ---- between two calls

    @property
    def mark(self) -> int:
        """The part of each row that is no part of the call (`_AGREED_BITS`); the highest of all rows counts."""
        newest = self._joins[1]  # `turn` has read the view
        wanted = newest if newest > self._met_to else self._joined_in
        late = _LATE if self._behind is self._exchange.peer_regions else 0
        return wanted << _AGREED_BITS | late | self._exchange.num_agreed

    def _newest_join(self, view: Decision) -> int:
        """Return the newest epoch in which a process has joined the group."""
        if view is not self._joins[0]:
            slots = {self._job_handle.slots[rank] for rank in self._in_group()}
            joined = [member.incarnation for member in view.members if member.slot in slots]
            self._joins = view, max(joined, default=0)
        return self._joins[1]

    def catch_up(self, num_agreed: int) -> None:
        """Take over the number of agreements from the others, as a rank that has joined, in its first call."""
        self._returned = self._exchange.num_agreed = num_agreed
        self._exchange.epoch = self._exchange.peer_regions.epoch + num_agreed

    @property
    def must_turn(self) -> bool:  # type: ignore[override]
        """Whether there is something to do before the next call."""
        exchange, sync = self._exchange, self._sync
        if not exchange.has_engine or self._is_out or self.wanted or exchange.later is not None:
            return True
        if self._next is not None or sync.open_row is not None or self._returned < exchange.num_agreed:
            return True  # as `MembersOfEngine.must_turn`
        return exchange.engine.membership.runtime.view() is not self._seen

    def turn(self, op: str, deadline: float) -> None:
        """Enter the epoch of the next call, and admit processes that are named in the rows of the last one.

        Raises:
            CommTimeoutError: such a process does not come, or the members do not admit this one.
            EvictedError, NoQuorumError: this process cannot continue.
        """
        self._op = op
        if self._joins_to is not None:
            self._join(deadline)
        view = self._engine.membership.runtime.view()
        super().turn(op, deadline)
        self.require_place(is_masked=False)
        if self.wanted:
            self._admit(deadline)
        if self._exchange.later is not None:
            self._exchange.enter()
        if self._exchange.peer_regions is not self._voters:
            self._voters = self._exchange.peer_regions
            self._sync.begin(self._voters.members)
        if view is not self._seen:
            self._newest_join(view)
            since, epoch = self._engine.membership.admission.since(), self._voters.epoch
            is_behind = any(since.get(rank, epoch + 1) > epoch for rank in self._voters.members)
            self._behind = self._voters if is_behind else None
        self._seen = view

    def _join(self, deadline: float) -> None:
        """Join the running buffer."""
        assert self._joins_to is not None
        group, running = self._joins_to
        wait_s = max(1e-3, deadline - time.monotonic())
        engine = come_into(self._job_handle, self._rank, self._config, running, wait_s)
        engine.timeout_s = self._timeout_s
        self.begin_with(engine)
        self._exchange.take_back = tell_of(group, engine, self._config, running)
        self._joined_in, self._joins_to = engine.members.epoch, None

    def _admit(self, deadline: float) -> None:
        """Wait for the processes that have joined the group up to an epoch, and have the members admit them."""
        membership, started = self._engine.membership, time.monotonic()
        if membership.runtime.await_decision(self.wanted - 1, max(self._timeout_s, deadline - started)) is None:
            epoch, self.wanted = self.wanted, 0
            where = context(self._op, rank=self._rank)
            raise ProtocolError(f"{where}: a rank has named epoch {epoch}, and the job has no such decision")
        while ranks := self._strangers():
            self._check(sorted(ranks), self._op)
            now = time.monotonic()
            if now > deadline:
                where = context(self._op, rank=self._rank, peer=min(ranks), epoch=self._exchange.epoch)
                text = f"{where}: rank {min(ranks)} is in the group, and does not come into the buffer"
                if not membership.insist_on(ranks, text, self._exchange.seq + 1, deadline):
                    raise silent(f"{text} ({now - started:.1f} s)", min(ranks))
            membership.admission.take_in(ranks, now + SLICE_S)
        membership.admission.apply_view(deadline)
        self._met_to, self._joined_in, self.wanted = max(self._met_to, self.wanted), 0, 0

    def _strangers(self) -> set[int]:
        """Return the ranks whose process is in the group, and was never in the buffer."""
        admission = self._engine.membership.admission
        return admission.strangers().intersection(self._in_group()) - admission.present().keys()

    def _excluded_when(self) -> tuple[str, int]:
        if not self._put_out_in:
            try:
                self._engine.membership.admission.apply_view(time.monotonic() + self._timeout_s)
            except expected(EvictedError) as error:
                self._put_out_in = error.epoch
        return "in", self._put_out_in + self._exchange.num_agreed + 1

    # ---- sync

    def sync(self, counted: int, used: int, deadline: float) -> Agreed:
        """As `MembersOfEngine.sync`."""
        if self._joins_to is not None:
            started = time.monotonic()
            try:
                self._join(deadline)
            except expected(CommTimeoutError) as error:
                raise no_quorum(self._rank, started, (), "the others did not sync") from error
        return super().sync(counted, used, deadline)

    def _data(self) -> bytes:
        view = self._engine.membership.runtime.view()
        return _AGREED.pack(self._exchange.num_agreed, self._newest_join(view))

    def _note(self, found: Mapping[int, bytes]) -> None:
        rows = [_AGREED.unpack(data) for data in found.values()]
        number, joined = map(max, zip(*rows, strict=True))
        self._met_to = max(self._met_to, joined)
        self._next = number + 1, tuple(sorted(found))

    def _enter(self, deadline: float) -> Agreed:
        assert self._next is not None
        number, ranks = self._next
        self._exchange.agree(number, self._sync.met)
        self._joined_in = self.wanted = 0
        self._raised_to = max(self._raised_to, self._sync.met.epoch)
        self._last = Agreed(self._exchange.epoch, ranks)
        self._next = None  # last: up to here all may be repeated
        return self._last

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
        if error.epoch > self._raised_to:
            return self._failure(error, seq)
        if seq <= last + 1:
            raise Moved
        return error

    def note_failed(self, error: PeerError) -> None:
        """Record that a call which this rank had refused has failed by a loss on the others: here it is not raised."""
        self._raised_to = max(self._raised_to, error.epoch)

    def _failure(self, error: PeerError, seq: int) -> PeerError:
        """Return the error for the losses not raised yet, up to that of `error` and later."""
        losses = [Loss(*loss) for loss in self._engine.membership.admission.losses(self._raised_to)]
        self._raised_to = max([error.epoch, *(loss.epoch for loss in losses)])
        if not losses:
            return error
        return failure(losses, error.op, self._rank, seq, self._raised_to + self._exchange.num_agreed, 0.0)

    def await_end_of(self, rank: int, deadline: float) -> bool:
        """Wait until a rank has left the view, for which there is a moment; return False when it stays."""
        engine = self._engine
        while rank not in engine.watch.dead():
            slot, view = engine.membership.admission.present().get(rank), engine.membership.runtime.view()
            process = next((parse_endpoint(member.endpoint) for member in view.members if member.slot == slot), None)
            if process is None:
                break
            self._check([rank], self._op)
            if time.monotonic() > deadline or not is_leaving(process.pid, process.start_time):
                return False
            time.sleep(_PAUSE_S)
        return True


def _nothing() -> None:
    """Do nothing."""
