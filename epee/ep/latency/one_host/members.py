"""The membership of a `LatencyBuffer` on CPUs of one host.

The calls are those of `path.py`: words and rows in the memory of an epoch, one region per rank, without a call of the
engine. So a rank that sends nothing is lost in that call, by the receiver's own mask, and the engine knows of no call
that it could end. The engine serves what the ranks do together beside that:

    construction   The ranks make the engine, exchange the regions of the first epoch, and report whether all could map
                   them: two calls of the engine.
    sync           They agree on the members (`hosts/member_sync.py`). The call with which that ends carries the number
                   of each rank's epoch, and the blob of the region that it lends to the next one, which is numbered
                   above all of them. Who completes the call knows the epoch; it maps the others' regions and enters.
    bytes          `all_gather_bytes` and `barrier` are calls of the engine, which need all members of the epoch
                   (`MemberExchange`).

A rank that is dead, has closed the buffer, was excluded, or has joined after the epoch began is lost in all calls of
the epoch (`gone`). So are all others for a rank that was excluded, and for one that an error has kept from entering the
epoch that its `sync` has agreed on: its next call enters it (`turn`).

Memory: a region is made for one epoch, written by all of its members, and unmapped when its owner enters the next one.
So what a stale writer stores reaches memory that no rank reads. A rank whose region cannot be mapped, because its
process has ended since, is lost in the epoch.

A crash before the call of a `sync` leaves a region that no other rank knows; after it, a rank that is lost.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

import torch.distributed as dist

from ....engine.outbox import STATE_WORDS, has_exited, has_left
from ....errors import (
    EpeeError,
    PeerError,
    ProtocolError,
    RankFailedError,
    ResourceError,
    context,
    expected,
)
from ....memory.claim import OwnerEndedError
from ....memory.shared import BLOB_BYTES, SharedRegion
from ....view.awaited import kind_of_loss
from ....view.group import GroupInView
from ....view.protocol.messages import PUT_OUT
from ...control.header import OP_NAMES, REASON_BYTES, ExchangedRows, Header
from ...control.membership import Agreed
from ...hosts.birth import announcement, come_into
from ...hosts.exchange import HostsExchange
from ...hosts.member_sync import MembersOfEngine, SyncExchange, SyncRow
from ...hosts.notices import BufferNotice
from ...making import death_in_birth
from ...membership.memory import Memory
from ...throughput.placement import Ints
from ..region import region_layout

logger = logging.getLogger("epee")

_ROW = struct.Struct("<QQ")  # `SyncRow`
_DATA = struct.Struct(f"<Q{BLOB_BYTES}s")  # epoch, region


class MemberExchange(HostsExchange, SyncExchange):
    """Row exchange through an engine, for calls that need all members of the buffer's epoch. As `HostsExchange`."""

    membership: EpochMembers

    def call(self, header: Header, counts: Ints | None, text: bytes, deadline: float) -> ExchangedRows:
        """As `HostsExchange.call`.

        Raises:
            RankFailedError, PeerError: a member of the epoch is lost; the same on all.
            EvictedError: this rank was excluded.
        """
        members = self.membership
        members.require_place(is_masked=False)
        rows = super().call(header, counts, text, deadline)
        missing = sorted({*members.entered}.difference(rows.parties))
        if missing:
            raise members.loss(missing[0], OP_NAMES[header.op], self.seq)
        return rows

    def release(self) -> None:
        """As `HostsExchange.release`; a replacement that has not entered an epoch may try again."""
        if not self.epoch and self.has_engine:
            self.membership.returns()
        super().release()


class NextEpoch(NamedTuple):
    """An epoch that a `sync` has agreed on.

    Attributes:
        agreed: its number and members.
        blobs: of the regions that they lend, by rank.
        since: since when each of them takes part.
    """

    agreed: Agreed
    blobs: Mapping[int, bytes]
    since: Mapping[int, int]


class EpochMembers(MembersOfEngine):
    """The membership of a `LatencyBuffer` on CPUs.

    Args:
        exchange: over the engine.
        mode: of the engine.
        job_handle: job handle of the group; of one in no view `NO_VIEW`.
        timeout_s: of the buffer's calls.
        interrupt: called while waiting; raises to end the wait.

    Attributes:
        regions: the regions of the epoch by rank, this one's included; without those of lost ranks.
        memory: of the path, once the path is made.
        entered: the members of the epoch that this rank is in, and since when they take part.
    """

    raises = False
    _exchange: MemberExchange
    _next: NextEpoch | None

    def __init__(
        self,
        exchange: MemberExchange,
        mode: str,
        job_handle: GroupInView,
        timeout_s: float,
        interrupt: Callable[[], None],
    ) -> None:
        super().__init__(exchange, mode, job_handle, timeout_s, interrupt)
        self._nbytes = region_layout(exchange.config).nbytes  # of the region that a rank lends to an epoch
        self.regions: dict[int, SharedRegion] = {}
        self.memory = Memory()
        self.entered: dict[int, int] = {}
        self._own: SharedRegion | None = None  # for the next epoch

    @property
    def inbox_bytes(self) -> int:  # type: ignore[override]
        """Bytes of the memory that this rank lends."""
        own = self.regions.get(self._rank)
        return 0 if own is None else own.mapped_bytes

    # ---- the first epoch

    def begin_first(self, deadline: float) -> None:
        """As `MembersOfEngine.begin_first`; enters the first epoch.

        Raises:
            RankFailedError: a rank has died meanwhile.
            ResourceError: a rank could not make its part.
            CommTimeoutError: a rank is silent.
        """
        problem = ""
        try:
            self._own = self._new_region()
        except expected(EpeeError) as error:
            problem = f"{type(error).__name__}: {error}"
        blob = bytes(BLOB_BYTES) if self._own is None else self._own.blob
        _, found = self._sync.gather(SyncRow(0, 0), _DATA.pack(0, blob), deadline)
        self._require_makers(found)
        self._sync.begin(found)
        self._note(found)
        try:
            if not problem:
                self._enter()
        except expected(EpeeError) as error:
            problem = f"{type(error).__name__}: {error}"
        width = REASON_BYTES - _ROW.size
        _, texts = self._sync.gather(SyncRow(0, 0), problem.encode()[:width].ljust(width, b"\0"), deadline)
        self._require_makers(texts)
        for rank, text in sorted(texts.items()):
            if text.strip(b"\0"):
                reason = text.rstrip(b"\0").decode("utf-8", "replace")
                raise ResourceError(f"LatencyBuffer: rank {rank} could not make its part: {reason}")
        self._returned = self._exchange.epoch
        self._exchange.announce()

    def _require_makers(self, found: Collection[int]) -> None:
        missing = sorted(set(range(self._config.num_ranks)).difference(found))
        if missing:
            raise death_in_birth(missing)

    def join_running(self, group: dist.ProcessGroup, running: BufferNotice) -> None:
        """Have the members admit this process to the engine; `join` enters the buffer. Raises as `come_into`."""
        engine = come_into(self._job_handle, self._rank, self._config, running, self._timeout_s)
        self.begin_with(engine)
        self._exchange.tell = announcement(group, engine, self._config, running)
        self.number = running.number

    @property
    def is_in(self) -> bool:
        """Whether this rank has entered an epoch; a replacement has not before its first `sync`."""
        return self._exchange.epoch > 0

    def join(self, deadline: float) -> None:
        """Enter, as a replacement that the members of the engine have admitted in their `sync`; raises as `sync`."""
        self.note_agreed(self.sync((1 << self._config.num_ranks) - 1, 0, deadline))
        self._exchange.announce()

    # ---- in a call

    def dead(self) -> Collection[int]:
        """Return the ranks whose processes have ended."""
        return self._engine.watch.dead()

    def gone(self) -> Collection[int]:
        """Return the ranks that this epoch of the buffer has lost, or never had: nothing more of theirs will arrive."""
        others = [rank for rank in range(self._config.num_ranks) if rank != self._rank]
        if self._has_missed or self._is_excluded() or not self._engine.peer_regions.regions:
            return others
        dead, since = self.dead(), self._engine.membership.admission.since()
        return [rank for rank in others if rank in dead or self._has_left(rank, since)]

    def _has_left(self, rank: int, since: Mapping[int, int]) -> bool:
        if rank not in self.regions or since.get(rank) != self.entered.get(rank):
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

    # ---- epochs

    def _data(self) -> bytes:
        if self._own is None or self._own is self.regions.get(self._rank):
            self._own = self._new_region()
        return _DATA.pack(self._exchange.epoch, self._own.blob)

    def _note(self, found: Mapping[int, bytes]) -> None:
        """Record what the ranks have agreed on; from here on the epoch is to be entered."""
        rows = {rank: _DATA.unpack_from(data) for rank, data in found.items()}
        epoch = 1 + max(number for number, _ in rows.values())
        since = self._engine.membership.admission.since()
        blobs = {rank: blob for rank, (_, blob) in rows.items()}
        self._next = NextEpoch(Agreed(epoch, tuple(sorted(rows))), blobs, {rank: since.get(rank, 0) for rank in rows})

    def _new_region(self) -> SharedRegion:
        return SharedRegion.create(self._nbytes, f"latency-{self._rank}")

    def _enter(self) -> Agreed:
        """Map what the others lend for the epoch agreed on, and make it that of the calls. May be repeated.

        Raises:
            ResourceError: no memory or descriptor is left here, or another rank's memory cannot be mapped.
        """
        following, own = self._next, self._own
        assert following is not None
        assert own is not None
        regions = {self._rank: own}
        try:
            for rank, blob in following.blobs.items():
                region = None if rank == self._rank else self._attach(rank, blob)
                if region is not None:
                    regions[rank] = region
            self.memory.move(regions)
        except BaseException:
            self._close(regions, {self._rank: own})
            raise
        old, self.regions = self.regions, regions
        self.entered = dict(following.since)
        self._last = following.agreed
        self._exchange.epoch = self._exchange.num_agreed = following.agreed.epoch
        self._next = None  # last: up to here all may be repeated
        self._close(old, regions)
        return following.agreed

    def _attach(self, rank: int, blob: bytes) -> SharedRegion | None:
        """Map a rank's region; None if its process has ended, or has closed the buffer again."""
        pid = self._engine.peer_regions.regions[rank].owner_pid
        try:
            region = SharedRegion.attach(blob)
        except expected(OwnerEndedError):
            return None
        except expected(ProtocolError, ResourceError):
            if rank in self.dead() or self._sync.has_left(rank):
                return None
            raise
        if region.owner_pid != pid or region.nbytes < self._nbytes:
            region.close()
            raise ProtocolError(f"rank {rank} names a region that is not its own, or too small")
        return region

    def _close(self, regions: Mapping[int, SharedRegion], kept: Mapping[int, SharedRegion]) -> None:
        for rank, region in regions.items():
            if region is not kept.get(rank):
                region.close()

    def close(self) -> None:
        """Release all memory, and the engine. Idempotent."""
        self._close(self.regions, {})
        self.regions = {}
        if self._own is not None:
            self._own.close()
            self._own = None
        self.memory = Memory()
        super().close()
