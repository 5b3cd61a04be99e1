"""The demo's proof: one training step over epee equals the same step computed densely in one process.

All ranks take the trained weights into float64, draw one batch each and do one step over epee: forward, backward, sum
of the shared gradients, AdamW. Rank 0 gets all experts' weights and all batches, and does the same step with dense
layers, where no token travels. Loss, every gradient and every updated weight are compared.

Why float64: the two sum in different orders. In float32 that rounding is about 1e-6, enough to let a router change its
mind about a token now and then, which is no error and would still look like one. In float64 it is about 1e-15, and any
misplaced row, lost weight or missing term stands out by ten orders of magnitude.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ..nn import DenseMoELayer
from .model import Transformer
from .settings import Settings
from .state import gather, whole
from .train import Batch, Trainer, backward, make_buffer, make_model, make_optimizer, sum_gradients

TOLERANCE = 1e-9
Step = dict[str, Tensor]  # what a step yields: "loss", "gradients of NAME", "weights of NAME"


def compare_one_step(trainer: Trainer) -> dict[str, Any] | None:
    """Do one step both ways and return how far they differ, on rank 0; None elsewhere. Collective of all ranks."""
    settings, members, batch = trainer.settings, trainer.members, trainer.next_batch()
    with make_buffer(settings, dist.group.WORLD, torch.float64) as buffer:
        model = make_model(settings, buffer, torch.float64)
        model.load_state_dict(trainer.model.state_dict())
        start = {name: whole(name, value, members) for name, value in model.state_dict().items()}
        step = {name: whole(name, value, members) for name, value in _step(settings, model, [batch]).items()}
    batches = zip(gather(batch[0], members), gather(batch[1], members), strict=True)
    return None if trainer.rank else compare(step, _dense_step(settings, start, list(batches)))


def compare(ours: Step, dense: Step) -> dict[str, Any]:
    """Return the largest differences, each relative to the largest value of its tensor; a NaN never passes."""
    assert ours.keys() == dense.keys()
    worst = {
        part: torch.stack([_distance(ours[name], dense[name]) for name in dense if name.startswith(part)]).max().item()
        for part in ("loss", "gradients", "weights")
    }
    passed = all(value <= TOLERANCE for value in worst.values())
    return {"passed": passed, "tolerance": TOLERANCE, "max_deviation": max(worst.values()), **worst, "dtype": "float64"}


def _step(settings: Settings, model: Transformer, batches: list[Batch]) -> Step:
    """Do a step with these batches, and with those of the other ranks if a rank has but one of them."""
    loss = sum(backward(model, batch, settings, settings.num_ranks) for batch in batches)
    words = next(model.parameters()).new_tensor([loss])
    if len(batches) < settings.num_ranks:
        words = sum_gradients(model, words)
    gradients = {f"gradients of {name}": cast(Tensor, one.grad).clone() for name, one in model.named_parameters()}
    make_optimizer(model, settings.learning_rate).step()
    weights = {f"weights of {name}": one.detach() for name, one in model.named_parameters()}
    return {"loss": words, **gradients, **weights}


def _dense_step(settings: Settings, start: Step, batches: list[Batch]) -> Step:
    size = settings.size

    def make_moe(layer: int) -> DenseMoELayer:
        return DenseMoELayer(size.hidden, size.ffn_hidden, size.num_experts, size.num_topk, dtype=torch.float64)

    model = Transformer(size, make_moe, seed=0).double()
    model.load_state_dict(start)
    return _step(settings, model, batches)


def _distance(ours: Tensor, dense: Tensor) -> Tensor:
    assert ours.shape == dense.shape
    return (ours - dense).abs().max() / dense.abs().max().clamp_min(1e-300)
