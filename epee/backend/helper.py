"""The background thread of a group: it drives calls that nobody waits for, and only those.

It is started by the first asynchronous call, send or receive. From then on it is a timer: every millisecond it looks
for calls that have been pending for about that long without a waiter, and steps them. A caller that comes back earlier
(its thread is ten times faster) is left alone: the look takes the group's lock only when it is free, and a call never
wakes the thread except from its parking. It parks in the kernel when there has been nothing to do for some looks; it
never spins. It is a daemon and is stopped and joined before the interpreter goes down (`birth.py`), because a thread
inside native code at that moment can end the process.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from ..errors import AbortedError, EpeeError

if TYPE_CHECKING:
    from .engine import Engine

GRACE_S = 0.001
DUE_S = 0.9 * GRACE_S
LINGER_ROUNDS = 10  # looks without work before it parks, so that a burst of calls pays for one wake-up
MAX_MISSES = 5  # looks in a row that found the lock taken, before one waits for it


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

    def go_on(self, soon: bool) -> None:
        """Like `kick`, when the thread runs at all: calls that it may have left to a waiter have none now."""
        if self._thread is not None:
            self.kick(soon)

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
        idle = misses = 0
        while not self._stopping:
            if not self._soon:
                time.sleep(GRACE_S)
            self._soon = False
            try:
                if not self._engine.enter_if_free(misses >= MAX_MISSES):
                    misses += 1
                    continue
            except EpeeError:  # closed, aborted: whoever did that ends the pending calls
                return
            misses, parked = 0, False
            try:
                pending_s = self._engine.unattended_s()
                idle = 0 if pending_s >= 0 else idle + 1
                if idle > LINGER_ROUNDS:
                    self._parked = parked = True
                elif pending_s >= DUE_S:
                    self._step()
            except AbortedError:
                return
            finally:
                self._engine.leave()
            if parked:  # not `self._parked`: a kick may have cleared that already, and opened the gate
                self._gate.acquire()
                idle = 0

    def _step(self) -> None:
        """Drive, then sleep on what the head waits for. The engine's lock is held, and given back for the sleep."""
        block = self._engine.background_step()
        if block is not None and block.rank >= 0:
            self._engine.sleep_on(block)
