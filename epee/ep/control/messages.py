"""The messages between the CPU sides of a buffer's ranks, beside the movement of rows.

Bytes for all ranks (`all_gather_bytes`), and that a call was refused (`refuse`).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import torch

from ...errors import EpeeError, MismatchError, expected
from ...gpu.payload import DTYPE_CODES
from ..config import MAX_EXPERT_ALIGNMENT, BufferConfig
from ..hosts.rows import RowExchange
from .header import OP_GATHER, OP_SYNC, REASON_BYTES, REFUSED, Header, Moved

_log = logging.getLogger(__name__)
_BFLOAT16 = DTYPE_CODES.index(torch.bfloat16)  # of calls that move no rows


SomeExchange = TypeVar("SomeExchange", bound=RowExchange)


class ControlPlaneOver(Generic[SomeExchange]):
    """The CPU side of a buffer.

    Args:
        config: of the buffer.
        rank: this rank.
        exchange: its row exchange.
    """

    def __init__(self, config: BufferConfig, rank: int, exchange: SomeExchange) -> None:
        self.config = config
        self.rank = rank
        self.exchange = exchange

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
            rows = self.exchange.call(header, None, piece, deadline)
            for rank in rows.parties:
                parts[rank] += rows.texts[rank][: len(piece)]
            self.exchange.close_call()
        return parts

    def refuse(self, op: int, error: BaseException, deadline: float) -> None:
        """Take part in an exchange as the rank whose arguments were refused, so that the peers are notified at once."""
        header = self._bare_header(op)._replace(refused=REFUSED)
        self.exchange.publish(header, None, reason_bytes(error), deadline)

    def _bare_header(self, op: int) -> Header:
        """Return the header of a call that moves no rows."""
        return Header(op, 0, _BFLOAT16, rank=self.rank)


@contextlib.contextmanager
def refused_alike(control: ControlPlaneOver[Any], deadline: float) -> Iterator[None]:
    """Notify the peers of a `MismatchError` in the body: they are in another call, and get it there."""
    try:
        yield
    except expected(MismatchError) as error:
        try:
            control.refuse(OP_SYNC, error, deadline)
        except expected(EpeeError, Moved) as problem:
            _log.warning("could not tell the peers about a refused sync: %s", problem)
        raise


def reason_bytes(error: BaseException) -> bytes:
    """Return what the peers will read about a refusal."""
    return f"{type(error).__name__}: {error}".encode()[:REASON_BYTES]
