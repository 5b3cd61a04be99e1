"""What the numbers were measured on: machine and versions, as plain values for JSON."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path


def describe() -> dict[str, object]:
    """Return processor, core count, memory, system and the versions of Python and the packages in use."""
    return {
        "processor": _processor(),
        "cores": num_cores(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("epee", "torch", "numpy", "matplotlib", "rich", "typer")},
    }


def num_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0))


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"
