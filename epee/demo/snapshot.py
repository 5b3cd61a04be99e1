"""What a rank keeps so that training can go on after a loss: its own state, and a copy of its neighbour's experts.

State is values and both moments of AdamW, float32: `[3, n]` for everything that all ranks share, `[experts, 3, n]` for
experts (all layers of an expert in one row). Copies travel in one `all_to_all` of the group in which each rank sends to
its holder only. The collective completes on all members or on none, so all have the same snapshots.

A rank keeps the last two: a loss in the midst of taking one leaves the one before.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .model import Transformer, named
from .placement import Placement

_MOMENTS = ("exp_avg", "exp_avg_sq")


class State(NamedTuple):
    """Values and moments of a rank's model, and how often the optimiser has updated them."""

    num_updates: int
    shared: Tensor
    experts: Tensor


class Snapshot(NamedTuple):
    """What is kept of the moment after step `step`.

    Attributes:
        step: of the training.
        placement: who held which experts.
        state: of this rank.
        copy: the experts of the rank whose holder this one is, `[experts, 3, n]`; none where it is alone.
    """

    step: int
    placement: Placement
    state: State
    copy: Tensor


def capture(model: Transformer, optimizer: torch.optim.Optimizer) -> State:
    """Copy the state of a rank."""
    shared = [parameter for _, parameter in named(model, experts=False)]
    experts = [parameter for _, parameter in named(model, experts=True)]
    num_updates = int(optimizer.state[shared[0]]["step"]) if optimizer.state else 0
    rows = [torch.cat([part.flatten() for part in parts]) for parts in _parts(shared, optimizer)]
    blocks = [torch.cat([part.flatten(1) for part in parts], 1) for parts in _parts(experts, optimizer)]
    return State(num_updates, torch.stack(rows), torch.stack(blocks, 1))


def restore(model: Transformer, optimizer: torch.optim.Optimizer, state: State) -> None:
    """Write a state into a model and a fresh optimiser; the experts are those of the model, in its order."""
    for experts, source in ((False, state.shared), (True, state.experts)):
        at = 0
        for _, parameter in named(model, experts=experts):
            width = parameter[0].numel() if experts else parameter.numel()
            values, *moments = (
                source.select(-2, kind)[..., at : at + width].reshape(parameter.shape).clone() for kind in range(3)
            )
            at += width
            parameter.data.copy_(values)
            optimizer.state[parameter] = {
                "step": torch.tensor(float(state.num_updates), dtype=torch.float32, device="cpu"),
                **dict(zip(_MOMENTS, moments, strict=True)),
            }
        assert at == source.shape[-1], "the state belongs to another model"


def send_to_holders(placement: Placement, rank: int, experts: Tensor) -> Tensor:
    """Send this rank's experts `[n, 3, width]` to its holder; return what this rank holds for another. Collective."""
    members = placement.members
    width = experts[0].numel()
    if len(members) == 1:
        return experts[:0]
    (ward,) = (member for member in members if placement.holder(member) == rank)
    to_send, to_get = [0] * len(placement.experts), [0] * len(placement.experts)
    to_send[placement.holder(rank)] = experts.numel()
    to_get[ward] = len(placement.experts[ward]) * width
    copy = experts.new_empty(to_get[ward])
    dist.all_to_all_single(copy, experts.flatten(), to_get, to_send)
    return copy.view(-1, *experts.shape[1:])


def experts_after_loss(snapshot: Snapshot, rank: int, lost: int) -> Tensor:
    """Return the experts that this rank serves once `lost` is gone, in ascending order."""
    mine, placement = snapshot.placement.experts[rank], snapshot.placement
    if placement.holder(lost) != rank:
        return snapshot.state.experts
    numbers = torch.tensor(mine + placement.experts[lost], dtype=torch.int64, device="cpu")
    return torch.cat([snapshot.state.experts, snapshot.copy])[numbers.argsort()]


def _parts(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> list[list[Tensor]]:
    """Return values, first and second moments of the parameters."""
    zeros = {name: torch.zeros((), dtype=torch.float32, device="cpu") for name in _MOMENTS}
    moments = [
        [optimizer.state.get(parameter, zeros)[name].expand_as(parameter) for parameter in parameters]
        for name in _MOMENTS
    ]
    return [[parameter.detach() for parameter in parameters], *moments]
