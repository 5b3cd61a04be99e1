"""Events in DeepEP's form.

An event is recorded on the stream that its call ran on, after everything that a waiter needs. Without CUDA (or before
it is first used) calls return when their work is done, and an event needs no wait.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, TypeAlias

import torch

from epee.ep import current_stream, recorded_on, wait_on
from epee.errors import InvalidState


class EventHandle:
    """An event after the present work on the current stream."""

    def __init__(self) -> None:
        self._event: torch.cuda.Event | None = None
        if torch.cuda.is_initialized():
            self._event = recorded_on(current_stream())

    @classmethod
    def of(cls, recorded: torch.cuda.Event | None) -> EventHandle:
        """Return a handle of an event that is recorded already; None when there is nothing to wait for."""
        made = cls.__new__(cls)
        made._event = recorded
        return made

    @property
    def recorded(self) -> torch.cuda.Event | None:
        """The CUDA event, None when there is nothing to wait for."""
        return self._event

    def current_stream_wait(self) -> None:
        """Make the current stream wait for the event; the cpu does not wait."""
        if self._event is not None:
            wait_on(current_stream(), self._event)

    def synchronize(self) -> None:
        """Block the cpu until the event."""
        if self._event is not None:
            self._event.synchronize()


class EventOverlap:
    """An event, tensors kept alive until it has been waited for, and a hook that runs then.

    Args:
        event: None when the call that made it was not asynchronous.
        extra_tensors: kept alive until the wait.

    As a context manager it waits at the end of the block, if it has an event.
    """

    event: EventHandle | None = None  # of `no_event`, which is not initialised
    extra_tensors: tuple[torch.Tensor, ...] | None = None
    _hook: Callable[[], Any] | None = None

    def __init__(self, event: EventHandle | None = None, extra_tensors: tuple[torch.Tensor, ...] | None = None) -> None:
        self.event = event
        self.extra_tensors = extra_tensors

    def current_stream_wait(self, release_handle: bool = False) -> Any:
        """Make the current stream wait; return the result of the hook, if there is one.

        Args:
            release_handle: drop the event and the tensors afterwards.

        Raises:
            InvalidState: the call was not asynchronous, so there is no event.
        """
        if self.event is None:
            raise InvalidState("there is no event to wait for; make the call with async_finish=True")
        self.event.current_stream_wait()
        if release_handle:
            self.event = None
            self.extra_tensors = None
        hook, self._hook = self._hook, None
        return None if hook is None else hook()

    def wait(self) -> Any:
        """Same as `current_stream_wait()`."""
        return self.current_stream_wait()

    def register_hook_after_wait(self, fn: Callable[[], Any]) -> None:
        """Run `fn` once, after the next wait."""
        self._hook = fn

    def __call__(self, release_handle: bool = False) -> Any:
        return self.current_stream_wait(release_handle)

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.event is not None:
            self.current_stream_wait()


no_event: Callable[[], EventOverlap] = partial(object.__new__, EventOverlap)  # as `EventOverlap()`, in half the time

Event: TypeAlias = "EventHandle | EventOverlap"


def wait_for(event: Event | None) -> None:
    """Make the current stream wait for a `previous_event` of either class."""
    if isinstance(event, EventOverlap):
        event = event.event
    if event is not None:
        event.current_stream_wait()


def cuda_event_of(event: Event | None) -> torch.cuda.Event | None:
    """Return the CUDA event of a `previous_event` of either class; None if there is nothing to wait for."""
    if isinstance(event, EventOverlap):
        event = event.event
    return None if event is None else event.recorded


def after(is_async: bool) -> EventOverlap:
    """Return the event of a call that has just put its work on the current stream."""
    return EventOverlap(EventHandle()) if is_async else no_event()
