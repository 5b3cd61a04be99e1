"""A rank that is out of descriptors when a process joins: nobody is taken for dead, and the group works again.

The replacement of rank 2 is taken in while rank 1 can open nothing. Its calls say so, its agent goes on, all processes
are in one view; and when it has descriptors again the next call takes the newcomer in.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist

import epee
from epee.engine.entry import NEWS
from epee.errors import ResourceError
from tests import shortage
from tests.harness import DEAD, run_mortal

from . import stages

VICTIM, SHORT, NEWCOMER = 2, 1, 3


def start(rank: int, folder: str, joins: bool = False) -> Any:
    options = epee.BackendOptions(fault_mode="mask", op_timeout=20.0, is_extension=joins)
    store = dist.FileStore(f"{folder}/store", 3)
    dist.init_process_group("epee", store=store, rank=rank, world_size=3, pg_options=options)
    return dist.group.WORLD


def total(rank: int) -> float:
    x = torch.tensor([10.0**rank])
    dist.all_reduce(x)
    return float(x)


def until(condition: Any, what: str) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


def replaced(slot: int, num_processes: int, folder: str) -> Any:
    rank = VICTIM if slot == NEWCOMER else slot
    if slot == NEWCOMER:
        stages.wait_for(folder, "short")
        group = start(rank, folder, joins=True)
    else:
        group = start(rank, folder)
        assert total(rank) == 111
    if slot == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    runtime = group._engine.membership.runtime
    errors: list[str] = []
    if slot < VICTIM:
        while total(rank) != 11:
            pass
    if slot == 0:
        until(lambda: group.waiting_ranks() == (VICTIM,), "nobody asks to join")
        group.recover_ranks([VICTIM])
    if slot == SHORT:
        with shortage.descriptors(0):
            _say_short(folder)
            until(lambda: _newcomer(runtime.view()) > 1, "the agent has not heard of the newcomer")
            until(lambda: group._engine.flags & NEWS, "the group has not heard of the newcomer")
            for _ in range(3):
                try:
                    total(rank)
                except ResourceError as exc:
                    errors.append(str(exc))
            deadline = time.monotonic() + 1.5  # longer than the agent waits before it tries again
            while time.monotonic() < deadline:
                assert runtime.error is None
                time.sleep(0.01)
            view = runtime.view()
    if slot != SHORT:
        view = runtime.view()
    sums = [total(rank) for _ in range(4)]
    seen = [(member.slot, member.incarnation) for member in view.members]
    health = runtime.health(VICTIM)
    dist.barrier()
    return view.epoch, seen, errors, sums, group.epoch, health


def _newcomer(view: Any) -> int:
    """Return the epoch in which the newcomer has joined; later than 3 if an agent was slow, and the join put off."""
    return {member.slot: member.incarnation for member in view.members}.get(VICTIM, 0)


def _say_short(folder: str) -> None:
    """Reach a stage without a descriptor."""
    os.mkdir(f"{folder}/stage-short")


def test_a_rank_that_is_out_of_descriptors_takes_nobody_for_dead_and_works_again() -> None:
    results = run_mortal(replaced, 4, dead={VICTIM}, timeout_s=60)
    assert results[VICTIM] == DEAD
    views = {(epoch, tuple(seen)) for epoch, seen, *_ in (results[0], results[SHORT], results[NEWCOMER])}
    joined = results[0][0]
    assert joined >= 3
    assert views == {(joined, ((0, 1), (1, 1), (2, joined)))}, "one view, with the newcomer, while rank 1 was short"
    errors = results[SHORT][2]
    assert len(errors) == 3
    for error in errors:
        assert "rank 2 (process" in error
        assert f"has joined in epoch {joined}," in error
        assert "Too many open files" in error
    for slot in (0, SHORT, NEWCOMER):
        _, _, _, sums, epoch, health = results[slot]
        assert sums == [111.0] * 4
        assert epoch == joined
        assert health in ("running", "busy"), "the agent watches it now"
