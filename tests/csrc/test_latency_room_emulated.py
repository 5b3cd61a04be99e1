"""One memory for calls of several sizes on the emulated GPU: the cases of the CPU, kernels built by g++."""

from __future__ import annotations

import pytest

from tests.csrc.emulated import has_compiler
from tests.csrc.test_latency_buffer_emulated import emulated
from tests.ep import test_latency_room as cpu_tests
from tests.harness import DEAD, run_ranks

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.timeout(240),  # the first case for a number of ranks builds the kernels
    pytest.mark.skipif(not has_compiler(), reason="no g++ here to build the kernels with"),
]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_calls_of_all_sizes_share_one_memory(num_ranks: int) -> None:
    run_ranks(emulated, num_ranks, cpu_tests._sizes, timeout_s=200)


def test_what_does_not_fit_or_differs_is_refused() -> None:
    run_ranks(emulated, 2, cpu_tests._refused, timeout_s=200)


def test_who_dies_before_the_first_call_is_masked() -> None:
    alive = ([True, False, True, True], [1, 0, 1, 1])
    assert run_ranks(emulated, 4, cpu_tests._dead_before_all, dead={1}, timeout_s=200) == [alive, DEAD, alive, alive]
