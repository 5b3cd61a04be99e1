"""The collective kernels' own sources on the CPU: the same bits as plain torch, from real rank processes."""

from __future__ import annotations

import pytest
import torch

from tests.csrc.collective_cases import ALL, OPS, Call, random_calls, run_calls
from tests.csrc.emulated import has_compiler
from tests.harness import run_ranks

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.timeout(240),  # the first case for a number of ranks builds the kernels
    pytest.mark.skipif(not has_compiler(), reason="no g++ here to build the kernels with"),
]
# Elements of bfloat16: nothing, one, odd, a tile and one more; borders of packets, two shots and chunks; many chunks.
COUNTS = (0, 1, 7, 769, 1024, 1025, 4096, 4099, 20003)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_every_size_has_the_bits_of_torch(op: str, num_ranks: int) -> None:
    calls = [Call(op, count, root=num_ranks - 1, seed=count) for count in COUNTS]
    run_ranks(run_calls, num_ranks, calls, timeout_s=200)


@pytest.mark.parametrize("pushers", [0, 0b1010, 0b0101])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_each_rank_may_send_in_bulk_or_by_stores_of_threads(num_ranks: int, pushers: int) -> None:
    calls = [
        Call(op, count, root=(count + i) % num_ranks, shift=shift, seed=count + i, is_in_place=count == 4096)
        for i, op in enumerate(OPS)
        for count, shift in ((4096, 0), (4099, 8), (4099, 1), (20003, 0))
    ]
    run_ranks(run_calls, num_ranks, calls, 0, False, pushers, timeout_s=200)


@pytest.mark.parametrize("in_pool", [ALL, 0b101])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_rows_in_pools_have_the_bits_of_torch(num_ranks: int, in_pool: int) -> None:
    shapes = [{}, {"is_in_place": True}, {"shift": 8}, {"shift": 1}]
    calls = [
        Call(op, count, root=num_ranks - 1, seed=count + i, in_pool=in_pool, **shape)
        for op in OPS
        for count in COUNTS[2:]
        for i, shape in enumerate(shapes if count == 4099 else shapes[:1])
    ]
    run_ranks(run_calls, num_ranks, calls, timeout_s=200)


def test_eight_ranks_have_the_bits_of_torch() -> None:
    calls = [Call(op, count, root=5, seed=count) for op in OPS for count in (1, 1025, 4099)]
    calls += [Call(op, 4099, root=5, seed=9, in_pool=ALL) for op in OPS]
    run_ranks(run_calls, 8, calls, timeout_s=200)


@pytest.mark.parametrize(
    ("dtype", "reduction"),
    [
        (torch.float16, "sum"),
        (torch.float32, "sum"),
        (torch.float64, "sum"),
        (torch.int32, "sum"),
        (torch.int64, "max"),
        (torch.uint8, "min"),
        (torch.uint8, "sum"),
        (torch.int8, "product"),
        (torch.bfloat16, "max"),
        (torch.int32, "xor"),
        (torch.int16, "sum"),
        (torch.int16, "min"),
        (torch.bfloat16, "avg"),
        (torch.float32, "avg"),
        (torch.float64, "avg"),
    ],
)
def test_every_dtype_has_the_bits_of_torch(dtype: torch.dtype, reduction: str) -> None:
    size = dtype.itemsize
    counts = (1, 2048 // size + 1, 6000 // size, 10000 // size + 3)
    calls = [Call("all_reduce", count, dtype, reduction, seed=count) for count in counts]
    calls += [Call("reduce_scatter", count, dtype, reduction, shift=1, seed=count + 1) for count in counts]
    calls += [Call("all_reduce", counts[-1], dtype, reduction, seed=5, in_pool=ALL)]
    run_ranks(run_calls, 2, calls, timeout_s=200)


@pytest.mark.parametrize("pushers", [ALL, 0b010])
def test_random_calls_share_memory_and_survive_warps_that_stand_still(pushers: int) -> None:
    run_ranks(run_calls, 3, random_calls(3, 40, 3), 24, False, pushers, timeout_s=200)


def test_a_rank_alone() -> None:
    run_ranks(run_calls, 1, [Call(op, count, seed=count) for op in OPS for count in (0, 5, 3000, 9001)], timeout_s=200)
