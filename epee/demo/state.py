"""The state of a training in one file, whole, whoever holds which experts.

By the name of each parameter: its value and both moments of AdamW, `[3, ..]` for what all ranks share and
`[num_experts, 3, ..]` for experts. Experts lie in order: with n members each has `ceil(num_experts / n)` places, and
expert e has place e. Places at the end may be empty; no token is sent there.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import RankFailedError
from .model import Transformer, is_expert

State = dict[str, Tensor]
_MOMENTS = ("exp_avg", "exp_avg_sq")


def gather(tensor: Tensor, members: tuple[int, ...]) -> Tensor:
    """Return `[num_members, *shape]`: the tensor of every member, on every member (collective)."""
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    require_all(members)
    return torch.stack([parts[rank] for rank in members])


def require_all(members: tuple[int, ...]) -> None:
    """After a collective: raise `RankFailedError` if it lacks a member. In mode "mask" no call fails for a loss."""
    last_contributors = getattr(dist.group.WORLD, "last_contributors", lambda: members)  # other backends have raised
    if lost := sorted(set(members) - set(last_contributors())):
        raise RankFailedError(f"rank(s) {lost} did not contribute", lost, "demo")


def whole(name: str, value: Tensor, members: tuple[int, ...]) -> Tensor:
    """Return a copy of what all members have of a parameter: an expert's is spread over them. Collective."""
    value = value.detach()
    return gather(value, members).flatten(0, 1) if is_expert(name) else value.clone()


def local_state(model: Transformer, optimizer: torch.optim.Optimizer) -> State:
    """Return a copy of what this rank has; zeros for the moments of a fresh optimiser."""
    state = {}
    for name, value in model.named_parameters():
        moments = [optimizer.state[value].get(moment, torch.zeros_like(value)) for moment in _MOMENTS]
        state[name] = torch.stack([value.detach(), *moments], int(is_expert(name)))
    return state


def restore(model: Transformer, optimizer: torch.optim.Optimizer, state: State, num_updates: int) -> None:
    """Write a state over all experts into a model with some of them and its optimiser."""
    for name, parameter in model.named_parameters():
        value = state[name]
        if is_expert(name):
            first = model.layers()[0].experts.first_expert
            places = torch.arange(first, first + len(parameter), dtype=torch.int64, device="cpu")
            value = value[places.clamp(max=len(value) - 1)]  # an empty place holds a copy that nobody uses
        weights, *moments = value.unbind(int(is_expert(name)))
        parameter.data.copy_(weights)
        optimizer.state[parameter] = {which: one.clone() for which, one in zip(_MOMENTS, moments, strict=True)}
        optimizer.state[parameter]["step"] = torch.tensor(float(num_updates), dtype=torch.float32, device="cpu")
