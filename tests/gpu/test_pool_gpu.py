"""Collectives on tensors in memory pools, on real GPUs: bits, graphs, deaths and replacements."""

from __future__ import annotations

import functools
import os
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import epee
from epee.backend.cuda.pool import MemoryPool
from tests.collectives import pool_cases
from tests.collectives.deaths import POOLED
from tests.csrc.latency_deaths import run_deaths
from tests.harness import run_ranks

pytestmark = [pytest.mark.gpu(2), pytest.mark.timeout(240)]
NUM_KILLS = int(os.environ.get("EPEE_TEST_KILLS", "5"))
# Elements of float32: nothing, packets, odd and whole rows above them, many chunks of each lane.
COUNTS = (0, 1023, (1 << 20) + 3, 1 << 21, 9_000_001)


def _begin(rank: int) -> tuple[Any, MemoryPool]:
    torch.cuda.set_device(rank)
    group: Any = dist.group.WORLD
    group.set_timeout(timedelta(seconds=60))
    pool = group.memory_pool(1 << 30)
    assert not group._on_device._off, group._on_device._off
    return group._on_device, pool


def _bits(rank: int, num_ranks: int) -> None:
    half, pool = _begin(rank)
    for seed, count in enumerate(COUNTS):
        for where in ("all", "none", "one"):
            is_here = where == "all" or (where == "one" and rank == seed % num_ranks)
            to = functools.partial(pool_cases.in_pool, pool) if is_here else torch.Tensor.cuda
            pool_cases.compare(half, to, seed, count, are_pooled=where == "all")


def test_calls_in_pools_are_copy_free_and_all_have_the_bits_of_cpu_tensors() -> None:
    run_ranks(_bits, 2, backend="epee", timeout_s=220)


def _graph(rank: int, num_ranks: int) -> None:
    """A graph of calls in a pool on new values; tensors that are dropped meanwhile are not handed out too early."""
    half, pool = _begin(rank)
    x, y = (pool.empty(3 << 20, dtype=torch.bfloat16) for _ in range(2))
    out = pool.empty(num_ranks * y.numel(), dtype=torch.bfloat16)

    def calls() -> None:
        dist.all_reduce(x)
        dist.broadcast(y, 1)
        dist.all_gather_into_tensor(out, x)
        dist.all_reduce(x)

    x.fill_(1)
    calls()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls()
    for step in range(20):
        x.fill_(rank + step % 3)
        y.fill_(10 * rank + step)
        graph.replay()
        other = pool.empty(1 << 20).fill_(float(step))
        dist.all_reduce(other)
        torch.cuda.synchronize()
        half.check()
        total = sum(src + step % 3 for src in range(num_ranks))
        assert bool((out == total).all()), step
        assert bool((x == total * num_ranks).all()), step
        assert bool((y == 10 + step).all()), step
        assert bool((other == step * num_ranks).all()), step
        del other
    dist.barrier()


def test_graphs_replay_in_pools() -> None:
    run_ranks(_graph, 2, backend="epee", timeout_s=220)


def _limits(rank: int, num_ranks: int) -> None:
    half, pool = _begin(rank)
    group: Any = dist.group.WORLD
    assert group.memory_pool(1) is pool
    with pytest.raises(epee.InvalidArgument, match="does not grow"):
        group.memory_pool((1 << 30) + 1024)
    rows = [pool.empty(100 << 20, dtype=torch.uint8) for _ in range(10)]
    with pytest.raises(epee.ResourceError, match="contiguous bytes are left"):
        pool.empty(100 << 20, dtype=torch.uint8)
    rows[3].fill_(rank)
    dist.all_reduce(rows.pop(3))
    again = pool.empty(100 << 20, dtype=torch.uint8).fill_(1)
    dist.all_reduce(again)
    assert bool((again == num_ranks).all())
    half.check()
    dist.barrier()


def test_a_pool_does_not_grow_and_hands_out_again_what_was_dropped() -> None:
    run_ranks(_limits, 2, backend="epee", timeout_s=220)


@pytest.mark.timeout(580)
def test_ranks_die_in_the_midst_and_their_successors_get_pools() -> None:
    found = run_deaths("cuda", NUM_KILLS, seed=11, num_spares=2, timeout_s=560, play=POOLED)
    print(f"\n{NUM_KILLS} kills: {found}")
    assert sum(map(len, [*found.in_flight.values(), *found.later.values()])) == 2 * NUM_KILLS
