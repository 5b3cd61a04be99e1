"""The programs of Mooncake's document: failure detection and recovery, Python interface; its names and its calls."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from epee.compat.mooncake import ep
from tests.harness import run_mortal, run_ranks
from tests.survive import stages


def begin(backend: str, rank: int, world_size: int, folder: str, **more: Any) -> torch.Tensor:
    """What the document calls initialisation, on a store of the test's own."""
    active_ranks = torch.ones((world_size,), dtype=torch.int32)
    dist.init_process_group(
        backend=backend,
        store=dist.FileStore(str(Path(folder) / "store"), -1),
        rank=rank,
        world_size=world_size,
        pg_options=ep.MooncakeBackendOptions(active_ranks, **more),
    )
    return active_ranks


def standard_calls(rank: int, world_size: int) -> None:
    """The calls that the document makes after the initialisation."""
    tensor = torch.full((4,), float(rank))
    dist.all_reduce(tensor)
    assert tensor.tolist() == [sum(range(world_size))] * 4
    dist.broadcast(tensor, src=0)
    output_list = [torch.zeros(1) for _ in range(world_size)]
    dist.all_gather(output_list, torch.full((1,), float(rank)))
    assert [out.item() for out in output_list] == list(range(world_size))
    dist.barrier()


def first_program(rank: int, world_size: int, folder: str, backend: str) -> None:
    ep.set_host_ip("127.0.0.1")
    ep.set_device_filter([])
    active_ranks = begin(backend, rank, world_size, folder)
    standard_calls(rank, world_size)
    assert active_ranks.tolist() == [1] * world_size
    group: Any = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert isinstance(group.getPreferredHca("gpu:0"), str)
    assert ep.get_active_ranks(group) is active_ranks


@pytest.mark.parametrize("backend", ["mooncake", "mooncake-cpu"])
def test_initialisation_and_standard_calls(tmp_path: Path, backend: str) -> None:
    run_ranks(first_program, 3, str(tmp_path), backend, backend=None)


def recovery(slot: int, num_slots: int, folder: str) -> Any:
    """Rank 2 of 4 breaks in the midst of inference; process 4 takes its place."""
    num_processes, broken_rank = 4, 2
    rank = broken_rank if slot == 4 else slot
    steps = 0
    if slot == 4:  # the new node
        stages.wait_for(folder, "broken")
        active_ranks = begin("mooncake-cpu", broken_rank, num_processes, folder, is_extension=True)
    else:
        active_ranks = begin("mooncake-cpu", rank, num_processes, folder)
        standard_calls(rank, num_processes)
        if rank == broken_rank:
            os.kill(os.getpid(), signal.SIGKILL)
        while active_ranks[broken_rank]:  # what kernels and the program look at; it may show between any two calls
            dist.all_reduce(torch.ones(1))
            steps += 1
        stages.reach(folder, "broken")
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        while True:
            (peer_state,) = ep.get_peer_state(backend, [broken_rank])
            if peer_state:
                ep.recover_ranks(backend, [broken_rank])
                break
            result = torch.ones(1)  # inference goes on
            dist.all_reduce(result)
            assert result.item() == 3
            steps += 1
    standard_calls(rank, num_processes)
    assert active_ranks.tolist() == [1] * num_processes
    return steps


def test_healthy_nodes_recover_a_broken_rank() -> None:
    steps = run_mortal(recovery, 5, dead={2}, timeout_s=90)
    assert steps[0] == steps[1] == steps[3], "all heard of it between the same two calls"


def extension(rank: int, num_slots: int, folder: str, with_options: bool) -> None:
    """2 -> 4: `extend_group_size_to` makes a new tensor of ones; the newcomers know the larger size."""
    if rank >= 2:
        stages.wait_for(folder, "born")
    if rank < 2 or with_options:
        begin("mooncake-cpu", rank, 4 if rank >= 2 else 2, folder, is_extension=rank >= 2)
    else:
        store = dist.FileStore(str(Path(folder) / "store"), -1)
        dist.init_process_group(backend="mooncake-cpu", store=store, rank=rank, world_size=4)
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    if rank < 2:
        standard_calls(rank, 2)
        stages.reach(folder, "born")
        while ep.get_num_synced_ranks(backend) != 4:
            dist.all_reduce(torch.ones(1))
        ep.extend_group_size_to(backend, 4)
    standard_calls(rank, 4)
    assert ep.get_active_ranks(backend).tolist() == [1, 1, 1, 1]
    assert dist.get_world_size() == 4


@pytest.mark.parametrize("with_options", [True, False], ids=["is_extension", "no options"])
def test_the_group_is_extended(with_options: bool) -> None:
    run_mortal(extension, 4, with_options, dead=set(), timeout_s=60)
