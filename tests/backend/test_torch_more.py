"""More of what is built on process groups: communication hooks, ZeRO, checkpoints, uneven inputs, sliced meshes."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.harness import run_ranks

from .test_torch_stack import model, train


def hooks(rank: int, num_ranks: int) -> None:
    warnings.simplefilter("ignore")
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    gloo: Any = dist.group.WORLD
    ours = dist.new_group(list(range(num_ranks)), backend="epee")
    for name in ("fp16_compress", "allreduce", "powerSGD"):
        losses = []
        for group in (gloo, ours):
            wrapped = nn.parallel.DistributedDataParallel(model(), process_group=group)
            if name == "powerSGD":
                state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=2, start_powerSGD_iter=2)
                wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
            else:
                wrapped.register_comm_hook(group, getattr(default_hooks, f"{name}_hook"))
            losses.append(train(wrapped, rank))
        torch.testing.assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]), rtol=2e-2, atol=1e-2, msg=name)


def test_ddp_communication_hooks_train_as_with_gloo() -> None:
    run_ranks(hooks, 2, backend="gloo")


def assert_equal_on_all_ranks(mine: torch.Tensor, num_ranks: int) -> None:
    everyone = [torch.empty_like(mine) for _ in range(num_ranks)]
    dist.all_gather(everyone, mine.detach())
    assert all(torch.equal(other, everyone[0]) for other in everyone)


def ddp_modes(rank: int, num_ranks: int) -> None:
    """A static graph with batch norm's buffers, no_sync, and ranks with different numbers of batches (Join)."""
    warnings.simplefilter("ignore")
    x = torch.ones(4, 8) * (rank + 1)
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    wrapped = nn.parallel.DistributedDataParallel(net, static_graph=True)
    for _ in range(3):
        wrapped(x).sum().backward()
    assert_equal_on_all_ranks(torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None]), num_ranks)

    linear = nn.Linear(8, 1)
    wrapped = nn.parallel.DistributedDataParallel(linear)
    with wrapped.no_sync():
        wrapped(x).sum().backward()
    assert linear.weight.grad is not None
    assert linear.weight.grad.unique().tolist() == [4.0 * (rank + 1)]
    wrapped(x).sum().backward()  # adds to it, then takes the mean over the ranks
    assert linear.weight.grad.unique().tolist() == [8.0 * (num_ranks + 1) / 2]

    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    with wrapped.join():
        for _ in range(2 + rank):
            optimizer.zero_grad()
            wrapped(x).sum().backward()
            optimizer.step()
    assert_equal_on_all_ranks(linear.weight, num_ranks)


def test_ddp_without_sync_with_static_graph_and_with_uneven_inputs() -> None:
    run_ranks(ddp_modes, 3, backend="epee")


def zero(rank: int, num_ranks: int) -> None:
    warnings.simplefilter("ignore")
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped, plain = nn.parallel.DistributedDataParallel(model()), nn.parallel.DistributedDataParallel(model())
    sharded = ZeroRedundancyOptimizer(wrapped.parameters(), optimizer_class=torch.optim.Adam, lr=0.01)
    whole = torch.optim.Adam(plain.parameters(), lr=0.01)
    for net, optimizer in ((wrapped, sharded), (plain, whole)):
        for step in range(3):
            optimizer.zero_grad()
            net(torch.full((4, 64), float(rank + step))).square().mean().backward()
            optimizer.step()
    for ours, theirs in zip(wrapped.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    sharded.consolidate_state_dict(0)
    assert rank or len(sharded.state_dict()["state"]) == len(list(wrapped.parameters()))
    dist.barrier()


def test_the_zero_optimizer_steps_as_the_whole_one() -> None:
    run_ranks(zero, 2, backend="epee")


def checkpoint(rank: int, num_ranks: int, folder: str) -> None:
    warnings.simplefilter("ignore")
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (num_ranks,))
    whole = torch.arange(24.0).view(6, 4)
    state = {"w": distribute_tensor(whole, mesh, [Shard(0)]), "step": torch.tensor(5)}
    dcp.save(state, checkpoint_id=f"{folder}/checkpoint")
    other = {"w": distribute_tensor(torch.zeros(6, 4), mesh, [Shard(1)]), "step": torch.tensor(0)}
    dcp.load(other, checkpoint_id=f"{folder}/checkpoint")
    assert torch.equal(other["w"].full_tensor(), whole)
    assert other["step"].item() == 5


def test_distributed_checkpoints_are_saved_and_loaded_in_another_layout(tmp_path: Path) -> None:
    run_ranks(checkpoint, 2, str(tmp_path), backend="epee")


def more_functional(rank: int, num_ranks: int) -> None:
    warnings.simplefilter("ignore")
    import torch.distributed._functional_collectives as fc
    from torch.distributed.device_mesh import init_device_mesh

    group = dist.group.WORLD
    x = torch.full((4,), float(rank))
    assert fc.permute_tensor(x, [(r + 1) % num_ranks for r in range(num_ranks)], group)[0].item() == (
        (rank - 1) % num_ranks
    )
    y = x.clone()
    assert fc.all_gather_tensor_autograd(y.requires_grad_(), 0, group).sum().item() == 4 * sum(range(num_ranks))
    mesh = init_device_mesh("cpu", (num_ranks // 2, 2), mesh_dim_names=("a", "b"))
    for sub in (mesh["a"], mesh["b"], mesh["a", "b"]._flatten("ab")):
        z = torch.ones(3)
        dist.all_reduce(z, group=sub.get_group())
        assert z.tolist() == [float(sub.size())] * 3
    with torch.inference_mode():
        w = torch.ones(3)
        dist.all_reduce(w)
        assert w.tolist() == [num_ranks] * 3


def test_permutations_autograd_flattened_meshes_and_inference_mode() -> None:
    run_ranks(more_functional, 4, backend="epee")


SCRIPT = """
import epee, torch, torch.distributed as dist
dist.init_process_group("epee")
x = torch.ones(4)
dist.all_reduce(x)
assert x.tolist() == [2.0] * 4
dist.destroy_process_group()
print("done")
"""


@pytest.mark.slow
def test_a_script_started_by_torchrun_works(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=55, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done") == 2
