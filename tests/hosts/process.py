"""The test's hold on the first process of a host and on those that it has forked.

A pidfd names a process without its number, which means something else in each PID namespace; it becomes readable when
the process has ended. How it ended is known by its parent, which says so on the host's socket; if the parent has died
without a word, the kernel has killed all of the host.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from multiprocessing import Pipe
from pathlib import Path

from tests.harness import Worker
from tests.shake import checked_of

from . import machine

_ANSWER_S = 30.0
_STOP_S = 10.0
_DEAD = "the host is dead"


def has_ended(pidfd: int, timeout_s: float | None) -> bool:
    """Return whether a process ends within the time."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))


def send_signal(pidfd: int, number: int) -> None:
    """Send a signal to a process unless it has ended."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, number)


class Machine:
    """One host: the socket to its first process, and what that has said."""

    def __init__(self, control: socket.socket, pid: int) -> None:
        self._control = control
        self._pidfd = os.pidfd_open(pid)
        self.pid = pid
        self._pids = os.stat(f"/proc/{pid}/ns/pid").st_ino
        self._exit_codes: dict[int, int] = {}

    def worker(self) -> Worker:
        """Fork a process in the host that does tasks of the harness.

        Raises:
            EOFError: the host is dead.
        """
        ours, theirs = Pipe()
        with contextlib.ExitStack() as undo, theirs:
            undo.callback(ours.close)
            try:
                socket.send_fds(self._control, [machine.WORD.pack(machine.FORK, 0, 0)], [theirs.fileno()])
            except BrokenPipeError as exc:
                raise EOFError(_DEAD) from exc
            kind, pid, descriptors = self._take(_ANSWER_S)
            while kind == machine.ENDED:
                kind, pid, descriptors = self._take(_ANSWER_S)
            undo.pop_all()
        return Worker((HostProcess(self, pid, descriptors[0]), ours))

    def _take(self, timeout_s: float) -> tuple[bytes, int, list[int]]:
        """Take one word of the first process and note it."""
        self._control.settimeout(timeout_s)
        word, descriptors, _, _ = socket.recv_fds(self._control, machine.WORD.size, 1)
        if not word:
            raise EOFError(_DEAD)
        kind, pid, code = machine.WORD.unpack(word)
        if kind == machine.ENDED:
            self._exit_codes[pid] = code
        return kind, pid, descriptors

    def exit_code(self, pid: int) -> int:
        """Return how a process that has ended did so: -9 when it was killed with its host."""
        while pid not in self._exit_codes:
            try:
                self._take(_ANSWER_S)
            except (EOFError, ConnectionResetError):
                return -signal.SIGKILL
        return self._exit_codes[pid]

    def processes(self) -> list[int]:
        """Return the numbers, as the test sees them, of all living processes of the host."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended, or is another user's
                is_here = (path / "ns/pid").stat().st_ino == self._pids
                if is_here and checked_of(int(path.name))[0] not in "XZ":
                    found.append(int(path.name))
        return found

    def stop(self) -> None:
        """Stop all processes and return when each stands still."""
        until = time.monotonic() + _STOP_S
        while running := [pid for pid in self.processes() if checked_of(pid)[0] not in "TXZ"]:
            for pid in running:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
            if time.monotonic() > until:
                raise TimeoutError(f"processes {running} do not stop")
            time.sleep(0.001)

    def cont(self) -> None:
        """Let all processes go on."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def kill(self) -> None:
        """Kill the first process and return when all of the host are gone."""
        send_signal(self._pidfd, signal.SIGKILL)
        if not has_ended(self._pidfd, _STOP_S):
            raise TimeoutError(f"processes {self.processes()} of a host do not end")

    def close(self) -> None:
        """End the host."""
        self.kill()
        os.close(self._pidfd)
        self._control.close()


class HostProcess:
    """A process inside a host, with what `Worker` needs of a `multiprocessing.Process`."""

    def __init__(self, host: Machine, pid_inside: int, pidfd: int) -> None:
        self._host = host
        self._pid_inside = pid_inside
        self._pidfd = pidfd
        info = Path(f"/proc/self/fdinfo/{pidfd}").read_text().split()
        self.pid = int(info[info.index("Pid:") + 1])

    @property
    def exitcode(self) -> int | None:
        """How it ended; None while it lives."""
        return self._host.exit_code(self._pid_inside) if has_ended(self._pidfd, 0.0) else None

    def is_alive(self) -> bool:
        """Return whether it lives."""
        return not has_ended(self._pidfd, 0.0)

    def kill(self) -> None:
        """Kill it, unless it has ended."""
        if self._pidfd >= 0:
            send_signal(self._pidfd, signal.SIGKILL)

    def join(self, timeout: float | None = _STOP_S) -> None:
        """Wait for its end, which a kill makes sure of."""
        if self._pidfd >= 0:
            has_ended(self._pidfd, timeout)

    def close(self) -> None:
        """Forget it; it may be closed by who asked for it, and is once more with its host."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
        self._pidfd = -1
