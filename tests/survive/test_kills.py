"""SIGKILL of a rank in the middle of a collective: all survivors end the call alike, and the next one works."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.harness import Pool

from . import kill_points
from .campaign import play
from .histories import CLASS_U, Entry
from .rounds import NUM_CALLS, KillRound

OPS = CLASS_U
Run = Callable[..., list[list[Entry]]]


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool() as workers:
        yield workers


@pytest.fixture
def run_and_check(pool: Pool) -> Run:
    """Return a function that runs the calls with these victims, checks what the survivors saw and returns it."""

    def run(
        op: str, victims: dict[int, tuple[str, int]], num_ranks: int = 4, mode: str = "raise", length: int = 1
    ) -> list[list[Entry]]:
        return play(pool, KillRound(op, victims, num_ranks, mode, length))[0]

    return run


CASES = [
    (op, point, 0 if point == "mid_send" else (OPS.index(op) + kill_points.POINTS.index(point)) % 4)
    for op in OPS
    for point in kill_points.POINTS
    if (op, point) != ("barrier", "mid_send")  # a barrier puts nothing
]


@pytest.mark.parametrize(("op", "point", "victim"), CASES)
def test_survivors_agree_and_go_on(run_and_check: Run, op: str, point: str, victim: int) -> None:
    histories = run_and_check(op, {victim: (point, 3)})
    failed = [entry for entry in histories[0] if entry.status != "ok"]
    assert len(failed) == 1, failed
    assert failed[0].seq in (3, 4)
    assert failed[0].ranks == (victim,)


@pytest.mark.parametrize("op", OPS)
def test_in_mask_mode_the_call_succeeds_without_the_dead(run_and_check: Run, op: str) -> None:
    histories = run_and_check(op, {2: ("before_send", 3)}, mode="mask")
    assert [entry.status for entry in histories[0]] == ["ok"] * (NUM_CALLS + 2)
    assert [entry.contributors for entry in histories[0]][1:4] == [(0, 1, 2, 3), (0, 1, 3), (0, 1, 3)]


@pytest.mark.parametrize("mode", ["raise", "mask"])
@pytest.mark.parametrize("point", ["after_payload", "after_tag", "mid_copyout"])
def test_a_call_of_many_rounds(run_and_check: Run, point: str, mode: str) -> None:
    length = (1 << 20) // 8  # 1 MiB: more than the staging holds
    histories = run_and_check("all_reduce", {1: (point, 3)}, num_ranks=3, mode=mode, length=length)
    assert {entry.status for entry in histories[0]} == ({"ok"} if mode == "mask" else {"ok", "RankFailedError"})


@pytest.mark.parametrize("mode", ["raise", "mask"])
def test_two_die_in_the_same_call(run_and_check: Run, mode: str) -> None:
    run_and_check("all_reduce", {0: ("after_tag", 3), 2: ("before_send", 3)}, num_ranks=5, mode=mode)


def test_eight_ranks_become_one(run_and_check: Run) -> None:
    victims = {rank: (kill_points.POINTS[rank % 7], 2 + i) for i, rank in enumerate((0, 7, 3, 1, 6, 2, 4))}
    histories = run_and_check("all_reduce", victims, num_ranks=8, mode="mask")
    assert len(histories) == 1
    assert histories[0][-1].contributors == (5,)
