"""The common part of the memberships of one host whose epochs begin with `sync` alone: `LatencyBuffer`, GPU buffers.

The calls that move rows are no calls of the engine: a rank that sends nothing is lost in that call, and the engine
knows of no call that it could end. The engine serves what the ranks do together beside that: construction, `sync`
(`member_sync.py`), and the bytes between their CPUs (`MemberExchange`), which need all members of the epoch.

A rank that is dead, has closed the buffer, was excluded, or has joined after the epoch began is lost in all calls of
the epoch. So are all others for a rank that was excluded, and for one that an error has kept from entering the epoch
that its `sync` has agreed on: its next call enters it (`turn`).

`latency/one_host/members.py` and `gpu_members.py` define what the ranks lend to an epoch, and how they enter it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from ...engine.operation import Operation
from ...engine.outbox import STATE_WORDS, has_exited, has_left
from ...engine.plan import Make
from ...errors import PeerError, RankFailedError, context, expected
from ...view.awaited import kind_of_loss
from ...view.group import GroupInView
from ...view.protocol.messages import PUT_OUT
from ..epoch_memory import Memory
from ..throughput.placement import Ints
from .exchange import HostsExchange
from .header import OP_NAMES, ExchangedRows, Header, Moved
from .member_sync import MembersOfEngine, SyncExchange
from .rows import CallTimeouts, OwnRow


class MemberExchange(HostsExchange, SyncExchange):
    """Row exchange through an engine, for calls that need all members of the buffer's epoch. As `HostsExchange`."""

    membership: EpochMembersOfEngine
    _is_running = False  # a call of the engine

    def call(self, header: Header, counts: Ints | None, text: bytes, deadline: float) -> ExchangedRows:
        """As `HostsExchange.call`.

        Raises:
            RankFailedError, PeerError: a member of the epoch is lost; the same on all.
            EvictedError: this rank was excluded.
            InvalidState: an earlier call has ended otherwise here than on the other ranks.
        """
        members = self.membership
        if not members.is_calm():
            members.require_place(is_masked=False)
        self.require_results(deadline)
        try:
            rows = super().call(header, counts, text, deadline)
        except expected(Moved):
            self.close_call()  # on all ranks
            raise
        missing = sorted(members.lost({*rows.parties}))
        if missing:
            self.close_call()  # as above
            raise members.loss(missing[0], OP_NAMES[header.op], self.seq)
        return rows

    def run(self, make: Make, timeouts: CallTimeouts) -> Operation:
        """As `HostsExchange.run`."""
        self._is_running = True  # before the check whether the buffer is to be closed
        try:
            return super().run(make, timeouts)
        finally:
            self._is_running = False

    def abort(self) -> None:
        """End a call of the engine in progress in another thread, when the buffer is to be closed."""
        if self._is_running:
            self.engine.close()

    def _row(self, header: Header, counts: Ints | None, text: bytes, name: str = "", mark: int = 0) -> OwnRow:
        return super()._row(header, counts, text, name or OP_NAMES[header.op], mark)

    def release(self) -> None:
        """As `HostsExchange.release`; a replacement that has not entered an epoch may try again."""
        if not self.epoch and self.has_engine:
            self.membership.returns()
        super().release()


class EpochMembersOfEngine(MembersOfEngine):
    """The membership of a buffer of one host whose epochs begin with `sync` alone.

    Args:
        exchange: over the engine.
        mode: of the engine.
        job_handle: job handle of the group; of one in no view `NO_VIEW`.
        timeout_s: of the buffer's calls.
        interrupt: called while waiting; raises to end the wait.

    Attributes:
        memory: of the path, once the path is made.
        entered: the members of the epoch that this rank is in, and since when they take part.
    """

    raises = False
    memory: Memory
    _exchange: MemberExchange

    def __init__(
        self,
        exchange: MemberExchange,
        mode: str,
        job_handle: GroupInView,
        timeout_s: float,
        interrupt: Callable[[], None],
    ) -> None:
        super().__init__(exchange, mode, job_handle, timeout_s, interrupt)
        self.memory = Memory()
        self.entered: dict[int, int] = {}

    @property
    def is_in(self) -> bool:
        """Whether this rank has entered an epoch; a replacement has not before its first `sync`."""
        return self._exchange.epoch > 0

    def join(self, deadline: float) -> None:
        """Enter, as a replacement that the members of the engine have admitted in their `sync`; raises as `sync`."""
        self.sync((1 << self._config.num_ranks) - 1, 0, deadline)
        self.note_agreed()
        self._exchange.announce()

    def is_calm(self) -> bool:
        """Return whether this rank surely is a member still, and so are the others."""
        return False

    def dead(self) -> Collection[int]:
        """Return the ranks whose processes have ended."""
        return self._engine.watch.dead()

    def lost(self, parties: Collection[int]) -> Collection[int]:
        """Return the members of the epoch that are lost for a call of the engine which these ranks have completed."""
        return self.entered.keys() - parties

    def _has_lent(self, rank: int) -> bool:
        """Return whether the memory of a rank is used in this epoch."""
        raise NotImplementedError

    def _has_left(self, rank: int, since: Mapping[int, int]) -> bool:
        if not self._has_lent(rank) or since.get(rank) != self.entered.get(rank):
            return True
        return self._sync.has_left(rank)

    def why_gone(self, rank: int) -> tuple[type[PeerError], str]:
        """Return why a rank is lost: the type of the error to raise, and the reason as text."""
        engine = self._engine
        if engine.peer_regions.regions and rank in self.entered:
            with engine.peer_regions.regions[rank].words(0, STATE_WORDS) as words:
                if has_exited(words):
                    return RankFailedError, "its process has ended, or it has dropped the buffer without closing it"
                is_closed = has_left(words)
            cause = engine.membership.admission.cause_of_loss(rank, self.entered[rank])
            if cause != PUT_OUT and (cause or is_closed):
                return kind_of_loss([cause]) if cause else (PeerError, "it has closed the buffer")
        return PeerError, "it is not in this epoch of the buffer; whoever lives comes back by buffer.sync()"

    def loss(self, rank: int, op: str, seq: int) -> PeerError:
        """Return the error of a call that needs a lost rank."""
        epoch = self._exchange.epoch
        kind, why = self.why_gone(rank)
        where = context(op, rank=self._rank, peer=rank, seq=seq, epoch=epoch)
        what = f"{where}: rank {rank}: {why}; call buffer.sync(), then calls run without it"
        return kind(what, [rank], op, seq, epoch, why)

    def _excluded_when(self) -> tuple[str, int]:
        return "after", self._exchange.epoch
