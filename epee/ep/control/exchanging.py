"""The interface of the exchange of rows (`hosts/direct.py`, `hosts/exchange.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..throughput.placement import Ints
from .header import ExchangedRows, Header
from .membership import Membership


class LastCall(Protocol):
    """The end of the last call."""

    def close(self) -> None:
        """Record that it has ended on all ranks alike, as this one finds."""


class RowExchange(Protocol):
    """The exchange of rows.

    Attributes:
        is_dropped: the buffer ends without having been closed.
    """

    is_dropped: bool

    @property
    def membership(self) -> Membership:
        """Defines what a new view does to a call."""

    @property
    def epoch(self) -> int:
        """Of the view; 0 while membership cannot change."""

    @property
    def members(self) -> Sequence[int]:
        """Ranks of the epoch, ascending."""

    @property
    def reduced_members(self) -> Sequence[int] | None:
        """The same where these are not all, else None."""

    @property
    def end(self) -> LastCall:
        """The end of the last call."""

    def call(self, header: Header, counts: Ints | None, text: bytes, deadline: float) -> ExchangedRows:
        """Send this rank's row and return the rows of all ranks."""

    def publish(self, header: Header, counts: Ints | None, text: bytes, deadline: float) -> None:
        """Send this rank's row."""

    def release(self) -> None:
        """Release all memory."""
