"""SIGSTOP of a rank: the group goes on without it (mode "mask") or says who is silent; the zombie harms nothing."""

from __future__ import annotations

import logging
import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import epee
from epee.errors import CommTimeoutError, EvictedError, RankFailedError
from tests.harness import run_mortal, run_ranks

from . import stages

TIMEOUT_S = 3.0  # a busy machine may keep a rank that is well from its core for a second or two
PATIENCE = timedelta(seconds=30)


def start(rank: int, num_ranks: int, folder: str, mode: str) -> Any:
    store = dist.FileStore(f"{folder}/store", num_ranks)
    options = epee.BackendOptions(fault_mode=mode, op_timeout=TIMEOUT_S)
    dist.init_process_group("epee", store=store, rank=rank, world_size=num_ranks, pg_options=options)
    return dist.group.WORLD


def publish_pid(folder: str, rank: int) -> None:
    path = Path(folder) / f"pid{rank}.new"
    path.write_text(str(os.getpid()))
    path.rename(Path(folder) / f"pid{rank}")


def wait_for(path: Path, timeout_s: float = 20.0) -> str:
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} did not come"
        time.sleep(0.01)
    return path.read_text()


def zombie_in_mask_mode(rank: int, num_ranks: int, folder: str) -> Any:
    group = start(rank, num_ranks, folder, "mask")
    group.set_timeout(PATIENCE)  # but for the call in which rank 1 is voted out
    x = torch.ones(4, dtype=torch.int64)
    dist.all_reduce(x)
    publish_pid(folder, rank)
    if rank == 1:  # stopped by rank 0, woken when the others have gone on for long
        while not (Path(folder) / "go").exists():
            time.sleep(0.001)
        seen = []
        for _ in range(3):
            y = torch.full((4,), 100, dtype=torch.int64)
            with pytest.raises(EvictedError) as caught:
                dist.all_reduce(y)
            seen.append((caught.value.epoch, y.tolist()))
        stages.reach(folder, "learned")
        return seen
    if rank == 0:
        victim = int(wait_for(Path(folder) / "pid1"))
        os.kill(victim, signal.SIGSTOP)
        (Path(folder) / "go").write_text("")
        (Path(folder) / "stopped").write_text("")
    wait_for(Path(folder) / "stopped")
    group.set_timeout(timedelta(seconds=TIMEOUT_S))
    seen = []
    for i in range(100):
        y = torch.full((4,), 1 + rank + i, dtype=torch.int64)
        dist.all_reduce(y)
        group.set_timeout(PATIENCE)
        seen.append((y.tolist(), group.last_contributors(), group.epoch))
        if i == 50 and rank == 0:
            os.kill(victim, signal.SIGCONT)
    stages.wait_for(folder, "learned", 40.0)  # from those who live
    return seen


def test_a_stopped_rank_is_voted_out_and_harms_nothing_when_it_wakes(tmp_path: Path) -> None:
    results = run_ranks(zombie_in_mask_mode, 4, str(tmp_path), backend=None, timeout_s=60)
    survivors = [results[0], results[2], results[3]]
    assert survivors[0] == survivors[1] == survivors[2]
    for i, (values, contributors, epoch) in enumerate(survivors[0]):
        assert contributors == (0, 2, 3)
        assert epoch == 2
        assert values == [sum(1 + rank + i for rank in contributors)] * 4
    assert results[1] == [(2, [100] * 4)] * 3


def zombie_that_sends(rank: int, num_ranks: int, folder: str) -> Any:
    """Rank 2 has sent before it is stopped and sends when it wakes; rank 0 looks for messages in between."""
    group = start(rank, num_ranks, folder, "mask")
    dist.all_reduce(torch.ones(1))
    publish_pid(folder, rank)
    if rank == 2:
        work = dist.isend(torch.tensor([666.0]), 0, tag=5)
        stages.reach(folder, "sent")
        stages.wait_for(folder, "go", 40.0)
        with pytest.raises((EvictedError, CommTimeoutError)):  # which of the two is seen first depends on the scheduler
            work.wait()
        for _ in range(20):
            with pytest.raises((EvictedError, CommTimeoutError)) as caught:
                dist.send(torch.tensor([667.0]), 0, tag=5)
            if caught.type is EvictedError:
                break
        assert caught.type is EvictedError
        stages.reach(folder, "learned")
        return None
    got = []
    x = torch.zeros(1)
    if rank == 0:
        stages.wait_for(folder, "sent")
        victim = int(wait_for(Path(folder) / "pid2"))
        os.kill(victim, signal.SIGSTOP)
        group.set_timeout(PATIENCE)
        named, anyone = dist.irecv(x, 2, tag=6), dist.irecv(x, tag=7)
        group.set_timeout(timedelta(seconds=TIMEOUT_S))
        stages.reach(folder, "stopped")
    stages.wait_for(folder, "stopped")
    dist.all_reduce(torch.ones(1))
    assert group.last_contributors() == (0, 1)
    group.set_timeout(PATIENCE)
    if rank == 0:
        for call in (named.wait, lambda: dist.recv(x, 2, tag=5), lambda: dist.send(x, 2)):
            with pytest.raises(RankFailedError, match="has been voted out") as caught:
                call()
            assert caught.value.ranks == (2,)
        stages.reach(folder, "go")
        os.kill(victim, signal.SIGCONT)
        anyone.wait()
        got.append((anyone._source_rank(), x.item()))
        got.append((dist.recv(x, tag=5), x.item()))
    else:
        stages.wait_for(folder, "learned", 40.0)  # from the one that wakes
        for tag in (7, 5):
            dist.send(torch.tensor([float(tag)]), 0, tag=tag)
    return got


def test_nothing_of_a_rank_that_was_voted_out_is_delivered(tmp_path: Path) -> None:
    assert run_ranks(zombie_that_sends, 3, str(tmp_path), backend=None, timeout_s=60)[0] == [(1, 7.0), (1, 5.0)]


def late_for_the_news(rank: int, num_ranks: int, folder: str) -> Any:
    """Rank 2 is stopped and voted out; rank 0 takes that decision over some time after rank 1 has."""
    group = start(rank, num_ranks, folder, "mask")
    dist.all_reduce(torch.ones(1))
    publish_pid(folder, rank)
    if rank == 2:
        stages.wait_for(folder, "never", 60.0)  # it is stopped, and killed at the end of the test
    membership = group._engine.membership
    accused = set()
    accuse = membership.runtime.accuse

    def note(slot: int, *where: int) -> None:
        accused.add(slot)
        accuse(slot, *where)

    membership.runtime.accuse = note
    if rank == 0:
        os.kill(int(wait_for(Path(folder) / "pid2")), signal.SIGSTOP)
        stages.reach(folder, "stopped")
        take_over = membership._take_over

        def late(decision: Any) -> None:
            time.sleep(0.5)
            take_over(decision)

        membership._take_over = late
    stages.wait_for(folder, "stopped")
    x = torch.ones(1)
    dist.all_reduce(x)
    stages.meet(folder, "made", rank, (0, 1))
    if rank == 0:
        os.kill(int(wait_for(Path(folder) / "pid2")), signal.SIGKILL)
    return x.item(), group.last_contributors(), group.epoch, accused - {2}


def test_who_is_late_for_the_news_of_an_eviction_is_not_voted_out() -> None:
    assert run_mortal(late_for_the_news, 3, dead={2}, timeout_s=60)[:2] == [(2.0, (0, 1), 2, set())] * 2


def silent_in_raise_mode(rank: int, num_ranks: int, folder: str) -> Any:
    group = start(rank, num_ranks, folder, "raise")
    x = torch.ones(4)
    dist.all_reduce(x)
    if rank == 2:
        wait_for(Path(folder) / "told0")
        wait_for(Path(folder) / "told1")
        with pytest.raises(CommTimeoutError, match="aborted the call"):
            dist.all_reduce(x)  # what the others gave up
        assert x.tolist() == [3.0] * 4
    else:
        y = torch.full((4,), 5.0)
        with pytest.raises(CommTimeoutError) as caught:
            dist.all_reduce(y)
        assert tuple(caught.value.ranks) == (2,)
        assert y.tolist() == [5.0] * 4
        (Path(folder) / f"told{rank}").write_text("")
    group.set_timeout(PATIENCE)
    z = torch.ones(1)
    dist.all_reduce(z)
    return z.item(), group.epoch


def test_a_silent_rank_raises_and_stays_a_member(tmp_path: Path) -> None:
    for result in run_ranks(silent_in_raise_mode, 3, str(tmp_path), backend=None, timeout_s=60):
        assert result == (3.0, 1)


def evicted_in_raise_mode(rank: int, num_ranks: int, folder: str) -> Any:
    store = dist.FileStore(f"{folder}/store", num_ranks)
    options = epee.BackendOptions(op_timeout=TIMEOUT_S, on_stall="evict")
    dist.init_process_group("epee", store=store, rank=rank, world_size=num_ranks, pg_options=options)
    group: Any = dist.group.WORLD
    dist.all_reduce(torch.ones(1))
    if rank == 1:  # alive, but it does not call
        wait_for(Path(folder) / "over", 40.0)
        deadline = time.monotonic() + 30
        while group._engine.membership.hooks.eviction is None:  # it is told a moment after the others have agreed
            assert time.monotonic() < deadline
            time.sleep(0.005)
        with pytest.raises(EvictedError):
            dist.all_reduce(torch.ones(1))
        stages.reach(folder, "learned")
        return None
    with pytest.raises(RankFailedError) as caught:
        dist.all_reduce(torch.ones(1))
    assert "voted out" in str(caught.value)
    group.set_timeout(PATIENCE)
    x = torch.ones(1)
    dist.all_reduce(x)
    (Path(folder) / "over").touch()
    stages.wait_for(folder, "learned", 40.0)  # from those who live
    return tuple(caught.value.ranks), x.item(), group.epoch


def test_with_on_stall_evict_the_call_fails_and_the_next_one_works(tmp_path: Path) -> None:
    results = run_ranks(evicted_in_raise_mode, 4, str(tmp_path), backend=None, timeout_s=60)
    assert [results[rank] for rank in (0, 2, 3)] == [((1,), 3.0, 2)] * 3


def patient(rank: int, num_ranks: int, folder: str) -> float:
    store = dist.FileStore(f"{folder}/store", num_ranks)
    options = epee.BackendOptions(op_timeout=0.2, on_stall="wait")
    dist.init_process_group("epee", store=store, rank=rank, world_size=num_ranks, pg_options=options)
    if rank == 1:
        wait_for(Path(folder) / "warned", 40.0)
    logger = logging.getLogger("epee")
    handler = _Touch(Path(folder) / "warned")
    logger.addHandler(handler)
    x = torch.ones(1)
    dist.all_reduce(x)  # far longer than op_timeout: until rank 1 has heard of the warning
    return x.item()


class _Touch(logging.Handler):
    """Touches a file at the first warning that names the silent rank."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        """Called for each message of the logger."""
        if "waits for rank(s) 1" in record.getMessage():
            self._path.touch()


def test_with_on_stall_wait_a_slow_rank_is_named_and_waited_for(tmp_path: Path) -> None:
    assert run_ranks(patient, 2, str(tmp_path), backend=None, timeout_s=60) == [2.0, 2.0]


def waits_while_frozen(rank: int, num_ranks: int, folder: str) -> None:
    group = start(rank, num_ranks, folder, "raise")
    dist.all_reduce(torch.ones(1))
    if rank == 0:
        group.set_timeout(PATIENCE)
        membership = group._engine.membership
        x = torch.ones(1)
        work = dist.all_reduce(x, async_op=True)
        membership.hooks.freeze()  # as an agreement does that finds no end
        with pytest.raises(CommTimeoutError, match="time-out of wait"):
            work.wait(timedelta(seconds=0.2))
        membership.hooks.thaw()
        (Path(folder) / "told").touch()
        work.wait()
        assert x.item() == num_ranks
    else:
        wait_for(Path(folder) / "told")
        dist.all_reduce(torch.ones(1))


def test_a_wait_keeps_its_time_out_while_an_agreement_is_under_way(tmp_path: Path) -> None:
    run_ranks(waits_while_frozen, 2, str(tmp_path), backend=None, timeout_s=60)
