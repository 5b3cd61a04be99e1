"""The pairs of one rank: peers whose messages go from GPU to GPU, those through cpu memory, and those still to meet.

Data path: none. This owns the memory and the kernels (`machine.py`) from the first message on, and the words of each
pair; `pairs.py` describes the order of the exchange between two ranks, and what a crash in between leaves.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ....engine import Engine
from ....errors import (
    CommTimeoutError,
    InvalidArgument,
    InvalidState,
    ResourceError,
    UnsupportedError,
    expected,
)
from ....gpu.death_notifier import DeathNotifier
from ....gpu.platform import Platform
from ....gpu.ranks import MAX_LOCAL
from ....memory.claim import process_start_time
from ....torch_private import current_index
from ....view.process.detector import DeathWatch, is_leaving
from .. import meeting as collectives_meeting
from ..meeting import MeetingRow
from .machine import Messages, plan_of
from .pairs import PairBoard
from .params import config_of
from .streams import Streams

logger = logging.getLogger("epee")

ENDING_S = 5.0  # how long a dying process may take to end
DRAIN_S = 30.0  # beyond the group's timeout: how long a meeting waits for kernels that were queued before


def platform_of(device: torch.device) -> Platform:
    """Return the platform of a device; the tests replace it by their own."""
    return collectives_meeting.platform_of(device)


def has_gpu() -> bool:
    """Whether this process has a GPU; asked before the first message, as CUDA is in use then."""
    return collectives_meeting.has_gpu()


def is_capturing() -> bool:
    """Whether the current stream records a graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


class Pairs:
    """The pairs of one rank, see the module. One thread at a time.

    Args:
        engine: of the group.
        rank: this process's.
        staging_bytes: determines the size of the memory; equal on all ranks.
        store: of the group.
        is_masked: mode "mask": a rank is dead only when its process has ended completely, including its GPU work.

    Attributes:
        is_masked: as above.
        machine, streams: None before the first message, and if this process has no memory for them.
        met: rank -> its process, of those that messages can be sent to.
        off: rank -> its process, of those whose messages go through cpu memory.
        lost: pairs that have lost a message.
        epoch: of the engine's members at the last check.
        index: of the GPU that is used; -1 before, and in the emulation. `current()` is the one set by torch.
        own_row: the row that this rank has published, but for the rings of ranks that have joined later.
    """

    def __init__(self, engine: Engine, rank: int, staging_bytes: int, store: Any, is_masked: bool = False) -> None:
        self.is_masked = is_masked
        self._engine, self._rank, self._staging_bytes = engine, rank, staging_bytes
        self._board = PairBoard(engine, store, rank, self._is_dead)
        self.machine: Messages | None = None
        self.streams: Streams | None = None
        self.own_row: MeetingRow | None = None
        self.index = -1
        self.current: Callable[[], int] = lambda: -1
        self.epoch = -1
        self.met: dict[int, str] = {}
        self.off: dict[int, str] = {}
        self.lost: set[int] = set()
        self._owners: dict[int, str] = {}  # processes that may have stored here
        self._rows: dict[int, MeetingRow] = {}  # as published for each rank
        self._processes: dict[int, tuple[int, int]] = {}
        self._gpus: dict[int, bytes] = {}
        self._meetings: dict[int, int] = {}  # number of meetings after losses, by peer
        self._notifier: DeathNotifier | None = None

    @property
    def gpu(self) -> torch.device:
        """The GPU that is used."""
        assert self.machine is not None
        return self.machine.platform.device

    @property
    def gear(self) -> tuple[Messages, Streams]:
        """Return the machine and its streams, which exist once a pair has met."""
        assert self.machine is not None
        assert self.streams is not None
        return self.machine, self.streams

    def _is_dead(self, rank: int) -> bool:
        is_met = rank in self.met  # the successor of a dead process is another process
        return is_met and self.machine is not None and self.machine.device.is_marked(rank)

    def meet(self, peers: Sequence[int], device: torch.device, name: str) -> bool:
        """Let messages go between this rank and others, if they do not yet; False if those of one go through cpu
        memory.

        Raises:
            InvalidArgument: a second GPU. InvalidState: a graph is being recorded, and ranks would have to meet.
            CommTimeoutError, RankFailedError: a peer does not arrive. Else as memory is created, or mapped.
        """
        if all(peer in self.met for peer in peers) and not self.lost.intersection(peers):
            if device != self.gpu and not _is_emulated(self.gpu):
                raise InvalidArgument(
                    f"{name}: the tensor is on {device}, this group's messages run on {self.gpu}; a group uses one "
                    "GPU per rank"
                )
            return True
        if is_capturing():
            raise InvalidState(
                f"{name}: before this message (the first between two ranks, or the first after a loss) their CPUs "
                "exchange data, which a graph cannot record; send one before the recording"
            )
        self._begin(device)
        self._board.publish(self._row_for)
        for peer in sorted(set(peers)):
            if peer in self.met:
                if peer in self.lost:
                    self._mend(peer, name)
            elif peer not in self.off:
                self.lost.discard(peer)  # work that was queued for a process that is no longer a member
                self._connect(peer, name)
        return not any(peer in self.off for peer in peers)

    def _begin(self, device: torch.device) -> None:
        """Make the memory, and the row, which stays in the store from then on."""
        if self.own_row is not None:
            return
        pid, members = os.getpid(), self._engine.members
        size = min(MAX_LOCAL, max(members.group_size, 1 + max(members.members)))
        row = MeetingRow(True, 1, bytes(16), pid, process_start_time(pid), 0, size, b"", "")
        try:
            platform = platform_of(device)
            machine = Messages(platform, config_of(self._rank, size, self._staging_bytes))
            machine.skips_dead = self.is_masked
            gpu = collectives_meeting.gpu_name(platform.device)
            row = row._replace(gpu=gpu, blob=machine.blob, num_sms=platform.limits.num_sms)
            self.machine, self.streams = machine, Streams(platform)
            if platform.device.type == "cuda":
                self.index, self.current = platform.device.index, current_index
        except expected(RuntimeError, ImportError, OSError) as exc:  # also CUDA's own errors
            row = row._replace(is_ok=False, reason=f"rank {self._rank}: {exc}")
        self.own_row, self._owners = row, self._members()

    def _row_for(self, peer: int) -> MeetingRow:
        """Return the row for a rank's current process, with a ring for one that has joined after the first message."""
        row = self.own_row
        assert row is not None
        if row.is_ok and self.machine is not None:
            try:
                row = row._replace(pool=self.machine.lend_ring(peer))
            except expected(RuntimeError, OSError) as exc:
                row = row._replace(is_ok=False, reason=f"rank {self._rank}: {exc}")
        self._rows[peer] = row
        return row

    def _connect(self, peer: int, name: str) -> None:
        owner, own = self._board.owner_of(peer), self._rows[peer]
        row = own if peer == self._rank else self._board.row_of(peer, name)
        if not own.is_ok or not row.is_ok:
            self.off[peer] = owner
            logger.warning("messages with rank %d go through CPU memory: %s", peer, own.reason or row.reason)
            return
        machine = self.machine
        assert machine is not None
        try:
            machine.connect(peer, row.blob, row.pool)
        except expected(UnsupportedError) as exc:  # GPUs that do not reach each other, as both ends find
            self.off[peer] = owner
            logger.warning("messages with rank %d go through CPU memory: %s", peer, exc)
            return
        self.met[peer], self._gpus[peer] = owner, row.gpu
        self._processes[peer] = row.pid, row.start_time
        sharing = 1 + sum(gpu == own.gpu for rank, gpu in self._gpus.items() if rank != self._rank)
        machine.plan = plan_of(self._engine.members.group_size, sharing)
        if peer == self._rank:
            return
        if self._notifier is None:
            device = machine.device
            name_of_thread = f"epee-messages-{self._rank}"
            notifier = DeathNotifier(device.mark_dead, device.waiting, name_of_thread, self.is_masked)
            try:
                notifier.start({peer: (row.pid, row.start_time)})
            except expected(ResourceError):
                notifier.stop()
                raise
            self._notifier = notifier
        else:
            self._notifier.follow(peer, (row.pid, row.start_time))

    def _mend(self, peer: int, name: str) -> None:
        """Meet the other end of a pair that has lost a message."""
        machine = self.machine
        assert machine is not None
        self._drain(peer, name)
        count = self._meetings.get(peer, 0)
        if peer == self._rank:
            machine.reset(peer)
        else:
            self._board.meet_again(peer, count, name, lambda: machine.reset(peer))
        self._meetings[peer] = count + 1
        self.lost.discard(peer)

    def _drain(self, peer: int, name: str) -> None:
        assert self.streams is not None
        if not self.streams.drain([(peer, False), (peer, True)], self._engine.timeout_s + DRAIN_S):
            raise CommTimeoutError(f"{name}: messages with rank {peer} that were queued before have not ended", [peer])

    def renew(self, check: Callable[[], None]) -> None:
        """Remove ranks whose process has been replaced or has ended, if the view has changed.

        Args:
            check: raises what kernels have reported, and notes it in `lost`: called when the messages with such a rank
                have ended, so that none of their losses counts as a loss with a successor. What it raises leaves a
                state from which the next call continues.
        """
        epoch = self._engine.members.epoch
        if self.epoch == epoch:
            return
        for peer, owner in self._owners.items():
            if self._board.owner_of(peer) != owner and self.machine is not None:
                self._drain(peer, "message")
                check()
                self._await_end(peer)
                self.machine.disconnect(peer)
                self.met.pop(peer, None)
                self._gpus.pop(peer, None)
                self.lost.discard(peer)
                self._meetings.pop(peer, None)
        self.off = {peer: owner for peer, owner in self.off.items() if self._board.owner_of(peer) == owner}
        if self.own_row is not None:
            self._owners = self._members()
            if is_capturing():
                return  # a later message publishes: the memory of a ring cannot be made while a graph is recorded
            self._board.publish(self._row_for)
        self.epoch = epoch

    def _members(self) -> dict[int, str]:
        return {peer: self._board.owner_of(peer) for peer in self._engine.members.members}

    def _await_end(self, peer: int) -> None:
        """Wait until a dying process has ended completely, so that its GPU stores nothing here any more."""
        process = self._processes.pop(peer, None)
        if process is None or peer == self._rank or not is_leaving(*process):
            return
        watch, deadline = DeathWatch(), time.monotonic() + ENDING_S
        try:
            watch.watch(peer, *process)
            while not watch.dead(0.01) and time.monotonic() < deadline:
                pass
        finally:
            watch.close()

    def stop(self) -> None:
        """Stop watching processes. Idempotent."""
        if self._notifier is not None:
            self._notifier.stop()
            self._notifier = None


def _is_emulated(device: torch.device) -> bool:
    return device.type == "cpu"
