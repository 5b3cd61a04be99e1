"""The low-latency oracle against cases small enough to work out by hand.

Two ranks, four experts: 0 and 1 live on rank 0, 2 and 3 on rank 1.
"""

from __future__ import annotations

import math

import pytest
import torch

from epee.reference import latency
from epee.reference.latency import Sent

NUM_EXPERTS = 4
NUM_LOCAL = 2
MAX_TOKENS = 4
BF16 = torch.bfloat16


def rows(*values: float, hidden: int = 128) -> torch.Tensor:
    """A tensor whose row i holds `values[i]` everywhere."""
    return torch.tensor(values, dtype=BF16)[:, None].expand(-1, hidden).contiguous()


@pytest.fixture
def inputs() -> list[Sent]:
    """Rank 0 has three tokens (the last routed nowhere), rank 1 has two (the last twice to expert 3)."""
    return [
        Sent(
            rows(10.0, 11.0, 12.0),
            torch.tensor([[0, 2], [3, 1], [-1, -1]]),
            torch.tensor([[0.5, 0.25], [0.75, 1.0], [9.0, 9.0]]),
        ),
        Sent(rows(20.0, 21.0), torch.tensor([[1, 0], [3, 3]]), torch.tensor([[2.0, 4.0], [8.0, 16.0]])),
    ]


def values(packed: latency.Packed, expert: int) -> list[float]:
    assert isinstance(packed.x, torch.Tensor)
    return [float(row[0]) for row in packed.x[expert, : packed.num_tokens_per_expert[expert]]]


def test_rows_are_packed_per_expert_by_source_and_token(inputs: list[Sent]) -> None:
    first, second = latency.dispatch(inputs, NUM_EXPERTS, MAX_TOKENS)
    assert isinstance(first.x, torch.Tensor)
    assert first.x.shape == (NUM_LOCAL, 2 * MAX_TOKENS, 128)
    assert [values(first, 0), values(first, 1)] == [[10.0, 20.0], [11.0, 20.0]]
    assert [values(second, 0), values(second, 1)] == [[10.0], [11.0, 21.0]]
    assert first.src_rank[1].tolist() == [0, 1] + [-1] * 6
    assert first.src_token[1].tolist() == [1, 0] + [-1] * 6


def test_an_expert_that_stands_twice_gets_the_token_once(inputs: list[Sent]) -> None:
    _, second = latency.dispatch(inputs, NUM_EXPERTS, MAX_TOKENS)
    assert second.num_tokens_per_expert.tolist() == [1, 2]
    assert second.num_tokens_per_expert.dtype == torch.int32


def test_the_ranges_say_where_each_source_lies(inputs: list[Sent]) -> None:
    first, second = latency.dispatch(inputs, NUM_EXPERTS, MAX_TOKENS)
    assert first.layout_range.tolist() == [[1, 1 << 32 | 1], [1, 1 << 32 | 1]]
    assert second.layout_range.tolist() == [[1, 1 << 32], [1, 1 << 32 | 1]]


def test_a_missing_source_is_missing_as_a_whole(inputs: list[Sent]) -> None:
    first, second = latency.dispatch(inputs, NUM_EXPERTS, MAX_TOKENS, got=[[True, True], [False, True]])
    assert [values(first, 0), values(first, 1)] == [[10.0, 20.0], [11.0, 20.0]]
    assert [values(second, 0), values(second, 1)] == [[], [21.0]]
    assert second.layout_range.tolist() == [[0, 0], [0, 1]]
    assert second.got.tolist() == [False, True]


def test_combine_weighs_and_sums_per_rank_then_over_the_ranks(inputs: list[Sent]) -> None:
    packed = latency.dispatch(inputs, NUM_EXPERTS, MAX_TOKENS)
    y = [there.x for there in packed]
    first, second = latency.combine(inputs, packed, y)
    assert first[:, 0].tolist() == [7.5, 19.25, 0.0]
    assert second[:, 0].tolist() == [120.0, 504.0]  # 21 * (8 + 16): the repeated expert counts twice
    assert first.dtype == BF16


def test_weights_given_to_combine_replace_those_of_dispatch(inputs: list[Sent]) -> None:
    packed = latency.dispatch(inputs, NUM_EXPERTS, MAX_TOKENS)
    ones = [torch.ones(3, 2), torch.ones(2, 2)]
    first, second = latency.combine(inputs, packed, [there.x for there in packed], topk_weights=ones)
    assert first[:, 0].tolist() == [20.0, 22.0, 0.0]
    assert second[:, 0].tolist() == [40.0, 42.0]


def test_a_dispatch_without_weights_has_ones(inputs: list[Sent]) -> None:
    bare = [Sent(given.x, given.topk_idx) for given in inputs]
    packed = latency.dispatch(bare, NUM_EXPERTS, MAX_TOKENS)
    assert latency.combine(bare, packed, [there.x for there in packed])[0][:, 0].tolist() == [20.0, 22.0, 0.0]


def test_lost_weight_is_not_given_to_the_others(inputs: list[Sent]) -> None:
    packed = latency.dispatch(inputs, NUM_EXPERTS, MAX_TOKENS)
    got = [[True, False], [True, True]]
    y = [there.x for there in packed]
    first, second = latency.combine(inputs, packed, y, got=got)
    assert first[:, 0].tolist() == [5.0, 11.0, 0.0]
    assert second[:, 0].tolist() == [120.0, 504.0]
    counts = latency.counted(packed, 0, got)
    assert counts == [True, False]
    assert latency.lost_weight(inputs[0], NUM_LOCAL, counts).tolist() == [0.25, 0.75, 0.0]


def test_a_rank_that_had_no_tokens_of_a_source_does_not_count_for_it(inputs: list[Sent]) -> None:
    packed = latency.dispatch(inputs, NUM_EXPERTS, MAX_TOKENS, got=[[True, True], [False, True]])
    assert latency.counted(packed, 0) == [True, False]
    first, _ = latency.combine(inputs, packed, [there.x for there in packed])
    assert first[:, 0].tolist() == [5.0, 11.0, 0.0]


def test_a_token_that_lost_everything_is_zero(inputs: list[Sent]) -> None:
    packed = latency.dispatch(inputs, NUM_EXPERTS, MAX_TOKENS)
    nothing = [[False, False], [False, False]]
    first, second = latency.combine(
        inputs, packed, [torch.full_like(there.x, math.nan) for there in packed], got=nothing
    )
    assert not first.view(torch.int16).any()
    assert not second.view(torch.int16).any()


def one_token(weights: list[float], outputs: list[float], partial_dtype: torch.dtype) -> float:
    """One token to experts 0, 1 and 2, whose outputs are given."""
    inputs = [
        Sent(rows(1.0), torch.tensor([[0, 1, 2]]), torch.tensor([weights])),
        Sent(rows(), torch.empty(0, 3).long()),
    ]
    packed = latency.dispatch(inputs, NUM_EXPERTS, MAX_TOKENS)
    y = [torch.zeros(NUM_LOCAL, 2 * MAX_TOKENS, 128, dtype=BF16) for _ in range(2)]
    y[0][0], y[0][1], y[1][0] = outputs[0], outputs[1], outputs[2]
    return float(latency.combine(inputs, packed, y, partial_dtype=partial_dtype)[0][0, 0])


def test_each_rank_rounds_its_partial_once() -> None:
    # 256 + 1 rounds to 256 in bfloat16 (ties to even); with 0.5 of the other rank kept in float32 it would be 258
    assert one_token([1.0, 1.0, 1.0], [256.0, 1.0, 0.5], BF16) == 256.0
    assert one_token([1.0, 1.0, 1.0], [256.0, 1.0, 0.5], torch.float32) == 258.0


def test_a_product_is_rounded_before_it_is_added() -> None:
    # (1 + 2^-23) * (1 + 2^-7) = 1 + 2^-7 + 2^-23 + 2^-30: the last term is gone before -(1 + 2^-7) is added
    weight = 1 + 2.0**-23
    assert one_token([1.0, weight, 0.0], [-(1 + 2.0**-7), 1 + 2.0**-7, 0.0], torch.float32) == 2.0**-23


def test_minus_zero_survives_a_sum_of_one_row() -> None:
    inputs = [Sent(rows(1.0), torch.tensor([[0]])), Sent(rows(), torch.empty(0, 1).long())]
    packed = latency.dispatch(inputs, NUM_EXPERTS, MAX_TOKENS)
    y = [torch.full((NUM_LOCAL, 2 * MAX_TOKENS, 128), -0.0, dtype=BF16) for _ in range(2)]
    assert math.copysign(1, float(latency.combine(inputs, packed, y)[0][0, 0])) == -1


def test_fp8_scales_are_the_largest_value_over_448() -> None:
    x = torch.zeros(1, 256, dtype=BF16)
    x[0, 3], x[0, 5], x[0, 200] = -896.0, 448.0, 3.0
    eights, scales = latency.quantise(x)
    assert eights.dtype == torch.float8_e4m3fn
    assert scales.tolist() == [[2.0, (torch.tensor(3.0) / 448).item()]]
    assert [float(eights[0, index]) for index in (3, 5, 0, 200)] == [-448.0, 224.0, 0.0, 448.0]


def test_small_blocks_have_a_floor() -> None:
    eights, scales = latency.quantise(torch.full((1, 128), 1e-6, dtype=BF16))
    assert scales.item() == (torch.tensor(1e-4) / 448).item()
    assert 4.0 < float(eights[0, 0]) < 5.0


@pytest.mark.parametrize(("largest", "scale"), [(448.0, 1.0), (450.0, 2.0), (896.0, 2.0), (1.0, 2.0**-8)])
def test_round_scale_is_the_next_power_of_two(largest: float, scale: float) -> None:
    x = torch.full((1, 128), largest, dtype=BF16)
    eights, scales = latency.quantise(x, round_scale=True)
    assert scales.item() == scale
    assert float(eights[0, 0]) == float((torch.tensor(float(x[0, 0])) / scale).to(torch.float8_e4m3fn))


def test_ue8m0_packs_four_exponents_the_first_lowest() -> None:
    packed = latency.pack_ue8m0(torch.tensor([[1.0, 2.0, 4.0, 0.5]]))
    assert packed.tolist() == [[127 | 128 << 8 | 129 << 16 | 126 << 24]]


def test_not_finite_values_become_nan_and_leave_others_alone() -> None:
    x = torch.ones(2, 128, dtype=BF16)
    x[0, 7], x[1, 9] = math.nan, math.inf
    eights, scales = latency.quantise(x)
    wide = eights.to(torch.float32)
    assert scales[0].item() == (torch.tensor(1.0) / 448).item()
    assert wide[0].isnan().nonzero().flatten().tolist() == [7]
    assert wide[1].isnan().nonzero().flatten().tolist() == [9]


@pytest.mark.parametrize("use_ue8m0", [False, True])
def test_scales_lie_column_by_column(inputs: list[Sent], use_ue8m0: bool) -> None:
    wide = [Sent(given.x.repeat(1, 4), given.topk_idx, given.topk_weights) for given in inputs]
    first, _ = latency.dispatch(wide, NUM_EXPERTS, MAX_TOKENS, use_fp8=True, round_scale=use_ue8m0, use_ue8m0=use_ue8m0)
    assert isinstance(first.x, tuple)
    eights, scales = first.x
    assert eights.is_contiguous()
    columns = 1 if use_ue8m0 else 4
    assert scales.shape == (NUM_LOCAL, 2 * MAX_TOKENS, columns)
    assert scales.stride() == (columns * 2 * MAX_TOKENS, 1, 2 * MAX_TOKENS)
    want = latency.quantise(wide[1].x[:1], round_scale=use_ue8m0)
    assert torch.equal(eights[0, 1].view(torch.uint8), want[0][0].view(torch.uint8))
    assert torch.equal(scales[0, 1], latency.pack_ue8m0(want[1])[0] if use_ue8m0 else want[1][0])
