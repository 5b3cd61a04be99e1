"""Deaths and replacements, with the kernels' own sources on the CPU."""

from __future__ import annotations

import os

import pytest

from tests.collectives.deaths import COLLECTIVES, MASKED, POOLED
from tests.csrc.emulated import has_compiler
from tests.csrc.latency_deaths import Play, run_deaths

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.timeout(240),  # the first case for a number of ranks builds the kernels
    pytest.mark.skipif(not has_compiler(), reason="no g++ here to build the kernels with"),
]
NUM_KILLS = int(os.environ.get("EPEE_TEST_KILLS", "8"))


@pytest.mark.parametrize("play", [COLLECTIVES, MASKED, POOLED], ids=["raise", "mask", "pool"])
def test_a_rank_dies_and_is_replaced_again_and_again(play: Play) -> None:
    found = run_deaths("emulated", NUM_KILLS, seed=3, num_spares=1, timeout_s=220, play=play)
    assert sum(map(len, [*found.in_flight.values(), *found.later.values()])) == 2 * NUM_KILLS
