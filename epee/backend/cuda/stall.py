"""Warnings about ranks that a kernel waits for longer than a timeout, in groups with `on_stall="wait"`.

There a kernel's wait ends when the rank comes, is dead, or the call is aborted, so nothing is ever reported. The thread
that reports deaths to kernels (`gpu/death_notifier.py`) reads the word of waiting kernels every few milliseconds, here.
While the word keeps changing a kernel waits. Every half of a timeout of that the call's number and the words by which
ranks join calls are read (`Collectives.behind`), on a stream of their own, as the caller's stream is where the kernel
waits; if the number is the same as before, the ranks that are behind are named. Nothing is written, so a crash leaves
nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from ...errors import ignored
from .machine import Collectives

logger = logging.getLogger("epee")

PAUSE_S = 1.0  # a word that has not changed for so long: no kernel waits


class StallWarnings:
    """The warnings of one group. One thread.

    Args:
        machine: of the group.
        timeout_s: returns the seconds after which a wait is reported; reports are at least half of them apart.
    """

    def __init__(self, machine: Collectives, timeout_s: Callable[[], float]) -> None:
        self._machine, self._timeout_s = machine, timeout_s
        self._seen = machine.device.waiting()
        self._changed = self._started = self._read = self._warned = 0.0
        self._number = -1  # of the call in which kernels waited when it was read last

    def check(self) -> int:
        """Return the word of waiting kernels, having warned if it has been changing for long in one call."""
        waiting, now = self._machine.device.waiting(), time.monotonic()
        if waiting != self._seen:
            if now - self._changed > PAUSE_S:
                self._started = self._read = now
            self._seen, self._changed = waiting, now
            if now - self._read > self._timeout_s() / 2:
                self._read = now
                with ignored(RuntimeError):  # CUDA's own: the calls report it
                    self._warn(now)
        return waiting

    def _warn(self, now: float) -> None:
        number, behind = self._machine.behind()
        if number != self._number:  # calls may wait for a moment each, one after the other
            self._number, self._started = number, now
        if min(now - self._started, now - self._warned) < self._timeout_s() / 2:
            return
        self._warned = now
        logger.warning(
            "a call on CUDA tensors waits for rank(s) %s for %.1f s and goes on waiting (on_stall='wait')",
            ", ".join(map(str, behind)) or "that have begun it",
            now - self._started + self._timeout_s() / 2,
        )
