"""The steps of a call over several hosts: as `latency/flight.py`, and the ranks contained in a host's sums.

Ranks lost beside those whose message does not arrive: in a dispatch a rank whose records are not for this one. In a
combine the message of a rank that had this one's tokens may have arrived, and be in no sum: with a mask `got` and
`lost_weight` report that; without one it is a loss. A message that was overwritten while it was read has not arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from ....errors import CommTimeoutError, EpeeError, PeerError
from ...latency.flight import Flight, Flights
from ...latency.wire import LATENCY_DISPATCH, SectionHeader
from .wire import HostsWire, TakenBack


class HostsFlights(Flights):
    """Takes calls through their steps.

    Args:
        wire: of the buffer.
        epoch, dead, why_gone: as of `Flights`.
        counted: returns, by the headers of the arrived messages, the ranks whose rows are in the sums that this rank
            has got in a combine, a bit per rank.
    """

    def __init__(
        self,
        wire: HostsWire,
        epoch: Callable[[], int],
        dead: Callable[[], Collection[int]],
        why_gone: Callable[[int], tuple[type[PeerError], str]],
        counted: Callable[[Flight, Mapping[int, SectionHeader]], int],
    ) -> None:
        super().__init__(wire, epoch, dead, why_gone, _nothing)
        self._hosts_wire, self._counted = wire, counted

    def head(self, flight: Flight, src: int) -> SectionHeader | None:
        """As `Flights.head`."""
        try:
            return super().head(flight, src)
        except TakenBack:
            flight.lost[src] = "cut"
            return None

    def laid(self, flight: Flight, rank: int) -> SectionHeader | None:
        """Wait until a rank of this host has laid out its sums; return its header, None when it is lost.

        Raises:
            MismatchError: as `head`.
        """
        wire, seq = self._hosts_wire, flight.seq
        if not wire.has_come(rank, seq, flight.patience, "laid"):
            self.lose(flight, rank)
            return None
        try:
            head, reason = wire.head_of(rank, seq, "laid")
        except TakenBack:
            flight.lost[rank] = "cut"
            return None
        self.agree(flight, rank, head, reason)
        return head

    def read_mask(self, flight: Flight) -> None:
        """As `Flights.read_mask`, at the beginning of a phase."""
        super().read_mask(flight)
        self._hosts_wire.note_waits()

    def _heads(self, flight: Flight) -> dict[int, SectionHeader]:
        heads = super()._heads(flight)
        self._judge(flight, heads)
        return heads

    def _follow(
        self, flight: Flight, heads: dict[int, SectionHeader], error: EpeeError | None
    ) -> dict[int, SectionHeader]:
        heads = super()._follow(flight, heads, error)
        self._judge(flight, heads)
        self.require_all(flight)
        return heads

    def _may_be_refused(self, flight: Flight) -> bool:
        """As `Flights._may_be_refused`; a failed call is seen here later than a rank's leaving it."""
        return bool(flight.words.withdrawn(flight.mark))

    def give_up(self, flight: Flight, error: BaseException) -> None:
        """As `Flights.give_up`; a call that lacks a rank is not refused, but aborted for all."""
        if not flight.is_alike or not isinstance(error, (CommTimeoutError, PeerError)):
            super().give_up(flight, error)
            return
        try:
            self.leave(flight, error)
        finally:
            self._free(flight)

    def _judge(self, flight: Flight, heads: dict[int, SectionHeader]) -> None:
        """Exclude ranks whose message is here and brings this rank nothing, if that is a loss."""
        me = 1 << self.wire.rank
        if flight.head.op == LATENCY_DISPATCH:
            for src, head in list(heads.items()):
                if not head.had & me:
                    _leave_out(flight, heads, src, "cut")
        elif flight.is_alike:
            counted = self._counted(flight, heads)
            for src, head in list(heads.items()):
                if head.had & me and not counted >> src & 1:
                    _leave_out(flight, heads, src, "silent")


def _leave_out(flight: Flight, heads: dict[int, SectionHeader], rank: int, why: str) -> None:
    heads.pop(rank, None)
    flight.lost.setdefault(rank, why)


def _nothing() -> None:
    """Do nothing: no board shows that a call waits."""
