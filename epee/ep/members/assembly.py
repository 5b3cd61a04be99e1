"""The meeting of the ranks of a buffer over hosts in `sync`, and the admission of processes that replace lost ranks.

The buffer's engine is a group of its own (`birth.py`). A process that has joined the *process group* is no member of
it; it finds the engine's group (`notices.py`), and requests admission by an offer beside the group's row, as for any
group made with `new_group` (`engine/bootstrap/joining.py`). In `sync` the members admit it; the decision that includes
it names the call with which it begins, the same for all.

    a round         One exchange of rows. Each rank lists the ranks it knows to be present or joining: those in the
                    group in the newest view, those that request admission, and those whose rank in the process group
                    has a process (which makes the buffer, or is about to). Then all ranks know which of these were not
                    in this very call.
    none missing    The meeting is over; the ranks in the call are the members.
    some missing    Each rank that has received a request admits its sender, and waits for the view, for a slice of its
                    timeout; then follows the next round.

Whether there is a next round follows from the rows and the members of the round's call alone, and these are the same on
all ranks, so all make the same number of rounds. A joiner's first call is a round, because no rank leaves the meeting
while one of them knows of the joiner: the members of every view that a rank has received are in the rows. A rank whose
timeout has expired reports that, and the meeting ends for all without the ranks that have not requested admission yet.

Placement: from the joiner's first call on hosts, gateways and sums are those of the ranks that the view has
(`PeerRegions.host_of`, `placed_in`). `CallPlacement` computes from that the topology with which a step is planned, with
hosts numbered by their lowest rank, so it is the same on all ranks, whatever numbers the engines use.

After a crash: of a rank that requests admission, its offer disappears with its membership, so no rank waits for it any
more; a member of the view is lost as any other rank, and the next process for its rank begins with an offer; if an
admitting member dies, others admit as well, because the union of all rows is the same on all.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable

from ...engine.outbox import PeerRegions
from ...link.topology import Topology
from ...view.group import GroupInView
from .exchange import HostsExchange
from .header import OP_SYNC
from .notices import present_ranks

SLICE_S = 0.2  # of the timeout of a meeting, until the ranks exchange again which ranks they still know of
PAUSE_S = 1e-3  # after a round that an error has ended
# ranks in the group or requesting admission, a bit for each; ranks of the process group; how late it is
_ROW = struct.Struct("<QQQ")
_OVER, _GIVEN_UP = 1, 2  # past the deadline: ranks without a request are not awaited; twice the timeout: no rank is


class CallPlacement:
    """The placement of the ranks on hosts, by the outboxes with which a call has run.

    Args:
        topology: at creation, or when this process joined.
        num_ranks: of the buffer.
    """

    def __init__(self, topology: Topology, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._known: tuple[int, Topology] = -1, topology

    def of(self, peer_regions: PeerRegions) -> Topology:
        """Return the placement of a call."""
        if not peer_regions.host_of:
            return self._known[1]
        if self._known[0] != peer_regions.placed_in:
            self._known = peer_regions.placed_in, placement_of(peer_regions, self._num_ranks)
        return self._known[1]


def placement_of(peer_regions: PeerRegions, num_ranks: int) -> Topology:
    """Return the placement of the ranks; hosts are numbered by their lowest rank."""
    host_of = [peer_regions.host_of[rank] if rank < len(peer_regions.host_of) else -1 for rank in range(num_ranks)]
    return Topology(peer_regions.members[peer_regions.rank], [str(host) if host >= 0 else "" for host in host_of])


class Assembly:
    """The meetings of one rank.

    Args:
        exchange: of the buffer's rows; has its engine.
        job_handle: job handle of its group.
    """

    def __init__(self, exchange: HostsExchange, job_handle: GroupInView) -> None:
        self._exchange, self._engine = exchange, exchange.engine
        self._job_handle = job_handle

    def meet(self, data: bytes, deadline: float, is_loss: Callable[[Exception], bool]) -> list[bytes]:
        """Meet, and admit joiners; return the `data` of all ranks, in rank order.

        Args:
            data: equally long on all ranks.
            deadline: until when to wait for expected ranks that have not arrived, a `time.monotonic()` value. Each call
                is given as much time as there is until then.
            is_loss: whether an error of a round, which all ranks get, is no reason to end.

        Raises:
            As `Buffer.barrier`.
        """
        timeout_s = max(1e-3, deadline - time.monotonic())
        while True:
            there, awaited = self._expected()
            now = time.monotonic()
            row = _ROW.pack(there, awaited, (now > deadline) + (now > deadline + timeout_s))
            try:
                told = self._exchange.all_gather_bytes(row + data, time.monotonic() + timeout_s, OP_SYNC)
            except Exception as error:
                if not is_loss(error) or time.monotonic() > deadline + timeout_s:
                    raise
                time.sleep(PAUSE_S)
                continue
            members = self._exchange.members
            rows = [_ROW.unpack_from(told[rank]) for rank in members]
            late = max(row[2] for row in rows)
            missing = self._missing([row[0] for row in rows]) if late < _GIVEN_UP else set()
            if late < _OVER:
                missing |= self._missing([row[1] for row in rows])
            if not missing:
                return [part[_ROW.size :] for part in told]
            self._take_in(missing, deadline)

    def _missing(self, bits: list[int]) -> set[int]:
        """Return the ranks that some rank knows of and that were not in the last call."""
        ranks = range(self._exchange.config.num_ranks)
        return {rank for rank in ranks if any(word >> rank & 1 for word in bits)}.difference(self._exchange.members)

    def _expected(self) -> tuple[int, int]:
        """Return the ranks in the engine's group or requesting admission, and those in the process group, as bit
        masks.
        """
        membership, job_handle = self._engine.membership, self._job_handle
        if not job_handle.is_open:
            return 0, 0
        there, left = membership.admission.expected()
        ready = [rank for rank in there if rank < self._exchange.config.num_ranks]
        awaited = set(present_ranks(job_handle, job_handle.runtime.view())) - left
        return sum(1 << rank for rank in ready), sum(1 << rank for rank in awaited)

    def _take_in(self, ranks: set[int], deadline: float) -> None:
        membership = self._engine.membership
        membership.admission.take_in(ranks, min(time.monotonic() + SLICE_S, max(deadline, time.monotonic() + 1e-3)))
