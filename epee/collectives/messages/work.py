"""What a message on the GPUs returns: its end, as streams and the host see it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch

from ...ep.event import Event
from ...untraced import untraced_methods
from ..work import DeviceWork
from .machine import Queued


class Owner(Protocol):
    """Who makes messages."""

    def check(self) -> None:
        """Raise what kernels have reported."""

    def flush(self) -> None:
        """Queue what a batch has collected so far."""

    def await_end(self, is_done: Callable[[], bool], name: str) -> None:
        """Let the host wait for a message's end, and raise what became of it."""


@untraced_methods
class MessageWork(DeviceWork):
    """A send or a receive, or several, queued on a stream, or collected for a batch that is queued with its last.

    Args:
        owner: of the message.
        outputs: the tensors.
        device: the GPU.
    """

    def __init__(self, owner: Owner, outputs: Any, device: torch.device) -> None:
        super().__init__(owner.check, -1, outputs, device)
        self._owner = owner
        self._queued: Queued | None = None
        self._is_queued = False

    def begin(self, stream: int, mark: Any, queued: Queued) -> None:
        """Note that it is queued on a raw stream, in front of a mark."""
        self._stream, self._queued, self._is_queued = stream, queued, True
        self._event = Event(self._device, stream, mark) if self._device.type == "cuda" else Event()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Make the current stream wait for the message; the host waits, too, for a receive from any source, whose
        source it has to know, and with a time-out above 0.

        Raises:
            CommTimeoutError: the time has passed, the message goes on. Else what kernels have reported.
        """
        if not self._is_queued:
            self._owner.flush()
        if self._queued is not None and self._queued.source is not None:
            self._owner.await_end(self._event.query, "recv")
        return super().wait(timeout)

    def is_completed(self) -> bool:
        """True when the GPU has come past the message."""
        return self._is_queued and super().is_completed()

    def source_rank(self) -> int:
        """Return the rank that a receive from any source got its message from, -1 before, and for other messages."""
        source = None if self._queued is None else self._queued.source
        return -1 if source is None else int(source.words[0]) - 1

    _source_rank = source_rank
