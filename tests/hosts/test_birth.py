"""Groups over hosts of which a rank dies while they are made: the others are told, long before the time-out."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from epee.engine.bootstrap import creation
from epee.errors import RankFailedError
from epee.memory import claim, shared
from tests.harness import DEAD
from tests.survive import stages

from . import run_on_loopbacks

PATIENCE_S = 60.0


def error_of_birth(rank: int, num_ranks: int, folder: str) -> tuple[int, ...]:
    """Return the ranks that the error names with which the group is not made."""
    store = dist.FileStore(f"{folder}/store", num_ranks)
    began = time.monotonic()
    with pytest.raises(RankFailedError, match=r"died while the group was made") as caught:
        dist.init_process_group(
            "epee", store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=PATIENCE_S)
        )
    assert time.monotonic() - began < PATIENCE_S - 10, "it was told by the time-out"
    return caught.value.ranks


def error_of_survivor(rank: int, num_ranks: int, folder: str, victim: int) -> tuple[int, ...]:
    """Do the same, and end no sooner than all others have it: one death is asked about here, and no second end."""
    ranks = error_of_birth(rank, num_ranks, folder)
    stages.meet(folder, "raised", rank, [other for other in range(num_ranks) if other != victim])
    return ranks


def made_with_a_death(rank: int, num_ranks: int, folder: str, victim: int, point: str) -> tuple[int, ...]:
    """Make a group of which the victim dies at `point`."""
    if rank == victim:
        setattr(creation, point, lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL))
    return error_of_survivor(rank, num_ranks, folder, victim)


def killed_while_opened(rank: int, num_ranks: int, folder: str, victim: int, nth: int) -> tuple[int, ...]:
    """Make a group of which the victim is killed between two steps of a rank that opens its memory, the nth time."""
    file = Path(f"{folder}/victim")
    if rank == victim:
        file.with_suffix(".new").write_text(str(os.getpid()))
        file.with_suffix(".new").rename(file)
        setattr(creation, "await_all", lambda *args, **kwargs: time.sleep(3600))  # noqa: B010 - mypy
        return error_of_birth(rank, num_ranks, folder)
    require_alive, opened = shared.require_alive, [0]

    def checked(one: claim.Claim) -> None:
        require_alive(one)
        if file.exists() and one.pid == int(file.read_text()):
            opened[0] += 1
            if opened[0] == nth:
                os.kill(one.pid, signal.SIGKILL)
                while not claim.has_ended(one.pid, one.start_time):
                    time.sleep(0.001)

    setattr(shared, "require_alive", checked)  # noqa: B010 - mypy
    return error_of_survivor(rank, num_ranks, folder, victim)


def late_for_a_death(rank: int, num_ranks: int, folder: str) -> tuple[int, ...]:
    """Make a group of which rank 2 dies; rank 1 looks when rank 0 has raised that and has ended, too."""
    await_all = creation.await_all

    def awaited(*args: Any) -> None:
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        while rank == 1 and not (Path(f"{folder}/first").exists() and ended(Path(f"{folder}/first"))):
            time.sleep(0.001)
        await_all(*args)

    if rank == 0:  # on a busy machine it may hear of the death before it comes to `await_all`
        own = claim.make_claim(b"testtest", 0, 4096)
        Path(f"{folder}/new").write_text(f"{own.pid} {own.start_time}")
        Path(f"{folder}/new").rename(f"{folder}/first")
    setattr(creation, "await_all", awaited)  # noqa: B010 - mypy
    return error_of_birth(rank, num_ranks, folder)


def ended(file: Path) -> bool:
    pid, start_time = map(int, file.read_text().split())
    return claim.has_ended(pid, start_time)


@pytest.mark.parametrize("placement", [(0, 0, 0), (0, 0, 1)])
def test_a_rank_that_ends_after_its_report_of_a_death_is_not_the_dead_one(
    tmp_path: Path, placement: tuple[int, ...]
) -> None:
    args = (late_for_a_death, placement, str(tmp_path))
    told = run_on_loopbacks(*args, backend=None, dead={2}, timeout_s=PATIENCE_S + 20)
    assert told == [(2,), (2,), DEAD]


@pytest.mark.parametrize("point", ["link", "await_all"])
@pytest.mark.parametrize(
    ("placement", "victim"), [((0, 0, 1, 1), 3), ((0, 0, 1, 1), 0), ((0, 0, 1), 2), ((0, 1, 2), 1)]
)
def test_a_death_on_the_way_is_told_on_all_hosts(
    tmp_path: Path, placement: tuple[int, ...], victim: int, point: str
) -> None:
    args = str(tmp_path), victim, point
    told = run_on_loopbacks(made_with_a_death, placement, *args, backend=None, dead={victim}, timeout_s=PATIENCE_S + 20)
    assert told == [DEAD if rank == victim else (victim,) for rank in range(len(placement))]


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize(("placement", "victim"), [((0, 0, 0), 1), ((0, 0, 1), 1), ((0, 0, 1, 1), 2)])
def test_a_rank_that_dies_while_its_memory_is_opened_is_dead_on_all_hosts(
    tmp_path: Path, placement: tuple[int, ...], victim: int, nth: int
) -> None:
    args = str(tmp_path), victim, nth
    told = run_on_loopbacks(
        killed_while_opened, placement, *args, backend=None, dead={victim}, timeout_s=PATIENCE_S + 20
    )
    assert told == [DEAD if rank == victim else (victim,) for rank in range(len(placement))]
