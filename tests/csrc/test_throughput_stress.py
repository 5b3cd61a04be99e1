"""Rounds at random with the kernels on the CPU, some of their warps standing still at random places."""

from __future__ import annotations

import pytest

from tests.csrc.emulated import has_compiler
from tests.csrc.throughput_stress import STALL_ONE_IN, stress
from tests.harness import run_ranks

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.timeout(240),  # the first one builds the kernels
    pytest.mark.skipif(not has_compiler(), reason="no g++ here to build the kernels with"),
]


@pytest.mark.parametrize(("num_ranks", "num_rounds"), [(1, 20), (2, 60), (4, 20)])
def test_random_rounds_have_the_reference_bits(num_ranks: int, num_rounds: int) -> None:
    run_ranks(stress, num_ranks, "emulated", num_rounds, 1, 0, timeout_s=200)


def test_random_rounds_survive_warps_that_stand_still() -> None:
    run_ranks(stress, 2, "emulated", 30, 2, STALL_ONE_IN, timeout_s=200)
