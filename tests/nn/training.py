"""What training does to a `MoELayer`: steps plain, under activation checkpointing and under torch.compile.

The ranks' functions of `test_training.py` (CPUs) and `tests/gpu/test_nn_gpu.py`, where parameters, tokens and the
buffer lie on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from epee.nn import MoELayer

from .cases import Case, buffer_for, seeded, tokens_of

FFN_HIDDEN = 32


class Block(nn.Module):
    """A projection, the experts, and what a transformer has around them; all of it in the layer's dtype."""

    def __init__(self, case: Case, moe: MoELayer) -> None:
        super().__init__()
        self.before = nn.Linear(case.hidden, case.hidden, dtype=case.dtype, device="cpu")
        with torch.no_grad():
            self.before.weight.copy_(seeded(case.hidden, case.hidden, seed=50) / case.hidden**0.5)
            self.before.bias.copy_(seeded(case.hidden, seed=51))
        self.moe = moe

    def forward(self, x: Tensor) -> Tensor:
        """Return x and what the experts make of its projection."""
        return x + self.moe(torch.nn.functional.gelu(self.before(x)))


def plain(block: Block) -> Callable[[Tensor], Tensor]:
    """As it is."""
    return block


def checkpointed(block: Block) -> Callable[[Tensor], Tensor]:
    """Forward again in the backward: dispatch and combine are called twice, in the same order on all ranks."""

    def call(x: Tensor) -> Tensor:
        out = checkpoint(block, x, use_reentrant=False)
        assert isinstance(out, Tensor)
        return out

    return call


def compiled(block: Block) -> Callable[[Tensor], Tensor]:
    """Through dynamo and AOT autograd; the calls between ranks are graph breaks."""
    return torch.compile(block, backend="aot_eager")


def compiled_by_inductor(block: Block) -> Callable[[Tensor], Tensor]:
    """As `compiled`, with code made of the graphs between the breaks."""
    return torch.compile(block)


def compiled_and_checkpointed(block: Block) -> Callable[[Tensor], Tensor]:
    """Both."""
    return checkpointed(torch.compile(block, backend="aot_eager"))  # type: ignore[arg-type]


WAYS = {way.__name__: way for way in (plain, checkpointed, compiled, compiled_by_inductor, compiled_and_checkpointed)}


def steps(rank: int, num_ranks: int, case: Case, names: tuple[str, ...]) -> dict[str, list[dict[str, Tensor]]]:
    """Return per way what two steps give: the output, and the gradients of tokens and parameters, on the CPU."""
    found: dict[str, list[dict[str, Any]]] = {}
    with buffer_for(case) as buffer:
        device = buffer.config.device
        for name in names:
            moe = MoELayer(
                case.hidden, FFN_HIDDEN, case.num_experts, case.num_topk, buffer, layout=case.layout, dtype=case.dtype
            )
            block = Block(case, moe).to(device)
            call = WAYS[name](block)
            found[name] = [_step(case, block, call, rank, number) for number in range(2)]
    return found


def _step(case: Case, block: Block, call: Callable[[Tensor], Tensor], rank: int, number: int) -> dict[str, Tensor]:
    device = block.before.weight.device
    x = (tokens_of(case, rank) * (number + 1)).to(device).requires_grad_()
    block.zero_grad()
    out = call(x)
    factors = seeded(*out.shape, seed=900 + rank).to(device, out.dtype)
    (out * factors).sum().backward()
    grads = {name: parameter.grad for name, parameter in block.named_parameters()}
    values = {"out": out.detach(), "x": x.grad, **grads}
    assert all(value is not None for value in values.values()), values
    return {name: value.cpu() for name, value in values.items() if value is not None}
