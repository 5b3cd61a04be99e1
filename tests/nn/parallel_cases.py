"""Models with expert layers in the hands of DDP, FSDP and `sync_gradients`, and the dense ones that they must equal.

The ranks' functions of `test_parallel.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import epee
from epee.nn import DenseMoELayer, MoELayer, expert_parameters, sync_gradients

from .cases import seeded

HIDDEN, FFN_HIDDEN, NUM_TOPK, NUM_LOCAL, NUM_TOKENS = 16, 24, 2, 2, 12
DTYPE = torch.float64
Make = Callable[[int], nn.Module]  # the layer of a number


class Residual(nn.Module):
    """A projection in front of an expert layer, deep below its model."""

    def __init__(self, moe: nn.Module, seed: int) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"moe": moe})
        self.project = nn.Linear(HIDDEN, HIDDEN, dtype=DTYPE, device="cpu")
        with torch.no_grad():
            self.project.weight.copy_(seeded(HIDDEN, HIDDEN, seed=seed) / HIDDEN**0.5)
            self.project.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """Return x and what the experts make of its projection."""
        out: Tensor = x + self.inner["moe"](self.project(x))
        return out


class Model(nn.Module):
    """Two expert layers: one that was registered before its parent, one in a list that already has its parent."""

    def __init__(self, make: Make) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(HIDDEN, dtype=DTYPE, device="cpu"))  # a parameter of the root itself
        self.blocks = nn.ModuleList()
        self.blocks.append(Residual(make(0), 60))
        self.blocks.insert(0, Residual(make(1), 61))  # torch writes this one in without calling its hooks

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the blocks, scaled."""
        for block in self.blocks:
            x = block(x)
        return x * self.scale


def batch(step: int, rank: int) -> Tensor:
    """The tokens of a rank in a step."""
    return seeded(NUM_TOKENS, HIDDEN, seed=1000 * step + rank, dtype=DTYPE)


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    """The mean loss of a rank's own tokens."""
    x = batch(step, rank)
    out: Tensor = model(x)
    return (out - x.flip(-1)).square().mean()


def spread(buffer: epee.Buffer, **options: Any) -> Make:
    """Return what makes layers over a buffer."""
    num_experts = NUM_LOCAL * buffer.num_ranks
    return lambda number: MoELayer(
        HIDDEN, FFN_HIDDEN, num_experts, NUM_TOPK, buffer, seed=7 + number, dtype=DTYPE, **options
    )


def dense(num_ranks: int) -> nn.Module:
    """Return the model in one process."""
    num_experts = NUM_LOCAL * num_ranks
    return Model(lambda number: DenseMoELayer(HIDDEN, FFN_HIDDEN, num_experts, NUM_TOPK, seed=7 + number, dtype=DTYPE))


@contextlib.contextmanager
def buffer_over(group: dist.ProcessGroup | None, **options: Any) -> Any:
    """Yield a buffer of default room over a group."""
    with epee.Buffer(
        group,
        num_experts=NUM_LOCAL * dist.get_world_size(group),
        hidden=HIDDEN,
        num_topk=NUM_TOPK,
        max_tokens_per_rank=NUM_TOKENS,
        dtype=DTYPE,
        num_slots=3,
        timeout=90.0,
        **options,
    ) as buffer:
        yield buffer


def plain(model: nn.Module) -> nn.Module:
    """Leave all to `sync_gradients`."""
    return model


def ddp(model: nn.Module) -> nn.Module:
    """Wrap the whole model."""
    return DistributedDataParallel(model)


def fsdp2(model: nn.Module) -> nn.Module:
    """Shard each block, and the rest."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    assert dist.group.WORLD is not None
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


WAYS = {way.__name__: way for way in (plain, ddp, fsdp2)}


def value_of(parameter: Tensor) -> Tensor:
    """Return all of a parameter, which FSDP2 may have cut into shards."""
    whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return whole.detach().clone()


def train(rank: int, num_ranks: int, way: str, num_steps: int, num_micro_steps: int) -> dict[str, Tensor]:
    """Train, and return all parameters by their names in the bare model."""
    del num_ranks
    with buffer_over(dist.group.WORLD) as buffer:
        bare = Model(spread(buffer))
        experts = {name for name, each in bare.named_parameters() if each in set(expert_parameters(bare))}
        assert {name.split("experts.")[-1] for name in experts} == {"gate_up", "down"}
        model = WAYS[way](bare)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        for step in range(num_steps):
            for micro in range(num_micro_steps):
                is_last = micro == num_micro_steps - 1
                hold = contextlib.nullcontext() if is_last or way != "ddp" else model.no_sync()  # type: ignore[operator]
                if way == "fsdp2":
                    model.set_requires_gradient_sync(is_last)  # type: ignore[operator]
                with hold:
                    (loss_of(model, step * num_micro_steps + micro, rank) / num_micro_steps).backward()
            sync_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
        return {name: value_of(parameter) for name, parameter in bare.named_parameters()}


def train_dense(num_ranks: int, num_steps: int, num_micro_steps: int) -> dict[str, Tensor]:
    """The same in one process."""
    model = dense(num_ranks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for step in range(num_steps):
        for micro in range(num_micro_steps):
            for rank in range(num_ranks):
                loss = loss_of(model, step * num_micro_steps + micro, rank)
                (loss / num_ranks / num_micro_steps).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value_of(parameter) for name, parameter in model.named_parameters()}
