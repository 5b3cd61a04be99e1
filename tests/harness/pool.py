"""Processes that are used again and again: a round of a campaign costs a group, not a process."""

from __future__ import annotations

import faulthandler
import os
import signal
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from . import rank as process
from .worker import Worker, collect


def _prepare(runtime_folder: str) -> None:
    """Set up a process of a pool."""
    faulthandler.register(signal.SIGUSR1)  # for who wants to know what the others were doing
    warnings.filterwarnings("ignore", category=FutureWarning)  # torch's own about names that both exist
    os.environ["EPEE_RUNTIME_DIR"] = runtime_folder


class Pool:
    """Workers and a folder for the jobs' sockets, which must be empty at the end. Nothing outlives `close`."""

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
        new = [Worker() for _ in range(count - len(self._idle))]
        for worker in new:
            worker.start(_prepare, self.runtime_folder)
        self._idle += new
        self.num_started += len(new)
        collect(new, (), 60.0)
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

    def run_ranks(self, function: Callable[..., Any], num_ranks: int, *args: Any, timeout_s: float) -> list[Any]:
        """Call `function(rank, num_ranks, *args)` in a group of gloo and return the results, as `run_ranks` does."""
        workers = self.hire(num_ranks)
        with self.folder() as folder:
            for rank, worker in enumerate(workers):
                call = (process.with_group, "gloo", f"{folder}/store", function, rank, num_ranks, *args)
                worker.start(*call, timeout_s=timeout_s)
            try:
                return collect(workers, (), timeout_s, grace_s=20.0)
            finally:
                self.release(workers)

    def folder(self) -> tempfile.TemporaryDirectory[str]:
        """Return a new folder for one round; use it in `with`."""
        return tempfile.TemporaryDirectory(dir=self._folder.name)

    def close(self) -> None:
        """End all workers and remove the folder."""
        for worker in [*self._idle, *self._busy]:
            worker.close()
        self._idle, self._busy = [], set()
        self._folder.cleanup()
