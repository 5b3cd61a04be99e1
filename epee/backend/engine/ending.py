"""How calls end and how a group does: listeners of futures, closing, aborting, forking.

Closing tells the peers first (the LIFE word, and a wake for who sleeps on the word of the next call), then ends what is
pending here, then stops the thread, leaves the control plane and drops the memory, each step after the one before it.
Called inside a call of the same group (by a signal handler or a callback) it sets the flags, and the call that was
interrupted does the rest when it gives the lock back.

A crash between two steps is a death like any other for the peers.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import partial

from ...errors import AbortedError
from ...memory.signals import futex_wake
from ...view.process.detector import DeathWatch
from ..membership.epochs import Survival
from ..outbox import CELL_WORDS, LIFE, LIFE_ABORTED, LIFE_LEFT, NUM_CELLS, has_left
from ..p2p.channel import Mailroom
from ..p2p.message import Message
from ..wake import publish_word
from .entry import ABORTED, CLOSED, FORKED
from .operation import Driven, Operation
from .progress import Helper
from .waiting import Waiting


class Ending(Waiting):
    """The ends of one group in one process; `Engine` builds on it and has the state."""

    seq: int
    queue: deque[Operation]
    messages: list[Message]
    mail: Mailroom
    watch: DeathWatch
    survival: Survival | None
    unclaimed: list[Operation]
    _helper: Helper

    def retire(self, op: Driven) -> None:
        """Have the listeners of an ended call told once the lock is free."""
        if self.survival is not None:
            self.survival.hide()
        if op.on_done:
            self._after.append(partial(tell, op))

    def in_background(self) -> bool:
        """True on the background thread, whose callers must not wait for it."""
        return self._helper.is_current()

    def listen(self, op: Driven, listener: Callable[[Driven], None]) -> None:
        """Call `listener(op)` when the call has ended, at once when it has already; never with the lock held."""
        if not self._lock.acquire(False):  # a signal handler may be here inside a call: it has the lock already
            self._queue_up()
        try:
            done = op.done
            if not done:
                op.on_done = [*(op.on_done or ()), listener]
                self._helper.kick(soon=True)
        finally:
            self._lock.release()
        if done:
            listener(op)

    def close(self, aborted: bool = False) -> None:
        """End every pending call with `AbortedError`, tell the peers, stop the thread, drop the memory; idempotent.

        From a signal handler that interrupted a call of this group it returns at once: that call does the rest.
        """
        if self.flags & (CLOSED | FORKED):
            return
        self.raise_flag(CLOSED | (ABORTED if aborted else 0))
        publish_word(self.box, LIFE, LIFE_ABORTED if aborted else LIFE_LEFT)
        self._wake_peers_of_head()
        if self.is_marked_inside():
            if self.num_calls_below() or self.in_background():
                self._after.append(self._end)
                return
            self.recover()
        self._end()

    def _end(self) -> None:
        """The part of `close` that must not run inside a call."""
        box = self.box
        got = self._lock.acquire(timeout=5.0)
        error = AbortedError(
            f"the process group of rank {box.rank} was {'aborted' if self.flags & ABORTED else 'destroyed'}"
        )
        pending: list[Driven] = [*self.queue, *self.mail.pending()]
        for op in pending:
            if got and isinstance(op, Message):
                self.mail.take_back(op)  # else it could still be delivered: the peers keep the memory
            op.fail(error)
            self.retire(op)
        self.queue.clear()
        self.unclaimed.clear()
        self.messages.clear()
        if got:
            self._lock.release()
        self._do_rest()
        self._helper.stop()
        self.watch.close()
        if self.survival is not None:
            self.survival.close()
        deadline = time.monotonic() + 1.0
        while self._asleep and time.monotonic() < deadline:
            time.sleep(0.001)
        if got and not self._asleep:
            self.mail.close()
            box.close()

    def _wake_peers_of_head(self) -> None:
        """Peers sleep on the word of the call they wait for; wake them so they see that this rank has left."""
        box = self.box
        for seq in range(self.seq, self.seq + 2):
            futex_wake(box.own_address + 8 * (box.first_cell + seq % NUM_CELLS * CELL_WORDS))

    def left(self) -> list[int]:
        """Return the peers that have left the group."""
        return [p for p in self.box.peers if has_left(self.box.words[p])]

    def forked(self) -> None:
        """Called in a forked child: nothing here may be used, touched or closed."""
        self.flags |= FORKED


def tell(op: Driven) -> None:
    """Call the listeners of a call that has ended."""
    listeners, op.on_done = op.on_done, None
    for listener in listeners or ():
        listener(op)
