"""A thread that tells kernels in flight of ranks that die, so that their waits end long before the time-out.

It sleeps until a pidfd says that a process has ended, `PERIOD_S` at most, `WAITING_S` while a kernel waits. A pidfd
speaks late, when a process has given its memory back; that it stores nothing any more shows in /proc before
(`view/process/detector.py`), but to look there costs system calls and the interpreter's lock, some 20 us a rank. So
nobody looks there while no kernel waits, and then first for a sign of dying, which costs 1 us a rank: its first thread
has no memory. Whoever shows that is looked at closely. Where it matters that its GPU stores nothing any more, either,
nobody looks: the driver takes a context down later, but before the pidfd speaks.

Who says that a kernel waits: the kernels, in one word of pinned host memory, with the time, about every millisecond of
a wait that has lasted one (`csrc/common/wait.cuh`). Who reads: this thread, when it wakes up; a word that has changed
since means that somebody waits. Nobody resets it. Nothing orders the two: who reads too early reads again a period
later. The other way, `tell` writes the dead ranks into the words beside it; the kernels look there.

Who has a rank now is told by the thread of the calls (`follow`), which also looks itself where a call was lost for no
death that a kernel had heard of (`look`). Whoever uses the watch, also to sleep on its pidfds,
holds the lock, so none of them is closed under a sleeper; the gate in front of the lock lets another thread in after
one sleep at most. When `stop` returns, the thread has ended and the pidfds are closed; a forked child has no such
thread, there `stop` closes the copies.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

from ..threads import BackgroundThread
from ..view.process.detector import NUM_LOOKS, DeathWatch, DyingSigns

PERIOD_S = 0.005
WAITING_S = 0.002
DYING_S = 0.0005  # at first, and twice as long each time, while one shows a sign of dying and is not proved dead


class DeathNotifier:
    """Tells of deaths until it is stopped.

    Args:
        tell: given the ranks that are dead, after each look that finds some; the newest word counts.
        waiting: returns the word of the kernels.
        name: of the thread.
        needs_end: dead is only whose process has ended altogether, its GPU's work as well.

    Attributes:
        told: the ranks that were told last.
    """

    def __init__(
        self, tell: Callable[[Sequence[int]], None], waiting: Callable[[], int], name: str, needs_end: bool = False
    ) -> None:
        self._tell, self._waiting = tell, waiting
        self.told: tuple[int, ...] = ()
        self._watch, self._signs = DeathWatch(), DyingSigns()
        self._needs_end = needs_end
        self._seen = 0  # of the word
        self._sleep_s, self._dying_s = PERIOD_S, DYING_S
        self._has_dying = False  # somebody shows a sign and is not proved dead
        self._gate, self._lock = threading.Lock(), threading.Lock()
        self._is_stopped = False
        self._thread = BackgroundThread(self._run, name)

    def start(self, processes: Mapping[int, tuple[int, int]]) -> None:
        """Begin with the processes (number, start time) of some ranks; `ResourceError` where no thread is left."""
        for rank, process in processes.items():
            self._begin(rank, process)
        self._thread.begin("reports of dead ranks to kernels that wait")

    def follow(self, rank: int, process: tuple[int, int]) -> None:
        """Watch another process for `rank`; when this returns, nobody is told any more that its old one is dead."""
        with self._gate, self._lock:
            self._watch.forget(rank)
            self._begin(rank, process)
            self.told = self._watch.dead()
            self._tell(self.told)

    def look(self) -> None:
        """Look at once, as closely as is of use, and tell who is found dead. Any thread; takes a period at most."""
        with self._gate, self._lock:
            if not self._is_stopped:
                self._look(self._watch.dead(), True)

    def stop(self) -> None:
        """End the thread, within a period; nobody follows any more. Idempotent."""
        self._is_stopped = True
        if self._thread.is_alive() and self._thread is not threading.current_thread():  # a finalizer may run in it
            self._thread.join()
        if not self._thread.is_alive():  # nor in a forked child
            self._close()

    def _begin(self, rank: int, process: tuple[int, int]) -> None:
        self._watch.watch(rank, *process)
        self._signs.watch(rank, process[0])

    def _close(self) -> None:
        self._watch.close()
        self._signs.close()

    def _run(self) -> None:
        while not self._is_stopped:
            with self._gate:
                pass  # after who came while this thread slept with the lock
            with self._lock:
                self._round()
        with self._lock:
            self._close()

    def _round(self) -> None:
        """Sleep for a period, or until a process ends; then look as closely as is of use."""
        dead = self._watch.dead(self._sleep_s)
        waiting = self._waiting()
        is_waited = waiting != self._seen
        self._sleep_s = WAITING_S if is_waited else PERIOD_S
        self._seen = waiting
        self._look(dead, is_waited or self._has_dying)

    def _look(self, dead: tuple[int, ...], is_urgent: bool) -> None:
        """Tell who is dead, of whom some are known; look at those who may be dying where it is urgent."""
        if is_urgent and not self._needs_end:
            dead = self._look_closely(dead)
        if dead:
            for rank in dead:
                self._signs.forget(rank)
            self.told = dead
            self._tell(dead)

    def _look_closely(self, dead: tuple[int, ...]) -> tuple[int, ...]:
        """Look at those who show a sign of dying, and return who is dead."""
        dying = [rank for rank in self._signs.leaving() if rank not in dead]
        if dying:
            for _ in range(0, len(dying), NUM_LOOKS):
                self._watch.look(dying)
            dead = self._watch.dead()
        self._has_dying = not set(dying).issubset(dead)
        if self._has_dying:
            self._sleep_s = min(self._dying_s, self._sleep_s)
            self._dying_s = min(2 * self._dying_s, PERIOD_S)
        else:
            self._dying_s = DYING_S
        return dead
