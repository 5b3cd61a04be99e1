"""The lock of a group: the thread inside a call, and the state left by an exception from a signal handler.

Python runs signal handlers in the main thread between any two instructions, and a handler may raise. So nothing here
relies on a line being reached. The lock knows its owner itself (an RLock, taken by one call in C); whether the owner
really is inside a call is not stored anywhere but read from its stack, which cannot be wrong. A lock that this thread
owns without being inside a call was left by an interrupt: the next call takes it over and repairs the state
(`Engine.settle`). Other threads wait for the lock for a bounded time.

A call from a signal handler that interrupted a call of the same group is refused (`InvalidState`), since the state
below it is partly changed.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from types import CodeType
from typing import TYPE_CHECKING, Any

from ..errors import AbortedError, CommTimeoutError, ForkError, InvalidState, expected
from ..torch_private import count_frames
from .outbox import SLEEPERS

if TYPE_CHECKING:
    from .engine import Engine

CLOSED, ABORTED, FORKED = 1, 2, 4
FROZEN, NEWS, CHANGING, TROUBLED = 8, 16, 32, 64  # see `membership/group_membership.py`
ENDED = CLOSED | ABORTED | FORKED
SLICE_S = 0.5  # how long to wait for the lock before checking `flags` again
MIN_SLICES = 20  # however short the group's timeout is

_REENTERED = (
    "this thread is inside a call of the same group (this is a signal handler); "
    "start the call after that one has returned"
)


class Entry:
    """The lock of one group in one process.

    Args:
        engine: the state that it guards.

    Attributes:
        asleep: threads inside a call that released the lock to sleep.
        after: steps to be done without the lock by the thread that releases it.
    """

    calls: frozenset[CodeType] = frozenset()  # methods of `engine` that hold the lock; a frame of one means "inside"

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock: Any = threading.RLock()
        self._has_lock: Callable[[], bool] = self._lock._is_owned  # type: ignore[attr-defined]  # as `Condition` asks
        self.asleep: set[int] = set()
        self.after: deque[Callable[[], None]] = deque()
        self._broken_off: Callable[[], None] | None = None  # the last step that has raised

    def enter(self, while_frozen: bool = False) -> None:
        """Take the lock and check that the group can be used.

        While the group is frozen only threads that just wait (`while_frozen`) enter; their own timeouts apply.
        """
        engine = self._engine
        if engine.flags or self.asleep or self._has_lock():
            self._look_around()
        if not self._lock.acquire(False):
            self.queue_up()
        if engine.flags:
            try:
                self._await_go(while_frozen)
            except BaseException:  # decisions that cannot be applied now, for example: others must find the lock free
                self.leave_wholly()
                raise

    def _await_go(self, while_frozen: bool) -> None:
        """Return when a call may run, with the lock held, as it is when this is called."""
        until = 0.0
        while self._engine.flags and not self._engine.may_go_on(while_frozen):
            self.leave()
            until = until or time.monotonic() + self._engine.timeout_s
            self._engine.await_flags()
            if time.monotonic() > until:
                raise CommTimeoutError(
                    f"the ranks have not agreed on a view for {self._engine.timeout_s:.0f} s (rank="
                    f"{self._engine.peer_regions.rank}); the call was not made, it may be repeated",
                    has_job=True,
                )
            self.queue_up()

    def stop_calls(self, timeout_s: float) -> bool:
        """Take the lock for a hook that needs the calls stopped, independently of `flags`; False: not in time."""
        return bool(self._lock.acquire(timeout=timeout_s))

    def let_calls(self) -> None:
        """Release the lock that `stop_calls` took."""
        self._lock.release()

    def enter_if_free(self, wait_limit_s: float) -> bool:
        """Take the lock as `enter`, but only when no thread is inside a call, or leaves in `wait_limit_s` seconds."""
        if self._engine.flags & ENDED:
            self._engine.await_flags()
        if not self._lock.acquire(wait_limit_s > 0, wait_limit_s or -1):
            return False
        try:
            may_go_on = not self._engine.flags or self._engine.may_go_on()
        except BaseException:
            self.leave()
            raise
        if not may_go_on:
            self.leave()
            if self._engine.flags & ENDED:
                self._engine.await_flags()
            return False
        return True

    def leave(self) -> None:
        """Release the lock, then do the deferred steps (futures of calls that ended, closing)."""
        self._lock.release()
        if self.after:
            self.do_rest()

    def leave_wholly(self) -> None:
        """Release the lock as `leave`, however often an interrupt made this thread take the lock."""
        while self._has_lock():
            self._lock.release()
        self.do_rest()

    def do_rest(self) -> None:
        """Do the steps that were deferred until the lock is free."""
        while True:
            try:
                step = self.after.popleft()
            except expected(IndexError):  # nothing left, or another thread was faster
                self._broken_off = None
                return
            try:
                step()
            except BaseException:
                if step is not self._broken_off:
                    self._broken_off = step
                    self.after.appendleft(step)  # it may be run again, and is, once
                raise

    def hold(self) -> None:
        """After an interrupt: own the lock, as the frames of the call expect."""
        if not self._has_lock():
            self.take_back()
        self.asleep.discard(threading.get_ident())

    def num_calls_below(self) -> int:
        """Return how many calls of this group are on the stack of this thread."""
        return count_frames(self.calls, self._engine)

    def is_marked_inside(self) -> bool:
        """True when this thread owns the lock or sleeps inside a call, or when an interrupt left it looking so."""
        return self._has_lock() or threading.get_ident() in self.asleep

    def recover(self) -> None:
        """Take over the lock that an interrupted call of this thread left, repair the state and release the lock."""
        self.hold()
        self._engine.settle()
        self.leave_wholly()  # not where `settle` raises: then the next call finds the lock held, and tries again

    def _look_around(self) -> None:
        if self._engine.flags:
            self._engine.await_flags()
        if not self.is_marked_inside():
            return
        if self.num_calls_below() > 1:  # one is the call that asks
            raise InvalidState(_REENTERED)
        self.recover()

    def queue_up(self) -> None:
        """Take the lock: wait until another thread's call releases it."""
        until = time.monotonic() + self._engine.timeout_s
        while not self._lock.acquire(timeout=SLICE_S):
            if self._engine.flags:
                self._engine.await_flags()
            if time.monotonic() > until:
                raise CommTimeoutError(
                    f"another thread has been inside a call of this group for {self._engine.timeout_s:.0f} s (rank="
                    f"{self._engine.peer_regions.rank}); was it interrupted? Its next call of the group repairs that",
                    has_job=True,
                )

    def raise_ended(self) -> None:
        """Raise the reason why no call can run any more."""
        if self._engine.flags & FORKED:
            raise ForkError(
                "this process group was made before a fork; the child has no part in it: "
                "start workers by spawn or forkserver, or initialise after the fork"
            )
        if self._engine.ended_by:
            raise AbortedError(self._engine.ended_by)
        if self._engine.flags & ABORTED:
            raise AbortedError("the process group was aborted; destroy it and initialise again")
        raise InvalidState("the process group was destroyed; initialise a new one")

    # ---- inside a call

    def let_go(self) -> None:
        """Release the lock inside a call, remembering that this thread is in it."""
        self.asleep.add(threading.get_ident())
        self._lock.release()

    def take_back(self) -> None:
        """Take the lock again; an interrupt meanwhile is deferred until that is done.

        Attempts are counted, not the time: a process that was stopped here has not tried for so long, and the frames of
        the call continue as if they had the lock.
        """
        interrupt: BaseException | None = None
        num_left = MIN_SLICES + math.ceil(self._engine.timeout_s / SLICE_S)
        while not self._has_lock() and num_left > 0:
            try:
                num_left -= not self._lock.acquire(timeout=SLICE_S)
            except BaseException as exc:  # noqa: BLE001 - raised below
                interrupt = exc
        self.asleep.discard(threading.get_ident())
        if not self._engine.flags & CLOSED:
            self._engine.peer_regions.own[SLEEPERS] = len(self.asleep)
        if interrupt is not None:
            raise interrupt
