"""Waits under a group's lock: polling, yielding, sleeping on a word.

The lock (`entry.py`) is held while a call is stepped and while a waiter polls (for about a millisecond), and released
before a waiter sleeps, so another thread can issue, wait or abort meanwhile. Calls from two threads are served in the
order in which they get the lock.

A wait polls for some microseconds, then yields for a millisecond, then sleeps on a futex for a few. The words belong
to peers, which store them and wake the futex when this rank's SLEEPERS word announces a sleeper (`outbox.py`). A peer
that dies wakes no rank, so every sleep is timed and the caller checks for failures after it (`engine.py`).

In a group over several hosts a waiter that polls or yields also drives the sockets (`pump`), so two ranks that wait for
each other both send and receive. One that sleeps in the kernel, on a word of a peer or of a mirror, leaves the sockets
to the thread of the links, which wakes it like any writer of the word. Before a rank waits for long, it sends its
progress to the other hosts: they may be waiting for room, and so might all ranks.
"""

from __future__ import annotations

import ctypes
import os
import time
from typing import TYPE_CHECKING

from ..errors import expected, ignored
from ..memory.signals import YIELD_S, futex_sleep, usable_cores
from .entry import CHANGING, Entry
from .operation import Block
from .outbox import CORE, SLEEPERS

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
