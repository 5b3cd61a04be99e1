"""The exchange of rows over several hosts: one collective call of the buffer's engine instead of inboxes.

A call of the buffer begins as on one host (`control/inbox.py`): every rank sends what it is about to do and how many
rows go where, and all ranks reach the same result from the same rows. The engine carries the rows to every host once;
it makes sure that a call which one rank aborts ends in the same way on all, so nothing needs to be aborted here. What a
call moves beside its rows is further calls of the same engine (`records.py`, `partials.py`), in the same order on all
ranks.

The engine determines the members, call by call; `step.py` defines what that means for a buffer's call of several ones.
Rows count for and from members only: counts of rows for lost ranks are taken as zeros, by all alike, so it does not
matter which losses a rank knew of when it counted.

A crash leaves rows that some ranks have and others have not. Those that have them wait in the next call of the engine,
which continues without the lost rank, or ends with its name; no rank has a result.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...engine import Engine
from ...engine.operation import Operation
from ...engine.outbox import PeerRegions
from ...engine.plan import Make
from ...errors import NoQuorumError, ProtocolError, context, ignored
from ..config import BufferConfig
from ..control.exchanging import LastCall
from ..control.header import OP_GATHER, ExchangedRows, Header, Moved, RowFormat, check_agreed, limits_of, parse_header
from ..control.membership import Membership
from ..throughput.placement import Ints
from .step import MARK_BYTES, CallPatience, MemberRows, OwnRow, Step


def _nothing() -> None:
    """Do nothing: no notice of the buffer was published."""


class NothingOpen:
    """The end of the last call, which the engine determines: nothing is open here."""

    is_open = False

    def close(self) -> None:
        """Do nothing."""


class RowsOverEngine:
    """The rows of a buffer's calls, as calls of an engine carry them.

    Args:
        config: of the buffer.
        rank: this rank.
        interrupt: raises once the buffer is to be closed.

    Attributes:
        epoch: handles of another one are stale.
        is_dropped: the buffer ends without having been closed.
    """

    epoch = 0
    is_dropped = False

    def __init__(self, config: BufferConfig, rank: int, interrupt: Callable[[], None]) -> None:
        self.config = config
        self.rank = rank
        self._interrupt = interrupt
        self._format = RowFormat(config)
        self._limits = limits_of(config)
        ranks = np.repeat(np.arange(config.num_ranks), config.num_local_experts)
        self._owners = np.concatenate([np.arange(config.num_ranks), ranks])  # of the counts of a row

    @property
    def seq(self) -> int:
        """Number of the last call; equal on all ranks in the same call."""
        raise NotImplementedError

    def _row(self, header: Header, counts: Ints | None, text: bytes, mark: int = 0) -> OwnRow:
        """Return this rank's row; `mark`: what this rank knows, which is no part of the call."""
        data = mark.to_bytes(MARK_BYTES, "little") + self._format.pack(header, text, counts)
        return OwnRow(data, self.config.num_ranks)

    def _read(self, row: OwnRow, op: Operation) -> MemberRows:
        """Return the rows of the members of a call, checked and agreed on."""
        members, seq = op.peer_regions.members, op.seq
        if row.found[self.rank, MARK_BYTES:].tobytes() != row.data[MARK_BYTES:]:
            raise ProtocolError(f"{self.where('rows')}: this rank's own row was changed by somebody else")
        raw, texts, told = self._format.split(row.found.tobytes())
        mine = parse_header(raw[self.rank], self.rank, self._limits)
        headers = [
            parse_header(words, src, self._limits) if src in members else mine.of_absent(src)
            for src, words in enumerate(raw)
        ]
        check_agreed(headers, texts, members, seq, op.peer_regions.epoch)
        told = told[:, : len(self._owners)]
        if len(members) < self.config.num_ranks:
            lost = np.setdiff1d(np.arange(self.config.num_ranks), members)
            told = told.copy()
            told[lost] = 0
            told[:, np.isin(self._owners, lost)] = 0
        return MemberRows(
            ExchangedRows(headers, told, texts, members), members, op.peer_regions.epoch, seq, op.peer_regions
        )

    def where(self, op: str) -> str:
        """Return the context of a message about the current call."""
        return context(op, rank=self.rank, seq=self.seq, epoch=self.epoch)


class HostsExchange(RowsOverEngine):
    """Row exchange through an engine; implements `control.messages.RowExchange`.

    Args:
        config: of the buffer.
        engine: the buffer's own.
        interrupt: raises once the buffer is to be closed.
        take_back: removes this rank's notice of the buffer from the group.

    Attributes:
        peer_regions: the outboxes with which the last call ran.
        epoch: handles of another one are stale. Of the view in the last call, so the same on all ranks between the same
            two calls; in a `LatencyBuffer` it is set by `sync`.
        members: ranks with a part in the last call.
        reduced_members: None: routing is planned for all ranks, lost ones do not count.
    """

    reduced_members: tuple[int, ...] | None = None

    def __init__(
        self,
        config: BufferConfig,
        rank: int,
        engine: Engine,
        interrupt: Callable[[], None],
        take_back: Callable[[], None] = _nothing,
    ) -> None:
        super().__init__(config, rank, interrupt)
        self.engine = engine
        self.membership = Membership(0)
        self.end: LastCall = NothingOpen()
        self.epoch = 0 if config.is_latency else engine.members.epoch
        self.peer_regions: PeerRegions = engine.members
        self._take_back = take_back

    @property
    def members(self) -> tuple[int, ...]:
        """Ranks of the last call, ascending."""
        return self.peer_regions.members

    @property
    def seq(self) -> int:
        """Number of the last call; equal on all ranks in the same call."""
        return self.engine.seq

    @property
    def num_calls(self) -> int:
        """Calls that are visible to the peers, or will be."""
        return self.engine.seq

    def call(self, header: Header, counts: Ints | None, text: bytes, deadline: float) -> ExchangedRows:
        """Send this rank's row and return the rows of all ranks, checked and agreed on; as
        `control.inbox.Exchange.call`.

        Raises:
            MismatchError: the ranks disagree, or one has refused its call; the same on all.
            CommTimeoutError, RankFailedError: a rank did not take part.
            ProtocolError: a row cannot be right.
        """
        last = self.peer_regions
        row, patience = self._row(header, counts, text), CallPatience.until(deadline)
        met = self._read(row, self.run(row.plan, patience))
        if header.op == OP_GATHER and header.expert_alignment > 1 and met.members != last.members:
            raise Moved  # a later piece of a gather has other members than the piece before
        return met.rows

    def step(self, header: Header, counts: Ints | None, deadline: float) -> Step:
        """Send this rank's row and return a step with the rows of all ranks, which moves the data; raises as `call`."""
        # for each of its calls: a rank that has finished one waits anew in the next
        patience = CallPatience.until(deadline)
        return Step(lambda make: self.run(make, patience), self._read, self._row(header, counts, b""))

    def publish(self, header: Header, counts: Ints | None, text: bytes, deadline: float) -> None:
        """Send this rank's row, as one that refuses the call, and wait for no rank."""
        self.engine.start(self._row(header, counts, text).plan, CallPatience.until(deadline))

    def run(self, make: Make, patience: CallPatience) -> Operation:
        """Run a call of the engine to its end."""
        self._interrupt()
        op = self.engine.run(make, patience)
        self.peer_regions = op.peer_regions
        if not self.config.is_latency:
            self.epoch = op.peer_regions.epoch
        return op

    def release(self) -> None:
        """End the engine; idempotent."""
        try:
            with ignored(NoQuorumError):  # then no rank is notified
                self._take_back()
        finally:
            self.engine.close(failed=self.is_dropped)
