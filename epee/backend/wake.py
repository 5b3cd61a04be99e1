"""Store a word that peers may be waiting for, and wake them if any sleeps.

Who sleeps says so in its own outbox (the SLEEPERS word) before it goes into the kernel; the writer looks there after
its store. Between the store and the look must be a full fence, else both sides could miss each other (Dekker's
pattern, the one reordering that x86-64 does): taking and giving back a lock is one locked instruction each. On the
sleeper's side the futex call itself orders its announcement before the kernel's look at the word. Should a wake-up be
lost all the same, the sleep is timed.
"""

from __future__ import annotations

import threading

from ..memory.signals import futex_wake
from .outbox import SLEEPERS, Outboxes

_fence = threading.Lock()


def publish_word(box: Outboxes, index: int, value: int) -> None:
    """Store `value` in word `index` of this rank's outbox and wake the peers' waiters."""
    box.own[index] = value
    with _fence:
        pass
    for words in box.peer_words:
        if words[SLEEPERS]:
            futex_wake(box.own_address + 8 * index)
            return
