"""Base of both DeepEP buffers: owners of a pool of buffers, whose calls run on the current or a communication stream.

A call with an event runs as a whole, with all that this layer computes around it, on the communication stream: after
`previous_event` if one is given, else after the current stream. Its inputs and results are registered with torch's
allocator, so that nothing is reused too early on either stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any

import torch

from epee.compat.deep_ep.event import Event, EventOverlap, after, cuda_event_of
from epee.compat.deep_ep.shared.advice import NORMAL, add_advice
from epee.ep import BufferPool, CallStream, Dispatched, current_stream, wait_on
from epee.errors import EvictedError, InvalidState, MismatchError, NoQuorumError, PeerError


class PoolOwner:
    """Base of `Buffer` and `ElasticBuffer`.

    Attributes:
        explicitly_destroy: whether `destroy` may be called.
        runtime: the pool, None once destroyed.
    """

    explicitly_destroy: bool
    runtime: BufferPool | None

    def destroy(self) -> None:
        """Free all memory. Local; results stay valid, handles do not.

        Raises:
            InvalidState: the buffer was not made with `explicitly_destroy=True`, or is destroyed already.
        """
        if not self.explicitly_destroy:
            raise InvalidState("destroy needs a buffer made with explicitly_destroy=True; or just drop the buffer")
        self._pool().close()
        self.runtime = None

    def get_comm_stream(self) -> Any:
        """Return the stream of calls that return an event; on the CPU the current one."""
        if not torch.cuda.is_initialized():
            return torch.cpu.current_stream()
        return self._pool().own_stream(torch.device("cuda", torch.cuda.current_device()))

    def _pool(self) -> BufferPool:
        if self.runtime is None:
            raise InvalidState("the buffer is destroyed; make a new one")
        return self.runtime

    def _run(self, device: torch.device, is_async: bool, *previous_events: Event | None) -> Running:
        """Return the call, to be entered, that works on tensors of `device`."""
        pool = self._pool()
        is_gpu = pool.is_gpu(device)
        events: list[torch.cuda.Event] = []
        if any(previous_events):  # the event of a call that was not asynchronous is none
            events = [found for event in previous_events if (found := cuda_event_of(event)) is not None]
        if not is_async and not events:
            return _AT_ONCE[is_gpu]
        return Running(is_gpu, pool.call_stream(device, is_async, events[0] if events else None), events[1:], is_async)


class Running:
    """A call in progress. On a failure, after which buffers on GPUs wait for a `sync`, it adds advice to the error.

    Args:
        is_gpu: whether it works on a GPU.
        call_stream: stream of the call; None for the current stream, at once, without an event.
        events: that it waits for.
        is_async: whether the caller gets an event.

    Attributes:
        is_gpu: as the argument.
    """

    __slots__ = ("_call_stream", "_events", "_is_async", "is_gpu")

    def __init__(
        self,
        is_gpu: bool,
        call_stream: CallStream | None,
        events: Sequence[torch.cuda.Event | None] = (),
        is_async: bool = False,
    ) -> None:
        self.is_gpu = is_gpu
        self._call_stream = call_stream
        self._events = events
        self._is_async = is_async

    def __enter__(self) -> Running:
        if self._call_stream is not None:
            self._call_stream.__enter__()
            for event in self._events:
                if event is not None:
                    wait_on(current_stream(), event)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._call_stream is not None:
            self._call_stream.__exit__(kind, error, traceback)
        if error is not None and self.is_gpu:
            advise(error)

    @property
    def has_own_stream(self) -> bool:
        """Whether the call runs on the communication stream."""
        return self._call_stream is not None and self._call_stream.is_own

    def event(
        self,
        inputs: Iterable[torch.Tensor | None],
        results: Iterable[torch.Tensor | None],
        got: Dispatched | None = None,
    ) -> EventOverlap:
        """Return the caller's event, when everything is on the stream.

        Args:
            inputs, results: tensors of the call, those of its handle among them.
            got: the core's result, whose slot the caller's stream will read.
        """
        if self._call_stream is None:
            return EventOverlap()
        if self._call_stream.is_own:
            readers = self._call_stream.keep(inputs, results)
            if got is not None:
                got.readers.extend(readers)
        return after(self._is_async)


# calls on the current stream, at once, without an event: they have no state, so one object serves all such calls
GPU_AT_ONCE = Running(True, None)
_AT_ONCE = (Running(False, None), GPU_AT_ONCE)


def advise(error: BaseException) -> None:
    """Add advice to the error of a call on a GPU, after which buffers wait for a `sync`: alternatives to that call."""
    if isinstance(error, (PeerError, MismatchError)) and not isinstance(error, (EvictedError, NoQuorumError)):
        add_advice(error, NORMAL)
