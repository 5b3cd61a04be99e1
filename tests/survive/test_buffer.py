"""A Buffer goes on when ranks die, whatever its group: every point of a call, every victim, both modes."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import epee
from epee.errors import RankFailedError
from epee.view.report import look_at_job
from tests.ep.moments import Known
from tests.harness import DEAD, run_mortal

from ..harness import run_ranks
from .buffer_rounds import POINTS, die, make_buffer, make_step, run, start

NUM_STEPS = 8


def survive(mode: str, victims: dict[int, tuple[int, str]], num_ranks: int = 4, **options: Any) -> list[Any]:
    """Run a program with deaths; compare what the survivors say; return it."""
    layout, is_fp8 = options.get("layout", "rank"), options.get("is_fp8", False)
    num_steps, backend = options.get("num_steps", NUM_STEPS), options.get("backend", "epee")
    results = run_mortal(run, num_ranks, mode, victims, layout, is_fp8, num_steps, backend, dead=set(victims))
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


@pytest.mark.parametrize(
    ("mode", "point"),
    [
        ("raise", "dispatch: first row"),
        ("raise", "dispatch: data"),
        ("raise", "combine: rows"),
        ("mask", "dispatch: rows"),
        ("mask", "dispatch: first data"),
        ("mask", "combine: first row"),
    ],
)
def test_a_death_at_points_of_a_step_on_a_group_of_another_backend(point: str, mode: str) -> None:
    turn = POINTS.index(point)
    survive(mode, {(0, 2, 3)[turn % 3]: (3, point)}, layout=("rank", "expert")[turn % 2], backend="gloo")


@pytest.mark.parametrize("mode", ["raise", "mask"])
def test_two_deaths_in_one_step(mode: str) -> None:
    survive(mode, {1: (2, "dispatch: first data"), 3: (2, "dispatch: first row")}, layout="expert")


@pytest.mark.parametrize(("mode", "backend"), [("raise", "epee"), ("mask", "epee"), ("mask", "gloo")])
def test_four_ranks_become_one(mode: str, backend: str) -> None:
    victims = {0: (1, "dispatch: rows"), 3: (3, "combine: first row"), 1: (5, "between")}
    (last,) = survive(mode, victims, num_steps=NUM_STEPS, backend=backend)
    assert last[0][-1][2] == (0, 0, 1, 0)


def lose_while_telling(rank: int, num_ranks: int, folder: str) -> list[tuple[int, ...]]:
    """Rank 2 dies while rank 0 is about to tell of rank 1; return of whom rank 0's calls tell."""
    group, begun = start(rank, num_ranks, folder, "raise"), Path(f"{folder}/begun")
    deadline = time.monotonic() + 20
    with make_buffer(group) as buffer:
        if rank == 1:
            die()
        if rank == 2:
            while not begun.exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            die()
        survivor: Any = buffer._exchange.membership
        known = Known(buffer)
        tell = survivor._failure

        def tell_late(*args: Any) -> Any:
            begun.write_text("")
            while len(known.ranks) > 1 and time.monotonic() < deadline:
                time.sleep(0.01)
            return tell(*args)

        survivor._failure = tell_late
        while len(known.ranks) == num_ranks and time.monotonic() < deadline:
            time.sleep(0.01)
        told = []
        for _ in range(2):
            try:
                make_step(buffer, 0, "rank")
            except RankFailedError as error:
                told.append(error.ranks)
        return told


def test_a_loss_is_told_once_however_late_it_comes() -> None:
    (told,) = (result for result in run_mortal(lose_while_telling, 3, dead={1, 2}) if result != DEAD)
    assert told == [(1, 2)]


def late(rank: int, num_ranks: int, folder: str, backend: str) -> str:
    """Rank 1 looks from outside at what rank 0 does before it calls itself."""
    store = dist.FileStore(f"{folder}/store", num_ranks)
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks)
    buffer = epee.Buffer(dist.group.WORLD, num_experts=4, hidden=64, num_topk=1, max_tokens_per_rank=4, timeout=60)
    told = ""
    deadline = time.monotonic() + 40
    while rank == 1 and "dispatch" not in told:
        assert time.monotonic() < deadline, told
        told = str(look_at_job(os.getpid(), look_s=0.0))
    buffer.dispatch(torch.ones(2, 64, dtype=torch.bfloat16), torch.tensor([[0], [3]]))
    if rank == 1:
        assert "dispatch" not in str(look_at_job(os.getpid(), look_s=0.0))
    dist.barrier()
    buffer.close()
    dist.destroy_process_group()
    return told


@pytest.mark.parametrize("backend", ["epee", "gloo"])
def test_a_hang_report_shows_for_whom_a_buffer_waits(backend: str, tmp_path: Path) -> None:
    told = run_ranks(late, 2, str(tmp_path), backend, backend=None)[1]
    assert re.search(r"rank 0 .*\n  Buffer 1 of group \w+: dispatch seq 1 epoch 1, waits for 1 since", told), told
