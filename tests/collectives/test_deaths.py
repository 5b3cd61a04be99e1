"""Deaths and replacements, with the kernels' own sources on the CPU."""

from __future__ import annotations

import pytest

from tests.collectives.deaths import COLLECTIVES
from tests.csrc.emulated import has_compiler
from tests.csrc.latency_deaths import run_deaths

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.timeout(240),  # the first case for a number of ranks builds the kernels
    pytest.mark.skipif(not has_compiler(), reason="no g++ here to build the kernels with"),
]


def test_a_rank_dies_and_is_replaced_again_and_again() -> None:
    found = run_deaths("emulated", 8, seed=3, num_spares=1, timeout_s=220, play=COLLECTIVES)
    assert sum(map(len, [*found.in_flight.values(), *found.later.values()])) == 2 * 8
