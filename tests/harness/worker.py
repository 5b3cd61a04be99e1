"""The test's hold on a process of the harness: give it a task, take what it says, end it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from multiprocessing.connection import wait
from typing import Any

from . import rank, server
from .values import restore

DEAD = "dead"  # stands for the result of a process that had to die by SIGKILL
tell = rank.tell
_spare: list[tuple[Any, Any]] = []  # processes that no test has used, and their connections


class RankFailure(AssertionError):
    """One or more ranks raised or did not answer; the message holds their tracebacks."""


class Worker:
    """One process. `result` is None while it works; it gets one task at a time, importable or plain all of it.

    It answers ("ok", result) or ("error", traceback) and may `tell` values before. After an error it has ended. `made`
    is a process that does `rank.main` already, and our end of its connection; else the server forks one.
    """

    def __init__(self, made: tuple[Any, Any] | None = None) -> None:
        self.process: Any
        self.connection: Any
        self.process, self.connection = made or (_spare.pop() if _spare else server.fork(rank.main))
        self.told: list[Any] = []
        self.result: tuple[str, Any] | None = ("ok", None)
        self.tag: Any = None

    @property
    def pid(self) -> int:
        """The process's number."""
        return int(self.process.pid or 0)

    def start(self, function: Callable[..., Any], *args: Any, timeout_s: float = 60.0, is_last: bool = False) -> None:
        """Have the process call `function(*args)`; with `is_last` it ends after it."""
        self.told, self.result = [], None
        self.connection.send(rank.Task(function, args, timeout_s, is_last))

    def take(self) -> None:
        """Take one message from the process, or its end; blocks until there is one."""
        try:
            kind, value = self.connection.recv()
        except (EOFError, ConnectionResetError):
            self.process.join(5)
            code = self.process.exitcode
            self.result = (DEAD, DEAD) if code == -9 else ("ended", f"died without a word (exit code {code})")
            return
        if kind == "told":
            self.told.append(value)
        else:
            self.result = (kind, restore(value))

    def close(self) -> None:
        """End the process, whatever it does."""
        self.process.kill()
        self.process.join()
        self.process.close()
        self.connection.close()


def fork_ahead(count: int) -> None:
    """Have `count` processes for the next workers, at most four; for a moment when there is nothing to do but wait."""
    while len(_spare) < min(count, 4):
        _spare.append(server.fork(rank.main))


def num_spare() -> int:
    """Return how many there are; each has a socket here."""
    return len(_spare)


def take_until(workers: Sequence[Worker], until: Callable[[], bool], timeout_s: float) -> bool:
    """Take what workers send until `until()`, none works any more, or time is over. True: it was `until()`."""
    deadline = time.monotonic() + timeout_s
    while not until():
        working = {worker.connection: worker for worker in workers if worker.result is None}
        left = deadline - time.monotonic()
        if not working or left <= 0:
            return False
        for connection in wait(list(working), timeout=left):
            working[connection].take()
    return True


def collect(workers: Sequence[Worker], dead: Collection[int], timeout_s: float, grace_s: float = 3.0) -> list[Any]:
    """Return the results of all workers; those at positions `dead` must have died by SIGKILL, the others must not.

    After the first failure the others have `grace_s` more: they may wait for the one that has failed.

    Raises:
        RankFailure: it was otherwise; the message has what each of the others said.
    """

    def is_wrong(position: int) -> bool:
        kind = (workers[position].result or ("silent",))[0]
        return kind != (DEAD if position in dead else "ok")

    def has_failed() -> bool:
        return any(worker.result is not None and is_wrong(position) for position, worker in enumerate(workers))

    until = time.monotonic() + timeout_s
    if take_until(workers, has_failed, timeout_s):
        take_until(workers, lambda: False, min(grace_s, until - time.monotonic()))
    wrong = [position for position in range(len(workers)) if is_wrong(position)]
    if wrong:
        raise RankFailure("\n".join(f"--- rank {position}: {_said(workers[position])}" for position in wrong))
    return [worker.result[1] for worker in workers if worker.result is not None]


def _said(worker: Worker) -> str:
    kind, value = worker.result or ("silent", "did not answer in time (its stack went to stderr)")
    return "died without a word (exit code -9)" if kind == DEAD else f"lives on: {value}" if kind == "ok" else value
