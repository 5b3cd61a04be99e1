"""The demo's proof: one training step over epee equals the same step computed densely in one process.

All members use the trained weights, draw one batch each and do one step over epee: forward, backward, sum of the shared
gradients, AdamW. Rank 0 gets all experts' weights and all batches, and does the same step with dense layers, where no
token is sent. Loss, every gradient and every updated weight are compared.

On CPUs both do it in float64. The two sum in different orders: in float32 that rounding is about 1e-6, enough to make a
router choose another expert for a token now and then, which is no error and would still look like one. In float64 it is
about 1e-15, and any misplaced row, lost weight or omitted term stands out by ten orders of magnitude.

On GPUs rows of float64 are not served, so the step over epee is one in float32, and three measures compensate for it:

- The dense process computes in float64 with the experts that the routers over epee have chosen. That each of these was
  among the best in float64 as well, but for rounding, is also compared.
- The allowed error of float32 is measured: the dense process does its step in float32, too, on the same device, and its
  error is the rounding of this very step without epee. Ours rounds in another order, so its error is another number of
  that size: `MARGIN` times as much is allowed, and in no case more than `MOST`, where a row begins to count.
- AdamW's first step divides a gradient by its own size, so the rounding of a gradient near zero would become a whole
  step of its weight. The dense optimiser is given our gradients, which have been compared by then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from ..nn import DenseMoELayer
from .model import Transformer, is_expert
from .settings import Settings
from .train import Batch, Trainer, backward, gather, make_buffer, make_optimizer, sum_gradients, whole

TOLERANCE = 1e-9  # in float64
MARGIN = 8.0  # over 40 seeds on CPUs our error was 0.9 to 1.4 times that of the dense float32 step
MOST = 1e-3
Step = dict[str, Tensor]  # results of a step: "loss", "gradients of NAME", "weights of NAME"


def compare_one_step(trainer: Trainer) -> dict[str, Any] | None:
    """Do one step both ways and return their differences, on rank 0; None elsewhere. Collective of the members."""
    settings, members, batch = trainer.settings, trainer.members, trainer.next_batch()
    num_ranks = len(members)
    dtype = torch.float64 if settings.device == "cpu" else torch.float32
    with make_buffer(settings, trainer.group, dtype, trainer.device) as buffer:
        model = Transformer(settings, buffer).to(trainer.device, dtype)
        model.load_state_dict(trainer.model.state_dict())
        start = _filled(whole(model.state_dict(), members), settings.num_experts)
        ours = _filled(whole(_step(model, [batch], num_ranks), members), settings.num_experts)
        chosen = [gather(layer.topk_idx, members) for layer in model.layers()]
    batches = list(zip(gather(batch[0], members), gather(batch[1], members), strict=True))
    if trainer.rank:
        return None
    if dtype == torch.float64:
        return compare(ours, _step(_dense(settings, start, dtype), batches, num_ranks))
    exact = _dense(settings, start, torch.float64)
    shortfalls: list[Tensor] = []
    for layer in exact.layers():
        layer.register_forward_pre_hook(lambda of, given: shortfalls.append(shortfall(of, given[0])))
    rounded = _step(_dense(settings, start, dtype), batches, num_ranks, chosen, ours)
    return compare_rounded(
        ours, rounded, _step(exact, batches, num_ranks, chosen, ours), torch.stack(shortfalls).max().item()
    )


def compare(ours: Step, dense: Step) -> dict[str, Any]:
    """Return the result of comparing two steps in float64."""
    worst = deviation(ours, dense)
    return {"passed": worst <= TOLERANCE, "tolerance": TOLERANCE, "max_deviation": worst, "dtype": "float64"}


def compare_rounded(ours: Step, rounded: Step, exact: Step, missed: float) -> dict[str, Any]:
    """Return the result of comparing a step in float32 with the dense one in float32 and the dense one in float64.

    `missed` is the probability by which a router over epee has missed the best experts.
    """
    tolerance = min(MARGIN * deviation(rounded, exact), MOST)  # a NaN stays one, and passes nothing
    worst = torch.tensor([deviation(ours, exact), missed], dtype=torch.float64, device="cpu").max().item()
    return {"passed": worst <= tolerance, "tolerance": tolerance, "max_deviation": worst, "dtype": "float32"}


def deviation(ours: Step, dense: Step) -> float:
    """Return the largest difference, relative to the largest value of its tensor; a NaN stays one."""
    assert ours.keys() == dense.keys()
    pairs = ((ours[name].double(), dense[name].double()) for name in dense)
    return torch.stack([(a - b).abs().max() / b.abs().max().clamp_min(1e-300) for a, b in pairs]).max().item()


@torch.no_grad()
def shortfall(layer: DenseMoELayer, x: Tensor) -> Tensor:
    """Return the shortfall in probability of the worst given expert below the last that should be given.

    The largest such difference over the tokens of `x`; 0 if the given experts are the best.
    """
    assert layer.given_idx is not None
    probabilities = functional.linear(x.reshape(-1, layer.hidden), layer.router).softmax(-1)
    wanted = probabilities.topk(layer.num_topk).values.amin(1)
    return (wanted - probabilities.gather(1, layer.given_idx).amin(1)).max()


def _dense(settings: Settings, start: dict[str, Tensor], dtype: torch.dtype) -> Transformer:
    """Return the dense model with these weights, on their device."""
    dense = Transformer(settings, None).to(start["head.weight"].device, dtype)
    dense.load_state_dict(start)
    return dense


def _filled(state: Step, num_experts: int) -> Step:
    """Remove the rows of places that no expert has, if some ranks are lost."""
    return {name: value[:num_experts] if is_expert(name) else value for name, value in state.items()}


def _step(
    model: Transformer,
    batches: list[Batch],
    num_ranks: int,
    chosen: Sequence[Tensor] = (),
    gradients: Step | None = None,
) -> Step:
    """Do a step with these batches, and with those of the other ranks if a rank has but one of them.

    Args:
        model: whose weights are updated.
        batches: of this rank, or of all ranks in a dense process.
        num_ranks: that do the step.
        chosen: for each layer of a dense process `[num_ranks, num_tokens, num_topk]`, the experts to take.
        gradients: a step whose gradients the optimiser is given instead of the model's own.
    """
    total = 0.0
    for rank, batch in enumerate(batches):
        for layer, idx in zip(model.layers(), chosen, strict=False):
            cast(DenseMoELayer, layer).given_idx = idx[rank]
        total += backward(model, batch, num_ranks)
    parameters = dict(model.named_parameters())
    loss = next(iter(parameters.values())).new_tensor([total])
    if len(batches) < num_ranks:
        loss = sum_gradients(model, loss)
    found = {f"gradients of {name}": cast(Tensor, one.grad).clone() for name, one in parameters.items()}
    if gradients is not None:
        for name, one in parameters.items():
            one.grad = gradients[f"gradients of {name}"].to(one.dtype)
    make_optimizer(model).step()
    return {"loss": loss, **found, **{f"weights of {name}": one.detach() for name, one in parameters.items()}}
