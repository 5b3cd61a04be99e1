"""The interface of a link to the code above it, for all engines.

A link joins this process to one process of another host. Its guarantees:

    order      a word is seen after the bytes that were written before it, on the same link
    no wait    a write never blocks; what the network does not take waits here, in the caller's memory
    bounds     the receiver checks the target of a write before it stores a byte: no engine writes into memory by itself
    fence      after `close` no data of the peer changes memory here
    progress   a waiting caller pumps; without one, a thread does (`poller.py`)

`tcp.py` is the first engine: sockets, nothing to install. `nixl/` is the second one, for RDMA networks (`engine.py`).
"""

from __future__ import annotations

import enum
from typing import Any, Protocol


class LinkLoss(enum.Enum):
    """The reason for which a link has ended. A hint, never a proof: the process behind it may live."""

    CLOSED = "it closed the connection"
    RESET = "the connection was reset"
    DAMAGED = "what it sent could not be right"


class Link(Protocol):
    """One process of another host.

    Attributes:
        lost: the reason for which the link has ended; None while it works.
    """

    lost: LinkLoss | None

    def write(self, offset: int, data: Any, word: int, value: int, note: int) -> None:
        """Store `data` at byte `offset` of the peer's copy of this rank, then `value` in word `word`.

        Args:
            data: a flat buffer of any length, empty for the word alone; it must not change until the peer's memory
            shows it.
            word: its index, or `frames.NO_WORD`.
            note: a number that only grows; the peer receives it with every write.
        """

    def write_pieces(self, pieces: Any, word: int, value: int, note: int) -> None:
        """As `write`, for several small pieces at once, (offset, bytes) each, which are copied."""

    def ask(self, words: Any, number: int) -> None:
        """Ask for words (rank, index) of ranks of the peer's host, after all earlier writes."""

    def tell(self, number: int, values: Any) -> None:
        """Answer the ASK with this number."""

    def say(self, kind: int, source: int, epoch: int) -> None:
        """Send a FETCH, BEGIN or END about rank `source`, after all earlier writes."""

    def pump(self) -> bool:
        """Move the data that can be moved now, both ways; return whether any was. Never blocks."""

    def close(self) -> None:
        """End the link; idempotent."""
