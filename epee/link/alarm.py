"""The wake-up of the thread of the links.

`threading.Event` is not suitable: it is written in Python around a lock, and an exception of a signal handler within
`set` leaves that lock taken, for ever. Here each step is one call in C.
"""

from __future__ import annotations

import contextlib
import queue


class Alarm:
    """An event for one waiting thread, which other threads set."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[None] = queue.SimpleQueue()

    def set(self) -> None:
        """Wake the thread, now or when it next waits."""
        if self._queue.empty():
            self._queue.put(None)

    def clear(self) -> None:
        """Reset the event; by the waiting thread only."""
        with contextlib.suppress(queue.Empty):
            self._queue.get_nowait()

    def wait(self, timeout_s: float) -> None:
        """Wait until it is set; by the waiting thread only."""
        with contextlib.suppress(queue.Empty):
            self._queue.get(timeout=timeout_s)
