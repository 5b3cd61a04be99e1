"""How a `Buffer` runs one collective call: its time-out, a new view that it meets, errors that the peers must hear of.

Data path: none; the path of the buffer's device moves what there is to move.

Protocol: a call that raises before it was announced to the peers (a bad argument, no memory) is announced to them as a
refusal, so that they raise at once and call numbers stay in step. A call that meets a new view may be made again there.
A crash leaves nothing here: calls keep no state but the paths' own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from ..errors import EpeeError, InvalidArgument
from .checks import check_timeout
from .control.inbox import OP_DISPATCH, OP_GATHER, OP_NAMES, Exchange, Moved
from .control.messages import ControlPlane
from .paths import Path
from .throughput.gpu_path import CudaPath
from .turns import Turns

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class Calls(Turns):
    """The part of a `Buffer` that makes calls; it sets these attributes."""

    _path: Path
    _control: ControlPlane
    _exchange: Exchange
    _timeout: float

    def barrier(self, timeout: float | None = None) -> None:
        """Let all ranks meet. Collective.

        On GPUs the streams meet: what a rank's current stream does behind the barrier, it does when all ranks' streams
        have come to it, with their writes done. One kernel; the host waits for nobody, so an error (as of a combine) is
        raised by the next call or by `check`. On CPUs, and in latency mode, the ranks' host threads meet.

        Args:
            timeout: seconds to wait for a silent peer.

        Raises:
            As `dispatch`.
        """
        path = self._path
        if isinstance(path, CudaPath):
            self._call(OP_DISPATCH, timeout, path.barrier)
        else:
            self._call(OP_GATHER, timeout, self._meet)

    def _meet(self, deadline: float) -> None:
        self._control.all_gather_bytes(b"", deadline)

    def _call(self, op: int, timeout: float | None, work: Callable[[float], _T]) -> _T:
        """Run one collective call, `work`, which is given its deadline.

        An error before the call was announced to the peers (a bad argument, no memory) is announced to them here.
        """

        def whole_call() -> _T:
            now = time.monotonic()
            while True:
                try:
                    if self._exchange.membership.must_turn:
                        self._turn(op, timeout, now)
                        now = time.monotonic()  # who has come late into the epoch is given its time for the call
                    return self._announced(op, timeout, now, work)
                except Moved:  # the view has changed, and the call is to be made again with who is left
                    now = time.monotonic()
                finally:
                    self._exchange.membership.hide()

        return self._alone(whole_call)

    def _turn(self, op: int, timeout: float | None, now: float) -> None:
        """Enter the epoch of the call.

        Who cannot has made no call where epochs begin with `sync` alone, and nobody hears of it: the others are in an
        epoch that this rank is not in, and wait for it there; its next call tries again. Else the call has a number.
        """
        try:
            patience = check_timeout(timeout, self._timeout)
        except InvalidArgument:
            patience = self._timeout  # the call says so, and can be refused once it is in the epoch
        try:
            self._exchange.membership.turn(OP_NAMES[op], now + patience)
        except Moved:
            raise
        except Exception as error:
            if self._exchange.membership.counts_entering and not self._path.is_told(error):
                self._refuse(op, error, now + patience)
            raise

    def _announced(self, op: int, timeout: float | None, now: float, work: Callable[[float], _T]) -> _T:
        last_seq = self._path.num_announced(op)
        deadline = now + self._timeout
        try:
            deadline = now + check_timeout(timeout, self._timeout)
            return work(deadline)
        except Moved:
            raise
        except Exception as error:
            if self._path.num_announced(op) == last_seq and not self._path.is_told(error):
                self._refuse(op, error, deadline)
            raise

    @property
    def _members(self) -> tuple[int, ...] | None:
        """The ranks of a view that leaves some out; None when all take part."""
        return self._exchange.members if self._exchange.is_reduced else None

    def _refuse(self, op: int, error: Exception, deadline: float) -> None:
        """Tell the peers that this call was refused; when even that fails, the refusal is still what is raised.

        They hear of it in the epoch that they are in.
        """
        while True:
            try:
                loss = self._exchange.membership.turn_to_refuse(OP_NAMES[op], deadline)
                if loss is None:
                    self._path.refuse(op, error, deadline)
                else:
                    _log.warning("a refused call has failed on all ranks: %s", loss)
                return
            except Moved:  # before anything was announced
                deadline = time.monotonic() + self._timeout
            except EpeeError as problem:
                _log.warning("could not tell the peers about a refused call: %s", problem)
                return
