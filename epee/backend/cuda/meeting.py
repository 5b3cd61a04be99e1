"""Meetings of the ranks of a group's CUDA backend on the cpu: the rows that they exchange, and what follows
(`half.py`).

Meetings. Before the first call, and before the next one after the group's members have changed or a call was lost, all
members make a call of the engine (`interface.meet`), twice. In the first, each sends its memory, GPU, process and the
number of its last call, after its GPU has done all that was queued. Before the second, each maps the others' memory and
sets view and number (`Collectives.begin`); in it, each sends whether that succeeded. So when the second call has ended
nothing of earlier calls is unfinished, and all may store everywhere. If it failed on one rank, CUDA tensors go through
cpu memory on all ranks. A rank that cannot map the pool of another one (`pool.py`) sends that as well: all warn, and no
call reads pools until a later meeting, or `memory_pool` called once more, has mapped it.

A group that has grown meets as well. Kernels and memory are made for a number of ranks, so each rank makes new ones
before the first call, and releases the old ones behind the second, when no rank stores there any more. Ranks that have
seen different sizes repeat the first call; all find the same in its rows.

A crash between the two calls of a meeting ends them, like any call of the engine; the remaining ranks meet once more.
"""

from __future__ import annotations

import logging
import os
import struct
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch

from ...engine import Engine
from ...errors import (
    InvalidState,
    ProtocolError,
    RankFailedError,
    UnsupportedError,
    expected,
)
from ...gpu.death_notifier import DeathNotifier
from ...gpu.platform import CudaPlatform, Platform
from ...gpu.ranks import MAX_LOCAL
from ...memory.claim import process_start_time
from ...memory.cuda_mapping import uuid_of
from ...view.process.detector import is_leaving
from .again import KnownCalls
from .interface import Policy, meet
from .machine import Collectives, most_sms
from .mask.losses import Losses
from .plan import config_of, plan_of
from .stall import StallWarnings
from .work import OwnStream

logger = logging.getLogger("epee")

WAIT_S = 1e7  # of a kernel's wait with `on_stall="wait"`: months; 64 times as long still fits into a word
CLOSE_S = 30.0  # how long the end of a group waits for kernels that wait for peers

_ROW = struct.Struct("<BBxxi16sqQqqHH512s512s200s200s")  # in the order of `MeetingRow`, the blobs' lengths before them
_MOST_CALLS = 1 << 38


class MeetingRow(NamedTuple):
    """The data that a rank sends at a meeting.

    Attributes:
        phase: 0 before it has mapped the others' memory, 1 after that.
        pool: bytes with which others map the rank's pool; empty if it has none. In a row of messages: with which the
            other maps its ring there, if that has a region of its own.
        no_pools: in phase 1, why this rank reads no pools, though all may have one; empty if it does.
    """

    is_ok: bool
    num_sms: int
    gpu: bytes
    pid: int
    start_time: int
    number: int
    num_ranks: int
    blob: bytes
    reason: str
    phase: int = 0
    pool: bytes = b""
    no_pools: str = ""

    def pack(self) -> bytes:
        """Return it as bytes."""
        head = self.is_ok, self.phase, self.num_sms, self.gpu, self.pid, self.start_time, self.number, self.num_ranks
        sizes = len(self.blob), len(self.pool)
        texts = (text.encode()[:200] for text in (self.reason, self.no_pools))
        return _ROW.pack(*head, *sizes, self.blob, self.pool, *texts)

    @classmethod
    def parse(cls, data: bytes) -> MeetingRow:
        """Read it; nothing is used before it has been checked.

        Raises:
            ProtocolError: a number is invalid.
        """
        ok, phase, sms, gpu, pid, start, number, num_ranks, length, extent, blob, pool, *texts = _ROW.unpack(data)
        if not (
            length <= 512
            and extent <= 512
            and 0 <= number < _MOST_CALLS
            and 1 <= num_ranks <= MAX_LOCAL
            and 0 < sms < 1 << 16
        ):
            raise ProtocolError(f"a rank told of {length} bytes, call {number}, {num_ranks} ranks and {sms} SMs")
        reason, no_pools = (text.rstrip(b"\0").decode(errors="replace") for text in texts)
        return cls(
            bool(ok), sms, gpu, pid, start, number, num_ranks, blob[:length], reason, phase, pool[:extent], no_pools
        )


def flaw_in(rows: Mapping[int, MeetingRow]) -> str:
    """Return why calls go through cpu memory, the same on all ranks; empty if they do not."""
    return next((row.reason or "no reason" for row in rows.values() if not row.is_ok), "")


def has_grown(rows: Mapping[int, MeetingRow]) -> bool:
    """Whether the group has grown since some rank made its row, the same on all ranks: then all repeat the meeting."""
    return len({row.num_ranks for row in rows.values() if row.is_ok}) > 1


def platform_of(device: torch.device) -> Platform:
    """Return the platform of a device; the tests replace it by their own."""
    return CudaPlatform(device)


def has_gpu() -> bool:
    """Whether this process has a GPU that kernels can be loaded on; asked at the first call, as CUDA is in use then."""
    return torch.cuda.is_available()


def current_device() -> torch.device:
    """Return the GPU that this process makes its next calls on."""
    return torch.device("cuda", torch.cuda.current_device())


def gpu_name(device: torch.device) -> bytes:
    """Return 16 bytes by which all processes identify a GPU."""
    return uuid_of(device.index) if device.type == "cuda" else bytes(16)


class MeetingHalf:
    """A group's state on its GPU, created and renewed at meetings; `DeviceHalf` makes the calls. One thread at a time.

    Args:
        engine: of the group.
        rank: this process's.
        staging_bytes: determines the size of the memory; equal on all ranks.
        policy: of the group.
    """

    def __init__(self, engine: Engine, rank: int, staging_bytes: int, policy: Policy) -> None:
        self._engine, self._rank, self._staging_bytes, self._policy = engine, rank, staging_bytes, policy
        self._losses = Losses(engine) if policy.is_masked else None
        self._machine: Collectives | None = None
        self._outgrown: list[Collectives] = []  # of a smaller group, during a meeting
        self._again: dict[bool, KnownCalls] = {}  # of blocking and of asynchronous calls
        self._own: OwnStream | None = None
        self._device: torch.device | None = None
        self._epoch = -1  # of the engine's members that the view is made of
        self._is_lost = False  # a call was lost since the last meeting
        self._off = ""  # why calls go through cpu memory
        self._told: set[int] = set()  # ranks whose loss was raised here, and not by the engine
        self._members: tuple[int, ...] = ()  # of the last meeting
        self._last_seq = -1  # of the engine, when the last call was made here
        self._in: tuple[int, ...] | None = ()  # the ranks in that call; None: the kernels know
        self._processes: dict[int, tuple[int, int]] = {}
        self._notifier: DeathNotifier | None = None
        self._pool_bytes = 0  # requested size
        self._why_no_pool: Exception | None = None
        self._poor: list[int] = []  # members of the last meeting that have no pool
        self._no_pools = ""  # why the members make calls as without pools, as sent at the last meeting
        self._lock = threading.RLock()
        self._is_closed = False

    @property
    def _kernel_timeout_s(self) -> float:
        """Seconds of one wait of a kernel; with `on_stall="wait"` only the rank, its death or an abort ends one."""
        return WAIT_S if self._policy.waits else self._engine.timeout_s

    def _lend(self, machine: Collectives) -> bytes:
        """Return the bytes with which peers map this rank's pool, created if requested; empty if there is none."""
        if machine.pool is None and self._pool_bytes:
            try:
                machine.lend(self._pool_bytes)
            except expected(RuntimeError) as exc:  # the others must be notified that there is none
                self._why_no_pool = exc
        return b"" if machine.pool is None else machine.pool.blob

    def _must_meet(self) -> bool:
        """Whether the ranks must meet before the next call; the same on all ranks."""
        if self._is_lost or self._epoch < 0:
            return True
        epoch = self._engine.members.epoch
        if epoch == self._epoch:
            return False
        if self._losses is None or self._losses.needs_meeting(self._processes):
            return True
        self._epoch = epoch
        return False

    def _meet(self, device: torch.device, method: str) -> None:
        """Meet all members, until all have restarted in one epoch or know that calls go through cpu memory."""
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise InvalidState(
                f"{method}: before this call (the group's first on CUDA tensors, or the first after a loss) the CPUs "
                "of the ranks exchange data, which a graph cannot record; make one such call before the recording"
            )
        while True:
            own = self._ready(device)
            epoch, rows = self._exchange(own)
            if any(row.phase for row in rows.values()) or has_grown(rows):
                continue  # a peer was in its second phase, and repeats the first; or it has seen another size
            reason = flaw_in(rows)
            if not reason:
                reason = self._begin(rows)
                no_pools = "" if self._machine is None else self._machine.no_pools
                told = own._replace(is_ok=not reason, reason=reason, phase=1, no_pools=no_pools)
                next_epoch, after = self._exchange(told)
                if next_epoch != epoch or not all(row.phase for row in after.values()):
                    continue
                reason = flaw_in(after)
                no_pools = next((row.no_pools for row in after.values() if row.no_pools), "")
            self._close_outgrown()
            if reason:
                self._off = reason
                logger.warning("collectives on CUDA tensors go through CPU memory: %s", reason)
                self._release(False)
            elif no_pools != self._no_pools:
                self._no_pools = no_pools
                if no_pools:
                    logger.warning("collectives on CUDA tensors are made as without memory pools: %s", no_pools)
            self._epoch, self._is_lost = epoch, False
            self._told.clear()  # the engine has no more errors to raise of that time
            return

    def _exchange(self, own: MeetingRow) -> tuple[int, dict[int, MeetingRow]]:
        """Send a row to all members; returns the epoch, and their rows."""
        while True:
            try:
                peer_regions, rows = meet(self._engine, own.pack())
                return peer_regions.epoch, {rank: MeetingRow.parse(row) for rank, row in rows.items()}
            except expected(RankFailedError) as exc:
                if not exc.ranks or not self._told.issuperset(exc.ranks):
                    raise
                self._told -= set(exc.ranks)  # it has been raised here already

    def _own_row(self) -> MeetingRow:
        """Return a row without failures."""
        pid = os.getpid()
        return MeetingRow(True, 1, bytes(16), pid, process_start_time(pid), 0, 1, b"", "")

    def _ready(self, device: torch.device) -> MeetingRow:
        """Return the row that this rank sends; its GPU has done all that was queued."""
        own = self._own_row()
        try:
            num_ranks = self._engine.members.group_size
            if self._machine is not None and self._machine.config.num_ranks != num_ranks:
                self._outgrow(self._machine)
            machine = self._machine or self._new_machine(device, num_ranks)
            machine.device.drain(self._kernel_timeout_s)
            sms = machine.platform.limits.num_sms
            return own._replace(
                num_sms=sms,
                gpu=gpu_name(machine.platform.device),
                number=machine.number(),
                num_ranks=num_ranks,
                blob=machine.blob,
                pool=self._lend(machine),
            )
        except expected(RuntimeError, ImportError, OSError) as exc:  # also CUDA's own errors
            return own._replace(is_ok=False, reason=f"rank {self._rank}: {exc}")

    def _new_machine(self, device: torch.device, num_ranks: int) -> Collectives:
        """Return kernels and memory for a group of `num_ranks`, with the pool of those of a smaller group."""
        config = config_of(self._rank, num_ranks, self._staging_bytes, self._policy.is_masked)
        platform = self._outgrown[-1].platform if self._outgrown else platform_of(device)
        if self._policy.is_masked and not platform.keeps_addresses:
            raise UnsupportedError("memory is lent by cudaIpc, and is read here after its owner's death")
        self._machine, self._device = Collectives(platform, config), device
        self._machine.fills_absent = self._policy.counts_present
        for smaller in self._outgrown:
            self._machine.take_pool(smaller)
        for is_async in (False, True):
            self._again[is_async] = KnownCalls(self._machine, most_sms(self._machine, is_async))
        self._own = self._own or OwnStream(platform)
        return self._machine

    def _outgrow(self, machine: Collectives) -> None:
        """Stop using the kernels and the memory of a smaller group: both are made for a number of ranks.

        The memory is kept until the meeting has ended: a peer may still be in its last call, which stores here.
        """
        machine.device.drain(self._kernel_timeout_s)
        self._stop_notifier()
        self._machine = None
        self._again.clear()
        self._outgrown.append(machine)

    def _close_outgrown(self) -> None:
        """Release what the group has outgrown: all ranks have ended their calls there."""
        while self._outgrown:
            machine = self._outgrown.pop()
            if not machine.device.is_recorded:  # graphs have its addresses; they run over the ranks of then
                machine.close()

    def _begin(self, rows: Mapping[int, MeetingRow]) -> str:
        """Map the members' memory and restart; returns why that failed, else ""."""
        machine = self._machine
        assert machine is not None
        try:
            machine.admit(
                {rank: row.blob for rank, row in rows.items()}, {rank: row.pool for rank, row in rows.items()}
            )
            self._poor = [rank for rank, row in rows.items() if not row.pool]
            zombies = self._zombies(rows)
            if zombies:
                return f"processes that had ranks {zombies} before live on, and may write into memory of the group"
            names = [row.gpu for row in rows.values()]
            sharing = max(names.count(name) for name in names)
            plan = plan_of(sharing, machine.platform.limits.num_sms)
            machine.plan = replace(plan, pipeline=machine.plan.pipeline)
            self._watch({rank: (row.pid, row.start_time) for rank, row in rows.items() if rank != self._rank})
            machine.device.news.words[0] = 0
            machine.begin(list(rows), max(row.number for row in rows.values()) + 1)
            self._members = tuple(rows)
            if self._losses is not None:
                self._losses.met()
                machine.shown = self._engine.mask.place_on(machine.platform.device)
        except expected(RuntimeError, OSError) as exc:
            return f"rank {self._rank}: {exc}"
        return ""

    def _zombies(self, rows: Mapping[int, MeetingRow]) -> list[int]:
        return [
            rank
            for rank, process in self._processes.items()
            if rank in rows and process != (rows[rank].pid, rows[rank].start_time) and not is_leaving(*process)
        ]

    def _watch(self, processes: dict[int, tuple[int, int]]) -> None:
        machine = self._machine
        assert machine is not None
        if self._notifier is None and processes:
            device = machine.device
            name = f"epee-collectives-{self._rank}"
            waiting = device.waiting
            if self._policy.waits:
                waiting = StallWarnings(machine, lambda: self._engine.timeout_s).check
            self._notifier = DeathNotifier(device.mark_dead, waiting, name, needs_end=self._policy.is_masked)
            self._notifier.start(processes)
        elif self._notifier is not None:
            for rank, process in processes.items():
                if self._processes.get(rank) != process:
                    self._notifier.follow(rank, process)
        self._processes.update(processes)

    def _stop_notifier(self) -> None:
        if self._notifier is not None:
            self._notifier.stop()
            self._notifier = None

    def _release(self, is_aborted: bool) -> None:
        machine, self._machine, self._own = self._machine, None, None
        self._again.clear()
        self._stop_notifier()
        self._close_outgrown()
        if machine is None or machine.device.is_closed:
            return
        if is_aborted:
            machine.device.abort()
        machine.device.drain(min(self._engine.timeout_s, CLOSE_S))
        if self._policy.is_masked and not is_aborted and not machine.device.is_recorded:
            machine.leave()
        if not machine.device.is_recorded:  # graphs have its addresses
            machine.close()
