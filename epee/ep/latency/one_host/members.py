"""The membership of a `LatencyBuffer` on CPUs of one host.

The calls are those of `path.py`: words and rows in the memory of an epoch, one region per rank, without a call of the
engine. So a rank that sends nothing is lost in that call, by the receiver's own mask, and the engine knows of no call
that it could end. The engine serves what the ranks do together beside that:

    construction   The ranks make the engine, exchange the regions of the first epoch, and report whether all could map
                   them: two calls of the engine.
    sync           They agree on the members (`members/member_sync.py`). The call with which that ends carries the
                   number of each rank's epoch, and the blob of the region that it lends to the next one, which is
                   numbered above all of them. Who completes the call knows the epoch; it maps the others' regions and
                   enters.

`members/epoch_members.py` says who is lost in an epoch.

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

from ....errors import EpeeError, ProtocolError, ResourceError, expected
from ....memory.claim import OwnerEndedError
from ....memory.shared import BLOB_BYTES, SharedRegion
from ....view.group import GroupInView
from ...epoch_memory import Memory
from ...making import death_in_birth
from ...members.birth import announcement, come_into
from ...members.epoch_members import EpochMembersOfEngine, MemberExchange
from ...members.header import REASON_BYTES
from ...members.member_sync import SyncRow
from ...members.membership import Agreed
from ...members.notices import BufferNotice
from ..region import region_layout

logger = logging.getLogger("epee")

_ROW = struct.Struct("<QQ")  # `SyncRow`
_DATA = struct.Struct(f"<Q{BLOB_BYTES}s")  # epoch, region


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


class EpochMembers(EpochMembersOfEngine):
    """The membership of a `LatencyBuffer` on CPUs.

    Args:
        As of `EpochMembersOfEngine`.

    Attributes:
        regions: the regions of the epoch by rank, this one's included; without those of lost ranks.
    """

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
        self._own: SharedRegion | None = None  # for the next epoch

    @property
    def lent_bytes(self) -> int:  # type: ignore[override]
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
                self._enter(deadline)
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

    # ---- in a call

    def gone(self) -> Collection[int]:
        """Return the ranks that this epoch of the buffer has lost, or never had: nothing more of theirs will arrive."""
        others = [rank for rank in range(self._config.num_ranks) if rank != self._rank]
        if self._has_missed or self._is_excluded() or not self._engine.peer_regions.regions:
            return others
        dead, since = self.dead(), self._engine.membership.admission.since()
        return [rank for rank in others if rank in dead or self._has_left(rank, since)]

    def _has_lent(self, rank: int) -> bool:
        return rank in self.regions

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

    def _enter(self, deadline: float) -> Agreed:
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
        self._exchange.forget_results()
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
