"""What every benchmark shares: starting ranks, interleaved timing, statistics, and the report as table and JSON.

How a number is made. All sides of a comparison run in the same processes, over the same inputs, in the same rounds:
in each round every rank passes a spinning barrier, reads the clock, makes one call of one side, reads the clock; then
the next side. The order of the sides turns by one each round, so that none always runs with the caches of the same
neighbour. A round counts as its slowest rank. Reported are the median, p10, p90 and p99 over the rounds.

This module knows nothing of epee; a benchmark that uses it checks its results before it measures.
"""

from __future__ import annotations

import json
import mmap
import multiprocessing as mp
import os
import platform
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

WARMUP_ROUNDS = 10
_WORD_STRIDE = 8  # 64-bit words per rank in the barrier's file: one cache line each


class RankError(RuntimeError):
    """A rank raised, died or did not answer in time; the message holds the traceback."""


def _nothing() -> float:
    return 0.0


@dataclass(frozen=True)
class Side:
    """One of the things to compare.

    Attributes:
        name: key of the result.
        call: what is timed. What it returns is dropped after the clock was read.
        before: runs before the barrier; returns seconds that count all the same (0 if none do).
    """

    name: str
    call: Callable[[], object]
    before: Callable[[], float] = _nothing


@dataclass(frozen=True)
class Summary:
    """Statistics over the rounds, each the slowest rank's time of one call, in microseconds."""

    median_us: float
    p10_us: float
    p90_us: float
    p99_us: float
    num_repeats: int


class SpinBarrier:
    """Lets all ranks go within about a microsecond of each other (a barrier by messages lets them go 100 us apart).

    Each rank owns one word in a shared file: it writes its round, then yields until every word has reached that round.
    Aligned 64-bit stores do not tear; nothing else is ordered by it.
    """

    def __init__(self, path: str, rank: int, num_ranks: int, timeout_s: float) -> None:
        with open(path, "r+b") as file:
            self._words = memoryview(mmap.mmap(file.fileno(), 8 * _WORD_STRIDE * num_ranks)).cast("Q")
        self._mine = rank * _WORD_STRIDE
        self._all = range(0, _WORD_STRIDE * num_ranks, _WORD_STRIDE)
        self._timeout_s = timeout_s
        self._round = 0

    def wait(self) -> None:
        """Return when every rank has called `wait` as often as this one."""
        self._round += 1
        self._words[self._mine] = self._round
        deadline = time.monotonic() + self._timeout_s
        for index in self._all:
            while self._words[index] < self._round:
                os.sched_yield()
                if time.monotonic() > deadline:
                    raise TimeoutError(f"benchmark barrier: a rank did not come within {self._timeout_s:.0f} s")


def interleave(barrier: SpinBarrier, sides: Sequence[Side], num_repeats: int) -> dict[str, list[float]]:
    """Time every side once per round; return this rank's seconds, `[num_repeats]` per side.

    The first `WARMUP_ROUNDS` rounds are not counted.
    """
    times: dict[str, list[float]] = {side.name: [] for side in sides}
    for round_idx in range(WARMUP_ROUNDS + num_repeats):
        for position in range(len(sides)):
            side = sides[(round_idx + position) % len(sides)]
            extra_s = side.before()
            barrier.wait()
            begin = time.perf_counter()
            result = side.call()
            elapsed = time.perf_counter() - begin
            del result
            if round_idx >= WARMUP_ROUNDS:
                times[side.name].append(elapsed + extra_s)
    return times


def summarise(seconds_by_rank: Sequence[Sequence[float]]) -> Summary:
    """Take the slowest rank of each round, then median, p10, p90 and p99 over the rounds.

    Args:
        seconds_by_rank: `[num_ranks][num_repeats]`.
    """
    slowest = sorted(max(times) * 1e6 for times in zip(*seconds_by_rank, strict=True))
    return Summary(
        median_us=statistics.median(slowest),
        p10_us=percentile(slowest, 10),
        p90_us=percentile(slowest, 90),
        p99_us=percentile(slowest, 99),
        num_repeats=len(slowest),
    )


def percentile(ascending: list[float], percent: int) -> float:
    """Nearest rank: the smallest value that at least `percent` % of the values do not exceed."""
    return ascending[-(-len(ascending) * percent // 100) - 1]


def run_ranks(function: Callable[..., Any], num_ranks: int, *args: Any, timeout_s: float = 600.0) -> list[Any]:
    """Call `function(rank, num_ranks, barrier, *args)` on `num_ranks` new processes; return the results in rank order.

    Each process uses one thread for arithmetic and has the default process group (gloo) initialised. `function` must
    be importable by name. Every process is gone when this returns.

    Raises:
        RankError: a rank raised, died, or did not answer within `timeout_s`.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "numpy", "epee"])
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "barrier").write_bytes(bytes(8 * _WORD_STRIDE * num_ranks))
        processes, pipes = [], []
        try:
            for rank in range(num_ranks):
                ours, theirs = context.Pipe()
                packed = (theirs, function, rank, num_ranks, args, folder, timeout_s)
                process = context.Process(target=_rank_main, args=packed, daemon=True)
                process.start()
                theirs.close()
                processes.append(process)
                pipes.append(ours)
            return _collect(pipes, timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _rank_main(
    pipe: Connection,
    function: Callable[..., Any],
    rank: int,
    num_ranks: int,
    args: tuple[Any, ...],
    folder: str,
    timeout_s: float,
) -> None:
    torch.set_num_threads(1)
    try:
        store = dist.FileStore(str(Path(folder) / "store"), num_ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
        barrier = SpinBarrier(str(Path(folder) / "barrier"), rank, num_ranks, timeout_s)
        result = function(rank, num_ranks, barrier, *args)
        dist.destroy_process_group()
        pipe.send(("ok", result))
    except KeyboardInterrupt:
        pass  # the parent got it too and ends the run
    except BaseException:  # noqa: BLE001 - the parent shows it, whatever it is
        pipe.send(("error", traceback.format_exc()))
    finally:
        pipe.close()
    os._exit(0)


def _collect(pipes: list[Connection], timeout_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    deadline = time.monotonic() + timeout_s
    pending = {pipe: rank for rank, pipe in enumerate(pipes)}
    while pending:
        ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankError(f"ranks {sorted(pending.values())} did not answer within {timeout_s:.0f} s")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = pending.pop(pipe)
            try:
                status, value = pipe.recv()
            except EOFError:
                raise RankError(f"rank {rank} died without a word") from None
            if status != "ok":
                raise RankError(f"rank {rank} raised:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(pipes))]


def machine() -> dict[str, Any]:
    """Describe the machine and the versions that a number depends on; no names, no paths."""
    model = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("model name", "Model")):
            model = line.split(":", 1)[1].strip()
            break
    return {
        "cpu": model,
        "num_cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "architecture": platform.machine(),
        "kernel": platform.release().split("-")[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_average_1min_before": round(os.getloadavg()[0], 2),
        "date": time.strftime("%Y-%m-%d %H:%M"),
    }


def machine_line(facts: dict[str, Any]) -> str:
    """Return the facts of `machine()` as one line for the top of a table."""
    return (
        f"{facts['num_cores']} cores of {facts['cpu']} ({facts['architecture']}), {facts['memory_gib']} GiB, "
        f"Linux {facts['kernel']}, Python {facts['python']}, torch {facts['torch']}, "
        f"load before {facts['load_average_1min_before']}"
    )


def write_json(path: Path, report: dict[str, Any]) -> None:
    """Write a report; the folder is made if it is missing, and a half-written file never takes the name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(report, indent=1) + "\n")
    partial.replace(path)


def summary_dict(summary: Summary) -> dict[str, float | int]:
    """Return a summary as it stands in the JSON, times rounded to 0.1 us."""
    return {key: round(value, 1) for key, value in asdict(summary).items()}


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str]) -> None:
    """Print one table (all but the first column to the right) and the notes that say how to read it."""
    console = Console()
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    if not console.is_terminal:  # a log has no width of its own: never cut a number
        console = Console(width=200)
    console.print(table)
    for note in notes:
        console.print(note, highlight=False, soft_wrap=True)
