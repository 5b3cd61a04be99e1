"""Background threads whose start ends in time, also in a process that has no memory or no thread left.

`threading.Thread.start` waits without a limit for the new thread's first step. Where that step finds no memory the
thread ends without a report, and the caller waits for ever. Here a bare thread makes that call and the caller waits for
it with a limit; its remains after a failure hold no lock of ours and do no work.
"""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable
from typing import Any

from .errors import ResourceError, expected

START_S = 10.0  # on a busy machine a new thread may wait for its first step


class BackgroundThread(threading.Thread):
    """A daemon thread. Start it by `begin`."""

    def __init__(self, target: Callable[..., object], name: str, args: tuple[Any, ...] = ()) -> None:
        super().__init__(target=target, name=name, args=args, daemon=True)
        self._is_abandoned = False

    def begin(self, purpose: str) -> None:
        """Start the thread.

        Args:
            purpose: the function that the process lacks without it, for the error.
        Raises:
            ResourceError: the system gives no thread or no memory for one; the target does not run, or not any more.
        """
        failures: list[BaseException] = []
        begun = threading.Lock()
        begun.acquire()

        def launch() -> None:
            """Make the call that may not return."""
            try:
                self.start()
            except BaseException as exc:  # noqa: BLE001 - raised in the thread that waits
                failures.append(exc)
            begun.release()

        try:
            _thread.start_new_thread(launch, ())
            if not begun.acquire(timeout=START_S):
                raise ResourceError(f"the thread has made no step for {START_S:.0f} s")
            if failures:
                raise failures[0]
        except expected(RuntimeError, MemoryError) as exc:
            self._is_abandoned = True
            raise ResourceError(
                f"no thread can be started for {purpose}: {exc or 'no memory'}; free memory, or raise the limits on "
                "threads (ulimit -u, pids.max of the container)"
            ) from exc
        except BaseException:  # of a signal handler
            self._is_abandoned = True
            raise

    def run(self) -> None:
        """Run the target, unless the wait in `begin` has timed out."""
        if not self._is_abandoned:
            super().run()
