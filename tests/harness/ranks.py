"""`run_ranks` and its kin: as many fresh processes as there are ranks, one call on each, and all of them are ended."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from . import rank as process
from .worker import Worker, collect, fork_ahead


@contextlib.contextmanager
def started(
    function: Callable[..., Any], num_ranks: int, *args: Any, timeout_s: float, backend: str | None = None
) -> Iterator[list[Worker]]:
    """Yield workers that do `function(rank, num_ranks, *args)`, each a process; they are ended with the block.

    `function` must be importable (a module-level function). With `backend`, there is a default process group during the
    call.
    """
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as ends:
        workers = [Worker() for _ in range(num_ranks)]
        for worker in workers:
            ends.callback(worker.close)
        for rank, worker in enumerate(workers):
            call: tuple[Any, ...] = (function, rank, num_ranks, *args)
            if backend is not None:
                call = (process.with_group, backend, str(Path(folder) / "store"), *call)
            worker.start(*process.at_place(rank, call), timeout_s=timeout_s, is_last=True)
        yield workers


def run_ranks(
    function: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    timeout_s: float = 100.0,
    backend: str | None = "gloo",
    dead: Collection[int] = (),
) -> list[Any]:
    """Call `function(rank, num_ranks, *args)` on `num_ranks` processes and return their results in rank order.

    With `backend`, the default process group is initialised before the call and destroyed after it. A result that is a
    tensor is sent by value. A rank that raises, dies or does not answer in `timeout_s` fails the test, but `dead` must
    die by SIGKILL: that takes no time from the others, and `DEAD` stands for the result.
    """
    with started(function, num_ranks, *args, timeout_s=timeout_s, backend=backend) as workers:
        fork_ahead(num_ranks)
        return collect(workers, dead, timeout_s, grace_s=20.0)


def run_mortal(
    function: Callable[..., Any], num_ranks: int, *args: Any, dead: set[int], timeout_s: float = 100.0
) -> list[Any]:
    """Call `function(rank, num_ranks, folder, *args)` on `num_ranks` processes; return results in rank order.

    `dead` are the ranks that must die by SIGKILL; `DEAD` stands for their result. The victim kills itself at a chosen
    point (`tests/survive/kill_points.py`), so the moment is exact; nothing of it runs after that, and nobody is told.
    Anything else fails the test: another rank that dies, an exception, a victim that lives, a rank that does not answer
    in `timeout_s`.
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        started(function, num_ranks, folder, *args, timeout_s=timeout_s) as workers,
    ):
        fork_ahead(num_ranks)
        return collect(workers, dead, timeout_s, grace_s=5.0)
