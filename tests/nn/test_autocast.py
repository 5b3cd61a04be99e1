"""Under `torch.autocast` the router stays float32, experts compute in bfloat16, and gradients reach every parameter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from epee.nn import DenseMoELayer, MoELayer, combine, dispatch, route
from tests.harness import run_ranks
from tests.nn.cases import Case, buffer_for, seeded, tokens_of

FFN_HIDDEN = 24


def _autocast(enabled: bool = True) -> Any:
    return torch.autocast("cpu", torch.bfloat16, enabled)


def _loss(rank: int, out: Tensor) -> Tensor:
    return (out.float() * seeded(*out.shape, seed=900 + rank, dtype=torch.float32)).sum()


def _layer_step(rank: int, num_ranks: int, case: Case, inside: bool) -> dict[str, Any]:
    """Forward under autocast, backward `inside` of it or behind it."""
    del num_ranks
    x = tokens_of(case, rank).requires_grad_()
    with buffer_for(case) as buffer:
        layer = MoELayer(
            case.hidden, FFN_HIDDEN, case.num_experts, case.num_topk, buffer,
            layout=case.layout, seed=7, dtype=case.dtype,
        )  # fmt: skip
        with _autocast():
            out = layer(x)
            loss = _loss(rank, out) + layer.aux_loss
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
    grads = {name: parameter.grad for name, parameter in layer.named_parameters()}
    return {"out": out.detach(), "x": x.grad, "topk_idx": layer.topk_idx, "grads": grads}


def _near(got: Tensor, expected: Tensor) -> None:
    """A few dozen products, each of factors rounded to 8 bits: 2 % of the largest value is never reached."""
    assert got.dtype == expected.dtype
    assert (got - expected).abs().max() < 0.02 * expected.abs().max()


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("layout", ["expert", "rank"])
def test_a_layer_under_autocast_is_near_the_float32_layer(layout: str, inside: bool) -> None:
    case = Case((24, 17), hidden=32, layout=layout, num_local_experts=4, dtype=torch.float32)
    got = run_ranks(_layer_step, 2, case, inside)
    dense = DenseMoELayer(case.hidden, FFN_HIDDEN, case.num_experts, case.num_topk, seed=7)
    for rank, result in enumerate(got):
        x = tokens_of(case, rank).requires_grad_()
        out = dense(x)
        (_loss(rank, out) + dense.aux_loss).backward()
        assert torch.equal(result["topk_idx"], dense.topk_idx)  # the choice is not rounded
        _near(result["out"], out.detach())
        assert not torch.equal(result["out"], out.detach())  # the experts are
        assert x.grad is not None
        _near(result["x"], x.grad)
    assert dense.router.grad is not None
    _near(sum(result["grads"]["router"] for result in got), dense.router.grad)
    for name in ("experts.gate_up", "experts.down"):
        whole, expected = torch.cat([result["grads"][name] for result in got]), dense.get_parameter(name).grad
        assert expected is not None
        _near(whole, expected)


def test_the_dense_layer_follows_autocast_alike() -> None:
    case = Case((30,), hidden=32, num_local_experts=4, dtype=torch.float32)
    dense = DenseMoELayer(case.hidden, FFN_HIDDEN, case.num_experts, case.num_topk, seed=7)
    plain = dense(tokens_of(case, 0))
    chosen = dense.topk_idx
    with _autocast():
        _near(dense(tokens_of(case, 0)).detach(), plain.detach())
    assert torch.equal(dense.topk_idx, chosen)


def _own_model(case: Case) -> list[nn.Linear]:
    """A router and one linear layer per expert, alike on all ranks."""
    torch.manual_seed(0)
    sizes = [case.num_experts, *[case.hidden] * case.num_experts]
    return [nn.Linear(case.hidden, size, bias=False) for size in sizes]


def _own_step(rank: int, num_ranks: int, case: Case, autocast: bool) -> dict[str, Any]:
    del num_ranks
    x = tokens_of(case, rank).requires_grad_()
    router, *experts = _own_model(case)
    mine = experts[rank * case.num_local_experts :][: case.num_local_experts]
    with buffer_for(case) as buffer:
        with _autocast(autocast):
            routing = route(router(x), case.num_topk)
            received = dispatch(buffer, x, routing.topk_idx, routing.topk_weights)
            assert isinstance(received.x, Tensor)
            blocks = received.x.split(received.num_tokens_per_expert)
            y = torch.cat([expert(block) for expert, block in zip(mine, blocks, strict=True)])
            out = combine(buffer, y, received)
        _loss(rank, out).backward()
    grads = [module.weight.grad for module in (router, *mine)]
    return {"out": out.detach(), "x": x.grad, "topk_idx": routing.topk_idx, "grads": grads}


def test_a_layer_of_ones_own_under_autocast_passes_gradients() -> None:
    """A linear layer returns bfloat16 logits: `route` makes weights of them that dispatch takes."""
    case = Case((16, 11), hidden=32, dtype=torch.float32)
    for rank, got in enumerate(run_ranks(_own_step, 2, case, True)):
        x = tokens_of(case, rank).requires_grad_()
        router, *experts = _own_model(case)
        with _autocast():
            logits = router(x)
        assert logits.dtype == torch.bfloat16
        routing = route(logits, case.num_topk, got["topk_idx"])
        assert routing.topk_weights.dtype == torch.float32
        every = torch.stack([expert(x) for expert in experts], 1)  # [num_tokens, num_experts, hidden]
        chosen = every.gather(1, routing.topk_idx[..., None].expand(-1, -1, case.hidden))
        out = (chosen * routing.topk_weights[..., None]).sum(1)
        _loss(rank, out).backward()
        assert got["out"].dtype == torch.bfloat16  # as the rows that were combined
        _near(got["out"].float(), out.detach())
        assert x.grad is not None
        _near(got["x"], x.grad)
        assert router.weight.grad is not None
        _near(got["grads"][0], router.weight.grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_logits_are_read_as_float32(dtype: torch.dtype) -> None:
    logits = seeded(20, 6, seed=3, dtype=dtype)
    routing, wide = route(logits, 3), route(logits.float(), 3)
    assert torch.equal(routing.topk_idx, wide.topk_idx)
    assert routing.topk_weights.dtype == routing.aux_loss.dtype == torch.float32
    assert torch.equal(routing.topk_weights, wide.topk_weights)
