"""What both DeepEP buffers are: owners of a pool of buffers, whose calls run on the current or a communication stream.

A call that is asked for an event runs as a whole, with all that this layer computes around it, on the communication
stream: behind `previous_event` where one is given, else behind the current stream. Its inputs and results are noted
with torch's allocator, so that nothing is reused too early on either stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from epee.compat.deep_ep.event import Event, EventOverlap, after, cuda_event_of
from epee.compat.deep_ep.shared.advice import NORMAL, add_advice
from epee.ep import BufferPool, Dispatched, Lane
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
        """Give back all memory. Local; results stay valid, handles do not.

        Raises:
            InvalidState: the buffer was not made with `explicitly_destroy=True`, or is destroyed already.
        """
        if not self.explicitly_destroy:
            raise InvalidState("destroy needs a buffer made with explicitly_destroy=True; or just drop the buffer")
        self._pool().close()
        self.runtime = None

    def get_comm_stream(self) -> Any:
        """Return the stream on which calls run that are asked for an event; on the CPU the current one."""
        if not torch.cuda.is_initialized():
            return torch.cpu.current_stream()
        return self._pool().own_stream(torch.device("cuda", torch.cuda.current_device()))

    def _pool(self) -> BufferPool:
        if self.runtime is None:
            raise InvalidState("the buffer is destroyed; make a new one")
        return self.runtime

    @contextmanager
    def _run(self, device: torch.device, is_async: bool, *previous_events: Event | None) -> Iterator[Running]:
        """Run a call that works on tensors of `device`."""
        first, *others = [cuda_event_of(event) for event in previous_events] or [None]
        with self._pool().lane(device, is_async, first) as lane:
            for event in others:
                if event is not None:
                    torch.cuda.current_stream().wait_event(event)
            with _told_what_to_do(self._pool().is_gpu(device)):
                yield Running(lane, is_async)


@contextmanager
def _told_what_to_do(is_gpu: bool) -> Iterator[None]:
    """Say with a failure, after which buffers on GPUs wait for a `sync`, what there is to do without one."""
    try:
        yield
    except (PeerError, MismatchError) as error:
        if is_gpu and not isinstance(error, (EvictedError, NoQuorumError)):
            add_advice(error, NORMAL)
        raise


class Running:
    """A call in progress."""

    def __init__(self, lane: Lane, is_async: bool) -> None:
        self._lane = lane
        self._is_async = is_async

    def event(self, inputs: object, results: object, got: Dispatched | None = None) -> EventOverlap:
        """Return the event that the caller gets, when everything is on the stream.

        Args:
            inputs, results: tensors, or nested tuples, lists and None.
            got: the core's result, whose slot the caller's stream will read.
        """
        readers = self._lane.keep(_tensors(inputs), _tensors(results))
        if got is not None:
            got.readers.extend(readers)
        return after(self._is_async)


def _tensors(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [tensor for part in value for tensor in _tensors(part)]
    return []
