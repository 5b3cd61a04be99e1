"""Expert parameters in a data-parallel training: DDP and FSDP skip them, `sync_gradients` scales gradients.

Ranks of a `MoELayer` hold different experts under the same parameter names. DDP would overwrite them with rank 0's and
average gradients of different experts; FSDP would shard them as if they were equal. `mark_experts` prevents both:

DDP     reads names to skip from the module that it wraps, at any depth of the experts below it. So the marking
        registers torch's public hook on module registration: when DDP registers the module that it wraps, the names
        of all experts below are added to those that it skips. DDP broadcasts and buckets parameters after that.
FSDP    (both versions) skips a module, with all below it, on which the composable API "replicate" is registered: that
        API manages its parameters. The marking registers an API of this name that does nothing.

Gradients: every rank calls `backward()` on the mean loss of its own tokens, and the model is to follow the mean of
these losses over the ranks. DDP and FSDP average the gradients of the parameters that they manage. An expert's gradient
is complete on its rank, as the tokens of all ranks reach it there: it is the sum over the ranks, to be divided by their
number.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from ..errors import InvalidArgument, UnsupportedError
from ..torch_private import contract, foreach_div

_Module = TypeVar("_Module", bound=nn.Module)
_MARK = "_epee_expert_ranks"  # attribute of a marked module: ranks over which its experts are spread, 0 = not known
_SPREAD = "_num_expert_ranks"  # attribute of a layer whose submodule `experts` is to be marked: that number of ranks


def mark_experts(module: _Module, num_ranks: int = 0) -> _Module:
    """Mark all parameters of a module as experts of this rank alone; DDP and FSDP skip them from then on. Local.

    `MoELayer` does this for its experts. Layers made of `epee.nn.dispatch` and `combine` do it for theirs, before DDP
    or FSDP is given the model.

    Args:
        module: holds experts of this rank, and nothing that other ranks hold as well.
        num_ranks: ranks over which the experts are distributed; `sync_gradients` then checks it. 0: not checked.

    Returns:
        The module.
    """
    _watch_registrations()
    if not hasattr(module, _MARK):
        _leave_out_of_fsdp(module)
    setattr(module, _MARK, num_ranks)
    return module


def spread_experts(layer: nn.Module, num_ranks: int) -> None:
    """Mark every module that becomes the submodule `experts` of a layer; with one rank nothing is marked."""
    _watch_registrations()
    setattr(layer, _SPREAD, num_ranks)


def expert_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters below `module` that only this rank holds, in the order of `module.parameters()`. Local."""
    experts = _experts_below(module)
    return [parameter for parameter in module.parameters() if id(parameter) in experts]


def sync_gradients(
    module: nn.Module, group: dist.ProcessGroup | None = None, *, replicas: dist.ProcessGroup | None = None
) -> None:
    """Replace all gradients by those of the mean over the ranks of their losses. Collective.

    Call it once between the last `backward()` and the optimiser's step, with gradient accumulation also only once.
    Gradients of experts are divided by the number of ranks. All others are averaged over the ranks, unless DDP or FSDP
    has done so: a model without them needs nothing but this call. A group of the backend "epee" that has lost ranks
    counts those in the call; DDP and FSDP divide by the group's size, and so does this call of experts beside them
    alone.

    Args:
        module: the model: plain, wrapped by DDP, or sharded by FSDP.
        group: the ranks that train together, each on tokens of its own; None for the default group.
        replicas: the ranks that hold the same experts, if buffers span only a part of `group`; gradients of experts are
            summed over them first.

    Raises:
        InvalidArgument: this rank is not in `group`; or the ranks of a layer's buffer, times those of `replicas`, are
            not as many as those of `group`.
        UnsupportedError: a gradient is sparse, or a parameter is a DTensor that FSDP does not manage.
        EpeeError: the errors of an all_reduce.
    """
    num_ranks = dist.get_world_size(group)
    if num_ranks < 1:
        raise InvalidArgument("group must contain this rank; each rank passes the group that it trains in")
    _check_sizes(module, num_ranks, 1 if replicas is None else dist.get_world_size(replicas))
    experts, done = _experts_below(module), _averaged_by_others(module)
    named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    with torch.no_grad():
        own = [(name, parameter) for name, parameter in named if id(parameter) in experts]
        if replicas is not None:
            _combine(own, replicas, is_mean=False)
        shared = [pair for pair in named if id(pair[1]) not in experts and id(pair[1]) not in done]
        num_present = _combine(shared, group, is_mean=True)
        gradients = [parameter.grad for _, parameter in own if parameter.grad is not None]
        if gradients:
            foreach_div(gradients, float(num_present))


def _check_sizes(module: nn.Module, num_ranks: int, num_replicas: int) -> None:
    for name, part in module.named_modules():
        spread = getattr(part, _MARK, 0)
        if spread and spread * num_replicas != num_ranks:
            remedy = "pass replicas, the group of the ranks that hold the same experts" if num_replicas == 1 else ""
            raise InvalidArgument(
                f"the experts {name!r} are spread over {spread} ranks and replicated {num_replicas} times, but group "
                f"has {num_ranks} ranks; {remedy or 'replicas must be the group of the ranks with the same experts'}"
            )


def _experts_below(module: nn.Module) -> set[int]:
    """Return the ids of all parameters of marked modules."""
    marked = (part for part in module.modules() if hasattr(part, _MARK))
    return {id(parameter) for part in marked for parameter in part.parameters()}


def _averaged_by_others(module: nn.Module) -> set[int]:
    """Return the ids of the parameters whose gradients DDP or FSDP averages."""
    # A module that has not been imported has not been used, and its import takes seconds.
    fsdp, tensor = sys.modules.get("torch.distributed.fsdp"), sys.modules.get("torch.distributed.tensor")
    kinds: tuple[Any, ...] = (fsdp.FullyShardedDataParallel, fsdp.FSDPModule) if fsdp else ((), ())
    is_dtensor = functools.partial(_is_a, kind=tensor.DTensor if tensor else ())
    done: set[int] = set()
    for part in module.modules():
        if isinstance(part, DistributedDataParallel):
            named = part.module.named_parameters()
            done |= {id(parameter) for name, parameter in named if name not in part.parameters_to_ignore}
        elif isinstance(part, kinds[0]):
            done |= {id(parameter) for parameter in part.parameters()}
        elif isinstance(part, kinds[1]):
            done |= {id(parameter) for parameter in part.parameters() if is_dtensor(parameter)}
    for name, parameter in module.named_parameters():
        if is_dtensor(parameter) and id(parameter) not in done:
            raise UnsupportedError(
                f"parameter {name!r} is a DTensor that FSDP does not manage; average its gradient yourself, and call "
                "sync_gradients with the submodules that have no such parameters"
            )
    return done


def _is_a(value: object, kind: Any) -> bool:
    return isinstance(value, kind)


def _combine(named: list[tuple[str, nn.Parameter]], group: dist.ProcessGroup | None, is_mean: bool) -> int:
    """Replace gradients by their sum or mean over the ranks of a group; a parameter without one counts as zeros.

    Returns:
        How many ranks took part; the group's size if there are no gradients to combine.
    """
    num_ranks = dist.get_world_size(group)
    if not named:
        return num_ranks
    for name, parameter in named:
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            raise UnsupportedError(f"the gradient of {name!r} is sparse; wrap the model with DDP, or use sparse=False")
    # All ranks have to make the same calls, so they agree on the parameters that have a gradient on any rank.
    device = named[0][1].device
    present = torch.tensor([parameter.grad is not None for _, parameter in named], dtype=torch.int32, device=device)
    dist.all_reduce(present, op=dist.ReduceOp.MAX, group=group)
    are_present = present.tolist()
    # of the backend "epee", whose AVG divides by the ranks in the call; others lose none
    contributors = getattr(dist.group.WORLD if group is None else group, "last_contributors", None)
    if contributors is not None:
        num_ranks = len(contributors())
    op = dist.ReduceOp.AVG if is_mean and contributors is not None else dist.ReduceOp.SUM
    alike: dict[tuple[torch.device, torch.dtype], list[nn.Parameter]] = {}
    for (_, parameter), is_present in zip(named, are_present, strict=True):
        if is_present:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            alike.setdefault((parameter.grad.device, parameter.grad.dtype), []).append(parameter)
    for parameters in alike.values():
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat, op=op, group=group)
        if is_mean and contributors is None:
            flat /= num_ranks
        for gradient, part in zip(gradients, flat.split([each.numel() for each in gradients]), strict=True):
            gradient.copy_(part.view(gradient.shape))
    return num_ranks


@functools.cache
def _watch_registrations() -> None:
    """Register the hook that torch calls whenever a module is registered in another one; once in a process."""
    register_module_module_registration_hook(_when_registered)


def _when_registered(parent: nn.Module, name: str, module: nn.Module | None) -> None:
    """Exclude the experts below the module that DDP wraps; mark experts that replace a layer's."""
    if module is None:
        return
    if isinstance(parent, DistributedDataParallel):
        if name == "module":
            _leave_out_of_ddp(parent, module)
    elif name == "experts" and parent.__dict__.get(_SPREAD, 0) > 1:
        mark_experts(module, parent.__dict__[_SPREAD])


def _leave_out_of_ddp(ddp: Any, module: nn.Module) -> None:
    """Add the experts below `module` to the names that DDP skips; called in DDP's constructor, before it uses them."""
    experts = _experts_below(module)
    if not experts:
        return
    try:
        ddp.parameters_to_ignore |= set(_names_of_experts(module, experts))
        ddp._module_parameters = [each for each in ddp._module_parameters if id(each) not in experts]
    except (AttributeError, TypeError) as exc:
        raise UnsupportedError(
            "this version of torch's DistributedDataParallel cannot be told to leave experts alone; call "
            "epee.nn.sync_gradients on the unwrapped model instead"
        ) from exc
    if not any(parameter.requires_grad for parameter in ddp._module_parameters):
        raise InvalidArgument(
            "DistributedDataParallel needs a trainable parameter that all ranks hold, got experts of this rank only; "
            "leave the module unwrapped and call epee.nn.sync_gradients"
        )
    for parameter in module.parameters():
        if id(parameter) in experts:
            parameter._ddp_ignored = True  # type: ignore[attr-defined] # read by DDP's mixed precision


def _names_of_experts(module: nn.Module, experts: set[int]) -> Iterator[str]:
    """Yield the names of experts' parameters and buffers in both forms that DDP uses.

    They differ for parameters of `module` itself (a leading dot) and if a wrapper hides a part of the names.
    """
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) in experts:
            yield name
    for path, part in module.named_modules(remove_duplicate=False):
        yield from (f"{path}.{name}" for name, each in part.named_parameters(recurse=False) if id(each) in experts)
    buffers = {id(each) for part in module.modules() if hasattr(part, _MARK) for each in part.buffers()}
    yield from (name for name, each in module.named_buffers(remove_duplicate=False) if id(each) in buffers)


def _leave_out_of_fsdp(module: nn.Module) -> None:
    """Register an API of the name "replicate" on a module: FSDP manages nothing of a module that has one."""
    try:
        exclusive = contract()
    except ImportError:
        warnings.warn(
            "this version of torch does not let epee mark experts for FSDP; pass "
            "ignored_params=set(epee.nn.expert_parameters(model)) to fully_shard",
            stacklevel=4,
        )
        return

    registered: Any = exclusive(replicate)
    registered(module)


def replicate(module: nn.Module) -> nn.Module:
    """Return `module`: an API for torch's registry, of which only the name matters."""
    return module
