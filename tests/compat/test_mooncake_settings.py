"""Mooncake's settings have the effect that they name: time-outs of messages, the window of decisions on deaths."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from epee.compat.mooncake import pg
from epee.errors import CommTimeoutError, InvalidArgument
from tests.harness import DEAD, run_mortal, run_ranks
from tests.survive import stages


def _start(rank: int, num_ranks: int, folder: str, options: Any = None) -> Any:
    store = dist.FileStore(str(Path(folder) / "store"), -1)
    options = options or pg.MooncakeBackendOptions(torch.ones(num_ranks, dtype=torch.int32))
    dist.init_process_group("mooncake-cpu", store=store, rank=rank, world_size=num_ranks, pg_options=options)
    return dist.group.WORLD


def _unanswered(rank: int, num_ranks: int, folder: str, is_before: bool) -> float:
    """Rank 0 waits for a message that rank 1 never sends; return for how long."""
    pg.set_collective_timeout_us(60_000_000)
    if is_before:
        pg.set_p2p_timeout_us(500_000)
    group = _start(rank, num_ranks, folder)
    if not is_before:
        pg.set_p2p_timeout_us(500_000)
    dist.barrier()
    elapsed = 0.0
    if rank == 0:
        began = time.monotonic()
        with pytest.raises(CommTimeoutError):
            dist.recv(torch.zeros(1), 1)
        elapsed = time.monotonic() - began
    dist.barrier()
    assert group.timeout_s == 60.0, "collectives keep their own"
    dist.destroy_process_group()
    return elapsed


@pytest.mark.parametrize("is_before", [True, False], ids=["set before the group is made", "set after it"])
def test_a_receive_ends_by_the_time_out_of_messages(tmp_path: Path, is_before: bool) -> None:
    assert 0.5 <= run_ranks(_unanswered, 2, str(tmp_path), is_before, backend=None)[0] < 30


def _chosen(rank: int, num_ranks: int, folder: str) -> None:
    options = pg.MooncakeBackendOptions(num_ranks)
    options.op_timeout_s = 40.0
    group = _start(rank, num_ranks, folder, options)
    pg.set_p2p_timeout_us(1)
    if rank == 0:
        time.sleep(0.2)
        dist.send(torch.ones(1), 1)
    else:
        dist.recv(torch.zeros(1), 0)
    group.set_p2p_timeout(timedelta(seconds=0.1))
    with pytest.raises(CommTimeoutError):
        dist.recv(torch.zeros(1), 1 - rank)
    with pytest.raises(InvalidArgument, match="above 0"):
        group.set_p2p_timeout(timedelta(0))
    dist.barrier()
    dist.destroy_process_group()


def test_a_time_out_in_the_options_is_kept_until_the_group_itself_is_told_another(tmp_path: Path) -> None:
    run_ranks(_chosen, 2, str(tmp_path), backend=None)


def _two_deaths(rank: int, num_ranks: int, folder: str, window_us: int) -> int:
    """Rank 2 dies, then rank 3: without a window when the view has changed, else half a second later.

    Return the epoch in which the survivors go on.
    """
    pg.set_fault_reconciliation_window_us(window_us)
    _start(rank, num_ranks, folder)
    dist.barrier()
    stages.meet(folder, "through", rank, range(num_ranks))
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    x = torch.ones(1)
    if rank == 3 and window_us:
        time.sleep(0.5)
    while x.item() != 2 and (rank != 3 or not window_us):
        x = torch.ones(1)
        dist.all_reduce(x)
        if rank == 3 and x.item() == 3:
            break
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    epoch: int = pg.get_current_epoch(dist.group.WORLD)
    return epoch


@pytest.mark.parametrize(("window_us", "epoch"), [(0, 3), (3_000_000, 2)], ids=["none", "3 s"])
def test_deaths_within_the_window_are_one_change_of_the_view(window_us: int, epoch: int) -> None:
    assert run_mortal(_two_deaths, 4, window_us, dead={2, 3}, timeout_s=60) == [epoch, epoch, DEAD, DEAD]


@pytest.mark.parametrize("value", [-1, 0.5, True, "1"])
def test_a_window_that_is_no_number_of_microseconds_is_refused(value: Any) -> None:
    with pytest.raises(InvalidArgument, match="microseconds"):
        pg.set_fault_reconciliation_window_us(value)
