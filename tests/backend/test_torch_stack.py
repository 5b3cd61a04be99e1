"""What is built on process groups: DDP, FSDP2, DTensor, functional collectives, compile, debug mode, mixed backends."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import epee
from tests.harness import run_ranks

from ..survive import stages
from . import cases


def quiet() -> None:
    warnings.simplefilter("ignore")


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 200), nn.ReLU(), nn.Linear(200, 64))


def batches(rank: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    for _ in range(4):
        yield torch.randn(8, 64, generator=generator)


def train(wrapped: nn.Module, rank: int) -> list[float]:
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05)
    losses = []
    for x in batches(rank):
        loss = (wrapped(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def training(rank: int, num_ranks: int) -> None:
    """DDP and FSDP2, each with gloo and with epee in the same processes."""
    quiet()
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    gloo: Any = dist.group.WORLD
    ours = dist.new_group(list(range(num_ranks)), backend="epee")
    losses: dict[str, list[list[float]]] = {"ddp": [], "fsdp2": []}
    for group in (gloo, ours):
        wrapped = nn.parallel.DistributedDataParallel(model(), process_group=group, bucket_cap_mb=0.02)
        losses["ddp"].append(train(wrapped, rank))
        flat = torch.cat([p.detach().flatten() for p in wrapped.parameters()])
        everyone = [torch.empty_like(flat) for _ in range(num_ranks)]
        dist.all_gather(everyone, flat, group=group)
        assert all(torch.equal(other, flat) for other in everyone)

        mesh = DeviceMesh.from_group(group, "cpu")
        net = model()
        for layer in net:
            fully_shard(layer, mesh=mesh)
        fully_shard(net, mesh=mesh)
        losses["fsdp2"].append(train(net, rank))
    for name, (theirs, mine) in losses.items():
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs), rtol=1e-5, atol=1e-6, msg=name)


def test_ddp_and_fsdp2_train_as_with_gloo() -> None:
    run_ranks(training, 3, backend="gloo", timeout_s=55)


def training_fsdp1(rank: int, num_ranks: int, strategy: str) -> None:
    """FSDP1, which frees its flat parameters by resizing their storage, with gloo and with epee."""
    quiet()
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    gloo: Any = dist.group.WORLD
    ours = dist.new_group(list(range(num_ranks)), backend="epee")
    losses = []
    for group in (gloo, ours):
        kind = ShardingStrategy[strategy]
        net = FullyShardedDataParallel(model(), group, kind, device_id=torch.device("cpu"), use_orig_params=True)
        losses.append(train(net, rank))
    torch.testing.assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_fsdp1_trains_as_with_gloo(strategy: str) -> None:
    run_ranks(training_fsdp1, 2, strategy, backend="gloo", timeout_s=55)


def ddp_error(rank: int, num_ranks: int, folder: str) -> str:
    quiet()
    wrapped = nn.parallel.DistributedDataParallel(model())
    if rank == 1:
        wrapped(torch.ones(2, 64)).sum()
        dist.group.WORLD.shutdown()
        stages.wait_for(folder, "told")  # a process that has ended has not left
        return "left"
    with pytest.raises(RuntimeError) as caught:
        wrapped(torch.ones(2, 64)).sum().backward()
    stages.reach(folder, "told")
    return str(caught.value)


def test_ddp_raises_when_a_rank_leaves(tmp_path: Path) -> None:
    assert "left the group" in run_ranks(ddp_error, 2, str(tmp_path), backend="epee")[0]


def meshes(rank: int, num_ranks: int, device: str = "cpu") -> None:
    quiet()
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh(device, (2, num_ranks // 2), mesh_dim_names=("data", "model"))
    whole = torch.arange(64.0, device=device).view(8, 8)
    sharded = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
    assert torch.equal(sharded.full_tensor(), whole)
    assert torch.equal(sharded.redistribute(mesh, [Shard(1), Replicate()]).full_tensor(), whole)
    assert sharded.sum().full_tensor().item() == whole.sum().item()
    product = distribute_tensor(whole, mesh, [Replicate(), Shard(1)]) @ distribute_tensor(
        whole, mesh, [Replicate(), Shard(0)]
    )
    assert product.placements[1] == Partial()
    torch.testing.assert_close(product.full_tensor(), whole @ whole)
    for name in ("data", "model"):
        x = torch.ones(3, device=device)
        dist.all_reduce(x, group=mesh.get_group(name))
        assert x[0].item() == 2
    assert type(mesh.get_group("data")).__name__ == "ProcessGroup"


def test_meshes_and_dtensors_work() -> None:
    run_ranks(meshes, 4, backend="epee")


def functional(rank: int, num_ranks: int) -> None:
    quiet()
    import torch.distributed._functional_collectives as fc

    group = dist.group.WORLD
    x = torch.full((4,), rank + 1.0)
    total = float(sum(range(1, num_ranks + 1)))
    assert fc.all_reduce(x, "sum", group).tolist() == [total] * 4
    assert fc.all_reduce(x, "avg", group).tolist() == [total / num_ranks] * 4
    assert fc.all_gather_tensor(x, 0, group).sum().item() == 4 * total
    assert fc.reduce_scatter_tensor(torch.ones(2 * num_ranks), "sum", 0, group).tolist() == [num_ranks] * 2
    assert fc.broadcast(x, 0, group).tolist() == [1.0] * 4
    got = fc.all_to_all_single(torch.arange(float(num_ranks)) + 10 * rank, None, None, group)
    assert got.tolist() == [10.0 * r + rank for r in range(num_ranks)]
    uneven = fc.all_to_all_single(torch.ones(num_ranks + 1) * rank, [1] * num_ranks if rank else [2] * num_ranks,
                                  [2] + [1] * (num_ranks - 1), group)  # fmt: skip
    assert uneven.numel() == num_ranks * (1 if rank else 2)
    assert [t.tolist() for t in fc.all_reduce_coalesced([x, x[:1]], "sum", group)] == [[total] * 4, [total]]
    gathered = fc.all_gather_into_tensor_coalesced([x, x[:2]], group)
    assert [t.numel() for t in gathered] == [4 * num_ranks, 2 * num_ranks]
    scattered = fc.reduce_scatter_tensor_coalesced([torch.ones(2 * num_ranks)] * 2, "sum", [0, 0], group)
    assert [t.tolist() for t in scattered] == [[num_ranks] * 2] * 2
    y = x.clone().requires_grad_()
    fc.all_reduce(y, "sum", group).sum()
    import torch.distributed.nn.functional as dnf

    dnf.all_reduce(y).sum().backward()
    assert y.grad is not None
    dist._broadcast_coalesced(group, [x, x.clone()], 1 << 20, 0)
    assert x[0].item() == 1.0


def test_functional_collectives_work() -> None:
    run_ranks(functional, 2, backend="epee")


def compiled(rank: int, num_ranks: int, backend: str) -> None:
    quiet()
    import torch.distributed._functional_collectives as fc

    if backend == "inductor":  # on a cold cache its search for vector units builds and starts programs for a minute
        from torch._inductor import config, cpu_vec_isa

        cpu_vec_isa.valid_vec_isa_list = list
        config.fx_graph_cache = False  # which may hold programs for vector units
    group = dist.group.WORLD

    def step(x: torch.Tensor) -> torch.Tensor:
        y = fc.all_reduce(x * 2, "sum", group)
        z = fc.all_gather_tensor(y + 1, 0, group)
        return z.relu().sum(0)

    x = torch.full((3, 5), rank + 1.0)
    fast = torch.compile(step, backend=backend, fullgraph=True)
    torch.testing.assert_close(fast(x), step(x))

    if backend == "inductor":
        return  # the rest would only cost compile time
    wrapped = nn.parallel.DistributedDataParallel(model())
    twin = torch.compile(wrapped, backend=backend)
    twin(torch.ones(2, 64)).sum().backward()
    assert next(wrapped.parameters()).grad is not None


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_programs_work(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor needs g++ on this machine; aot_eager is tested")
    run_ranks(compiled, 2, backend, backend="epee", timeout_s=58)


def detail(rank: int, num_ranks: int, folder: str) -> None:
    quiet()
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    dist.set_debug_level_from_env()
    cases.init(rank, num_ranks, folder)
    x = torch.ones(4)
    dist.all_reduce(x)
    assert x[0].item() == num_ranks
    losses = train(nn.parallel.DistributedDataParallel(model()), rank)
    assert losses[-1] < 10
    with pytest.raises(epee.MismatchError):
        dist.all_reduce(torch.ones(2 + rank))
    dist.destroy_process_group()


def test_debug_detail_works(tmp_path: Path) -> None:
    run_ranks(detail, 2, str(tmp_path), backend=None)


def mixed(rank: int, num_ranks: int, folder: str, backend: str) -> str:
    quiet()
    store = dist.FileStore(f"{folder}/store", num_ranks)
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks)
    x = torch.full((3,), rank + 1.0)
    dist.all_reduce(x)
    assert x.tolist() == [3.0] * 3
    y = torch.ones(2)
    dist.broadcast(y, 0)
    beside = dist.new_group([0, 1], backend="gloo")
    dist.all_reduce(y, group=beside)
    assert y.tolist() == [2.0, 2.0]
    name = type(dist.group.WORLD).__module__
    dist.destroy_process_group()
    return name


@pytest.mark.parametrize("backend", ["epee", "cpu:gloo,cuda:epee", "cpu:epee,cuda:gloo", "cpu:epee"])
def test_a_mix_of_backends_is_served_rightly(tmp_path: Path, backend: str) -> None:
    assert run_ranks(mixed, 2, str(tmp_path), backend, backend=None) == ["epee.backend.group"] * 2


def beside_gloo(rank: int, num_ranks: int) -> None:
    group = dist.new_group(list(range(num_ranks)), backend="epee")
    for i in range(5):
        a, b = torch.full((3,), float(i)), torch.full((3,), float(i))
        dist.all_reduce(a)
        dist.all_reduce(b, group=group)
        assert torch.equal(a, b)


def test_epee_beside_gloo_works() -> None:
    run_ranks(beside_gloo, 2, backend="gloo")


def names(rank: int, num_ranks: int) -> None:
    group: Any = dist.group.WORLD
    assert dist.get_backend() == "epee"
    assert group.name() == "epee"
    assert group.rank() == dist.get_rank() == rank
    assert group.size() == dist.get_world_size() == num_ranks
    assert group._get_backend(torch.device("cpu")) is group
    assert group.get_group_store() is not None
    assert not hasattr(group, "new_group"), "torch 2.13 would call it"
    assert group.bound_device_id is None
    for old, new in (
        ("_allgather_base", "all_gather_single"),
        ("_reduce_scatter_base", "reduce_scatter_single"),
        ("alltoall_base", "all_to_all_single"),
        ("allgather_into_tensor_coalesced", "all_gather_single_coalesced"),
        ("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"),
    ):
        assert getattr(type(group), old) is getattr(type(group), new)
    group._allgather_base(torch.empty(num_ranks), torch.ones(1)).wait()
    from datetime import timedelta

    group.set_timeout(timedelta(seconds=9))
    assert group._engine.timeout_s == 9
    assert group.active_ranks().tolist() == [1] * num_ranks
    dist.barrier()  # nobody leaves before everybody has looked


def test_the_group_answers_what_torch_asks_under_old_and_new_names() -> None:
    run_ranks(names, 2, backend="epee")
