"""Points in a test that its processes wait for, as files: they work across deaths, and nothing sleeps for luck."""

from __future__ import annotations

import time
from pathlib import Path


def reach(folder: str, name: str) -> None:
    """Say that point `name` is reached; again changes nothing."""
    (Path(folder) / f"stage-{name}").touch()


def wait_for(folder: str, name: str, timeout_s: float = 30.0) -> None:
    """Wait until somebody has reached point `name`."""
    deadline = time.monotonic() + timeout_s
    while not (Path(folder) / f"stage-{name}").exists():
        assert time.monotonic() < deadline, f"nobody reached {name!r}"
        time.sleep(0.005)
