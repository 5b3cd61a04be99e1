"""The kernels of mode "mask" on the CPU: without losses as the others, with losses alike on all survivors."""

from __future__ import annotations

import os

import pytest

from tests.csrc.collective_cases import OPS, Call, random_calls, run_calls
from tests.csrc.collective_mask import mortal, no_bytes, root_dies
from tests.csrc.emulated import has_compiler
from tests.harness import run_ranks

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.timeout(240),  # the first case for a number of ranks builds the kernels
    pytest.mark.skipif(not has_compiler(), reason="no g++ here to build the kernels with"),
]
FIRST = int(os.environ.get("EPEE_TEST_FIRST_SEED", "0"))  # for long runs by hand
NUM = int(os.environ.get("EPEE_TEST_KILLS", "10"))


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_without_losses_results_have_the_bits_of_torch(num_ranks: int) -> None:
    counts = (0, 1, 7, 769, 1025, 4096, 4099)
    calls = [Call(op, count, root=num_ranks - 1, seed=count) for op in OPS for count in counts]
    run_ranks(run_calls, num_ranks, calls, 0, True, timeout_s=200)


def test_random_calls_survive_warps_that_stand_still() -> None:
    run_ranks(run_calls, 3, random_calls(5, 40, 3), 24, True, timeout_s=200)


def test_calls_of_no_bytes_are_barriers() -> None:
    run_ranks(no_bytes, 3, timeout_s=100)


@pytest.mark.parametrize("seed", range(FIRST, FIRST + NUM))
def test_all_survivors_have_the_same_ranks_and_bits(seed: int) -> None:
    num_ranks = 3 + seed % 2
    victims = (num_ranks - 1,) if seed % 3 else (1, 2)
    found = run_ranks(
        mortal, num_ranks, seed, victims, 24 if seed % 5 == 0 else 0, timeout_s=100, backend="epee", dead=victims
    )
    first, *others = (there for rank, there in enumerate(found) if rank not in victims)
    assert all(there == first for there in others), found


@pytest.mark.parametrize("seed", range(FIRST, FIRST + NUM))
def test_all_survivors_of_large_calls_have_the_same_ranks_and_bits(seed: int) -> None:
    num_ranks = 2 + seed % 3
    victims = {2: (1,), 3: (1, 2) if seed % 2 else (2,), 4: (1, 3)}[num_ranks]
    found = run_ranks(
        mortal, num_ranks, seed, victims, 24 if seed % 5 == 0 else 0, True, timeout_s=100, backend="epee", dead=victims
    )
    first, *others = (there for rank, there in enumerate(found) if rank not in victims)
    assert all(there == first for there in others), found


@pytest.mark.parametrize("op", ["broadcast", "scatter", "reduce", "gather"])
def test_a_lost_root_is_an_error_on_all_survivors(op: str) -> None:
    found = run_ranks(root_dies, 3, op, 11, timeout_s=100, backend="epee", dead=(1,))
    assert len(found[0]) == len(found[2]), found
    # who comes late may hear first that its peer has lost the call; its host then looks for the death behind it
    ends = {found[0][-1], found[2][-1]}
    assert "failed without (1,)" in ends
    assert all(end == "failed without (1,)" or "has lost this call" in end for end in ends), found
