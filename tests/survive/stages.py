"""Points in a test that its processes wait for, as files: they work across deaths, and nothing sleeps for luck."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterable
from pathlib import Path


def reach(folder: str, name: str) -> None:
    """Say that point `name` is reached; again changes nothing."""
    (Path(folder) / f"stage-{name}").touch()


def wait_for(folder: str, name: str, timeout_s: float = 60.0) -> None:
    """Wait until somebody has reached point `name`."""
    deadline = time.monotonic() + timeout_s
    while not (Path(folder) / f"stage-{name}").exists():
        assert time.monotonic() < deadline, f"nobody reached {name!r}"
        time.sleep(0.005)


def meet(folder: str, name: str, rank: int, ranks: Iterable[int], timeout_s: float = 60.0) -> None:
    """Wait until all `ranks`, of which this is one, have come to point `name`: a barrier without a backend."""
    reach(folder, f"{name}-{rank}")
    for other in ranks:
        wait_for(folder, f"{name}-{other}", timeout_s)


def await_stop(pid: int, timeout_s: float = 60.0) -> None:
    """Wait until all threads of a process stand still by SIGSTOP."""
    deadline = time.monotonic() + timeout_s
    while not all(
        stat.read_text().rpartition(")")[2].split()[0] == "T" for stat in Path(f"/proc/{pid}/task").glob("*/stat")
    ):
        assert time.monotonic() < deadline, f"process {pid} does not stop"
        time.sleep(0.005)


def hold_the_gil_until(fifo: str) -> None:
    """Read from a pipe in C without giving the interpreter back, until somebody has written to it."""
    fd = os.open(fifo, os.O_RDWR)
    ctypes.PyDLL(None).read(fd, ctypes.create_string_buffer(1), 1)
    os.close(fd)
