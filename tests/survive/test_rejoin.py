"""A replacement takes the place of a killed rank: collectives, point-to-point and views work again, many times."""

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
from epee.errors import EpeeError, RankFailedError
from tests.harness import DEAD, run_mortal

from . import stages

MODES = ("raise", "mask")


def start(rank: int, num_ranks: int, folder: str, mode: str, joins: bool = False) -> Any:
    store = dist.FileStore(f"{folder}/store", num_ranks)
    options = epee.BackendOptions(fault_mode=mode, op_timeout=10.0, is_extension=joins)
    dist.init_process_group("epee", store=store, rank=rank, world_size=num_ranks, pg_options=options)
    return dist.group.WORLD


def total() -> int:
    x = torch.ones(1, dtype=torch.int64)
    dist.all_reduce(x)
    return int(x)


def lose_one(group: Any, mode: str) -> None:
    """Make calls until the victim is out of the view."""
    deadline = time.monotonic() + 20
    while group.active_ranks().sum() == group.size():
        assert time.monotonic() < deadline
        try:
            total()
        except RankFailedError:
            assert mode == "raise"


def exchange(group: Any, peer: int) -> float:
    """Send to `peer` and receive from it."""
    got = torch.zeros(20_000)
    sent = torch.full((20_000,), float(group.rank() + 1))
    for request in dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, got, peer)]):
        request.wait()
    assert got.unique().numel() == 1
    return float(got[0])


def replaced(slot: int, num_processes: int, folder: str, mode: str) -> Any:
    """Processes 0, 1, 2 are the ranks; process 3 takes rank 1's place when that is dead."""
    rank, joins = (1, True) if slot == 3 else (slot, False)
    if joins:
        stages.wait_for(folder, "lost")
    group = start(rank, 3, folder, mode, joins)
    if not joins:
        assert total() == 3
        assert exchange(group, (1 - rank) if rank < 2 else 0) if rank < 2 else True
    if slot == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if not joins:
        lose_one(group, mode)
        assert total() == 2
        stages.reach(folder, "lost")
        while not group.get_peer_state([1])[0]:
            time.sleep(0.01)
        group.recover_ranks([1])
    sums = [total() for _ in range(5)]
    got = exchange(group, 1 - rank) if rank < 2 else 0.0
    gathered = torch.full((3,), -1)
    dist.all_gather_into_tensor(gathered, torch.tensor([rank * 10]))
    result = (sums, group.active_ranks().tolist(), group.epoch, got, gathered.tolist())
    dist.barrier()
    return result


@pytest.mark.parametrize("mode", MODES)
def test_a_replacement_takes_the_place_of_a_dead_rank(mode: str) -> None:
    results = run_mortal(replaced, 4, mode, dead={1}, timeout_s=60)
    assert results[1] == DEAD
    epochs = set()
    for rank, result in ((0, results[0]), (2, results[2]), (1, results[3])):
        sums, active, epoch, got, gathered = result
        assert sums == [3] * 5
        assert active == [1, 1, 1]
        epochs.add(epoch)
        assert got == {0: 2.0, 1: 1.0, 2: 0.0}[rank]
        assert gathered == [0, 10, 20]
    assert len(epochs) == 1
    assert epochs.pop() >= 3  # a join that a slow agent keeps waiting is put off by decisions that change nothing


def refused(slot: int, num_processes: int, folder: str) -> str:
    rank, joins = (1, True) if slot == 2 else (slot, False)
    if joins:
        stages.wait_for(folder, "born")
        with pytest.raises(EpeeError) as caught:
            start(rank, 2, folder, "raise", joins=True)
        stages.reach(folder, "told")
        return str(caught.value)
    group = start(rank, 2, folder, "raise")
    stages.reach(folder, "born")
    group.recover_ranks([0, 1])  # nobody is lost: nothing to do
    if rank == 0:
        deadline, runtime, told = time.monotonic() + 20, group._engine.membership.runtime, Path(folder, "stage-told")
        while not runtime.waiting() and not told.exists() and time.monotonic() < deadline:
            time.sleep(0.01)  # it may have been told before this rank looks
        runtime.admit([1])
    stages.wait_for(folder, "told")
    assert total() == 2
    return ""


def test_a_slot_that_is_taken_is_refused_and_disturbs_nobody() -> None:
    told = run_mortal(refused, 3, dead=set(), timeout_s=60)
    assert "taken" in told[2]
