"""A process that is started with the rank of another one is told so, and does the others no harm."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from epee.engine.bootstrap import attempt
from epee.errors import SlotTakenError
from tests.harness import run_ranks
from tests.survive import stages

RANKS = (0, 1, 1)  # of the three processes


def _begin(folder: str, rank: int, timeout_s: float = 60.0) -> None:
    store: Any = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("epee", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=timeout_s))


def _sum(rank: int) -> None:
    x = torch.full((3,), rank + 1.0)
    dist.all_reduce(x)
    assert x.tolist() == [3.0] * 3


def twice(process: int, num_processes: int, folder: str, is_late: bool) -> str:
    rank, told = RANKS[process], ""
    attempt.TWIN_GRACE_S = 0.5
    if process == 2 and is_late:
        stages.wait_for(folder, "made0")
    try:
        _begin(folder, rank)
    except SlotTakenError as exc:
        told = str(exc)
        stages.reach(folder, "told")
    else:
        stages.reach(folder, f"made{rank}")
        _sum(rank)
        stages.wait_for(folder, "told")
        _sum(rank)
        dist.destroy_process_group()
        _begin(folder, rank)  # as if nothing had been
        _sum(rank)
        dist.destroy_process_group()
    return told


@pytest.mark.parametrize("is_late", [False, True])
def test_the_second_process_with_a_rank_is_told_and_the_others_go_on(tmp_path: Path, is_late: bool) -> None:
    told = run_ranks(twice, 3, str(tmp_path), is_late, backend=None)
    assert sum(map(bool, told)) == 1, "one of the two is taken"
    assert told[0] == ""
    assert not is_late or told[2]
    assert "rank 1 is used twice: process " in "".join(told)
    assert "a RANK of its own" in "".join(told)


def renumbered(process: int, num_processes: int, folder: str) -> None:
    attempt.TWIN_GRACE_S = 0.3
    _begin(folder, process)
    _sum(process)
    if process == 1:
        stages.wait_for(folder, "next", 30)  # its group lives, and the other one has its rank already
    else:
        dist.destroy_process_group()
        stages.reach(folder, "gone")
        stages.reach(folder, "next")
    if process == 1:
        stages.wait_for(folder, "gone")
        dist.destroy_process_group()
    _begin(folder, 1 - process)
    _sum(1 - process)
    dist.destroy_process_group()


def test_ranks_may_be_numbered_anew_in_one_store(tmp_path: Path) -> None:
    run_ranks(renumbered, 2, str(tmp_path), backend=None)
