"""The background thread of a process: it drives the calls of all groups that no thread waits for, and only those.

The thread begins with the first group of the process (in a forked child with the first group there) and ends with the
last one. So no call ever starts a thread, and none needs memory or a system resource for one: a call that is refused
because memory is short is refused without it. A group is served from its first asynchronous call, send or receive on:
every millisecond the thread checks for calls that have been pending for about that long without a waiter, and steps
them. It does not disturb a caller that returns earlier (the caller's thread is ten times faster): the check takes a
group's lock only when it is free, and a call wakes the thread only when it is parked. It parks in the kernel after some
checks without work; it never spins. Parking is timed, in case an interrupt has swallowed a call's wake-up. The thread
is a daemon and is stopped and joined before the interpreter exits (`creation.py`), because a thread inside native code
at that moment can end the process.

Callbacks of futures run on the thread that ends the call, without the group's lock, and may block there, for example to
wait for another group. So a process in which a future was asked for has a second thread, the stand-by: every
`STANDBY_S` it checks whether the thread that leads, which alone drives calls, has been in callbacks for `BLOCKED_S`. It
takes the lead then, and starts the next stand-by; the former leader finds on its return that it does not lead, and ends
or stands by. Where the system gives no further thread, or `MAX_THREADS` are blocked, calls without a waiter wait for
the callback. Only the call that asks for a future starts a thread, without the group's lock.

Writers: `Helper` is a group's part and is accessed under that group's lock; the list of groups, the number of users and
the list of threads are guarded by a lock of this module, which no thread holds while it waits for anything. The lead
passes on by one store of the stand-by; the leader alone writes the time at which its callbacks began, into an object of
its own lead, so a former leader that returns changes nothing of the present one.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..errors import AbortedError, EpeeError, ResourceError, expected, is_of_handler
from ..threads import BackgroundThread
from .entry import SLICE_S
from .operation import Block, Driven
from .outbox import BELL
from .p2p.message import Message
from .waiting import examine

if TYPE_CHECKING:
    from .engine import Engine

GRACE_S = 0.001
DUE_S = 0.9 * GRACE_S
PARK_S = 1.0
SHORT_S = 0.1  # between attempts where the system gives no memory or descriptor
SHARED_SLICE_S = 0.005  # how long one group's lock is waited for where other groups wait for the thread
LINGER_ROUNDS = 10  # checks without work before it parks, so that a burst of calls pays for one wake-up
MAX_MISSES = 5  # checks in a row that found the lock taken, before one waits for it
JOIN_S = 5.0
STANDBY_S, BLOCKED_S = 0.05, 0.02
MAX_THREADS = 16

logger = logging.getLogger(__name__)


class Lead:
    """The time in which one thread drives the calls.

    Attributes:
        thread: it.
        calls_since: when it began to run callbacks; 0.0 while it runs none.
    """

    __slots__ = ("calls_since", "thread")

    def __init__(self, thread: threading.Thread) -> None:
        self.thread = thread
        self.calls_since = 0.0


class HelperThread:
    """The thread, and its stand-by; `acquire` returns those of this process. Each user calls `release` once.

    Attributes:
        is_urgent: a future of some call is to be completed: the next check comes at once.
    """

    def __init__(self) -> None:
        """Start it; `ResourceError` where the system gives no thread."""
        self.num_users = 0
        self.is_urgent = False
        self._helpers: tuple[Helper, ...] = ()
        self._serving: dict[threading.Thread, Helper] = {}
        self._is_stopping = False
        self._gate = threading.Lock()
        self._gate.acquire()
        first = BackgroundThread(self._main, "epee-backend")
        self._threads: tuple[threading.Thread, ...] = (first,)
        self._standby: threading.Thread | None = None
        self._not_before = 0.0  # no stand-by is started: the system had no thread
        self._end = threading.Lock()
        self._end.acquire()
        self._lead = Lead(first)
        first.begin("calls that nobody waits for")

    def is_current(self) -> bool:
        """Return whether this is one of the threads."""
        return threading.current_thread() in self._threads

    def enlist(self, helper: Helper) -> None:
        """Serve a group from now on."""
        with _guard:
            if helper not in self._helpers:
                self._helpers = (*self._helpers, helper)

    def wake(self) -> None:
        """End the parking of the thread, if it is parked."""
        if not self._gate.locked():
            return
        try:
            self._gate.release()
        except expected(RuntimeError):  # another thread has just opened it
            return

    def release(self, helper: Helper | None = None) -> None:
        """Release a use, of a group or of its creator; when this returns no thread is inside the group.

        The last user ends the threads. A call on one of them, from a callback, waits for nothing.
        """
        with _guard:
            self._helpers = tuple(other for other in self._helpers if other is not helper)
            self.num_users -= 1
            is_last = self.num_users == 0
            if is_last:
                self._is_stopping = True
                _threads.pop(os.getpid(), None)
        if is_last:
            self.wake()
            self._end.release()
        if self.is_current():
            return
        deadline = time.monotonic() + JOIN_S
        for thread in self._threads if is_last else ():
            thread.join(max(0.0, deadline - time.monotonic()))
        while helper is not None and helper in self._serving.values() and time.monotonic() < deadline:
            time.sleep(0.0005)

    def stand_by(self) -> None:
        """Start the stand-by if there is none; nothing happens where the system gives no thread."""
        if self._standby is not None or time.monotonic() < self._not_before:
            return
        thread = BackgroundThread(self._main, "epee-standby")
        with _guard:
            if self._standby is not None or self._is_stopping or len(self._threads) >= MAX_THREADS:
                return
            self._standby, self._threads = thread, (*self._threads, thread)
        try:
            thread.begin("calls that nobody waits for while a callback blocks")
        except BaseException as exc:
            self._leave(thread)
            if not isinstance(exc, ResourceError) or is_of_handler(exc):
                raise
            self._not_before = time.monotonic() + PARK_S
            logger.warning("callbacks of futures that block hold up calls that nobody waits for: %s", exc)

    def call_back(self, step: Callable[[], None]) -> None:
        """Run `step`, which may run callbacks of futures."""
        lead = self._lead
        if lead.thread is not threading.current_thread():  # it has come back, and to further callbacks
            step()
            return
        lead.calls_since = time.monotonic()
        try:
            step()
        finally:
            lead.calls_since = 0.0

    def _main(self) -> None:
        thread = threading.current_thread()
        while not self._is_stopping:
            if self._lead.thread is thread:
                if not self.is_urgent:
                    time.sleep(GRACE_S)
                self.is_urgent = False
                if not self._serve() and not self._gate.acquire(timeout=PARK_S):
                    self._look_at_all()
            elif self._takes_over():
                self._lead = Lead(thread)
                self.stand_by()
            elif not self._stays():
                return
            else:
                self._end.acquire(timeout=STANDBY_S)

    def _takes_over(self) -> bool:
        """Whether this thread, which does not lead, is to lead now: it is the stand-by, and a callback blocks."""
        since = self._lead.calls_since
        if not since or time.monotonic() - since < BLOCKED_S:
            return False
        with _guard:
            if self._standby is not threading.current_thread():
                return False
            self._standby = None
        return True

    def _stays(self) -> bool:
        """Whether this thread, which does not lead, is the stand-by; it becomes that if there is none, else it ends."""
        thread = threading.current_thread()
        with _guard:
            if self._standby is None:
                self._standby = thread
            is_standby = self._standby is thread
        if not is_standby:
            self._leave(thread)
        return is_standby

    def _leave(self, thread: threading.Thread) -> None:
        with _guard:
            self._threads = tuple(other for other in self._threads if other is not thread)
            if self._standby is thread:
                self._standby = None

    def _serve(self) -> bool:
        """Serve each group that is not parked; return whether one is left. No frame refers to a group afterwards."""
        thread = threading.current_thread()
        active = [helper for helper in self._helpers if not helper.is_parked]
        for helper in active:
            self._serving[thread] = helper
            try:
                if not self._is_stopping and helper in self._helpers:
                    helper.turn(len(active) == 1)
            except Exception:  # of a callback, for example: the other groups must not suffer
                logger.exception("a look at calls that nobody waits for has failed")
                helper.put_off(PARK_S)
            finally:
                self._serving.pop(thread, None)
            if self._lead.thread is not thread:
                return True
        return not all(helper.is_parked for helper in self._helpers)

    def _look_at_all(self) -> None:
        for helper in self._helpers:
            helper.look_once()


_guard = threading.RLock()  # a signal handler may close a group during a call of another one
_threads: dict[int, HelperThread] = {}  # of this process, by its pid: a fork leaves the parent's here, which is dead


def acquire() -> HelperThread:
    """Return this process's thread, which runs, for one more user.

    Raises:
        ResourceError: there is none yet, and the system gives none.
    """
    while True:
        with _guard:
            thread = _threads.get(os.getpid())
            if thread is not None:
                thread.num_users += 1
                return thread
        made = HelperThread()
        with _guard:
            made.num_users += 1
            is_first = _threads.setdefault(os.getpid(), made) is made
        if is_first:
            return made
        made.release()  # another thread was faster


def _renew() -> None:
    global _guard
    _guard = threading.RLock()
    _threads.clear()


os.register_at_fork(after_in_child=_renew)


class Helper:
    """A group's part in the thread. `kick` and `turn` run under the engine's lock.

    Attributes:
        is_parked: some checks found no work, or there never was any: the thread skips the group.
        is_over: the group has ended.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._thread = acquire()
        self._is_enlisted = self._is_stopped = False
        self._idle = self._misses = 0
        self._not_before = 0.0
        self.is_parked, self.is_over = True, False

    def kick(self, soon: bool = False) -> None:
        """Make sure that the thread checks the queue; `soon` skips the grace period."""
        if soon:
            self._thread.is_urgent = True
        if self.is_parked and not self.is_over:
            if not self._is_enlisted:
                self._thread.enlist(self)
                self._is_enlisted = True
            self._idle = 0
            self.is_parked = False
            self._thread.wake()

    def is_current(self) -> bool:
        """True on a background thread itself: inside a callback of a future."""
        return self._thread.is_current()

    def expect_callbacks(self) -> None:
        """Have a thread stand by for callbacks that block. Without the engine's lock."""
        if not self.is_over:
            self._thread.stand_by()

    def go_on(self, soon: bool) -> None:
        """Resume like `kick`, for a group that is served: calls that were left to a waiter have none now."""
        if self._is_enlisted:
            self.kick(soon)

    def stop(self) -> None:
        """Have the thread leave the group alone, and wait until it does; idempotent."""
        if not self._is_stopped:
            self._is_stopped = self.is_over = True
            self._thread.release(self)

    def look_once(self) -> None:
        """Have the thread check the group once without a request."""
        if not self.is_over:
            self._idle, self.is_parked = LINGER_ROUNDS, False

    def put_off(self, pause_s: float) -> None:
        """Leave the group alone for a while."""
        self._not_before = time.monotonic() + pause_s

    def turn(self, is_alone: bool) -> None:
        """Step the calls that no thread waits for.

        Args:
            is_alone: no other group has such calls, so the thread may sleep on a word of this one.
        """
        if time.monotonic() < self._not_before:
            return
        wait_limit_s = (SLICE_S if is_alone else SHARED_SLICE_S) if self._misses >= MAX_MISSES else 0.0
        try:
            if not self._engine.entry.enter_if_free(wait_limit_s):
                self._misses += 1
                return
        except ResourceError:  # decisions cannot be applied now; the program's calls raise this, the thread continues
            self.put_off(SHORT_S)
            return
        except EpeeError:  # closed, aborted: the caller of that ends the pending calls
            self.is_over = self.is_parked = True
            return
        self._misses = 0
        try:
            pending_s = self._unattended_s()
            self._idle = 0 if pending_s >= 0 else self._idle + 1
            if self._idle > LINGER_ROUNDS:
                self.is_parked = True
            elif pending_s >= DUE_S:
                self._step(is_alone)
        except AbortedError:
            self.is_over = self.is_parked = True
        finally:
            self._thread.call_back(self._engine.entry.leave)

    def _unattended_s(self) -> float:
        """Return for how long the oldest call without a waiter has been pending; below 0: there is none.

        Infinite when a future of it is to be completed: its owner may be blocked where nothing drives the call.
        A thread that waits for one call of the queue drives those before it, and wakes this thread for the rest.
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

    def _step(self, is_alone: bool) -> None:
        """Drive all pending calls, then sleep on the word that the first waits for, with the lock released."""
        engine = self._engine
        block: Block | None = None
        while True:
            if engine.mail.held:
                engine.post_free()
            if not engine.queue:
                break
            head = engine.order.foremost(engine.queue[0])
            block = engine.advance(head)
            if block is not None:
                open_ops = (op for op in engine.queue if not op.done)  # the head itself may only wait for room
                self._look(block, head if isinstance(head, Message) else next(open_ops, head))
                break
        for message in engine.mail.pending():
            if message.before:
                continue  # the call that it waits for is in the queue, or one of these itself
            waits = engine.advance(message)
            if waits is not None:
                self._look(waits, message)
                block = block or waits
        if is_alone and block is not None and block.rank >= 0:
            engine.waits.sleep_on(block)

    def _look(self, block: Block, head: Driven) -> None:
        """Examine failures from the second check on at which a call has not advanced."""
        now = head.start_clock()
        if head.wait_rounds or now > head.deadline:
            on_peer = block.rank >= 0 and block.word != BELL
            examine(self._engine, block if on_peer else None, head, head, None)
        head.wait_rounds = 1
