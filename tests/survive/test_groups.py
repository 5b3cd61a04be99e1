"""Several groups of one job, calls in flight, training on top: a death reaches them all alike."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import epee
from epee.errors import PeerError, RankFailedError
from tests.harness import run_mortal

from . import stages


def start(rank: int, num_ranks: int, folder: str, mode: str) -> Any:
    store = dist.FileStore(str(Path(folder) / "store"), num_ranks)
    options = epee.BackendOptions(fault_mode=mode, op_timeout=20.0)
    dist.init_process_group("epee", store=store, rank=rank, world_size=num_ranks, pg_options=options)
    return dist.group.WORLD


def total(group: Any = None) -> int:
    x = torch.ones(1, dtype=torch.int64)
    dist.all_reduce(x, group=group)
    return int(x)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def sub_groups(rank: int, num_ranks: int, folder: str) -> Any:
    start(rank, num_ranks, folder, "raise")
    mixed = dist.new_group([0, 1, 2], backend="epee")
    apart = dist.new_group([0, 3], backend="epee")
    pair = dist.new_group([1, 2], backend="epee")
    if rank != 3:
        assert total(mixed) == 3
    if rank == 2:
        die()
    seen: list[Any] = []
    if rank in (0, 1):
        with pytest.raises(RankFailedError) as caught:
            total(mixed)
        seen.append((caught.value.ranks, caught.value.seq))
        seen.append(total(mixed))
    if rank in (0, 3):
        seen.append(total(apart))  # it has lost nobody
    if rank == 1:
        with pytest.raises(RankFailedError):
            total(pair)
        seen.append(total(pair))  # alone
    with pytest.raises(RankFailedError):
        total()
    seen.append(total())
    later = dist.new_group([0, 1], backend="epee")  # all survivors make it, rank 2 is not in it
    if rank < 2:
        seen.append(total(later))
    return seen


def test_every_group_meets_the_loss_in_its_own_calls() -> None:
    zero, one, _, three = run_mortal(sub_groups, 4, dead={2}, timeout_s=60)
    assert zero == [((2,), 2), 2, 2, 3, 2]
    assert one == [((2,), 2), 2, 1, 3, 2]
    assert three == [2, 3]


def in_flight(rank: int, num_ranks: int, folder: str, mode: str, num_put: int) -> Any:
    """Thirty calls are issued at once; the victim has issued only `num_put` of them when it dies."""
    start(rank, num_ranks, folder, mode)
    assert total() == num_ranks
    count = num_put if rank == 1 else 30
    tensors = [torch.full((40_000 if i % 7 == 0 else 5,), i + rank + 1, dtype=torch.int64) for i in range(count)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    if rank == 1:
        stages.reach(folder, "issued")
        die()
    stages.wait_for(folder, "issued")
    outcomes = []
    for i, (work, tensor) in enumerate(zip(works, tensors, strict=True)):
        try:
            work.wait()
            outcomes.append(("ok", sorted(set(tensor.tolist()))))
        except PeerError as exc:
            outcomes.append((type(exc).__name__, (exc.ranks, exc.epoch)))
            assert tensor.unique().tolist() == [i + rank + 1]
    return outcomes


@pytest.mark.parametrize("mode", ["raise", "mask"])
def test_calls_in_flight_divide_at_the_same_place(mode: str) -> None:
    first, _, third = run_mortal(in_flight, 3, mode, 11, dead={1}, timeout_s=60)
    assert first == third
    full = [3 * i + 6 for i in range(30)]
    rest = [2 * i + 4 for i in range(30)]
    ended = [i for i, (status, _) in enumerate(first) if status != "ok"]
    assert bool(ended) == (mode == "raise")
    divide = next(i for i, outcome in enumerate(first) if outcome != ("ok", [full[i]]))
    assert divide <= 11
    for i in range(divide, 30):
        assert first[i] == ("ok", [rest[i]]) or (i in ended and first[i] == ("RankFailedError", ((1,), 2))), (
            i,
            first[i],
        )


def train(rank: int, num_ranks: int, folder: str) -> Any:
    start(rank, num_ranks, folder, "mask")
    torch.manual_seed(7)
    model = DistributedDataParallel(torch.nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        if rank == 2 and step == 3:
            die()
        optimizer.zero_grad()
        torch.manual_seed(100 * step + rank)
        model(torch.randn(8, 16)).square().sum().backward()
        optimizer.step()
    return model.module.weight.detach().flatten()[:8].tolist()


def test_data_parallel_training_goes_on_and_replicas_stay_equal() -> None:
    results = run_mortal(train, 4, dead={2}, timeout_s=80)
    assert results[0] == results[1] == results[3]


def objects(rank: int, num_ranks: int, folder: str, victim: int) -> Any:
    """One of three ranks is lost; torch reads the objects itself, from what a tensor collective has left."""
    start(rank, num_ranks, folder, "mask")
    assert total() == 3
    if rank == victim:
        die()
    while total() != 2:
        pass
    found: list[str] = []
    for call in (
        lambda: dist.all_gather_object([None] * 3, rank),
        lambda: dist.gather_object(rank, [None] * 3 if rank == 1 else None, dst=1),
        lambda: dist.broadcast_object_list([rank], src=victim),
        lambda: dist.scatter_object_list([None], [0, 1, 2] if rank == victim else None, src=victim),
    ):
        try:
            call()
            found.append("")
        except Exception as error:  # noqa: BLE001 - the test shows it, whatever it is
            found.append(type(error).__name__)
        assert total() == 2
    items = [rank]
    dist.broadcast_object_list(items, src=1)
    return found, items


@pytest.mark.parametrize("victim", [0, 2])
def test_object_collectives_with_a_lost_rank_raise_alike_and_the_group_goes_on(victim: int) -> None:
    results = run_mortal(objects, 3, victim, dead={victim}, timeout_s=60)
    for rank in {0, 1, 2} - {victim}:
        gathered = "EOFError" if rank == 1 else ""
        assert results[rank] == (["EOFError", gathered, "RankFailedError", "RankFailedError"], [1])
