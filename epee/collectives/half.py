"""The device half of a group: its collectives on CUDA tensors, beside its engine, which makes those on CPU tensors.

Data path: a call's arguments become rows of memory (`calls.py`, `moves.py`), which kernels move (`machine.py`); those
of a call that looks like an earlier one are known (`again.py`). The host launches and waits for nobody, except where
the ranks' hosts meet.

Meetings. Before the first call, and before the next one after the group's members have changed or a call was lost, all
members make a call of the engine (`backend/device/calls.meet`), twice: first each tells its memory, GPU, process and
the number of its last call, when its GPU has done all that was queued; then each has mapped the others' memory and set
view and number (`Collectives.begin`), and tells whether that went well. So when the second call has ended nothing of
earlier calls is under way, and all may store everywhere. Where it went wrong on one, CUDA tensors take the way through
host memory, on all. A rank that cannot map the pool of another one (`pool.py`) tells that as well: all warn, and no
call reads pools until a later meeting, or `memory_pool` called again, has mapped it.

Failures. Kernels report (`report.py`); the error is raised at the next touch of the host: a call, or the `wait` of one.
A rank that has lost a call lets the next one fail on all (`csrc/kernels/collective/call.cuh`), so all hear of it, and
all meet before their next call. A death is told to the kernels by a thread (`ep/gpu/death_notifier.py`), and to the
engine by its own means: the meeting is the engine's first call without the rank, which in mode "raise" would raise the
loss; it does only where the host has not raised it before. A call that is refused here is made all the same, as one
that is like no other, so that peers hear at once.

A crash between the two calls of a meeting ends them, like any call of the engine; those who are left meet again.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from ..backend.device.calls import NOT_SERVED, Policy, meet
from ..backend.engine.engine import Engine
from ..backend.work import DONE, Ended, is_loss
from ..ep.gpu.death_notifier import DeathNotifier
from ..ep.gpu.platform import CudaPlatform, Platform
from ..ep.gpu.report import KernelReport
from ..errors import (
    EpeeError,
    InvalidArgument,
    InvalidState,
    PeerError,
    RankFailedError,
    ResourceError,
    UnsupportedError,
)
from ..memory.claim import process_start_time
from ..memory.cuda_mapping import uuid_of
from ..view.process.detector import is_leaving
from . import moves
from .again import KnownCalls
from .calls import NotServed, Prepared, prepare
from .machine import Collectives, most_sms
from .mask.counts import Count
from .mask.losses import Losses, ranks_of
from .mask.moves import masked
from .mask.work import MaskedWork
from .meeting import MeetingRow, flaw_in
from .moves import Move
from .plan import config_of, plan_of
from .pool import MemoryPool
from .report import error_of, failed, may_be_of_dead
from .work import DeviceWork, OwnStream, note_use

logger = logging.getLogger("epee")

CLOSE_S = 30.0  # how long the end of a group waits for kernels that wait for peers
NEWS_S = 0.1  # how long a host waits to hear of a death that others have heard of
DYING_S = 2.0  # the same where a process is seen to die: with a GPU that takes a while on a busy machine
_REFUSED = 1 << 62  # facts of no call
_Before = tuple[set[int], Count | None]  # the ranks that took part when a call was made, and who is in its result


def platform_of(device: torch.device) -> Platform:
    """Return the machine below; the tests put their own in its place."""
    return CudaPlatform(device)


def has_gpu() -> bool:
    """Whether this process has a GPU that kernels can be loaded on; asked at the first call, as CUDA is in use then."""
    return torch.cuda.is_available()


def current_device() -> torch.device:
    """Return the GPU that this process makes its next calls on."""
    return torch.device("cuda", torch.cuda.current_device())


def gpu_name(device: torch.device) -> bytes:
    """Return 16 bytes that all processes call a GPU by."""
    return uuid_of(device.index) if device.type == "cuda" else bytes(16)


class DeviceHalf:
    """See above; implements `backend.device.calls.DeviceCalls`. One thread at a time.

    Args:
        engine: of the group.
        rank: this process's.
        staging_bytes: by which the memory is sized; equal on all ranks.
        policy: of the group.
    """

    def __init__(self, engine: Engine, rank: int, staging_bytes: int, policy: Policy) -> None:
        self._engine, self._rank, self._staging_bytes, self._policy = engine, rank, staging_bytes, policy
        self._losses = Losses(engine) if policy.is_masked else None
        self._machine: Collectives | None = None
        self._again: dict[bool, KnownCalls] = {}  # of blocking and of asynchronous calls
        self._own: OwnStream | None = None
        self._device: torch.device | None = None
        self._epoch = -1  # of the engine's members that the view is made of
        self._is_lost = False  # a call was lost since the last meeting
        self._off = ""  # why calls go through host memory
        self._told: set[int] = set()  # ranks whose loss was raised here, and not by the engine
        self._members: tuple[int, ...] = ()  # of the last meeting
        self._last_seq = -1  # of the engine, when the last call was made here
        self._in: tuple[int, ...] | None = ()  # who was in that call; None: the kernels know
        self._processes: dict[int, tuple[int, int]] = {}
        self._notifier: DeathNotifier | None = None
        self._pool_bytes = 0  # that were asked for
        self._why_no_pool: Exception | None = None
        self._poor: list[int] = []  # members of the last meeting that have no pool
        self._no_pools = ""  # why the members make calls as without pools, as they told at the last meeting
        self._lock = threading.RLock()
        self._is_closed = False

    # --- calls

    def run(self, method: str, args: Any, kwargs: dict[str, Any]) -> Any:
        """Make a call, or return `NOT_SERVED`.

        Raises:
            InvalidArgument: an argument is refused. InvalidState: a graph is being recorded, and the call would have to
                meet the other ranks, or to load kernels. RankFailedError, CommTimeoutError, MismatchError: an earlier
                call was lost; this one is not made. Else as a call of the engine, where the hosts meet.
        """
        if not self._off and self._epoch < 0 and not has_gpu():
            self._off = "this process has no GPU"
        if self._off:
            return NOT_SERVED
        with self._lock:
            is_async = _is_asynchronous(args, kwargs)
            if not is_async or self._own is None:
                return self._run_here(method, args, kwargs, None, is_async)
            with self._own.entered() as side:
                done = self._run_here(method, args, kwargs, side, True)
            if side is not None and done is not NOT_SERVED:
                note_use(args, side)
            return done

    def _run_here(
        self, method: str, args: Any, kwargs: dict[str, Any], side: torch.cuda.Stream | None, is_async: bool
    ) -> Any:
        """Make a call on the current stream, which is `side` where that is the group's own."""
        again = self._again.get(is_async)
        is_quiet = not kwargs and self._epoch == self._engine.members.epoch and not self._is_lost
        if again is not None and is_quiet:
            before = self._before(is_async)
            stream = again.run(method, args, self._engine.timeout_s, None if before is None else before[1])
            if stream is not None:
                self._note(None if self._policy.is_masked else self._members)
                return self._work(stream, is_async, args[0], side, before)
        elif again is not None:
            again.skip()
        try:
            return self._run(method, args, kwargs, side, is_async)
        except PeerError as exc:
            if self._engine.reports_losses and is_loss(exc):
                return Ended(self._engine, exc)
            raise

    def _note(self, contributors: tuple[int, ...] | None) -> None:
        self._last_seq, self._in = self._engine.seq, contributors
        if self._losses is not None and self._machine is not None:
            self._losses.look(self._machine)

    def _before(self, is_async: bool) -> _Before | None:
        """Return what the work of a call that is to be made tells of its ranks; None where it does not."""
        if self._losses is None or self._machine is None or not is_async:
            return None
        return self._present(), self._machine.counts.take()

    def _present(self) -> set[int]:
        return {*self._members}.difference(self.lost())

    def _work(
        self, stream: int, is_async: bool, outputs: Any, side: torch.cuda.Stream | None, before: _Before | None
    ) -> Any:
        if not is_async:
            return DONE
        assert self._machine is not None
        shown = outputs if isinstance(outputs, list) else [outputs]
        rest = self.check, stream, shown, self._machine.platform.device, side
        if before is None:
            return DeviceWork(*rest)
        return MaskedWork(self._engine, *before, self._present, *rest)

    def _run(
        self, method: str, args: Any, kwargs: dict[str, Any], side: torch.cuda.Stream | None, is_async: bool
    ) -> Any:
        refused: Exception | None = None
        call: Prepared | None = None
        try:
            call = self._prepare(method, args, kwargs)
        except NotServed:
            return NOT_SERVED
        except Exception as exc:  # noqa: BLE001 - no memory for a copy, a word of torch's: the peers must hear of it
            refused = exc
        device = call.device if call is not None else _device_in(args)
        if device is None:
            return NOT_SERVED
        self.check()
        if self._must_meet():
            self._meet(device, method)
        if self._off or self._machine is None:
            return NOT_SERVED
        if refused is None and device != self._device:
            refused = InvalidArgument(
                f"{method}: the tensors are on {device}, this group's calls run on {self._device}; a group uses one "
                "GPU per rank"
            )
        machine = self._machine
        machine.timeout_s = self._engine.timeout_s
        machine.most_sms = most_sms(machine, is_async)
        again: list[Move] = []
        if refused is None and call is not None:
            try:
                again = [call.again(move) if machine.is_tried(move) else move for move in call.moves]
            except RuntimeError as exc:  # no memory for a copy
                refused = exc
        if refused is not None or call is None:
            self._is_lost = True
            machine.run(moves.barrier(machine.config.num_ranks)._replace(facts=_REFUSED))
            raise refused or InvalidArgument(method)
        before = self._before(is_async)
        stream = self._queue(machine, call.moves, again, None if before is None else before[1])
        call.copy_back()
        if self._again and not kwargs and self._may_come_again(call):
            self._again[is_async].remember(call.moves[0])
        self._note(None if self._policy.is_masked else self._members)
        return self._work(stream, is_async, call.outputs, side, before)

    def _may_come_again(self, call: Prepared) -> bool:
        return call.is_plain and len(call.moves) == 1 and call.num_ranks == self._engine.members.group_size

    def _prepare(self, method: str, args: Any, kwargs: dict[str, Any]) -> Prepared:
        """Return a call as the kernels make it."""
        size = self._engine.members.group_size
        entries = min(size, self._engine.mask.span) if self._policy.counts_present else size
        call = prepare(method, self._rank, entries, args, kwargs)
        if self._policy.is_masked:
            call.moves = [masked(move, self._rank, size, entries) for move in call.moves]
        return call

    def _queue(self, machine: Collectives, made: list[Move], again: list[Move], count: Count | None) -> int:
        """Put a call on the current stream of the group's GPU; returns the stream.

        Args:
            machine: of the group.
            made: the moves, of the last of which `count` tells: who is in that is in all of them.
            again: these as they may be made again.
            count: as in `Collectives.run`.
        """
        if (
            self._device is not None
            and self._device.type == "cuda"
            and torch.cuda.current_device() != self._device.index
        ):
            with torch.cuda.device(self._device):
                return self._queue(machine, made, again, count)
        for number, pair in enumerate(zip(made, again, strict=True), 1):
            stream = machine.run(*pair, count if number == len(made) else None)
        return stream

    def check(self) -> None:
        """Raise what kernels have reported. Any thread."""
        machine = self._machine
        if machine is None:
            return
        if self._losses is not None:
            self._losses.look(machine)
        if not machine.device.has_reports:
            return
        with self._lock:
            reports = machine.reports()
            if not reports or self._is_lost:
                return  # another thread has raised it; what follows a loss is told by it
            self._is_lost = True
            error = self._error_of(machine, reports[0])
            for report in reports[1:]:
                logger.info("after the failure that is raised now: %s", error_of(report, self._rank))
            raise error

    def _error_of(self, machine: Collectives, report: KernelReport) -> EpeeError:
        error = error_of(report, self._rank)
        if may_be_of_dead(report):
            begun = time.monotonic()
            while not (dead := self._dead(machine)):
                waited = time.monotonic() - begun
                if waited > DYING_S or (waited > NEWS_S and not self._is_anybody_dying()):
                    break
                time.sleep(1e-3)
            if dead:
                error = failed(report, self._rank, dead[0])
        if isinstance(error, RankFailedError):
            self._told |= {*error.ranks, *self._dead(machine)}
        return error

    def _is_anybody_dying(self) -> bool:
        return any(is_leaving(*self._processes[rank]) for rank in self._members if rank in self._processes)

    def _dead(self, machine: Collectives) -> list[int]:
        return [rank for rank in self._members if rank != self._rank and machine.device.is_marked(rank)]

    def contributors(self) -> tuple[int, ...] | None:
        """Return who is in the result of the last call, None if the engine made that; waits for the GPU."""
        machine = self._machine
        if machine is None or self._last_seq != self._engine.seq:
            return None
        if self._in is None:
            bits = machine.contributors()
        if self._is_lost or machine.device.has_reports:
            return ()
        return ranks_of(bits) if self._in is None else self._in

    def lost(self) -> tuple[int, ...]:
        """Return ranks that calls here have left out since the hosts met last."""
        if self._losses is None or self._machine is None:
            return ()
        self._losses.look(self._machine)
        return self._losses.lost()

    # --- pools

    def memory_pool(self, nbytes: int) -> MemoryPool:
        """Return this rank's pool, made if there is none; all members call it. See `ProcessGroup.memory_pool`."""
        if self._policy.is_masked:
            raise UnsupportedError('memory_pool: groups with fault_mode="mask" read no tensors of peers; use "raise"')
        with self._lock:
            refusal = self._refusal_of_pool(nbytes)  # raised behind the meeting, in which the peers hear of it
            if not self._off and not has_gpu():
                self._off = "this process has no GPU"
            self._pool_bytes, self._why_no_pool = 0 if refusal else nbytes, refusal
            self._epoch = -1
            if not self._off:
                self.check()
                self._meet(self._device or current_device(), "memory_pool")
            if refusal is not None:
                raise refusal
            machine = self._machine
            if self._off or machine is None:
                raise UnsupportedError(f"memory_pool: collectives on CUDA tensors go through host memory: {self._off}")
            if self._poor:
                raise ResourceError(f"memory_pool: ranks {self._poor} have none") from self._why_no_pool
            assert machine.pool is not None
            return machine.pool

    def _refusal_of_pool(self, nbytes: int) -> InvalidArgument | None:
        """Return what is wrong with the size of a pool here, if anything is."""
        pool = None if self._machine is None else self._machine.pool
        if nbytes < 1:
            return InvalidArgument(f"nbytes must be 1 or more, got {nbytes}")
        if pool is not None and nbytes > pool.nbytes:
            return InvalidArgument(f"the group's pool has {pool.nbytes} bytes and does not grow, got {nbytes}")
        return None

    def _lend(self, machine: Collectives) -> bytes:
        """Return by what peers map this rank's pool, made if it was asked for; empty if there is none."""
        if machine.pool is None and self._pool_bytes:
            try:
                machine.lend(self._pool_bytes)
            except (EpeeError, RuntimeError) as exc:  # the others must hear that there is none
                self._why_no_pool = exc
        return b"" if machine.pool is None else machine.pool.blob

    # --- meetings

    def _must_meet(self) -> bool:
        """Whether the hosts must meet before the next call, which all find alike."""
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
        """Meet all members, until all have begun anew in one epoch or know that host memory is the way."""
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise InvalidState(
                f"{method}: the ranks' hosts must meet before this call (the group's first on CUDA tensors, or the "
                "first after a loss), which no graph can record; make one such call outside"
            )
        while True:
            own = self._ready(device)
            epoch, rows = self._exchange(own)
            if any(row.phase for row in rows.values()):
                continue  # a peer was in its second phase, and comes back to the first
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
            if reason:
                self._off = reason
                logger.warning("collectives on CUDA tensors go through host memory: %s", reason)
                self._release(False)
            elif no_pools != self._no_pools:
                self._no_pools = no_pools
                if no_pools:
                    logger.warning("collectives on CUDA tensors are made as without memory pools: %s", no_pools)
            self._epoch, self._is_lost = epoch, False
            self._told.clear()  # the engine has nothing left to raise of that time
            return

    def _exchange(self, own: MeetingRow) -> tuple[int, dict[int, MeetingRow]]:
        """Give a row to all members; returns the epoch, and theirs."""
        while True:
            try:
                box, rows = meet(self._engine, own.pack())
                return box.epoch, {rank: MeetingRow.parse(row) for rank, row in rows.items()}
            except RankFailedError as exc:
                if not exc.ranks or not self._told.issuperset(exc.ranks):
                    raise
                self._told -= set(exc.ranks)  # the host has raised it already

    def _own_row(self) -> MeetingRow:
        """Return a row in which all is well."""
        pid = os.getpid()
        return MeetingRow(True, 1, bytes(16), pid, process_start_time(pid), 0, 1, b"", "")

    def _ready(self, device: torch.device) -> MeetingRow:
        """Return what this rank tells; its GPU has done all that was queued."""
        own = self._own_row()
        try:
            num_ranks = self._engine.members.group_size
            if self._machine is None:
                config = config_of(self._rank, num_ranks, self._staging_bytes, self._policy.is_masked)
                platform = platform_of(device)
                if self._policy.is_masked and not platform.keeps_addresses:
                    raise UnsupportedError("memory is lent by cudaIpc, and is read here after its owner's death")
                self._machine, self._device = Collectives(platform, config), device
                self._machine.fills_absent = self._policy.counts_present
                for is_async in (False, True):
                    self._again[is_async] = KnownCalls(self._machine, most_sms(self._machine, is_async))
                self._own = OwnStream(self._machine.platform)
            machine = self._machine
            if num_ranks != machine.config.num_ranks:
                raise InvalidArgument(f"the group has grown to {num_ranks} ranks")
            machine.device.drain(self._engine.timeout_s)
            sms = machine.platform.limits.num_sms
            return own._replace(
                num_sms=sms,
                gpu=gpu_name(machine.platform.device),
                number=machine.number(),
                num_ranks=num_ranks,
                blob=machine.blob,
                pool=self._lend(machine),
            )
        except (EpeeError, RuntimeError, ImportError, OSError) as exc:  # CUDA's own words among them
            return own._replace(is_ok=False, reason=f"rank {self._rank}: {exc}")

    def _begin(self, rows: Mapping[int, MeetingRow]) -> str:
        """Map the members' memory and begin anew; returns why that does not work."""
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
        except (EpeeError, RuntimeError, OSError) as exc:
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
            self._notifier = DeathNotifier(device.mark_dead, device.waiting, name, needs_end=self._policy.is_masked)
            self._notifier.start(processes)
        elif self._notifier is not None:
            for rank, process in processes.items():
                if self._processes.get(rank) != process:
                    self._notifier.follow(rank, process)
        self._processes.update(processes)

    # --- end

    def close(self, is_aborted: bool) -> None:
        """End. Waits for the kernels in flight, or ends their waits if `is_aborted`. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._off = self._off or "the group is closed"
        self._release(is_aborted)

    def _release(self, is_aborted: bool) -> None:
        machine, self._machine, self._own = self._machine, None, None
        self._again.clear()
        if self._notifier is not None:
            self._notifier.stop()
            self._notifier = None
        if machine is None or machine.device.is_closed:
            return
        if is_aborted:
            machine.device.abort()
        machine.device.drain(min(self._engine.timeout_s, CLOSE_S))
        if self._policy.is_masked and not is_aborted and not machine.device.is_recorded:
            machine.leave()
        if not machine.device.is_recorded:  # graphs have its addresses
            machine.close()


def _is_asynchronous(args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a call returns before its results may be used: who gives no options waits for nothing."""
    opts = kwargs.get("opts") if "opts" in kwargs else None
    if opts is None:
        opts = args[-1] if args and hasattr(args[-1], "asyncOp") else None
    return opts is None or bool(opts.asyncOp)


def _device_in(args: Any) -> torch.device | None:
    if isinstance(args, torch.Tensor):
        return args.device if args.is_cuda else None
    if isinstance(args, (list, tuple)):
        return next((found for item in args if (found := _device_in(item)) is not None), None)
    return None
