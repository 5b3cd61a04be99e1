"""The oracle of combines over several hosts against cases small enough to work out by hand."""

from __future__ import annotations

import pytest
import torch

from epee.reference import latency, latency_hosts
from epee.reference.latency import Sent

BF16 = torch.bfloat16
NUM_RANKS, HIDDEN = 3, 8


def combined(values: list[float], hosts: list[int], dtype: torch.dtype = BF16, got: object = None) -> float:
    """Return the sum of one token of rank 0 with an expert on each rank, whose outputs are `values`."""
    idx = torch.tensor([[0, 1, 2]])
    none = torch.empty(0, 3, dtype=torch.int64)
    row = torch.ones(1, HIDDEN, dtype=BF16)
    given = [Sent(row, idx), *(Sent(row[:0], none) for _ in range(NUM_RANKS - 1))]
    packed = latency.dispatch(given, NUM_RANKS, 1)
    y = [torch.full((1, NUM_RANKS, HIDDEN), value, dtype=BF16) for value in values]
    return float(latency_hosts.combine(given, packed, y, hosts, partial_dtype=dtype, got=got)[0][0, 0])  # type: ignore


def test_the_sum_of_a_host_is_rounded_before_it_travels() -> None:
    # bfloat16 has 8 bits: 256 + 1 is 256 (to even), 1 + 1 is 2, and 256 + 2 is 258
    assert combined([256.0, 1.0, 1.0], [0, 0, 1]) == 256.0
    assert combined([256.0, 1.0, 1.0], [0, 1, 1]) == 258.0
    assert combined([256.0, 2.0, 1.0], [0, 0, 1]) == 260.0  # 258, and 259 lies between 258 and 260
    assert combined([256.0, 2.0, 1.0], [0, 1, 0]) == 258.0  # the ranks of a host are added first, to 256
    assert combined([256.0, 1.0, 1.0], [0, 0, 1], torch.float32) == 258.0


def test_who_did_not_come_is_left_out() -> None:
    got = [[True, False, True], [True] * 3, [True] * 3]
    assert combined([256.0, 1.0, 4.0], [0, 1, 1], got=got) == 260.0


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_on_one_host_it_is_the_ordinary_combine(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    given = [
        Sent(torch.randn(5, HIDDEN).to(BF16), torch.randint(-1, 6, (5, 4)), torch.rand(5, 4)) for _ in range(NUM_RANKS)
    ]
    packed = latency.dispatch(given, 6, 5)
    y = [torch.randn(2, 5 * NUM_RANKS, HIDDEN).to(BF16) for _ in range(NUM_RANKS)]
    want = latency.combine(given, packed, y, partial_dtype=dtype)
    found = latency_hosts.combine(given, packed, y, [0] * NUM_RANKS, partial_dtype=dtype)
    for mine, theirs in zip(found, want, strict=True):
        assert torch.equal(mine.view(torch.int16), theirs.view(torch.int16))


def test_a_token_without_rows_is_zero() -> None:
    given = [Sent(torch.ones(2, HIDDEN, dtype=BF16), torch.full((2, 1), -1)) for _ in range(NUM_RANKS)]
    packed = latency.dispatch(given, NUM_RANKS, 2)
    y = [torch.ones(1, 2 * NUM_RANKS, HIDDEN, dtype=BF16) for _ in range(NUM_RANKS)]
    for result in latency_hosts.combine(given, packed, y, [0, 1, 1]):
        assert not result.view(torch.int16).any()
