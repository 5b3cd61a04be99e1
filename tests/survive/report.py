"""Numbers of a campaign: the table, the JSON and the histogram of how long survivors' calls took."""

from __future__ import annotations

import itertools
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import epee

FORMULA = (
    "latency = end of the first call of a survivor that runs without the victim - the moment just before the victim "
    "sends itself SIGKILL; one sample per survivor and victim, all on CLOCK_MONOTONIC"
)


LOADS = (0, 3, 6, 12, 24, 10**6)


def percentile(values: list[float], share: float) -> float:
    """Return the smallest value that at least `share` of all values do not exceed; 0 for none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -(-int(share * 1e6) * len(ordered) // 10**6) - 1))] if ordered else 0.0


def summary(results: dict[str, dict[str, Any]], violations: list[dict[str, str]], args: list[str]) -> dict[str, Any]:
    """Return everything that a reader needs, without the single samples."""
    parts = {}
    for name, result in results.items():
        part = {key: value for key, value in result.items() if key not in ("latencies_ms", "loads", "covered")}
        values = result.get("latencies_ms")
        if values:
            part["latency_ms"] = {
                "p50": round(percentile(values, 0.5), 2),
                "p99": round(percentile(values, 0.99), 2),
                "max": round(max(values), 2),
                "samples": len(values),
            }
            part["latency_ms_by_load"] = by_load(values, result["loads"])
        if "covered" in result:
            part["combinations"] = len(result["covered"])
        parts[name] = part
    return {
        "command": "python -m tests.survive.campaign " + " ".join(args),
        "formula": FORMULA,
        "machine": {
            "cores": len(os.sched_getaffinity(0)),
            "processor": platform.processor() or platform.machine(),
            "kernel": platform.release(),
            "load": [round(value, 1) for value in os.getloadavg()],
        },
        "versions": {
            "epee": getattr(epee, "__version__", "?"),
            "torch": torch.__version__,
            "python": sys.version.split()[0],
        },
        "parts": parts,
        "violations": violations,
    }


def by_load(values: list[float], loads: list[float]) -> dict[str, dict[str, float]]:
    """Return the percentiles of the samples by how many processes wanted to run (1-minute average)."""
    found = {}
    for low, high in itertools.pairwise(LOADS):
        some = [value for value, load in zip(values, loads, strict=True) if low <= load < high]
        if some:
            name = f"{low} to {high}" if high < LOADS[-1] else f"{low} and more"
            found[name] = {"p50": percentile(some, 0.5), "p99": percentile(some, 0.99), "samples": len(some)}
    return {load: {key: round(value, 1) for key, value in row.items()} for load, row in found.items()}


def show(told: dict[str, Any]) -> None:
    """Print the table."""
    table = Table("part", "numbers", "latency ms p50 / p99 / max", "seconds")
    for name, part in told["parts"].items():
        latency = part.get("latency_ms")
        text = f"{latency['p50']} / {latency['p99']} / {latency['max']}" if latency else ""
        numbers = ", ".join(
            f"{k} {v}" for k, v in part.items() if k not in ("latency_ms", "latency_ms_by_load", "seconds")
        )
        table.add_row(name, numbers, text, f"{part.get('seconds', 0.0):.0f}")
    console = Console(width=160)
    console.print(table)
    for name, part in told["parts"].items():
        for load, row in part.get("latency_ms_by_load", {}).items():
            console.print(
                f"{name}, load {load}: p50 {row['p50']} ms, p99 {row['p99']} ms, {row['samples']:.0f} samples"
            )
    console.print(told["formula"])
    console.print(f"machine {told['machine']}, versions {told['versions']}, violations: {len(told['violations'])}")


def write(told: dict[str, Any], results: dict[str, dict[str, Any]], out: Path) -> None:
    """Write OUT.json, with the samples, and OUT.png where there are samples."""
    samples = {name: [round(v, 2) for v in r["latencies_ms"]] for name, r in results.items() if r.get("latencies_ms")}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps({**told, "samples_ms": samples}, indent=1) + "\n")
    if samples:
        draw(samples, told, out.with_suffix(".png"))


def draw(samples: dict[str, list[float]], told: dict[str, Any], path: Path) -> None:
    """Draw one histogram per part, on a logarithmic axis."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(samples), 1, figsize=(8, 2.6 * len(samples)), squeeze=False, sharex=True)
    low, high = 1.0, 2000.0
    bins = [low * (high / low) ** (i / 60) for i in range(61)]
    for axis, (name, values) in zip(axes[:, 0], samples.items(), strict=True):
        axis.hist([min(max(value, low), high) for value in values], bins=bins, color="#336699")
        axis.set_xscale("log")
        for share, style in ((0.5, "-"), (0.99, "--")):
            value = percentile(values, share)
            axis.axvline(value, color="#cc5500", linestyle=style, label=f"p{share * 100:.0f} {value:.0f} ms")
        axis.axvline(max(values), color="#888888", linestyle=":", label=f"max {max(values):.0f} ms")
        axis.set_title(f"{name}: {len(values)} calls of survivors", fontsize=10)
        axis.legend(fontsize=8)
    axes[-1, 0].set_xlabel("ms from SIGKILL to the end of the survivor's call")
    machine = told["machine"]
    figure.suptitle(f"{machine['cores']} cores, load {machine['load'][0]}", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
