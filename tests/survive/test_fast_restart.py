"""A process that is replaced before anybody has noticed its death: one change of the view, seen alike by all."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from epee.errors import RankFailedError
from tests.harness import run_mortal

from . import stages
from .test_rejoin import start, total


def wait_for_the_end(folder: str) -> None:
    """Wait until the victim is gone: a newcomer that asks for the place of a living rank is refused."""
    stages.wait_for(folder, "dying")
    with contextlib.suppress(ProcessLookupError):
        victim = os.pidfd_open(int((Path(folder) / "victim").read_text()))
        assert select.select([victim], [], [], 30.0)[0], "the victim lives"
        os.close(victim)


def restarted(slot: int, num_processes: int, folder: str, mode: str) -> Any:
    """Process 3 takes rank 1's place; the others make no call between the death and the view with the replacement."""
    rank, joins = (1, True) if slot == 3 else (slot, False)
    if joins:
        wait_for_the_end(folder)
    group = start(rank, 3, folder, mode, joins)
    if not joins:
        assert total() == 3
    if slot == 1:
        (Path(folder) / "victim").write_text(str(os.getpid()))
        stages.reach(folder, "dying")
        os.kill(os.getpid(), signal.SIGKILL)
    if not joins:
        stages.wait_for(folder, "dying")
        deadline = time.monotonic() + 30
        while slot == 0 and 1 not in group.waiting_ranks():
            assert time.monotonic() < deadline
            time.sleep(0.001)
        if slot == 0:
            stages.reach(folder, "asked")
        stages.wait_for(folder, "asked")  # rank 2 might look only when rank 0 has taken it in: nobody waits then
        group.recover_ranks([1], 30.0)
    told: list[Any] = []
    while told.count(3) < 3 and len(told) < 20:
        try:
            told.append(total())
        except RankFailedError as exc:
            told.append(tuple(exc.ranks))
    stages.reach(folder, f"done{slot}")
    for other in (0, 2, 3):
        stages.wait_for(folder, f"done{other}")
    return told, group.active_ranks().tolist(), dist.get_world_size()


@pytest.mark.parametrize("mode", ["raise", "mask"])
def test_a_replacement_before_the_next_call(mode: str) -> None:
    results = run_mortal(restarted, 4, mode, dead={1}, timeout_s=60)
    assert results[0] == results[2]
    told, active, size = results[0]
    assert active == [1, 1, 1], results
    assert size == 3
    assert told in ([3, 3, 3], [(1,), 3, 3, 3]), told
    assert results[3][0] in ([3, 3, 3], told)
