"""Lists of unlike sizes, and PREMUL_SUM, on the device, with the kernels' own sources on the CPU."""

from __future__ import annotations

import pytest

from tests.collectives import unlike_cases as cases
from tests.csrc.emulated import has_compiler
from tests.harness import run_mortal, run_ranks

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.timeout(240),  # the first case for a number of ranks builds the kernels
    pytest.mark.skipif(not has_compiler(), reason="no g++ here to build the kernels with"),
]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_lists_of_unlike_sizes_are_gathered_and_reduced(num_ranks: int) -> None:
    run_ranks(cases.unlike_emulated, num_ranks, backend="epee", timeout_s=200)


def test_premul_sum_has_the_bits_of_cpu_tensors() -> None:
    run_ranks(cases.products_emulated, 2, backend="epee", timeout_s=200)


def test_a_rank_alone() -> None:
    run_ranks(cases.alone, 1, backend="epee", timeout_s=200)


def test_tensors_in_pools_give_the_same() -> None:
    run_ranks(cases.pooled, 3, backend="epee", timeout_s=200)


def test_survivors_go_on_with_unlike_sizes_and_factors_of_their_own() -> None:
    run_mortal(cases.masked, 3, 1, dead={1}, timeout_s=200)


def test_both_go_through_cpu_memory_where_no_kernel_serves_the_group() -> None:
    run_ranks(cases.staged, 2, backend="epee", timeout_s=100)
