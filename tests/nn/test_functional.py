"""The gradients of dispatch and combine, against finite differences and against plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import epee
import epee.nn
from tests.harness import run_ranks
from tests.nn.cases import Case, buffer_for, routing_of, seeded, tokens_of, weights_of

LAYOUTS = [("expert", 1), ("expert", 4), ("rank", 1)]


def expert_scales(case: Case, rank: int) -> Tensor:
    """Expert e of these tests computes `x * scale[e] + x ** 2`: not linear, and different for each expert."""
    first = rank * case.num_local_experts
    return seeded(case.num_experts, case.hidden, seed=400)[first : first + case.num_local_experts].to(case.dtype)


def run_experts(case: Case, rank: int, d: epee.Dispatched) -> Tensor:
    """Apply the experts of this rank as the layout asks: plain rows, or weighted sums over the local experts."""
    scales = expert_scales(case, rank)
    assert isinstance(d.x, Tensor)
    if case.layout == "expert":
        owner = torch.repeat_interleave(torch.arange(case.num_local_experts), torch.tensor(d.num_tokens_per_expert))
        return d.x * scales[owner] + d.x**2
    assert d.topk_idx is not None
    weights = d.topk_weights if d.topk_weights is not None else (d.topk_idx >= 0).to(case.dtype)
    per_k = [
        weights[:, k, None].to(case.dtype) * (d.x * scales[d.topk_idx[:, k].clamp_min(0)] + d.x**2)
        for k in range(case.num_topk)
    ]
    return torch.stack(per_k).sum(0)


def exchange(case: Case, buffer: epee.Buffer, rank: int, x: Tensor, weights: Tensor | None, *bias: Tensor) -> Tensor:
    """Dispatch, experts, combine."""
    d = epee.nn.dispatch(
        buffer, x, routing_of(case, rank), weights, layout=case.layout, expert_alignment=case.expert_alignment
    )
    y = run_experts(case, rank, d)
    return epee.nn.combine(buffer, y, d, bias=bias if len(bias) == 2 else bias[0] if bias else None)


def dense(case: Case, rank: int, x: Tensor, weights: Tensor | None) -> Tensor:
    """The same for the tokens of `rank` in plain torch: no row travels."""
    scales = torch.cat([expert_scales(case, owner) for owner in range(case.num_ranks)])
    topk_idx = routing_of(case, rank)
    chosen = (topk_idx >= 0).to(x.dtype) if weights is None else weights * (topk_idx >= 0)
    y = x[:, None] * scales[topk_idx.clamp_min(0)] + x[:, None] ** 2
    return (chosen[..., None] * y).sum(1)


def _gradcheck(rank: int, num_ranks: int, case: Case, num_biases: int, with_weights: bool) -> bool:
    del num_ranks
    x = tokens_of(case, rank).requires_grad_()
    weights = weights_of(case, rank).requires_grad_() if with_weights else None
    biases = [seeded(*x.shape, seed=500 + idx).requires_grad_() for idx in range(num_biases)]
    with buffer_for(case) as buffer:
        return torch.autograd.gradcheck(
            lambda x, w, *bias: exchange(case, buffer, rank, x, w, *bias), (x, weights, *biases), nondet_tol=0.0
        )


@pytest.mark.parametrize(("layout", "expert_alignment"), LAYOUTS)
@pytest.mark.parametrize("num_biases", [0, 1, 2])
def test_gradients_agree_with_finite_differences(layout: str, expert_alignment: int, num_biases: int) -> None:
    case = Case((5,), layout=layout, expert_alignment=expert_alignment)
    assert run_ranks(_gradcheck, 1, case, num_biases, True) == [True]


@pytest.mark.parametrize(("layout", "expert_alignment"), LAYOUTS)
def test_gradients_agree_with_finite_differences_without_weights(layout: str, expert_alignment: int) -> None:
    case = Case((4,), layout=layout, expert_alignment=expert_alignment)
    assert run_ranks(_gradcheck, 1, case, 0, False) == [True]


def _gradients(rank: int, num_ranks: int, case: Case) -> dict[str, Any]:
    """Gradients of sum(out * coefficient) at this rank, through epee; and the output."""
    del num_ranks
    x, weights = tokens_of(case, rank).requires_grad_(), weights_of(case, rank).requires_grad_()
    coefficient = seeded(*x.shape, seed=600 + rank, dtype=case.dtype)
    with buffer_for(case) as buffer:
        out = exchange(case, buffer, rank, x, weights)
        (out * coefficient).sum().backward()
    return {"out": out, "x": x.grad, "weights": weights.grad}


def _dense_gradients(case: Case, rank: int) -> dict[str, Any]:
    x, weights = tokens_of(case, rank).requires_grad_(), weights_of(case, rank).requires_grad_()
    out = dense(case, rank, x, weights)
    (out * seeded(*x.shape, seed=600 + rank, dtype=case.dtype)).sum().backward()
    return {"out": out.detach(), "x": x.grad, "weights": weights.grad}


@pytest.mark.parametrize(("layout", "expert_alignment"), LAYOUTS)
@pytest.mark.parametrize("num_tokens", [(7, 5), (6, 0, 9), (0, 0), (0, 4)], ids=str)
def test_gradients_over_ranks_agree_with_plain_torch(
    num_tokens: tuple[int, ...], layout: str, expert_alignment: int
) -> None:
    case = Case(num_tokens, num_topk=3, layout=layout, expert_alignment=expert_alignment)
    for rank, got in enumerate(run_ranks(_gradients, case.num_ranks, case)):
        for name, expected in _dense_gradients(case, rank).items():
            assert torch.allclose(got[name], expected, rtol=1e-12, atol=1e-12), (rank, name, got[name], expected)


@pytest.mark.parametrize("layout", ["expert", "rank"])
def test_bfloat16_gradients_agree_within_their_rounding(layout: str) -> None:
    case = Case((33, 17), hidden=64, layout=layout, dtype=torch.bfloat16)
    exact = case._replace(dtype=torch.float64)
    for rank, got in enumerate(run_ranks(_gradients, 2, case)):
        for name, expected in _dense_gradients(exact, rank).items():
            # Inputs, expert results, gradient rows and the result are each rounded to 8 bits (2**-9 relative); the
            # rows of a token (up to 2) and, for a weight, 64 products add up. A misplaced row is off by about 1.
            scale = expected.abs().max()
            assert (got[name].double() - expected).abs().max() < 0.04 * scale, name
            assert got[name].dtype == (torch.float32 if name == "weights" else torch.bfloat16)


def _directional(rank: int, num_ranks: int, case: Case) -> tuple[float, float]:
    """The derivative of the ranks' total along one direction: by backward, and by central differences."""
    direction_x = seeded(*tokens_of(case, rank).shape, seed=700 + rank)
    direction_w = seeded(*weights_of(case, rank).shape, seed=800 + rank)

    def total(buffer: epee.Buffer, x: Tensor, weights: Tensor) -> Tensor:
        return (exchange(case, buffer, rank, x, weights) ** 3).sum()

    x, weights = tokens_of(case, rank).requires_grad_(), weights_of(case, rank).requires_grad_()
    with buffer_for(case) as buffer:
        total(buffer, x, weights).backward()
        step = 1e-5
        with torch.no_grad():
            above = total(buffer, x + step * direction_x, weights + step * direction_w)
            below = total(buffer, x - step * direction_x, weights - step * direction_w)
    assert x.grad is not None
    assert weights.grad is not None
    by_backward = (x.grad * direction_x).sum() + (weights.grad * direction_w).sum()
    sums = torch.stack([by_backward, (above - below) / (2 * step)])
    dist.all_reduce(sums)
    return float(sums[0]), float(sums[1])


@pytest.mark.parametrize("layout", ["expert", "rank"])
@pytest.mark.parametrize("num_tokens", [(5, 4), (3, 0, 6)], ids=str)
def test_directional_derivative_over_ranks(num_tokens: tuple[int, ...], layout: str) -> None:
    case = Case(num_tokens, layout=layout)
    for by_backward, by_difference in run_ranks(_directional, case.num_ranks, case):
        assert by_backward == pytest.approx(by_difference, rel=1e-6)
        assert abs(by_backward) > 1.0  # the comparison means something


def _padding_gradient(rank: int, num_ranks: int, case: Case) -> list[Any]:
    """Backward with NaN in the padding rows of y; returns what reached x and the weights, and y's own gradient."""
    del num_ranks
    x, weights = tokens_of(case, rank).requires_grad_(), weights_of(case, rank).requires_grad_()
    with buffer_for(case) as buffer:
        d = epee.nn.dispatch(buffer, x, routing_of(case, rank), weights, expert_alignment=case.expert_alignment)
        is_padding = d.handle.src_rank < 0
        y = torch.where(is_padding[:, None], torch.nan, run_experts(case, rank, d))
        y.retain_grad()
        epee.nn.combine(buffer, y, d).sum().backward()
    assert is_padding.any()
    assert y.grad is not None
    return [x.grad, weights.grad, y.grad[is_padding]]


def test_garbage_in_padding_rows_reaches_no_gradient() -> None:
    case = Case((5, 3), expert_alignment=8)
    for grad_x, grad_weights, grad_padding in run_ranks(_padding_gradient, 2, case):
        assert grad_x.isfinite().all()
        assert grad_weights.isfinite().all()
        assert (grad_padding == 0).all()


def _two_micro_batches(rank: int, num_ranks: int, case: Case) -> bool:
    """Two dispatches in flight: gradients equal those of one after the other."""
    del num_ranks
    gradients = []
    with buffer_for(case) as buffer:
        for interleaved in (False, True):
            x, weights = tokens_of(case, rank).requires_grad_(), weights_of(case, rank).requires_grad_()
            halves = [(x, weights), (2 * x, weights**2)]
            if interleaved:
                ds = [epee.nn.dispatch(buffer, a, routing_of(case, rank), b, layout=case.layout) for a, b in halves]
                outs = [epee.nn.combine(buffer, run_experts(case, rank, d), d) for d in reversed(ds)][::-1]
            else:
                outs = [exchange(case, buffer, rank, a, b) for a, b in halves]
            (outs[0].sum() + (outs[1] ** 2).sum()).backward()
            gradients.append((x.grad, weights.grad))
    return all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("layout", ["expert", "rank"])
def test_two_micro_batches_in_flight(layout: str) -> None:
    assert run_ranks(_two_micro_batches, 2, Case((6, 5), layout=layout)) == [True, True]


def _refused(rank: int, num_ranks: int, case: Case) -> tuple[str, bool]:
    """Rank 0 gives a bad expert id; then everybody makes a good call."""
    del num_ranks
    x, weights = tokens_of(case, rank), weights_of(case, rank)
    topk_idx = routing_of(case, rank)
    with buffer_for(case) as buffer:
        bad = topk_idx.clone()
        bad[0, 0] = case.num_experts if rank == 0 else bad[0, 0]
        try:
            epee.nn.dispatch(buffer, x, bad, weights)
        except epee.EpeeError as exc:
            error = type(exc).__name__
        again = exchange(case, buffer, rank, x, weights)
    return error, bool(torch.isfinite(again).all())


def test_a_refused_call_is_an_error_on_all_ranks_and_nothing_is_lost() -> None:
    assert run_ranks(_refused, 2, Case((4, 4))) == [("InvalidArgument", True), ("MismatchError", True)]


def _pair_and_closed(rank: int, num_ranks: int, case: Case) -> list[str]:
    """An FP8 pair is refused; a backward after close is an error."""
    del num_ranks
    x = tokens_of(case, rank).requires_grad_()
    errors = []
    with buffer_for(case) as buffer:
        try:
            epee.nn.dispatch(buffer, (x, x), routing_of(case, rank))  # type: ignore[arg-type]
        except epee.InvalidArgument as exc:
            errors.append(str(exc))
        out = exchange(case, buffer, rank, x, weights_of(case, rank))
    try:
        out.sum().backward()
    except epee.errors.InvalidState as exc:
        errors.append(str(exc))
    return errors


def test_a_pair_and_a_backward_after_close_are_refused() -> None:
    ((pair, closed),) = run_ranks(_pair_and_closed, 1, Case((4,)))
    assert pair == "x must be a tensor, got tuple; an FP8 pair goes through Buffer.dispatch"
    assert "closed" in closed
