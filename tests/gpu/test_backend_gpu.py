"""CUDA tensors on a group of the backend, on real GPUs: the calls of tests/backend/test_staging.py, and streams.

Ranks share a GPU where there are fewer GPUs than ranks: staging does not mind.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import epee.compat.mooncake.pg  # noqa: F401 - registers its backends
from tests.backend.test_staging import CALLS, _call
from tests.harness import run_ranks

pytestmark = [pytest.mark.gpu(1), pytest.mark.timeout(180)]


def _own_gpu(rank: int) -> torch.device:
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _same_as_cpu(rank: int, num_ranks: int) -> None:
    device = _own_gpu(rank)
    for name in CALLS:
        for is_async in (False, True):
            _, wanted = _call(name, rank, num_ranks, torch.clone, False)
            work, got = _call(name, rank, num_ranks, lambda x: x.to(device), is_async)
            if is_async:
                assert work.wait()
            for one, other in zip(got, wanted, strict=True):
                assert torch.equal(one.cpu(), other), (name, is_async)


@pytest.mark.parametrize("backend", ["epee", "mooncake"])
def test_every_collective_does_what_it_does_on_cpu_tensors(backend: str) -> None:
    run_ranks(_same_as_cpu, 2, backend=backend, timeout_s=150)


def _streams(rank: int, num_ranks: int) -> None:
    """Work before and behind each call, on a stream of its own, with nothing that makes the host wait."""
    device = _own_gpu(rank)
    side = torch.cuda.Stream(device)
    big = torch.randn(2048, 2048, device=device)
    with torch.cuda.stream(side):
        x = torch.zeros(1 << 20, device=device)
        wanted = 0.0
        for step in range(20):
            for _ in range(4):
                big = big @ big * 1e-3  # the stream is busy when the call is made
            x += rank + step
            wanted += 0.5 + step
            if step % 2:
                dist.all_reduce(x)
            else:
                dist.all_reduce(x, async_op=True).wait()
            wanted *= num_ranks
            x /= num_ranks
            wanted /= num_ranks
        total = x.sum()
    side.synchronize()
    assert total.item() == wanted * (1 << 20)

    future = dist.all_reduce(y := torch.full((1 << 22,), rank + 1.0, device=device), async_op=True).get_future()
    assert (future.wait()[0] * 2).sum().item() == 6.0 * (1 << 22)
    work = dist.all_reduce(y, async_op=True)
    while not work.is_completed():
        pass
    with torch.cuda.stream(torch.cuda.Stream(device)):  # one that has waited for nothing
        assert y.sum().item() == 6.0 * (1 << 22)


@pytest.mark.smoke("backend")
def test_streams_see_what_was_on_them_before_and_what_came() -> None:
    run_ranks(_streams, 2, backend="epee", timeout_s=150)


def _train(rank: int, num_ranks: int) -> None:
    device = _own_gpu(rank)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8)).to(device)
    alone = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8)).to(device)
    alone.load_state_dict(model.state_dict())
    shared = torch.nn.parallel.DistributedDataParallel(model, device_ids=[device.index])
    data = torch.randn(3, num_ranks, 32, 64, device=device)
    for batch in data:
        shared(batch[rank]).square().mean().backward()
        alone(batch.flatten(0, 1)).square().mean().backward()
        for one, other in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6)


def test_ddp() -> None:
    run_ranks(_train, 2, backend="epee", timeout_s=150)
