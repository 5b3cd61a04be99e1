"""Waits under a group's lock: polling, yielding, sleeping on a word.

The lock (`entry.py`) is held while a call is stepped and while a waiter polls (for about a millisecond), and released
before a waiter sleeps, so another thread can issue, wait or abort meanwhile. Calls from two threads are served in the
order in which they get the lock.

A wait polls for some microseconds, then yields for a millisecond, then sleeps on a futex for a few. The words belong
to peers, which store them and wake the futex when this rank's SLEEPERS word announces a sleeper (`outbox.py`). A peer
that dies wakes no rank, so every sleep is timed and the caller checks for failures after it (`examine`).

In a group over several hosts a waiter that polls or yields also drives the sockets (`pump`), so two ranks that wait for
each other both send and receive. One that sleeps in the kernel, on a word of a peer or of a mirror, leaves the sockets
to the thread of the links, which wakes it like any writer of the word. Before a rank waits for long, it sends its
progress to the other hosts: they may be waiting for room, and so might all ranks.

A wait that has slept is examined: failures that explain it end the call. Evidence, strongest first: the peer's process
has ended (`view/process/detector.py`), it has left the group (its LIFE word), it has aborted the same call (GAVE_UP),
the deadline has passed. Before a call is failed because of a peer, the word that it waits for is read once more: what a
peer stored before it died counts. All of that is under the engine's lock.
"""

from __future__ import annotations

import ctypes
import os
import time
from typing import TYPE_CHECKING

from ..errors import CommTimeoutError, PeerError, RankFailedError, expected, ignored
from ..memory.signals import YIELD_S, futex_sleep, usable_cores
from ..view.protocol.withdrawal import GRACE_S
from .entry import CHANGING, Entry
from .operation import Block, Driven, Operation
from .outbox import CORE, GAVE_UP, SLEEPERS, PeerRegions, has_exited, leavers
from .p2p.message import ANY, STAYS_OPEN, Message
from .signature import unpack
from .withdrawal import has_aborted, was_ended_by_view, withdrawn

if TYPE_CHECKING:
    from .engine import Engine

STOLEN_S = 5e-6  # a yield to no other task takes 0.5 us
NAP_ROUNDS = 64  # yields before a wait without a word of its own starts to sleep
LOADS_OWN_CORE, LOADS_SHARED_CORE = 300, 50  # polls before the first yield; 300 take about 10 us

MOVE_PAUSE_S = 0.002  # least time between two moves: the scheduler may know better

AWAY_S = 2 * YIELD_S  # a rank of another host is later than one of this: its word has a longer path
MOST_MOVES_S = 0.02  # however long bytes come: the caller must check deadlines and deaths
PUMPS_OWN_CORE, PUMPS_SHARED_CORE = 40, 2  # before the first yield; each takes some microseconds

_getcpu = ctypes.PyDLL(None).sched_getcpu


class Waiting:
    """The sleep of one group in one process.

    Args:
        guarded: the group's state; `guarded.flags` end a wait.
        entry: its lock.

    Attributes:
        num_loads: how often a wait polls before it yields; 0 in a group over several hosts.
        num_pumps: how often it polls and drives the sockets; 0 on one host.
    """

    def __init__(self, guarded: Engine, entry: Entry) -> None:
        self._guarded = guarded
        self._entry = entry
        self._exports = exports = guarded.peer_regions.exports
        self._pump, self._rest = exports.pump, exports.rest
        self.count_ranks(guarded.peer_regions.num_ranks)
        self._shares_core = False
        self._moved = 0.0
        self._narrowed: tuple[set[int], set[int]] | None = None  # see `widen`

    def count_ranks(self, num_ranks: int) -> None:
        """Set the number of polls by the number of ranks: long polling costs much and gains little when busy."""
        self._own_core = num_ranks <= len(usable_cores())
        self.num_loads = LOADS_OWN_CORE if self._own_core else LOADS_SHARED_CORE
        self.num_pumps = 0
        if self._exports.spans:
            self.num_loads, self.num_pumps = 0, PUMPS_OWN_CORE if self._own_core else PUMPS_SHARED_CORE

    # ---- waiting, with the lock held

    def poll(self, words: memoryview, index: int, value: int) -> bool:
        """Poll for some microseconds; True when the word is there, and is this."""
        for _ in range(self.num_loads):
            if words[index] == value:
                return True
        if not self.num_pumps:
            return False
        pump = self._pump
        for _ in range(self.num_pumps):
            pump()
            if words[index] == value:
                return True
        return self._move_until(words, index, value, time.monotonic()) and words[index] == value

    def spin(self, block: Block) -> bool:
        """Poll for some microseconds; True when the block's word is there."""
        words, index, value = self._guarded.peer_regions.words[block.rank], block.word, block.value
        for _ in range(self.num_loads):
            if words[index] >= value:
                return True
        for _ in range(self.num_pumps):
            if words[index] >= value:
                return True
            self._pump()
        return bool(self.num_pumps and words[index] >= value)

    def yield_until(self, block: Block, now: float) -> bool:
        """Yield for up to `YIELD_S`; True when the word is there.

        A yield that takes long has let another task run: this core is shared, maybe with the awaited peer, while
        another idles. If it is the peer, one of the two moves (`_part`). The next wait then sleeps at once, because a
        task that is woken is put on an idle core and one that yields stays where it is.
        """
        words, index, value = self._guarded.peer_regions.words[block.rank], block.word, block.value
        if self.num_pumps:
            return self._move_until(words, index, value, now)
        self._guarded.peer_regions.own[CORE] = 1 + _getcpu()
        until = now + YIELD_S
        if self._shares_core:
            self._shares_core = False
            return False
        while now < until and not self._guarded.flags & ~CHANGING:
            if words[index] >= value:
                return True
            before = now
            os.sched_yield()
            now = time.monotonic()
            if now - before > STOLEN_S and self._own_core:
                self._shares_core = not self._part(block.rank, now)
                break
        return bool(words[index] >= value)

    def _move_until(self, words: memoryview, index: int, value: int, now: float) -> bool:
        """Yield and drive the sockets until nothing was moved for `AWAY_S`; True when the word is there.

        As long as bytes come they are moved here: to hand the sockets to the thread costs two switches.
        """
        guarded, pump = self._guarded, self._pump
        until, end = now + AWAY_S, now + MOST_MOVES_S
        while now < until and not guarded.flags & ~CHANGING:
            if words[index] >= value:
                return True
            if pump():
                until = min(now + AWAY_S, end)
            else:
                os.sched_yield()
            now = time.monotonic()
        return bool(words[index] >= value)

    def _part(self, peer: int, now: float) -> bool:
        """Leave the core when `peer` runs on the same; True when done.

        The scheduler can keep two ranks that wait for each other on one core for seconds, next to an idle one, at five
        times the latency. Only the higher rank moves, else both would. The thread's affinity is the same afterwards.
        """
        own = 1 + _getcpu()
        if (
            peer > self._guarded.peer_regions.rank
            or self._guarded.peer_regions.words[peer][CORE] != own
            or now - self._moved < MOVE_PAUSE_S
        ):
            return False
        self._moved = now
        allowed = usable_cores()
        others = allowed - {own - 1}
        if not others:
            return False
        self._narrowed = allowed, others  # first: a signal handler may raise at any point from here on
        try:
            os.sched_setaffinity(0, others)
        except expected(OSError):  # the cores that the process may use have just changed: stay
            self._narrowed = None
            return False
        self.widen()
        return True

    def widen(self) -> None:
        """Restore the core that `_part` takes from this thread for a moment. May be run at any time, and repeated.

        An exception inside `_part` passes `Recovery.broken_off`, which calls this in the same thread and
        under the lock. What a user has set in between, in a signal handler for example, stays as it is.
        """
        if self._narrowed is None:
            return
        allowed, others = self._narrowed
        with ignored(OSError):  # the cores that the process may use have just changed: they are the system's now
            if os.sched_getaffinity(0) == others:
                os.sched_setaffinity(0, allowed)
        self._narrowed = None

    def sleep_on(self, block: Block) -> None:
        """Sleep on a word with the lock released, for some milliseconds at most; the links' thread has the sockets."""
        self._pump()
        self._exports.tell_progress()
        self._rest()
        rank, index, value = block
        peer_regions = self._guarded.peer_regions
        words, address = peer_regions.words[rank], peer_regions.address[rank] + 8 * index
        peer_regions.own[SLEEPERS] = len(self._entry.asleep) + 1
        seen = words[index]
        self._entry.let_go()
        try:
            if seen < value and not self._guarded.flags & ~CHANGING:
                futex_sleep(address, seen)
        finally:
            self._entry.take_back()

    def nap(self, rounds: int) -> None:
        """Wait for room, or for any of several words: there is no single word to sleep on.

        The first `NAP_ROUNDS` rounds of a wait yield, later ones sleep for half a millisecond.
        """
        self._pump()
        self._exports.tell_progress()
        self._entry.let_go()
        try:
            if rounds < NAP_ROUNDS:
                os.sched_yield()
            else:
                time.sleep(0.0005)
        finally:
            self._entry.take_back()


ENDED = "its process has ended"
HAS_LEFT = "has left the group (destroyed or aborted it)"
GAVE_THE_CALL_UP = "aborted the call"
LEAVE_GRACE_S = 0.5  # a process that leaves the group at its end leaves the view a moment later
_MEANING: dict[str, tuple[type[PeerError], str]] = {
    ENDED: (RankFailedError, "make a new group without the rank"),
    HAS_LEFT: (PeerError, "make a new group, with or without the rank"),
    GAVE_THE_CALL_UP: (
        PeerError,
        "the group can be used, and all ranks may repeat this call",
    ),
}


def examine(engine: Engine, block: Block | None, head: Driven, op: Driven, until: float | None) -> None:
    """Examine why a word has not arrived: peers that are dead or have left end the head; so does its deadline."""
    now = head.start_clock()
    engine.end_with_others()
    membership = engine.membership
    if isinstance(head, Operation) and not head.done and membership.unsettled():
        _examine_unsettled(engine, head, now)
        raise_if_overdue(engine, op, until, now)
        return
    silent = [block.rank] if block is not None and block.rank >= 0 else []
    if isinstance(head, Operation):
        unready = [] if head.published else membership.unready(head.peer_regions)
        silent = (
            unready
            or head.missing()
            or behind(engine, block)
            or engine.unsettled.behind(head.peer_regions, head.lost)
            or silent
        )
    awaited = silent if isinstance(head, Operation) else sorted(engine.mail.awaited(head))
    found = engine.watch.look(sorted(awaited))
    if found:
        membership.found_dead(found)
    if not head.done:
        membership.show(head, awaited)
    if isinstance(head, Operation) and _is_withdrawn(head, silent):
        undecided = head.withdrawal.undecided if head.withdrawal is not None else []
        if undecided and now > head.deadline:
            membership.insist(head, undecided, now)  # without its view the outcome may never be known
        raise_if_overdue(engine, op, until, now)
        return  # the next step finds the outcome
    is_late = not _lost_peer(engine, block, head, now) and now > head.deadline
    if is_late and isinstance(head, Operation):
        is_late = not membership.insist(head, silent, now)
    if is_late:
        head.holds_back = engine.order.held_by(head)
    if is_late and isinstance(head, Operation) and _can_withdraw(head):
        head.withdraw(head.peer_regions, silent)
    elif is_late and isinstance(head, Operation) and head.completing and head.withdrawal is not None:
        head.withdrawal.undecided = silent  # others have completed it: it cannot fail; waiters get an error meanwhile
    elif is_late and isinstance(head, Message):
        _end_late(engine, head, silent, now)
    elif is_late:
        told = f"rank(s) {', '.join(map(str, silent))} silent" if silent else "no room: peers are behind"
        head.fail(
            CommTimeoutError(
                f"{head.describe(engine.peer_regions, elapsed=now - head.started)}: {told}; the call "
                "is aborted; the group can be used",
                silent,
                has_job=True,
            )
        )
    if head.done:
        if isinstance(head, Message):
            if head.error is not None:
                engine.mail.cancel(head)
            engine.retire(head)
        else:
            engine.retire_heads()
    raise_if_overdue(engine, op, until, now)


def _examine_unsettled(engine: Engine, head: Operation, now: float) -> None:
    """Examine a call that cannot be decided: this host lacks data that lost ranks of other hosts had sent."""
    membership = engine.membership
    lost, tellers = membership.unsettled(), membership.tellers()
    found = engine.watch.look(tellers)
    if found:
        membership.found_dead(found)
    membership.show(head, tellers or lost)
    if now <= head.deadline or membership.insist(head, tellers, now) or not membership.unsettled() or head.done:
        return
    if _can_withdraw(head) and head.withdrawal is None:
        head.withdraw(head.peer_regions, tellers or lost)
    if head.withdrawal is not None:
        head.withdrawal.undecided = lost  # its outcome is not known before all is here: waiters get an error meanwhile
    elif not head.done:
        told = f"what rank(s) {', '.join(map(str, lost))} had sent before the view changed has not all arrived"
        head.fail(
            CommTimeoutError(
                f"{head.describe(engine.peer_regions, elapsed=now - head.started)}: {told}, rank(s) "
                f"{', '.join(map(str, tellers)) or 'none'} can resend it; the call is aborted; the group can be "
                "used",
                tellers or lost,
                has_job=True,
            )
        )
    engine.retire_heads()


def _end_late(engine: Engine, head: Message, silent: list[int], now: float) -> None:
    """End a message whose timeout has passed, unless it turns out to be delivered."""
    is_undecided = engine.mail.take_back(head)
    if head.done or (is_undecided and now < head.deadline + GRACE_S):
        return
    told = f"rank(s) {', '.join(map(str, silent))} silent" if silent else ""
    if is_undecided:
        told += f"; {STAYS_OPEN}"
    elif head.is_send:
        told += "; the message is cancelled and will not be delivered; it may be sent again"
    else:
        told = told or "nothing with this tag was sent to this rank by any other"
        told += "; nothing was received; the receive may be posted again"
    where = head.describe(engine.peer_regions, elapsed=now - head.started)
    head.fail(CommTimeoutError(f"{where}: {told.lstrip('; ')}", silent, has_job=True))


def _can_withdraw(head: Operation) -> bool:
    return head.published and not head.done and not head.completing


def _is_withdrawn(head: Operation, silent: list[int]) -> bool:
    """Return whether the call is aborted, here or by another rank (read now): then it is aborted here too."""
    if not _can_withdraw(head):
        return False
    if head.withdrawal is None:
        others = [head.peer_regions.members[peer] for peer in withdrawn(head.cell, head.tag, head.peer_regions)]
        if others:
            head.withdraw(head.peer_regions, [rank for rank in silent if rank not in others])
    return head.withdrawal is not None or head.done


def raise_if_overdue(engine: Engine, op: Driven, until: float | None, now: float) -> None:
    """Raise `CommTimeoutError` when `wait()` has lasted until `until`; the call goes on."""
    if until is not None and now > until and not op.done:
        is_told = isinstance(op, Operation) and op.told is not None
        told = "its end is still open; repeat the call" if is_told else "the call continues; wait for it again"
        raise CommTimeoutError(
            f"{op.describe(engine.peer_regions, elapsed=now - op.started)}: not done within the "
            f"time-out of wait(); {told}",
            has_job=True,
        )


def raise_if_open(head: Driven, op: Driven, until: float | None) -> None:
    """Raise `CommTimeoutError` for a waiter blocked by an aborted call, when others have not decided in time.

    A caller that claims an unclaimed call has a timeout of its own (`until`), whatever is left of that of the call.
    """
    if not isinstance(head, Operation) or head.withdrawal is None:
        return
    is_claimed = until is not None and isinstance(op, Operation) and op.told is not None
    if not is_claimed and (head is op or op.start_clock() > op.deadline):
        head.withdrawal.raise_if_open(head, head.peer_regions)


def behind(engine: Engine, block: Block | None) -> list[int]:
    """Return all ranks that are behind on the word that a call waits for."""
    if block is None or block.rank < 0:
        return []
    return [rank for rank in engine.members.members if engine.peer_regions.words[rank][block.word] < block.value]


def _lost_peer(engine: Engine, block: Block | None, head: Driven, now: float) -> bool:
    """Fail the head when it waits for a rank that cannot come any more. Its words are read a last time before."""
    gone = leavers(engine.peer_regions)
    dead = {*engine.watch.dead(), *(peer for peer in gone if has_exited(engine.peer_regions.words[peer]))}
    for peer in gone:
        engine.mask[peer] = 0
    gone = [peer for peer in gone if not has_exited(engine.peer_regions.words[peer])]
    if isinstance(head, Operation):
        concerned = set(head.missing())
        if block is not None and block.rank >= 0 and engine.peer_regions.words[block.rank][block.word] < block.value:
            concerned.add(block.rank)
            if block.word != head.cell and engine.peer_regions.words[block.rank][head.cell + GAVE_UP] == head.tag:
                head.fail(_peer_error(engine.peer_regions, [block.rank], head, now, GAVE_THE_CALL_UP))
                return True
    else:
        concerned = engine.mail.awaited(head)
        if block is None or block.rank < 0:
            concerned = set() if engine.mail.step(head) is None else concerned
        elif engine.peer_regions.words[block.rank][block.word] >= block.value:
            concerned = set()
    lost = sorted(concerned.intersection(dead))
    if isinstance(head, Message):  # a rank that left in order has left, whether or not its process has ended since
        lost = [rank for rank in lost if rank not in gone]
        if head.wanted == ANY:
            lost = []  # the view reports it in a moment, and continues without them
    if not head.done and isinstance(head, Operation):
        quitters = engine.membership.ended_without(head)
        if quitters:
            head.fail(_unmet(engine, quitters, head, now))
            return True
    if isinstance(head, Operation) and (lost or now - head.started < LEAVE_GRACE_S):
        return head.done  # a lost rank leaves the view as well, and the view decides the outcome of the call
    if lost:
        engine.membership.found_dead(lost)
        head.fail(_peer_error(engine.peer_regions, lost, head, now, ENDED))
        return True
    left = sorted(concerned.intersection(gone))
    if left and (isinstance(head, Operation) or len(left) == len(concerned)):
        head.fail(_peer_error(engine.peer_regions, left, head, now, HAS_LEFT))
        return True
    return head.done


def _unmet(engine: Engine, quitters: list[int], head: Operation, now: float) -> PeerError:
    """Return the error of a call that others have ended without putting anything into it.

    A rank that had aborted it before the view changed shows that in GAVE_UP, whichever call it is; where a loss has
    ended it on others, that counts. Else a call with a root was ended by a loss; one without a root is possible in any
    view, so no loss has ended it.
    """
    peer_regions = head.peer_regions
    words = {rank: peer_regions.words[peer_regions.members.index(rank)] for rank in quitters}
    aborted = [rank for rank in quitters if has_aborted(head.cell, head.seq, words[rank])]
    if aborted and not any(was_ended_by_view(head.cell, head.seq, words[rank]) for rank in quitters):
        return _peer_error(peer_regions, aborted, head, now, GAVE_THE_CALL_UP)
    lost = engine.membership.removed_in(peer_regions.epoch) if unpack(head.plan.signature).root >= 0 else []
    told = head.describe(engine.peer_regions, peer=", ".join(map(str, quitters)), elapsed=now - head.started)
    text = f"{told}: ended there without its part; results are untouched; the next call runs in this view"
    kind = RankFailedError if lost else PeerError
    return kind(text, lost or quitters, head.name, head.seq, head.peer_regions.epoch, GAVE_THE_CALL_UP)


def _peer_error(peer_regions: PeerRegions, ranks: list[int], head: Driven, now: float, cause: str) -> PeerError:
    kind, remedy = _MEANING[cause]
    seq = head.seq
    told = head.describe(peer_regions, peer=", ".join(map(str, ranks)), elapsed=now - head.started)
    return kind(
        f"{told}: {cause}; results are untouched; {remedy}",
        ranks,
        head.name,
        seq,
        peer_regions.epoch,
        cause,
    )
