"""A thread that tells kernels in flight of ranks that die, so that their waits end long before the time-out.

It looks every `LOOK_S` at the processes of the ranks: by pidfd, and closely at those whose end the pidfd will only tell
later (`view/process/detector.py`). Who has a rank now is told by the thread of the calls (`follow`); both hold the lock
while they use the watch, for some 20 us a rank.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

from ...view.process.detector import DeathWatch

LOOK_S = 0.005


class Mourner:
    """Tells of deaths until it is stopped.

    Args:
        tell: given the ranks that are dead, after each look; the newest word counts.
        name: of the thread.
    """

    def __init__(self, tell: Callable[[Sequence[int]], None], name: str) -> None:
        self._tell = tell
        self._watch = DeathWatch()
        self._ranks: set[int] = set()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self, processes: Mapping[int, tuple[int, int]]) -> None:
        """Begin with the processes (number, start time) of some ranks."""
        for rank, process in processes.items():
            self._watch.watch(rank, *process)
            self._ranks.add(rank)
        self._thread.start()

    def follow(self, rank: int, process: tuple[int, int]) -> None:
        """Watch another process for `rank`; when this returns, nobody is told any more that its old one is dead."""
        with self._lock:
            self._watch.forget(rank)
            self._watch.watch(rank, *process)
            self._ranks.add(rank)
            self._tell(self._watch.dead())

    def stop(self) -> None:
        """End the thread; it may look once more. Idempotent."""
        self._stop.set()
        if self._thread.ident is None:  # never begun: nobody else drops the descriptors
            self._watch.close()

    def _run(self) -> None:
        while not self._stop.wait(LOOK_S):
            with self._lock:
                dead = self._watch.dead()
                self._watch.look([rank for rank in self._ranks if rank not in dead])
                self._tell(self._watch.dead())
        with self._lock:
            self._watch.close()
