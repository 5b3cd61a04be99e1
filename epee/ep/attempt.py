"""The frames of a buffer's collective call: the ordinary one, and the fast path for cached calls.

`CallAttempt` is the ordinary one: its timeout, a new view, errors that must be reported to the peers.

    attempt = CallAttempt(exchange, path, op, timeout, default_s)
    while True:
        with attempt as deadline:
            return ...  # check the arguments, make the call

Data path: none; the path of the buffer's device moves the data.

Protocol: a call that raises before it was announced to the peers (a bad argument, no memory) is announced to them as a
refusal, so that they raise at once and call numbers stay in step. An exception of a signal handler, of any class,
leaves a call that was not announced unmade: it may be repeated. A call that meets a new view (`Moved`) is made again
there: `with` swallows it. A crash leaves nothing here: calls keep no state except the paths' own.

`CallsAgain` is for most calls: on a GPU, with the options' defaults (but also on the buffer's own stream), in the
shapes of an earlier one, when nothing has happened since. Such a call needs none of the steps around others: no timeout
to check, no epoch to enter, no rank to notify. So the fast path is tried first. Any change (a profiler, another GPU, a
graph, a report, a death, a new view, poison, arguments with other properties; of a `LatencyBuffer` another stream)
makes it return None, without side effects; then the call takes the ordinary path, which checks it, makes it or raises.
The paths define when the fast path is allowed and how such a call is made; `plans.py` and `latency/plans.py` define the
cache keys. The receive phase of a call with a hook is run in the same way.

Called on the thread of the call. `CallsAgain` does by itself what `with turns.queue(), turns` and `CallAttempt` do: the
lock; the end of a buffer that was closed meanwhile; a refusal if an error occurs (from an allocation) before the call
is visible to the peers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any

import torch

from ..errors import EpeeError, InvalidArgument, expected, is_of_handler, named
from ..gpu.turns import Turns
from ..profiling import is_profiling
from .checks import check_timeout
from .members.header import OP_COMBINE, OP_DISPATCH, OP_NAMES, Moved
from .members.rows import RowExchange
from .paths import GpuPath, Path
from .streams import CallStreams, RunOptions

_log = logging.getLogger(__name__)


class CallAttempt:
    """A call of a buffer, made again if a new view requires it.

    Args:
        exchange: of the buffer.
        path: that moves its rows.
        op: index into `OP_NAMES`.
        timeout: seconds to wait for a silent peer, as given by the caller.
        default_s: used if `timeout` is None.
    """

    __slots__ = ("_deadline", "_default_s", "_exchange", "_last_seq", "_now", "_op", "_path", "_timeout")

    def __init__(self, exchange: RowExchange, path: Path, op: int, timeout: float | None, default_s: float) -> None:
        self._exchange, self._path = exchange, path
        self._op, self._timeout, self._default_s = op, timeout, default_s
        self._now = time.monotonic()

    def __enter__(self) -> float:
        """Enter the epoch of the call; return the deadline, a `time.monotonic()` value."""
        try:
            if self._exchange.membership.must_turn:
                self._come_in()
            self._last_seq = self._path.num_announced(self._op)
            self._deadline = self._now + self._default_s
            if self._timeout is not None:
                self._deadline = self._now + self._checked_timeout()
        except BaseException:
            self._exchange.membership.hide()
            raise
        return self._deadline

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if error is None:
            if self._exchange.membership.has_shown:
                self._exchange.membership.hide()
            return False
        if isinstance(error, Moved):
            self._move()
            return True
        try:
            is_announced = self._path.num_announced(self._op) != self._last_seq
            if isinstance(error, Exception) and not (is_announced or is_of_handler(error) or self._path.is_told(error)):
                self._refuse(error, self._deadline)
        finally:
            self._exchange.membership.hide()
        return False

    def _move(self) -> None:
        """Prepare to make the call again among the remaining ranks after a view change."""
        self._exchange.membership.hide()
        self._now = time.monotonic()

    def _checked_timeout(self) -> float:
        try:
            return check_timeout(self._timeout, self._default_s)
        except expected(InvalidArgument) as error:
            self._refuse(error, self._deadline)
            raise

    def _refuse(self, error: Exception, deadline: float) -> None:
        refuse(self._exchange, self._path, self._op, error, deadline, self._default_s)

    def _come_in(self) -> None:
        """Enter the epoch of the call; a rank that enters late still gets the full timeout for the call."""
        while True:
            try:
                self._turn()
                self._now = time.monotonic()
                return
            except expected(Moved):
                self._move()

    def _turn(self) -> None:
        """Enter the epoch of the call.

        Where epochs begin with `sync` alone, a rank that cannot enter has made no call, and no rank is notified: the
        others are in an epoch that this rank is not in, and wait for it there; its next call tries again. Otherwise the
        call has a number.
        """
        try:
            timeout_s = check_timeout(self._timeout, self._default_s)
        except expected(InvalidArgument):
            timeout_s = self._default_s  # it is refused once this rank is in the epoch
        membership = self._exchange.membership
        try:
            membership.turn(OP_NAMES[self._op], self._now + timeout_s)
        except expected(Moved):
            raise
        except expected(Exception) as error:
            if membership.counts_entering and not self._path.is_told(error):
                self._refuse(error, self._now + timeout_s)
            raise


class CallsAgain:
    """Makes the cached calls of one buffer.

    Args:
        turns, exchange, path, call_streams: of the buffer.
        timeout_s: of calls that name none.
        dispatch, combine: find a call's plan and start it, or return None; called with the arguments of the attributes,
            and with the stream of the call, last, if that is not the current one.

    Attributes:
        dispatch, combine: make a call; return None without side effects if it is not cached. Raise as those of the
            buffer. Partial objects, because another Python function around them would cost such a call as much as its
            checks.
        dispatch_async, combine_async: the same on the buffer's own stream; the first argument is the event for which
            the call waits instead of the current stream, None for that. They begin with all other arguments, none left
            out. If they return None the own stream waits as it would for the call.
    """

    def __init__(
        self,
        turns: Turns,
        exchange: RowExchange,
        path: GpuPath,
        call_streams: CallStreams,
        timeout_s: float,
        dispatch: Callable[..., Any],
        combine: Callable[..., Any],
    ) -> None:
        self._turns, self._closing, self._exchange, self._path = turns, turns.closing, exchange, path
        self._core, self._call_streams, self._timeout_s = path.core, call_streams, timeout_s
        self.dispatch: Callable[..., Any] = partial(self.make, OP_DISPATCH, dispatch)
        self.combine: Callable[..., Any] = partial(self.make, OP_COMBINE, combine)
        self.dispatch_async: Callable[..., Any] = partial(self.make, OP_DISPATCH, self._on_own_stream, dispatch)
        self.combine_async: Callable[..., Any] = partial(self.make, OP_COMBINE, self._on_own_stream, combine)

    def make(self, op: int, call: Callable[..., Any], *given: Any) -> Any:
        """Make a cached call; return None without side effects if the fast path is not allowed.

        Args:
            op: `OP_DISPATCH` or `OP_COMBINE`.
            call: finds the plan of the call and starts it; returns None if there is none.
            given: to `call`.
        """
        queue = self._turns.queue_here()
        if queue is None or is_profiling():
            return None
        core = self._core
        with queue:
            before = core.num_calls
            try:
                return call(*given)
            except torch.OutOfMemoryError:  # the ordinary path tries again, and notifies the peers
                if core.num_calls != before:
                    raise
                return None
            except expected(Exception) as error:
                try:
                    self._fail(op, error, before)
                except expected(Exception) as cause:
                    named(cause, self._turns.label.text)
                    raise
                named(error, self._turns.label.text)
                raise
            finally:
                if self._closing.asked:
                    self._turns.__exit__(None, None, None)

    def _on_own_stream(self, call: Callable[..., Any], previous_event: object, *given: Any) -> Any:
        """Make a cached call on the buffer's own stream, with the lock."""
        with self._call_streams.call_stream(RunOptions(async_op=True, previous_event=previous_event)) as call_stream:
            return call(*given, call_stream)

    def receive(self, phase: Any) -> bool:
        """Make the receive phase of a call with a hook; return False without side effects if the fast path is not
        allowed.

        Args:
            phase: whose `path` launches it if nothing has happened, and returns whether it did.
        """
        queue = self._turns.queue_here()
        if queue is None:
            return False
        with queue:
            try:
                is_done: bool = phase.path.receive(phase, is_quiet=True)
            except expected(Exception) as error:
                named(error, self._turns.label.text)
                raise
            finally:
                if self._closing.asked:
                    self._turns.__exit__(None, None, None)
        return is_done

    def _fail(self, op: int, error: Exception, before: int) -> None:
        """Raise the cause of an error, if there is one; notify the peers if they do not know of it."""
        try:
            self._path.blame(op, error)
        except expected(Exception) as cause:
            self._tell(op, cause, before)
            raise
        self._tell(op, error, before)

    def _tell(self, op: int, error: Exception, before: int) -> None:
        if self._core.num_calls == before and not self._path.is_told(error):
            refuse(self._exchange, self._path, op, error, time.monotonic() + self._timeout_s, self._timeout_s)


def refuse(exchange: RowExchange, path: Path, op: int, error: Exception, deadline: float, default_s: float) -> None:
    """Notify the peers that a call was refused; if even that fails, the refusal is still what is raised.

    They are notified in the epoch that they are in.
    """
    while True:
        try:
            exchange.membership.turn(OP_NAMES[op], deadline)
            path.refuse(op, error, deadline)
            return
        except expected(Moved):  # before anything was announced
            deadline = time.monotonic() + default_s
        except expected(EpeeError) as problem:
            _log.warning("could not tell the peers about a refused call: %s", problem)
            return
