"""How the ranks of a buffer over hosts meet in `sync`, and take in who has a lost rank's place.

The buffer's engine is a lane of its own (`birth.py`). A process that has come into the *group* is no part of it; it
finds the lane (`notices.py`), and asks to come in by an offer beside the lane's row, as for any group made with
`new_group` (`engine/bootstrap/joining.py`). In `sync` the members want it in; the decision that has it says with which
call it begins, the same for all.

    a round     One exchange of rows. Each rank says whom it knows to be there or coming: who is in the lane in the
                newest view, who asks to come in, and whose place in the group has a process (which makes the buffer, or
                is about to). Then all know who of these was not in this very call.
    nobody      The meeting is over; who was in the call is who takes part.
    somebody    Each rank that has heard of an asker wants it in, and waits for the view, for a slice of its time; then
                comes the next round.

Whether there is a next round follows from the rows and the members of the round's call alone, and these are the same on
all ranks, so all make the same number of rounds. A newcomer's first call is a round, as nobody else leaves the meeting
while somebody knows of it: who is in a view that anybody has heard of is in the rows. When one rank's time is over it
says so, and the meeting ends for all without those that have not asked yet.

Placement: from the newcomer's first call on hosts, gateways and sums are those of the ranks that the view has
(`Outboxes.host_of`, `placed_in`). `CallPlacement` makes of that what a step is planned with, hosts numbered by their
lowest rank, so it is the same on all ranks, whatever numbers the engines use.

What a crash leaves. Of who asks: its offer, which goes with its membership, so nobody waits for it any more. Of who is
in the view: a lost rank as any other; the next one for its place begins with an offer. Of a member that wants: others
want as well, for the union of what all have said is the same on all.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable

from ...engine.engine import Engine
from ...engine.outbox import Outboxes
from ...link.topology import Topology
from ...view.group import GroupInView
from ..control.messages import ControlPlaneOver
from .exchange import HostsExchange
from .notices import present_ranks

SLICE_S = 0.2  # of the time of a meeting, until the ranks tell each other whom they still know of
PAUSE_S = 1e-3  # after a round that an error has ended
_ROW = struct.Struct("<QQQ")  # ranks in the lane or asking, a bit for each; ranks of the group; how late it is
_OVER, _GIVEN_UP = 1, 2  # past the deadline: who does not ask is not waited for; as long again: nobody is


class CallPlacement:
    """Who is where, by the outboxes with which a call has run.

    Args:
        topology: at birth, or when this process came in.
        num_ranks: of the buffer.
    """

    def __init__(self, topology: Topology, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._known: tuple[int, Topology] = -1, topology

    def of(self, box: Outboxes) -> Topology:
        """Return the placement of a call."""
        if not box.host_of:
            return self._known[1]
        if self._known[0] != box.placed_in:
            self._known = box.placed_in, placement_of(box, self._num_ranks)
        return self._known[1]


def placement_of(box: Outboxes, num_ranks: int) -> Topology:
    """Return where the ranks are; hosts are numbered by their lowest rank."""
    host_of = [box.host_of[rank] if rank < len(box.host_of) else -1 for rank in range(num_ranks)]
    return Topology(box.members[box.rank], [str(host) if host >= 0 else "" for host in host_of])


class Assembly:
    """The meetings of one rank.

    Args:
        control: of the buffer.
        engine: of the buffer.
        seat: of its group in the view; None where nobody can take a lost rank's place.
    """

    def __init__(self, control: ControlPlaneOver[HostsExchange], engine: Engine, seat: GroupInView | None) -> None:
        self._control, self._exchange = control, control.exchange
        self._engine = engine
        self._seat = seat if seat is not None and seat.is_open else None

    def meet(self, data: bytes, deadline: float, is_loss: Callable[[Exception], bool]) -> list[bytes]:
        """Meet, and take in who comes; return everybody's `data`, in rank order.

        Args:
            data: equally long on all ranks.
            deadline: until when to wait for who is expected and has not come, a `time.monotonic()` value. Each call is
                given as much time as there is until then.
            is_loss: whether an error of a round, which all ranks get, is no reason to end.

        Raises:
            As `Buffer.barrier`.
        """
        patience = max(1e-3, deadline - time.monotonic())
        while True:
            there, awaited = self._expected()
            now = time.monotonic()
            row = _ROW.pack(there, awaited, (now > deadline) + (now > deadline + patience))
            try:
                told = self._control.all_gather_bytes(row + data, time.monotonic() + patience)
            except Exception as error:
                if not is_loss(error) or time.monotonic() > deadline + patience:
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
        """Return which ranks somebody knows of that were not in the last call."""
        ranks = range(self._control.config.num_ranks)
        return {rank for rank in ranks if any(word >> rank & 1 for word in bits)}.difference(self._exchange.members)

    def _expected(self) -> tuple[int, int]:
        """Return who is in the lane or asks to come in, and who has a place in the group, a bit for each rank."""
        survival, seat = self._engine.survival, self._seat
        if seat is None or survival is None:
            return 0, 0
        there, left = survival.admission.expected()
        ready = [rank for rank in there if rank < self._control.config.num_ranks]
        awaited = set(present_ranks(seat, seat.runtime.view())) - left
        return sum(1 << rank for rank in ready), sum(1 << rank for rank in awaited)

    def _take_in(self, ranks: set[int], deadline: float) -> None:
        survival = self._engine.survival
        assert survival is not None, "nobody is missing where there is no view"
        survival.admission.take_in(ranks, min(time.monotonic() + SLICE_S, max(deadline, time.monotonic() + 1e-3)))
