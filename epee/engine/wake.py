"""Store a word that peers may be waiting for, and wake the ranks that sleep on it.

A rank announces its sleep in its own outbox (the SLEEPERS word) before it enters the kernel; the writer reads that
word after its store. A full fence is needed between the store and the read, else both sides could miss each other
(Dekker's pattern, the one reordering that x86-64 does; `memory.signals.fence`, here without its call). On the
sleeper's side the futex call itself orders the announcement before the kernel's read of the word. A lost wake-up is
bounded: the sleep is timed.

A receive from any source waits for a word of each of several ranks. It sleeps on the BELL word of its own outbox, which
never changes while it sleeps; a sender that finds BELL set wakes the sleepers there. No rank writes another's outbox.

In a group over several hosts the word is also sent to the ranks of the other hosts (`replication/exports.py`).
"""

from __future__ import annotations

import threading

from ..memory.signals import futex_wake
from .outbox import BELL, SLEEPERS, Outboxes

_fence = threading.Lock()
_take, _give_back = _fence.acquire, _fence.release


def publish_word(box: Outboxes, index: int, value: int) -> None:
    """Store `value` in word `index` of this rank's outbox and wake the peers' waiters."""
    box.own[index] = value
    if box.exports is not None:
        box.exports.word(index, value)
    if _take(False):
        _give_back()
    else:
        threading.Lock().acquire(False)
    for words in box.peer_words:
        if words[SLEEPERS]:
            futex_wake(box.own_address + 8 * index)
            return


def ring(box: Outboxes, peer: int) -> None:
    """Wake the receives from any source of `peer`, after a message for it was published."""
    if box.words[peer][BELL]:
        futex_wake(box.address[peer] + 8 * BELL)
