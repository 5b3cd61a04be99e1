"""Mode "mask" of a group's collectives on real GPUs, which ranks may share: bits, deaths, graphs that go on."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import epee
import epee.compat.mooncake.pg as mooncake
from tests.backend.test_staging import CALLS, _call
from tests.harness import DEAD, run_mortal

pytestmark = [pytest.mark.gpu(1), pytest.mark.timeout(240)]
SMALL, LARGE = 5_000, 3_000_000  # elements of float32: in packets; above them


def _begin(rank: int, num_ranks: int, folder: str, backend: str) -> tuple[torch.device, torch.Tensor, Any]:
    """Make the world in mode "mask"; returns GPU, the program's mask on it, and the half whose calls run there."""
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    mask = torch.ones(num_ranks, dtype=torch.int32, device=device)
    options: Any = epee.BackendOptions(active_ranks=mask, op_timeout=60.0)
    if backend == "mooncake":
        options = mooncake.MooncakeBackendOptions(mask)
    store = dist.FileStore(f"{folder}/store", num_ranks)
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, pg_options=options)
    dist.all_reduce(torch.ones(1, device=device))
    half = dist.group.WORLD._on_device  # type: ignore[union-attr]
    assert half is not None
    assert not half._off, half._off
    assert half._machine.config.is_masked
    return device, mask, half


def _row(rank: int, count: int, device: torch.device) -> torch.Tensor:
    return ((torch.arange(count, device=device) * (rank + 3) + count) % 101 + 1).float()


def _check(rank: int, members: Any, count: int, device: torch.device, size: int) -> None:
    """A call of each way among `members`."""
    dist.all_reduce(x := _row(rank, count, device))
    assert torch.equal(x, sum(_row(src, count, device) for src in members))  # type: ignore[arg-type]
    out = torch.full((size * count,), -1.0, device=device)
    dist.all_gather_into_tensor(out, _row(rank, count, device))
    for src in members:
        assert torch.equal(out[src * count :][:count], _row(src, count, device))
    wide = torch.cat([_row(rank, count, device) + dst for dst in range(size)])
    dist.reduce_scatter_tensor(y := torch.empty(count, device=device), wide)
    assert torch.equal(y, sum(_row(src, count, device) + rank for src in members))  # type: ignore[arg-type]
    assert dist.group.WORLD.last_contributors() == tuple(members)  # type: ignore[union-attr]


def _same_as_cpu(rank: int, num_ranks: int, folder: str, backend: str) -> None:
    device, _, half = _begin(rank, num_ranks, folder, backend)
    for name in CALLS:
        for is_async in (False, True):
            _, wanted = _call(name, rank, num_ranks, torch.clone, False)
            work, got = _call(name, rank, num_ranks, lambda x: x.to(device), is_async)
            if is_async:
                assert work.wait()
                assert work.contributors() == set(range(num_ranks))
            for one, other in zip(got, wanted, strict=True):
                assert torch.equal(one.cpu(), other), (name, is_async)
    for count in (1, SMALL, 262_144, 262_145, LARGE):
        _check(rank, range(num_ranks), count, device, num_ranks)
    half.check()
    dist.barrier()


@pytest.mark.parametrize(("num_ranks", "backend"), [(2, "epee"), (3, "epee"), (3, "mooncake")])
def test_every_collective_has_the_bits_of_cpu_tensors(num_ranks: int, backend: str) -> None:
    run_mortal(_same_as_cpu, num_ranks, backend, dead=set(), timeout_s=220)


def _killed(rank: int, num_ranks: int, folder: str, backend: str, count: int) -> tuple[list[int], float]:
    device, mask, half = _begin(rank, num_ranks, folder, backend)
    for _ in range(4):  # the last ones look like the first
        _check(rank, range(num_ranks), count, device, num_ranks)
        work = dist.all_reduce(_row(rank, count, device), async_op=True)
    torch.cuda.synchronize()  # the barrier does not wait for the GPU, and a part that has not run dies with its rank
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    works = [(work, tuple(range(num_ranks)))]
    members = [src for src in range(num_ranks) if src != 1]
    started = time.monotonic()
    while True:
        work = dist.all_reduce(x := _row(rank, count, device), async_op=True)
        assert work is not None
        work.wait()
        torch.cuda.synchronize()
        there = dist.group.WORLD.last_contributors()  # type: ignore[union-attr]
        works.append((work, there))
        assert torch.equal(x, sum(_row(src, count, device) for src in there))  # type: ignore[arg-type]
        if there == tuple(members):
            break
    elapsed = time.monotonic() - started
    found: list[int] = mask.tolist()
    for number, (work, there) in enumerate(works):  # asked late: all know of the death by now
        assert work is not None
        assert work.contributors() == set(there), (number, len(works), work.contributors(), there)
    _check(rank, members, count, device, num_ranks)
    dist.all_reduce(torch.ones(1))
    for n in (SMALL, LARGE, SMALL):
        _check(rank, members, n, device, num_ranks)
    half.check()
    dist.barrier()
    return found, elapsed


@pytest.mark.parametrize("count", [SMALL, LARGE])
@pytest.mark.parametrize("backend", ["epee", "mooncake"])
def test_the_call_that_loses_a_rank_succeeds_over_the_others(backend: str, count: int) -> None:
    found = run_mortal(_killed, 3, backend, count, dead={1}, timeout_s=220)
    print(f"\n{backend}, {count} elements: survivors had the result after", [end for end in found if end != DEAD])
    assert [end if end == DEAD else end[0] for end in found] == [[1, 0, 1], DEAD, [1, 0, 1]]


def _replays(rank: int, num_ranks: int, folder: str, count: int) -> list[int]:
    device, mask, half = _begin(rank, num_ranks, folder, "epee")
    x, out = torch.zeros(count, device=device), torch.zeros(num_ranks * count, device=device)

    def calls() -> None:
        dist.all_reduce(x)
        dist.all_gather_into_tensor(out, x)

    calls()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls()

    def replay(members: Any) -> None:
        x.copy_(_row(rank, count, device))
        out.fill_(-1)
        graph.replay()
        torch.cuda.synchronize()
        half.check()
        want = sum(_row(src, count, device) for src in members)
        assert torch.equal(x, want)  # type: ignore[arg-type]
        for src in members:
            assert torch.equal(out[src * count :][:count], want)  # type: ignore[arg-type]

    for _ in range(3):
        replay(range(num_ranks))
    dist.barrier()
    if rank == num_ranks - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    members = range(num_ranks - 1)
    for _ in range(5):
        replay(members)
    found: list[int] = mask.tolist()
    dist.all_reduce(torch.ones(1))
    for _ in range(3):
        replay(members)
    dist.barrier()
    return found


@pytest.mark.parametrize("count", [SMALL, LARGE])
def test_a_graph_that_was_recorded_before_a_death_goes_on_without_the_rank(count: int) -> None:
    assert run_mortal(_replays, 3, count, dead={2}, timeout_s=220) == [[1, 1, 0], [1, 1, 0], DEAD]
