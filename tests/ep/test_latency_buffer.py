"""`LatencyBuffer` on CPU tensors gives what the oracle gives, bit for bit."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.ep.latency_cases import BF16, PLAIN, Shape, check_round, make
from tests.harness import run_ranks


def _combinations(rank: int, num_ranks: int) -> None:
    shape = Shape()
    seeds = itertools.count()
    with make(shape) as buffer:
        for payload, use_hook, zero_copy, is_async in itertools.product(PLAIN, *[(False, True)] * 3):
            if use_hook and is_async:
                continue
            check_round(
                buffer,
                shape,
                [6, 3, 0, 5][:num_ranks],
                next(seeds),
                payload=payload,
                use_hook=use_hook,
                zero_copy=zero_copy,
                async_op=is_async,
            )


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_every_way_to_call_gives_the_oracles_rows(num_ranks: int) -> None:
    run_ranks(_combinations, num_ranks)


def _weights_and_partials(rank: int, num_ranks: int) -> None:
    shape = Shape()
    seeds = itertools.count(100)
    with make(shape) as buffer:
        for late, partial, use_hook in itertools.product((False, True), (BF16, torch.float32), (False, True)):
            check_round(
                buffer,
                shape,
                [4, 6, 1, 0],
                next(seeds),
                late_weights=late,
                partial_dtype=partial,
                use_hook=use_hook,
                routing="everywhere",
            )


def test_weights_of_either_call_and_partials_of_either_type() -> None:
    run_ranks(_weights_and_partials, 4)


def _shape(rank: int, num_ranks: int, hidden: int, num_topk: int, num_experts: int) -> None:
    shape = Shape(num_experts, hidden, num_topk, 3)
    with make(shape) as buffer:
        check_round(buffer, shape, [3, 1], 1, payload="fp8")
        check_round(buffer, shape, [0, 2], 2, payload="bfloat16", routing="one expert")


SHAPES = [
    (2048, 1, 8),
    (2048, 11, 288),
    (4096, 6, 64),
    (4096, 8, 8),
    (7168, 8, 288),
    (7168, 11, 64),
    (8192, 6, 288),
    (8192, 1, 64),
    (128, 32, 2),
]


@pytest.mark.parametrize(("hidden", "num_topk", "num_experts"), SHAPES)
def test_shapes(hidden: int, num_topk: int, num_experts: int) -> None:
    run_ranks(_shape, 2, hidden, num_topk, num_experts)


def _shrinking(rank: int, num_ranks: int) -> None:
    shape = Shape(max_tokens=16)
    with make(shape) as buffer:
        for seed, count in enumerate([16, 1, 0, 16, 3, 2, 1, 0, 0, 16]):
            counts = [count if src != seed % num_ranks else count // 2 for src in range(num_ranks)]
            check_round(buffer, shape, counts, seed, payload=PLAIN[seed % 4], use_hook=seed % 3 == 0)
        for seed, routing in enumerate(("one expert", "nowhere", "everywhere", "nowhere", "random")):
            check_round(buffer, shape, [16, 15, 14, 1], 50 + seed, routing=routing)


def test_a_small_step_after_a_large_one_shows_nothing_of_it() -> None:
    run_ranks(_shrinking, 4)
