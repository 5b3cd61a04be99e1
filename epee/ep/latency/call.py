"""The end of this rank's last call: gathered (it continues), aborted, or open; `aborts.py` has the protocol.

A call is open from the moment in which its row is announced until its caller has the result, or knows that no rank has
it. So an exception that makes the caller leave it, an interrupt between any two steps included, leaves it open, and the
next call of this rank first determines how it has ended. If others have completed a call that has raised here, the
ranks' next calls differ, and nothing can bring them together again: the buffer raises that at each further call, and
refuses the call, so that the others are notified, too. (Not so for a dispatch: the others wait for this rank's rows,
and raise.)

Called on the thread of a call only.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Protocol

from ...errors import CommTimeoutError, RankFailedError, context, is_own
from ...memory.signals import tag
from ...view.protocol.withdrawal import GRACE_S, End, Look, gave_up, names_of
from ..control.header import REASON_BYTES
from .aborts import EndWords

_LOOK_S = 0.0005


class Caller(Protocol):
    """The object that makes the calls (`latency/pending_call.py`)."""

    rank: int
    epoch: int
    gathered: int
    part: str  # the part that the others wait for, in messages

    @property
    def began(self) -> float:
        """When the call began, a `time.monotonic()` value."""

    @property
    def seq(self) -> int:
        """Number of the last call."""

    @property
    def op(self) -> str:
        """Its name."""

    def where(self, peer: int, started: float | None = None) -> str:
        """Return the call as named in messages."""

    def behind(self, want: int) -> list[int]:
        """Return the ranks whose part of the call is not here."""

    def dead(self) -> Collection[int]:
        """Return the ranks that decide nothing more: they are dead, or have left the view."""

    @property
    def is_pull(self) -> bool:
        """Whether the others complete the call without anything more from this rank."""


class CallEnd:
    """The end of this rank's last call.

    Args:
        caller: makes the calls.

    Attributes:
        lost: why this buffer cannot continue; empty while it can.
    """

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self.lost = ""
        self._opened = 0

    def begin(self, words: EndWords) -> None:
        """Begin an epoch, whose members have these words."""
        self._opened = 0
        self._words = words

    @property
    def is_open(self) -> bool:
        """Whether the caller of the last call has no result, and it is not known that no rank has one."""
        return 0 < self._opened == self._caller.seq

    @property
    def _mark(self) -> int:
        return tag(self._caller.epoch, self._caller.seq)

    def open(self, seq: int) -> None:
        """Record that call `seq` is open from the moment in which it becomes the caller's last one."""
        self._opened = seq

    def close(self) -> None:
        """End a call: its caller has the result, or no rank has."""
        self._opened = 0

    def refuse(self) -> None:
        """End a call that this rank refuses, and whose part says so."""
        self._words.has_failed(self._mark)
        self.close()

    def fail(self) -> None:
        """End a call that is impossible because the ranks make different ones, so that no rank waits for this one."""
        self.refuse()
        self._words.give_up(self._mark)

    def lose(self, error: str) -> None:
        """Record that the last call has raised `error` here, and that others have its result."""
        caller = self._caller
        self.lost = (
            f"{context(caller.op, rank=caller.rank, seq=caller.seq, epoch=caller.epoch)}: this call has raised {error} "
            "here, and others have completed it: the ranks stand before different calls; close this buffer on all "
            "ranks and make a new one"
        )[:REASON_BYTES]

    def withdrawn(self) -> list[int]:
        """Return the peers that have aborted the last call, while this rank has not published that it continues."""
        return [] if self._words.is_gathered(self._mark) else self.given_up_by(self._mark)

    def given_up_by(self, mark: int) -> list[int]:
        """Return the peers that have aborted the call with this tag."""
        return self._words.withdrawn(mark)

    def go_on(self) -> None:
        """Publish that this rank has gathered the call."""
        caller = self._caller
        self._words.has_gathered(self._mark)
        caller.gathered = caller.seq

    def give_up(self, cause: BaseException | None) -> None:
        """Leave the call because of `cause`, or (None) because a peer has.

        Returns if others have gathered the call and the cause is silence: this rank continues the call.

        Raises:
            cause, CommTimeoutError: the call has failed, on all ranks; or it is open: the next call determines how it
                ended.
        """
        is_silence = cause is None or (isinstance(cause, (CommTimeoutError, RankFailedError)) and is_own(cause))
        if cause is not None and self._words.is_gathered(self._mark):
            raise cause  # the others may be following
        look = self._await_end()
        if look.end is End.COMPLETES and is_silence:
            return
        if cause is not None and not (look.end is End.OPEN and is_silence and isinstance(cause, CommTimeoutError)):
            raise cause
        raise self.given_up() if look.end is End.FAILED else self._undecided(look) from cause

    def settle(self) -> None:
        """Determine how the last call ended, which was left open.

        Raises:
            CommTimeoutError: it still is.
        """
        if not self._words.is_gathered(self._mark):
            look = self._await_end()
            if look.end is End.FAILED:
                return
            if look.end is End.OPEN:
                raise self._undecided(look)
        self.miss()

    def miss(self) -> None:
        """Close a call that others may have completed; its caller here has no result."""
        self._caller.gathered = self._caller.seq
        if self.is_open and self._caller.is_pull and self._words.has_peers:
            self.lose("an error")
        self.close()

    def _await_end(self) -> Look:
        """Leave the call and poll how it ends, for as long as a rank may just be deciding."""
        self._words.give_up(self._mark)
        until = time.monotonic() + GRACE_S
        while (look := self._look()).end is End.OPEN and time.monotonic() < until:
            time.sleep(_LOOK_S)
        return look

    def _look(self) -> Look:
        """Determine how a call ends that this rank has aborted, and record it."""
        caller, mark = self._caller, self._mark
        dead = caller.dead()  # first: what they stored before counts
        look = self._words.look(caller.seq & 1, mark, dead)
        if look.end is End.COMPLETES:
            self.go_on()
        if look.end is End.FAILED:
            self._words.has_failed(mark)
            self.close()
        return look

    def given_up(self) -> CommTimeoutError:
        """Return the error for the caller of a call that others have aborted."""
        silent, others = self._caller.behind(self._mark), self.withdrawn()
        told = [f"rank {rank} did not send its {self._caller.part}" for rank in silent[:1]]
        told += gave_up(others)
        where = self._caller.where((silent or others or [self._caller.rank])[0], self._caller.began)
        return CommTimeoutError(
            f"{where}: {'; '.join(told)}; it is aborted on all ranks; repeat the step", silent or others
        )

    def _undecided(self, look: Look) -> CommTimeoutError:
        where = self._caller.where(look.ranks[0], self._caller.began)
        return CommTimeoutError(
            f"{where}: rank(s) {names_of(look.ranks)} may have completed this call, which is aborted here, and have "
            "not answered; the next call finds out how it has ended",
            look.ranks,
        )
