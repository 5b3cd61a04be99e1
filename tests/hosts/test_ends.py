"""What is left of groups over hosts that have ended: nothing, whether or not Python collects garbage."""

from __future__ import annotations

import gc
import os
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from . import num_hosts_of, run_on_loopbacks
from .calls import full

NUM_WARM, NUM_MORE = 5, 40
PATIENCE_S = 20.0


def left_over() -> tuple[int, int, int]:
    """Return how many descriptors, threads and mappings of outboxes and mirrors this process has."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    num_mapped = sum("epee-outbox" in line or "epee-mirror" in line for line in maps)
    return len(os.listdir("/proc/self/fd")), threading.active_count(), num_mapped


def make_and_end(rank: int, num_ranks: int) -> tuple[int, int, int]:
    """Make groups and end them; return what is left over after some, having seen that it is no more after many."""
    gc.disable()
    found = (0, 0, 0)
    for number in range(NUM_WARM + NUM_MORE):
        group = dist.new_group(backend="epee")
        x = full(5000, rank)
        dist.all_reduce(x, group=group)
        dist.broadcast(x, 1, group=group)
        dist.destroy_process_group(group)
        del group
        if number == NUM_WARM:
            dist.barrier()
            time.sleep(0.5)  # the links end a moment later
            found = left_over()
    until = time.monotonic() + PATIENCE_S
    while any(now > before for now, before in zip(left_over(), found, strict=True)):
        assert time.monotonic() < until, (left_over(), found)
        time.sleep(0.05)
    dist.barrier()
    return found


def test_nothing_is_left_of_groups_that_have_ended() -> None:
    for _, num_threads, num_mappings in run_on_loopbacks(make_and_end, (0, 0, 1, 1), backend="gloo", timeout_s=100):
        assert num_mappings == 0
        assert num_threads <= 2


def opened_by_a_group(rank: int, num_ranks: int, num_open: int) -> tuple[int, int]:
    """Return how many descriptors and threads one more group of the job has: `num_open`, once handshakes are over."""
    dist.barrier()
    time.sleep(0.5)  # nothing of the job is under way
    before = left_over()
    group = dist.new_group()
    dist.barrier(group=group)
    until = time.monotonic() + PATIENCE_S
    while left_over()[0] - before[0] != num_open and time.monotonic() < until:
        time.sleep(0.05)
    after = left_over()
    dist.barrier()
    return after[0] - before[0], after[1] - before[1]


@pytest.mark.parametrize("placement", [(0, 1), (0, 0, 1, 1), (0, 1, 2)])
def test_a_group_has_as_many_descriptors_and_threads_as_the_docs_say(placement: tuple[int, ...]) -> None:
    num_ranks, num_hosts = len(placement), num_hosts_of(placement)
    num_open = 7 + 3 * (num_hosts - 1) + (num_ranks - num_hosts) + (num_ranks // num_hosts - 1)
    found = run_on_loopbacks(opened_by_a_group, placement, num_open, timeout_s=60)
    assert found == [(num_open, 1)] * num_ranks
