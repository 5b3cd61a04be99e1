"""Mooncake's names show a death at once: mask, size and epoch, without a call; calls on both sides of it are one."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from epee.compat.mooncake import pg
from epee.errors import InvalidArgument, MismatchError
from tests.harness import DEAD, run_mortal
from tests.survive import stages

WIDTH = 5  # elements of a row: two of them are not three of others
LONG_S = 30.0  # the machine may be busy; a second is what is promised


def _start(rank: int, num_ranks: int, folder: str, timeout_us: int = 60_000_000) -> tuple[Any, torch.Tensor]:
    pg.set_collective_timeout_us(timeout_us)
    active = torch.ones(num_ranks, dtype=torch.int32)
    store = dist.FileStore(str(Path(folder) / "store"), -1)
    options = pg.MooncakeBackendOptions(active)
    dist.init_process_group("mooncake-cpu", store=store, rank=rank, world_size=num_ranks, pg_options=options)
    dist.barrier()
    return dist.group.WORLD, active


def _await(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _idle(rank: int, num_ranks: int, folder: str, victim: int) -> Any:
    group, active = _start(rank, num_ranks, folder)
    stages.meet(folder, "through", rank, range(num_ranks))
    if rank == victim:
        _die()
    expected = [int(other != victim) for other in range(num_ranks)]
    _await(lambda: pg.get_current_epoch(group) == 2)
    assert active.tolist() == pg.get_active_ranks(group).tolist() == expected
    before = group.active_ranks().tolist(), group.epoch
    size = dist.get_world_size()
    dist.all_reduce(torch.ones(1))
    after = group.active_ranks().tolist(), group.epoch
    assert pg.get_active_ranks(group) is active
    assert active.tolist() == expected
    return size, before, after, dist.get_world_size()


@pytest.mark.parametrize(("victim", "size"), [(3, 3), (1, 4)])
def test_a_death_shows_without_a_call_and_epees_own_names_change_with_the_call(victim: int, size: int) -> None:
    after = [int(rank != victim) for rank in range(4)]
    results = run_mortal(_idle, 4, victim, dead={victim}, timeout_s=60)
    expected = (size, ([1, 1, 1, 1], 1), (after, 2), size)
    assert results == [DEAD if rank == victim else expected for rank in range(4)]


def _kept(rank: int, num_ranks: int, folder: str) -> Any:
    """With `auto_deactivate_on_failure=False` the program puts the dead rank out; the epoch shows the death."""
    store = dist.FileStore(str(Path(folder) / "store"), -1)
    options = pg.MooncakeBackendOptions(num_ranks, False, False, False)
    dist.init_process_group("mooncake-cpu", store=store, rank=rank, world_size=num_ranks, pg_options=options)
    group: Any = dist.group.WORLD
    dist.barrier()
    if rank == 2:
        _die()
    _await(lambda: pg.get_current_epoch(group) == 2)
    shown = [(pg.get_active_ranks(group).tolist(), dist.get_world_size())]
    dist.all_reduce(torch.ones(1))
    pg.deactivate_ranks(group, [2])
    shown.append((pg.get_active_ranks(group).tolist(), dist.get_world_size()))
    return shown


def test_a_mask_that_the_program_changes_itself_keeps_its_one() -> None:
    shown = [([1, 1, 1], 3), ([1, 1, 0], 2)]
    assert run_mortal(_kept, 3, dead={2}, timeout_s=60) == [shown, shown, DEAD]


def _message(rank: int, num_ranks: int, folder: str, is_send: bool) -> Any:
    group, active = _start(rank, num_ranks, folder)
    if rank == 1:
        stages.wait_for(folder, "waiting")
        _die()
    if rank == 2:
        stages.wait_for(folder, "seen")
        return None
    tensor = torch.ones(1 << 22)
    work: Any = dist.isend(tensor, 1) if is_send else dist.irecv(tensor, 1)
    stages.reach(folder, "waiting")
    work.wait()
    seen = active.tolist(), dist.get_world_size(), pg.get_current_epoch(group)
    assert not pg.get_local_success(work)
    stages.reach(folder, "seen")
    return seen


@pytest.mark.parametrize("is_send", [True, False], ids=["send", "recv"])
def test_a_message_that_fails_shows_the_death_before_its_wait_returns(is_send: bool) -> None:
    assert run_mortal(_message, 3, is_send, dead={1}, timeout_s=60)[0] == ([1, 0, 1], 3, 2)


def _row(rank: int) -> torch.Tensor:
    return torch.arange(float(WIDTH)) + 10 * rank


def _every_call(rank: int, size: int, present: list[int]) -> list[Any]:
    """Make every collective that has one entry per rank with `size` entries; return what came of it."""
    rows = [_row(src) if src in present else torch.zeros(WIDTH) for src in range(size)]
    found: list[Any] = []
    outs = [torch.full((WIDTH,), -7.0) for _ in range(size)]
    dist.all_gather(outs, _row(rank))
    found.append(torch.stack(outs).tolist())
    out = torch.full((size, WIDTH), -7.0)
    dist.all_gather_into_tensor(out, _row(rank))
    found.append(out.tolist())
    both = [[torch.full((WIDTH,), -7.0), torch.full((1,), -7.0)] for _ in range(size)]
    dist.all_gather_coalesced(both, [_row(rank), torch.full((1,), float(rank))])
    found.append([pair[0].tolist() for pair in both])
    outs = [torch.full((WIDTH,), -7.0) for _ in range(size)]
    dist.all_to_all(outs, [_row(rank)] * size)
    found.append(torch.stack(outs).tolist())
    out = torch.full((size * WIDTH,), -7.0)
    dist.all_to_all_single(out, torch.cat([_row(rank)] * size))
    found.append(out.view(size, -1).tolist())
    outs = [torch.full((WIDTH,), -7.0) for _ in range(size)]
    dist.gather(_row(rank), outs if rank == 0 else None, dst=0)
    if rank == 0:
        found.append(torch.stack(outs).tolist())
    assert found == [torch.stack(rows).tolist()] * len(found)
    total = torch.stack([_row(src) for src in present]).sum(0)
    out = torch.full((WIDTH,), -7.0)
    dist.reduce_scatter(out, [_row(rank)] * size)
    assert torch.equal(out, total)
    dist.reduce_scatter_tensor(out, torch.cat([_row(rank)] * size))
    assert torch.equal(out, total)
    dist.scatter(out, [_row(0)] * size if rank == 0 else None, src=0)
    assert torch.equal(out, _row(0))
    return found


def _both_sides(rank: int, num_ranks: int, folder: str) -> None:
    """Rank 0 gives lists of the size before the death, rank 1 of the size after it; then the other way round."""
    group, active = _start(rank, num_ranks, folder)
    stages.meet(folder, "through", rank, range(num_ranks))
    if rank == 2:
        _die()
    _await(lambda: active.tolist() == [1, 1, 0])
    assert group.active_ranks().tolist() == [1, 1, 1]
    for sizes in ((3, 2), (2, 3), (2, 2), (3, 3)):
        _every_call(rank, sizes[rank], [0, 1])


def test_calls_on_both_sides_of_a_death_are_one_call() -> None:
    run_mortal(_both_sides, 3, dead={2}, timeout_s=60)


def _asked_before(rank: int, num_ranks: int, folder: str) -> list[list[float]]:
    """Both have asked for the size before the death showed, and split tensors that could be split otherwise as well."""
    _, active = _start(rank, num_ranks, folder)
    size = dist.get_world_size()
    stages.meet(folder, "through", rank, range(num_ranks))
    if rank == 2:
        _die()
    _await(lambda: active.tolist() == [1, 1, 0])
    found = []
    for _ in range(2):  # the size may be older than the last call
        out = torch.full((2 * size,), -7.0)
        dist.all_to_all_single(out, torch.arange(2.0 * size) + 10 * rank)
        found.append(out.tolist())
    return found


def test_a_tensor_is_split_for_the_size_that_the_program_was_given_last() -> None:
    expected = [[[2.0 * rank, 2.0 * rank + 1, 2.0 * rank + 10, 2.0 * rank + 11, 0.0, 0.0]] * 2 for rank in range(2)]
    assert run_mortal(_asked_before, 3, dead={2}, timeout_s=60) == [*expected, DEAD]


def _at_any_moment(rank: int, num_ranks: int, folder: str, delay_s: float) -> int:
    """Ranks ask for the size and call, again and again, while the last one dies; return after how many calls."""
    _start(rank, num_ranks, folder)
    if rank == num_ranks - 1:
        threading.Timer(delay_s, _die).start()
    num_after = num_calls = 0
    while num_after < 20 or rank == num_ranks - 1:
        size = dist.get_world_size()
        outs = [torch.full((WIDTH,), -7.0) for _ in range(size)]
        dist.all_gather(outs, _row(rank))
        split = torch.full((2 * size,), -7.0)
        dist.all_to_all_single(split, torch.full((2 * size,), float(rank)))
        for src in range(size):
            expected = [_row(src).tolist(), [0.0] * WIDTH] if src == num_ranks - 1 else [_row(src).tolist()]
            assert outs[src].tolist() in expected
            assert split[2 * src : 2 * src + 2].tolist() in ([float(src)] * 2, [0.0] * 2)
        num_calls += 1
        num_after += size < num_ranks
    return num_calls


@pytest.mark.parametrize("delay_s", [0.0, 0.02, 0.05, 0.1])
def test_a_death_at_any_moment_fits_the_lists_that_all_ranks_give(delay_s: float) -> None:
    *_, last = run_mortal(_at_any_moment, 4, delay_s, dead={3}, timeout_s=60)
    assert last == DEAD


def _gone_before(rank: int, num_ranks: int, folder: str) -> list[float]:
    """Rank 2 contributes to an all_gather and dies; rank 1 calls later, with a list that has no place for it."""
    _, active = _start(rank, num_ranks, folder)
    outs = [torch.full((WIDTH,), -7.0) for _ in range(2 if rank == 1 else 3)]
    if rank == 1:
        _await(lambda: active.tolist() == [1, 1, 0])
    work: Any = dist.all_gather(outs, _row(rank), async_op=True)
    if rank == 2:
        time.sleep(0.2)  # others read its part as it stands
        _die()
    work.wait()
    dist.barrier()
    return [float(out[0]) for out in outs]


def test_what_a_rank_contributed_before_its_death_is_dropped_where_there_is_no_place_for_it() -> None:
    zero, one, _ = run_mortal(_gone_before, 3, dead={2}, timeout_s=60)
    assert zero[:2] == one == [0.0, 10.0]
    assert zero[2] in (0.0, 20.0)


def _early_list(rank: int, num_ranks: int, folder: str, delay_s: float) -> list[list[float]]:
    """A program knows of a death from elsewhere and gives a shorter list at once; the call waits until all agree."""
    _start(rank, num_ranks, folder)
    if rank == 3:
        (Path(folder) / "victim").write_text(str(os.getpid()))
        stages.reach(folder, "named")
        time.sleep(LONG_S)
    stages.wait_for(folder, "named")
    if rank == 0:
        victim = int((Path(folder) / "victim").read_text())
        threading.Timer(delay_s, os.kill, (victim, signal.SIGKILL)).start()
        stages.reach(folder, "killed")
    stages.wait_for(folder, "killed")
    outs = [torch.full((WIDTH,), -7.0) for _ in range(3)]
    dist.all_gather(outs, _row(rank))
    both = [[torch.full((WIDTH,), -7.0)] for _ in range(3)]
    dist.all_gather_coalesced(both, [_row(rank)])
    assert torch.equal(torch.stack(outs), torch.cat([torch.stack(pair) for pair in both]))
    return torch.stack(outs).tolist()


@pytest.mark.parametrize("delay_s", [0.0, 2.0], ids=["dead", "ending"])
def test_a_list_as_long_as_the_group_without_the_dead_rank_is_no_error_before_the_members_agree(
    delay_s: float,
) -> None:
    rows = torch.stack([_row(rank) for rank in range(3)]).tolist()
    assert run_mortal(_early_list, 4, delay_s, dead={3}, timeout_s=60) == [rows, rows, rows, DEAD]


def _too_short(rank: int, num_ranks: int, folder: str) -> None:
    _start(rank, num_ranks, folder, 1_000_000)
    for num_entries in (2, 4):
        with pytest.raises(InvalidArgument, match=rf"one tensor per rank \(3\), got {num_entries}"):
            dist.all_gather([torch.zeros(WIDTH) for _ in range(num_entries)], _row(rank))
    stages.meet(folder, "lists", rank, range(num_ranks))  # who waits as long as a call does is late for the next one
    with pytest.raises(InvalidArgument, match="must have 15 elements, got 10"):
        dist.all_gather_into_tensor(torch.zeros(10), _row(rank))
    dist.group.WORLD.set_timeout(timedelta(seconds=LONG_S))  # type: ignore[union-attr]
    _every_call(rank, 3, [0, 1, 2])


def test_a_list_of_another_length_stays_an_error_while_all_live() -> None:
    run_mortal(_too_short, 3, dead=set(), timeout_s=60)


def _one_too_short(rank: int, num_ranks: int, folder: str) -> None:
    _start(rank, num_ranks, folder, 3_000_000)
    kind = InvalidArgument if rank == 0 else MismatchError  # the peers get the reason before their own time-out
    with pytest.raises(kind, match=r"one tensor per rank \(3\), got 2"):
        dist.all_gather([torch.zeros(WIDTH) for _ in range(2 if rank == 0 else 3)], _row(rank))
    _every_call(rank, 3, [0, 1, 2])


def test_a_list_of_one_rank_that_is_too_short_is_named_to_the_others() -> None:
    run_mortal(_one_too_short, 3, dead=set(), timeout_s=60)
