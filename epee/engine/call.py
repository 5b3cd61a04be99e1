"""The common part of collectives and messages, for the engine that drives them: their end, and the calls in their way.

`overlap.py` finds which earlier calls are in the way of a later one and notes an `Edge` for each; a call that is about
to begin asks here whether it may (`is_free`). This process's own state; nothing is locked here.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..errors import EpeeError, context
from .outbox import PeerRegions

Tensors = tuple[Any, Any]  # tensors that a call writes and reads: tensors, or lists of them of any depth
NOTHING: Tensors = ((), ())


class Edge(NamedTuple):
    """An earlier call that is in the way of a later one until `is_over(call)`."""

    call: Any
    is_over: Callable[[Any], bool]
    is_read: bool  # the later one reads what this one writes


class EngineCall:
    """A collective (`operation.py`) or a message (`p2p/message.py`). No `ABC`: `isinstance` would take much longer.

    Attributes:
        done: it has ended; `error` says how.
        on_done: called when it has ended.
        started, deadline: `time.monotonic()` values; the deadline is 0 until it is known.
        wait_rounds: of its present wait.
        num_waiters: threads that wait for it.
        before: earlier calls that it waits for before it begins, see `overlap.py`.
        was_held_by: names of these, once it has begun.
        holds_back: names of the calls that wait for this one, once it is late.
        tensors: those that it writes and reads; `touched` is their memory, once it was asked for.
    """

    done = False
    error: BaseException | None = None
    on_done: Any = None
    started = deadline = 0.0
    wait_rounds = 0
    num_waiters = 0
    before: Sequence[Edge] = ()
    was_held_by = ""
    holds_back = ""
    tensors: Tensors = NOTHING
    touched: Any = None

    @property
    @abstractmethod
    def name(self) -> str:
        """The operation's name for messages."""

    @abstractmethod
    def label(self) -> str:
        """Name the call for the error of another one."""

    @abstractmethod
    def _position(self, peer_regions: PeerRegions) -> dict[str, object]:
        """Return rank, number and epoch for a message."""

    def describe(self, peer_regions: PeerRegions, **facts: object) -> str:
        """Name the call and its position for a message."""
        facts = {**self._holdups(), "holds_back": self.holds_back or None, **facts}
        return context(self.name, **self._position(peer_regions), **facts)

    def fail(self, error: BaseException) -> None:
        """End the call with `error`; results stay untouched."""
        if not self.done:
            self.error = error
            self.done = True

    def start_clock(self) -> float:
        """Return the present time; where the call has no deadline yet, it begins to wait now."""
        return time.monotonic()

    def is_free(self, peer_regions: PeerRegions) -> bool:
        """Return whether nothing is in the way of the call any more.

        Raises:
            EpeeError: a call has failed whose results this one reads.
        """
        if not all(edge.is_over(edge.call) for edge in self.before):
            return False
        for edge in self.before:
            if edge.is_read and edge.call.error is not None:
                raise not_run(self.describe(peer_regions), edge.call.error)
        return True

    def let_begin(self) -> None:
        """Note that nothing is in the way of the call any more. Only the names of the earlier calls are kept."""
        if self.before:
            self.was_held_by = names_of([edge.call for edge in self.before])
        self.before = ()

    def _holdups(self) -> dict[str, str]:
        """Return the details for an error: the calls that hold it back, or did so until it began."""
        holders = [edge.call for edge in self.before if not edge.is_over(edge.call)]
        if holders:
            return {"held_back_by": names_of(holders)}
        return {"was_held_back_by": self.was_held_by} if self.was_held_by else {}


def names_of(calls: Sequence[EngineCall]) -> str:
    """Return the first of some calls by name, and the number of the others."""
    more = f" and {len(calls) - 1} more" if len(calls) > 1 else ""
    return f"{calls[0].label()}{more}" if calls else ""


def not_run(told: str, error: BaseException) -> EpeeError:
    """Return the error of a call that needs the results of one that failed with `error`, of the same kind."""
    kind = type(error) if isinstance(error, EpeeError) else EpeeError
    lost = kind(f"{told}: not run: it reads what an earlier call was to write, which has failed; repeat both: {error}")
    lost.__dict__.update(error.__dict__)  # its ranks, its number
    return lost
