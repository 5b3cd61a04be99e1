"""HybridEP's `HybridEPBuffer` against one row at a time: maps, padding, static sizes, dropped rows, FP8 rows."""

from __future__ import annotations

import pytest
import torch

import epee.compat.deep_ep as deep_ep
from epee.ep import map_of, most_experts, num_left_out, topk_of_map
from epee.errors import UnsupportedError
from tests.compat import hybrid_cases
from tests.harness import run_ranks


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_calls_agree_with_one_row_at_a_time(num_ranks: int) -> None:
    run_ranks(hybrid_cases.run_calls, num_ranks)


def test_topk_ids_and_scales_travel_as_a_map_and_rows_do() -> None:
    run_ranks(hybrid_cases.run_topk_and_scales, 2)


def test_rows_that_are_not_grouped_are_unsupported() -> None:
    for name in ("dispatch", "combine"):
        with pytest.raises(UnsupportedError, match=f"HybridEPBuffer.{name} is not supported: epee"):
            getattr(deep_ep.HybridEPBuffer, name)(None)


def test_a_map_and_its_topk_ids_say_the_same() -> None:
    gen = torch.Generator().manual_seed(3)
    routing_map = torch.rand(20, 7, generator=gen) < 0.4
    probs = torch.rand(20, 7, generator=gen)
    most = int(routing_map.sum(1).max())
    idx, weights, counts = topk_of_map(routing_map, probs, most + 4)
    assert (most_experts(counts), int(num_left_out(counts))) == (most, 0)
    back, back_probs = map_of(idx, weights, 20, 7)
    assert torch.equal(back, routing_map)
    assert back_probs is not None
    assert torch.equal(back_probs, probs * routing_map)
    fewer, _, counts = topk_of_map(routing_map, None, most - 1)
    assert most_experts(counts) == most
    assert int(num_left_out(counts)) == int((routing_map.sum(1) - (most - 1)).clamp(min=0).sum())
    assert fewer.shape == (20, most - 1)
