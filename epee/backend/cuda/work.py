"""The work of a call on the GPUs: its end, as streams and the cpu see it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch

from ...errors import CommTimeoutError, EpeeError, expected
from ...gpu.event import Event
from ...gpu.platform import Platform
from ...torch_private import current_raw_stream
from ...untraced import untraced_methods
from ...values import waiting_time
from ..work import WorkOfGroup

NAP_S = 50e-6


class OwnStream:
    """The stream of a group's asynchronous calls: ordered after the caller's, which continues beside them.

    So a program that waits for a call where it needs its results, as DDP and FSDP do, computes meanwhile. While a graph
    is recorded, and in the emulation, calls are made on the caller's stream.

    Args:
        platform: the GPU.
    """

    def __init__(self, platform: Platform) -> None:
        self._platform = platform
        self._stream: torch.cuda.Stream | None = None

    @contextlib.contextmanager
    def entered(self) -> Iterator[torch.cuda.Stream | None]:
        """Make it the current stream, ordered after the present one; yields it, or None."""
        device = self._platform.device
        if device.type != "cuda" or self._platform.is_capturing():
            yield None
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            yield self._stream


def note_use(tensors: Any, stream: torch.cuda.Stream) -> None:
    """Notify the allocator that a stream uses tensors, in lists of any depth."""
    if isinstance(tensors, torch.Tensor):
        if tensors.is_cuda:
            tensors.record_stream(stream)
    elif isinstance(tensors, (list, tuple)):
        for item in tensors:
            note_use(item, stream)


@untraced_methods
class DeviceWork(WorkOfGroup):
    """A call whose kernels are queued on a stream.

    Errors of kernels are raised at the next entry from the cpu: at a `wait`, or at the next call. They may be of
    another call of the group: calls end in order, and after one was lost none does its work before the ranks have met.

    Args:
        look: raises what kernels have reported.
        stream: raw, that the call is queued on.
        outputs: the tensors that it writes.
        device: the GPU.
        side: torch's object of the stream, if that is the group's own and current.
    """

    def __init__(
        self,
        look: Callable[[], None],
        stream: int,
        outputs: Any,
        device: torch.device,
        side: torch.cuda.Stream | None = None,
    ) -> None:
        super().__init__()
        self._look, self._stream, self._outputs, self._device = look, stream, outputs, device
        self._side = side
        self._event = Event(device, stream) if device.type == "cuda" else Event()  # the emulation's calls are done
        if side is not None:
            self._event.recorded()  # recorded now: a waiter must not wait for later calls
        self._error: EpeeError | None = None
        self._future: Any = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Make the current stream wait for the call. With a timeout above 0 the cpu waits, too.

        Raises:
            CommTimeoutError: the time has passed, the call continues. Else what kernels have reported.
        """
        self._check()
        limit_s = 0.0 if timeout is None else waiting_time(timeout)
        if limit_s > 0:
            deadline = time.monotonic() + limit_s
            while not self._event.query():
                if time.monotonic() > deadline:
                    text = f"wait: the GPU has not ended the call within {timeout}; it goes on"
                    raise CommTimeoutError(text, has_job=True)
                time.sleep(NAP_S)
            self._check()
        self._join()
        return True

    def _await_passed(self, what: str) -> None:
        """Block the cpu until the GPU has passed the call, `what`, of a work that has an engine.

        Raises:
            CommTimeoutError: it has not within twice the group's timeout.
        """
        deadline = time.monotonic() + 2 * self.engine.timeout_s
        while not self.is_completed():
            if time.monotonic() > deadline:
                late = f"the GPU has not ended the {what} within twice the group's time-out"
                raise CommTimeoutError(late, has_job=True)
            time.sleep(NAP_S)

    def _join(self) -> None:
        """Make the current stream wait, if it is another one than the call's."""
        if self._device.type == "cuda" and current_raw_stream(self._device.index) != self._stream:
            self._event.wait()

    def _check(self) -> None:
        try:
            self._look()
        except expected(EpeeError) as exc:
            self._error = exc
            raise

    def is_completed(self) -> bool:
        """True when the GPU has passed the call."""
        return bool(self._event.query())

    def is_success(self) -> bool:
        """True when it has, and no failure has been raised here."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """Return the failure that `wait` has raised."""
        return self._error

    def source_rank(self) -> int:
        """Return -1: no receive."""
        return -1

    _source_rank = source_rank

    def get_future(self) -> Any:
        """Return a future of the output tensors; a user of its value waits on its streams, not on the cpu."""
        if self._future is None:
            future: Any = torch.futures.Future(devices=[self._device] if self._device.type == "cuda" else None)
            if self._side is None:
                self._join()
            with contextlib.nullcontext() if self._side is None else torch.cuda.stream(self._side):
                future.set_result(self._outputs)  # notes events of the current streams; the caller's continues
            self._future = future
        return self._future


class BarrierWork(DeviceWork):
    """A barrier on the ranks' streams: its `wait` blocks the cpu as well.

    Args:
        check: raises what kernels have reported.
        stream, device: as of `DeviceWork`.
        timeout_s: of a `wait` without a timeout.
    """

    def __init__(self, check: Callable[[], None], stream: int, device: torch.device, timeout_s: float) -> None:
        super().__init__(check, stream, [], device)
        self._timeout_s = timeout_s

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block the cpu until all ranks' streams have come to the barrier; the current stream waits for it, too.

        Raises:
            CommTimeoutError: the time has passed; streams go on waiting. Else what kernels have reported.
        """
        return super().wait(timeout or timedelta(seconds=self._timeout_s))
