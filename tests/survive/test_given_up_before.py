"""A call that was given up before deaths: these are told by the first calls that the dead had no part in."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import epee
from epee.engine.waiting import GAVE_THE_CALL_UP
from epee.errors import CommTimeoutError, PeerError, RankFailedError
from tests.ep import moments
from tests.harness import run_mortal

from . import stages

AWAY = 4  # makes no call: so the others give their first one up
LATE = 3  # makes its first call when the others have given that up
STOPPED = 2  # has put its part of that one, and stands still until it is killed


def loses_two(rank: int, num_ranks: int, folder: str) -> list[tuple[tuple[int, ...], int]]:
    options = epee.BackendOptions(fault_mode="raise", op_timeout=0.3)
    store = dist.FileStore(f"{folder}/store", num_ranks)
    dist.init_process_group("epee", store=store, rank=rank, world_size=num_ranks, pg_options=options)
    if rank == AWAY:
        stages.wait_for(folder, "told")
        return []
    group: Any = dist.group.WORLD
    if rank == STOPPED:
        Path(f"{folder}/pid").write_text(str(os.getpid()))
        work = dist.all_reduce(torch.ones(1), async_op=True)
        stages.reach(folder, "begun")
        os.kill(os.getpid(), signal.SIGSTOP)
        del work
    stages.wait_for(folder, "begun")
    stopped = int(Path(f"{folder}/pid").read_text())
    stages.await_stop(stopped)
    with pytest.raises(CommTimeoutError):
        dist.all_reduce(torch.ones(1))
    told = []
    for victim in (3, STOPPED):
        stages.meet(folder, f"before{victim}", rank, (0, 1, 3) if victim == 3 else (0, 1))
        if rank == victim or (rank == 0 and victim == STOPPED):
            os.kill(os.getpid() if rank == victim else stopped, signal.SIGKILL)
        while victim in {member.slot for member in group._engine.membership.runtime.view().members}:
            time.sleep(0.005)
        with pytest.raises(RankFailedError) as caught:
            dist.all_reduce(torch.ones(1))
        told.append((caught.value.ranks, caught.value.seq))
    stages.meet(folder, "both", rank, (0, 1))
    stages.reach(folder, "told")
    return told


def test_a_call_that_was_given_up_is_asked_about_in_the_epoch_that_it_ran_in() -> None:
    results = run_mortal(loses_two, 5, dead={2, 3})
    assert results[:2] == [[((3,), 2), ((2,), 3)]] * 2


def loses_its_root(rank: int, num_ranks: int, folder: str, fault_mode: str) -> list[Any]:
    """All give the first call up; then the root of the next one dies, and those who are left call again and again."""
    options = epee.BackendOptions(fault_mode=fault_mode, on_stall="error", op_timeout=2.0)
    store = dist.FileStore(f"{folder}/store", num_ranks)
    dist.init_process_group("epee", store=store, rank=rank, world_size=num_ranks, pg_options=options)
    group: Any = dist.group.WORLD
    if rank == LATE:
        stages.wait_for(folder, "given up")
    with pytest.raises(CommTimeoutError):
        dist.all_reduce(torch.ones(1))
    stages.reach(folder, "given up")
    stages.meet(folder, "over", rank, range(num_ranks))
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    told: list[Any] = []
    for _ in range(4):
        root, x = int(group.active_ranks().nonzero()[0]), torch.ones(1)
        try:
            dist.reduce(x, root)
            told.append((root, x.item() if rank == root else None))
        except RankFailedError as exc:
            told.append((root, exc.ranks))
    return told


@pytest.mark.parametrize("fault_mode", ["mask", "raise"])
def test_behind_a_call_whose_root_is_lost_the_root_is_shown_no_more(fault_mode: str) -> None:
    """The call that was given up is still asked about; the next one is planned in the new view all the same."""
    results = run_mortal(loses_its_root, 4, fault_mode, dead={0})
    assert results[1] == [(0, (0,)), *[(1, 3.0)] * 3]
    assert results[2:] == [[(0, (0,)), *[(1, None)] * 3]] * 2


ROOTS = {"all_reduce": -1, "reduce": 1, "broadcast": 0, "gather": 1, "scatter": 0}  # of two ranks that stay


def call(kind: str, rank: int, num_ranks: int, root: int) -> float:
    """Make a call to which two ranks give 1.0; return what this one has of it."""
    x, parts = torch.ones(1), [torch.ones(1) for _ in range(num_ranks)]
    if kind == "all_reduce":
        dist.all_reduce(x)
    elif kind == "reduce":
        dist.reduce(x, root)
    elif kind == "broadcast":
        dist.broadcast(x, root)
    elif kind == "gather":
        dist.gather(x, parts if rank == root else None, root)
    elif kind == "scatter":
        dist.scatter(x, parts if rank == root else None, root)
    return x.item()


def sleeps_over_both(rank: int, num_ranks: int, folder: str, kind: str, root: int) -> tuple[BaseException, float]:
    """Rank 0 aborts a call; then rank 2, which has not begun it, dies. Rank 1 waits in it, and sees neither before."""
    options = epee.BackendOptions(fault_mode="mask", on_stall="error", op_timeout=20.0)
    store = dist.FileStore(f"{folder}/store", num_ranks)
    dist.init_process_group("epee", store=store, rank=rank, world_size=num_ranks, pg_options=options)
    group: Any = dist.group.WORLD
    waits = group._engine.waits
    poll = waits.poll

    def interrupt(*_: Any) -> None:
        waits.poll = poll
        raise KeyboardInterrupt

    dist.barrier()
    if rank == 2:
        stages.wait_for(folder, "told-0")
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:
        stages.wait_for(folder, "asleep")
        waits.poll = interrupt
    else:
        moments.sleep_until_the_view_changes(group._engine, lambda: stages.reach(folder, "asleep"))
    with pytest.raises((KeyboardInterrupt, PeerError)) as caught:
        call(kind, rank, num_ranks, root)
    stages.meet(folder, "told", rank, (0, 1))
    call(kind, rank, num_ranks, ROOTS[kind])
    return caught.value, call("all_reduce", rank, num_ranks, -1)


@pytest.mark.parametrize("kind", ROOTS)
def test_a_call_aborted_before_a_loss_names_the_rank_that_aborted_it(kind: str) -> None:
    first, second, _ = run_mortal(sleeps_over_both, 3, kind, ROOTS[kind], dead={2})
    assert isinstance(first[0], KeyboardInterrupt)
    assert (type(second[0]), second[0].ranks, second[0].cause) == (PeerError, (0,), GAVE_THE_CALL_UP)
    assert first[1] == second[1] == 2.0


@pytest.mark.parametrize("kind", [kind for kind, root in ROOTS.items() if root >= 0])
def test_a_call_aborted_before_the_loss_of_its_root_names_the_root(kind: str) -> None:
    first, second, _ = run_mortal(sleeps_over_both, 3, kind, 2, dead={2})
    assert isinstance(first[0], KeyboardInterrupt)
    assert (type(second[0]), second[0].ranks) == (RankFailedError, (2,))
    assert first[1] == second[1] == 2.0
