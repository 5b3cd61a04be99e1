"""`MoELayer` under DDP and FSDP: experts stay what they are, and a training is that of one dense process."""

from __future__ import annotations

import copy
import functools
import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import epee
from epee.nn import MoELayer, expert_parameters, mark_experts, sync_gradients
from tests.harness import DEAD, run_mortal, run_ranks
from tests.survive import stages
from tests.survive.buffer_rounds import start

from . import parallel_cases as cases


def check_equal(got: list[dict[str, Tensor]], want: dict[str, Tensor]) -> None:
    """Compare the ranks' parameters with the dense ones; experts are spread over the ranks in order."""
    for name, value in want.items():
        parts = [each[name] for each in got]
        whole = [torch.cat(parts)] if ".experts." in name else parts
        for each in whole:
            # Float64 gradients that differ by the order of their sums, and what 20 steps make of that.
            torch.testing.assert_close(each, value, rtol=1e-7, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(("way", "backend"), [("plain", "epee"), ("ddp", "epee"), ("ddp", "gloo"), ("fsdp2", "epee")])
def test_twenty_steps_equal_those_of_the_dense_model(way: str, backend: str) -> None:
    check_equal(run_ranks(cases.train, 2, way, 20, 1, backend=backend), cases.train_dense(2, 20, 1))


@pytest.mark.parametrize("way", cases.WAYS)
def test_accumulated_gradients_equal_those_of_the_dense_model(way: str) -> None:
    check_equal(run_ranks(cases.train, 2, way, 3, 2, backend="epee"), cases.train_dense(2, 3, 2))


def _sum_of(parameters: list[Tensor], factor: float) -> Tensor:
    return factor * torch.stack([each.sum().double() for each in parameters]).sum()


def _is_kept(rank: int, num_ranks: int) -> list[str]:
    """Wrap in many ways; return those after which an expert has changed or is averaged."""
    del num_ranks
    bad = []
    with cases.buffer_over(dist.group.WORLD) as buffer:
        make = cases.spread(buffer)

        class Deep(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.models = nn.ModuleDict({"a": nn.Sequential(nn.Linear(4, 4), nn.ModuleList([make(0)]))})

        def replaced() -> nn.Module:
            layer = make(0)
            layer.experts = nn.Linear(3, 3)  # the user's own
            nn.init.constant_(layer.experts.weight, rank)
            layer.experts.register_buffer("count", torch.full((2,), float(rank)))
            return layer

        def own() -> nn.Module:
            experts = nn.Linear(3, 3)
            nn.init.constant_(experts.weight, rank)
            return nn.ModuleList([nn.Linear(2, 2), mark_experts(experts)])

        def compiled() -> nn.Module:
            return torch.compile(make(0), backend="eager")  # type: ignore[return-value]

        def checkpointed() -> nn.Module:
            from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

            return nn.ModuleList([checkpoint_wrapper(make(0))])

        ways: dict[str, Any] = {
            "the layer itself": lambda: make(0),
            "a model": lambda: cases.Model(make),
            "deep": Deep,
            "replaced": replaced,
            "own": own,
            "copied": lambda: copy.deepcopy(cases.Model(make)),
            "compiled": compiled,
            "checkpointed": checkpointed,
        }
        for name, make_module in ways.items():
            module = make_module()
            before = {id(each): each.detach().clone() for each in expert_parameters(module)}
            buffers = [(each, each.clone()) for each in module.buffers()]
            others = [each for each in module.parameters() if id(each) not in before]
            assert before, name
            module.forward = functools.partial(_sum_of, list(module.parameters()))  # type: ignore[method-assign]
            wrapped = DistributedDataParallel(module)
            experts = expert_parameters(wrapped)
            kept = {id(each) for each in experts} == before.keys()
            kept = kept and all(torch.equal(each, before[id(each)]) for each in experts)
            wrapped(float(rank + 1)).backward()
            kept = kept and all(torch.equal(each, was) for each, was in buffers)
            kept = kept and all(float(each.grad.flatten()[0]) == rank + 1 for each in experts)  # type: ignore[union-attr]
            kept = kept and all(float(each.grad.flatten()[0]) == 1.5 for each in others)  # type: ignore[union-attr]
            if not kept:
                bad.append(name)
    return bad


def test_ddp_keeps_experts_however_deep_they_are() -> None:
    assert run_ranks(_is_kept, 2, backend="gloo") == [[], []]


def _fsdp1(rank: int, num_ranks: int, use_orig_params: bool) -> bool:
    from torch.distributed.fsdp import FullyShardedDataParallel

    del num_ranks
    with cases.buffer_over(dist.group.WORLD) as buffer:
        model = cases.Model(cases.spread(buffer))
        model.blocks[0] = FullyShardedDataParallel(
            model.blocks[0], device_id=torch.device("cpu"), use_orig_params=use_orig_params
        )
        experts = expert_parameters(model)
        before = [each.detach().clone() for each in experts]
        wrapped = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=use_orig_params)
        kept = expert_parameters(wrapped)
        return len(kept) == 4 and all(torch.equal(each, was) for each, was in zip(kept, before, strict=True))


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_fsdp1_keeps_experts(use_orig_params: bool) -> None:
    assert run_ranks(_fsdp1, 2, use_orig_params, backend="gloo") == [True, True]


def _replicated(rank: int, num_ranks: int) -> list[Any]:
    """Return the errors of wrong calls and the gradients of the right one: 4 ranks, buffers over two of them each."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    same = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    with cases.buffer_over(halves[rank // 2]) as buffer:
        model = cases.Model(cases.spread(buffer))
        cases.loss_of(model, 0, rank).backward()
        errors = []
        for wrong in ({}, {"group": halves[rank // 2], "replicas": same}):
            with pytest.raises(epee.InvalidArgument) as caught:
                sync_gradients(model, **wrong)  # type: ignore[arg-type]
            errors.append(str(caught.value))
        sync_gradients(model, replicas=same)
        return [errors, {name: each.grad for name, each in model.named_parameters()}]


def test_gradients_of_experts_that_several_ranks_hold_are_averaged_over_all_ranks() -> None:
    got = run_ranks(_replicated, 4, backend="gloo")
    assert "4 ranks; pass replicas" in got[0][0][0]
    model = cases.dense(2)
    for rank in range(4):
        (cases.loss_of(model, 0, rank) / 4).backward()
    want = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    for first in (0, 2):
        check_equal([each for _, each in got[first : first + 2]], want)


def _unwrapped_remainders(rank: int, num_ranks: int) -> list[float | None]:
    """A parameter outside DDP, one whose gradient only rank 1 has, and one that no rank uses."""
    del num_ranks
    inner, outer = nn.Linear(2, 2), nn.ModuleDict()
    outer["ddp"] = DistributedDataParallel(inner)
    outer["some"], outer["none"] = nn.Linear(1, 1), nn.Linear(1, 1)
    loss = outer["ddp"](torch.full((1, 2), rank + 1.0)).sum()
    if rank:
        loss = loss + outer["some"](torch.ones(1, 1)).sum()
    loss.backward()
    sync_gradients(outer)
    grads = (inner.weight.grad, outer["some"].weight.grad, outer["none"].weight.grad)  # type: ignore[union-attr]
    return [None if each is None else float(each.flatten()[0]) for each in grads]


def test_what_ddp_does_not_average_is_averaged() -> None:
    assert run_ranks(_unwrapped_remainders, 2, backend="gloo") == [[1.5, 0.5, None]] * 2


def _nothing_to_average(rank: int, num_ranks: int) -> str:
    del rank, num_ranks
    with cases.buffer_over(dist.group.WORLD) as buffer:
        layer = cases.spread(buffer)(0)
        with pytest.raises(epee.InvalidArgument) as caught:
            DistributedDataParallel(layer.experts)  # type: ignore[arg-type]
        return str(caught.value)


def test_ddp_over_experts_alone_is_refused_in_words() -> None:
    assert all("sync_gradients" in each for each in run_ranks(_nothing_to_average, 2, backend="gloo"))


def _one_rank(rank: int, num_ranks: int) -> list[Any]:
    del rank, num_ranks
    with cases.buffer_over(dist.group.WORLD) as buffer:
        return expert_parameters(cases.Model(cases.spread(buffer))) + expert_parameters(cases.dense(2))


def test_experts_that_all_are_here_are_ordinary_parameters() -> None:
    assert run_ranks(_one_rank, 1) == [[]]


def _mixed_precision(rank: int, num_ranks: int) -> list[torch.dtype]:
    """FSDP2 computes in bfloat16: the router's weights and the tokens are cast on the way, experts' weights are not."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    assert dist.group.WORLD is not None
    mesh, policy = DeviceMesh.from_group(dist.group.WORLD, "cpu"), MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    with epee.Buffer(num_experts=4, hidden=16, num_topk=2, max_tokens_per_rank=8, dtype=torch.float32) as buffer:
        layer = MoELayer(16, 24, 2 * num_ranks, 2, buffer)
        fully_shard(layer, mesh=mesh, mp_policy=policy)
        out = layer(torch.randn(8, 16, generator=torch.Generator().manual_seed(rank)))
        out.float().square().mean().backward()
        sync_gradients(layer)
        return [out.dtype, *(each.grad.dtype for each in layer.parameters())]  # type: ignore[union-attr]


def test_mixed_precision_of_fsdp2_computes_in_its_dtype() -> None:
    f32, bf16 = torch.float32, torch.bfloat16
    assert run_ranks(_mixed_precision, 2, backend="epee") == [[bf16, f32, f32, f32]] * 2


def _after_a_loss(rank: int, num_ranks: int, folder: str) -> list[float]:
    group = start(rank, num_ranks, folder, "mask", on_stall="error")
    model = nn.ModuleDict({"router": nn.Linear(1, 1, bias=False), "experts": nn.Linear(1, 1, bias=False)})
    mark_experts(model["experts"], num_ranks)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while len(group.last_contributors()) == num_ranks or not group.last_contributors():
        dist.barrier(group)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1.0 + rank)
    sync_gradients(model, group)
    stages.meet(folder, "end", rank, (0, 2))
    return [parameter.grad.item() for parameter in model.parameters() if parameter.grad is not None]


def test_after_a_loss_the_mean_is_that_of_the_ranks_that_are_left() -> None:
    """The router's is the mean of 1 and 3, that of each rank's own experts a half of what it has."""
    assert run_mortal(_after_a_loss, 3, dead={1}) == [[2.0, 0.5], DEAD, [2.0, 1.5]]
