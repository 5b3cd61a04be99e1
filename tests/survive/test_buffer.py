"""A Buffer on a group of the backend "epee" goes on when ranks die: every point of a call, every victim, both modes."""

from __future__ import annotations

from typing import Any

import pytest

from .buffer_rounds import POINTS, run
from .processes import DEAD, run_mortal

NUM_STEPS = 8


def survive(mode: str, victims: dict[int, tuple[int, str]], num_ranks: int = 4, **options: Any) -> list[Any]:
    """Run a program with deaths; compare what the survivors say; return it."""
    layout, is_fp8 = options.get("layout", "rank"), options.get("is_fp8", False)
    results = run_mortal(
        run, num_ranks, mode, victims, layout, is_fp8, options.get("num_steps", NUM_STEPS), dead=set(victims)
    )
    left = [result for result in results if result != DEAD]
    done = left[0][0]
    want = [int(rank not in victims) for rank in range(num_ranks)]
    for other in left:
        assert other[0] == done, "survivors differ in what a step ended with"
        assert other[2] == want
        assert other[3] == left[0][3]
        if mode == "raise":
            assert len(other[1]) <= len(victims)
            assert set(other[1]) <= {"RankFailedError"}
            assert len(other[1]) == 1 or len(victims) > 1
        else:
            assert set(other[1]) <= {"StaleHandleError"}
    assert [step for step, _, _ in done] == list(range(options.get("num_steps", NUM_STEPS)))
    assert list(done[-1][2]) == want
    return left


@pytest.mark.parametrize("mode", ["raise", "mask"])
@pytest.mark.parametrize("point", POINTS)
def test_a_death_at_each_point_of_a_step(point: str, mode: str) -> None:
    """The victim is the first, a middle or the last rank in turn, the layout alternates, and FP8 has its turns."""
    turn = POINTS.index(point) + (mode == "mask")
    survive(mode, {(0, 2, 3)[turn % 3]: (3, point)}, layout=("rank", "expert")[turn % 2], is_fp8=turn % 4 > 1)


@pytest.mark.parametrize("mode", ["raise", "mask"])
def test_two_deaths_in_one_step(mode: str) -> None:
    survive(mode, {1: (2, "dispatch: first data"), 3: (2, "dispatch: first row")}, layout="expert")


@pytest.mark.parametrize("mode", ["raise", "mask"])
def test_four_ranks_become_one(mode: str) -> None:
    victims = {0: (1, "dispatch: rows"), 3: (3, "combine: first row"), 1: (5, "between")}
    (last,) = survive(mode, victims, num_steps=NUM_STEPS)
    assert last[0][-1][2] == (0, 0, 1, 0)
