"""A group that is made with one rank is like any other: it takes processes in, loses them, is one rank again."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import epee
from epee.compat.mooncake import pg
from epee.errors import CommTimeoutError, InvalidState, UnsupportedError
from tests.harness import DEAD, run_mortal

from . import stages
from .growing import await_ranks, every_operation, ring, start, total
from .test_grow import lose

MODES = ("raise", "mask")


def sum_of(group: Any) -> int:
    x = torch.ones(1, dtype=torch.int64)
    dist.all_reduce(x, group=group)
    return int(x)


def grown(slot: int, num_processes: int, folder: str, mode: str) -> Any:
    """Process 0 is a group of one; 1 and 2 come, 2 dies and 1 leaves, and process 3 takes the place of 1."""
    rank = 1 if slot == 3 else slot
    if slot:
        stages.wait_for(folder, "alone again" if slot == 3 else "alone")
    group = start(rank, 3 if slot else 1, folder, mode, joins=slot > 0)
    if slot == 0:
        every_operation(group, [0])
        assert group.num_slots == 1
        assert group.get_peer_state([0, 1]) == [True, False]
        with pytest.raises(CommTimeoutError, match=r"rank\(s\) 1 did not come"):
            group.recover_ranks([1], timeout_s=0.1)
        with pytest.raises(InvalidState if mode == "mask" else UnsupportedError):
            group.put_out([0])
        stages.reach(folder, "alone")
        await_ranks(group, 3)
        assert total() == 1, "who only asks takes no part"
        group.extend_group_size_to(3)
    if slot < 3:
        assert [total() for _ in range(3)] == [3] * 3
        every_operation(group, [0, 1, 2])
        ring(group, [0, 1, 2])
        with epee.Buffer(group, num_experts=6, num_topk=1, hidden=128, max_tokens_per_rank=8) as buffer:
            x = torch.full((6, 128), rank + 1.0, dtype=torch.bfloat16)
            got = buffer.dispatch(x, torch.arange(6)[:, None])
            assert torch.equal(buffer.combine(got.x, got.handle).x, x)
    if slot == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if slot == 0:
        lose(group, 2)
        every_operation(group, [0, 1])
        stages.reach(folder, "two")
        lose(group, 1)
        every_operation(group, [0])
        stages.reach(folder, "alone again")
        group.recover_ranks([1])
    if slot == 1:
        lose(group, 2)
        every_operation(group, [0, 1])
        stages.wait_for(folder, "two")
        dist.destroy_process_group()
        return None
    assert total() == 2
    every_operation(group, [0, 1])
    return group.num_slots


@pytest.mark.parametrize("mode", MODES)
def test_a_group_of_one_grows_shrinks_and_is_filled_again(mode: str) -> None:
    assert run_mortal(grown, 4, mode, dead={2}, timeout_s=80) == [3, None, DEAD, 3]


def without_options(rank: int, num_processes: int, folder: str) -> None:
    """The joiner knows a larger world size, and gives no options."""
    if rank:
        stages.wait_for(folder, "alone")
    store = dist.FileStore(str(Path(folder) / "store"), -1)
    dist.init_process_group("epee", store=store, rank=rank, world_size=1 + rank)
    group: Any = dist.group.WORLD
    if rank == 0:
        stages.reach(folder, "alone")
        await_ranks(group, 2)
        group.extend_group_size_to(2)
    every_operation(group, [0, 1])


def test_a_larger_world_size_is_a_request_to_join() -> None:
    run_mortal(without_options, 2, dead=set(), timeout_s=60)


def of_new_group(slot: int, num_processes: int, folder: str) -> Any:
    """Each of two ranks makes a group of itself; process 2 joins the world, then the group of rank 0."""
    if slot == 2:
        stages.wait_for(folder, "made")
    world = start(slot, 3 if slot == 2 else 2, folder, "mask", joins=slot == 2)
    if slot < 2:
        own = [dist.new_group([rank]) for rank in range(2)][slot]
        assert sum_of(own) == 1
        assert world.num_slots == 2
        stages.reach(folder, f"made{slot}")
        if slot == 0:
            stages.wait_for(folder, "made1")
            stages.reach(folder, "made")
        await_ranks(world, 3)
        world.extend_group_size_to(3)
        assert total() == 3
        if slot == 0:
            own.recover_ranks([1])
            own.extend_group_size_to(2)
    else:
        assert total() == 3, "the world first"
        options = epee.BackendOptions(fault_mode="raise", is_extension=True)
        own = dist.new_group([0, 2], pg_options=options)
    sums = (sum_of(own), sum_of(own)) if slot != 1 else (sum_of(own),)
    assert total() == 3
    return sums


def test_a_process_joins_a_group_of_one_rank_of_a_larger_world() -> None:
    assert run_mortal(of_new_group, 3, dead=set(), timeout_s=60) == [(2, 2), (1,), (2, 2)]


def of_mooncake(slot: int, num_processes: int, folder: str) -> Any:
    """Mooncake's names: 1 -> 2 -> 1 -> 2; the joiners work alone first, and have a group of one rank of their own."""
    rank = min(slot, 1)
    if slot:
        stages.wait_for(folder, "alone" if slot == 1 else "lost")
    store = dist.FileStore(str(Path(folder) / "store"), -1)
    options = pg.MooncakeBackendOptions(2, slot > 0)
    dist.init_process_group("mooncake-cpu", store=store, rank=rank, world_size=1 + min(slot, 1), pg_options=options)
    world: Any = dist.group.WORLD
    assert sum_of(world) == 1
    if slot:
        own = dist.new_group([1], backend="mooncake-cpu", use_local_synchronization=True)
        assert sum_of(own) == 1
        with pytest.raises(InvalidState, match="works alone"):
            world.recover_ranks([0])
        pg.join_group(world)
        assert sum_of(own) == 1
    else:
        assert dist.get_world_size() == 1
        assert pg.get_active_ranks(world).tolist() == [1, 0]
        assert pg.recover_ranks(world, [1]).status is pg.ProposalStatus.Rejected
        stages.reach(folder, "alone")
        while pg.get_num_synced_ranks(world) < 2:
            assert sum_of(world) == 1
        pg.extend_group_size_to(world, 2)
    if slot < 2:
        assert dist.get_world_size() == 2
        every_operation(world, [0, 1])
    if slot == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if slot == 0:
        while sum_of(world) == 2:
            pass
        assert pg.get_active_ranks(world).tolist() == [1, 0]
        stages.reach(folder, "lost")
        while not pg.get_peer_state(world, [1])[0]:
            assert sum_of(world) == 1
        assert pg.recover_ranks(world, [1]).status is pg.ProposalStatus.Applied
    every_operation(world, [0, 1])
    return pg.get_active_ranks(world).tolist()


def test_mooncakes_names_grow_and_recover_a_group_of_one() -> None:
    assert run_mortal(of_mooncake, 3, dead={1}, timeout_s=80) == [[1, 1], DEAD, [1, 1]]
