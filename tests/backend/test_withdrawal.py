"""A call that is given up when its time-out has passed ends alike on all ranks, with everything as it was."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from epee.engine import engine, operation
from epee.engine.operation import Operation
from epee.engine.outbox import CELL_WORDS
from epee.engine.replication.links import LinkReader
from epee.engine.withdrawal import withdrawn
from epee.errors import CommTimeoutError, MismatchError
from epee.link.frames import PIECES, WRITE

from ..harness import run_ranks
from ..hosts import run_on_loopbacks
from ..survive import stages
from . import cases

LENGTHS = [4, 50_000, 500_000, 3_000_000]  # in the cell, in staging, in rounds with room for all, in rounds without
COLLECTIVES = ["all_reduce", "all_gather", "broadcast", "barrier", "reduce_scatter", "all_to_all", "gather"]
RACES = 60


def await_all(folder: str, stage: str, num_ranks: int) -> None:
    """Wait until the first so many ranks have reached a stage."""
    for rank in range(num_ranks):
        stages.wait_for(folder, f"{stage}{rank}")


def await_call_of(peer: int) -> None:
    """Wait until `peer` has put something into the group's first call."""
    peer_regions: Any = dist.group.WORLD._engine.members  # type: ignore[union-attr]
    deadline = time.monotonic() + 30
    while not peer_regions.words[peer][peer_regions.first_cell + CELL_WORDS]:
        assert time.monotonic() < deadline, f"rank {peer} does not call"
        time.sleep(0.002)


def call(op: str, length: int) -> tuple[list[torch.Tensor], Any]:
    """Return the outputs of a call, poisoned, and the call."""
    size = dist.get_world_size()
    x = torch.full((length,), 7.0)
    outs = [torch.full((length,), -7.0) for _ in range(size)]
    if op == "all_reduce":
        return [x], lambda: dist.all_reduce(x)
    if op == "broadcast":
        return [x], lambda: dist.broadcast(x, 0)
    if op == "barrier":
        return [], dist.barrier
    if op == "all_gather":
        return outs, lambda: dist.all_gather(outs, x)
    if op == "reduce_scatter":
        return outs[:1], lambda: dist.reduce_scatter(outs[0], [x] * size)
    if op == "all_to_all":
        return outs, lambda: dist.all_to_all(outs, [x] * size)
    is_root = dist.get_rank() == 1
    return outs if is_root else [], lambda: dist.gather(x, outs if is_root else None, 1)


def stalled(rank: int, num_ranks: int, folder: str, op: str, length: int) -> list[int]:
    """Rank 0 calls and gives up; rank 1 called with more timeouts and ends with it; rank 2 comes when all is over."""
    cases.init(rank, num_ranks, folder, op_timeout=0.3 if rank == 0 else 30.0, staging_bytes=1 << 20)
    outputs, run = call(op, length)
    before = [out.clone() for out in outputs]
    if rank == 0:
        await_call_of(1)  # else it would be silent, too
    if rank == 2:
        await_all(folder, "over", 2)
    with pytest.raises(CommTimeoutError) as caught:
        run()
    assert all(torch.equal(out, was) for out, was in zip(outputs, before, strict=True))
    told = str(caught.value)
    for word in (f"{op} (", f"rank={rank}", "seq=1", "the call is aborted", "waited"):
        assert word in told
    assert ("rank(s) 2 silent" in told) == (rank < 2), told
    assert ("rank(s) 0, 1 aborted the call" in told) == (rank == 2), told
    stages.reach(folder, f"over{rank}")
    await_all(folder, "over", num_ranks)
    y = torch.ones(1)
    for attempt in range(20):  # rank 0 has little timeouts
        try:
            dist.all_reduce(y)
            break
        except CommTimeoutError:
            assert attempt < 19
    assert y.item() == num_ranks
    return list(caught.value.ranks)


@pytest.mark.parametrize("op", COLLECTIVES)
def test_a_call_that_is_given_up_fails_everywhere(tmp_path: Path, op: str) -> None:
    assert run_ranks(stalled, 3, str(tmp_path), op, 4, backend=None) == [[2], [2], [0, 1]]


@pytest.mark.parametrize("length", LENGTHS[1:])
def test_so_does_one_of_many_bytes(tmp_path: Path, length: int) -> None:
    assert run_ranks(stalled, 3, str(tmp_path), "all_reduce", length, backend=None) == [[2], [2], [0, 1]]


def end_of_all_reduce(x: torch.Tensor, rank: int) -> str:
    """Sum, and return how it has ended; a call that is open when its time is over is repeated: it goes on."""
    while True:
        try:
            dist.all_reduce(x)
            assert x.unique().tolist() == [6.0]
            return "complete"
        except (CommTimeoutError, MismatchError) as error:
            if "CommTimeoutError" not in repr(error):  # who had no room for its part yet has refused the call with it
                raise
            assert x.unique().tolist() == [rank + 1.0]
            if "neither aborted nor complete" not in str(error):
                return "given up"


def race(rank: int, num_ranks: int, folder: str, length: int) -> list[str]:
    """The last rank calls just when the others' time-outs pass; nothing but the time decides."""
    timeout_s = 0.05
    cases.init(rank, num_ranks, folder, op_timeout=timeout_s, staging_bytes=1 << 20)
    dice = random.Random(rank)
    ends = []
    for i in range(RACES):
        stages.reach(folder, f"round{i}of{rank}")
        await_all(folder, f"round{i}of", num_ranks)
        x = torch.full((length,), rank + 1.0)
        if rank == num_ranks - 1:
            time.sleep(timeout_s + dice.uniform(-0.003, 0.01))
        ends.append(end_of_all_reduce(x, rank))
    stages.reach(folder, f"over{rank}")
    await_all(folder, "over", num_ranks)  # a process that has ended would give the last call another reason to fail
    return ends


@pytest.mark.parametrize("length", [4, 50_000, pytest.param(500_000, marks=pytest.mark.slow)])
def test_a_rank_that_comes_with_the_time_out_ends_as_the_others_do(tmp_path: Path, length: int) -> None:
    results = run_ranks(race, 3, str(tmp_path), length, backend=None, timeout_s=60)
    assert results[0] == results[1] == results[2]
    assert "given up" in results[0]


def slow_to_decide(rank: int, num_ranks: int, folder: str) -> list[str]:
    """Rank 2 aborts a call when the others have checked for that, and before they announce that they complete it."""
    group: Any = dist.group.WORLD
    group.set_timeout(timedelta(seconds=30))
    dist.barrier()
    x = torch.full((3,), float(rank))
    if rank == 2:
        give_up = Operation.withdraw

        def give_up_late(*args: Any) -> None:
            stages.reach(folder, "late")
            for other in range(2):
                stages.wait_for(folder, f"checked{other}")
            give_up(*args)

        Operation.withdraw = give_up_late  # type: ignore[method-assign]
        group.set_timeout(timedelta(seconds=0.05))
    else:

        def check_then_wait(*args: Any) -> list[int]:
            found = withdrawn(*args)
            stages.reach(folder, f"checked{rank}")
            stages.wait_for(folder, "open")
            time.sleep(0.5)  # the repetition waits meanwhile; the old one ended after its 0.05 s
            return found

        engine.withdrawn = operation.withdrawn = check_then_wait  # type: ignore[attr-defined]
        stages.wait_for(folder, "late")  # rank 2 finds none of the parts in time
    told = []
    try:
        dist.all_reduce(x)
    except CommTimeoutError as error:
        told.append("open" if "neither aborted nor complete" in str(error) else str(error))
        group.set_timeout(timedelta(seconds=30))
        stages.reach(folder, "open")
        dist.all_reduce(x)
    assert x.tolist() == [3.0] * 3
    engine.withdrawn = operation.withdrawn = withdrawn  # type: ignore[attr-defined]
    group.set_timeout(timedelta(seconds=30))
    dist.barrier()
    return told


@pytest.mark.parametrize(("run", "ranks"), [(run_ranks, 3), (run_on_loopbacks, (0, 0, 1))])
def test_the_repetition_of_an_open_call_waits_for_its_end_as_long_as_a_call(
    tmp_path: Path, run: Callable[..., Any], ranks: Any
) -> None:
    assert run(slow_to_decide, ranks, str(tmp_path), backend="epee") == [[], [], ["open"]]


def many(rank: int, num_ranks: int, folder: str) -> list[str]:
    """Calls that were issued together are given up one by one, on all ranks."""
    cases.init(rank, num_ranks, folder, op_timeout=0.3)
    xs = [torch.full((3,), float(i)) for i in range(70)]
    if rank == 2:
        await_all(folder, "over", 2)
    works = [dist.all_reduce(x, async_op=True) for x in xs]
    ends = []
    for i, (x, work) in enumerate(zip(xs, works, strict=True)):
        try:
            work.wait()
            assert x.tolist() == [3.0 * i] * 3
            ends.append("complete")
        except CommTimeoutError:
            assert x.tolist() == [float(i)] * 3
            ends.append("given up")
    stages.reach(folder, f"over{rank}")
    await_all(folder, "over", num_ranks)  # a process that has ended would give the last one another reason to fail
    return ends


def test_many_calls_are_given_up_in_order(tmp_path: Path) -> None:
    results = run_ranks(many, 3, str(tmp_path), backend=None, timeout_s=60)
    assert results[0] == results[1] == results[2] == ["given up"] * 70


def gets_data_late(rank: int, num_ranks: int, folder: str) -> list[str]:
    """Rank 1 aborts a call that rank 0 has completed, learns of that, and gets the words of rank 0 only later."""
    group: Any = dist.group.WORLD
    group.set_timeout(timedelta(seconds=30))
    dist.barrier()
    x, told = torch.full((3,), float(rank)), []
    if rank == 1:
        apply, give_up, lock = LinkReader.apply, Operation.withdraw, threading.RLock()
        held: list[tuple[Any, ...]] = []
        holds = True

        def apply_late(reader: LinkReader, frame: Any, payload: memoryview) -> None:
            with lock:
                if holds and frame[0] in (WRITE, PIECES):
                    held.append((reader, frame, memoryview(bytes(payload))))
                else:
                    apply(reader, frame, payload)

        def give_up_late(*args: Any) -> None:
            stages.wait_for(folder, "complete")
            give_up(*args)

        LinkReader.apply, Operation.withdraw = apply_late, give_up_late  # type: ignore[method-assign]
        group.set_timeout(timedelta(seconds=0.05))
        stages.reach(folder, "holds")
    else:
        stages.wait_for(folder, "holds")
    try:
        dist.all_reduce(x)
    except CommTimeoutError as error:
        told.append("open" if "neither aborted nor complete" in str(error) else str(error))
        with lock:
            holds = False
            for one in held:
                apply(*one)
        group.set_timeout(timedelta(seconds=30))
        dist.all_reduce(x)
    if rank == 0:
        stages.reach(folder, "complete")
    assert x.tolist() == [1.0] * 3
    group.set_timeout(timedelta(seconds=30))
    dist.barrier()
    return told


def test_a_call_that_another_rank_has_completed_is_open_until_its_data_has_come(tmp_path: Path) -> None:
    assert run_on_loopbacks(gets_data_late, (0, 1), str(tmp_path), backend="epee") == [[], ["open"]]
