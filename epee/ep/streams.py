"""The stream on which a call runs, the event that it waits for first, and the tensors that must live until it is done.

A call runs on the current stream, or with `async_op` on the buffer's own stream after the current one (or, when it is
given, after `previous_event` only). In both cases its event comes after its work. On the CPU there are no streams: a
call runs at once, after the CPU has waited for `previous_event`.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any, NamedTuple

import torch

from ..errors import expected
from ..gpu.event import DONE, Event, check_event, current_stream, recorded_on, wait_on
from ..torch_private import CudaEvent, current_index
from ..torch_private import is_capturing as is_recording


class RunOptions(NamedTuple):
    """The run options of a call; these need not be equal on all ranks.

    Attributes:
        num_sms: multiprocessors of the GPU that the call uses, None for the default; no effect on the CPU.
        async_op: run on the buffer's own stream.
        previous_event: an `Event`, a `torch.cuda.Event` or None: the call waits for it.
        sync: dispatch only: the CPU waits for the counts, so that results have their exact size. On the CPU always.
    """

    num_sms: int | None = None
    async_op: bool = False
    previous_event: object = None
    sync: bool = True


class CallStream:
    """The stream of one call that runs on the CPU, or on a GPU's current stream.

    What is put on the current stream inside of it (`with`) is the call's work.

    Attributes:
        is_own: whether it is the buffer's own stream, so that `keep` has something to do.
    """

    is_own = False

    def __enter__(self) -> CallStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pass

    def keep(self, inputs: Iterable[torch.Tensor | None], results: Iterable[torch.Tensor | None]) -> list[int]:
        """Record what the call reads and what it returns; returns raw streams that will read the results beside its
        own.

        To be called when everything is on the stream.
        """
        del inputs, results
        return []

    def event(self, device: torch.device, stream: int) -> Event:
        """Return the event of the work on the raw `stream`."""
        return Event(device, stream) if device.index is not None else DONE  # of CPUs there is one


CURRENT = CallStream()


class _OwnLane(CallStream):
    is_own = True

    def __init__(self, caller: torch.cuda.Stream, own: torch.cuda.Stream) -> None:
        self._caller, self._own = caller, own
        self._index = own.device_index

    def __enter__(self) -> CallStream:
        # as `torch.cuda.stream`, which takes five times as long: it asks for both streams once more
        self._index = current_index()
        torch.cuda.set_stream(self._own)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        torch.cuda.set_stream(self._caller)
        if self._index != self._own.device_index:
            torch.cuda.set_device(self._index)

    def keep(self, inputs: Iterable[torch.Tensor | None], results: Iterable[torch.Tensor | None]) -> list[int]:
        """Record inputs for the buffer's stream and results for the caller's; returns the caller's raw stream."""
        own, caller = self._own, self._caller
        for tensor in inputs:
            if tensor is not None and tensor.is_cuda:
                tensor.record_stream(own)
        for tensor in results:
            if tensor is not None and tensor.is_cuda:
                tensor.record_stream(caller)
        return [caller.cuda_stream]

    def event(self, device: torch.device, stream: int) -> Event:
        """Return the event of the work on the buffer's stream; recorded now, as the caller will wait on another."""
        return Event(device, stream, recorded_on(self._own))


class CallStreams:
    """The streams of one buffer.

    Args:
        device: of its tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._own: torch.cuda.Stream | None = None
        self._begins: list[Any] = []  # events that may be recorded again

    def own_stream(self) -> torch.cuda.Stream:
        """Return the stream of calls with `async_op`."""
        if self._own is None:
            self._own = torch.cuda.Stream(self._device)
        return self._own

    def call_stream(self, run: RunOptions) -> CallStream:
        """Return the stream of a call, after the event that it has to wait for.

        Raises:
            InvalidArgument: `previous_event` is no event.
        """
        if run.previous_event is None and not run.async_op:
            return CURRENT
        event = check_event(run.previous_event)
        if self._device.type != "cuda":
            if event is not None:
                event.synchronize()
            return CURRENT
        caller = current_stream(self._device.index)
        if not run.async_op:
            _wait(event, caller)
            return CURRENT
        own = self.own_stream()
        if event is None:
            self._follow(caller, own)
        _wait(event, own)
        return _OwnLane(caller, own)

    def _follow(self, caller: torch.cuda.Stream, own: torch.cuda.Stream) -> None:
        """Let the own stream wait for the present work of the caller's."""
        try:
            begin = self._begins.pop()  # this thread's until it is put back; to make one costs as much as all this
        except expected(IndexError):
            begin = CudaEvent()
        begin.record(caller)
        begin.wait(own)
        if not is_recording():  # else it is the graph's
            self._begins.append(begin)


def _wait(event: Event | torch.cuda.Event | None, stream: torch.cuda.Stream) -> None:
    if isinstance(event, Event):
        event.wait(stream)
    elif event is not None:
        wait_on(stream, event)


def is_capturing() -> bool:
    """Return whether a CUDA graph is being recorded on the current stream."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
