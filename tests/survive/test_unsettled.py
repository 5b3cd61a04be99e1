"""A call that ended without a result on some ranks and is open on another when a member dies (`call_outcome.py`).

Ranks 1 and 2 stand still with two calls begun, the first in rounds that they have not all put. Rank 0 gives the first
up while rank 3 is missing; then ranks 0 and 3 make the second, to which everybody's part is there. Rank 2 dies: for
rank 1, which wakes up with both calls open, both belong to the next view. So nobody may have completed the second.
"""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import epee
from epee.engine.entry import NEWS
from epee.errors import CommTimeoutError, PeerError, RankFailedError
from tests.harness import DEAD, run_mortal

from . import stages

NUM_ELEMENTS = 24 << 20  # more rounds than there is room for at once
PATIENCE = timedelta(seconds=30)
IMPATIENCE = timedelta(seconds=0.3)
GIVEN_UP, LAST = 0, 3
SLEEPER, VICTIM = 1, 2


def await_stop(folder: str, rank: int) -> int:
    """Wait until all threads of a rank stand still; returns its process id."""
    stages.wait_for(folder, f"begun {rank}")
    pid = int((Path(folder) / f"pid{rank}").read_text())
    stages.await_stop(pid)
    return pid


def open_elsewhere(rank: int, num_ranks: int, folder: str) -> Any:
    store = dist.FileStore(f"{folder}/store", num_ranks)
    options = epee.BackendOptions(fault_mode="mask", on_stall="error", op_timeout=PATIENCE.total_seconds())
    dist.init_process_group("epee", store=store, rank=rank, world_size=num_ranks, pg_options=options)
    dist.all_reduce(torch.ones(1))
    large, small = torch.full((NUM_ELEMENTS,), 1.0 + rank), torch.full((4,), 10.0 + rank)
    if rank in (SLEEPER, VICTIM):
        first, second = dist.all_reduce(large, async_op=True), dist.all_reduce(small, async_op=True)
        (Path(folder) / f"pid{rank}").write_text(str(os.getpid()))
        stages.reach(folder, f"begun {rank}")
        os.kill(os.getpid(), signal.SIGSTOP)
    elif rank == GIVEN_UP:
        pids = [await_stop(folder, sleeper) for sleeper in (SLEEPER, VICTIM)]
        dist.group.WORLD.set_timeout(IMPATIENCE)
        with pytest.raises(CommTimeoutError, match="aborted"):
            dist.all_reduce(large)
        dist.group.WORLD.set_timeout(PATIENCE)
        stages.reach(folder, "given up")
        second = dist.all_reduce(small, async_op=True)
        stages.wait_for(folder, "issued", 20.0)
        until = time.monotonic() + 0.5  # what must not happen gets its chance
        while not second.is_completed() and time.monotonic() < until:
            time.sleep(0.01)
        os.kill(pids[1], signal.SIGKILL)
        os.kill(pids[0], signal.SIGCONT)
    else:
        stages.wait_for(folder, "given up", 20.0)
        first, second = dist.all_reduce(large, async_op=True), dist.all_reduce(small, async_op=True)
        stages.reach(folder, "issued")
    if rank != GIVEN_UP:
        with pytest.raises((CommTimeoutError, PeerError)):
            first.wait()
        assert (large == 1.0 + rank).all()
    second.wait()
    contributors = dist.group.WORLD.last_contributors()
    dist.all_reduce(torch.ones(1))
    return small.tolist(), contributors


def test_no_rank_completes_a_call_after_one_that_is_open_at_a_rank_that_may_die() -> None:
    results = run_mortal(open_elsewhere, 4, dead={VICTIM})
    assert results[VICTIM] == DEAD
    living = [results[rank] for rank in (GIVEN_UP, SLEEPER, LAST)]
    assert living == [([10.0 + 11.0 + 13.0] * 4, (GIVEN_UP, SLEEPER, LAST))] * 3


def dies_after_a_time_out(rank: int, num_ranks: int, folder: str) -> Any:
    """The call that the death would fail has failed before; the loss is told all the same, once, and takes none."""
    store = dist.FileStore(f"{folder}/store", num_ranks)
    options = epee.BackendOptions(fault_mode="raise", on_stall="error", op_timeout=PATIENCE.total_seconds())
    dist.init_process_group("epee", store=store, rank=rank, world_size=num_ranks, pg_options=options)
    group: Any = dist.group.WORLD
    dist.all_reduce(torch.ones(1))
    if rank == num_ranks - 1:
        stages.wait_for(folder, "given up 0")
        stages.wait_for(folder, "given up 1")
        os.kill(os.getpid(), signal.SIGKILL)
    group.set_timeout(IMPATIENCE)
    with pytest.raises(CommTimeoutError):
        dist.all_reduce(torch.ones(1))
    group.set_timeout(PATIENCE)
    stages.reach(folder, f"given up {rank}")
    seq = group._engine.seq
    until = time.monotonic() + 20.0
    while not group._engine.flags & NEWS:
        assert time.monotonic() < until, "the death is not decided"
        time.sleep(0.005)
    stages.meet(folder, "known", rank, range(num_ranks - 1))
    x = torch.ones(1)
    with pytest.raises(RankFailedError, match="had failed here before") as caught:
        dist.all_reduce(x)
    assert (caught.value.ranks, x.item()) == ((num_ranks - 1,), 1.0)
    dist.all_reduce(x)
    return x.item(), group.last_contributors(), group._engine.seq - seq


def test_a_loss_behind_a_time_out_is_told_once() -> None:
    assert run_mortal(dies_after_a_time_out, 3, dead={2})[:2] == [(2.0, (0, 1), 1)] * 2
