"""The exchange of rows over several hosts: one collective call of the buffer's engine in the place of inboxes.

A call of the buffer begins as on one host (`control/inbox.py`): every rank tells what it is about to do and how many
rows go where, and all ranks find the same verdict in the same rows. The engine carries the rows to every host once; it
sees to it that a call which one rank gives up ends alike on all, so there is nothing to withdraw here. What a call
moves beside its rows is further calls of the same engine (`records.py`, `partials.py`), in the same order on all ranks.

What a crash leaves: rows that some have and others have not. Those that have them wait in the next call of the engine,
which ends with the lost rank's name; nobody has a result.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple

import numpy as np

from ...backend.collectives.copying import Spread
from ...backend.collectives.plan import Make, Plan, Sink
from ...backend.collectives.signature import OP_CODE
from ...backend.collectives.signature import pack as pack_signature
from ...backend.engine.engine import Engine
from ...backend.engine.operation import Operation
from ...backend.outbox import Outboxes
from ...backend.tensors import Array
from ...errors import ProtocolError, context
from ..config import BufferConfig
from ..control.header import OP_NAMES, Header, check_agreed, limits_of, parse_header
from ..control.inbox import ExchangedRows
from ..control.membership import FixedMembership, Membership
from ..control.words import RowFormat
from ..throughput.placement import Ints

_BYTE = np.dtype(np.uint8)
_ROWS = "rows of a buffer's call"


class _Patience(NamedTuple):
    """What the engine reads of torch's options of a call."""

    timeout: timedelta


class RowsPlan(Spread):
    """Every rank's row for all. The repetition of a call that was broken off is one with the same row."""

    def __init__(self, row: bytes, found: Array, box: Outboxes) -> None:
        self.row = row
        sinks = {rank: Sink(part) for rank, part in enumerate(found)}
        signature = pack_signature(OP_CODE[_ROWS], count=len(row))
        super().__init__(_ROWS, signature, np.frombuffer(row, dtype=_BYTE), True, sinks, box)

    def is_like(self, other: Plan) -> bool:
        """As `Plan.is_like`."""
        return isinstance(other, RowsPlan) and other.row == self.row


class NothingOpen:
    """How the last call ends, where the engine knows it: nothing is open here."""

    is_open = False

    def close(self) -> None:
        """Do nothing."""


class HostsExchange:
    """Row exchange through an engine; what `control.messages.RowExchange` asks.

    Args:
        config: of the buffer.
        engine: the buffer's own.
        interrupt: raises once the buffer is to be closed.

    Attributes:
        epoch: 0: members do not change.
        members: all ranks.
    """

    epoch = 0
    reduced_members: tuple[int, ...] | None = None

    def __init__(self, config: BufferConfig, rank: int, engine: Engine, interrupt: Callable[[], None]) -> None:
        self.config = config
        self.rank = rank
        self.engine = engine
        self.members = self.parties = tuple(range(config.num_ranks))
        self.membership: Membership = FixedMembership(0)
        self.end = NothingOpen()
        self._format = RowFormat(config)
        self._limits = limits_of(config)
        self._interrupt = interrupt

    @property
    def seq(self) -> int:
        """Number of the last call; equal on all ranks in the same call."""
        return self.engine.seq

    @property
    def num_calls(self) -> int:
        """Calls that the peers have heard of, or will."""
        return self.engine.seq

    def call(self, header: Header, counts: Ints | None, text: bytes, deadline: float) -> ExchangedRows:
        """Tell this rank's row and return everybody's, checked and agreed on; as `control.inbox.Exchange.call`.

        Raises:
            MismatchError: the ranks disagree, or one has refused its call; the same on all.
            CommTimeoutError, RankFailedError: a rank did not come.
            ProtocolError: a row cannot be right.
        """
        row = bytes(8) + self._format.pack(header, text, counts)
        found = np.empty((self.config.num_ranks, len(row)), dtype=_BYTE)
        self.run(lambda box: RowsPlan(row, found, box), deadline)
        if found[self.rank].tobytes() != row:
            raise ProtocolError(f"{self._where(header)}: this rank's own row was changed by somebody else")
        raw, texts, told = self._format.split(found.tobytes())
        headers = [parse_header(words, src, self._limits) for src, words in enumerate(raw)]
        check_agreed(headers, texts, self.parties, self.seq, self.epoch)
        told = told[:, : self.config.num_ranks + self.config.num_experts]
        return ExchangedRows(headers, told, texts, self.parties)

    def publish(self, header: Header, counts: Ints | None, text: bytes, deadline: float) -> None:
        """Tell this rank's row, as one that refuses the call, and wait for nobody."""
        row = bytes(8) + self._format.pack(header, text, counts)
        found = np.empty((self.config.num_ranks, len(row)), dtype=_BYTE)
        self.engine.start(lambda box: RowsPlan(row, found, box), _patience(deadline))

    def run(self, make: Make, deadline: float) -> Operation:
        """Run a call of the engine to its end."""
        self._interrupt()
        return self.engine.run(make, _patience(deadline))

    def release(self) -> None:
        """End the engine; idempotent."""
        self.engine.close()

    def where(self, op: str) -> str:
        """Return the facts of a message about the current call."""
        return context(op, rank=self.rank, seq=self.seq, epoch=self.epoch)

    def _where(self, header: Header) -> str:
        return self.where(OP_NAMES[header.op])


def _patience(deadline: float) -> _Patience:
    return _Patience(timedelta(seconds=max(1e-3, deadline - time.monotonic())))
