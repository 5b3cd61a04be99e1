"""The background thread of a group: it drives calls that nobody waits for, and only those.

It is started by the first asynchronous call. After such a call it leaves the caller a millisecond to come and wait (the
caller's thread is ten times faster), then steps whatever is pending. It blocks in the kernel when there is nothing to
do or when a peer has to come first; it never spins. It is a daemon and is stopped and joined before the interpreter
goes down (`birth.py`), because a thread inside native code at that moment can end the process.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from ..errors import AbortedError, EpeeError

if TYPE_CHECKING:
    from .engine import Engine

GRACE_S = 0.001
LINGER_ROUNDS = 10  # rounds without work before it parks, so that a burst of calls pays for one wake-up


class Helper:
    """Owns the thread. `kick` and the thread's own parking happen under the engine's lock."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._gate = threading.Lock()
        self._gate.acquire()
        self._parked = False
        self._soon = False
        self._stopping = False
        self._thread: threading.Thread | None = None

    def kick(self, soon: bool = False) -> None:
        """Make sure that the thread looks at the queue; `soon` leaves out the grace period."""
        if soon:
            self._soon = True
        if self._thread is None:
            self._thread = threading.Thread(target=self._main, name="epee-backend", daemon=True)
            self._thread.start()
        elif self._parked:
            self._parked = False
            self._gate.release()

    def stop(self) -> None:
        """End the thread and wait for it (not when called by the thread itself, from a callback)."""
        self._stopping = True
        thread = self._thread
        if thread is None:
            return
        if self._parked:
            self._parked = False
            self._gate.release()
        if thread is not threading.current_thread():
            thread.join(timeout=5.0)

    def _main(self) -> None:
        idle = 0
        while not self._stopping:
            if not self._soon:
                time.sleep(GRACE_S)
            self._soon = False
            try:
                self._engine.enter()
            except EpeeError:  # closed, aborted: whoever did that ends the pending calls
                return
            try:
                idle = 0 if self._has_work() else idle + 1
                if idle > LINGER_ROUNDS:
                    self._parked = True
                elif not idle:
                    self._step()
            except AbortedError:
                return
            finally:
                self._engine.leave()
            if self._parked:
                self._gate.acquire()
                idle = 0

    def _has_work(self) -> bool:
        return bool(self._engine.queue) or self._engine.mail.has_work()

    def _step(self) -> None:
        """Drive, then sleep on what the head waits for. The engine's lock is held, and given back for the sleep."""
        block = self._engine.background_step()
        if block is not None and block.rank >= 0:
            self._engine.sleep_on(block)
