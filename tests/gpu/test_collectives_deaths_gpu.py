"""Many deaths in one run of a group's collectives on real GPUs, which ranks may share; `EPEE_TEST_KILLS` says how many.

Two ranks live through all of it, a third one is killed at a random moment of a random call, and replaced. Run with `-s`
to see how long the survivors' calls took to end; nothing here asserts a time.
"""

from __future__ import annotations

import os

import pytest

from tests.collectives.deaths import COLLECTIVES, MASKED
from tests.csrc.latency_deaths import Play, run_deaths

pytestmark = [pytest.mark.gpu(1), pytest.mark.timeout(580)]

NUM_KILLS = int(os.environ.get("EPEE_TEST_KILLS", "20"))


@pytest.mark.parametrize("play", [COLLECTIVES, MASKED], ids=["raise", "mask"])
def test_a_rank_dies_and_is_replaced_again_and_again(play: Play) -> None:
    found = run_deaths("cuda", NUM_KILLS, seed=7, num_spares=6, timeout_s=560, play=play)
    print(f"\n{NUM_KILLS} kills: {found}")
    assert sum(map(len, [*found.in_flight.values(), *found.later.values()])) == 2 * NUM_KILLS
