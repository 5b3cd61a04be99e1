"""Dispatch and combine for CUDA tensors of ranks on several hosts: `CudaPath` with other kernels and another world.

Data path: `gpu/hosts.py` (kernels, slots) and `epee/gpu/island.py` (proxies). Ranks of one host are an island: their
GPUs map each other. The CPU side is an engine over hosts of mode "raise", which serves construction, `barrier` and
`all_gather_bytes`; no call that moves rows waits for it.

Protocol: as on one host kernels count the calls, and a call that fails before its first kernel takes part by a refusal.
A refused dispatch moves nothing, on any rank, and the buffer goes on. A refused combine, and every call that fails
after it may have moved rows, ends the streams between hosts: from then on each call raises, on all ranks.

Losses. Kernels end their waits by words, and name the rank:

    a rank of this host       its pidfd (`DeathNotifier`)
    a proxy of this host      ABORT of its page
    a rank of another host,   LOST of a page: the connection of their proxies has ended, which the proxy of a dead rank,
    or its proxy or network   and the kernel of the system of a dead proxy, close

A rank that has closed its buffer is found when a call begins; a call that waits for it already ends by its time-out.

Losses stay true, and no call begins once one is (`face_death`): the buffer says so, and is to be made anew.

A crash leaves nothing that the survivors use: memory that they have mapped stays until they close.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from ...engine.outbox import has_left
from ...errors import (
    AbortedError,
    CommTimeoutError,
    EpeeError,
    InvalidArgument,
    MismatchError,
    PeerError,
    RankFailedError,
    UnsupportedError,
    context,
    expected,
)
from ...gpu.death_notifier import DeathNotifier
from ...gpu.hosts_report import REMEDY
from ...gpu.island import Secret
from ...gpu.payload import FP8
from ...gpu.report import REFUSED_INVALID_ARGUMENT
from ...gpu.shapes import ThroughputConfig
from ..checks import CombineCall, DispatchCall
from ..config import BufferConfig
from ..handle import Combined, Dispatched
from ..members.header import OP_BARRIER, OP_COMBINE, OP_GATHER, OPS_OF_CPUS
from ..paths import Making
from ..streams import CallStream, RunOptions
from .gpu.combine import CheckedCombine
from .gpu.dispatch import plan_of
from .gpu.hosts import HostsCombinePlan, HostsDispatchPlan, HostsHandle, HostsMachine
from .gpu.types import DispatchOptions
from .gpu_path import CudaPath, seconds_to
from .order import RANKS_THEN_BIAS

_WHERE = "a Buffer on GPUs over several hosts"
_PAUSE_S = 2e-5


def unsupported(what: str, value: object, remedy: str) -> UnsupportedError:
    """Return the error of what is not built for GPUs of several hosts."""
    return UnsupportedError(f"{what} of {_WHERE} so far, got {value}; {remedy}")


def check_over_hosts(config: BufferConfig) -> None:
    """Raise `UnsupportedError` for a buffer that is not built for GPUs of several hosts."""
    if config.dtype != torch.bfloat16:
        raise unsupported("dtype must be torch.bfloat16", config.dtype, "or make it in a group of one host")
    if config.wide_partials:
        raise unsupported("wide_partials must be False", True, "leave it out, or use CPU tensors")
    if config.room_bytes:
        raise unsupported(
            "of_bytes, and with it the drop-ins for DeepEP and Mooncake, is no part",
            f"{config.room_bytes} bytes",
            "use epee.Buffer, CPU tensors, or a group of one host's ranks (dist.new_group)",
        )


def _check_combine(call: CombineCall) -> None:
    """Raise `UnsupportedError` for a combine that is not built for GPUs of several hosts."""
    if call.topk_weights is not None:
        raise unsupported("topk_weights of combine must be None", "a tensor", "leave it out, or use CPU tensors")
    if call.order is not RANKS_THEN_BIAS:
        raise unsupported("a combine adds up by host, and no other order is part", call.order, "give none")
    if call.y.dtype != torch.bfloat16:
        raise unsupported("y must be bfloat16", call.y.dtype, "call .to(torch.bfloat16)")
    if any(bias.dtype != torch.bfloat16 for bias in call.bias):
        raise unsupported("bias must be bfloat16", [bias.dtype for bias in call.bias], "call .to(torch.bfloat16)")


class HostsEpoch:
    """The one epoch of a buffer over hosts, and the losses in it; as `gpu.epochs.AnyEpochs`.

    Args:
        making: of the path.
        machine: kernels, memory and proxies.

    Attributes:
        notifier: notifies kernels of deaths, by position in the island.
    """

    lost: tuple[int, ...] = ()

    def __init__(self, making: Making, machine: HostsMachine) -> None:
        self._engine = making.exchange.engine
        self._rank, self._watch, self._closing = making.rank, making.watch, making.closing
        self._machine, self._island, self._here = machine, machine.island, machine.config.island
        device = machine.device
        self.notifier = DeathNotifier(device.mark_dead, device.waiting, f"epee-hosts-{self._rank}")
        machine.look = self.notifier.look

    def begin(self, deadline: float) -> None:
        """Receive deaths from now on."""
        others = {rank: process for rank, process in self._island.processes.items() if rank != self._rank}
        for rank, process in others.items():
            self._watch.watch(rank, *process)
        self.notifier.start({self._here.index(rank): process for rank, process in others.items()})

    def close(self) -> None:
        """Nothing to do: the path stops the notifier."""

    def dead(self) -> tuple[int, ...]:
        """Return the ranks of this host that are dead."""
        return tuple(sorted({*self._watch.dead(), *(self._here[position] for position in self.notifier.told)}))

    def face_death(self, op: str, is_capturing: bool, needs_all: bool = True) -> None:
        """Refuse a call once a rank, or a proxy of this host, is lost.

        A combine may follow the end of a rank in order: a rank that no row goes to ends its combine before ranks of
        other hosts have begun theirs, and its proxy has sent what they need.
        """
        if not is_capturing:
            self._raise_loss(op, None)
            if needs_all and op != "combine":
                self._require_open(op, None)

    def blame_death(self, op: str, error: EpeeError, is_capturing: bool) -> None:
        """Raise that a rank is lost if that is the cause of `error`; others stay as they are."""
        has_cause = isinstance(error, (InvalidArgument, MismatchError, UnsupportedError))
        if not (has_cause or is_capturing or self._closing.asked):
            self._raise_loss(op, error)
            self._require_open(op, error)

    def _require_open(self, op: str, error: EpeeError | None) -> None:
        """Raise if a rank has closed the buffer: its engine has told so."""
        try:
            left = [rank for rank, words in enumerate(self._engine.peer_regions.words) if has_left(words)]
        except expected(ValueError):
            self._closing.check()  # another thread closes the buffer, and with it the engine's memory
            raise
        for rank in left:
            if rank != self._rank:
                seq = self._machine.num_calls
                where = context(op, rank=self._rank, peer=rank, seq=seq)
                told = f"{where}: rank {rank} has closed the buffer, so no call of it can end; {REMEDY}"
                raise PeerError(told, [rank], op, seq, cause="it has closed the buffer") from error

    def _raise_loss(self, op: str, error: EpeeError | None) -> None:
        """Raise if ranks are lost, and name all of them: who has left for a loss may be lost for others."""
        dead, ended = self.dead(), self._island.ended()
        causes = dict.fromkeys(self._island.lost(), "on another host: its process, its proxy or the network")
        causes |= {rank: f"its proxy ({why})" for rank, why in ended.items()}
        causes |= dict.fromkeys(dead, "its process")
        if causes:
            ranks, seq = sorted(causes), self._machine.num_calls
            where = context(op, rank=self._rank, peer=ranks[0], seq=seq)
            names = "; ".join(f"rank {rank}, {causes[rank]}" for rank in ranks)
            kind = RankFailedError if dead else PeerError
            raise kind(f"{where}: lost, as it has ended: {names}; {REMEDY}", ranks, op, seq, cause=names) from error

    def interrupt(self) -> None:
        """End the kernels' waits, for which the CPU waits, if another thread wants to close the buffer."""
        if self._closing.asked:
            self._machine.device.abort()


class CudaPathOverHosts(CudaPath):
    """The GPU side of a buffer over several hosts. Construction is collective; as of `CudaPath`."""

    barrier_op = OP_BARRIER
    takes_replacements = False
    _unsent: Exception | None = None
    _plan_kinds = HostsDispatchPlan, HostsCombinePlan
    _handle_kind = HostsHandle
    machine: HostsMachine

    def _make_machine(self, config: ThroughputConfig, deadline: float) -> HostsMachine:
        engine, making = self.exchange.engine, self._making
        membership = engine.membership
        secret = Secret(membership.token, membership.job.directory.job_id)
        try:
            return HostsMachine(
                self._platform, config, self._all_gather, secret, making.address, self._timeout, self._closing.check
            )
        except expected(CommTimeoutError, PeerError, AbortedError):
            raise
        except expected(Exception) as error:
            self.exchange.refuse(OP_GATHER, error, deadline)
            raise

    def _make_epochs(self) -> HostsEpoch:
        return HostsEpoch(self._making, self.machine)

    def _leave(self) -> None:
        self.exchange.release()

    def _all_gather(self, data: bytes) -> list[bytes]:
        return self.exchange.all_gather_bytes(data, time.monotonic() + self._timeout)

    def quiet_stream(self) -> int | None:
        """Return None: no call is cached."""
        return None

    def of_sizes(self, config: BufferConfig, buffer_id: int) -> CudaPath:
        """Raise: the streams are made for one shape."""
        raise unsupported("of_sizes is no part", f"hidden={config.hidden}", "make a buffer for each shape")

    def dispatch(self, call: DispatchCall, deadline: float, run_on: CallStream, run: RunOptions) -> Dispatched:
        """Run one dispatch; raises as `Buffer.dispatch`."""
        if call.layout != "rank":
            raise unsupported("layout must be 'rank'", repr(call.layout), "or use CPU tensors")
        if call.mask is not None:
            raise unsupported("topk_idx must be the routing", "is_token_in_rank", "give topk_idx, or use CPU tensors")
        if call.capacity is not None:
            raise unsupported("capacity must be None", call.capacity, "leave it out, or use CPU tensors")
        if call.payload.dtype not in (torch.bfloat16, FP8):
            raise unsupported("x must be bfloat16 or an FP8 pair", call.payload.dtype, "call .to(torch.bfloat16)")
        return super().dispatch(call, deadline, run_on, run)

    def combine(self, call: CombineCall, deadline: float, run_on: CallStream, run: RunOptions) -> Combined:
        """Run one combine; raises as `Buffer.combine`."""
        try:
            _check_combine(call)
        except expected(UnsupportedError) as error:
            self._unsent = error
            raise
        return super().combine(call, deadline, run_on, run)

    def is_told(self, error: Exception) -> bool:
        """As `CudaPath.is_told`; a combine that is not built is not told: all ranks of a program make the same one, and
        a refusal would end the buffer."""
        is_unsent, self._unsent = error is self._unsent, None  # its frames hold the buffer and tensors of the caller
        return is_unsent or super().is_told(error)

    def barrier_again(self, timeout_s: float) -> bool:
        """Return False: the CPUs meet."""
        return False

    def barrier(self, deadline: float) -> None:
        """Wait for the current stream, then let the CPUs of all ranks meet; raises as `Buffer.barrier`."""
        if self._platform.is_capturing():
            raise unsupported("barrier is no part of a CUDA graph", "a stream that is captured", "call it before")
        self._epochs.face_death("barrier", False)
        try:
            self._drain(deadline)
        except expected(EpeeError) as error:
            self._epochs.blame_death("barrier", error, False)
            raise
        self.exchange.all_gather_bytes(b"", deadline, OP_BARRIER)

    def _drain(self, deadline: float) -> None:
        """Wait for the current stream; raises what its kernels report."""
        platform, start = self._platform, time.monotonic()
        mark = platform.mark(self.machine.begin())
        while not platform.is_done(mark):
            self._closing.check()
            if (now := time.monotonic()) > deadline:
                where = context("barrier", rank=self.rank, seq=self.machine.num_calls, elapsed=now - start)
                raise CommTimeoutError(f"{where}: work on this rank's stream has not ended in time")
            time.sleep(_PAUSE_S)
        self.machine.check()

    def sync(self, active_ranks: torch.Tensor | None, deadline: float) -> torch.Tensor:
        """Raise: there is one epoch."""
        raise unsupported("sync is no part", "a call of it", f"after a loss {REMEDY}")

    def refuse(self, op: int, error: Exception, deadline: float) -> None:
        """As `CudaPath.refuse`; a refused combine ends the buffer on all ranks."""
        if op in OPS_OF_CPUS:
            self.exchange.refuse(op, error, deadline)
        elif not self._platform.is_capturing():
            machine, timeout_s, code = self.machine, seconds_to(deadline), REFUSED_INVALID_ARGUMENT
            stream, config = machine.begin(do_check=False), self.config
            if op == OP_COMBINE:
                checked = CheckedCombine("rank", 1, 0, config.dtype, False, False, False, False, 0, 1, None)
                HostsCombinePlan(self.shape, checked).refuse(code, timeout_s, stream)
            else:
                nothing = torch.empty(0, config.hidden, dtype=config.dtype, device=config.device), None, None
                plan = plan_of(self.shape, None, nothing, None, DispatchOptions(sync=False, num_sms=1), None)
                plan.refuse(nothing, code, timeout_s, stream)

    def abort(self) -> None:
        """End the waits of the kernels in flight, and a call of the CPUs, from any thread."""
        self.core.device.abort()
        engine: Any = self.exchange.engine
        engine.close()
