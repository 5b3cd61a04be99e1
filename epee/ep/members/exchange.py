"""The exchange of rows over several hosts: one collective call of the buffer's engine.

A call of the buffer begins as on one host (`direct.py`): every rank sends what it is about to do and how many
rows go where, and all ranks reach the same result from the same rows. The engine carries the rows to every host once;
it makes sure that a call which one rank aborts ends in the same way on all, so nothing needs to be aborted here. What a
call moves beside its rows is further calls of the same engine (`throughput/hosts/`), in the same order on all
ranks.

The engine determines the members, call by call; `rows.py` defines what that means for the rows.

A **step** is planned for its members: those of the engine call that has exchanged its rows, in their epoch
(`MemberRows`). All that follows from the rows (offsets, which rank serves which, what is lost) is a function of rows
and members, so it is the same on all ranks. Then its second call moves the data.

The rule: **a call of a step that finds other members, or another epoch, than the step is planned for exchanges the rows
once more**, instead of the data, and the step is planned anew. The members in whose outboxes an engine call ends are
the same on all ranks (`engine/membership/group_membership.py`), so they all do one or the other, under the same number.
Members are queried when the engine plans a call (`Make`), which it does again whenever it moves it.

    mode "mask"     a loss moves the call that it hits. Rows: they are exchanged by the remaining ranks. Data: as above.
    mode "raise"    a loss fails the call that it hits, on all ranks: the step raises once, and is over.

A rank that had put its whole part before it died has it in the call, which then stays in its epoch. An exception on one
rank between the two calls is announced as the refusal of the second (`HostsPath._planned`), whichever it is.

A crash leaves rows that some ranks have and others have not. Those that have them wait in the next call of the engine,
which continues without the lost rank, or ends with its name; no rank has a result.
"""

from __future__ import annotations

from collections.abc import Callable

from ...engine import Engine
from ...engine.operation import Operation
from ...engine.outbox import PeerRegions
from ...engine.plan import Make, Plan
from ...errors import AbortedError, expected
from ..config import BufferConfig
from ..throughput.placement import Ints
from .header import OPS_OF_CPUS, ExchangedRows, Header, Moved
from .membership import Membership
from .rows import CallTimeouts, OwnRow, RowExchange


class Step:
    """A step between its first call and its last.

    Args:
        exchange: of the buffer.
        row: of this rank.
        timeouts: of each of its calls: a rank that has finished one waits anew in the next.

    Attributes:
        met: the current input of its plan.
    """

    def __init__(self, exchange: HostsExchange, row: OwnRow, timeouts: CallTimeouts) -> None:
        self._exchange, self._row, self._timeouts = exchange, row, timeouts
        self.met = exchange._read(row, exchange.run(row.plan, timeouts))

    def move(self, plan: Plan) -> bool:
        """Run a plan that was made by `met`; False: the members have changed, `met` is another, plan anew."""
        met, row = self.met, self._row
        exchange = self._exchange
        op = exchange.run(lambda now: plan if met.serves(now) else row.plan(now), self._timeouts)
        if op.plan is plan:
            return True
        self.met = exchange._read(row, op)
        return False


class HostsExchange(RowExchange):
    """Row exchange over several hosts.

    Args:
        config, rank, interrupt: as of `RowExchange`.

    Attributes:
        peer_regions: the outboxes with which the last call ran.
        epoch: handles of another one are stale. Of the view in the last call, so the same on all ranks between the same
            two calls; in a `LatencyBuffer` it is set by `sync`.
        members: ranks with a part in the last call.
        reduced_members: None: routing is planned for all ranks, lost ones do not count.
    """

    peer_regions: PeerRegions
    reduced_members: tuple[int, ...] | None = None

    def __init__(self, config: BufferConfig, rank: int, interrupt: Callable[[], None]) -> None:
        super().__init__(config, rank, interrupt)
        self.membership = Membership()

    def use(self, engine: Engine) -> None:
        """Run the next call with an engine: the first one, or that with which this rank has returned."""
        self.engine, self.has_engine = engine, True
        self.peer_regions = engine.members
        if not self.config.is_synced:
            self.epoch = engine.members.epoch

    @property
    def members(self) -> tuple[int, ...]:
        """Ranks of the last call, ascending."""
        return self.peer_regions.members

    @property
    def seq(self) -> int:
        """Number of the last call; equal on all ranks in the same call. 0 while this rank joins."""
        return self.engine.seq if self.has_engine else 0

    def call(self, header: Header, counts: Ints | None, text: bytes, deadline: float) -> ExchangedRows:
        """Send this rank's row and return the rows of all ranks, checked and agreed on; as
        `DirectExchange.call`.

        Raises:
            MismatchError: the ranks disagree, or one has refused its call; the same on all.
            CommTimeoutError, RankFailedError: a rank did not take part.
            ProtocolError: a row cannot be right.
        """
        last = self.peer_regions
        row, timeouts = self._row(header, counts, text), CallTimeouts.until(deadline)
        met = self._read(row, self.run(row.plan, timeouts))
        if header.op in OPS_OF_CPUS and header.expert_alignment > 1 and met.members != last.members:
            raise Moved  # a later piece of a gather has other members than the piece before
        return met.rows

    def step(self, header: Header, counts: Ints | None, deadline: float) -> Step:
        """Send this rank's row and return a step with the rows of all ranks, which moves the data; raises as `call`."""
        return Step(self, self._row(header, counts, b""), CallTimeouts.until(deadline))

    def publish(self, header: Header, counts: Ints | None, text: bytes, deadline: float) -> None:
        """Send this rank's row, as one that refuses the call, and wait for no rank."""
        self.engine.start(self._row(header, counts, text).plan, CallTimeouts.until(deadline))

    def run(self, make: Make, timeouts: CallTimeouts) -> Operation:
        """Run a call of the engine to its end."""
        self._interrupt()
        try:
            op = self.engine.run(make, timeouts)
        except expected(AbortedError):
            self._interrupt()  # the engine knows only that it was closed
            raise
        self.peer_regions = op.peer_regions
        if not self.config.is_synced:
            self.epoch = op.peer_regions.epoch
        return op
