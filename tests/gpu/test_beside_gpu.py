"""Asynchronous calls on GPUs, beside what the caller computes: their streams, memory and futures, and DDP on them."""

from __future__ import annotations

import random
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.harness import run_ranks

pytestmark = [pytest.mark.gpu(2), pytest.mark.timeout(240)]


def _begin(rank: int) -> tuple[torch.device, Any]:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    group: Any = dist.group.WORLD
    group.set_timeout(timedelta(seconds=60))
    dist.all_reduce(torch.ones(1, device=device))
    assert not group._on_device._off, group._on_device._off
    return device, group._on_device


def _goes_on(rank: int, num_ranks: int) -> None:
    """The caller's stream does not wait for a call whose peer comes late, until it waits for the call."""
    device, half = _begin(rank)
    x = torch.ones(1 << 20, device=device)
    for _ in range(2):  # what is used for the first time may wait for the GPU
        dist.all_reduce(x, async_op=True).wait()  # type: ignore[union-attr]
        (torch.ones(100, device=device) * 3).sum().item()
        x.sum().item()
    torch.cuda.synchronize()
    dist.barrier()
    if rank == 1:
        torch.cuda._sleep(2_000_000_000)  # about a second
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    y = torch.ones(100, device=device) * 3
    done = torch.cuda.Event()
    done.record()
    if rank == 0:
        done.synchronize()
        assert not work.is_completed(), "computing has waited for the call"
    future = work.get_future()
    assert rank or not work.is_completed(), "a future has waited for the call"
    work.wait()
    total = x.sum()
    assert total.item() == 2.0**3 * (1 << 20)
    assert future.wait()[0].sum().item() == total.item()
    assert y.sum().item() == 300
    half.check()
    dist.barrier()


def test_the_callers_stream_goes_on_beside_an_asynchronous_call() -> None:
    run_ranks(_goes_on, 2, backend="epee", timeout_s=200)


def _random(rank: int, num_ranks: int) -> None:
    """Blocking and asynchronous calls in random order; tensors are let go of, and their memory is used again."""
    device, half = _begin(rank)
    pick = random.Random(3)
    for _ in range(20):
        open_works, found = [], []
        for _ in range(20):
            count, value = pick.choice((5, 70_000, 2_000_000)), float(pick.randrange(100))
            x = torch.full((count,), value + rank, device=device)
            is_async, is_scatter = pick.random() < 0.6, pick.random() < 0.4
            if is_scatter:
                wide = x.repeat(num_ranks)
                out = torch.empty(count, device=device)
                work = dist.reduce_scatter_tensor(out, wide, async_op=is_async)
                del wide, x
            else:
                out = x
                work = dist.all_reduce(out, async_op=is_async)
            torch.full((2_000_000 * num_ranks,), -1.0, device=device)  # would write where `wide` was
            found.append((out, 2 * value + 1))
            if is_async:
                open_works.append(work)
        for work in open_works:
            work.wait()
        for out, wanted in found:
            assert bool((out == wanted).all()), wanted
    half.check()
    dist.barrier()


def test_random_blocking_and_asynchronous_calls() -> None:
    run_ranks(_random, 2, backend="epee", timeout_s=200)


def _ddp(rank: int, num_ranks: int) -> list[float]:
    device, half = _begin(rank)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(6)), torch.nn.Linear(512, 8)).to(device)
    ddp = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    data = torch.randn(5, num_ranks, 32, 512, generator=torch.Generator().manual_seed(1)).to(device)
    losses = []
    for batch in data:
        loss = ddp(batch[rank]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach_(), op=dist.ReduceOp.AVG)
        losses.append(loss.item())
    half.check()
    dist.barrier()
    return losses


def test_ddp_trains_as_one_process_does() -> None:
    first, second = run_ranks(_ddp, 2, backend="epee", timeout_s=220)
    assert first == second
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(6)), torch.nn.Linear(512, 8)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = torch.randn(5, 2, 32, 512, generator=torch.Generator().manual_seed(1)).cuda()
    for batch, wanted in zip(data, first, strict=True):
        loss = model(batch.flatten(0, 1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert abs(loss.item() - wanted) < 1e-4 * max(1.0, wanted)
