"""The rows of a buffer's calls, as calls of an engine carry them: one row of each rank, for all ranks.

`direct.py` exchanges them where all ranks share a host, `exchange.py` over several. Every rank puts its own row into
its outbox and reads those of the members. The members of an engine call are the same on all ranks, so all read the same
rows, check them alike, and come to the same result or error. Rows count for and from members only: counts of rows for
lost ranks are taken as zeros, by all alike, so it does not matter which losses a rank knew of when it counted.

A crash leaves rows that some ranks have and others have not: an engine call ends with a rank's whole part or without.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NamedTuple

import numpy as np
import torch

from ...backend.collectives.rounds import cut, lay_out
from ...engine import Engine
from ...engine.limits import MIN_STAGING_BYTES
from ...engine.operation import Operation
from ...engine.outbox import PeerRegions
from ...engine.plan import Plan, Sink
from ...engine.signature import OP_CODE
from ...engine.signature import pack as pack_signature
from ...errors import EpeeError, InvalidState, NoQuorumError, ProtocolError, context, expected, ignored
from ...gpu.payload import DTYPE_CODES
from ..config import MAX_EXPERT_ALIGNMENT, BufferConfig
from ..throughput.placement import Ints
from .header import (
    OP_GATHER,
    REASON_BYTES,
    REFUSED,
    ExchangedRows,
    Header,
    RowFormat,
    check_agreed,
    limits_of,
    parse_header,
    reason_bytes,
)
from .membership import Membership

_BYTE = np.dtype(np.uint8)
_BFLOAT16 = DTYPE_CODES.index(torch.bfloat16)  # of calls that move no rows
_ROWS = "rows of a buffer's call"
_MARK = struct.Struct("<Q")
MARK_BYTES = _MARK.size  # at the beginning of a row: what its writer knows, which is no part of the call


class CallTimeouts(NamedTuple):
    """The options of a call that the engine reads from torch."""

    timeout: timedelta

    @classmethod
    def until(cls, deadline: float) -> CallTimeouts:
        """Return it for a call that begins now; `deadline` is a `time.monotonic()` value."""
        return cls(timedelta(seconds=max(1e-3, deadline - time.monotonic())))


class OwnRow:
    """This rank's row of a call, and the memory for all rows.

    Args:
        data: its bytes.
        header: that is in it.
        num_ranks: of the buffer.
        signature: of the engine's call that exchanges rows of this length.
        name: of the call, for messages.

    Attributes:
        found: the rows of all ranks, zeros for rows that have not arrived.
        heeds_stalls: as of `Plan`.
    """

    heeds_stalls = True

    def __init__(self, data: bytes, header: Header, num_ranks: int, signature: int, name: str) -> None:
        self.data, self.header, self.signature, self.name = data, header, signature, name
        self.found = bytearray(num_ranks * len(data))

    def plan(self, peer_regions: PeerRegions) -> RowsPlan:
        """Plan their exchange."""
        return RowsPlan(self, peer_regions)


class RowsPlan(Plan):
    """The rows of all ranks for all. The repetition of a call that was broken off is one with the same row, its mark
    aside.

    `own.found` belongs to the call alone, so rows are read straight into it, also round by round: who gets an error
    does not look at it.
    """

    def __init__(self, own: OwnRow, peer_regions: PeerRegions) -> None:
        self.own = own
        self.name, self.signature, self.heeds_stalls = own.name, own.signature, own.heeds_stalls
        self.put_bytes = self.read_bytes = self._length = length = len(own.data)
        if length > MIN_STAGING_BYTES:
            rounds = cut(length, 1, peer_regions.staging_bytes)
            if rounds.num_rounds > 1:
                lay_out(self, rounds, rounds.length, 0, True)
                self._length = rounds.length  # of a round

    def put(self, peer_regions: PeerRegions, k: int, offset: int) -> None:
        """Write round `k` of this rank's row."""
        part = memoryview(self.own.data)[k * self._length : (k + 1) * self._length]
        peer_regions.views[_BYTE][peer_regions.rank].data[offset : offset + len(part)] = part

    def take(self, peer_regions: PeerRegions, k: int, offsets: list[int]) -> None:
        """Copy round `k` of every member's row."""
        first, views, found = k * self._length, peer_regions.views[_BYTE], memoryview(self.own.found)
        length = len(self.own.data)
        num_bytes = min(self._length, length - first)
        for view, offset, rank in zip(views, offsets, peer_regions.members, strict=True):
            start = rank * length + first
            found[start : start + num_bytes] = view.data[offset : offset + num_bytes]

    def sinks(self) -> Sequence[Sink]:
        """Return the destination of the rows."""
        return (Sink(np.frombuffer(self.own.found, dtype=_BYTE)),)

    def is_like(self, other: Plan) -> bool:
        """As `Plan.is_like`."""
        return isinstance(other, RowsPlan) and other.own.data[MARK_BYTES:] == self.own.data[MARK_BYTES:]


class MemberRows(NamedTuple):
    """The input of a step's plan.

    Attributes:
        rows: of all members, checked and agreed on.
        members: ascending.
        epoch: of the view.
        seq: number of the engine call that has exchanged them; it names the step.
        peer_regions: the outboxes with which that call ran; they contain the placement of the ranks.
    """

    rows: ExchangedRows
    members: tuple[int, ...]
    epoch: int
    seq: int
    peer_regions: PeerRegions

    def serves(self, peer_regions: PeerRegions) -> bool:
        """Return whether a call with these outboxes belongs to the step as it is planned."""
        return peer_regions.epoch == self.epoch and peer_regions.members == self.members


class RowExchange:
    """The rows of a buffer's calls, as calls of an engine carry them; `direct.py` and `exchange.py` derive from it.

    Args:
        config: of the buffer.
        rank: this rank.
        interrupt: raises once the buffer is to be closed.

    Attributes:
        engine: makes the calls; a process that joins a running `Buffer` has none before its first call (`has_engine`).
        epoch: handles of another one are stale.
        membership: defines what a new view does to a call.
        lost: why the buffer cannot be used any more; empty while it can.
        is_dropped: the buffer ends without having been closed.
        take_back: removes this rank's notice of the buffer from the group.
    """

    engine: Engine
    membership: Membership
    has_engine = False
    epoch = 0
    is_dropped = False
    lost = ""

    def __init__(self, config: BufferConfig, rank: int, interrupt: Callable[[], None]) -> None:
        self.config = config
        self.rank = rank
        self._interrupt = interrupt
        self.take_back: Callable[[], None] = _nothing
        self._format = RowFormat(config)
        self._limits = limits_of(config)
        self._signature = pack_signature(OP_CODE[_ROWS], count=MARK_BYTES + 8 * (self._format.num_words - 1))
        ranks = np.repeat(np.arange(config.num_ranks), config.num_local_experts)
        self._owners = np.concatenate([np.arange(config.num_ranks), ranks])  # of the counts of a row

    @property
    def seq(self) -> int:
        """Number of the last call; equal on all ranks in the same call."""
        raise NotImplementedError

    @property
    def members(self) -> tuple[int, ...]:
        """Ranks of the epoch, or of the last call, ascending."""
        raise NotImplementedError

    @property
    def reduced_members(self) -> tuple[int, ...] | None:
        """The same where these are not all, else None."""
        raise NotImplementedError

    def call(self, header: Header, counts: Ints | None, text: bytes, deadline: float) -> ExchangedRows:
        """Send this rank's row and return the rows of all ranks, checked and agreed on."""
        raise NotImplementedError

    def all_gather_bytes(self, data: bytes, deadline: float, op: int = OP_GATHER) -> list[bytes]:
        """Return the `data` of all ranks, in rank order; one exchange for each `REASON_BYTES` bytes. `op`: of
        `OPS_OF_CPUS`, the call that the user has made.

        A rank that is not in the view has none. Pieces carry their number, so that none is taken for another when the
        view changes between two of them.
        """
        parts: list[bytes] = [b""] * self.config.num_ranks
        for idx, first in enumerate(range(0, max(1, len(data)), REASON_BYTES)):
            piece = data[first : first + REASON_BYTES]
            number = 1 + idx % MAX_EXPERT_ALIGNMENT
            header = Header(op, 0, _BFLOAT16, len(data), expert_alignment=number, rank=self.rank)
            rows = self.call(header, None, piece, deadline)
            for rank in rows.parties:
                parts[rank] += rows.texts[rank][: len(piece)]
            self.close_call()
        return parts

    def close_call(self) -> None:
        """Record that the caller of the last call has its result."""
        self.engine.latest.op = None

    def publish(self, header: Header, counts: Ints | None, text: bytes, deadline: float) -> None:
        """Send this rank's row, as one that refuses the call, and wait for no rank."""
        raise NotImplementedError

    def refuse(self, op: int, error: BaseException, deadline: float) -> None:
        """Take part in an exchange as the rank whose arguments were refused, so that the peers are notified at once."""
        header = Header(op, 0, _BFLOAT16, refused=REFUSED, rank=self.rank)
        self.publish(header, None, reason_bytes(error), deadline)

    def require_results(self, deadline: float) -> None:
        """Raise `InvalidState` if an earlier call has ended otherwise here than on the other ranks."""
        self.settle_calls(deadline)
        if self.lost:
            raise InvalidState(self.lost)

    def forget_results(self) -> None:
        """Begin an epoch: all calls before are over."""
        self.lost, self.engine.latest.op = "", None

    def settle_calls(self, deadline: float) -> None:
        """Find out how the calls have ended whose results no caller has got.

        Raises:
            CommTimeoutError: the end of one is still open.
        """
        engine = self.engine
        if engine.latest.op is None and not engine.unclaimed:
            return
        for op in (*engine.unclaimed, engine.latest.op):
            if op is None or not isinstance(op.plan, RowsPlan):
                continue
            self.await_end(op, deadline)
            self._settle(op)
        engine.unclaimed.clear()
        engine.latest.op = None

    def await_end(self, op: Operation, deadline: float) -> None:
        """Wait until a call has ended, well or not; raises as `settle_calls`."""
        if not op.done:
            try:
                self.engine.wait(op, max(1e-3, deadline - time.monotonic()))
            except BaseException as error:
                if error is not op.error:  # that may be what a handler has raised in it
                    raise

    def _settle(self, op: Operation) -> None:
        """Record what follows from a call that has ended, and whose result no caller has got."""
        if self._has_worked(op):
            where = context(op.plan.name, rank=self.rank, seq=op.seq, epoch=op.peer_regions.epoch)
            self.lost = (
                f"{where}: this call has raised an error here, and others have completed it: the ranks stand before "
                "different calls; close this buffer on all ranks and make a new one"
            )[:REASON_BYTES]

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

    def _row(self, header: Header, counts: Ints | None, text: bytes, name: str = _ROWS, mark: int = 0) -> OwnRow:
        """Return this rank's row; `mark`: what this rank knows, which is no part of the call."""
        data = _MARK.pack(mark) + self._format.pack(header, text, counts)
        return OwnRow(data, header, self.config.num_ranks, self._signature, name)

    def _read(self, row: OwnRow, op: Operation) -> MemberRows:
        """Return the rows of the members of a call, checked and agreed on."""
        peer_regions, seq, num_ranks = op.peer_regions, op.seq, self.config.num_ranks
        members, epoch = peer_regions.members, peer_regions.epoch
        found, start, length = bytes(row.found), self.rank * len(row.data), len(row.data)
        if found[start + MARK_BYTES : start + length] != row.data[MARK_BYTES:]:
            raise ProtocolError(f"{self.where('rows')}: this rank's own row was changed by somebody else")
        layout, mine = self._format, row.header
        headers = layout.alike(found, mine, self._limits) if len(members) == num_ranks else None
        texts, told = layout.contents(found)
        if headers is None:
            raw, _, _ = layout.split(found)
            headers = [
                parse_header(words, src, self._limits) if src in members else mine.of_absent(src)
                for src, words in enumerate(raw)
            ]
            check_agreed(headers, texts, members, seq, epoch)
        if len(members) < num_ranks:
            lost = np.setdiff1d(np.arange(num_ranks), members)
            told = told.copy()
            told[lost] = 0
            told[:, np.isin(self._owners, lost)] = 0
        return MemberRows(ExchangedRows(headers, told, texts, members), members, epoch, seq, peer_regions)

    def where(self, op: str) -> str:
        """Return the context of a message about the current call."""
        return context(op, rank=self.rank, seq=self.seq, epoch=self.epoch)

    def release(self) -> None:
        """End the engine; idempotent."""
        try:
            with ignored(NoQuorumError):  # then no rank is notified
                self.take_back()
        finally:
            if self.has_engine:
                self.engine.close(failed=self.is_dropped)


def _nothing() -> None:
    """Do nothing: no notice of the buffer was published."""
