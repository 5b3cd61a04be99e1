"""A thread that tells kernels in flight of ranks that die, so that their waits end long before the time-out.

It sleeps until a pidfd says that a process has ended, `PERIOD_S` at most, `WAITING_S` while a kernel waits. A pidfd
speaks late, when a process has given its memory back; that it stores nothing any more shows in /proc before
(`view/process/detector.py`), but to look there costs system calls and the interpreter's lock, some 20 us a rank. So
that is done only while somebody has use for it: while a kernel of this rank waits, and has done so for a millisecond.

Who writes: the kernels, one word of pinned host memory, with the time, about every millisecond of such a wait
(`csrc/common/wait.cuh`). Who reads: this thread, when it wakes up; a word that has changed since means that somebody
waits. Nobody resets it. Nothing orders the two: who reads too early reads again a period later, and a wait that is over
costs a look for nothing. The other way, `tell` writes the dead ranks into the words beside it; the kernels look there.

Who has a rank now is told by the thread of the calls (`follow`). Whoever uses the watch, also to sleep on its pidfds,
holds the lock, so none of them is closed under a sleeper; the gate in front of the lock lets another thread in after
one sleep at most. When `stop` returns, the thread has ended and the pidfds are closed; a forked child has no such
thread, there `stop` closes the copies.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

from ...view.process.detector import NUM_LOOKS, DeathWatch

PERIOD_S = 0.005
WAITING_S = 0.002  # a process that has been killed takes some milliseconds to let go of its memory


class DeathNotifier:
    """Tells of deaths until it is stopped.

    Args:
        tell: given the ranks that are dead, after each look that finds some; the newest word counts.
        waiting: returns the word of the kernels.
        name: of the thread.

    Attributes:
        told: the ranks that were told last.
    """

    def __init__(self, tell: Callable[[Sequence[int]], None], waiting: Callable[[], int], name: str) -> None:
        self._tell, self._waiting = tell, waiting
        self.told: tuple[int, ...] = ()
        self._watch = DeathWatch()
        self._ranks: set[int] = set()
        self._seen = 0  # of the word
        self._sleep_s = PERIOD_S
        self._gate, self._lock = threading.Lock(), threading.Lock()
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self, processes: Mapping[int, tuple[int, int]]) -> None:
        """Begin with the processes (number, start time) of some ranks."""
        for rank, process in processes.items():
            self._watch.watch(rank, *process)
            self._ranks.add(rank)
        self._thread.start()

    def follow(self, rank: int, process: tuple[int, int]) -> None:
        """Watch another process for `rank`; when this returns, nobody is told any more that its old one is dead."""
        with self._gate, self._lock:
            self._watch.forget(rank)
            self._watch.watch(rank, *process)
            self._ranks.add(rank)
            self.told = self._watch.dead()
            self._tell(self.told)

    def stop(self) -> None:
        """End the thread, within a period; nobody follows any more. Idempotent."""
        self._is_stopped = True
        if self._thread.is_alive() and self._thread is not threading.current_thread():  # a finalizer may run in it
            self._thread.join()
        if not self._thread.is_alive():  # nor in a forked child
            self._watch.close()

    def _run(self) -> None:
        while not self._is_stopped:
            with self._gate:
                pass  # after who came while this thread slept with the lock
            with self._lock:
                self._round()
        self._watch.close()

    def _round(self) -> None:
        """Sleep for a period, or until a process ends; then look as closely as is of use."""
        dead = self._watch.dead(self._sleep_s)
        waiting = self._waiting()
        self._sleep_s = PERIOD_S if waiting == self._seen else WAITING_S
        if waiting != self._seen:
            self._seen = waiting
            living = [rank for rank in self._ranks if rank not in dead]
            for _ in range(0, len(living), NUM_LOOKS):
                self._watch.look(living)
            dead = self._watch.dead()
        if dead:
            self.told = dead
            self._tell(dead)
