"""Which time-out a call has: its own, the buffer's or group's, EPEE_TIMEOUT_S, torch's."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import epee
from epee.errors import CommTimeoutError
from tests.harness import run_ranks
from tests.survive import stages

BIRTH_S = 90.0  # how long the ranks wait for each other while the group is made
SHORT_S = 0.5
SIZES = {"num_experts": 4, "hidden": 64, "num_topk": 2, "max_tokens_per_rank": 4}


def begin(rank: int, num_ranks: int, folder: str, backend: str = "epee", **options: Any) -> Any:
    store = dist.FileStore(f"{folder}/store", num_ranks)
    kind: dict[str, Any] = {"pg_options": epee.BackendOptions(**options)} if backend == "epee" else {}
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=BIRTH_S), **kind
    )
    return dist.group.WORLD


def waited(work: Any) -> None:
    assert work is not None
    work.wait()


CALLS = {
    "collective": lambda group, made: dist.all_reduce(torch.ones(1)),
    "asynchronous": lambda group, made: waited(dist.all_reduce(torch.ones(1), async_op=True)),
    "barrier": lambda group, made: dist.barrier(),
    "send": lambda group, made: dist.send(torch.ones(1), 1),
    "recv": lambda group, made: dist.recv(torch.ones(1), 1),
    "irecv": lambda group, made: waited(dist.irecv(torch.ones(1), 1)),
    "subgroup": lambda group, made: dist.all_reduce(torch.ones(1), group=made),
}


def late(rank: int, num_ranks: int, folder: str, call: str) -> float:
    """Make a call that the other rank does not make; return how long it waits."""
    os.environ["EPEE_TIMEOUT_S"] = str(SHORT_S)
    group = begin(rank, num_ranks, folder)
    made = dist.new_group([0, 1]) if call == "subgroup" else None
    waits = 0.0
    if rank == 0:
        began = time.monotonic()
        with pytest.raises(CommTimeoutError):
            CALLS[call](group, made)
        waits = time.monotonic() - began
    stages.meet(folder, "over", rank, range(num_ranks))
    return waits


@pytest.mark.parametrize("call", CALLS)
def test_the_variable_reaches_every_call_of_a_group(call: str, tmp_path: Path) -> None:
    waits, _ = run_ranks(late, 2, str(tmp_path), call, backend=None)
    assert SHORT_S <= waits < BIRTH_S / 2


def in_force(rank: int, num_ranks: int, folder: str, variable: str, backend: str, op_timeout: float) -> list[float]:
    """Return the time-outs in force: of the group, a subgroup, one with a time-out of its own, buffers on the group."""
    if variable:
        os.environ["EPEE_TIMEOUT_S"] = variable
    group = begin(rank, num_ranks, folder, backend, **({"op_timeout": op_timeout} if op_timeout else {}))
    found = []
    if backend == "epee":
        longer = dist.new_group([0, 1], timeout=timedelta(seconds=2 * BIRTH_S))
        found = [made.timeout_s for made in (group, dist.new_group([0, 1]), longer)]
    for kind in (epee.Buffer, epee.LatencyBuffer):
        for own in ({}, {"timeout": 80.0}):
            with kind(group, **SIZES, **own) as buffer:
                found.append(buffer._timeout)
    dist.barrier()
    return found


@pytest.mark.parametrize(
    ("backend", "variable", "op_timeout", "found"),
    [
        ("epee", "", 0.0, [BIRTH_S, BIRTH_S, 2 * BIRTH_S, BIRTH_S, 80.0, BIRTH_S, 80.0]),
        ("epee", "70", 0.0, [70.0, 70.0, 70.0, 70.0, 80.0, 70.0, 80.0]),
        ("epee", "70", 75.0, [75.0, 70.0, 70.0, 75.0, 80.0, 75.0, 80.0]),
        ("gloo", "", 0.0, [BIRTH_S, 80.0, BIRTH_S, 80.0]),
        ("gloo", "70", 0.0, [70.0, 80.0, 70.0, 80.0]),
    ],
)
def test_the_first_that_is_given_counts(
    backend: str, variable: str, op_timeout: float, found: list[float], tmp_path: Path
) -> None:
    args = str(tmp_path), variable, backend, op_timeout
    assert run_ranks(in_force, 2, *args, backend=None) == [found, found]


def refused(rank: int, num_ranks: int, folder: str) -> str:
    if rank == 1:
        os.environ["EPEE_TIMEOUT_S"] = "soon"
    with pytest.raises(epee.EpeeError) as caught:
        begin(rank, num_ranks, folder)
    return f"{type(caught.value).__name__}: {caught.value}"


def test_a_bad_variable_is_named_on_all_ranks(tmp_path: Path) -> None:
    peer, culprit = run_ranks(refused, 2, str(tmp_path), backend=None)
    assert culprit.startswith("InvalidArgument: EPEE_TIMEOUT_S")
    assert peer.startswith("MismatchError")
    assert "EPEE_TIMEOUT_S" in peer


def own_time_out(rank: int, num_ranks: int, folder: str) -> bool:
    """Wait for less time than the call has; it goes on."""
    begin(rank, num_ranks, folder)
    work = dist.all_reduce(torch.ones(1), async_op=True) if rank == 0 else None
    if work is not None:
        with pytest.raises(CommTimeoutError, match="the call continues"):
            work.wait(timedelta(seconds=SHORT_S))
        stages.reach(folder, "waited")
        work.wait()
        return True
    stages.wait_for(folder, "waited")
    dist.all_reduce(torch.ones(1))
    return True


def test_the_time_out_of_a_wait_ends_the_wait_alone(tmp_path: Path) -> None:
    assert run_ranks(own_time_out, 2, str(tmp_path), backend=None) == [True, True]
