"""The background thread of a group: it drives calls that nobody waits for, and only those.

It is started by the first asynchronous call, send or receive. From then on it is a timer: every millisecond it looks
for calls that have been pending for about that long without a waiter, and steps them. A caller that comes back earlier
(its thread is ten times faster) is left alone: the look takes the group's lock only when it is free, and a call never
wakes the thread except from its parking. It parks in the kernel when there has been nothing to do for some looks; it
never spins. Its sleep there ends by itself now and then, should an interrupt have swallowed a call's wake. It is a
daemon and is stopped and joined before the interpreter goes down (`birth.py`), because a thread inside native code at
that moment can end the process.
"""

from __future__ import annotations

import math
import threading
import time

from ...errors import AbortedError, EpeeError, ResourceError
from ..engine_face import EngineFace
from ..outbox import BELL
from ..p2p.message import Message
from . import overlap
from . import stall as trouble
from .operation import Block, Driven

GRACE_S = 0.001
DUE_S = 0.9 * GRACE_S
PARK_S = 1.0
SHORT_S = 0.1  # between attempts where the system gives no memory or descriptor
LINGER_ROUNDS = 10  # looks without work before it parks, so that a burst of calls pays for one wake-up
MAX_MISSES = 5  # looks in a row that found the lock taken, before one waits for it


class Helper:
    """Owns the thread. `kick` and the thread's own parking happen under the engine's lock."""

    def __init__(self, engine: EngineFace) -> None:
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
            self._start()
        elif self._parked:
            self._unpark()

    def _start(self) -> None:
        thread = threading.Thread(target=self._main, name="epee-backend", daemon=True)
        try:
            self._thread = thread  # inside: an interrupt must not leave a thread here that nobody starts
            thread.start()
        except BaseException:  # an interrupt, or no more threads: the next call tries again, a stray thread ends itself
            if not thread.is_alive():
                self._thread = None
            raise

    def _unpark(self) -> None:
        self._parked = False
        if self._gate.locked():
            self._gate.release()

    def is_current(self) -> bool:
        """True on the background thread itself: inside a callback of a future."""
        return threading.current_thread() is self._thread

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
            self._unpark()
        if thread is not threading.current_thread() and thread.ident is not None:
            thread.join(timeout=5.0)

    def _main(self) -> None:
        idle = misses = 0
        while not self._stopping and self.is_current():
            if not self._soon:
                time.sleep(GRACE_S)
            self._soon = False
            try:
                if not self._engine.entry.enter_if_free(misses >= MAX_MISSES):
                    misses += 1
                    continue
            except ResourceError:  # news cannot be taken over now; calls of the program's say so, this thread goes on
                time.sleep(SHORT_S)
                continue
            except EpeeError:  # closed, aborted: whoever did that ends the pending calls
                return
            misses, parked = 0, False
            try:
                pending_s = self._unattended_s()
                idle = 0 if pending_s >= 0 else idle + 1
                if idle > LINGER_ROUNDS:
                    self._parked = parked = True
                elif pending_s >= DUE_S:
                    self._step()
            except AbortedError:
                return
            finally:
                self._engine.entry.leave()
            if parked:  # not `self._parked`: a kick may have cleared that already, and opened the gate
                idle = 0 if self._gate.acquire(timeout=PARK_S) else LINGER_ROUNDS

    def _unattended_s(self) -> float:
        """Return for how long the oldest call that nobody waits for has been pending; below 0: there is none.

        Infinite when a future of it is to be completed: its owner may be blocked where nothing drives the call.
        Whoever waits for one call of the queue drives those before it, and wakes this thread for the rest.
        """
        queue = self._engine.queue
        open_ops: list[Driven] = []
        if queue and not any(op.num_waiters for op in queue):
            open_ops.append(queue[0])
        open_ops += [message for message in self._engine.mail.pending() if not message.num_waiters]
        if not open_ops:
            return -1.0
        if any(op.on_done for op in open_ops):
            return math.inf
        return time.monotonic() - min(op.started for op in open_ops)

    def _step(self) -> None:
        """Drive everything that is pending, then sleep on what the first of it waits for, with the lock given back."""
        engine = self._engine
        block: Block | None = None
        if engine.mail.held:
            overlap.release(engine)
        while engine.queue:
            head = overlap.foremost(engine, engine.queue[0])
            block = engine.advance(head)
            if block is not None:
                open_ops = (op for op in engine.queue if not op.done)  # the head itself may only wait for room
                self._look(block, head if isinstance(head, Message) else next(open_ops, head))
                break
        for message in engine.mail.pending():
            if message.before:
                continue  # what it waits for is in the queue, or one of these itself
            waits = engine.advance(message)
            if waits is not None:
                self._look(waits, message)
                block = block or waits
        if block is not None and block.rank >= 0:
            engine.waits.sleep_on(block)

    def _look(self, block: Block, head: Driven) -> None:
        """Look for trouble from the second time on that a call does not move."""
        now = head.start_clock()
        if head.patience or now > head.deadline:
            on_peer = block.rank >= 0 and block.word != BELL
            trouble.examine(self._engine, block if on_peer else None, head, head, None)
        head.patience = 1
