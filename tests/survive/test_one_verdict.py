"""One call, one verdict: whatever comes out of a collective, a retry never pairs with another call.

Every rank makes steps 1 ... 5, step k adds 100 k + rank, and repeats a step until it has a result. Whatever happens to
it, the result must be that of the step, over those who are said to be in it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import epee
from epee.engine import engine as express
from epee.errors import EvictedError, NoQuorumError
from tests.harness import run_mortal, run_ranks

from . import stages

NUM_STEPS = 5
NO_QUORUM_S = 0.3
OP_TIMEOUT_S = 0.6
PATIENCE = timedelta(seconds=30)


def start(rank: int, num_ranks: int, folder: str, mode: str, on_stall: str, op_timeout: float) -> Any:
    """Make the group, with little timeouts for a quorum."""
    store = dist.FileStore(f"{folder}/store", num_ranks)
    options = epee.BackendOptions(fault_mode=mode, on_stall=on_stall, op_timeout=op_timeout)
    dist.init_process_group("epee", store=store, rank=rank, world_size=num_ranks, pg_options=options)
    group: Any = dist.group.WORLD
    runtime = group._engine.membership.runtime
    for holder in (runtime, runtime._loop.agent):
        holder.settings = holder.settings._replace(no_quorum_s=NO_QUORUM_S)
    return group


class Steps:
    """The steps of one rank and what came of each attempt."""

    def __init__(self, rank: int, group: Any) -> None:
        self.rank = rank
        self.group = group
        self.told: list[str] = []

    def make(self, k: int, call: Any = dist.all_reduce) -> torch.Tensor:
        """Make step `k`, again and again until it has a result, and check that."""
        until = time.monotonic() + 30.0
        while time.monotonic() < until:
            x = torch.tensor([100.0 * k + self.rank])
            try:
                call(x)
            except EvictedError:
                raise
            except RuntimeError as exc:
                self.told.append(type(exc).__name__)
                if isinstance(exc, NoQuorumError):
                    stages.reach(os.environ["STAGES"], f"raised{self.rank}")
                time.sleep(0.02)
                continue
            who = self.group.last_contributors()
            assert x.item() == sum(100.0 * k + src for src in who), f"step {k} of rank {self.rank}: {x.item()} by {who}"
            assert self.rank in who
            return x
        raise AssertionError(f"step {k} of rank {self.rank} never ends: {self.told[-5:]}")


def stop_until(folder: str, names: list[str]) -> None:
    """Stop this process; a shell sends it on when all these stages are reached."""
    paths = " && ".join(f"[ -e {folder}/stage-{name} ]" for name in names)
    wake = f"for i in $(seq 600); do if {paths}; then break; fi; sleep 0.05; done; kill -CONT {os.getpid()}"
    subprocess.Popen(["sh", "-c", wake])
    os.kill(os.getpid(), signal.SIGSTOP)


def without_a_quorum(rank: int, num_ranks: int, folder: str, mode: str) -> list[str]:
    """The half with the lowest slot is stopped until the others have been told that there is no quorum."""
    os.environ["STAGES"] = folder
    steps = Steps(rank, start(rank, num_ranks, folder, mode, "evict", OP_TIMEOUT_S))
    steps.make(1)
    if rank < num_ranks // 2:
        stop_until(folder, [f"raised{other}" for other in range(num_ranks // 2, num_ranks)])
    try:
        for k in range(2, NUM_STEPS + 1):
            steps.make(k)
            steps.group.set_timeout(PATIENCE)  # nobody else is to be voted out
    except EvictedError:  # a busy machine: it was too slow to answer when it woke up, and the policy is to vote it out
        assert rank < num_ranks // 2
    stages.meet(folder, "done", rank, range(num_ranks))
    return steps.told


@pytest.mark.parametrize("mode", ["mask", "raise"])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_call_that_ends_without_a_quorum_ends_alike_on_all(tmp_path: Path, num_ranks: int, mode: str) -> None:
    told = run_ranks(without_a_quorum, num_ranks, str(tmp_path), mode, backend=None, timeout_s=55)
    for rank in range(num_ranks // 2, num_ranks):
        assert "NoQuorumError" in told[rank], told


def with_a_death_and_a_held_gil(rank: int, num_ranks: int, folder: str, mode: str) -> list[str]:
    """Rank 2 puts its part of step 2 and dies; rank 0 holds the GIL, so rank 1 finds no quorum for a view."""
    os.environ["STAGES"] = folder
    steps = Steps(rank, start(rank, num_ranks, folder, mode, "error", 20.0))
    steps.make(1)
    if rank == 2:
        dist.all_reduce(torch.tensor([202.0]), async_op=True)
        stages.reach(folder, "put")
        stages.wait_for(folder, "held")  # else the agents may agree on its death first
        os.kill(os.getpid(), signal.SIGKILL)
    stages.wait_for(folder, "put")
    if rank == 0:
        stages.reach(folder, "held")
        ctypes.PyDLL(None).usleep(2_500_000)
    for k in range(2, NUM_STEPS + 1):
        steps.make(k)
    stages.meet(folder, "done", rank, (0, 1))
    return steps.told


@pytest.mark.parametrize("mode", ["mask", "raise"])
def test_a_death_while_a_survivor_holds_the_gil(mode: str) -> None:
    told = run_mortal(with_a_death_and_a_held_gil, 3, mode, dead={2}, timeout_s=55)
    assert "NoQuorumError" in told[1], told


class Watchdog(RuntimeError):
    """What a user's own time-out raises."""


def with_a_watchdog(rank: int, num_ranks: int, folder: str, name: str, length: int) -> list[str]:
    """A signal handler raises in rank 1's call before rank 0 comes to it; both repeat."""
    os.environ["STAGES"] = folder
    group = start(rank, num_ranks, folder, "raise", "error", 20.0)
    steps = Steps(rank, group)

    def call(x: torch.Tensor) -> None:
        wide = x.expand(length).clone()
        if name == "all_reduce":
            dist.all_reduce(wide)
        else:
            outs = [torch.empty(length) for _ in range(num_ranks)]
            dist.all_gather(outs, wide)
            wide = torch.stack(outs).sum(0)
        assert (wide == wide[0]).all()
        x.copy_(wide[:1])

    def ring(*_: Any) -> None:
        stages.reach(folder, "rung")
        raise Watchdog("the step takes too long")

    steps.make(1, call)
    if rank == 1:
        signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
    else:
        stages.wait_for(folder, "rung")
    for k in range(2, NUM_STEPS):
        steps.make(k, call)
    stages.meet(folder, "done", rank, range(num_ranks))
    return steps.told


@pytest.mark.parametrize("length", [1, 50_000, 3_000_000])
@pytest.mark.parametrize("name", ["all_reduce", "all_gather"])
def test_a_watchdog_that_raises_in_a_call(tmp_path: Path, name: str, length: int) -> None:
    told = run_ranks(with_a_watchdog, 2, str(tmp_path), name, length, backend=None, timeout_s=55)
    assert told[1][:1] == ["Watchdog"]


def timed_out_and_stopped(rank: int, num_ranks: int, folder: str) -> list[str]:
    """Rank 0 stops between its last look and the word that it completes: the others' call stays open and goes on."""
    os.environ["STAGES"] = folder
    group = start(rank, num_ranks, folder, "raise", "error", 30.0)
    engine = group._engine
    steps = Steps(rank, group)
    steps.make(1)
    if rank == 0:

        class Stops:
            """The own words; the store of COMPLETES waits until the others were told."""

            def __init__(self, words: Any) -> None:
                self.words = words

            def __getitem__(self, index: Any) -> Any:
                return self.words[index]

            def __setitem__(self, index: Any, value: Any) -> None:
                from epee.engine.outbox import COMPLETES

                if isinstance(value, int) and value == COMPLETES and not stopped:
                    stopped.append(index)
                    stages.reach(folder, "deciding")
                    for other in range(1, num_ranks):
                        stages.wait_for(folder, f"told{other}")
                self.words[index] = value

        stopped: list[Any] = []
        engine.members.own = Stops(engine.members.own)
        steps.make(2)
        assert stopped
    else:
        _interrupted_when(folder, "deciding", steps)
        steps.make(2)
    for k in range(3, NUM_STEPS + 1):
        steps.make(k)
    stages.meet(folder, "done", rank, range(num_ranks))
    return steps.told


def _interrupted_when(folder: str, stage: str, steps: Steps) -> None:
    """Have step 2 interrupted when its header is there and rank 0 is deciding; say so."""
    engine = steps.group._engine

    def interrupted(*_: Any) -> bool:
        stages.wait_for(folder, stage)
        raise Watchdog("the step takes too long")

    seq = engine.seq
    met, express._met = express._met, interrupted
    with pytest.raises(Watchdog):
        dist.all_reduce(torch.tensor([200.0 + steps.rank]))
    express._met = met
    assert engine.seq == seq + 1
    assert [op.seq for op in engine.unclaimed] == [seq + 1], "nobody knows yet how it ends"
    stages.reach(folder, f"told{steps.rank}")


def test_a_call_whose_end_is_open_goes_on_by_its_repetition(tmp_path: Path) -> None:
    told = run_ranks(timed_out_and_stopped, 2, str(tmp_path), backend=None, timeout_s=55)
    assert told == [[], []], "nobody else was told anything"
