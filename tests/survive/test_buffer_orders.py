"""Losses beside calls that were given up, refused or interrupted: the ranks stay in step, and every wait ends."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from epee.errors import EpeeError, EvictedError, ResourceError
from tests.ep import moments
from tests.ep.moments import Known
from tests.harness import DEAD, run_mortal

from . import stages
from .buffer_rounds import arm, die, make_buffer, make_step, routing, rows, start

OK = "ok"


def tried(call: Callable[[], object]) -> str:
    """Make a call; return what it has ended with."""
    try:
        call()
    except (EpeeError, KeyboardInterrupt) as error:
        return type(error).__name__
    return OK


def begin(rank: int, num_ranks: int, folder: str, mode: str, timeout: float, on_stall: str = "error") -> Any:
    """Make a buffer that has worked once."""
    group = start(rank, num_ranks, folder, mode, on_stall=on_stall, op_timeout=timeout)
    buffer = make_buffer(group, timeout=timeout)
    make_step(buffer, 0, "rank")
    stages.meet(folder, "made", rank, range(num_ranks))
    return buffer


def dispatch(buffer: Any, timeout: float | None = None) -> str:
    """Make a dispatch; return what it has ended with."""
    idx, _ = routing(buffer.rank, buffer.num_ranks, 1)
    return tried(lambda: buffer.dispatch(rows(buffer.rank, 1), idx, timeout=timeout))


def until_ok(buffer: Any, times: int) -> list[str]:
    """Make a step until it succeeds, a few times at most."""
    told: list[str] = []
    while len(told) < times and (not told or told[-1] != OK):
        told.append(tried(lambda: make_step(buffer, 1, "rank")))
    return told


def await_epoch(buffer: Any, epoch: int) -> None:
    """Wait until this rank has heard of an epoch."""
    deadline, known = time.monotonic() + 40, Known(buffer)
    while known.newest < epoch:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def two_losses(rank: int, num_ranks: int, folder: str, mode: str) -> Any:
    """A call is given up; 2, which had announced it, dies, then 3, which had not. 0 hears of both apart, 1 together."""
    buffer = begin(rank, num_ranks, folder, mode, 6.0)
    if rank == 3:
        stages.wait_for(folder, "goes on")
        time.sleep(0.5)
        die()
    told = [dispatch(buffer, timeout=1.0)]
    stages.meet(folder, "gave up", rank, range(3))
    if rank == 2:
        die()
    await_epoch(buffer, 2)
    if rank == 0:
        threading.Timer(0.5, stages.reach, (folder, "goes on")).start()
    else:
        stages.wait_for(folder, "goes on")
        await_epoch(buffer, 3)
    told += until_ok(buffer, 5)
    stages.meet(folder, "end", rank, (0, 1))
    return told


@pytest.mark.parametrize("mode", ["mask", "raise"])
def test_two_losses_behind_a_call_that_was_given_up(mode: str) -> None:
    first, second, *_ = run_mortal(two_losses, 4, mode, dead={2, 3})
    assert first[0] == second[0] == "CommTimeoutError"
    assert first[-1] == second[-1] == OK, (first, second)


def evicted(rank: int, num_ranks: int, folder: str) -> Any:
    """A call is given up by all; 0 makes the next one; 2 is voted out for what it did elsewhere; then 1 calls."""
    buffer = begin(rank, num_ranks, folder, "mask", 6.0)
    if rank == 2:
        stages.meet(folder, "gave up", 2, range(3))
    told = [dispatch(buffer, timeout=1.0)]
    if rank != 2:
        stages.meet(folder, "gave up", rank, range(3))
    stages.meet(folder, "all", rank, range(3))
    known = Known(buffer)
    if rank == 2:
        while tried(known.check) == OK:
            time.sleep(0.01)
        with pytest.raises(EvictedError):
            known.check()
    else:
        if rank == 0:

            def accuse() -> None:
                time.sleep(0.5)
                while known.newest < 2:
                    known.runtime.accuse(2, 12345, 1, known.epoch)
                    time.sleep(0.1)

            threading.Thread(target=accuse).start()
        else:
            await_epoch(buffer, 2)
            time.sleep(0.3)
        told += until_ok(buffer, 4)
    stages.meet(folder, "end", rank, range(3))
    return told


def test_an_eviction_behind_a_call_that_was_given_up() -> None:
    first, second, _ = run_mortal(evicted, 3, dead=set())
    assert first[-1] == second[-1] == OK, (first, second)


def late(rank: int, num_ranks: int, folder: str) -> Any:
    """2 has died, 3 is silent until it is voted out; then 1 comes a little later than 0, whose time was over then."""
    buffer = begin(rank, num_ranks, folder, "mask", 3.0, "evict")
    if rank == 2:
        die()
    await_epoch(buffer, 2)
    if rank == 3:
        time.sleep(15)
        return tried(lambda: make_step(buffer, 1, "rank"))
    if rank == 1:
        take = buffer._path.arenas.take
        buffer._path.arenas.take = lambda arena: (time.sleep(0.4), take(arena))[1]
    return tried(lambda: make_step(buffer, 1, "rank"))


def test_nobody_is_voted_out_because_others_kept_the_ranks_waiting() -> None:
    assert run_mortal(late, 5, dead={2}) == [OK, OK, DEAD, "EvictedError", OK]


def stands_still(rank: int, num_ranks: int, folder: str, is_interrupted: bool) -> Any:
    """3 stands still behind its own row, 2 dies with its rows out: 0 and 1 cannot know how the call ends."""
    buffer = begin(rank, num_ranks, folder, "mask", 2.0)
    if rank == 3:

        def late() -> None:
            stages.wait_for(folder, "through-0")
            stages.wait_for(folder, "through-1")

        moments.before_its_row(buffer, late)
    if rank == 2:
        arm(buffer, "dispatch: rows", lambda: (time.sleep(0.5), die()))
    if is_interrupted and rank == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    busy_s = -time.process_time()
    told = [dispatch(buffer)]
    if is_interrupted and rank == 0:
        told.append(dispatch(buffer))
    busy_s += time.process_time()
    stages.reach(folder, f"through-{rank}")
    stages.meet(folder, "end", rank, (0, 1, 3))
    return told, busy_s < 1.5


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_a_call_that_stays_open_beside_a_death_ends_with_its_time(is_interrupted: bool) -> None:
    first, second, *_ = run_mortal(stands_still, 4, is_interrupted, dead={2})
    assert first == (["KeyboardInterrupt", "CommTimeoutError"] if is_interrupted else ["CommTimeoutError"], True)
    assert second == (["CommTimeoutError"], True)


def interrupted(rank: int, num_ranks: int, folder: str) -> Any:
    """2 dies before its combine, which goes on among 0 and 1; 0 is interrupted when it has all rows."""
    buffer = begin(rank, num_ranks, folder, "mask", 10.0)
    idx, _ = routing(rank, num_ranks, 1)
    got = buffer.dispatch(rows(rank, 1), idx)
    if rank == 2:
        time.sleep(1.0)
        die()
    if rank == 0:

        def interrupt() -> None:
            raise KeyboardInterrupt

        moments.when_it_has_all_rows(buffer, interrupt)
    told = [tried(lambda: buffer.combine(got.x, got.handle))]
    stages.meet(folder, "combined", rank, (0, 1))
    told.append(tried(lambda: make_step(buffer, 2, "rank")))
    stages.meet(folder, "end", rank, (0, 1))  # 1 would go on alone if 0 had gone before 1 begins its call
    return told


def test_a_combine_among_those_who_stay_that_one_has_no_result_of() -> None:
    first, second, _ = run_mortal(interrupted, 3, dead={2})
    assert first == ["KeyboardInterrupt", "InvalidState"]
    assert second == [OK, "MismatchError"]


def fails_once(owner: Any, name: str, before: Callable[[], object]) -> None:
    """Let a method raise once, behind `before`."""
    works = getattr(owner, name)

    def fails(*args: object, **kwargs: object) -> None:
        setattr(owner, name, works)
        before()
        raise ResourceError("nothing is left")

    setattr(owner, name, fails)


def refuses_twice(rank: int, num_ranks: int, folder: str, mode: str) -> Any:
    """Rank 0 refuses two calls; 2 dies before it makes the first one."""
    buffer = begin(rank, num_ranks, folder, mode, 8.0)
    if rank == 2:
        time.sleep(1.5)
        die()
    timeouts = (-1.0, -1.0, None, None) if rank == 0 else (None,) * 4
    told = [dispatch(buffer, timeout=timeout) for timeout in timeouts]
    stages.meet(folder, "end", rank, (0, 1))
    return told, buffer._exchange.seq


@pytest.mark.parametrize("mode", ["mask", "raise"])
def test_two_refusals_beside_a_death(mode: str) -> None:
    first, second, _ = run_mortal(refuses_twice, 3, mode, dead={2})
    assert first == (["InvalidArgument", "InvalidArgument", OK, OK], second[1])
    assert second[0] == ["RankFailedError" if mode == "raise" else "MismatchError", "MismatchError", OK, OK]


def fails_beside_a_loss(rank: int, num_ranks: int, folder: str, num_refused: int, then_sync: bool) -> Any:
    """Rank 0 raises errors of its own in a call that a death fails everywhere, and maybe in one before it."""
    buffer = begin(rank, num_ranks, folder, "raise", 8.0)
    if rank == 2:
        stages.wait_for(folder, "die")
        die()
    told = [dispatch(buffer, timeout=-1.0 if rank == 0 else None) for _ in range(num_refused if rank == 0 else 0)]
    if rank == 0:
        fails_once(buffer._path, "dispatch", lambda: (stages.reach(folder, "die"), await_epoch(buffer, 2)))
    told += [dispatch(buffer) for _ in range(1 if rank == 0 else 1 + num_refused)]
    if then_sync:
        buffer.sync(torch.tensor([1, 1, 0], dtype=torch.int32))
    told += [dispatch(buffer) for _ in range(2)]
    stages.meet(folder, "end", rank, (0, 1))
    return told, buffer._exchange.seq


@pytest.mark.parametrize(("num_refused", "then_sync"), [(0, False), (0, True), (1, False)])
def test_one_error_is_raised_for_each_number(num_refused: int, then_sync: bool) -> None:
    first, second, _ = run_mortal(fails_beside_a_loss, 3, num_refused, then_sync, dead={2})
    assert first == (["InvalidArgument"] * num_refused + ["ResourceError", OK, OK], second[1])
    assert second[0][-2:] == [OK, OK]
    assert len(second[0]) == num_refused + 3
    assert OK not in second[0][:-2]
