"""A rank that is busy is not a rank that is lost: nobody is voted out while nobody waits in vain (V-6, V-7)."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import epee
from tests.harness import DEAD, run_mortal

from . import stages

BUSY_S = 3
PATIENCE = timedelta(seconds=30)


def start(rank: int, num_ranks: int, folder: str, op_timeout: float) -> Any:
    store = dist.FileStore(str(Path(folder) / "store"), num_ranks)
    options = epee.BackendOptions(fault_mode="mask", op_timeout=op_timeout)
    dist.init_process_group("epee", store=store, rank=rank, world_size=num_ranks, pg_options=options)
    return dist.group.WORLD


def hold_the_gil(seconds: int) -> None:
    """Sleep in C without giving the interpreter back: no Python thread of this process runs meanwhile."""
    ctypes.PyDLL(None).sleep(seconds)


def total() -> int:
    x = torch.ones(1, dtype=torch.int64)
    dist.all_reduce(x)
    return int(x)


def busy(rank: int, num_ranks: int, folder: str) -> Any:
    group = start(rank, num_ranks, folder, op_timeout=2.0)
    assert total() == num_ranks
    if rank == 1:
        hold_the_gil(BUSY_S)
        stages.reach(folder, "back")
    else:
        stages.wait_for(folder, "back")
    group.set_timeout(PATIENCE)
    return total(), group.epoch, group.last_contributors()


def test_a_rank_that_holds_the_gil_stays_while_nobody_waits_for_it() -> None:
    assert run_mortal(busy, 3, dead=set()) == [(3, 1, (0, 1, 2))] * 3


def busy_while_another_dies(rank: int, num_ranks: int, folder: str) -> Any:
    group = start(rank, num_ranks, folder, op_timeout=30.0)
    assert total() == num_ranks
    if rank == 3:
        stages.wait_for(folder, "holding")
        os.kill(os.getpid(), signal.SIGKILL)
    fifo = str(Path(folder) / "fifo")
    if rank == 1:
        os.mkfifo(fifo)
        stages.reach(folder, "holding")
        stages.hold_the_gil_until(fifo)
    else:
        stages.wait_for(folder, "holding")
        decision = group._engine.membership.runtime.await_decision(1, 20.0)
        assert decision is not None, "the survivors waited for the rank that was busy"
        assert [member.slot for member in decision.members] == [0, 1, 2]
        stages.meet(folder, "agreed", rank, (0, 2))
        if rank == 0:
            Path(fifo).write_bytes(b"x")
    return total(), group.epoch, group.last_contributors()


def test_a_death_is_agreed_on_while_a_rank_holds_the_gil() -> None:
    results = run_mortal(busy_while_another_dies, 4, dead={3})
    assert results[3] == DEAD
    for rank in range(3):
        assert results[rank] == (3, 2, (0, 1, 2))


def starved(rank: int, num_ranks: int, folder: str) -> Any:
    group = start(rank, num_ranks, folder, op_timeout=5.0)
    spinners = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(2)]
    try:
        sums = {total() for _ in range(300)}
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.wait()
    return sums, group.epoch


def test_ranks_that_share_their_cores_with_others_stay() -> None:
    assert run_mortal(starved, 3, dead=set(), timeout_s=60) == [({3}, 1)] * 3
