"""What the tests of joins over hosts share: members of a group on hosts, and processes that come into it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import epee
from epee.errors import RankFailedError

STEP_S = 20.0


def full(count: int, value: float) -> torch.Tensor:
    return torch.full((count,), value, dtype=torch.float32, device="cpu")


def say(folder: str, what: str) -> None:
    """Let the other processes of the test know that something has happened."""
    (Path(folder) / what).touch()


def hear(folder: str, what: str, timeout_s: float = 40.0) -> None:
    """Wait until a process has said so."""
    deadline = time.monotonic() + timeout_s
    while not (Path(folder) / what).exists():
        assert time.monotonic() < deadline, f"nobody has said {what}"
        time.sleep(0.01)


def member(rank: int, num_ranks: int, folder: str, mode: str = "mask", timeout_s: float = 40.0, **options: Any) -> Any:
    """Make the group as a founder."""
    chosen = epee.BackendOptions(fault_mode=mode, op_timeout=STEP_S, **options)
    store = dist.FileStore(f"{folder}/store", num_ranks)
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group("epee", store=store, rank=rank, world_size=num_ranks, timeout=timeout, pg_options=chosen)
    return dist.group.WORLD


def joiner(rank: int, num_ranks: int, folder: str, mode: str = "mask", **options: Any) -> Any:
    """Come into the group."""
    return member(rank, num_ranks, folder, mode, is_extension=True, **options)


def lose(group: Any, ranks: set[int]) -> None:
    """Make calls until the group goes on without these."""
    deadline = time.monotonic() + STEP_S
    while ranks & set(group.last_contributors() or range(group.num_slots)):
        assert time.monotonic() < deadline
        with contextlib.suppress(RankFailedError):
            dist.all_reduce(full(1, 1))


def sums(group: Any, ranks: Sequence[int], count: int = 3) -> None:
    """Add up over these ranks, small and large, and look at the values."""
    for size in (count, 40_000):
        x = full(size, group.rank() + 1)
        dist.all_reduce(x, group=group)
        assert torch.equal(x, full(size, sum(rank + 1 for rank in ranks))), (x[0], ranks)
        assert group.last_contributors() == tuple(ranks)
