"""The router: weights, load and the load-balance loss."""

from __future__ import annotations

import pytest
import torch

from epee.nn import route
from tests.nn.cases import seeded


def test_weights_sum_to_one_and_belong_to_the_most_probable_experts() -> None:
    logits = seeded(50, 8, seed=1)
    routing = route(logits, 3)
    torch.testing.assert_close(routing.topk_weights.sum(-1), torch.ones(50, dtype=torch.float64))
    for row, chosen in zip(logits, routing.topk_idx, strict=True):
        assert set(chosen.tolist()) == set(row.argsort(descending=True)[:3].tolist())
    ratio = (logits.gather(1, routing.topk_idx[:, :1]) - logits.gather(1, routing.topk_idx[:, 1:2])).exp()
    torch.testing.assert_close(routing.topk_weights[:, :1] / routing.topk_weights[:, 1:2], ratio)


def test_load_counts_each_slot() -> None:
    routing = route(seeded(30, 4, seed=2), 2)
    counted = [(routing.topk_idx == expert).sum().item() for expert in range(4)]
    assert routing.expert_load.tolist() == counted
    assert sum(counted) == 60


def test_aux_loss_is_one_for_an_even_load_and_worst_for_one_expert() -> None:
    even = torch.eye(4, dtype=torch.float64) * 50
    assert float(route(even, 1).aux_loss) == pytest.approx(1.0)
    one = torch.zeros(4, 4, dtype=torch.float64)
    one[:, 2] = 50
    assert float(route(one, 1).aux_loss) == pytest.approx(4.0)


def test_aux_loss_pushes_towards_the_idle_experts() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]] * 4, dtype=torch.float64, requires_grad=True)
    route(logits, 1).aux_loss.backward()
    assert logits.grad is not None
    assert (logits.grad[:, 0] > 0).all()
    assert (logits.grad[:, 1:] < 0).all()


def test_no_tokens() -> None:
    routing = route(torch.zeros(0, 4, requires_grad=True), 2)
    assert routing.topk_idx.shape == (0, 2)
    assert routing.aux_loss.item() == 0.0
    assert routing.expert_load.tolist() == [0, 0, 0, 0]
