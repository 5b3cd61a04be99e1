"""A low-latency call: its state, and how it ends if this rank aborts it; `aborts.py` has the protocol.

A call without a mask is open until its caller has the result, or this rank knows that no rank has it. So an exception
that makes the caller leave it, an interrupt between any two steps included, leaves it open, and the next call of this
rank first determines how it has ended. If others have completed a combine that has raised here, the ranks' next calls
differ, and nothing can bring them together again: the buffer raises that at each further call, and refuses the call, so
that the others are notified, too. (Not so for a dispatch: the others wait for this rank's rows, and raise.)

Called on the thread of a call only.
"""

from __future__ import annotations

import time

import torch

from ...arrays import plain_tensors
from ...errors import CommTimeoutError, RankFailedError, context, is_own
from ...memory.signals import tag
from ...view.protocol.withdrawal import GRACE_S, End, Look, gave_up, names_of
from ..members.header import REASON_BYTES
from .types import LatencyOptions
from .wire import LATENCY_COMBINE, OP_NAMES, SectionHeader, Timeouts, Wire

_POLL_S = 0.0005


class PendingCall:
    """One call between its first step and its last, and how it ends.

    Attributes:
        seq: its number.
        head: what must be equal on all ranks; sent to each with what differs.
        options: of the call.
        lost: the lost ranks, and why.
        active: ranks that this phase counts on.
        wait_us: microseconds that the receive phase has waited for each rank.
        words: by which the ranks agree on the end of a call without a mask.
        has_gathered: whether this rank has all messages of such a call.
        is_open: whether this rank does not know how such a call has ended.
        diverged: why the buffer cannot continue: others have completed the call, and it has raised here; empty if not.
        is_received: its hook has begun to receive.
    """

    is_received = has_gathered = False
    is_open = True
    diverged = ""

    def __init__(self, seq: int, head: SectionHeader, options: LatencyOptions, wire: Wire, epoch: int) -> None:
        self.seq = seq
        self.op = OP_NAMES[head.op]
        self.rank = wire.rank
        self._has_come = wire.is_here
        self.epoch = epoch
        num_ranks = wire.config.num_ranks
        self.words = wire.end_words(seq)
        self.dead = wire.ended
        self.head = head
        self.options = options
        self.lost: dict[int, str] = {}
        self.active = [True] * num_ranks
        with plain_tensors():
            self.wait_us = torch.zeros(num_ranks, dtype=torch.int64, device="cpu")
        self.start()

    def start(self) -> None:
        """Start the clock of a phase."""
        self.started = time.monotonic()
        self.timeouts = Timeouts(self.started + self.options.timeout_s, self.options.timeout_s)

    @property
    def mark(self) -> int:
        """The call's tag."""
        return tag(self.epoch, self.seq)

    @property
    def is_alike(self) -> bool:
        """Whether the call ends in the same way on all ranks."""
        return self.options.active_ranks is None

    def where(self, peer: int, started: float | None = None) -> str:
        """Return the call as named in messages."""
        elapsed = {} if started is None else {"elapsed": time.monotonic() - started}
        return context(self.op, rank=self.rank, peer=peer, seq=self.seq, **elapsed)

    def others(self) -> list[int]:
        """Return the other ranks that this phase counts on."""
        return [rank for rank, is_active in enumerate(self.active) if is_active and rank != self.rank]

    def peers(self) -> list[int]:
        """Return the ranks that still count, ascending."""
        return [rank for rank, is_active in enumerate(self.active) if is_active and rank not in self.lost]

    # -- how a call without a mask ends

    def fail(self) -> None:
        """End a call that is impossible because the ranks make different ones, so that no rank waits for this one."""
        self.words.has_failed(self.mark)
        self.is_open = False
        self.words.abort(self.mark)

    def abort(self, cause: BaseException | None) -> None:
        """Leave the call because of `cause`, or (None) because a peer has.

        Returns if others have gathered the call and the cause is silence: this rank continues the call.

        Raises:
            cause, CommTimeoutError: the call has failed, on all ranks; or it is open: the next call determines how it
                ended.
        """
        self.is_open = True
        is_silence = cause is None or (isinstance(cause, (CommTimeoutError, RankFailedError)) and is_own(cause))
        if cause is not None and self.words.is_gathered(self.mark):
            raise cause  # the others may be following
        found = self._await_end()
        if found.end is End.COMPLETES and is_silence:
            return
        if cause is not None and not (found.end is End.OPEN and is_silence and isinstance(cause, CommTimeoutError)):
            raise cause
        raise self.aborted() if found.end is End.FAILED else self._undecided(found) from cause

    def settle(self) -> None:
        """Determine how the call ended, which was left open.

        Raises:
            CommTimeoutError: it still is.
        """
        if not self.words.is_gathered(self.mark):
            found = self._await_end()
            if found.end is End.FAILED:
                return
            if found.end is End.OPEN:
                raise self._undecided(found)
        self.has_gathered = True
        # after a dispatch the next calls differ, and a message says so
        if self.is_open and self.head.op == LATENCY_COMBINE and self.words.has_peers:
            where = context(self.op, rank=self.rank, seq=self.seq, epoch=self.epoch)
            self.diverged = (
                f"{where}: this call has raised an error here, and others have completed it: the ranks stand before "
                "different calls; close this buffer on all ranks and make a new one"
            )[:REASON_BYTES]
        self.is_open = False

    def _await_end(self) -> Look:
        """Leave the call and poll how it ends, for as long as a rank may just be deciding."""
        self.words.abort(self.mark)
        until = time.monotonic() + GRACE_S
        while (found := self._poll()).end is End.OPEN and time.monotonic() < until:
            time.sleep(_POLL_S)
        return found

    def _poll(self) -> Look:
        """Determine how the call ends, which this rank has aborted, and record it."""
        dead = self.dead()  # first: what they stored before counts
        found = self.words.poll(self.mark, dead)
        if found.end is End.COMPLETES:
            self.words.has_gathered(self.mark)
            self.has_gathered = True
        if found.end is End.FAILED:
            self.words.has_failed(self.mark)
            self.is_open = False
        return found

    def aborted(self) -> CommTimeoutError:
        """Return the error for the caller of a call that others have aborted."""
        silent = [rank for rank in self.others() if not self._has_come(rank, self.seq)]
        others = [] if self.words.is_gathered(self.mark) else self.words.aborted_by(self.mark)
        reasons = [f"rank {rank} did not send its part" for rank in silent[:1]]
        reasons += gave_up(others)
        where = self.where((silent or others or [self.rank])[0], self.started)
        return CommTimeoutError(
            f"{where}: {'; '.join(reasons)}; it is aborted on all ranks; repeat the step", silent or others
        )

    def _undecided(self, found: Look) -> CommTimeoutError:
        where = self.where(found.ranks[0], self.started)
        return CommTimeoutError(
            f"{where}: rank(s) {names_of(found.ranks)} may have completed this call, which is aborted here, and have "
            "not answered; the next call finds out how it has ended",
            found.ranks,
        )
