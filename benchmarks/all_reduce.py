"""`epee bench all-reduce`: one all_reduce after another, epee against gloo, wall time of each call on rank 0.

Both groups live in the same two processes, one arithmetic thread each; in a block each side makes its calls back to
back, without a barrier between them, and the sides change places from block to block. Every size is checked on both
sides before and after. Where `epee bench collectives` asks how long the slowest rank takes for a block, this asks what
a program sees that reduces something small at every step.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer

import epee

from . import common

NAME = "all-reduce"
CALLS = {4: 300, 64 << 10: 150, 16 << 20: 8}  # in a block, by bytes
NUM_BLOCKS, WARM_UP = 5, 5
FORMULAS = {
    "time": "wall time of a call on rank 0, median of a block's calls, then of the blocks; p10 and p90 over all calls",
    "speedup": "median over the blocks of gloo's median / epee's median",
    "calls": "in a block: " + ", ".join(f"{calls} of {nbytes} B" for nbytes, calls in CALLS.items()),
}


def check(x: torch.Tensor, rank: int, num_ranks: int, group: dist.ProcessGroup) -> None:
    """Compare one all_reduce with its closed form."""
    x.fill_(rank + 1)
    dist.all_reduce(x, group=group)
    assert bool((x == num_ranks * (num_ranks + 1) / 2).all())
    x.zero_()  # sums of zeros stay zero however often the call is repeated


def times_of_block(x: torch.Tensor, group: dist.ProcessGroup, calls: int) -> list[float]:
    """Return the times of `calls` calls back to back, in seconds."""
    taken = []
    for _ in range(WARM_UP + calls):
        began = time.perf_counter()
        dist.all_reduce(x, group=group)
        taken.append(time.perf_counter() - began)
    return taken[WARM_UP:]


def measure(rank: int, num_ranks: int, barrier: common.SpinBarrier) -> dict[int, dict[str, list[list[float]]]]:
    """Run on every rank: bytes -> side -> the times of the calls of each block in seconds."""
    groups = {"gloo": dist.group.WORLD, "epee": dist.new_group(list(range(num_ranks)), backend="epee")}
    times: dict[int, dict[str, list[list[float]]]] = {}
    for nbytes, calls in CALLS.items():
        x = torch.zeros(nbytes // 4)
        for group in groups.values():
            check(x, rank, num_ranks, group)
        times[nbytes] = {side: [] for side in groups}
        for block in range(NUM_BLOCKS):
            for side in sorted(groups, reverse=block % 2 == 1):
                times[nbytes][side].append(times_of_block(x, groups[side], calls))
        for group in groups.values():
            check(x, rank, num_ranks, group)
    return times


def report(times: dict[int, dict[str, list[list[float]]]]) -> list[dict[str, Any]]:
    """Turn the times of rank 0's blocks into rows."""
    rows = []
    for nbytes, sides in times.items():
        medians = {side: [statistics.median(block) for block in blocks] for side, blocks in sides.items()}
        ratios = [gloo / ours for gloo, ours in zip(medians["gloo"], medians["epee"], strict=True)]
        columns: dict[str, float] = {}
        for side, blocks in sides.items():
            calls = sorted(taken for block in blocks for taken in block)
            found = {"": statistics.median(medians[side])}
            found |= {f"_p{part}": common.percentile(calls, part) for part in (10, 90)}
            columns |= {f"{side}{name}_us": round(1e6 * seconds, 1) for name, seconds in found.items()}
        speedup = {"speedup": round(statistics.median(ratios), 2), "speedups": [round(ratio, 1) for ratio in ratios]}
        rows.append({"bytes": nbytes, **columns, **speedup})
    return rows


def main(json: Annotated[Path | None, typer.Option(help="Write the numbers here.")] = None) -> None:
    """Compare small and large all_reduce calls of two ranks with gloo's, call by call."""
    facts = common.machine() | {"epee": epee.__version__}
    rows = report(common.run_ranks(measure, 2)[0])
    keys = ("bytes", "gloo_us", "epee_us", "speedup")
    table = [(*(str(row[key]) for key in keys), ", ".join(map(str, row["speedups"]))) for row in rows]
    notes = [common.machine_line(facts), *(f"{name}: {formula}" for name, formula in FORMULAS.items())]
    columns = ("bytes", "gloo us", "epee us", "speedup", "of each block")
    common.print_table("all_reduce of float32, 2 ranks: epee against gloo", columns, table, notes)
    if json is not None:
        common.write_json(json, {"machine": facts, "formulas": FORMULAS, "rows": rows})


if __name__ == "__main__":
    typer.run(main)
