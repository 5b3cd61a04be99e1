"""A process that is killed at any step of a join, a replacement or `new_group`, on one host and on several.

As in `test_births`, the victim ends itself at its n-th call of one of epee's functions, and n goes through all steps.
The ranks that stay have the same results, call by call, and the group takes in the next process.
"""

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

import epee
from epee.errors import CommTimeoutError, RankFailedError
from tests.harness import DEAD, run_ranks
from tests.hosts import run_on_loopbacks
from tests.shake import checked_of

from . import stages
from .test_births import FAILED, LATE, TIMEOUT_S, VICTIM, Outcome, _check, _ended, _outcome, die_at_call

RECOVER_S = 1.0
LIMIT_S = 60.0  # nothing waits for it, unless a rank hangs: a busy machine must not make a slow rank a silent one
STRIDE = int(os.environ.get("EPEE_KILL_STRIDE", "419"))  # of the calls at which the victim dies, in `make test-all`
LAST = 10  # what the process that comes last adds; all others add 1


def _start(rank: int, num_ranks: int, folder: str, mode: str, joins: bool = False) -> Any:
    store = dist.FileStore(f"{folder}/store", -1)
    options = epee.BackendOptions(fault_mode=mode, op_timeout=LIMIT_S, is_extension=joins)
    dist.init_process_group("epee", store=store, rank=rank, world_size=num_ranks, pg_options=options)
    return dist.group.WORLD


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _total(part: int = 1) -> int:
    """Return the sum over all present ranks; -1 where a loss is reported (mode "raise")."""
    x = torch.full((1,), part, dtype=torch.int64)
    try:
        dist.all_reduce(x)
    except RankFailedError:
        return -1
    return int(x)


def _totals(part: int, last: int) -> list[int]:
    """Make calls until the sum is `last`; return all sums."""
    found, deadline = [_total(part)], time.monotonic() + LIMIT_S
    while found[-1] != last:
        assert time.monotonic() < deadline, found[-9:]
        found.append(_total(part))
    return found


def _await_death(folder: str) -> None:
    """Wait until the process that wrote its number is dead."""
    stages.wait_for(folder, "pid-written")
    pid, deadline = int(Path(folder, "pid").read_text()), time.monotonic() + LIMIT_S
    while checked_of(pid)[0] not in "XZ":
        assert time.monotonic() < deadline
        time.sleep(0.005)


def _take_in(group: Any, rank: int, last: int, part: int = 1, first: int = 0) -> list[int]:
    """Take in whoever waits for `rank`, between calls, until the sum is `last`; return `first` and all sums."""
    found, deadline = [first], time.monotonic() + LIMIT_S
    while found[-1] != last:
        assert time.monotonic() < deadline, found[-9:]
        try:
            if group.get_peer_state([rank])[0]:
                group.recover_ranks([rank], RECOVER_S)
        except CommTimeoutError:
            pass  # the process that had asked has died
        except RankFailedError:
            assert group.options.fault_mode == "raise"
        found.append(_total(part))
    return found


def _come_in(group: Any, rank: int, part: int, last: int) -> list[int]:
    """Make, as a joiner, the calls of those that have taken it in."""
    return _take_in(group, rank, last, part, _total(part))


def joiner_dies(slot: int, num_processes: int, folder: str, mode: str, nth: int) -> Any:
    """Rank 2 of three is dead; process 3 comes for it and dies at its n-th call; process 4 comes after that."""
    if slot == 3:
        stages.wait_for(folder, "lost")
        Path(folder, "pid").write_text(str(os.getpid()))
        stages.reach(folder, "pid-written")
        die_at_call(nth)
        _come_in(_start(2, 3, folder, mode, joins=True), 2, 1, -2)
        _kill()
    if slot == 4:
        _await_death(folder)
        group = _start(2, 3, folder, mode, joins=True)
        return [_come_in(group, 2, LAST, LAST + 2)[-1], group.epoch]
    group = _start(slot, 3, folder, mode)
    assert _total() == 3
    if slot == 2:
        _kill()
    _totals(1, 2)
    stages.reach(folder, "lost")
    return [*_take_in(group, 2, LAST + 2), group.epoch]


def survivor_dies(slot: int, num_processes: int, folder: str, mode: str, nth: int) -> Any:
    """Rank 3 of four is dead; rank 1 dies at its n-th call while all take process 4 in its place."""
    if slot == 4:
        stages.wait_for(folder, "lost")
        group = _start(3, 4, folder, mode, joins=True)
        return [_come_in(group, 3, LAST, LAST + 2)[-1], group.epoch]
    group = _start(slot, 4, folder, mode)
    assert _total() == 4
    if slot == 3:
        _kill()
    _totals(1, 3)
    stages.reach(folder, "lost")
    if slot == VICTIM:
        die_at_call(nth)
        _take_in(group, 3, LAST + 3)
        _kill()
    return [*_take_in(group, 3, LAST + 2), group.epoch]


def make_subgroup(rank: int, num_ranks: int, folder: str, nth: int) -> list[Outcome]:
    options = epee.BackendOptions(fault_mode="mask", op_timeout=LIMIT_S)
    store = dist.FileStore(f"{folder}/store", num_ranks)
    dist.init_process_group("epee", store=store, rank=rank, world_size=num_ranks, pg_options=options)
    dist.barrier()
    stages.meet(folder, "made", rank, range(num_ranks))
    if rank == VICTIM:
        die_at_call(nth)
    made: list[Any] = []
    raising = epee.BackendOptions(fault_mode="raise", op_timeout=TIMEOUT_S)
    found = [_outcome(lambda: made.append(dist.new_group(timeout=timedelta(seconds=TIMEOUT_S), pg_options=raising)))]
    if rank != VICTIM:
        if made:
            found += [_outcome(lambda: dist.all_reduce(torch.ones(2), group=made[0])) for _ in range(2)]
        assert _totals(1, 2)[-1] == 2  # the first group goes on
    return _ended(rank, num_ranks, folder, found)


def _same(results: list[Any], dead: set[int], *ranks: int) -> None:
    """Check who is dead, and that these ranks have the same results."""
    assert {rank for rank, result in enumerate(results) if result == DEAD} == dead
    assert all(results[rank] == results[ranks[0]] for rank in ranks), results


def _nths(last: int, *quick: int) -> list[Any]:
    """Return the calls at which the victim dies: a few in `make test`, every `STRIDE`-th in `make test-all`."""
    return [*quick, *(pytest.param(nth, marks=pytest.mark.slow) for nth in range(1, last, STRIDE) if nth not in quick)]


HOSTS = [(0, 0, 1, 1, 1), (0, 1, 1, 0, 1)]  # of the processes of the test


@pytest.mark.parametrize("nth", _nths(2000, 300, 900))
@pytest.mark.parametrize("mode", ["mask", "raise"])
def test_a_joiner_that_dies_leaves_the_others_in_step(tmp_path: Path, mode: str, nth: int) -> None:
    results = run_ranks(joiner_dies, 5, str(tmp_path), mode, nth, backend=None, dead={2, 3})
    _same(results, {2, 3}, 0, 1)


@pytest.mark.parametrize("nth", _nths(2600, 1500))
@pytest.mark.parametrize("placement", HOSTS)
def test_a_joiner_that_dies_leaves_the_others_on_all_hosts_in_step(
    tmp_path: Path, placement: tuple[int, ...], nth: int
) -> None:
    results = run_on_loopbacks(joiner_dies, placement, str(tmp_path), "mask", nth, backend=None, dead={2, 3})
    _same(results, {2, 3}, 0, 1)


@pytest.mark.parametrize("nth", _nths(900, 60, 400))
@pytest.mark.parametrize("mode", ["mask", "raise"])
def test_a_death_while_a_replacement_comes(tmp_path: Path, mode: str, nth: int) -> None:
    results = run_ranks(survivor_dies, 5, str(tmp_path), mode, nth, backend=None, dead={VICTIM, 3})
    _same(results, {VICTIM, 3}, 0, 2)


@pytest.mark.parametrize("nth", _nths(1300, 400))
@pytest.mark.parametrize("placement", HOSTS)
def test_a_death_while_a_replacement_comes_over_hosts(tmp_path: Path, placement: tuple[int, ...], nth: int) -> None:
    results = run_on_loopbacks(survivor_dies, placement, str(tmp_path), "mask", nth, backend=None, dead={VICTIM, 3})
    _same(results, {VICTIM, 3}, 0, 2)


@pytest.mark.parametrize("nth", _nths(900, 60, 400))
def test_a_death_while_a_further_group_is_made(tmp_path: Path, nth: int) -> None:
    _check(run_ranks(make_subgroup, 3, str(tmp_path), nth, backend=None, dead={VICTIM}), FAILED, LATE)


@pytest.mark.parametrize("nth", _nths(1300, 400))
@pytest.mark.parametrize("placement", [(0, 0, 1), (0, 1, 1)])
def test_a_death_while_a_further_group_over_hosts_is_made(tmp_path: Path, placement: tuple[int, ...], nth: int) -> None:
    found = run_on_loopbacks(make_subgroup, placement, str(tmp_path), nth, backend=None, dead={VICTIM})
    _check(found, FAILED, LATE)
