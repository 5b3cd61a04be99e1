"""The `epee` command, a script, or a program given as text in a process of its own that is forked, not started: torch
need not be imported again, which takes seconds.

The process leads a session, and the server of a command's ranks is forked, too. A `Program` ends as an interpreter
does, with all that it does then. Nothing else differs from `python -m epee`, of which each command has one test, from
`python SCRIPT`, or from `python -c CODE`.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing.forkserver
import os
import runpy
import signal
import sys
import tempfile
import threading
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from epee.cli.main import main
from tests.harness import server

T = TypeVar("T", bound="Forked")


class Forked:
    """A running process that calls `function(*arguments)`: what tests need of `subprocess.Popen`.

    `stdout` has what it writes to the descriptors `told`.
    """

    def __init__(
        self,
        function: Callable[..., None],
        *arguments: Any,
        folder: Path,
        environment: Mapping[str, str],
        told: tuple[int, ...],
    ) -> None:
        context = server.context()
        ours, theirs = context.Pipe(duplex=False)
        self._process = context.Process(
            target=_run, args=(theirs, told, str(folder), dict(environment), function, arguments)
        )
        self._process.start()
        theirs.close()
        self.stdout = open(os.dup(ours.fileno()), encoding="utf-8")  # noqa: SIM115 - closed in `__exit__`
        ours.close()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, as far as there is one."""
        return self._process.exitcode

    def communicate(self, timeout: float) -> tuple[str, None]:
        """Return the rest of the output once the command has ended; it is killed when that takes too long."""
        timer = threading.Timer(timeout, self.kill)
        timer.start()
        try:
            text = self.stdout.read()
            self._process.join()
        finally:
            timer.cancel()
            timer.join()
        return text, None

    def send_signal(self, number: int) -> None:
        """Send a signal to the command, not to its ranks."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """End the command at once, if it has not ended."""
        self._process.kill()

    def __enter__(self: T) -> T:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._process.join()
        self._process.close()
        self.stdout.close()


class Command(Forked):
    """A running `epee` command; `stdout` has all that it prints."""

    def __init__(self, arguments: Sequence[str], folder: Path) -> None:
        super().__init__(_command, list(arguments), folder=folder, environment=os.environ, told=(1, 2))


class Script(Forked):
    """A running `python PATH`."""

    def __init__(self, path: Path, environment: Mapping[str, str]) -> None:
        super().__init__(_script, str(path), folder=path.parent, environment=environment, told=(1,))


class Program(Forked):
    """A running `python -c CODE ARGUMENT ...`; `stdout` has all that it prints, `write` gives it input.

    Its modules have been imported before, so it is none for tests of what an import does.
    """

    def __init__(self, code: str, *arguments: str) -> None:
        theirs, self._stdin = server.context().Pipe(duplex=False)
        super().__init__(_program, theirs, code, arguments, folder=Path.cwd(), environment=os.environ, told=(1, 2))
        theirs.close()

    def write(self, text: str) -> None:
        """Give the program more to read."""
        os.write(self._stdin.fileno(), text.encode())

    def communicate(self, timeout: float) -> tuple[str, None]:
        """Say that there is nothing more to read, then as above."""
        self._stdin.close()
        return super().communicate(timeout)

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._stdin.close()


def _run(
    output: Connection,
    told: tuple[int, ...],
    folder: str,
    environment: dict[str, str],
    function: Callable[..., None],
    arguments: tuple[Any, ...],
) -> None:
    """Become what a shell would have started, as far as the process can tell."""
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # the environment may name another one
    for standard in told:
        os.dup2(output.fileno(), standard)
    output.close()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    function(*arguments)


def _command(arguments: list[str]) -> None:
    fork_server()
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    sys.argv = ["epee", *arguments]
    main()


def _script(path: str) -> None:
    sys.argv = [path]
    runpy.run_path(path, run_name="__main__")


def _program(stdin: Connection, code: str, arguments: tuple[str, ...]) -> None:
    os.dup2(stdin.fileno(), 0)
    stdin.close()
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - multiprocessing has put another one there
    gc.freeze()  # at the end nobody looks through what the server has imported; that would take a second
    sys.argv = ["-c", *arguments]
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main  # what the code leaves behind lives until the interpreter takes its modules down
    status = 0
    try:
        exec(compile(code, "<string>", "exec"), vars(main))
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException:  # noqa: BLE001 - the interpreter shows it, whatever it is
        traceback.print_exc()
        status = 1
    ctypes.pythonapi.Py_Exit(status)  # the rest of `python -c`: threads, exit handlers, modules, then the C library's


def fork_server() -> None:
    """Give this process a server of ranks, forked from it, SIGINT blocked there, as `epee.demo.launch` does it."""
    module: Any = multiprocessing.forkserver
    real = module.util.spawnv_passfds

    def fork(path: bytes, arguments: list[str], fds: Sequence[int]) -> int:
        if "forkserver" not in arguments[-1]:
            return real(path, arguments, fds)
        pid = os.fork()
        if pid:
            return pid
        try:
            for fd in map(int, os.listdir("/proc/self/fd")):
                if fd > 2 and fd not in fds:
                    _close(fd)
            exec(arguments[-1], {})  # calls the server's main function
        finally:
            os._exit(0)

    module.util.spawnv_passfds = fork
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    module.ensure_running()
    module.util.spawnv_passfds = real


def _close(fd: int) -> None:
    try:
        os.close(fd)
    except OSError:
        return  # the descriptor of the listing itself
