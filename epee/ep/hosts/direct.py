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

A rank that leaves a dispatch between its two calls refuses the second one, so that no rank waits for it. One that has
exchanged the rows of a combine and raises then does not know the result that the others have: the ranks stand before
different calls, and the buffer says so in every further one (`OpenCall`).

Members that return, or join, get a new engine with all others (`membership/engine_members.py`), and so does a buffer
whose ranks stand before different calls, by `sync` with a mask. The mark of a row names the newest epoch in which a
process has joined, as far as its writer knows.

A crash leaves rows in slots that nobody grants again, and an engine call that the others end without the rank.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

from ...engine import Engine
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
    InvalidState,
    PeerError,
    context,
    expected,
)
from ...memory.signals import SEQ_BITS
from ..config import BufferConfig
from ..control.header import OP_COMBINE, OP_DISPATCH, OP_NAMES, REASON_BYTES, ExchangedRows, Header, Moved
from ..membership.engine_members import EngineMembership
from ..throughput.placement import Ints
from .exchange import RowsOverEngine
from .step import CallPatience

SEQ_MASK = (1 << SEQ_BITS) - 1


class DataPlan(Plan):
    """The data call of a dispatch: headers only."""

    def __init__(self, peer_regions: PeerRegions) -> None:
        super().__init__(OP_NAMES[OP_DISPATCH], pack_signature(OP_CODE[OP_NAMES[OP_DISPATCH]]))


class OpenCall:
    """The end of a call here that the others complete by themselves: open until its caller has the result.

    Attributes:
        lost: why the buffer cannot be used any more; empty while it can.
    """

    def __init__(self) -> None:
        self.lost = ""
        self._where = ""

    def open(self, where: str) -> None:
        """Record that the others complete the call named `where`."""
        self._where = where

    def close(self) -> None:
        """Record that the caller of the last call has its result."""
        self._where = ""

    def check(self) -> None:
        """Raise `InvalidState` if the others have completed a call that has raised here."""
        if self._where:
            self.lost = (
                f"{self._where}: this call has raised an error here, and others have completed it: the ranks stand "
                "before different calls; close this buffer on all ranks and make a new one"
            )[:REASON_BYTES]
            self.close()
        if self.lost:
            raise InvalidState(self.lost)


class DirectExchange(RowsOverEngine):
    """Row exchange through an engine, beside payload in shared memory; used as `control.inbox.Exchange`.

    Args:
        config, rank, interrupt: as of `RowsOverEngine`.

    Attributes:
        membership: makes the engines (`membership/engine_members.py`); set before the first call.
        seq: of the last call of the engine that others may have rows or grants of; it names calls and handles.
        settled: calls of the engine before this one are over on all ranks.
        peer_regions: the outboxes of the buffer's epoch.
        reduced_members: the members if these are not all ranks, else None.
        later: the peer regions with which the last call has ended, if the next one enters their epoch; else None.
        pids: the ranks' processes.
    """

    membership: EngineMembership
    seq = 0
    settled = 0
    later: PeerRegions | None = None
    peer_regions: PeerRegions
    reduced_members: tuple[int, ...] | None = None

    def __init__(self, config: BufferConfig, rank: int, interrupt: Callable[[], None]) -> None:
        super().__init__(config, rank, interrupt)
        self.end = self._open = OpenCall()
        self.pids: dict[int, int] = {}
        self._engine: Engine | None = None
        self._old: Engine | None = None  # the one before, which is to be closed
        self._earlier_calls = 0  # of earlier engines
        self._op, self._number = "none", 0  # of the buffer's last call, in messages
        self._is_awaited = False  # the others wait for this rank's data call
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
    def members(self) -> tuple[int, ...]:
        """Ranks of the epoch, ascending; none before the first."""
        return self.peer_regions.members if self._engine is not None else ()

    @property
    def num_calls(self) -> int:
        """Calls that are visible to the peers, or will be."""
        return self._earlier_calls + (0 if self._engine is None else self._engine.seq)

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's outbox; pages never touched cost nothing."""
        if self._engine is None or not self._engine.peer_regions.regions:
            return 0
        return self._engine.peer_regions.regions[self.rank].mapped_bytes

    def use(self, engine: Engine) -> None:
        """Run the next call with an engine of other members; the one before ends, and with it all calls of it."""
        if engine is not self._engine:  # else an interrupt came on the way
            if self._engine is not None:
                self.membership.forget()
            self._earlier_calls = self.num_calls
            self._old, self._engine = self._engine, engine
        self.seq = self.settled = 0
        self._open.lost = ""
        self._open.close()
        self._is_awaited, self._refusal = False, None
        self._bind(engine.members)
        self._drop_old()

    def _drop_old(self) -> None:
        if self._old is not None:
            self._old.close(failed=self.is_dropped)
            self._old = None

    def _bind(self, peer_regions: PeerRegions) -> None:
        """Make an epoch that of the buffer."""
        self.later = None
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
        row, name = self._row(header, counts, text, self.membership.newest_join), OP_NAMES[header.op]
        make = partial(row.plan, name=name)
        self._op, self._number = name, self._number + 1
        if self.engine.unclaimed:
            self._settle_interrupted(make, deadline)
        self._open.check()
        done = self._run(make, deadline)
        met = self._read(row, done)
        self.membership.read_joins(max(row.marks(met.members)))
        if done.peer_regions.epoch != self.epoch:
            is_left = not self.membership.raises and set(met.members) <= set(self.members)
            if header.op != OP_COMBINE or not is_left:
                self.enter(done.peer_regions)
                raise Moved
            self.later = done.peer_regions
        self._is_awaited = header.op == OP_DISPATCH
        if header.op == OP_COMBINE:
            self._open.open(context(name, rank=self.rank, seq=done.seq, epoch=self.epoch))
        return met.rows

    def _settle_interrupted(self, make: Make, deadline: float) -> None:
        """Find out how interrupted calls have ended, of which the one that `make` plans may be the repetition.

        Raises:
            CommTimeoutError: that is still open.
        """
        for op in [op for op in self.engine.unclaimed if op.plan.name != OP_NAMES[OP_DISPATCH]]:
            if not op.done:
                try:
                    self.engine.wait(op, max(1e-3, deadline - time.monotonic()))
                except expected(EpeeError):
                    if not op.done:
                        raise
            if op.error is None and not make(op.peer_regions).is_like(op.plan):
                self._open.open(context(op.plan.name, rank=self.rank, seq=op.seq, epoch=self.epoch))

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
        finally:
            self.seq = engine.seq
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
            f"{where}: rank {names} did not send its {'rows' if is_data else 'call'}; the call is aborted; repeat the "
            "step; raise timeout= if the peer is only slow",
            error.ranks,
        )

    def publish(self, header: Header, counts: Ints | None, text: bytes, deadline: float) -> None:
        """Send this rank's row, as one that refuses the call, and wait for no rank."""
        self._await_refusal(deadline)
        self._number += 1
        row = self._row(header, counts, text, self.membership.newest_join)
        make = partial(row.plan, name=OP_NAMES[header.op])
        self._refusal = self.engine.start(make, CallPatience.until(deadline))

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
        self._is_awaited = False
        done = self._run(DataPlan, deadline)
        if done.peer_regions.epoch != self.epoch:
            self.enter(done.peer_regions)
            raise Moved
        return []

    def abandon(self) -> None:
        """Refuse the data call, if the others are in it: this rank's rows will not arrive."""
        is_awaited, self._is_awaited = self._is_awaited, False
        if not is_awaited or self.engine.flags & ENDED:
            return
        reason = AbortedError(f"gave up this call after an error of its own: {sys.exc_info()[1]!r}")
        plan = refused(OP_NAMES[OP_DISPATCH], reason)
        self._refusal = self.engine.start(lambda peer_regions: plan, may_claim=False)

    def abort(self) -> None:
        """End a call in progress in another thread."""
        if self._engine is not None:
            self._engine.close()
