"""Processes that are used again and again: a round of a campaign costs a group, not a start of Python.

A worker is forked from the server of `tests.harness` (torch is imported there). It gets tasks through a pipe, one at a
time: (function, args), both importable or plain, and answers ("ok", result) or ("error", traceback). Between the two it
may `tell` values. A worker that was killed or has raised is not used again. Nothing here outlives `Pool.close`.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from tests import harness

from .processes import DEAD

_PR_SET_PDEATHSIG = 1
_connection: list[Connection] = []  # of the worker process that this is


def tell(value: Any) -> None:
    """In a worker: send a value to the owner of the pool while the task goes on."""
    _connection[0].send(("told", value))


def _work(connection: Connection, runtime_folder: str) -> None:
    """Main loop of a worker. It dies with the server that forked it, which dies with the owner of the pool."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    gc.freeze()  # a collection over all of torch holds the GIL for half a second, for ten times that on a busy machine
    faulthandler.register(signal.SIGUSR1)  # for who wants to know what the others were doing
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)  # torch's own about names that both exist
    os.environ["EPEE_RUNTIME_DIR"] = runtime_folder
    _connection.append(connection)
    while True:
        try:
            function, args, timeout_s = connection.recv()
        except EOFError:
            break
        faulthandler.dump_traceback_later(timeout_s, exit=False)
        try:
            answer: tuple[str, Any] = ("ok", function(*args))
        except BaseException:  # noqa: BLE001 - the owner shows it, whatever it is
            answer = ("error", traceback.format_exc())
        faulthandler.cancel_dump_traceback_later()
        connection.send(answer)
        if answer[0] == "error":
            break
    sys.stderr.flush()
    os._exit(0)


class Worker:
    """One process. `result` is None while it works."""

    def __init__(self, runtime_folder: str) -> None:
        self.connection, theirs = harness._CONTEXT.Pipe()
        self.process = harness._CONTEXT.Process(target=_work, args=(theirs, runtime_folder), daemon=True)
        self.process.start()
        theirs.close()
        self.told: list[Any] = []
        self.result: tuple[str, Any] | None = ("ok", None)
        self.tag: Any = None

    @property
    def pid(self) -> int:
        """The process's number."""
        return int(self.process.pid)

    def start(self, function: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> None:
        """Have the worker call `function(*args)`."""
        self.told, self.result = [], None
        self.connection.send((function, args, max(1.0, timeout_s - 2.0)))

    def take(self) -> None:
        """Take one message from the worker, or its end; blocks until there is one."""
        try:
            kind, value = self.connection.recv()
        except (EOFError, ConnectionResetError):
            self.process.join(5)
            code = self.process.exitcode
            self.result = (DEAD, DEAD) if code == -9 else ("ended", f"ended with exit code {code}")
            return
        if kind == "told":
            self.told.append(value)
        else:
            self.result = (kind, value)

    def close(self) -> None:
        """End the process, whatever it does."""
        self.process.kill()
        self.process.join()
        self.process.close()
        self.connection.close()


class Pool:
    """Workers and a folder for the jobs' sockets, which must be empty at the end."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="epee-survive-")
        self.runtime_folder = str(Path(self._folder.name) / "run")
        Path(self.runtime_folder).mkdir(mode=0o700)
        self._idle: list[Worker] = []
        self._busy: set[Worker] = set()
        self.num_started = 0

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def hire(self, count: int) -> list[Worker]:
        """Return `count` idle workers."""
        while len(self._idle) < count:
            self._idle.append(Worker(self.runtime_folder))
            self.num_started += 1
        found = [self._idle.pop() for _ in range(count)]
        self._busy.update(found)
        return found

    def release(self, workers: Sequence[Worker]) -> None:
        """Give workers back; those that are dead, have failed or still work are ended."""
        for worker in workers:
            self._busy.discard(worker)
            if worker.result is not None and worker.result[0] == "ok" and worker.process.is_alive():
                self._idle.append(worker)
            else:
                worker.close()

    def folder(self) -> tempfile.TemporaryDirectory[str]:
        """Return a new folder for one round; use it in `with`."""
        return tempfile.TemporaryDirectory(dir=self._folder.name)

    def close(self) -> None:
        """End all workers and remove the folder."""
        for worker in [*self._idle, *self._busy]:
            worker.close()
        self._idle, self._busy = [], set()
        self._folder.cleanup()


def take_until(workers: Sequence[Worker], until: Callable[[], bool], timeout_s: float) -> bool:
    """Take what workers send until `until()`, none works any more, or time is over. True: it was `until()`."""
    deadline = time.monotonic() + timeout_s
    while not until():
        working = {worker.connection: worker for worker in workers if worker.result is None}
        left = deadline - time.monotonic()
        if not working or left <= 0:
            return False
        for connection in wait(list(working), timeout=left):
            working[connection].take()  # type: ignore[index]
    return True


def collect(workers: Sequence[Worker], dead: set[int], timeout_s: float) -> list[Any]:
    """Return the results of all workers; those at positions `dead` must have died by SIGKILL, the others must not.

    Raises:
        RankFailure: it was otherwise; the message has what each of the others said.
    """

    def has_failed() -> bool:
        return any(worker.result is not None and worker.result[0] in ("error", "ended") for worker in workers)

    take_until(workers, has_failed, timeout_s)
    if has_failed():
        take_until(workers, lambda: False, 3.0)
    wrong = []
    for position, worker in enumerate(workers):
        kind, value = worker.result or ("silent", "did not answer in time (its stack went to stderr)")
        if kind != (DEAD if position in dead else "ok"):
            wrong.append(f"--- worker {position}: {kind}: {value}")
    if wrong:
        raise harness.RankFailure("\n".join(wrong))
    return [worker.result[1] for worker in workers if worker.result is not None]
