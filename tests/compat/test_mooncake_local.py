"""Mooncake's `get_peer_state` and `get_num_synced_ranks` are local: one rank asks alone, and acts on the answer."""

from __future__ import annotations

import mmap
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from epee.compat.mooncake import ep, pg
from epee.engine.bootstrap import local_state
from tests.harness import DEAD, run_mortal
from tests.survive import stages

LONG_S = 30.0


def _start(rank: int, num_ranks: int, folder: str, is_extension: bool = False) -> Any:
    options = ep.MooncakeBackendOptions(torch.ones(num_ranks, dtype=torch.int32), is_extension)
    store = dist.FileStore(str(Path(folder) / "store"), -1)
    dist.init_process_group("mooncake-cpu", store=store, rank=rank, world_size=num_ranks, pg_options=options)
    return dist.group.WORLD


def _total() -> float:
    x = torch.ones(1)
    dist.all_reduce(x)
    return x.item()


def _await_state(group: Any, rank: int, state: bool) -> int:
    """Ask until the answer is so; return how often."""
    deadline, times = time.monotonic() + LONG_S, 1
    while pg.get_peer_state(group, [rank]) != [state]:
        assert time.monotonic() < deadline
        times += 1
        time.sleep(0.01)
    return times


def _alone(slot: int, num_processes: int, folder: str) -> Any:
    """Process 2 dies, process 3 comes for its rank; rank 0 alone asks and recovers it, while rank 1 does nothing."""
    if slot == 3:
        stages.wait_for(folder, "lost")
        _start(2, 3, folder, is_extension=True)
        total = _total()
        for other in (0, 1):  # one that had ended would not be waiting any more
            stages.wait_for(folder, f"over-{other}")
        return total
    group = _start(slot, 3, folder)
    assert _total() == 3
    if slot == 2:
        stages.reach(folder, "ready")
        os.kill(os.getpid(), signal.SIGKILL)
    if slot == 0:
        assert pg.get_peer_state(group, [1]) == [True]
        stages.wait_for(folder, "ready")
        _await_state(group, 2, False)
        assert pg.get_num_synced_ranks(group) == 2
        refused = pg.recover_ranks(group, [2])
        assert refused.status is pg.ProposalStatus.Rejected
        stages.reach(folder, "lost")
        _await_state(group, 2, True)
        assert pg.get_num_synced_ranks(group) == 3
        assert pg.recover_ranks(group, [2]).status is pg.ProposalStatus.Applied
        stages.reach(folder, "recovered")
    stages.wait_for(folder, "recovered")
    total = _total()
    assert pg.get_active_ranks(group).tolist() == [1, 1, 1]
    assert pg.get_peer_state(group, [0, 1, 2]) == [True] * 3
    stages.meet(folder, "over", slot, (0, 1))
    return total


def test_one_rank_asks_and_recovers_while_the_others_make_no_call() -> None:
    assert run_mortal(_alone, 4, dead={2}, timeout_s=80) == [3.0, 3.0, DEAD, 3.0]


def _one_asks(slot: int, num_processes: int, folder: str) -> Any:
    """Rank 0 asks between its calls, the other ranks only make them."""
    if slot == 3:
        stages.wait_for(folder, "lost")
        _start(2, 3, folder, is_extension=True)
        total = 0.0
        while total < 4:
            total = _total()
        return total
    group = _start(slot, 3, folder)
    assert _total() == 3
    if slot == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    total, is_in = 0.0, False
    while total < 4:  # rank 0 counts twice when it has seen the third rank: then all leave together
        x = torch.full((1,), 2.0 if is_in else 1.0)
        dist.all_reduce(x)
        total = x.item()
        if slot == 0 and total == 2:
            stages.reach(folder, "lost")
            if pg.get_peer_state(group, [2])[0]:
                assert pg.recover_ranks(group, [2]).status is pg.ProposalStatus.Applied
        is_in = slot == 0 and total == 3 and Path(folder, "stage-lost").exists()
    return total


def test_one_rank_asks_between_calls_that_all_make() -> None:
    assert run_mortal(_one_asks, 4, dead={2}, timeout_s=80) == [4.0, 4.0, DEAD, 4.0]


def _one_is_late(slot: int, num_processes: int, folder: str) -> Any:
    """Process 3 asks while rank 0 is in a call; rank 1 begins that call later, and the one behind it as well."""
    if slot == 3:
        stages.wait_for(folder, "lost")
        _start(2, 3, folder, is_extension=True)
        return _total()
    group = _start(slot, 3, folder)
    assert _total() == 3
    if slot == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    while _total() == 3:
        pass
    local_state.ALONE_S = 0.2 if slot == 0 else LONG_S  # rank 1 has heard later
    state, seq = group._engine.membership.local_state, group._engine.num_retired
    num_calls = 0
    while not pg.get_peer_state(group, [2])[0]:
        if slot == 1 and num_calls == 0:
            while not state._is_called(seq + 1):
                time.sleep(0.005)
            stages.reach(folder, "lost")
            while [mark.has(2) for mark in state._read_marks().values()] != [True, True]:
                time.sleep(0.005)
        time.sleep(0.5 * slot)
        _total()
        num_calls += 1
    assert pg.recover_ranks(group, [2]).status is pg.ProposalStatus.Applied
    assert _total() == 3
    return num_calls


def test_ranks_leave_a_loop_together_however_late_one_of_them_comes_to_its_calls() -> None:
    assert run_mortal(_one_is_late, 4, dead={2}, timeout_s=40) == [2, 2, DEAD, 3.0]


def _at_once(rank: int, num_ranks: int, folder: str) -> list[bool]:
    """The agent thread of rank 0 stands still (the program holds the interpreter's lock) when rank 1 dies."""
    group = _start(rank, num_ranks, folder)
    _total()
    pid = Path(folder) / f"pid-{rank}"
    pid.write_text(str(os.getpid()))
    stages.reach(folder, f"named-{rank}")
    if rank == 0:
        stages.wait_for(folder, "named-1")
        victim = int((Path(folder) / "pid-1").read_text())
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1000.0)
        try:
            os.kill(victim, signal.SIGKILL)
            while _has_memory(victim):
                pass
            return pg.get_peer_state(group, [0, 1, 2])
        finally:
            sys.setswitchinterval(interval)
            stages.reach(folder, "over")
    stages.wait_for(folder, "over")
    return []


def _has_memory(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/statm").read_text().split()[0] != "0"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_proven_death_is_false_before_the_agent_has_turned() -> None:
    assert run_mortal(_at_once, 3, dead={1}, timeout_s=60)[0] == [True, False, True]


def _stand_until(flag: mmap.mmap) -> None:
    """Let no other thread of this process run, its agent included, until a byte in memory has been set."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    while not flag[0]:
        pass
    sys.setswitchinterval(interval)


def _comes_back(rank: int, num_ranks: int, folder: str, is_held: bool) -> Any:
    """Rank 2 is put out, asks to come back, and is taken in by rank 0, which asks alone.

    `is_held`: the agent of rank 2 has not run since, when the rank asks.
    """
    pg.set_collective_timeout_us(60_000_000)
    group = _start(rank, num_ranks, folder)
    assert _total() == 3
    path = Path(folder) / "flag"
    if rank == 0:
        path.write_bytes(bytes(mmap.PAGESIZE))
    stages.meet(folder, "through", rank, range(num_ranks))
    with path.open("r+b") as file:
        flag = mmap.mmap(file.fileno(), mmap.PAGESIZE)
    if rank == 2:
        if is_held:
            _stand_until(flag)
        else:
            stages.wait_for(folder, "out")
        pg.join_group(group)
        return _total()
    if rank == 0:
        assert pg.deactivate_ranks(group, [2]).status is pg.ProposalStatus.Applied
        flag[0] = 1
        assert pg.get_peer_state(group, [0, 1]) == [True, True]
        stages.reach(folder, "out")
        _await_state(group, 2, True)
        assert pg.recover_ranks(group, [2]).status is pg.ProposalStatus.Applied
        stages.reach(folder, "in")
    stages.wait_for(folder, "in")
    return _total()


@pytest.mark.parametrize("is_held", [False, True])
def test_a_rank_that_was_put_out_and_asks_to_come_back_is_seen_by_one_that_asks_alone(is_held: bool) -> None:
    assert run_mortal(_comes_back, 3, is_held, dead=set(), timeout_s=60) == [3.0, 3.0, 3.0]


def _asks_twice(rank: int, num_ranks: int, folder: str) -> Any:
    """Rank 2 is put out and taken in again, twice; the second time rank 0 has begun its call when it asks."""
    group = _start(rank, num_ranks, folder)
    for turn in range(2):
        assert _total() == 3
        stages.meet(folder, f"all-{turn}", rank, range(num_ranks))
        if rank == 0:
            assert pg.deactivate_ranks(group, [2]).status is pg.ProposalStatus.Applied
            stages.reach(folder, f"out-{turn}")
        stages.wait_for(folder, f"out-{turn}")
        if rank == 2:
            if turn == 1:
                stages.wait_for(folder, "called")
            pg.join_group(group)
            continue
        if turn == 1:
            assert _total() == 2
            if rank == 0:
                assert pg.get_peer_state(group, [2]) == [False]
                work = dist.all_reduce(torch.ones(1), async_op=True)
                stages.reach(folder, "called")
                work.wait()
            else:
                deadline = time.monotonic() + LONG_S
                while 2 not in group.waiting_ranks():
                    assert time.monotonic() < deadline
                assert pg.get_peer_state(group, [2]) == [False], "rank 0 has begun its next call without it"
                assert _total() == 2
        while not pg.get_peer_state(group, [2])[0]:
            assert _total() == 2
        assert pg.recover_ranks(group, [2]).status is pg.ProposalStatus.Applied
        assert dist.get_world_size() == 3
    return _total()


def test_a_rank_that_asks_again_is_not_taken_for_the_one_that_asked_before() -> None:
    assert run_mortal(_asks_twice, 3, dead=set(), timeout_s=60) == [3.0, 3.0, 3.0]


def _hears_late(rank: int, num_ranks: int, folder: str) -> Any:
    """Rank 0 sees that rank 2 asks, and takes it in; rank 1 asks when rank 2 is in, and its agent has not heard of it.

    Its agent goes on once rank 1 asks the other members.
    """
    group = _start(rank, num_ranks, folder)
    assert _total() == 3
    stages.meet(folder, "all", rank, range(num_ranks))
    if rank == 0:
        assert pg.deactivate_ranks(group, [2]).status is pg.ProposalStatus.Applied
        stages.reach(folder, "out")
    stages.wait_for(folder, "out")
    if rank == 2:
        pg.join_group(group)
        return _total()
    deadline = time.monotonic() + LONG_S
    while 2 not in group.waiting_ranks():
        assert time.monotonic() < deadline
    assert pg.get_peer_state(group, [2]) == [False], "the other one may have begun its next call without it"
    goes_on = threading.Event()
    if rank == 1:
        runtime = group._engine.membership.runtime
        decide, catch_up = runtime._loop._decide, runtime.catch_up
        runtime._loop._decide = lambda decision: (goes_on.wait(LONG_S), decide(decision))
        runtime.catch_up = lambda timeout_s: (goes_on.set(), catch_up(timeout_s))
    assert _total() == 2
    if rank == 0:
        assert pg.get_peer_state(group, [2]) == [True]
        assert pg.recover_ranks(group, [2]).status is pg.ProposalStatus.Applied
    else:
        while 2 in group.waiting_ranks():
            assert time.monotonic() < deadline
            time.sleep(0.001)
        found = pg.get_peer_state(group, [2])
        goes_on.set()
        assert found == [True], "rank 0 has left the loop behind this call"
    return _total()


def test_a_rank_whose_agent_is_late_leaves_the_loop_behind_the_same_call() -> None:
    assert run_mortal(_hears_late, 3, dead=set(), timeout_s=40) == [3.0, 3.0, 3.0]


def _told_late(rank: int, num_ranks: int, folder: str, caller: int) -> Any:
    """Rank `caller` puts rank 2 out; the agent of rank 1 hears of it half a second late, and rank 1 asks at once."""
    group = _start(rank, num_ranks, folder)
    assert _total() == 3
    if rank == 1:
        loop = group._engine.membership.runtime._loop
        decide = loop._decide
        loop._decide = lambda decision: (time.sleep(0.5), decide(decision))
    stages.meet(folder, "all", rank, range(num_ranks))
    if rank == caller:
        assert pg.deactivate_ranks(group, [2]).status is pg.ProposalStatus.Applied
        stages.reach(folder, "out")
    stages.wait_for(folder, "out")
    return None if rank == 2 else (pg.get_peer_state(group, [0, 1, 2]), _total())


@pytest.mark.parametrize("caller", [0, 2])
def test_a_rank_that_was_put_out_takes_part_for_nobody_any_more(caller: int) -> None:
    assert run_mortal(_told_late, 3, caller, dead=set(), timeout_s=40) == [([True, True, False], 2.0)] * 2 + [None]
