"""The demo's proof: one training step over epee equals the same step computed densely in one process.

All ranks take the trained weights into float64, draw one batch each and do one step over epee: forward, backward, sum
of the shared gradients, AdamW. Rank 0 gets all experts' weights and all batches, and does the same step with dense
layers, where no token travels. Loss, every gradient and every updated weight are compared.

Why float64: the two sum in different orders. In float32 that rounding is about 1e-6, enough to let a router change its
mind about a token now and then, which is no error and would still look like one. In float64 it is about 1e-15, and any
misplaced row, lost weight or missing term stands out by ten orders of magnitude.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..nn import DenseMoELayer
from .group import SharedGradients, gather
from .model import Transformer, is_expert, named
from .settings import Settings
from .setup import make_buffer, make_model
from .train import backward, make_optimizer

TOLERANCE = 1e-9


class Deviation(NamedTuple):
    """Largest differences between the two steps, each relative to the largest value of the tensor concerned."""

    loss: float
    gradients: float
    weights: float

    @property
    def worst(self) -> float:
        """The largest of all."""
        return max(self)

    @property
    def passed(self) -> bool:
        """True when everything agrees to `TOLERANCE` (a NaN never does)."""
        return all(value <= TOLERANCE for value in self)


class _Step(NamedTuple):
    """What one step yields: loss, gradients and updated weights by name, all experts in one tensor."""

    loss: float
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


def compare_one_step(
    rank: int, settings: Settings, group: dist.ProcessGroup, trained: Transformer, batch: tuple[Tensor, Tensor]
) -> Deviation | None:
    """Do one step both ways and return how far they differ, on rank 0; None elsewhere. Collective.

    Args:
        trained: this rank's model; not changed.
        batch: this rank's inputs and targets, both `[batch, context]` int64.
    """
    with make_buffer(settings, group, torch.float64) as buffer:
        model = make_model(settings, buffer, torch.float64)
        model.load_state_dict(trained.state_dict())
        start = {name: _whole(name, value) for name, value in model.state_dict().items()}
        step = _step_over_epee(settings, model, batch)
    inputs, targets = gather(batch[0]), gather(batch[1])
    if rank:
        return None
    return _compare(step, _dense_step(settings, start, inputs, targets))


def _step_over_epee(settings: Settings, model: Transformer, batch: tuple[Tensor, Tensor]) -> _Step:
    shared = SharedGradients([parameter for _, parameter in named(model, experts=False)], num_words=1)
    loss = backward(model, batch, settings)
    shared.words[0] = loss
    shared.sum_over_ranks()
    gradients = {name: _whole(name, _grad(parameter)) for name, parameter in model.named_parameters()}
    make_optimizer(model, settings.learning_rate).step()
    weights = {name: _whole(name, value) for name, value in model.state_dict().items()}
    return _Step(float(shared.words[0]), gradients, weights)


def _dense_step(settings: Settings, start: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> _Step:
    size = settings.size

    def make_moe(layer: int) -> DenseMoELayer:
        return DenseMoELayer(size.hidden, size.ffn_hidden, size.num_experts, size.num_topk, dtype=torch.float64)

    model = Transformer(size, make_moe, seed=0).double()
    model.load_state_dict(start)
    loss = sum(backward(model, batch, settings) for batch in zip(inputs, targets, strict=True))
    gradients = {name: _grad(parameter).clone() for name, parameter in model.named_parameters()}
    make_optimizer(model, settings.learning_rate).step()
    return _Step(loss, gradients, model.state_dict())


def _compare(ours: _Step, dense: _Step) -> Deviation:
    assert ours.gradients.keys() == dense.gradients.keys()
    assert ours.weights.keys() == dense.weights.keys()
    return Deviation(
        abs(ours.loss - dense.loss) / abs(dense.loss),
        max(_distance(ours.gradients[name], value) for name, value in dense.gradients.items()),
        max(_distance(ours.weights[name], value) for name, value in dense.weights.items()),
    )


def _distance(ours: Tensor, dense: Tensor) -> float:
    assert ours.shape == dense.shape
    return float((ours - dense).abs().max() / dense.abs().max().clamp_min(1e-300))


def _whole(name: str, value: Tensor) -> Tensor:
    """Return a copy of the whole tensor of all ranks: an expert's is spread over them, the others are the same."""
    return gather(value.detach()).flatten(0, 1) if is_expert(name) else value.detach().clone()


def _grad(parameter: torch.nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
