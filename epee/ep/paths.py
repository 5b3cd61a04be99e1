"""What a buffer's device and mode decide: the path that moves its rows, what a loss means, what it gives back."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist

from .. import env
from ..errors import InvalidArgument, UnsupportedError
from ..view.group import GroupInView, check_policy
from ..view.process.detector import DeathWatch
from .checks import check_timeout
from .config import PATHS, BufferConfig
from .control.bootstrap import Born
from .control.inbox import Exchange, inbox_layout
from .control.messages import ControlPlane
from .gpu.platform import CudaPlatform, Platform
from .latency.cpu import LatencyCpuPath
from .latency.gpu_path import LatencyCudaPath
from .latency.wire import region_layout
from .membership.birth import Begun, begin
from .membership.epochs import Survivor
from .membership.lane import BufferLane, retire
from .membership.memory import MAX_BLOB_BYTES
from .membership.synced import SyncedLane
from .throughput.cpu import CpuPath
from .throughput.gpu_path import CudaPath
from .turns import Closing

Path = CpuPath | CudaPath | LatencyCpuPath | LatencyCudaPath


def platform_of(device: torch.device | str | None) -> Platform | None:
    """Return the GPU that moves the rows, None for the CPU."""
    if device is None or torch.device(device).type == "cpu":
        return None
    if torch.device(device).type not in PATHS:
        raise UnsupportedError(f"device must be the CPU or a CUDA device, got {device}")
    if not torch.cuda.is_available():
        raise UnsupportedError(f"device is {device}, but torch sees no GPU here; leave it out to use CPU tensors")
    return CudaPlatform(torch.device(device))


def make_path(
    control: ControlPlane,
    buffer_id: int,
    platform: Platform | None,
    watch: DeathWatch,
    closing: Closing,
    options: tuple[float, bool],
) -> Path:
    """Return the path of a buffer's device and mode; `options` as `settings` returns them.

    It gets `closing`, not the buffer: it must not keep a dropped buffer alive.
    """
    config, rank = control.config, control.rank
    timeout_s, poison = options
    if config.is_latency and platform is None:
        deadline = time.monotonic() + timeout_s
        return LatencyCpuPath(config, rank, control, watch, closing.check, buffer_id, poison, deadline)
    if platform is None:
        return CpuPath(config, rank, control, buffer_id, poison)
    is_closing = lambda: closing.asked  # noqa: E731 - it must not keep the buffer
    path: CudaPath | LatencyCudaPath
    if config.is_latency:
        path = LatencyCudaPath(config, rank, control, buffer_id, platform, watch, is_closing, timeout_s)
    else:
        path = CudaPath(config, rank, control, buffer_id, platform, watch, is_closing, timeout_s)
    path.set_poison(poison)
    return path


def begin_lane(
    group: dist.ProcessGroup,
    seat: GroupInView | None,
    exchange: Exchange,
    watch: DeathWatch,
    timeout_s: float,
    interrupt: Callable[[], None],
) -> None:
    """Give `exchange` its membership; collective, and raises, as `birth.begin`. `watch` is that of the calls."""
    config, rank = exchange.config, exchange.rank

    def enter(begun: Begun) -> Survivor | SyncedLane:
        lane: Survivor | SyncedLane
        if config.is_synced:
            beside = MAX_BLOB_BYTES + 8 if config.is_cuda else region_layout(config).nbytes
            nbytes = inbox_layout(config).nbytes + beside
            lane = SyncedLane(config, rank, begun, exchange, timeout_s, interrupt, watch, nbytes)
        else:
            lane = Survivor(config, rank, begun, exchange, timeout_s, interrupt)
        exchange.membership = lane
        return lane

    try:
        begun = begin(group, seat, config, timeout_s, enter)
    except BaseException:
        watch.close()
        exchange.release()
        retire()
        raise
    if not isinstance(exchange.membership, BufferLane):  # a replacement: it comes in with its first call, or sync
        enter(begun)


def return_all(path: Path, born: Born, exchange: Exchange) -> None:
    """Give back all that a buffer has."""
    path.close()
    born.close()
    exchange.release()
    exchange.membership.close()


def with_policy(
    config: BufferConfig, seat: GroupInView | None, fault_mode: str | None, on_stall: str | None
) -> BufferConfig:
    """Return `config` with what a loss is and what becomes of who is silent: the group's, or else the arguments.

    Raises:
        InvalidArgument: they are neither valid nor, on a group of the backend "epee", the group's.
    """
    given = {"fault_mode": fault_mode, "on_stall": on_stall}
    wrong = {name: value for name, value in given.items() if value is not None}
    if not config.is_lane or config.is_synced:
        if wrong and config.num_ranks > 1:
            raise InvalidArgument(f"{', '.join(wrong)}: only for CPU tensors in throughput mode so far; leave it out")
        check_policy(fault_mode, on_stall)
        return config
    if seat is None:
        mode, policy = check_policy(fault_mode, on_stall)
        return replace(config, fault_mode=mode, on_stall=policy)
    theirs = {"fault_mode": "raise" if seat.raises else "mask", "on_stall": seat.on_stall}
    for name, value in wrong.items():
        if value != theirs[name]:
            raise InvalidArgument(f"{name} must be the group's, {theirs[name]!r}, got {value!r}; leave it out")
    return replace(config, fault_mode=theirs["fault_mode"], on_stall=theirs["on_stall"])


def settings(config: BufferConfig, max_recv_rows: int | None, timeout: float | None) -> tuple[float, bool]:
    """Check this rank's arguments and environment; return (default time-out in seconds, whether to poison)."""
    if max_recv_rows == 0:
        raise InvalidArgument("max_recv_rows must be None or an int of at least 1, got 0")
    config.check()
    return check_timeout(timeout, env.get_float("EPEE_TIMEOUT_S")), env.get_bool("EPEE_POISON")
