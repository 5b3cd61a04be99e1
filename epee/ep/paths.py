"""The base of the objects that move the rows of a buffer (`Path`), their construction and their release."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch

from ..errors import AbortedError, CommTimeoutError, InvalidArgument, PeerError, UnsupportedError
from ..gpu.device import GpuDevice
from ..gpu.platform import CudaPlatform, Platform
from ..gpu.turns import Closing
from ..view.group import GroupInView, check_policy
from ..view.process.detector import DeathWatch
from ..view.runtime import has_groups
from .config import PATHS, BufferConfig
from .members.header import OP_BARRIER, OPS_OF_CPUS
from .members.rows import RowExchange


class Path:
    """Moves the rows of a buffer: one class for each kind of buffer and device. Most methods here are those for CPUs.

    Attributes:
        barrier_op: the kind of call that a barrier is.
        exchange: of the buffer's rows.
    """

    barrier_op = OP_BARRIER
    exchange: Any

    @property
    def is_recorded(self) -> bool:
        """Whether a CUDA graph has recorded calls."""
        return False

    @property
    def num_copied(self) -> int:
        """Results that were copied out because no slot was free."""
        return 0

    @property
    def max_num_sms(self) -> int:
        """Multiprocessors of this rank's GPU; 0 on CPUs."""
        return 0

    @property
    def nbytes(self) -> int:
        """Bytes that this rank lends to others, its outbox not counted; pages never touched cost nothing."""
        raise NotImplementedError

    @property
    def takes_replacements(self) -> bool:
        """Whether a process that replaces a lost rank is admitted."""
        return self.exchange.membership.takes_replacements

    def num_announced(self, op: int) -> int:
        """Return how many calls of this kind have been announced to the peers."""
        return self.exchange.seq

    def is_told(self, error: Exception) -> bool:
        """Return whether the peers know about `error`, or cannot be notified: they caused it."""
        return isinstance(error, (CommTimeoutError, PeerError, AbortedError))

    def refuse(self, op: int, error: Exception, deadline: float) -> None:
        """Take part in the peers' call as the rank that cannot make it."""
        self.exchange.refuse(op, error, deadline)

    def barrier(self, deadline: float) -> None:
        """Let the ranks meet, on CPUs their threads; raises as `Buffer.barrier`."""
        self.exchange.all_gather_bytes(b"", deadline, OP_BARRIER)

    def barrier_again(self, timeout_s: float) -> bool:
        """Let the ranks meet if the fast path is allowed; otherwise return False without side effects.

        A barrier of CPU threads always makes its checks.
        """
        return False

    def sync(self, active_ranks: torch.Tensor | None, deadline: float) -> torch.Tensor:
        """Agree on the members: `[num_ranks]` int32 on the CPU, and into `active_ranks`."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise errors of asynchronous work."""

    def join(self) -> None:
        """Let the current stream wait for all work on other streams."""

    def abort(self) -> None:
        """End waits that do not check whether the buffer is to be closed, from any thread."""

    def close(self) -> None:
        """Free all memory. Idempotent."""
        raise NotImplementedError


class PathOverHosts(Path):
    """Moves the rows of a buffer over several hosts."""

    takes_replacements = False

    def come_in(self, deadline: float) -> None:
        """Meet the others for the first time, as a process that they have admitted."""
        raise NotImplementedError


class GpuCore(Protocol):
    """The object that makes calls on a GPU.

    Attributes:
        device: the GPU.
        num_calls: announced to the peers there.
    """

    device: GpuDevice
    num_calls: int

    def join(self) -> None:
        """Let the current stream wait for all work on other streams."""


class GpuPath(Path):
    """Moves the rows of a buffer on GPUs; its calls may be cached (`attempt.CallsAgain`).

    Args:
        platform: the GPU.

    Attributes:
        core: the object that makes the calls.
    """

    core: GpuCore

    def __init__(self, platform: Platform) -> None:
        self._platform = platform

    @property
    def is_recorded(self) -> bool:
        """Whether a CUDA graph has recorded calls."""
        return self.core.device.is_recorded

    @property
    def max_num_sms(self) -> int:
        """Multiprocessors of the GPU."""
        return self._platform.limits.num_sms

    def num_announced(self, op: int) -> int:
        """Return how many calls of this kind have been announced to the peers: on the CPU side, or on the GPU."""
        return self.exchange.seq if op in OPS_OF_CPUS else self.core.num_calls

    def blame(self, op: int, error: Exception) -> None:
        """Raise the cause of a call's failure, if that is not `error`."""
        raise NotImplementedError

    def join(self) -> None:
        """Make the current stream wait for all work of this buffer on other streams."""
        self.core.join()

    def abort(self) -> None:
        """End the waits of the kernels in flight, and a call of the CPUs, from any thread."""
        self.core.device.abort()
        self.exchange.abort()


class Making(NamedTuple):
    """The parts of a path.

    Attributes:
        config: of the buffer.
        rank: this rank.
        exchange: of its rows.
        buffer_id: goes into handles.
        watch: knows which ranks are dead.
        closing: whether another thread wants to close the buffer; not the buffer, which it must not keep alive.
        islands: the ranks of each host, ascending; empty where there is one host.
        address: of this rank, for those of other hosts; "" where there is one host.
    """

    config: BufferConfig
    rank: int
    exchange: Any
    buffer_id: int
    watch: DeathWatch
    closing: Closing
    islands: tuple[tuple[int, ...], ...] = ()
    address: str = ""


def platform_of(device: torch.device | str | None) -> Platform | None:
    """Return the GPU that moves the rows, None for the CPU."""
    if device is None or torch.device(device).type == "cpu":
        return None
    if torch.device(device).type not in PATHS:
        raise UnsupportedError(f"device must be the CPU or a CUDA device, got {device}")
    if not torch.cuda.is_available():
        raise UnsupportedError(f"device is {device}, but torch sees no GPU here; leave it out to use CPU tensors")
    return CudaPlatform(torch.device(device))


def return_all(path: Path, watch: DeathWatch, exchange: RowExchange, is_dropped: bool = False) -> None:
    """Free everything that a buffer has.

    Args:
        is_dropped: the buffer was not closed; the process may be about to end. Its rank has failed for the peers,
            unless the program has destroyed its groups.
    """
    exchange.is_dropped = is_dropped and has_groups()
    path.close()
    watch.close()
    exchange.release()
    exchange.membership.close()


def with_policy(
    config: BufferConfig, job_handle: GroupInView, fault_mode: str | None, on_stall: str | None
) -> BufferConfig:
    """Return `config` with the policies for losses and silent ranks: the group's, or else the arguments.

    Raises:
        InvalidArgument: they are neither valid nor, on a group of the backend "epee", the group's.
    """
    given = {"fault_mode": fault_mode, "on_stall": on_stall}
    wrong = {name: value for name, value in given.items() if value is not None}
    if config.is_synced:
        if wrong and config.num_ranks > 1:
            raise InvalidArgument(f"{', '.join(wrong)}: only for `Buffer` on CPUs so far; leave it out")
        check_policy(fault_mode, on_stall)
        return config
    if not job_handle.slots:
        mode, policy = check_policy(fault_mode, on_stall)
        return replace(config, fault_mode=mode, on_stall=policy)
    theirs = {"fault_mode": "raise" if job_handle.raises else "mask", "on_stall": job_handle.on_stall}
    for name, value in wrong.items():
        if value != theirs[name]:
            raise InvalidArgument(f"{name} must be the group's, {theirs[name]!r}, got {value!r}; leave it out")
    return replace(config, fault_mode=theirs["fault_mode"], on_stall=theirs["on_stall"])
