"""Ranks that may die: like `tests.harness.run_ranks`, but a rank that is killed is an outcome, not an error.

Every rank is a real process. The victim kills itself by SIGKILL at a chosen point (`kill_points.py`), so the moment is
exact; nothing of it runs after that, and nobody is told.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

from tests import harness

DEAD = "dead"


def run_mortal(
    function: Callable[..., Any], num_ranks: int, *args: Any, dead: set[int], timeout_s: float = 40.0
) -> list[Any]:
    """Call `function(rank, num_ranks, folder, *args)` on `num_ranks` processes; return results in rank order.

    `dead` are the ranks that must die by SIGKILL; `DEAD` stands for their result. Anything else fails the test: another
    rank that dies, an exception, a victim that lives, a rank that does not answer in `timeout_s`.
    """
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            harness._start(function, rank, num_ranks, (folder, *args), folder, None, timeout_s)
            for rank in range(num_ranks)
        ]
        try:
            outcomes = _collect(ranks, timeout_s)
        finally:
            for process, connection in ranks:
                process.kill()
                process.join()
                process.close()
                connection.close()
    wrong = {rank: told for rank, (kind, told) in enumerate(outcomes) if kind != (DEAD if rank in dead else "ok")}
    if wrong:
        raise harness.RankFailure("\n".join(f"--- rank {rank}: {told}" for rank, told in wrong.items()))
    return [harness._restore(told) for _, told in outcomes]


def _collect(ranks: list[Any], timeout_s: float) -> list[tuple[str, Any]]:
    deadline = time.monotonic() + timeout_s
    outcomes: list[tuple[str, Any]] = [("silent", "did not answer in time (its stack went to stderr)")] * len(ranks)
    pending = {connection: rank for rank, (_, connection) in enumerate(ranks)}
    while pending and time.monotonic() < deadline:
        for connection in wait(list(pending), timeout=deadline - time.monotonic()):
            rank = pending.pop(connection)
            try:
                outcomes[rank] = connection.recv()
            except EOFError:
                process = ranks[rank][0]
                process.join(5)
                kind = DEAD if process.exitcode == -9 else "ended"
                outcomes[rank] = (kind, DEAD if kind == DEAD else f"ended with exit code {process.exitcode}")
            if outcomes[rank][0] == "error":  # the others may now wait for it
                deadline = min(deadline, time.monotonic() + 5)
    return outcomes
