"""Proof that a process of this machine is dead: a pidfd that has become readable.

A pidfd is bound to one process, not to a number that may be given away again; it becomes readable when that process
has ended, and never because it is slow. `kill(pid, 0)` is no substitute: it succeeds on zombies. Silence is not
judged here: that is a time-out, which is a suspicion and another type of error.
"""

from __future__ import annotations

import os
import select

from ..errors import ResourceError
from ..memory.host import process_start_time


class DeathWatch:
    """Watches the processes of some ranks. `dead()` costs one system call; no thread is involved."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._rank_of_fd: dict[int, int] = {}
        self._dead: set[int] = set()

    def watch(self, rank: int, pid: int, start_time: int) -> None:
        """Start watching `rank`, which is process `pid` started at `start_time` (clock ticks since boot).

        A process that has ended already counts as dead. Ranks that are threads of this process need no watching.

        Raises:
            ResourceError: the system has no descriptor left for it.
        """
        if pid == os.getpid():
            return
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._dead.add(rank)
            return
        except OSError as exc:
            raise ResourceError(f"pidfd for rank {rank} (process {pid}): {exc}; raise the descriptor limit") from exc
        if process_start_time(pid) != start_time:
            os.close(fd)
            self._dead.add(rank)
            return
        self._rank_of_fd[fd] = rank
        self._poll.register(fd, select.POLLIN)

    def forget(self, rank: int) -> None:
        """Watch `rank` no more: another process takes its place."""
        self._dead.discard(rank)
        for fd, watched in list(self._rank_of_fd.items()):
            if watched == rank:
                del self._rank_of_fd[fd]
                self._poll.unregister(fd)
                os.close(fd)

    def dead(self) -> tuple[int, ...]:
        """Return the ranks that are proved dead, ascending."""
        for fd, _ in self._poll.poll(0):
            self._dead.add(self._rank_of_fd.pop(fd))
            self._poll.unregister(fd)
            os.close(fd)
        return tuple(sorted(self._dead))

    def close(self) -> None:
        """Close every descriptor; idempotent."""
        for fd in self._rank_of_fd:
            self._poll.unregister(fd)
            os.close(fd)
        self._rank_of_fd.clear()
