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

from .model import Transformer
from .train import Batch, Trainer, backward, gather, make_buffer, make_optimizer, sum_gradients, whole

TOLERANCE = 1e-9
Step = dict[str, Tensor]  # what a step yields: "loss", "gradients of NAME", "weights of NAME"


def compare_one_step(trainer: Trainer) -> dict[str, Any] | None:
    """Do one step both ways and return how far they differ, on rank 0; None elsewhere. Collective of all ranks."""
    settings, members, batch = trainer.settings, trainer.members, trainer.next_batch()
    with make_buffer(settings, dist.group.WORLD, torch.float64) as buffer:
        model = Transformer(settings, buffer).double()
        model.load_state_dict(trainer.model.state_dict())
        start = whole(model.state_dict(), members)
        ours = whole(_step(model, [batch]), members)
    batches = zip(gather(batch[0], members), gather(batch[1], members), strict=True)
    if trainer.rank:
        return None
    dense = Transformer(settings, None).double()
    dense.load_state_dict(start)
    return compare(ours, _step(dense, list(batches)))


def compare(ours: Step, dense: Step) -> dict[str, Any]:
    """Return the largest difference, relative to the largest value of its tensor; a NaN never passes."""
    assert ours.keys() == dense.keys()
    deviations = [(ours[name] - dense[name]).abs().max() / dense[name].abs().max().clamp_min(1e-300) for name in dense]
    worst = torch.stack(deviations).max().item()
    return {"passed": worst <= TOLERANCE, "tolerance": TOLERANCE, "max_deviation": worst, "dtype": "float64"}


def _step(model: Transformer, batches: list[Batch]) -> Step:
    """Do a step with these batches, and with those of the other ranks if a rank has but one of them."""
    num_ranks = model.settings.num_ranks
    words = next(model.parameters()).new_tensor([sum(backward(model, batch, num_ranks) for batch in batches)])
    if len(batches) < num_ranks:
        words = sum_gradients(model, words)
    gradients = {f"gradients of {name}": cast(Tensor, one.grad).clone() for name, one in model.named_parameters()}
    make_optimizer(model).step()
    weights = {f"weights of {name}": one.detach() for name, one in model.named_parameters()}
    return {"loss": words, **gradients, **weights}
