"""The two engine calls of a dispatch or combine over hosts, and the effect of a view change between them.

A **step** is planned for its members: those of the engine call that has exchanged its rows, in their epoch
(`MemberRows`). All that follows from the rows (offsets, which rank serves which, what is lost) is a function of rows
and members, so it is the same on all ranks. Then its second call moves the data.

The rule: **a call of a step that finds other members, or another epoch, than the step is planned for exchanges the rows
once more**, instead of the data, and the step is planned anew. The members in whose outboxes an engine call ends are
the same on all ranks (`engine/membership/group_membership.py`), so they all do one or the other, under the same number.
Members are queried when the engine plans a call (`Make`), which it does again whenever it moves it.

    mode "mask"     a loss moves the call that it hits. Rows: they are exchanged by the remaining ranks. Data: as above.
    mode "raise"    a loss fails the call that it hits, on all ranks: the step raises once, and is over.

A rank that had put its whole part before it died has it in the call, which then stays in its epoch.

Data path, writers and readers: those of the engine's calls. A crash leaves what they leave. An exception on one rank
between the two calls is announced as the refusal of the second (`HostsPath._planned`), whichever it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NamedTuple

import numpy as np

from ...backend.collectives.copying import Spread
from ...engine.operation import Operation
from ...engine.outbox import PeerRegions
from ...engine.plan import Make, Plan, Sink
from ...engine.signature import OP_CODE
from ...engine.signature import pack as pack_signature
from ...engine.tensors import Array
from ..control.header import ExchangedRows

_BYTE = np.dtype(np.uint8)
_ROWS = "rows of a buffer's call"
MARK_BYTES = 8  # at the beginning of a row: what its writer knows, which is no part of the call


class CallPatience(NamedTuple):
    """The options of a call that the engine reads from torch."""

    timeout: timedelta

    @classmethod
    def until(cls, deadline: float) -> CallPatience:
        """Return it for a call that begins now; `deadline` is a `time.monotonic()` value."""
        return cls(timedelta(seconds=max(1e-3, deadline - time.monotonic())))


class RowsPlan(Spread):
    """The rows of all ranks for all. The repetition of a call that was broken off is one with the same row, its mark
    aside.
    """

    def __init__(self, row: bytes, found: Array, peer_regions: PeerRegions, name: str) -> None:
        self.row = row
        sinks = {place: Sink(found[rank]) for place, rank in enumerate(peer_regions.members)}
        signature = pack_signature(OP_CODE[_ROWS], count=len(row))
        super().__init__(name, signature, np.frombuffer(row, dtype=_BYTE), True, sinks, peer_regions)

    def is_like(self, other: Plan) -> bool:
        """As `Plan.is_like`."""
        return isinstance(other, RowsPlan) and other.row[MARK_BYTES:] == self.row[MARK_BYTES:]


class OwnRow:
    """This rank's row of a step, and the array for all rows.

    Attributes:
        data: its bytes.
        found: `[num_ranks, bytes]` uint8, zeros for rows that have not arrived.
    """

    def __init__(self, data: bytes, num_ranks: int) -> None:
        self.data = data
        self.found: Array = np.zeros((num_ranks, len(data)), dtype=_BYTE)

    def marks(self, members: Sequence[int]) -> list[int]:
        """Return the marks of the rows of these ranks."""
        return [int.from_bytes(self.found[rank, :MARK_BYTES].tobytes(), "little") for rank in members]

    def plan(self, peer_regions: PeerRegions, name: str = _ROWS) -> RowsPlan:
        """Plan their exchange; `name`: of the call, for messages."""
        return RowsPlan(self.data, self.found, peer_regions, name)


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


class Step:
    """A step between its first call and its last.

    Args:
        run: makes an engine call.
        read: reads and checks the rows of a call that has ended; raises what all ranks raise.
        row: of this rank.

    Attributes:
        met: the current input of its plan.
    """

    def __init__(
        self, run: Callable[[Make], Operation], read: Callable[[OwnRow, Operation], MemberRows], row: OwnRow
    ) -> None:
        self._run, self._read, self._row = run, read, row
        self.met = read(row, run(row.plan))

    def move(self, plan: Plan) -> bool:
        """Run a plan that was made by `met`; False: the members have changed, `met` is another, plan anew."""
        met, row = self.met, self._row
        op = self._run(lambda peer_regions: plan if met.serves(peer_regions) else row.plan(peer_regions))
        if op.plan is plan:
            return True
        self.met = self._read(row, op)
        return False
