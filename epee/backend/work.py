"""The result of an asynchronous call: a `dist.Work` over one or more calls of the engine.

torch's C++ side forwards only `wait` and `get_future`. Futures never get `set_exception`: torch's DDP completes with a
value whatever the future holds and crashes on an empty one, so an error is raised by a chained callback instead.
"""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..engine import Engine
from ..engine.operation import CallsOfWork, Driven, Operation
from ..engine.p2p.message import ANY, Message
from ..errors import EpeeError, PeerError, RankFailedError, expected, ignored, is_own, named
from ..torch_private import C10D, calling_module
from ..untraced import untraced, untraced_methods
from ..values import waiting_time

_WorkBase: Any = getattr(dist, "_Work", None) or dist.Work


@untraced_methods
class WorkOfGroup(_WorkBase):  # type: ignore[misc]
    """The part of a work that calls on CPUs and on GPUs share.

    Attributes:
        engine: of the group; works that report lost ranks have it.
    """

    engine: Engine
    _outputs: Any

    @property
    def num_ranks(self) -> int:
        """Return the size of the group."""
        return self.engine.peer_regions.group_size

    def synchronize(self) -> None:
        """Same as `wait()`."""
        self.wait()

    def result(self) -> Any:
        """Return the tensors that the call writes."""
        return self._outputs


@functools.lru_cache(maxsize=8)
@untraced
def _at_once(timeout: timedelta | None = None) -> bool:
    """Return True. A repeated call runs in the cache, which is C: no exception of a signal handler comes from here."""
    return True


_at_once()


@untraced_methods
class Done(WorkOfGroup):
    """The work of a call that has completed before it returned.

    torch waits for it behind each blocking collective. No line of Python runs in that `wait`: an exception there would
    make the program repeat a call that has ended, and be one call ahead of its peers.
    """

    wait: Any = staticmethod(_at_once)

    def is_completed(self) -> bool:
        """Return True."""
        return True

    def is_success(self) -> bool:
        """Return True."""
        return True

    def exception(self) -> BaseException | None:
        """Return None."""
        return None

    def result(self) -> list[torch.Tensor]:
        """Return an empty list: the tensors are those of the call."""
        return []

    def get_future(self) -> Any:
        """Return a completed future."""
        future: Any = torch.futures.Future()
        future.set_result([])
        return future


@untraced_methods
class Ended(Done):
    """The work of a call that a loss has ended before it was issued, in groups that report losses without raising.

    Attributes:
        engine: of the group.
        error: the reason.
    """

    def __init__(self, engine: Engine, error: PeerError) -> None:
        super().__init__()
        self.engine = engine
        self.error = error

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return True when the group shows the loss, if it shows losses at once."""
        self.engine.membership.await_shown(self.error.ranks)
        return True

    def contributors(self) -> set[int]:
        """Return no rank."""
        return set()

    def is_success(self) -> bool:
        """Return False."""
        return False

    def exception(self) -> BaseException | None:
        """Return the error."""
        return self.error

    def lost_ranks(self) -> set[int]:
        """Return the ranks that are lost."""
        return set(self.error.ranks)


def is_loss(error: object) -> bool:
    """Return whether an error reports that ranks are lost, or have left: others than this one, and for good."""
    return type(error) in (PeerError, RankFailedError)


@untraced_methods
class Work(CallsOfWork, WorkOfGroup):
    """A call in progress (several for a coalesced call with several dtypes).

    After an error the tensors are unchanged; the group can be used again unless the error says otherwise.

    Attributes:
        engine: drives them.
        ops: the calls.
    """

    def __init__(self, engine: Engine, ops: list[Driven], outputs: Any) -> None:
        super().__init__()
        self.engine = engine
        self.ops = ops
        self._outputs = outputs
        self._future: Any = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Drive the call to its end; may be called again, also after it raised.

        Args:
            timeout: stop waiting (the call continues) after this time; None or 0 leaves only the call's own timeout.
        Raises:
            CommTimeoutError: the time has passed. Any other `EpeeError` ended the call itself.

        An exception from a signal handler leaves the request open and waits may be repeated, except inside torch's
        blocking `send` and `recv`: no thread could wait for that request again, so it is aborted.
        """
        try:
            return self._drive(timeout)
        except expected(PeerError) as exc:
            if self.engine.reports_losses and is_loss(exc) and is_own(exc) and self.is_completed():
                self.engine.membership.await_shown(exc.ranks)
                return True
            raise

    def _drive(self, timeout: timedelta | None) -> bool:
        """Run the body of `wait`, its only caller."""
        seconds = 0.0 if timeout is None else waiting_time(timeout)
        try:
            for op in self.ops:
                if not op.done or op.error is not None:
                    self.engine.wait(op, seconds if seconds > 0 else None)
        except BaseException as exc:
            named(exc, self.engine.peer_regions.label.text)
            if calling_module() == C10D:
                for op in self.ops:
                    is_open = op.error is None and isinstance(op, Message)  # no quorum, for example: not its own end
                    if is_open or not is_own(exc):
                        self.engine.take_back(op, exc)
            raise
        return True

    def is_completed(self) -> bool:
        """True when the call has ended, well or not."""
        return all(op.done for op in self.ops)

    def is_success(self) -> bool:
        """True when it has ended well."""
        return all(op.done and op.error is None for op in self.ops)

    def exception(self) -> BaseException | None:
        """Return its error, if it ended with one."""
        error = next((op.error for op in self.ops if op.error is not None), None)
        if error is not None:
            named(error, self.engine.peer_regions.label.text)
        return error

    def lost_ranks(self) -> set[int]:
        """Return the ranks that the call has lost in progress or failed because of.

        Not those that were excluded on request.
        """
        found: set[int] = set()
        for op in self.ops:
            found.update(getattr(op.error, "ranks", ()))
            if isinstance(op, Operation):
                found.update(op.lost_here)
        return found

    def contributors(self) -> set[int]:
        """Return the ranks that take part in the call; of a message all that are not lost."""
        ranks = {*self.engine.peer_regions.members}
        for op in self.ops:
            ranks &= {*op.peer_regions.members} if isinstance(op, Operation) else ranks - self.lost_ranks()
        return ranks

    def source_rank(self) -> int:
        """Return the group rank that a receive got its message from (-1 before that, and for other calls)."""
        op = self.ops[0]
        return op.peer if isinstance(op, Message) and op.peer != ANY else -1

    _source_rank = source_rank

    def get_future(self) -> Any:
        """Return a future of the output tensors; the background thread completes it if no thread waits.

        In a callback that runs on that thread (PowerSGD's waits for such a future) the call is driven to its end first.
        """
        if self._future is None:
            if self.engine.helper.is_current():
                with ignored(EpeeError):  # the future raises it
                    self.wait()
            ended: Any = torch.futures.Future()
            self._future = ended.then(self._value)
            last = self.ops[-1]
            self.engine.listen(last, lambda op: ended.done() or ended.set_result(None))
        return self._future

    def _value(self, _: Any) -> Any:
        error = self.exception()
        if error is not None and not (self.engine.reports_losses and is_loss(error)):
            raise error
        return self._outputs


DONE = Done()
