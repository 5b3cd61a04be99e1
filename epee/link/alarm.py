"""How the thread of the links hears that it has something to do.

`threading.Event` will not do: it is written in Python around a lock, and an exception of a signal handler that comes
within `set` leaves that lock taken, for ever. Here each step is one call in C.
"""

from __future__ import annotations

import contextlib
import queue


class Alarm:
    """An event for one thread that waits, which others set."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[None] = queue.SimpleQueue()

    def set(self) -> None:
        """Wake the thread, now or when it next waits."""
        if self._queue.empty():
            self._queue.put(None)

    def clear(self) -> None:
        """Forget that it was set; by the thread alone."""
        with contextlib.suppress(queue.Empty):
            self._queue.get_nowait()

    def wait(self, timeout_s: float) -> None:
        """Wait until it is set; by the thread alone."""
        with contextlib.suppress(queue.Empty):
            self._queue.get(timeout=timeout_s)
