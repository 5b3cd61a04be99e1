"""The oracle against cases small enough to work out by hand.

Two ranks, four experts: 0 and 1 live on rank 0, 2 and 3 on rank 1.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from epee.reference import Routed, combine, combine_weights, dispatch, lost_weight, tokens_per_expert

NUM_EXPERTS = 4


def rows(*values: float, dtype: torch.dtype = torch.float32, hidden: int = 8) -> torch.Tensor:
    """A tensor whose row i holds `values[i]` everywhere."""
    return torch.tensor(values, dtype=dtype)[:, None].expand(-1, hidden).contiguous()


@pytest.fixture
def inputs() -> list[Routed]:
    """Rank 0 has three tokens (the last routed nowhere), rank 1 has two (the last twice to expert 3)."""
    return [
        Routed(
            rows(10.0, 11.0, 12.0),
            torch.tensor([[0, 2], [3, 1], [-1, -1]]),
            torch.tensor([[0.5, 0.25], [0.75, 1.0], [9.0, 9.0]]),
        ),
        Routed(rows(20.0, 21.0), torch.tensor([[1, 0], [3, 3]]), torch.tensor([[2.0, 4.0], [8.0, 16.0]])),
    ]


def test_rank_layout_orders_by_source_rank_and_token(inputs: list[Routed]) -> None:
    first, second = dispatch(inputs, NUM_EXPERTS)
    assert torch.equal(first.x, rows(10.0, 11.0, 20.0))
    assert torch.equal(second.x, rows(10.0, 11.0, 21.0))
    assert first.src_rank.tolist() == [0, 0, 1]
    assert first.src_token.tolist() == [0, 1, 0]
    assert second.src_rank.tolist() == [0, 0, 1]
    assert second.src_token.tolist() == [0, 1, 1]


def test_rank_layout_gives_local_ids_and_zero_weights_elsewhere(inputs: list[Routed]) -> None:
    first, second = dispatch(inputs, NUM_EXPERTS)
    assert first.topk_idx.tolist() == [[0, -1], [-1, 1], [1, 0]]
    assert first.topk_weights.tolist() == [[0.5, 0.0], [0.0, 1.0], [2.0, 4.0]]
    assert second.topk_idx.tolist() == [[-1, 0], [1, -1], [1, 1]]
    assert second.topk_weights.tolist() == [[0.0, 0.25], [0.75, 0.0], [8.0, 16.0]]
    assert first.topk_idx.dtype == torch.int64


def test_a_rank_keeps_its_first_rows(inputs: list[Routed]) -> None:
    received = dispatch(inputs, NUM_EXPERTS, capacity=2)
    first, second = received
    assert torch.equal(first.x, rows(10.0, 11.0))
    assert torch.equal(second.x, rows(10.0, 11.0))
    assert first.topk_idx.tolist() == [[0, -1], [-1, 1]]
    assert second.topk_weights.tolist() == [[0.0, 0.25], [0.75, 0.0]]
    assert [there.num_tokens_per_expert for there in received] == [[1, 1], [1, 1]]
    assert [there.num_dropped for there in received] == [1, 1]
    back = combine(inputs, received, [there.x for there in received])
    assert torch.equal(back[0], rows(20.0, 22.0, 0.0))
    assert torch.equal(back[1], rows(0.0, 0.0))
    assert [lost.tolist() for lost in lost_weight(inputs, received, NUM_EXPERTS)] == [[0.0, 0.0, 0.0], [6.0, 24.0]]
    with pytest.raises(ValueError, match="rank layout"):
        dispatch(inputs, NUM_EXPERTS, layout="expert", capacity=2)


def test_without_a_capacity_nothing_is_lost(inputs: list[Routed]) -> None:
    received = dispatch(inputs, NUM_EXPERTS)
    assert [there.num_dropped for there in received] == [0, 0]
    assert [lost.tolist() for lost in lost_weight(inputs, received, NUM_EXPERTS)] == [[0.0, 0.0, 0.0], [0.0, 0.0]]
    by_mask = [Routed(given.x, is_token_in_rank=torch.ones(len(given.x), 2, dtype=torch.bool)) for given in inputs]
    received = dispatch(by_mask, NUM_EXPERTS, capacity=4)
    assert [lost.tolist() for lost in lost_weight(by_mask, received, NUM_EXPERTS)] == [[0.0, 0.0, 0.0], [0.0, 2.0]]


def test_counts_are_of_token_expert_pairs_rounded_up(inputs: list[Routed]) -> None:
    assert [tokens_per_expert(inputs, NUM_EXPERTS, rank) for rank in (0, 1)] == [[2, 2], [1, 3]]
    assert tokens_per_expert(inputs, NUM_EXPERTS, 1, 4) == [4, 4]
    assert dispatch(inputs, NUM_EXPERTS, expert_alignment=3)[1].num_tokens_per_expert == [3, 3]
    nowhere = [Routed(given.x, torch.full_like(given.topk_idx, -1)) for given in inputs]
    assert tokens_per_expert(nowhere, NUM_EXPERTS, 0, 16) == [0, 0], "an expert without tokens needs no padding"


def test_expert_layout_orders_by_expert_source_token_k(inputs: list[Routed]) -> None:
    first, second = dispatch(inputs, NUM_EXPERTS, layout="expert")
    assert torch.equal(first.x, rows(10.0, 20.0, 11.0, 20.0))
    assert first.src_rank.tolist() == [0, 1, 0, 1]
    assert first.src_token.tolist() == [0, 0, 1, 0]
    assert first.src_k.tolist() == [0, 1, 1, 0]
    assert first.topk_weights.tolist() == [0.5, 4.0, 1.0, 2.0]
    assert first.topk_idx is None
    assert torch.equal(second.x, rows(10.0, 11.0, 21.0, 21.0)), "an expert chosen twice gets the token twice"
    assert second.src_k.tolist() == [1, 0, 0, 1]


def test_expert_layout_pads_each_block_with_zero_rows(inputs: list[Routed]) -> None:
    second = dispatch(inputs, NUM_EXPERTS, layout="expert", expert_alignment=2)[1]
    assert torch.equal(second.x, rows(10.0, 0.0, 11.0, 21.0, 21.0, 0.0))
    assert second.src_rank.tolist() == [0, -1, 0, 1, 1, -1]
    assert second.src_token.tolist() == [0, -1, 1, 1, 1, -1]
    assert second.topk_weights.tolist() == [0.25, 0.0, 0.75, 8.0, 16.0, 0.0]
    assert second.num_tokens_per_expert == [2, 4]


def test_expert_layout_without_weights_has_ones(inputs: list[Routed]) -> None:
    bare = [Routed(given.x, given.topk_idx) for given in inputs]
    second = dispatch(bare, NUM_EXPERTS, layout="expert", expert_alignment=2)[1]
    assert second.topk_weights.tolist() == [1.0, 0.0, 1.0, 1.0, 1.0, 0.0]
    assert dispatch(bare, NUM_EXPERTS)[1].topk_weights is None


def test_routing_by_mask_needs_no_experts() -> None:
    mask = [torch.tensor([[True, True], [False, False]]), torch.tensor([[False, True]])]
    given = [Routed(rows(1.0, 2.0), is_token_in_rank=mask[0]), Routed(rows(3.0), is_token_in_rank=mask[1])]
    first, second = dispatch(given, NUM_EXPERTS)
    assert torch.equal(first.x, rows(1.0))
    assert torch.equal(second.x, rows(1.0, 3.0))
    assert first.topk_idx is None
    assert first.topk_weights is None
    assert first.num_tokens_per_expert == []
    sums = combine(given, [first, second], [rows(5.0), rows(6.0, 7.0)])
    assert torch.equal(sums[0], rows(11.0, 0.0))
    assert torch.equal(sums[1], rows(7.0))


def test_pair_moves_values_and_scales_together() -> None:
    values = torch.arange(2 * 128, dtype=torch.uint8).view(2, 128).view(torch.float8_e4m3fn)
    scales = torch.tensor([[1.0], [2.0]])
    given = [Routed((values, scales), torch.tensor([[1], [0]]))]
    (only,) = dispatch(given, 2, layout="expert", expert_alignment=2)
    assert only.x[0].view(torch.uint8)[0].tolist() == list(range(128, 256))
    assert only.x[0].view(torch.uint8)[1].tolist() == [0] * 128
    assert only.x[1].tolist() == [[2.0], [0.0], [1.0], [0.0]]


def test_no_tokens_anywhere_gives_empty_results() -> None:
    nothing = Routed(torch.empty(0, 8), torch.empty(0, 2, dtype=torch.int64), torch.empty(0, 2))
    for layout in ("rank", "expert"):
        got = dispatch([nothing, nothing], NUM_EXPERTS, layout=layout)
        assert [tuple(there.x.shape) for there in got] == [(0, 8), (0, 8)]
        assert got[0].num_tokens_per_expert == [0, 0]
        assert combine([nothing, nothing], got, [torch.empty(0, 8)] * 2)[1].shape == (0, 8)


def test_rank_layout_sums_the_destination_ranks_and_adds_bias(inputs: list[Routed]) -> None:
    got = dispatch(inputs, NUM_EXPERTS)
    y = [rows(1.0, 2.0, 3.0), rows(100.0, 200.0, 300.0)]
    assert torch.equal(combine(inputs, got, y)[0], rows(101.0, 202.0, 0.0))
    assert torch.equal(combine(inputs, got, y)[1], rows(3.0, 300.0))
    bias = [[rows(0.5, 0.5, 0.5), rows(0.25, 0.25, 0.25)], [rows(1.0, 1.0)]]
    assert torch.equal(combine(inputs, got, y, bias=bias)[0], rows(101.75, 202.75, 0.75))
    assert torch.equal(combine(inputs, got, y, bias=bias)[1], rows(4.0, 301.0))


def test_expert_layout_weights_and_sums(inputs: list[Routed]) -> None:
    got = dispatch(inputs, NUM_EXPERTS, layout="expert", expert_alignment=2)
    # rank 0 holds: expert 0 <- (0,0) (1,0); expert 1 <- (0,1) (1,0). Rank 1: (0,0) pad; (0,1) (1,1) (1,1) pad.
    y = [rows(1.0, 2.0, 3.0, 4.0), rows(5.0, torch.nan, 6.0, 7.0, 8.0, torch.nan)]
    assert torch.equal(combine(inputs, got, y)[0], rows(0.5 * 1 + 0.25 * 5, 1.0 * 3 + 0.75 * 6, 0.0))
    assert torch.equal(combine(inputs, got, y)[1], rows(4.0 * 2 + 2.0 * 4, 8.0 * 7 + 16.0 * 8))


def test_sum_is_float32_in_rank_order_and_rounded_once() -> None:
    # In bfloat16 256 + 1 = 256: rounding after each addition would lose both ones; one rounding at the end gives 258.
    routing = torch.tensor([[0, 1, 2]])
    given = [Routed(rows(0.0, dtype=torch.bfloat16), routing)] + [
        Routed(rows(dtype=torch.bfloat16), torch.empty(0, 3, dtype=torch.int64)) for _ in range(2)
    ]
    got = dispatch(given, 3)
    y = [rows(value, dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0)]
    assert torch.equal(combine(given, got, y)[0], rows(258.0, dtype=torch.bfloat16))
    # In float32 (2^24 + 1) - 2^24 = 0, but (2^24 - 2^24) + 1 = 1: the order of ranks shows.
    big = float(1 << 24)
    assert torch.equal(combine(given, got, [rows(big), rows(1.0), rows(-big)])[0], rows(0.0))
    assert torch.equal(combine(given, got, [rows(big), rows(-big), rows(1.0)])[0], rows(1.0))


def test_experts_of_one_rank_are_summed_before_the_ranks() -> None:
    # k order is (expert 2 on rank 1, expert 0 on rank 0, expert 3 on rank 1). By rank: 1 + (2^24 - 2^24) = 1;
    # straight in order of k it would be (2^24 + 1) - 2^24 = 0.
    big = float(1 << 24)
    given = [
        Routed(rows(0.0), torch.tensor([[2, 0, 3]])),
        Routed(rows(), torch.empty(0, 3, dtype=torch.int64)),
    ]
    got = dispatch(given, NUM_EXPERTS, layout="expert")
    assert torch.equal(combine(given, got, [rows(1.0), rows(big, -big)])[0], rows(1.0))


def test_product_is_rounded_before_it_is_added() -> None:
    # weight * row = (1 + 2^-12)^2 = 1 + 2^-11 + 2^-24, which float32 rounds to 1 + 2^-11. A fused multiply-add would
    # keep the 2^-24 and show it after the bias takes the rest away.
    value = 1 + 2.0**-12
    given = [Routed(rows(0.0), torch.tensor([[0, 1]]), torch.tensor([[1.0, value]]))]
    got = dispatch(given, 2, layout="expert")
    y = [rows(-(1 + 2.0**-11), value)]
    assert torch.equal(combine(given, got, y)[0], rows(0.0))


def test_a_sum_of_one_row_is_that_row_and_an_empty_sum_is_positive_zero() -> None:
    given = [Routed(rows(1.0, 2.0), torch.tensor([[1], [-1]]))]
    for layout in ("rank", "expert"):
        got = dispatch(given, 2, layout=layout)
        (sums,) = combine(given, got, [rows(-0.0)])
        assert torch.equal(sums.signbit(), torch.tensor([[True] * 8, [False] * 8])), layout
        assert not sums.any()


def test_float64_is_summed_in_float64() -> None:
    big = float(1 << 24)
    routing = torch.tensor([[0, 1]])
    given = [
        Routed(rows(0.0, dtype=torch.float64), routing),
        Routed(rows(dtype=torch.float64), torch.empty(0, 2, dtype=torch.int64)),
    ]
    got = dispatch(given, 2)
    y = [rows(big, dtype=torch.float64), rows(1.0, dtype=torch.float64)]
    assert torch.equal(combine(given, got, y)[0], rows(big + 1, dtype=torch.float64))


def test_weights_come_back(inputs: list[Routed]) -> None:
    got = dispatch(inputs, NUM_EXPERTS)
    back = combine_weights(inputs, got, [there.topk_weights for there in got])
    assert back[0].tolist() == [[0.5, 0.25], [0.75, 1.0], [0.0, 0.0]], "-1 slots carry nothing back"
    assert torch.equal(back[1], inputs[1].topk_weights)
    by_expert = dispatch(inputs, NUM_EXPERTS, layout="expert", expert_alignment=2)
    back = combine_weights(inputs, by_expert, [there.topk_weights for there in by_expert])
    assert back[0].tolist() == [[0.5, 0.25], [0.75, 1.0], [0.0, 0.0]]
    assert torch.equal(back[1], inputs[1].topk_weights)


def test_unknown_layout_is_refused(inputs: list[Routed]) -> None:
    with pytest.raises(ValueError, match="'rank' or 'expert'"):
        dispatch(inputs, NUM_EXPERTS, layout="row")


def test_reference_imports_nothing_of_ours() -> None:
    code = (
        "import sys, torch, types; package = types.ModuleType('epee'); package.__path__ = [sys.argv[1]];"
        "sys.modules['epee'] = package; import epee.reference;"
        "print(sorted(name for name in sys.modules if name.startswith('epee.')))"
    )
    import epee

    done = subprocess.run(
        [sys.executable, "-c", code, epee.__path__[0]], capture_output=True, text=True, check=True, timeout=50
    )
    assert done.stdout.strip() == "['epee.reference', 'epee.reference.exchange', 'epee.reference.two_level']"
