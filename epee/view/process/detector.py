"""Proof that a process of this machine is dead: a pidfd that has become readable, or no thread with an address space.

A pidfd is bound to one process, not to a number that may be reused; it becomes readable when that process has ended,
and never because it is slow. `kill(pid, 0)` is no substitute: it succeeds on zombies. Silence is handled elsewhere: it
leads to a timeout, which is a suspicion and another type of error. A kernel that does not answer is no proof either:
where descriptors or memory have run out, or access is forbidden, `ResourceError` says so, and the caller tries again.

The pidfd becomes readable late: a process that is killed first frees its memory, 100 ms per GB on an idle machine and
more on a busy one. The property that matters to other processes, that it stores nothing any more, holds long before: a
thread that dies drops its address space, and the last one frees it after that. `/proc/PID/task/*/statm` shows it (a
size of 0), so a process that waits for a rank checks there (`is_torn_down`). It is a proof, like the pidfd: such a
thread never runs a line of its program again.

This check costs some 20 us a rank. A sign that costs one microsecond shows whether it is worthwhile: the first thread's
size, read through a descriptor that stays open (`DyingSigns`).
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
from collections.abc import Sequence

from ...descriptors import Descriptor
from ...errors import ResourceError, expected, ignored, shortage
from ...memory.claim import is_leaving as is_leaving
from ...memory.claim import is_torn_down as is_torn_down
from ...memory.claim import started_at

NUM_LOOKS = 4  # at a time; each costs some 20 us
# `os.pread` releases the interpreter's lock, and a computing thread may keep it for 5 ms
_pread = ctypes.PyDLL(None).pread
_pread.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_longlong)
_pread.restype = ctypes.c_ssize_t


def open_process(pid: int, start_time: int) -> int:
    """Return a pidfd of process `pid`, started at `start_time` (clock ticks since boot); -1 when it has ended.

    The pidfd is opened and checked first: what /proc shows for the number afterwards is about that process, or about
    one that has the number since.

    Raises:
        ResourceError: the kernel does not say: no descriptor or memory is left, or access is forbidden.
    """
    try:
        held = Descriptor(os.pidfd_open(pid))
    except expected(ProcessLookupError, FileNotFoundError):
        return -1
    except expected(OSError) as exc:
        if exc.errno == errno.EINVAL and started_at(pid) != start_time:
            return -1  # the number is that of a thread of another process
        raise shortage(f"cannot watch process {pid}", exc, "pidfd_open") from exc
    started = started_at(pid)
    if is_readable(held) or started not in (-1, start_time):
        return -1
    if started < 0:
        held.close()
        raise ResourceError(f"process {pid} lives, but /proc does not show it; mount it without hidepid")
    return held.keep()


def is_readable(fd: int) -> bool:
    """Return whether a descriptor has something to read; of a pidfd: whether its process has ended."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


class DeathWatch:
    """A watch for the deaths of the processes of some ranks. `dead()` costs one system call; no thread is involved."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._rank_of_fd: dict[int, int] = {}
        self._process_of: dict[int, tuple[int, int]] = {}  # rank -> pid, start time
        self._dead: set[int] = set()
        self._turn = 0

    def watch(self, rank: int, pid: int, start_time: int) -> None:
        """Start watching `rank`, which is process `pid` started at `start_time` (clock ticks since boot).

        A process that has ended already counts as dead. Ranks that are threads of this process need no watching. A
        process that was `rank` before is watched no more. May be repeated where it was interrupted.

        Raises:
            ResourceError: as `open_process`; nothing has changed.
        """
        if pid == os.getpid():
            return
        fd = open_process(pid, start_time)
        if fd < 0:
            self.forget(rank)
            self._dead.add(rank)
            return
        self.forget(rank)
        self._rank_of_fd[fd] = rank
        self._process_of[rank] = (pid, start_time)
        self._poll.register(fd, select.POLLIN)

    def forget(self, rank: int) -> None:
        """Stop watching `rank`."""
        self._dead.discard(rank)
        self._process_of.pop(rank, None)
        for fd, watched in list(self._rank_of_fd.items()):
            if watched == rank and self._rank_of_fd.pop(fd, None) is not None:
                self._drop(fd)

    def dead(self, wait_s: float = 0.0) -> tuple[int, ...]:
        """Return the ranks that are proved dead, ascending; before that, sleep up to `wait_s`, or until the next one
        dies."""
        for fd, _ in self._poll.poll(wait_s * 1e3):
            with ignored(KeyError):  # another thread has closed the watch meanwhile
                self._dead.add(self._rank_of_fd.pop(fd))
                self._drop(fd)
        return tuple(sorted(self._dead)) if self._dead else ()

    def look(self, suspects: Sequence[int]) -> tuple[int, ...]:
        """Check awaited ranks closely, a few at a time; return the newly dead ones, which `dead` reports as well."""
        found = []
        for i in range(min(NUM_LOOKS, len(suspects))):
            rank = suspects[(self._turn + i) % len(suspects)]
            process = self._process_of.get(rank)
            if process is not None and rank not in self._dead and is_torn_down(*process):
                self._dead.add(rank)
                found.append(rank)
        self._turn += NUM_LOOKS
        return tuple(found)

    def note_end(self, pid: int, start_time: int) -> None:
        """Count the watched rank that is process `pid` as dead, which was proved elsewhere; without such a rank do
        nothing."""
        self._dead.update(rank for rank, process in self._process_of.items() if process == (pid, start_time))

    def close(self) -> None:
        """Close every descriptor; idempotent. Another thread may be in `dead`."""
        while self._rank_of_fd:
            with ignored(KeyError):  # the thread in `dead` has just taken the last one
                self._drop(self._rank_of_fd.popitem()[0])

    def _drop(self, fd: int) -> None:
        with ignored(KeyError):  # an interrupt came before it was registered
            self._poll.unregister(fd)
        os.close(fd)


class DyingSigns:
    """A cheap sign of processes that may be dying: one system call a rank, which never sleeps. No proof: see
    `is_leaving`."""

    def __init__(self) -> None:
        self._fd_of: dict[int, int] = {}
        self._said = ctypes.c_char()

    def watch(self, rank: int, pid: int) -> None:
        """Watch `rank`, which is process `pid`; a process that was the rank before is watched no more.

        A process that does not exist shows no sign, and this process shows none either: the first is known by its
        pidfd, the second is never asked for.

        Raises:
            ResourceError: no descriptor is left; nothing has changed.
        """
        fd = -1
        if pid != os.getpid():
            try:
                fd = os.open(f"/proc/{pid}/statm", os.O_RDONLY | os.O_CLOEXEC)
            except expected(FileNotFoundError, ProcessLookupError):
                pass
            except expected(OSError) as exc:
                raise shortage(f"cannot watch process {pid}", exc) from exc
        self.forget(rank)
        if fd >= 0:
            self._fd_of[rank] = fd

    def forget(self, rank: int) -> None:
        """Stop watching `rank`."""
        if (fd := self._fd_of.pop(rank, -1)) >= 0:
            os.close(fd)

    def leaving(self) -> list[int]:
        """Return the ranks whose first thread has no address space, or does not exist any more."""
        said, at = self._said, ctypes.addressof(self._said)
        return [rank for rank, fd in self._fd_of.items() if _pread(fd, at, 1, 0) != 1 or said.value == b"0"]

    def close(self) -> None:
        """Close every descriptor; idempotent."""
        for rank in list(self._fd_of):
            self.forget(rank)
