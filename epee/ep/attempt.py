"""The frame of a buffer's collective call: its time-out, a new view, errors that the peers must hear of.

    attempt = CallAttempt(exchange, path, op, timeout, default_s)
    while True:
        with attempt as deadline:
            return ...  # check the arguments, make the call

Data path: none; the path of the buffer's device moves what there is to move.

Protocol: a call that raises before it was announced to the peers (a bad argument, no memory) is announced to them as a
refusal, so that they raise at once and call numbers stay in step. A call that meets a new view (`Moved`) is made again
there: `with` swallows it. A crash leaves nothing here: calls keep no state but the paths' own.
"""

from __future__ import annotations

import logging
import time
from types import TracebackType

from ..errors import EpeeError, InvalidArgument
from .checks import check_timeout
from .control.exchanging import RowExchange
from .control.inbox import OP_NAMES, Moved
from .paths import Path

_log = logging.getLogger(__name__)


class CallAttempt:
    """A call of a buffer, made again where a new view asks for it; see above.

    Args:
        exchange: of the buffer.
        path: that moves its rows.
        op: `OP_DISPATCH`, `OP_COMBINE` or `OP_GATHER`.
        timeout: seconds to wait for a silent peer, as the caller gave it.
        default_s: where it is None.
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
            self._exchange.membership.hide()
            return False
        if isinstance(error, Moved):
            self._move()
            return True
        try:
            is_announced = self._path.num_announced(self._op) != self._last_seq
            if isinstance(error, Exception) and not is_announced and not self._path.is_told(error):
                self._refuse(error, self._deadline)
        finally:
            self._exchange.membership.hide()
        return False

    def _move(self) -> None:
        """The view has changed, and the call is to be made again with who is left."""
        self._exchange.membership.hide()
        self._now = time.monotonic()

    def _checked_timeout(self) -> float:
        try:
            return check_timeout(self._timeout, self._default_s)
        except InvalidArgument as error:
            self._refuse(error, self._deadline)
            raise

    def _refuse(self, error: Exception, deadline: float) -> None:
        refuse(self._exchange, self._path, self._op, error, deadline, self._default_s)

    def _come_in(self) -> None:
        """Enter the epoch of the call; who comes late into it is given its time for the call."""
        while True:
            try:
                self._turn()
                self._now = time.monotonic()
                return
            except Moved:
                self._move()

    def _turn(self) -> None:
        """Enter the epoch of the call.

        Who cannot has made no call where epochs begin with `sync` alone, and nobody hears of it: the others are in an
        epoch that this rank is not in, and wait for it there; its next call tries again. Else the call has a number.
        """
        try:
            patience = check_timeout(self._timeout, self._default_s)
        except InvalidArgument:
            patience = self._default_s  # it is refused once this rank is in the epoch
        membership = self._exchange.membership
        try:
            membership.turn(OP_NAMES[self._op], self._now + patience)
        except Moved:
            raise
        except Exception as error:
            if membership.counts_entering and not self._path.is_told(error):
                self._refuse(error, self._now + patience)
            raise


def refuse(exchange: RowExchange, path: Path, op: int, error: Exception, deadline: float, default_s: float) -> None:
    """Tell the peers that a call was refused; when even that fails, the refusal is still what is raised.

    They hear of it in the epoch that they are in.
    """
    while True:
        try:
            loss = exchange.membership.turn_to_refuse(OP_NAMES[op], deadline)
            if loss is None:
                path.refuse(op, error, deadline)
            else:
                _log.warning("a refused call has failed on all ranks: %s", loss)
            return
        except Moved:  # before anything was announced
            deadline = time.monotonic() + default_s
        except EpeeError as problem:
            _log.warning("could not tell the peers about a refused call: %s", problem)
            return
