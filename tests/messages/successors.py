"""Ranks in mode "mask" that die, are waited for, and are replaced; kernels' own sources in the calling process."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import epee
import epee.compat.mooncake.pg as mooncake
from tests.backend.test_staging import on_gpu
from tests.messages.cases import batch, give_messages, same, values
from tests.survive import stages

VICTIM, NUM_RANKS = 2, 3


def die() -> None:
    """End as a rank that is killed."""
    os.kill(os.getpid(), signal.SIGKILL)


def replaced(process: int, num_processes: int, folder: str, late: int) -> list[str]:
    """Rank 2 dies with messages in rings, the fourth process takes its place and sends at once; one survivor, `late`,
    looks long after that. Returns what a survivor has done before it let the old memory go."""
    rank, is_new, flag = min(process, VICTIM), process == NUM_RANKS, Path(folder, "lost")
    while is_new and not flag.exists():
        time.sleep(0.01)
    store = dist.FileStore(f"{folder}/store", NUM_RANKS)
    options = epee.BackendOptions(fault_mode="mask", is_extension=is_new)
    dist.init_process_group("epee", store=store, rank=rank, world_size=NUM_RANKS, pg_options=options)
    half, group, done = give_messages(30.0), dist.group.WORLD, []
    if not is_new:
        batch([(r, (r + n) % NUM_RANKS, 20, r) for r in range(NUM_RANKS) for n in (1, 2)], rank, NUM_RANKS, on_gpu)
        if rank == VICTIM:
            for dst in range(VICTIM):
                dist.send(on_gpu(values(100, 1)), dst)  # nobody takes it
            die()
        pairs: Any = half._pairs
        for owner, name in ((pairs, "_await_end"), (pairs.machine, "disconnect")):
            call = getattr(owner, name)
            setattr(owner, name, lambda peer, call=call, name=name: (done.append(name), call(peer)))
        while int(group.active_ranks()[VICTIM]):  # type: ignore[union-attr]
            dist.all_reduce(torch.ones(1))
        flag.touch()
        group.recover_ranks([VICTIM], 60.0)  # type: ignore[union-attr]
    dist.all_reduce(torch.ones(1))
    if rank == late:
        time.sleep(0.7)
    if is_new:
        for dst in range(VICTIM):
            for number in range(2):
                dist.send(on_gpu(values(100, 50 + 10 * dst + number)), dst)  # fits the ring
    else:
        for number in range(2):
            dist.recv(got := on_gpu(torch.zeros(100)), VICTIM)
            assert same(got, values(100, 50 + 10 * rank + number)), number
    batch([(r, (r + n) % NUM_RANKS, 900, r) for r in range(NUM_RANKS) for n in (1, 2)], rank, NUM_RANKS, on_gpu)
    half.check()
    dist.barrier()
    half.close(False)
    return done


def any_source(rank: int, num_ranks: int, folder: str) -> None:
    """A receive from any source takes what a dead rank had sent, then waits on for who lives."""
    store = dist.FileStore(f"{folder}/store", num_ranks)
    options: Any = mooncake.MooncakeBackendOptions(num_ranks)
    dist.init_process_group("mooncake", store=store, rank=rank, world_size=num_ranks, pg_options=options)
    half = give_messages(30.0)
    batch([(r, (r + 1) % num_ranks, 20, r) for r in range(num_ranks)], rank, num_ranks, on_gpu)
    stages.reach(folder, f"met-{rank}")
    if rank == VICTIM:
        dist.send(on_gpu(values(40, 5)), 0, tag=9)
        stages.wait_for(folder, "met-0")  # which maps the memory of this process
        die()
    elif rank == 0:
        time.sleep(0.5)
        for tag, count, src in ((9, 40, VICTIM), (3, 60, 1)):
            work: Any = dist.irecv(got := on_gpu(torch.zeros(count)), tag=tag)
            work.wait()
            assert mooncake.get_local_success(work), tag
            assert work.source_rank() == src
            assert same(got, values(count, 5)), tag
        assert not mooncake.get_local_success(dist.irecv(on_gpu(torch.zeros(4)), VICTIM))
    else:
        time.sleep(1.5)  # the receive waits beside a rank that is dead
        dist.send(on_gpu(values(60, 5)), 0, tag=3)
    batch([(0, 1, 500, 1), (1, 0, 500, 2)], rank, num_ranks, on_gpu)
    half.close(False)
