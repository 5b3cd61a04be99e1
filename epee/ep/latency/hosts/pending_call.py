"""The steps of a call over several hosts: as `latency/pending_call.py`, and the ranks contained in a host's sums.

Ranks lost beside those whose message does not arrive: in a dispatch a rank whose records are not for this one. In a
combine the message of a rank that had this one's tokens may have arrived, and be in no sum: with a mask `got` and
`lost_weight` report that; without one it is a loss. A message that was overwritten while it was read has not arrived.

The error of a call without a mask does not name the ranks that a lost gateway cuts off.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from ....errors import EpeeError, PeerError
from ..call import PendingCall
from ..pending_call import PendingCalls
from ..wire import LATENCY_DISPATCH, SectionHeader
from .wire import HostsWire, TakenBack


class HostsPendingCalls(PendingCalls):
    """Takes calls through their steps.

    Args:
        wire: of the buffer.
        epoch, dead, why_gone: as of `PendingCalls`.
        counted: returns, by the headers of the arrived messages, the ranks whose rows are in the sums that this rank
            has got in a combine, a bit per rank.
        cut_off_by: returns the lost ranks that cut a living rank of another host off; none where it is lost itself.
    """

    def __init__(
        self,
        wire: HostsWire,
        epoch: Callable[[], int],
        dead: Callable[[], Collection[int]],
        why_gone: Callable[[int], tuple[type[PeerError], str]],
        counted: Callable[[PendingCall, Mapping[int, SectionHeader]], int],
        cut_off_by: Callable[[int], Collection[int]],
    ) -> None:
        super().__init__(wire, epoch, dead, why_gone, _nothing)
        self._hosts_wire, self._counted, self._cut_off_by = wire, counted, cut_off_by

    def lose(self, pending_call: PendingCall, peer: int) -> None:
        """As `PendingCalls.lose`; a rank that is cut off is not named beside those by whose loss it is."""
        super().lose(pending_call, peer)
        if pending_call.is_alike and pending_call.lost[peer] == "gone":
            for rank in self._cut_off_by(peer):
                pending_call.lost[peer] = "cut"
                super().lose(pending_call, rank)

    def head(self, pending_call: PendingCall, src: int) -> SectionHeader | None:
        """As `PendingCalls.head`."""
        try:
            return super().head(pending_call, src)
        except TakenBack:
            pending_call.lost[src] = "cut"
            return None

    def laid(self, pending_call: PendingCall, rank: int) -> SectionHeader | None:
        """Wait until a rank of this host has laid out its sums; return its header, None when it is lost.

        Raises:
            MismatchError: as `head`.
        """
        wire, seq = self._hosts_wire, pending_call.seq
        if not wire.has_come(rank, seq, pending_call.timeouts, "laid"):
            self.lose(pending_call, rank)
            return None
        try:
            head, reason = wire.head_of(rank, seq, "laid")
        except TakenBack:
            pending_call.lost[rank] = "cut"
            return None
        self.agree(pending_call, rank, head, reason)
        return head

    def read_mask(self, pending_call: PendingCall) -> None:
        """As `PendingCalls.read_mask`, at the beginning of a phase."""
        super().read_mask(pending_call)
        self._hosts_wire.note_waits()

    def _heads(self, pending_call: PendingCall) -> dict[int, SectionHeader]:
        heads = super()._heads(pending_call)
        self._judge(pending_call, heads)
        return heads

    def _follow(
        self, pending_call: PendingCall, heads: dict[int, SectionHeader], error: EpeeError | None
    ) -> dict[int, SectionHeader]:
        heads = super()._follow(pending_call, heads, error)
        self._judge(pending_call, heads)
        self.require_all(pending_call)
        return heads

    def _may_be_refused(self, pending_call: PendingCall) -> bool:
        """As `PendingCalls._may_be_refused`; a failed call is seen here later than a rank's leaving it."""
        return bool(pending_call.words.aborted_by(pending_call.mark))

    def _judge(self, pending_call: PendingCall, heads: dict[int, SectionHeader]) -> None:
        """Exclude ranks whose message is here and brings this rank nothing, if that is a loss."""
        me = 1 << self.wire.rank
        if pending_call.head.op == LATENCY_DISPATCH:
            for src, head in list(heads.items()):
                if not head.had & me:
                    _leave_out(pending_call, heads, src, "cut")
        elif pending_call.is_alike:
            counted = self._counted(pending_call, heads)
            for src, head in list(heads.items()):
                if head.had & me and not counted >> src & 1:
                    _leave_out(pending_call, heads, src, "silent")


def _leave_out(pending_call: PendingCall, heads: dict[int, SectionHeader], rank: int, why: str) -> None:
    heads.pop(rank, None)
    pending_call.lost.setdefault(rank, why)


def _nothing() -> None:
    """Do nothing: no board shows that a call waits."""
