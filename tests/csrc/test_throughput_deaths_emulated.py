"""Deaths in the midst of calls of a throughput buffer, kernels on the CPU: the run of the GPU test, few of them."""

from __future__ import annotations

import pytest

from tests.csrc.emulated import has_compiler
from tests.csrc.latency_deaths import run_deaths
from tests.csrc.throughput_deaths import THROUGHPUT

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.timeout(240),  # the first one builds the kernels
    pytest.mark.skipif(not has_compiler(), reason="no g++ here to build the kernels with"),
]


def test_a_rank_dies_and_is_replaced_again_and_again() -> None:
    num_kills = 6
    found = run_deaths("emulated", num_kills, seed=1, num_spares=1, timeout_s=200, play=THROUGHPUT)
    print(found)
    assert sum(map(len, [*found.in_flight.values(), *found.later.values()])) == 2 * num_kills
