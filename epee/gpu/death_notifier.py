"""A thread that notifies running kernels of dead ranks, so that their waits end long before the timeout.

The thread sleeps until a pidfd reports that a process has ended, at most `PERIOD_S`, or `WAITING_S` while a kernel
waits. A pidfd reports late: only after the process has returned its memory. /proc shows earlier that the process stores
nothing any more (`view/process/detector.py`), but reading it costs system calls and the interpreter's lock, some 20 us
per rank. So /proc is not read while no kernel waits. While one waits, a cheaper sign of dying is read first (1 us per
rank): the process's first thread has no memory. Only ranks that show this sign are examined closely. With `needs_end`,
where the rank's GPU must have stopped storing too, /proc is not read: the driver tears down a context later, but before
the pidfd reports.

Waiting kernels write the time into one word of pinned cpu memory, about every millisecond of a wait that has lasted one
(`csrc/common/wait.cuh`). This thread reads the word when it wakes up; a changed word means that a kernel waits. The
word is never reset. Nothing orders write and read: a read that comes too early is repeated a period later. In the other
direction, `tell` writes the dead ranks into the words beside it, which the kernels read.

The thread that makes the calls reports when a rank has a new process (`follow`). It also polls by itself when a call
was lost without a death that a kernel has reported (`look`). Every user of the watch holds the lock, also while
sleeping on its pidfds, so no pidfd is closed while a thread sleeps on it; the gate in front of the lock lets another
thread in after one sleep at most. When `stop` returns, the thread has ended and the pidfds are closed. A forked child
has no such thread; there `stop` closes the copies.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

from ..threads import BackgroundThread
from ..view.process.detector import NUM_LOOKS, DeathWatch, DyingSigns

PERIOD_S = 0.005
WAITING_S = 0.002
DYING_S = 0.0005  # initial period, doubled each time, while a process shows a sign of dying but is not proved dead


class DeathNotifier:
    """Notifies of deaths until it is stopped.

    Args:
        tell: called with the ranks that are dead, after each check that finds some; the latest call counts.
        waiting: returns the word of the kernels.
        name: of the thread.
        needs_end: a rank counts as dead only when its process has ended completely, including its GPU work.

    Attributes:
        told: the ranks reported last.
    """

    def __init__(
        self, tell: Callable[[Sequence[int]], None], waiting: Callable[[], int], name: str, needs_end: bool = False
    ) -> None:
        self._tell, self._waiting = tell, waiting
        self.told: tuple[int, ...] = ()
        self._watch, self._signs = DeathWatch(), DyingSigns()
        self._needs_end = needs_end
        self._seen = 0  # last value of the kernels' word
        self._sleep_s, self._dying_s = PERIOD_S, DYING_S
        self._has_dying = False  # a process shows a sign of dying and is not proved dead
        self._gate, self._lock = threading.Lock(), threading.Lock()
        self._is_stopped = False
        self._thread = BackgroundThread(self._run, name)

    def start(self, processes: Mapping[int, tuple[int, int]]) -> None:
        """Start with the processes (number, start time) of some ranks; `ResourceError` if no thread is available."""
        for rank, process in processes.items():
            self._begin(rank, process)
        self._thread.begin("reports of dead ranks to kernels that wait")

    def follow(self, rank: int, process: tuple[int, int]) -> None:
        """Watch another process for `rank`; after the return its old process is no longer reported as dead."""
        with self._gate, self._lock:
            self._watch.forget(rank)
            self._begin(rank, process)
            self.told = self._watch.dead()
            self._tell(self.told)

    def look(self) -> None:
        """Check at once, as closely as useful, and report the dead ranks. Any thread; takes at most a period."""
        with self._gate, self._lock:
            if not self._is_stopped:
                self._look(self._watch.dead(), True)

    def stop(self) -> None:
        """Stop the thread within a period; no process is watched any more. Idempotent."""
        self._is_stopped = True
        if self._thread.is_alive() and self._thread is not threading.current_thread():  # a finalizer may run in it
            self._thread.join()
        if not self._thread.is_alive():  # a forked child has no such thread
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
                pass  # lets in a thread that arrived while this one slept holding the lock
            with self._lock:
                self._round()
        with self._lock:
            self._close()

    def _round(self) -> None:
        """Sleep for a period or until a process ends; then check as closely as useful."""
        dead = self._watch.dead(self._sleep_s)
        waiting = self._waiting()
        is_waited = waiting != self._seen
        self._sleep_s = WAITING_S if is_waited else PERIOD_S
        self._seen = waiting
        self._look(dead, is_waited or self._has_dying)

    def _look(self, dead: tuple[int, ...], is_urgent: bool) -> None:
        """Report the dead ranks, starting from those already found; if urgent, also check ranks that may be dying."""
        if is_urgent and not self._needs_end:
            dead = self._look_closely(dead)
        if dead:
            for rank in dead:
                self._signs.forget(rank)
            self.told = dead
            self._tell(dead)

    def _look_closely(self, dead: tuple[int, ...]) -> tuple[int, ...]:
        """Examine the ranks that show a sign of dying, and return the dead ranks."""
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
