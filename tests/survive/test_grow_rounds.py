"""Grow and shrink, again and again: nothing is left behind in those who stay."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from epee.errors import PeerError
from tests.harness import run_mortal

from . import stages
from .growing import await_ranks, every_operation, start, total
from .test_grow import lose

ROUNDS = int(os.environ.get("EPEE_TEST_ROUNDS", "6"))
SPARE = {"descriptors": 2}  # a pidfd of each rank that comes and goes stays until somebody waits again


def resources() -> dict[str, int]:
    """Return what this process holds: descriptors, threads, mapped outboxes and boards."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "outboxes": sum("epee-outbox" in line for line in maps),
        "blanks": sum("epee-blank" in line for line in maps),
        "boards": sum("epee-board" in line for line in maps),
    }


def grown(now: dict[str, int], before: dict[str, int]) -> list[str]:
    return [name for name in now if now[name] > before[name] + SPARE.get(name, 0)]


def most(seen: list[dict[str, int]]) -> dict[str, int]:
    """Return the highest of each in the first two rounds: one descriptor lost in each later one is too many."""
    return {name: max(one[name] for one in seen[:2]) for name in seen[0]}


def settled(before: dict[str, int] | None) -> dict[str, int]:
    """Return the resources when they are no more than `before`; the dead are let go a look after they are gone."""
    deadline = time.monotonic() + 10
    while True:
        now = resources()
        if before is None or not grown(now, before) or time.monotonic() > deadline:
            return now
        time.sleep(0.02)


def shrink(group: Any) -> None:
    """Make it a group of two; mode "raise" tells first who left since the last call, if someone did."""
    try:
        group.extend_group_size_to(2)
    except PeerError as exc:
        if exc.ranks != (3,):
            raise
        group.extend_group_size_to(2)


def breathing(slot: int, num_processes: int, folder: str, mode: str) -> Any:
    """Processes 0 and 1 stay; in round k processes 2 + 2k and 3 + 2k are ranks 2 and 3: one is killed, one leaves."""
    seen = []
    if slot < 2:
        group = start(slot, 2, folder, mode)
        dist.all_reduce(torch.ones(1), async_op=True).wait()  # the background thread is there from now on
        for k in range((num_processes - 2) // 2):
            stages.reach(folder, f"room{k}")
            await_ranks(group, 4)
            group.extend_group_size_to(4)
            every_operation(group, [0, 1, 2, 3])
            for peer in (2, 3):
                x = torch.zeros(40_000)
                dist.recv(x, peer) if slot == 0 else dist.send(x, peer)
            dist.barrier()
            lose(group, 2)
            shrink(group)
            assert total() == 2
            every_operation(group, [0, 1])
            seen.append(settled(most(seen) if k > 1 else None))
            dist.barrier()  # the next two come when both have looked
        return seen
    k, rank = (slot - 2) // 2, 2 + slot % 2
    stages.wait_for(folder, f"room{k}", 30.0 + 20 * num_processes)
    group = start(rank, 4, folder, mode, joins=True)
    every_operation(group, [0, 1, 2, 3])
    x = torch.ones(40_000)
    dist.send(x, 0)
    dist.recv(x, 1)
    dist.barrier()
    if slot % 2:
        dist.destroy_process_group()
        return seen
    os.kill(os.getpid(), signal.SIGKILL)
    return seen


@pytest.mark.parametrize("mode", ["raise", "mask"])
def test_growing_and_shrinking_leaves_nothing_behind(mode: str) -> None:
    num_processes = 2 + 2 * ROUNDS
    dead = set(range(2, num_processes, 2))
    results = run_mortal(breathing, num_processes, mode, dead=dead, timeout_s=60 + 20 * ROUNDS)
    for seen in results[:2]:
        assert len(seen) == ROUNDS
        assert not grown(seen[-1], most(seen)), seen
