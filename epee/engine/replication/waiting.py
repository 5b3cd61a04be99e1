"""The waits of a group over several hosts: as `engine/waiting.py`, but polling and yielding waiters also move bytes.

A waiter that polls drives the sockets (`Links.pump`), so two ranks that wait for each other both send and receive. One
that sleeps in the kernel, on a word of a peer or of a mirror, leaves the sockets to the thread of the links, which
wakes it like any writer of the word. Before a rank waits for long, it sends its progress to the other hosts: they may
be waiting for room, and so might all ranks.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from ...memory.signals import YIELD_S
from ..entry import CHANGING, Entry
from ..operation import Block
from ..waiting import Waiting
from .exports import Exports

if TYPE_CHECKING:
    from ..engine import Engine

AWAY_S = 2 * YIELD_S  # a rank of another host is later than one of this: its word has a longer path
MOST_MOVES_S = 0.02  # however long bytes come: the caller must check deadlines and deaths
_PUMPS = 40  # before the first yield; each takes some microseconds


class LinkedWaiting(Waiting):
    """The sleep of one group in one process, which also drives the links."""

    def __init__(self, guarded: Engine, entry: Entry, exports: Exports) -> None:
        super().__init__(guarded, entry)
        self._exports, self._links = exports, exports.links

    def poll(self, words: memoryview, index: int, value: int) -> bool:
        """Poll, and pump; True when the word is there, and is this."""
        pump = self._links.pump
        for _ in range(_PUMPS if self._own_core else 2):
            pump()
            if words[index] == value:
                return True
        return self._move_until(words, index, value, time.monotonic()) and words[index] == value

    def spin(self, block: Block) -> bool:
        """Poll, and pump; True when the block's word is there."""
        words, index, value = self._guarded.peer_regions.words[block.rank], block.word, block.value
        pump = self._links.pump
        for _ in range(_PUMPS if self._own_core else 2):
            if words[index] >= value:
                return True
            pump()
        return bool(words[index] >= value)

    def yield_until(self, block: Block, now: float) -> bool:
        """Yield and pump until nothing was moved for `AWAY_S`; True when the word is there.

        As long as bytes come they are moved here: to hand the sockets to the thread costs two switches.
        """
        return self._move_until(self._guarded.peer_regions.words[block.rank], block.word, block.value, now)

    def _move_until(self, words: memoryview, index: int, value: int, now: float) -> bool:
        guarded, pump = self._guarded, self._links.pump
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

    def sleep_on(self, block: Block) -> None:
        """Sleep on a word; the thread of the links drives the sockets meanwhile."""
        self._links.pump()
        self._exports.tell_progress()
        self._links.rest()
        super().sleep_on(block)

    def nap(self, rounds: int) -> None:
        """Wait for room, or for any of several words, and pump."""
        self._links.pump()
        self._exports.tell_progress()
        super().nap(rounds)
