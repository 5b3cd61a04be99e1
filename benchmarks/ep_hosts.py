"""`epee bench ep --hosts 2`: a step of dispatch and combine over two hosts of this machine, on CPU tensors.

A token of ours crosses the network once per host. It is measured against the same rows sent once per rank that gets
one, through the same links (`all_to_all_single` of the backend "epee") and through gloo's; there and back, without the
gathering and summing that our calls do as well. Results are checked before anything is timed: the dispatch bit for bit
against what a token's ranks must hold, the combine against a sum that is exact. All sides run in turns in the same
processes (`ep_hosts_rank.py`); the hosts are those of `epee bench hosts`.
"""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

import epee

from . import common, two_hosts

SIDES = ("epee", "flat", "gloo", "raw")
FORMULAS = {
    "time": "of a step (dispatch + combine) on rank 0, median of a block's steps, then of the blocks",
    "flat": "the same rows once per rank, by all_to_all_single of the backend epee, there and back",
    "gloo": "the same by gloo's all_to_all_single",
    "raw": "the bytes of our records and sums over a Python socket between each pair of ranks, each way at once",
    "share": "raw / epee",
    "rows": "rows that leave a host per token of it: per (token, expert), (token, rank), (token, host); expected for "
    "distinct experts chosen alike: K (1 - 1/H), (R - n)(1 - C(E - E/R, K) / C(E, K)), "
    "(H - 1)(1 - C(E - E/H, K) / C(E, K))",
}
BARS = {"flat": 1 / 0.75, "gloo": 1.3}
GOALS = {"flat": 1 / 0.75, "gloo": 2.0}


def expected_rows(num_hosts: int, ranks_per_host: int, num_experts: int, num_topk: int) -> tuple[float, float, float]:
    """Return the rows per token that leave its host: by expert, by rank, by host."""

    def missed(experts: int) -> float:
        return math.comb(num_experts - experts, num_topk) / math.comb(num_experts, num_topk)

    num_ranks = num_hosts * ranks_per_host
    by_expert = num_topk * (1 - 1 / num_hosts)
    by_rank = (num_ranks - ranks_per_host) * (1 - missed(num_experts // num_ranks))
    return by_expert, by_rank, (num_hosts - 1) * (1 - missed(num_experts // num_hosts))


def run(shape: dict[str, int], num_steps: int, num_blocks: int, is_realtime: bool) -> dict[str, Any]:
    """Measure one shape.

    Args:
        shape: ranks_per_host, num_tokens, hidden, num_topk, num_experts.
    """
    has_network = two_hosts.can_make_hosts()
    args: list[Any] = [shape, num_steps, num_blocks]
    setting = two_hosts.Setting(
        shape["ranks_per_host"], has_network, is_realtime, "benchmarks.ep_hosts_rank:measure", args, timeout_s=500.0
    )
    told = two_hosts.run(setting)
    seconds = told[0]["seconds"]
    found: dict[str, Any] = {f"{side}_us": round(1e6 * statistics.median(seconds[side]), 1) for side in SIDES}
    for side in ("flat", "gloo", "raw"):
        ratios = [other / ours for other, ours in zip(seconds[side], seconds["epee"], strict=True)]
        found[f"{side}_ratio"] = round(statistics.median(ratios), 2)
    found["rows"] = [round(sum(each["rows"][kind] for each in told) / len(told), 3) for kind in range(3)]
    sizes = (two_hosts.NUM_HOSTS, shape["ranks_per_host"], shape["num_experts"], shape["num_topk"])
    found["rows_expected"] = [round(value, 3) for value in expected_rows(*sizes)]
    found["counted_bytes"] = told[0]["sent"] if has_network else None
    found["hosts"] = "namespaces, a veth between them" if has_network else "two loopback addresses"
    return shape | found


def show(report: dict[str, Any]) -> None:
    """Print what was measured, and the table of rows for other sizes."""
    table = []
    for side in SIDES:
        ratio, bar = report.get(f"{side}_ratio"), BARS.get(side)
        told = "" if bar is None else f">= {bar:.2f} ({GOALS[side]:.2f}){'' if ratio >= bar else ' MISSED'}"
        counted = "-" if report["counted_bytes"] is None else str(report["counted_bytes"].get(side, "-"))
        table.append((side, f"{report[f'{side}_us']:.0f}", "" if ratio is None else f"{ratio:.2f}", told, counted))
    columns = ("side", "us per step", "its time / epee's", "asked (goal)", "bytes out of a host")
    size = f"{two_hosts.NUM_HOSTS}x{report['ranks_per_host']}, {report['num_tokens']} tokens x {report['hidden']}"
    title = f"dispatch + combine between two hosts: {size} bf16, top-{report['num_topk']} of {report['num_experts']}"
    notes = [f"hosts: {report['hosts']}", *(f"{name}: {formula}" for name, formula in FORMULAS.items())]
    common.print_table(title, columns, table, notes)
    rows: list[tuple[str, ...]] = [
        ("2x2, this run", *(f"{value:.2f}" for value in report["rows"]), ""),
        ("2x2, this run, expected", *(f"{value:.2f}" for value in report["rows_expected"]), ""),
    ]
    for num_hosts, ranks in ((2, 2), (4, 1), (2, 8), (4, 8), (8, 8)):
        by = expected_rows(num_hosts, ranks, 256, 8)
        saved = f"{by[1] / by[2]:.1f}x, {by[0] / by[2]:.1f}x"
        rows.append((f"{num_hosts}x{ranks}, top-8 of 256", *(f"{value:.2f}" for value in by), saved))
    columns = ("hosts x ranks", "expert", "rank", "host (ours, DeepEP's)", "saved against rank, expert")
    common.print_table("rows per token that leave its host", columns, rows, [])


def main(shape: dict[str, int], num_steps: int, num_blocks: int, is_realtime: bool, json: Path | None) -> None:
    """Measure, show, and write the numbers where that is asked for."""
    facts = common.machine() | {"epee": epee.__version__}
    report = run(shape, num_steps, num_blocks, is_realtime)
    show(report)
    if json is not None:
        common.write_json(json, {"machine": facts, "formulas": FORMULAS, "report": report})
