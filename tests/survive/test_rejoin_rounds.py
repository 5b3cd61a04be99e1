"""Kill and replace, again and again: nothing grows."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.harness import run_mortal

from . import stages
from .test_rejoin import lose_one, start, total

ROUNDS = int(os.environ.get("EPEE_TEST_ROUNDS", "6"))


def resources() -> tuple[int, int, int]:
    """Return the numbers of descriptors, threads and mapped outboxes of this process.

    The group's own thread for calls that nobody drives begins when a call first waits long enough: it always counts.
    """
    maps = Path("/proc/self/maps").read_text().splitlines()
    names = [thread.name for thread in threading.enumerate()]
    helpers = names.count("epee-backend")
    num_threads = len(names) - helpers + max(1, helpers)
    return len(os.listdir("/proc/self/fd")), num_threads, sum("epee-outbox" in line for line in maps)


def settled(before: tuple[int, int, int] | None) -> tuple[int, int, int]:
    """Return the resources when none is more than `before`; what the join itself needed goes a moment after it."""
    deadline = time.monotonic() + 10
    while True:
        now = resources()
        if before is None or not grown(now, before) or time.monotonic() > deadline:
            return now
        time.sleep(0.02)


def grown(now: tuple[int, int, int], before: tuple[int, int, int]) -> bool:
    return any(one > other for one, other in zip(now, before, strict=True))


def mortal(slot: int, num_processes: int, folder: str) -> Any:
    """Process 0 lives; process k >= 1 is rank 1 in round k, and dies at its end unless it is the last."""
    seen = []
    if slot == 0:
        group = start(0, 2, folder, "mask")
        for k in range(1, num_processes):
            if k > 1:
                lose_one(group, "mask")
                stages.reach(folder, f"lost{k - 1}")
                group.recover_ranks([1], 30.0)
            assert total() == 2
            x = torch.zeros(3)
            dist.recv(x, 1)
            assert x.tolist() == [k] * 3
            seen.append(settled(seen[1] if k > 2 else None))
            stages.reach(folder, f"seen{k}")
        return seen
    if slot > 1:
        stages.wait_for(folder, f"lost{slot - 1}", 120.0)
    start(1, 2, folder, "mask", joins=slot > 1)
    assert total() == 2
    dist.send(torch.full((3,), float(slot)), 0)
    stages.wait_for(folder, f"seen{slot}")
    if slot < num_processes - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return seen


def test_kill_and_replace_leaves_nothing_behind() -> None:
    results = run_mortal(mortal, ROUNDS + 1, dead=set(range(1, ROUNDS)), timeout_s=60 + 5 * ROUNDS)
    seen = results[0]
    assert len(seen) == ROUNDS
    assert not grown(seen[-1], seen[1]), seen
