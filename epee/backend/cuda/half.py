"""The CUDA backend of a group: its collectives on CUDA tensors, beside its engine, which makes those on CPU tensors.

Data path: a call's arguments become rows of memory (`calls.py`, `moves.py`), which kernels move (`machine.py`); those
of a call that matches an earlier one are cached (`again.py`). The cpu launches and waits for no rank, except in
meetings of the ranks (`meeting.py`).

Failures. Kernels report (numbers in pinned cpu memory); the error is raised at the next entry from the cpu: a call, or
the `wait` of one. A rank that has lost a call makes the next one fail on all ranks
(`csrc/kernels/collective/call.cuh`), so all ranks are notified, and all meet before their next call. A thread reports a
death to the kernels (`gpu/death_notifier.py`), at different times on different ranks; so kernels send each other the
rank whose death lost a call, and all ranks raise the same error, whenever their own thread detects the death. Nothing
waits for that: after a report that names no death the cpu polls once for dead ranks. The engine detects a death by its
own means: the meeting is its first call without the rank, which in mode "raise" would raise the loss; it does so only
if the error has not been raised here before. A call that is refused here is still made, with a signature that matches
no other, so that peers are notified at once."""

from __future__ import annotations

import logging
from typing import Any

import torch

from ...engine.membership.members import TooShort
from ...errors import (
    AbortedError,
    CommTimeoutError,
    EpeeError,
    InvalidArgument,
    MismatchError,
    PeerError,
    ProtocolError,
    RankFailedError,
    ResourceError,
    UnsupportedError,
    context,
    expected,
    ignored,
    named,
)
from ...gpu.report import ABORTED, BAD_ROW, MISMATCH, PEER_DEAD, PEER_GAVE_UP, TIMEOUT, KernelReport
from ..work import DONE, Ended, is_loss
from . import meeting, moves
from .calls import NotServed, Prepared, prepare
from .interface import NOT_SERVED
from .machine import Collectives, most_sms
from .mask.counts import Count
from .mask.losses import ranks_of
from .mask.moves import masked
from .mask.work import MaskedWork
from .meeting import MeetingHalf
from .moves import Move
from .params import OPS
from .pool import MemoryPool
from .work import BarrierWork, DeviceWork, note_use

_WAITS = {
    1: "its last call",
    2: "packets",
    3: "a chunk",
    4: "a credit",
    5: "its call",
    6: "its call",
    7: "its own blocks",
    8: "its own copies",
}
_LOST = "the output is lost"


def name_of(report: KernelReport) -> str:
    """Return the operation that a report is about."""
    return OPS[report.op - 1] if 1 <= report.op <= len(OPS) else f"op {report.op}"


def may_be_of_dead(report: KernelReport) -> bool:
    """Whether a death that no kernel was notified of may be the cause of a report."""
    return report.code in (TIMEOUT, PEER_GAVE_UP)


def error_of(report: KernelReport, rank: int, fate: str = _LOST) -> EpeeError:
    """Return a report as an exception, which also states the fate of the output."""
    code, tag, _, peer, _, _, where = report
    head = context(name_of(report), rank=rank, peer=peer, seq=tag)
    what = f"{_WAITS.get(where, f'wait {where}')} of rank {peer}"
    if code == TIMEOUT:
        return CommTimeoutError(f"{head}: {what} did not arrive within the time-out; {fate}", [peer])
    if code == PEER_DEAD:
        return failed(report, rank, peer, fate)
    if code == PEER_GAVE_UP:
        return CommTimeoutError(
            f"{head}: rank {peer} has lost this call or an earlier one, so the ranks may be at different steps; "
            f"{fate}; agree on the step to repeat",
            [peer],
        )
    if code == MISMATCH:
        return MismatchError(
            f"{head}: ranks disagree: rank {peer} makes another call, or one on other sizes, another dtype, reduction "
            f"or root; all ranks must make the same calls in the same order; {fate}"
        )
    if code == BAD_ROW:
        return ProtocolError(
            f"{head}: rank {peer} names rows outside of its memory pool; they were not read; report this as a bug "
            "of epee, unless something else writes into that memory"
        )
    if code == ABORTED:
        return AbortedError(f"{head}: the call was aborted, waiting for {what}")
    return ProtocolError(f"{head}: the kernel reports code {code} about {what}")


def failed(report: KernelReport, rank: int, peer: int, fate: str = _LOST) -> RankFailedError:
    """Return the error of a call that rank `peer` has died in."""
    head = context(name_of(report), rank=rank, peer=peer, seq=report.tag)
    return RankFailedError(
        f"{head}: rank {peer} is dead (its process ended) and had a part in this call; {fate}; the next call on CUDA "
        "tensors runs without it",
        [peer],
        name_of(report),
        report.tag,
        cause="process ended",
    )


logger = logging.getLogger("epee")

_REFUSED = 1 << 62  # signature (`signature`) of no call
_Before = tuple[set[int], Count | None]  # the ranks that took part at the call, the word for those in its result


class DeviceHalf(MeetingHalf):
    """Collectives of one group on CUDA tensors. One thread at a time.

    Args:
        engine: of the group.
        rank: this process's.
        staging_bytes: determines the size of the memory; equal on all ranks.
        policy: of the group.
    """

    # --- calls

    def run(self, method: str, args: Any, kwargs: dict[str, Any]) -> Any:
        """Make a call, or return `NOT_SERVED`.

        Raises:
            InvalidArgument: an argument is refused. InvalidState: a graph is being recorded, and the call would need a
                meeting with the other ranks, or to load kernels. RankFailedError, CommTimeoutError, MismatchError: an
                earlier call was lost; this one is not made. Else as a call of the engine, if the ranks meet.
        """
        if not self._off and self._epoch < 0 and not meeting.has_gpu():
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

    def barrier(self, opts: Any) -> Any:
        """Let the current streams of all ranks' GPUs meet, and the cpu wait for that; or return `NOT_SERVED`.

        What the streams were given before is done on all GPUs before anything behind the barrier begins on one. While a
        graph is recorded only the kernel is, and each replay is a barrier of the streams.

        Args:
            opts: torch's; with `asyncOp` the cpu waits in `wait` of the returned work.

        Raises:
            As `run`. CommTimeoutError: the streams have not met within twice the group's timeout.
        """
        if not self._off and self._epoch < 0 and not meeting.has_gpu():
            self._off = "this process has no GPU"
        if self._off:
            return NOT_SERVED
        given = None if opts is None else opts.device
        device = given if given is not None and given.index is not None else meeting.current_device()
        with self._lock:
            try:
                if self._run("barrier", (device,), {}, None, False) is NOT_SERVED:
                    return NOT_SERVED
            except expected(PeerError) as exc:
                if self._engine.reports_losses and is_loss(exc):
                    return Ended(self._engine, exc)
                raise
            machine = self._machine
            assert machine is not None
            platform = machine.platform
            is_capturing, stream = platform.is_capturing(), platform.stream()
        work = BarrierWork(self.check, stream, platform.device, 2 * self._kernel_timeout_s)
        if opts is None or opts.asyncOp:
            return work
        if not is_capturing:
            work.wait()
        return DONE

    def _run_here(
        self, method: str, args: Any, kwargs: dict[str, Any], side: torch.cuda.Stream | None, is_async: bool
    ) -> Any:
        """Make a call on the current stream, which is `side` if that is the group's own."""
        again = self._again.get(is_async)
        is_quiet = not kwargs and self._epoch == self._engine.members.epoch and not self._is_lost
        if again is not None and is_quiet:
            before = self._before(is_async)
            stream = again.run(method, args, self._kernel_timeout_s, None if before is None else before[1])
            if stream is not None:
                self._note(None if self._policy.is_masked else self._members)
                return self._work(stream, is_async, args[0], side, before)
        elif again is not None:
            again.skip()
        try:
            return self._run(method, args, kwargs, side, is_async)
        except expected(PeerError) as exc:
            if self._engine.reports_losses and is_loss(exc):
                return Ended(self._engine, exc)
            raise

    def _note(self, contributors: tuple[int, ...] | None) -> None:
        self._last_seq, self._in = self._engine.seq, contributors
        if self._losses is not None and self._machine is not None:
            self._losses.look(self._machine)

    def _before(self, is_async: bool) -> _Before | None:
        """Return what the work of a call needs to report its ranks; None if it reports none."""
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
        except expected(Exception) as exc:  # no memory for a copy, a word of torch's: the peers must hear of it
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
        machine.timeout_s = self._kernel_timeout_s
        machine.most_sms = most_sms(machine, is_async)
        again: list[Move] = []
        if refused is None and call is not None:
            try:
                again = [call.again(move) if machine.is_tried(move) else move for move in call.moves]
            except expected(RuntimeError) as exc:  # no memory for a copy
                refused = exc
        if refused is not None or call is None:
            self._is_lost = True
            machine.run(moves.barrier(machine.config.num_ranks)._replace(signature=_REFUSED))
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
        """Return a call in the form of the kernels."""
        size = self._engine.members.group_size
        least = min(size, self._engine.mask.span) if self._policy.counts_present else size
        entries = max(least, min(size, self._engine.mask.told))
        try:
            call = prepare(method, self._rank, entries, args, kwargs)
        except expected(InvalidArgument) as error:
            shorter = range(least - 1, self._rank, -1) if self._policy.counts_present else ()
            for number in (*range(least, size + 1), *shorter):  # the lists may be made with or without a recent loss
                with ignored(InvalidArgument):
                    call, entries = prepare(method, self._rank, number, args, kwargs), number
                    break
            else:
                raise
            if entries < least:
                self._await_lost(error, entries)
        if self._policy.is_masked:
            call.moves = [masked(move, self._rank, size, entries) for move in call.moves]
        return call

    def _await_lost(self, error: InvalidArgument, num_entries: int) -> None:
        """Wait until the members are lost for which the lists of a call have no entry, at most the group's timeout.

        Raises:
            InvalidArgument: they live.
        """
        members, mask = self._engine.members, self._engine.mask
        beyond = [rank for rank in members.members if rank >= num_entries]
        if not mask.has_lost(beyond, members.epoch):
            self._engine.membership.await_lost(TooShort(error, beyond, members.epoch), self._engine.timeout_s)

    def _queue(self, machine: Collectives, made: list[Move], again: list[Move], count: Count | None) -> int:
        """Queue a call on the current stream of the group's GPU; returns the stream.

        Args:
            machine: of the group.
            made: the moves; `count` is written for the last one: a rank in it is in all of them.
            again: the same moves in the form that may be repeated.
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
            reports = machine.device.take_reports()
            if not reports or self._is_lost:
                return  # another thread has raised it; the effects of a loss are reported by it
            self._is_lost = True
            error = self._error_of(machine, reports[0])
            for report in reports[1:]:
                logger.info("after the failure that is raised now: %s", error_of(report, self._rank))
            raise error

    def _error_of(self, machine: Collectives, report: KernelReport) -> EpeeError:
        error = self._cause_of(machine, report)
        named(error, self._engine.peer_regions.label.text)
        return error

    def _cause_of(self, machine: Collectives, report: KernelReport) -> EpeeError:
        error = error_of(report, self._rank)
        if may_be_of_dead(report):
            if self._notifier is not None:
                self._notifier.look()
            if dead := self._dead(machine):
                error = failed(report, self._rank, dead[0])
        if isinstance(error, RankFailedError):
            self._told |= {*error.ranks, *self._dead(machine)}
        return error

    def _dead(self, machine: Collectives) -> list[int]:
        return [rank for rank in self._members if rank != self._rank and machine.device.is_marked(rank)]

    def contributors(self) -> tuple[int, ...] | None:
        """Return the ranks in the result of the last call, None if the engine made that; waits for the GPU."""
        machine = self._machine
        if machine is None or self._last_seq != self._engine.seq:
            return None
        if self._in is None:
            bits = machine.contributors()
        if self._is_lost or machine.device.has_reports:
            return ()
        return ranks_of(bits) if self._in is None else self._in

    def lost(self) -> tuple[int, ...]:
        """Return the ranks that calls here have left out since the last meeting."""
        if self._losses is None or self._machine is None:
            return ()
        self._losses.look(self._machine)
        return self._losses.lost()

    # --- pools

    def memory_pool(self, nbytes: int) -> MemoryPool:
        """Return this rank's pool, created if there is none; all members call it. See `ProcessGroup.memory_pool`."""
        if self._policy.is_masked:
            raise UnsupportedError('memory_pool: groups with fault_mode="mask" read no tensors of peers; use "raise"')
        with self._lock:
            refusal = self._refusal_of_pool(nbytes)  # raised after the meeting, in which the peers are notified
            if not self._off and not meeting.has_gpu():
                self._off = "this process has no GPU"
            self._pool_bytes, self._why_no_pool = 0 if refusal else nbytes, refusal
            self._epoch = -1
            if not self._off:
                self.check()
                self._meet(self._device or meeting.current_device(), "memory_pool")
            if refusal is not None:
                raise refusal
            machine = self._machine
            if self._off or machine is None:
                raise UnsupportedError(f"memory_pool: collectives on CUDA tensors go through CPU memory: {self._off}")
            if self._poor:
                raise ResourceError(
                    f"memory_pool: rank(s) {self._poor} could not make one; see the errors there"
                ) from self._why_no_pool
            assert machine.pool is not None
            return machine.pool

    def _refusal_of_pool(self, nbytes: int) -> InvalidArgument | None:
        """Return the error for an invalid pool size, or None."""
        pool = None if self._machine is None else self._machine.pool
        if nbytes < 1:
            return InvalidArgument(f"nbytes must be 1 or more, got {nbytes}")
        if pool is not None and nbytes > pool.nbytes:
            return InvalidArgument(f"the group's pool has {pool.nbytes} bytes and does not grow, got {nbytes}")
        return None

    # --- end

    def close(self, is_aborted: bool) -> None:
        """Close. Waits for the unfinished kernels, or ends their waits if `is_aborted`. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._off = self._off or "the group is closed"
        self._release(is_aborted)


def _is_asynchronous(args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a call returns before its results may be used: a call without options does not wait."""
    opts = kwargs.get("opts") if "opts" in kwargs else None
    if opts is None:
        opts = args[-1] if args and hasattr(args[-1], "asyncOp") else None
    return opts is None or bool(opts.asyncOp)


def _device_in(args: Any) -> torch.device | None:
    if isinstance(args, torch.device):
        return args
    if isinstance(args, torch.Tensor):
        return args.device if args.is_cuda else None
    if isinstance(args, (list, tuple)):
        return next((found for item in args if (found := _device_in(item)) is not None), None)
    return None
