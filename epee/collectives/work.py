"""What a call on the GPUs returns: its end, as streams and the host see it."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from ..backend.work import _WorkBase
from ..ep.event import Event
from ..errors import CommTimeoutError, EpeeError

NAP_S = 50e-6


class DeviceWork(_WorkBase):  # type: ignore[misc]
    """A call whose kernels are queued on a stream.

    Errors of kernels come when the host looks: at a `wait`, or at the next call. They may be of another call of the
    group: calls end in order, and after one was lost none does its work before the ranks' hosts have met.

    Args:
        look: raises what kernels have reported.
        stream: raw, that the call is queued on.
        outputs: the tensors that it writes.
        device: the GPU.
    """

    def __init__(self, look: Callable[[], None], stream: int, outputs: Any, device: torch.device) -> None:
        super().__init__()
        self._look, self._stream, self._outputs, self._device = look, stream, outputs, device
        self._event = Event(device, stream) if device.type == "cuda" else Event()  # the emulation's calls are done
        self._error: EpeeError | None = None
        self._future: Any = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Make the current stream wait for the call. With a time-out above 0 the host waits, too.

        Raises:
            CommTimeoutError: the time has passed, the call goes on. Else what kernels have reported.
        """
        self._check()
        if timeout is not None and timeout.total_seconds() > 0:
            deadline = time.monotonic() + timeout.total_seconds()
            while not self._event.query():
                if time.monotonic() > deadline:
                    raise CommTimeoutError(f"wait: the GPU has not ended the call within {timeout}; it goes on")
                time.sleep(NAP_S)
            self._check()
        self._join()
        return True

    def _join(self) -> None:
        """Make the current stream wait, if it is another one than the call's."""
        if self._device.type == "cuda" and torch._C._cuda_getCurrentRawStream(self._device.index) != self._stream:
            self._event.wait()

    def _check(self) -> None:
        try:
            self._look()
        except EpeeError as exc:
            self._error = exc
            raise

    def synchronize(self) -> None:
        """Same as `wait()`."""
        self.wait()

    def is_completed(self) -> bool:
        """True when the GPU has come past the call."""
        return bool(self._event.query())

    def is_success(self) -> bool:
        """True when it has, and nobody has been told of a failure here."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """Return the failure that `wait` has raised."""
        return self._error

    def result(self) -> Any:
        """Return the tensors that the call writes."""
        return self._outputs

    def source_rank(self) -> int:
        """Return -1: no receive."""
        return -1

    _source_rank = source_rank

    def get_future(self) -> Any:
        """Return a future of the output tensors; whoever uses its value waits on its streams, not on the host."""
        if self._future is None:
            future: Any = torch.futures.Future(devices=[self._device] if self._device.type == "cuda" else None)
            self._join()
            future.set_result(self._outputs)  # notes events of the current streams
            self._future = future
        return self._future
