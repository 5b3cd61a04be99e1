"""`epee bench survive`: what surviving costs while nothing fails: the backend now and before it could survive anything.

Two sets of processes run side by side, one with the epee of this clone, one with that of an older commit (the last one
before the control plane and the change of views came into the backend). They take turns: a set makes some blocks of
calls back to back while the other sleeps, then the other one, for many rounds, in changing order. A time is the
slowest rank's for a block, by the number of calls. Median and p10 over all blocks are shown: on a machine with other
work the p10 is the one to believe.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

import epee

from . import common

NAME = "survive"
BEFORE = "e31432c~1"
CASES = (
    ("barrier", 0, 200),
    ("all_reduce", 4, 200),
    ("all_reduce", 1 << 10, 200),
    ("all_reduce", 64 << 10, 50),
    ("all_reduce", 1 << 20, 10),
    ("broadcast", 4, 200),
    ("all_gather", 4, 200),
)
REPEATS = 5  # blocks in a turn
FORMULAS = {
    "time": "the slowest rank's time of a block of calls back to back / the number of calls",
    "price": "p10 now - p10 before, over the blocks of all rounds",
    "goal": "at most 1 us or 1 % of the time before",
}


class Version:
    """The ranks of one version: `num_ranks` processes that wait for commands."""

    def __init__(self, folder: Path, num_ranks: int, store: str) -> None:
        worker = Path(__file__).with_name("survive_worker.py")
        env = os.environ | {"PYTHONPATH": str(folder)}
        self._ranks = [
            subprocess.Popen(
                [sys.executable, str(worker), str(rank), str(num_ranks), store],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=env,
                cwd=folder,
                text=True,
            )
            for rank in range(num_ranks)
        ]
        for path in self._answers():
            if Path(path).parent.parent != folder.resolve():
                raise common.RankError(f"a rank imported {path}, expected epee in {folder}")

    def _answers(self) -> list[Any]:
        lines = [rank.stdout.readline() for rank in self._ranks if rank.stdout is not None]
        if not all(lines):
            raise common.RankError("a rank has ended; its error is above")
        return [json.loads(line) for line in lines]

    def measure(self, op: str, nbytes: int, num_calls: int) -> list[float]:
        """Run one turn; return the slowest rank's seconds per call, per block."""
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write(json.dumps([op, nbytes, num_calls, REPEATS]) + "\n")
            rank.stdin.flush()
        return [max(times) for times in zip(*self._answers(), strict=True)]

    def close(self) -> None:
        """End the processes."""
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.close()
        for rank in self._ranks:
            try:
                rank.wait(30)
            except subprocess.TimeoutExpired:
                rank.kill()
                rank.wait()
            assert rank.stdout is not None
            rank.stdout.close()


def checkout(commit: str, folder: Path) -> None:
    """Put the tree of `commit` into `folder`; raises `CalledProcessError` where the clone does not have it."""
    root = Path(__file__).resolve().parent.parent
    archive = folder.with_suffix(".tar")
    subprocess.run(["git", "archive", "-o", str(archive), commit, "epee"], cwd=root, check=True)
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    archive.unlink()


def compare(commit: str, num_ranks: int, rounds: int) -> list[dict[str, Any]]:
    """Measure both versions in turns; return a row per case."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text).resolve()
        checkout(commit, folder / "before")
        here = Path(epee.__file__).resolve().parent.parent
        sides = {
            "before": Version(folder / "before", num_ranks, f"{folder}/store1"),
            "now": Version(here, num_ranks, f"{folder}/store2"),
        }
        try:
            times: dict[Any, dict[str, list[float]]] = {case: {"before": [], "now": []} for case in CASES}
            order = list(sides)
            for _ in range(rounds):
                for case in CASES:
                    random.shuffle(order)
                    for side in order:
                        times[case][side] += sides[side].measure(*case)
        finally:
            for version in sides.values():
                version.close()
    return [row_of(case, num_ranks, sides_times) for case, sides_times in times.items()]


def row_of(case: tuple[str, int, int], num_ranks: int, times: dict[str, list[float]]) -> dict[str, Any]:
    """Return the numbers of one operation and size."""
    before, now = (common.summarise([times[side]]) for side in ("before", "now"))
    price_us = now.p10_us - before.p10_us
    return {
        "op": case[0],
        "bytes": case[1],
        "num_ranks": num_ranks,
        "before": common.summary_dict(before),
        "now": common.summary_dict(now),
        "price_us": round(price_us, 2),
        "price_median_us": round(now.median_us - before.median_us, 2),
        "is_met": price_us <= max(1.0, 0.01 * before.p10_us),
    }


def show(rows: list[dict[str, Any]], facts: dict[str, Any], commit: str) -> None:
    """Print the table."""
    table = [
        (
            row["op"],
            str(row["num_ranks"]),
            str(row["bytes"]),
            f"{row['before']['p10_us']:.1f}",
            f"[{row['before']['median_us']:.1f}]",
            f"{row['now']['p10_us']:.1f}",
            f"[{row['now']['median_us']:.1f}]",
            f"{row['price_us']:+.2f}",
            "yes" if row["is_met"] else "no",
        )
        for row in rows
    ]
    columns = (
        "operation",
        "ranks",
        "bytes",
        "before us",
        "[median]",
        "now us",
        "[median]",
        "price us",
        "<= 1 us or 1 %",
    )
    common.print_table(f"price of surviving, p10, against {commit}", columns, table, [common.machine_line(facts)])


def main(
    ranks: Annotated[int, typer.Option(min=2, help="Ranks of each version.")] = 2,
    rounds: Annotated[int, typer.Option(min=3, help="Turns of each version per operation.")] = 40,
    against: Annotated[str, typer.Option(help="The commit to compare with.")] = BEFORE,
    json_to: Annotated[Path | None, typer.Option("--json", help="Write the numbers here.")] = None,
) -> None:
    """Compare the backend with what it was before it could survive."""
    facts = common.machine() | {"epee": epee.__version__}
    rows = compare(against, ranks, rounds)
    show(rows, facts, against)
    if json_to is not None:
        common.write_json(json_to, {"machine": facts, "formulas": FORMULAS, "against": against, "rows": rows})


if __name__ == "__main__":
    typer.run(main)
