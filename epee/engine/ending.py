"""The end of calls and of a group: listeners of futures, closing, aborting, forking.

Closing notifies the peers first (the LIFE word, and a wake-up for ranks that sleep on the word of the next call), then
ends the calls that are pending here, then stops the thread, leaves the control plane and drops the memory, in this
order. When it is called inside a call of the same group (by a signal handler or a callback) it sets the flags, and the
interrupted call does the rest when it releases the lock.

For the peers, a crash between two steps is the same as any other death of this rank.

If a rank cannot finish a call that others have completed, no later result would be right, so it ends the group on all
ranks (`break_down`): it stores LIFE_BROKEN, and each rank that reads this during a wait, or when the view continues
without that rank, ends its own part. The memory stays until the program destroys the group.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from ..errors import AbortedError, PeerError
from ..memory.signals import futex_wake
from .entry import ABORTED, CLOSED, ENDED, FORKED
from .operation import Driven
from .outbox import CELL_WORDS, LIFE, LIFE_ABORTED, LIFE_BROKEN, LIFE_EXITED, LIFE_LEFT, NUM_CELLS, Outboxes, has_left
from .p2p.message import Message
from .wake import publish_word

if TYPE_CHECKING:
    from .engine import Engine


def tell(op: Driven) -> None:
    """Call the listeners of a call that has ended; after an interrupt inside it this function is run once more."""
    listeners, op.on_done = op.on_done, None
    try:
        for listener in listeners or ():
            listener(op)
    except BaseException:
        op.on_done = listeners
        raise


def close(engine: Engine, aborted: bool, failed: bool) -> None:
    """Implement `Engine.close`."""
    if engine.flags & (CLOSED | FORKED):
        return
    engine.raise_flag(CLOSED | (ABORTED if aborted else 0))
    engine.has_failed = failed
    if engine.box.exports is not None:
        engine.box.exports.tell_ends(engine.seq)
    if not engine.ended_by:
        publish_word(engine.box, LIFE, LIFE_EXITED if failed else LIFE_ABORTED if aborted else LIFE_LEFT)
    if engine.box.exports is not None:
        engine.box.exports.say_goodbye()
    _wake_peers_of_head(engine)
    entry = engine.entry
    if entry.is_marked_inside():
        if entry.num_calls_below() or engine.helper.is_current():
            entry.after.append(partial(_end, engine))
            return
        entry.recover()
    _end(engine)


def _end(engine: Engine) -> None:
    """Do the part of `close` that must not run inside a call."""
    box, entry = engine.box, engine.entry
    got = entry.stop_calls(5.0)
    error = AbortedError(
        f"the process group of rank {box.rank} was {'aborted' if engine.flags & ABORTED else 'destroyed'}"
    )
    pending: list[Driven] = [*engine.queue, *engine.mail.pending()]
    for op in pending:
        if got and isinstance(op, Message):
            engine.mail.take_back(op)  # else it could still be delivered: the peers keep the memory
        op.fail(error)
        engine.retire(op)
    engine.queue.clear()
    engine.unclaimed.clear()
    engine.messages.clear()
    if got:
        entry.let_calls()
    entry.do_rest()
    engine.helper.stop()
    engine.watch.close()
    if engine.survival is not None:
        engine.survival.close(engine.has_failed)
    deadline = time.monotonic() + 1.0
    while entry.asleep and time.monotonic() < deadline:
        time.sleep(0.001)
    if got and not entry.asleep:
        engine.mail.close()
        (box.exports.end if box.exports is not None else box.close)()


def break_down(engine: Engine, cause: str, error: BaseException | None = None, ranks: Sequence[int] = ()) -> None:
    """End the group on all ranks, because a call does not have the same outcome on all. May be repeated.

    Args:
        engine: its lock is held.
        cause: the event, in words.
        error: the error that it led to.
        ranks: the ranks that have ended the group; none: this rank does.
    """
    box = engine.box
    told = f"{cause}{f': {error!r}' if error is not None else ''}"
    engine.ended_by = f"the process group was ended on all ranks, as {told}; destroy it and initialise again"
    engine.raise_flag(ABORTED)
    publish_word(box, LIFE, LIFE_BROKEN)
    _wake_peers_of_head(engine)
    pending: list[Driven] = [*engine.queue, *engine.mail.pending()]
    for op in pending:
        text = f"{op.describe(box)}: {engine.ended_by}"
        op.fail(PeerError(text, ranks, op.name, op.seq, box.epoch, cause) if ranks else AbortedError(text))
        engine.retire(op)
    engine.queue.clear()
    engine.unclaimed.clear()
    engine.messages.clear()


def end_with_others(engine: Engine) -> None:
    """End the group here, if another rank has ended it for all. The lock is held."""
    box = engine.box
    ranks = [peer for peer in box.peers if box.words[peer][LIFE] == LIFE_BROKEN]
    if ranks and not engine.flags & ENDED:
        names = ", ".join(map(str, ranks))
        break_down(engine, f"rank(s) {names} could not finish a call that others may have completed", None, ranks)


def _wake_peers_of_head(engine: Engine) -> None:
    """Wake the peers that sleep on the word of the call they wait for, so that they see that this rank has left."""
    box = engine.box
    for seq in range(engine.seq, engine.seq + 2):
        futex_wake(box.own_address + 8 * (box.first_cell + seq % NUM_CELLS * CELL_WORDS))


def leavers(box: Outboxes) -> list[int]:
    """Return the peers that have left the group."""
    return [p for p in box.peers if has_left(box.words[p])]
