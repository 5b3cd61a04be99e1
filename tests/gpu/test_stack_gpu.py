"""What is built on process groups, on real GPUs: DTensor, functional collectives, compiled programs, DDP and FSDP2.

Sums of two ranks are the same in any order, and a half type's sum that is rounded to float32 on the way is rounded as
one (24 bits are at least 2 * 11 + 2): so what two ranks train over epee has the bits of what they train over NCCL.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from torch import nn
from torch.utils._triton import has_triton

from tests.backend import test_torch_stack as stack
from tests.harness import run_ranks

from .test_collectives_gpu import _begin

pytestmark = [pytest.mark.gpu(1), pytest.mark.timeout(240)]
NUM_STEPS = 10
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def _meshes(rank: int, num_ranks: int) -> None:
    _, half = _begin(rank)
    stack.meshes(rank, num_ranks, "cuda")
    half.check()
    dist.barrier()


def test_meshes_and_dtensors_work() -> None:
    run_ranks(_meshes, 4, backend="epee", timeout_s=200)


def _redistributed(rank: int, num_ranks: int, num_rows: int) -> None:
    """Each way from one placement to another, of which each is another collective; 7 rows are not cut evenly."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    device, half = _begin(rank)
    mesh = init_device_mesh("cuda", (num_ranks,))
    whole = torch.arange(num_rows * 6.0, device=device).view(num_rows, 6)
    before = half._machine.number()
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    assert torch.equal(sharded.to_local(), whole.chunk(num_ranks)[rank])
    assert torch.equal(sharded.redistribute(placements=[Replicate()]).to_local(), whole)
    across = sharded.redistribute(placements=[Shard(1)])
    assert torch.equal(across.to_local(), whole.chunk(num_ranks, 1)[rank])
    assert torch.equal(across.full_tensor(), whole)
    total = whole * sum(range(1, num_ranks + 1))
    partial = DTensor.from_local(whole * (rank + 1), mesh, [Partial()])
    for dim in (0, 1):
        scattered = partial.redistribute(placements=[Shard(dim)])
        assert torch.equal(scattered.to_local(), total.chunk(num_ranks, dim)[rank])
        assert torch.equal(scattered.full_tensor(), total)
    assert torch.equal(partial.redistribute(placements=[Replicate()]).to_local(), total)
    assert half._machine.number() >= before + 7, "the GPUs have made the calls"
    half.check()
    dist.barrier()


@pytest.mark.parametrize("num_rows", [8, 7, 200_000])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_dtensors_are_redistributed(num_ranks: int, num_rows: int) -> None:
    run_ranks(_redistributed, num_ranks, num_rows, backend="epee", timeout_s=200)


def _functional(rank: int, num_ranks: int) -> None:
    device, half = _begin(rank)
    before = half._machine.number()
    with device:
        stack.functional(rank, num_ranks)
    assert half._machine.number() >= before + 10, "the GPUs have made the calls"
    half.check()
    dist.barrier()


def test_functional_collectives_work() -> None:
    run_ranks(_functional, 2, backend="epee", timeout_s=200)


def _step(rank: int, num_ranks: int) -> Callable[[torch.Tensor], tuple[torch.Tensor, ...]]:
    group: Any = dist.group.WORLD

    def step(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        total = fc.all_reduce(x * 2, "sum", group)
        rows = fc.all_gather_tensor(x + 1, 0, group)
        part = fc.reduce_scatter_tensor(rows * (rank + 1), "sum", 0, group)
        turned = fc.all_to_all_single(rows + 100 * rank, None, None, group)
        return total + 1, rows.relu(), part * 2, turned - 1

    return step


def _wanted(rank: int, num_ranks: int, x: torch.Tensor, plus: int) -> tuple[torch.Tensor, ...]:
    """Return what `_step` makes of `x`, whose values are `rank + plus`."""
    ranks = range(num_ranks)
    ones = torch.ones_like(x)
    return (
        ones * (2 * sum(r + plus for r in ranks) + 1),
        torch.cat([ones * (r + plus + 1) for r in ranks]),
        ones * (2 * (rank + plus + 1) * sum(r + 1 for r in ranks)),
        torch.cat([ones * (rank + plus + 100 * r) for r in ranks]),
    )


def _programs(rank: int, num_ranks: int, backend: str) -> None:
    """Calls of a program as it is (`eager`) or compiled; again and again, on memory that is used again."""
    device, half = _begin(rank)
    step = _step(rank, num_ranks)
    if backend == "inductor":
        from torch._inductor import config

        config.compile_threads = 1  # no processes that outlive this one
    if backend != "eager":
        step = torch.compile(step, backend=backend, fullgraph=True, dynamic=False)
    before = half._machine.number()
    for count in (4, 300_000):
        for plus in range(5):
            x = torch.full((count, 5), float(rank + plus), device=device)
            for got, wanted in zip(step(x), _wanted(rank, num_ranks, x, plus), strict=True):
                assert torch.equal(got, wanted), (count, plus)
            assert bool((x == rank + plus).all()), "a functional call does not write its input"
    assert half._machine.number() >= before + 2 * 5 * 4, "the GPUs have made the calls"
    half.check()
    dist.barrier()


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_programs_of_functional_collectives(backend: str) -> None:
    if backend == "inductor" and not (has_triton() and any(map(shutil.which, ("cc", "gcc", "clang")))):
        pytest.skip("inductor needs triton and a C compiler on this machine; aot_eager is tested")
    run_ranks(_programs, 2, backend, backend="epee", timeout_s=220)


def _model(device: torch.device, dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(128, 1000), nn.ReLU(), nn.Linear(1000, 1000), nn.ReLU(), nn.Linear(1000, 8)]
    return nn.Sequential(*layers).to(device, dtype)


def _ddp(net: nn.Sequential, group: Any, dtype: torch.dtype) -> nn.Module:
    return nn.parallel.DistributedDataParallel(net, process_group=group, bucket_cap_mb=1)


def _fsdp(net: nn.Sequential, group: Any, dtype: torch.dtype) -> nn.Module:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = DeviceMesh.from_group(group, "cuda")
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(net, mesh=mesh, mp_policy=policy)


def _train(net: nn.Module, rank: int, device: torch.device, dtype: torch.dtype) -> list[float]:
    """Return the loss of this rank's own rows at each step."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1 + rank)
    losses = []
    for _ in range(NUM_STEPS):
        x = torch.randn(32, 128, generator=generator).to(device, dtype)
        loss = (net(x).float() - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _training(rank: int, num_ranks: int, way: str, name: str) -> list[float]:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # a product has the same bits whatever ran before it
    stack.quiet()
    device, half = _begin(rank)
    dtype = DTYPES[name]
    wrap = {"ddp": _ddp, "fsdp2": _fsdp}[way]
    kept = torch.float32 if way == "fsdp2" else dtype  # FSDP2 casts by its policy
    alone = _train(_model(device, dtype), rank, device, dtype)
    nccl = dist.new_group(list(range(num_ranks)), backend="nccl")
    theirs = _train(wrap(_model(device, kept), nccl, dtype), rank, device, dtype)
    torch.cuda.synchronize()  # nobody waits for a rank of one kind that waits for one of the other
    dist.barrier()
    before = half._machine.number()
    mine = _train(wrap(_model(device, kept), dist.group.WORLD, dtype), rank, device, dtype)
    assert half._machine.number() >= before + NUM_STEPS, "the GPUs have made the calls"
    assert mine == theirs
    assert mine[-1] != alone[-1], "without sums the losses would be others"
    half.check()
    dist.barrier()
    dist.destroy_process_group(nccl)
    return mine


@pytest.mark.gpu(2)
@pytest.mark.parametrize("name", list(DTYPES))
@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
def test_losses_have_the_bits_of_nccls(way: str, name: str) -> None:
    first, second = run_ranks(_training, 2, way, name, backend="epee", timeout_s=220)
    assert first != second, "each rank has rows of its own"
    assert first[-1] < first[0]
