"""The numbers of a campaign over hosts, beside what was asked for: the table, and the file that keeps them.

The file has one entry per part, the last that was run, with its command and commit: parts may run at different times.
"""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import epee
from benchmarks import common
from tests.survive.report import percentile

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "hosts_survive_2cores.json"
FORMULAS = {
    "process killed": (
        "end of the first call of a survivor that runs without the victim - the moment just before the victim sends "
        "itself SIGKILL; one sample per survivor and victim, of rounds in which every host keeps a rank"
    ),
    "host killed": "the same, of rounds in which all ranks of a host die",
    "host cut": (
        "end of the first call of a survivor that runs without the host - the moment before the network is cut - "
        "EPEE_HOST_TIMEOUT_S; one sample per survivor"
    ),
}
BARS = {
    "process killed": {"p50": 100.0, "p99": 500.0},
    "host killed": {"p99": 1500.0},
    "host cut": {"p99": 1000.0},
}


def summary(told: dict[str, Any], args: list[str], seconds: float) -> dict[str, Any]:
    """Return what is kept of a part: numbers, percentiles of times by kind, violations."""
    part = {key: value for key, value in told.items() if key not in ("times_ms", "covered")}
    part["violations"] = [repr(what) for what, _ in told["violations"]]  # what was wrong is printed, with paths
    if "covered" in told:
        part["combinations"] = len(told["covered"])
    part["times_ms"] = {
        kind: {
            "p50": round(percentile(times, 0.5), 1),
            "p99": round(percentile(times, 0.99), 1),
            "max": round(max(times), 1),
            "samples": len(times),
        }
        for kind, times in told.get("times_ms", {}).items()
        if times
    }
    said = args[: args.index("--json")] if "--json" in args else args  # without a path of this machine
    ran = {"command": "python -m tests.hosts.campaign " + " ".join(said), "seconds": round(seconds), "commit": commit()}
    return {**ran, "date": time.strftime("%Y-%m-%d", time.gmtime()), **part}


def commit() -> str:
    """Return the commit of the tree, with a plus where files differ from it."""
    git = ["git", "-C", str(RESULTS.parent)]
    head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=False)
    return (head.stdout.strip() or "no repository") + ("+" if changed.stdout.strip() else "")


def facts() -> dict[str, Any]:
    """Return what a reader must know of the machine."""
    return {**common.machine(), "epee": epee.__version__}


def show(parts: dict[str, dict[str, Any]], machine: dict[str, Any]) -> None:
    """Print the table, the bars and the formulas."""
    table = Table("part", "numbers", "times, ms: p50 / p99 / max (samples)", "asked for", "violations", "seconds")
    for name, part in parts.items():
        skipped = ("violations", "times_ms", "command", "commit", "seconds", "date")
        numbers = ", ".join(f"{key} {value}" for key, value in part.items() if key not in skipped)
        rows = [
            f"{kind}: {found['p50']} / {found['p99']} / {found['max']} ({found['samples']})"
            for kind, found in part["times_ms"].items()
        ]
        asked = [
            ", ".join(f"{share} <= {most:.0f}" for share, most in BARS.get(kind, {}).items())
            for kind in part["times_ms"]
        ]
        bad = str(len(part["violations"]))
        table.add_row(name, numbers, "\n".join(rows), "\n".join(asked), bad, str(part["seconds"]))
    console = Console(width=180)
    console.print(table)
    for kind in {kind for part in parts.values() for kind in part["times_ms"]} & set(FORMULAS):
        console.print(f"{kind} = {FORMULAS[kind]}")
    console.print(f"machine {machine}")


def write(parts: dict[str, dict[str, Any]], machine: dict[str, Any], path: Path) -> None:
    """Put the parts into the file, in the place of those of the same names."""
    kept: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"parts": {}}
    kept["parts"].update({name: {**part, "load": machine["load_average_1min_before"]} for name, part in parts.items()})
    told = {"machine": machine, "formulas": FORMULAS, "bars_ms": BARS, "parts": kept["parts"]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(told, indent=1) + "\n")
