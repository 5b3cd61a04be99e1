"""`MoELayer` over ranks computes what one dense layer computes: outputs and every gradient."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel

import epee
from epee.nn import DenseMoELayer, MoELayer, expert_parameters, route
from tests.harness import run_ranks
from tests.nn.cases import Case, buffer_for, seeded, tokens_of

FFN_HIDDEN = 24
AUX = 0.1


def _layer_step(rank: int, num_ranks: int, case: Case) -> dict[str, Any]:
    """Forward and backward of this rank's tokens; returns outputs and gradients."""
    del num_ranks
    x = tokens_of(case, rank).requires_grad_()
    with buffer_for(case) as buffer:
        layer = MoELayer(
            case.hidden, FFN_HIDDEN, case.num_experts, case.num_topk, buffer,
            layout=case.layout, seed=7, dtype=case.dtype,
        )  # fmt: skip
        out = layer(x[None])[0]
        (_loss(case, rank, out) + AUX * layer.aux_loss).backward()
    grads = {name: parameter.grad for name, parameter in layer.named_parameters()}
    return {
        "out": out,
        "x": x.grad,
        "aux_loss": layer.aux_loss,
        "expert_load": layer.expert_load,
        "num_sent": layer.num_sent,
        "grads": grads,
    }


def _loss(case: Case, rank: int, out: Tensor) -> Tensor:
    return (out.to(torch.float64) * seeded(*out.shape, seed=900 + rank)).sum()


def _dense_step(case: Case) -> tuple[list[dict[str, Any]], DenseMoELayer]:
    """The same for all ranks' tokens in one process; gradients of the layer add up over the ranks."""
    layer = DenseMoELayer(case.hidden, FFN_HIDDEN, case.num_experts, case.num_topk, seed=7, dtype=case.dtype)
    results = []
    for rank in range(case.num_ranks):
        x = tokens_of(case, rank).requires_grad_()
        out = layer(x)
        (_loss(case, rank, out) + AUX * layer.aux_loss).backward()
        results.append(
            {"out": out.detach(), "x": x.grad, "aux_loss": layer.aux_loss.detach(), "expert_load": layer.expert_load}
        )
    return results, layer


def _check_against_dense(case: Case, tolerance: float, run: Callable[..., list[Any]] = run_ranks) -> None:
    got = run(_layer_step, case.num_ranks, case)
    expected, dense = _dense_step(case)
    for rank, result in enumerate(got):
        for name, value in expected[rank].items():
            assert torch.allclose(result[name], value, rtol=tolerance, atol=tolerance), (
                rank,
                name,
                result[name],
                value,
            )
    router = sum(result["grads"]["router"] for result in got)
    torch.testing.assert_close(router, dense.router.grad, rtol=tolerance, atol=tolerance)
    for name in ("experts.gate_up", "experts.down"):
        whole = torch.cat([result["grads"][name] for result in got])
        torch.testing.assert_close(whole, dense.get_parameter(name).grad, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("layout", ["expert", "rank"])
@pytest.mark.parametrize("num_tokens", [(9,), (13, 8), (6, 0, 11), (0, 0)], ids=str)
def test_layer_equals_the_dense_layer(num_tokens: tuple[int, ...], layout: str) -> None:
    # Both sum at most a few dozen products of size about 1 in float64, in different orders.
    _check_against_dense(Case(num_tokens, hidden=16, layout=layout, num_local_experts=3), tolerance=1e-12)


@pytest.mark.parametrize("layout", ["expert", "rank"])
def test_float32_layer_equals_the_dense_layer(layout: str) -> None:
    case = Case((40, 25), hidden=32, layout=layout, num_local_experts=4, num_topk=3, dtype=torch.float32)
    # Values up to about 10, sums of up to 65 products: 65 * 10 * 2**-24 at the very worst.
    _check_against_dense(case, tolerance=1e-4)


def test_bfloat16_layer_is_near_the_float64_layer() -> None:
    case = Case((64, 48), hidden=32, num_local_experts=4, dtype=torch.bfloat16)
    got = run_ranks(_layer_step, 2, case)
    layer = DenseMoELayer(case.hidden, FFN_HIDDEN, case.num_experts, case.num_topk, seed=7, dtype=torch.bfloat16)
    layer.double()  # the rounded weights, computed with exactly
    for rank, result in enumerate(got):
        assert result["out"].dtype == torch.bfloat16
        x = tokens_of(case, rank)
        # Router logits are float32 of the same bfloat16 tokens, so both choose the same experts.
        out = layer(x.double())
        assert torch.equal(result["expert_load"], layer.expert_load)
        assert (result["out"].double() - out).abs().max() < 0.05 * out.abs().max()


def _counters(rank: int, num_ranks: int, case: Case) -> dict[str, Any]:
    return _layer_step(rank, num_ranks, case)


def test_counters_tell_where_the_tokens_went() -> None:
    case = Case((10, 6), num_local_experts=2, num_topk=2)
    for rank, result in enumerate(run_ranks(_counters, 2, case)):
        load = result["expert_load"]
        assert load.sum() == case.num_tokens[rank] * case.num_topk
        # The expert layout sends one row per (token, expert).
        assert result["num_sent"] == load.view(2, case.num_local_experts).sum(1).tolist()


def test_experts_start_the_same_on_any_rank() -> None:
    whole = DenseMoELayer(8, 4, 6, 2, seed=3)
    other = DenseMoELayer(8, 4, 6, 2, seed=4)
    assert not torch.equal(whole.experts.gate_up, other.experts.gate_up)
    assert not torch.equal(whole.experts.gate_up[0], whole.experts.gate_up[1])
    for num_ranks in (2, 3):
        parts = run_ranks(_initial_weights, num_ranks, 6)
        assert torch.equal(torch.cat(parts), whole.experts.gate_up)


def _initial_weights(rank: int, num_ranks: int, num_experts: int) -> Tensor:
    del rank
    case = Case((1,) * num_ranks, num_local_experts=num_experts // num_ranks, dtype=torch.float32)
    with buffer_for(case) as buffer:
        return MoELayer(8, 4, num_experts, 2, buffer, seed=3).experts.gate_up.detach()


def _bad_arguments(rank: int, num_ranks: int, case: Case) -> list[str]:
    del rank, num_ranks
    messages = []
    with buffer_for(case) as buffer:
        for change in ({"hidden": 24}, {"num_experts": 8}, {"num_topk": 3}, {"layout": "token"}):
            arguments = {"hidden": case.hidden, "num_experts": case.num_experts, "num_topk": case.num_topk, **change}
            try:
                MoELayer(ffn_hidden=4, buffer=buffer, **arguments)
            except epee.InvalidArgument as exc:
                messages.append(str(exc))
        layer = MoELayer(case.hidden, 4, case.num_experts, case.num_topk, buffer)
        try:
            layer(torch.zeros(2, 2 * case.hidden))
        except epee.InvalidArgument as exc:
            messages.append(str(exc))
    return messages


def test_sizes_that_differ_from_the_buffers_are_refused() -> None:
    (messages,) = run_ranks(_bad_arguments, 1, Case((4,)))
    assert [message.split()[0] for message in messages] == ["hidden", "num_experts", "num_topk", "layout", "x"]
    assert messages[-1] == "x must be [.., 8], got [2, 16]; its rows are the tokens"


def _inference(rank: int, num_ranks: int, case: Case) -> bool:
    """Many forwards without gradients give the same result and keep no slot."""
    del num_ranks
    x = tokens_of(case, rank)
    with buffer_for(case) as buffer, torch.no_grad():
        layer = MoELayer(case.hidden, FFN_HIDDEN, case.num_experts, case.num_topk, buffer, dtype=case.dtype)
        results = [layer(x) for _ in range(8)]
        return all(torch.equal(results[0], result) for result in results) and buffer.num_copied_results == 0


def test_inference_is_repeatable_and_keeps_no_slot() -> None:
    assert run_ranks(_inference, 2, Case((5, 7))) == [True, True]


def _skewed(rank: int, num_ranks: int, options: dict[str, Any]) -> tuple[str, list[int]]:
    """A step in which all tokens of all ranks go to the first two experts, over a buffer of default room."""
    del rank
    with epee.Buffer(
        num_experts=4 * num_ranks, hidden=32, num_topk=2, max_tokens_per_rank=48, dtype=torch.float32, **options
    ) as buffer:
        layer = MoELayer(32, 64, 4 * num_ranks, 2, buffer)
        with torch.no_grad():
            layer.router.zero_()
            layer.router[0], layer.router[1] = 1.0, 0.9
        layer(torch.rand(48, 32)).sum().backward()
        return layer.layout, layer.num_sent


@pytest.mark.parametrize(("num_ranks", "options", "layout"), [
    (4, {}, "rank"), (4, {"max_recv_rows": 4 * 48 * 2}, "expert"), (2, {}, "rank"), (1, {}, "expert"),
])  # fmt: skip
def test_a_layer_at_its_defaults_takes_any_routing(num_ranks: int, options: dict[str, Any], layout: str) -> None:
    num_rows = 48 if layout == "rank" else 96
    for found in run_ranks(_skewed, num_ranks, options):
        assert found == (layout, [num_rows] + [0] * (num_ranks - 1))


CAPACITY = 9


def _capped(rank: int, num_ranks: int, case: Case) -> dict[str, Any]:
    x = tokens_of(case, rank).requires_grad_()
    with buffer_for(case) as buffer:
        layer = MoELayer(
            case.hidden, FFN_HIDDEN, case.num_experts, case.num_topk, buffer,
            capacity=CAPACITY, seed=7, dtype=case.dtype,
        )  # fmt: skip
        assert layer.layout == "rank"
        out = layer(x)
        _loss(case, rank, out).backward()
    assert layer.num_dropped is not None
    grads = {name: each.grad for name, each in layer.named_parameters()}
    return {"out": out, "x": x.grad, "grads": grads, "num_dropped": int(layer.num_dropped)}


def test_a_capacity_drops_rows_in_forward_and_backward_alike() -> None:
    case = Case((10, 6, 8), hidden=16, num_local_experts=2, num_topk=2)
    got = run_ranks(_capped, 3, case)
    layer = DenseMoELayer(case.hidden, FFN_HIDDEN, case.num_experts, case.num_topk, seed=7, dtype=case.dtype)
    taken, dropped = [0] * 3, [0] * 3
    for rank in range(3):
        x = tokens_of(case, rank).requires_grad_()
        routing = route(torch.nn.functional.linear(x, layer.router), case.num_topk)
        owner = routing.topk_idx // case.num_local_experts
        kept = torch.zeros_like(owner, dtype=torch.bool)
        for token in range(len(x)):
            for dst in sorted(set(owner[token].tolist())):
                if taken[dst] < CAPACITY:
                    kept[token] |= owner[token] == dst
                    taken[dst] += 1
                else:
                    dropped[dst] += 1
        out = torch.zeros_like(x)
        for k in range(case.num_topk):
            rows = [
                layer.experts.run(int(idx), row[None])[0] for idx, row in zip(routing.topk_idx[:, k], x, strict=True)
            ]
            out = out + torch.stack(rows) * (routing.topk_weights * kept)[:, k, None]
        _loss(case, rank, out).backward()
        torch.testing.assert_close(got[rank]["out"], out, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(got[rank]["x"], x.grad, rtol=1e-12, atol=1e-12)
    assert [each["num_dropped"] for each in got] == dropped
    assert min(dropped) > 0
    torch.testing.assert_close(sum(each["grads"]["router"] for each in got), layer.router.grad, rtol=1e-12, atol=1e-12)
    for name in ("experts.gate_up", "experts.down"):
        whole = torch.cat([each["grads"][name] for each in got])
        torch.testing.assert_close(whole, layer.get_parameter(name).grad, rtol=1e-12, atol=1e-12)


def _copied(rank: int, num_ranks: int, case: Case) -> str:
    """Copy a model after a forward, and compare; try to save it."""
    del num_ranks
    x = tokens_of(case, rank)
    with buffer_for(case) as buffer:
        model = torch.nn.Sequential(
            torch.nn.Linear(case.hidden, case.hidden, dtype=case.dtype),
            MoELayer(case.hidden, FFN_HIDDEN, case.num_experts, case.num_topk, buffer, dtype=case.dtype),
        )
        model(x).sum().backward()
        other, averaged = copy.deepcopy(model), AveragedModel(model)
        assert torch.equal(other(x), model(x))
        assert torch.equal(averaged(x), model(x))
        with torch.no_grad():
            for parameter in other.parameters():
                parameter += 1.0
        assert not torch.equal(other(x), model(x))
        assert torch.equal(averaged(x), model(x))
        assert expert_parameters(other)[0] is not expert_parameters(model)[0]
        dense = DenseMoELayer(case.hidden, FFN_HIDDEN, case.num_experts, case.num_topk, dtype=case.dtype)
        dense(x)
        assert torch.equal(copy.deepcopy(dense)(x), dense(x))
        with pytest.raises(epee.UnsupportedError) as caught:
            torch.save(model, io.BytesIO())
        torch.save(model.state_dict(), io.BytesIO())
    return str(caught.value)


def test_copies_share_the_buffer_and_saving_is_refused_in_words() -> None:
    for text in run_ranks(_copied, 2, Case((5, 7))):
        assert text.startswith("a Buffer cannot be pickled or saved")
        assert "state_dict" in text


def _narrowed(rank: int, num_ranks: int, case: Case) -> torch.dtype:
    del num_ranks
    with buffer_for(case) as buffer:
        layer = MoELayer(case.hidden, FFN_HIDDEN, case.num_experts, case.num_topk, buffer).bfloat16()
        out = layer(tokens_of(case, rank).bfloat16())
        out.float().sum().backward()
        return out.dtype


def test_a_layer_made_narrower_still_routes_in_float32() -> None:
    assert run_ranks(_narrowed, 2, Case((5, 7), dtype=torch.float32)) == [torch.bfloat16] * 2
