"""`scripts/compare BEFORE`: a benchmark from two checkouts in turn, so that a change can be judged on a noisy machine.

`--what turns`, the default, has the ranks of both checkouts live at once and lets them take turns of milliseconds
(`turns.py`). The others run a whole benchmark per block, `python -m benchmarks.NAME` in an interpreter of its own with
one checkout's package and its own copy of the benchmark; the checkouts take turns, and each goes first every other
time.

A row's figure per turn or block is p10 and median of epee's calls; a ratio is formed within each pair that ran one
after the other, and the median of these ratios is shown, beside the ratio of the best. A row is slower when both p10
ratios are above `SLOWER` and the differences above `SLOWER_US`: on a shared machine whole blocks take twice as long as
others, and five pairs of equal code were seen to end at 1.2 (512 tokens), where their best blocks were equal.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from . import common, turns

MODULES = {"collectives": "benchmarks.collectives", "ep": "benchmarks.ep_cpu"}
TURNS, NUM_BLOCKS, NUM_TURNS = "turns", 5, 60
DEFAULTS: dict[str, tuple[str, ...]] = {"collectives": ("--idle-s", "0")}
SLOWER, SLOWER_US = 1.05, 1.0
ROOT = Path(__file__).resolve().parents[1]

Blocks = list[dict[str, dict[str, float]]]  # per block, row -> summary


class Row(NamedTuple):
    """One row of both checkouts: medians over the blocks in microseconds, medians of the pairs' ratios, best blocks."""

    name: str
    before_p10: float
    after_p10: float
    p10_ratio: float
    median_ratio: float
    before_best: float
    after_best: float

    @property
    def best_ratio(self) -> float:
        """The p10 of the best block after the change by that before it."""
        return self.after_best / self.before_best

    @property
    def is_slower(self) -> bool:
        """True when the change costs more than noise and promise allow."""
        more = min(self.after_p10 - self.before_p10, self.after_best - self.before_best)
        return min(self.p10_ratio, self.best_ratio) > SLOWER and more > SLOWER_US


def rows_of(report: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return epee's summaries of a benchmark's JSON by a name that says which case it is."""
    found = {}
    for row in report.get("rows") or report["results"]:
        shape = row.get("shape")
        what = " ".join(f"{key}={value}" for key, value in shape.items()) if shape else f"{row['bytes']} B"
        ranks = "" if shape else f" {row['num_ranks']} ranks"
        found[f"{row.get('op') or row['operation']}{ranks} {what}"] = row["epee"]
    return found


def compare(before: Blocks, after: Blocks) -> list[Row]:
    """Return the rows that both checkouts have; block i of one ran beside block i of the other."""
    rows = []
    for name in before[0]:
        if any(name not in block for block in (*before, *after)):
            continue
        ratios = {
            key: statistics.median(new[name][key] / old[name][key] for old, new in zip(before, after, strict=True))
            for key in ("p10_us", "median_us")
        }
        p10s = [statistics.median(block[name]["p10_us"] for block in blocks) for blocks in (before, after)]
        best = [min(block[name]["p10_us"] for block in blocks) for blocks in (before, after)]
        rows.append(Row(name, p10s[0], p10s[1], ratios["p10_us"], ratios["median_us"], best[0], best[1]))
    return rows


@contextmanager
def checkout(what: str) -> Iterator[Path]:
    """Give the folder of a checkout: `what` itself, or a temporary worktree of the commit that it names."""
    if Path(what).is_dir():
        yield Path(what).resolve()
        return
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "before"
        subprocess.run(["git", "-C", str(ROOT), "worktree", "add", "--detach", "--quiet", str(tree), what], check=True)
        try:
            yield tree
        finally:
            subprocess.run(["git", "-C", str(ROOT), "worktree", "remove", "--force", str(tree)], check=True)


def run_block(tree: Path, name: str, args: list[str], timeout_s: float) -> dict[str, dict[str, float]]:
    """Run the benchmark once from `tree` and return its rows."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "block.json"
        command = [sys.executable, "-m", MODULES[name], *DEFAULTS.get(name, ()), *args, "--json", str(target)]
        env = {**os.environ, "PYTHONPATH": str(tree)}
        done = subprocess.run(
            command, cwd=tree, env=env, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        if done.returncode:
            raise typer.BadParameter(
                f"{' '.join(command)} in {tree} ended with {done.returncode}:\n{done.stderr[-2000:]}"
            )
        return rows_of(json.loads(target.read_text()))


def show(rows: list[Row], num_blocks: int) -> None:
    """Print the table, slower rows marked."""
    table = [
        (
            row.name,
            f"{row.before_p10:.1f}",
            f"{row.after_p10:.1f}",
            f"{row.p10_ratio:.3f}",
            f"{row.median_ratio:.3f}",
            f"{row.best_ratio:.3f}",
            "SLOWER" if row.is_slower else "",
        )
        for row in rows
    ]
    notes = [common.machine_line(common.machine())]
    notes.append(f"{num_blocks} blocks or turns each; ratios after / before, medians over the pairs.")
    notes.append("best: p10 of the best block or turn after / before.")
    notes.append(f"SLOWER: both p10 ratios above {SLOWER:g} and more than {SLOWER_US:g} us.")
    common.print_table(
        "after / before", ("case", "before p10 us", "after p10 us", "p10", "median", "best", ""), table, notes
    )


def main(
    before: Annotated[str, typer.Argument(help="A commit, or the folder of a checkout.")],
    what: Annotated[
        str, typer.Option(help=f"{TURNS}: calls in turns of milliseconds; {' or '.join(MODULES)}: whole benchmarks.")
    ] = TURNS,
    blocks: Annotated[
        int, typer.Option(min=0, help=f"Blocks of each checkout, or turns; 0: {NUM_BLOCKS} blocks, {NUM_TURNS} turns.")
    ] = 0,
    args: Annotated[
        str, typer.Option(help="Further arguments of the benchmark, in one string; of turns its cases, by commas.")
    ] = "",
    timeout_s: Annotated[float, typer.Option(min=1.0, help="Limit of one block.")] = 1200.0,
) -> None:
    """Compare this checkout with BEFORE; ends with 1 when a case is slower."""
    if what not in (TURNS, *MODULES):
        raise typer.BadParameter(f"--what must be {' or '.join((TURNS, *MODULES))}, got {what!r}")
    measured: tuple[Blocks, Blocks] = ([], [])
    with checkout(before) as tree:
        if what == TURNS:
            found = turns.measure([tree, ROOT], (args or turns.CASES).split(","), blocks or NUM_TURNS)
            measured = found[0], found[1]
        else:
            for block in range(blocks or NUM_BLOCKS):
                sides = [(measured[0], tree), (measured[1], ROOT)]
                for rows, folder in sides if block % 2 else reversed(sides):
                    rows.append(run_block(folder, what, args.split(), timeout_s))
    rows_found = compare(*measured)
    show(rows_found, len(measured[0]))
    if any(row.is_slower for row in rows_found):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
