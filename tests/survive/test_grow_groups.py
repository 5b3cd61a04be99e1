"""Groups of `new_group` and processes that come later: made again with them, or taken into those that ask for them."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist

import epee
from epee.errors import CommTimeoutError, PeerError, RankFailedError
from tests.harness import run_mortal

from . import stages
from .growing import await_ranks, start, total


def total_of(group: Any) -> int:
    x = torch.ones(1, dtype=torch.int64)
    dist.all_reduce(x, group=group)
    return int(x)


def again(slot: int, num_processes: int, folder: str, mode: str) -> Any:
    """Process 3 takes rank 1's place; then all make groups: with it, without it, twice the same, with calls between."""
    rank, joins = (1, True) if slot == 3 else (slot, False)
    if joins:
        stages.wait_for(folder, "lost")
    group = start(rank, 3, folder, mode, joins)
    told = ""
    if not joins:
        early = [dist.new_group([0, 1, 2]) for _ in range(3)]  # torch counts these, not the one who comes later
        assert [total_of(sub) for sub in early] == [3] * 3
        if slot == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        while group.active_ranks().sum() == 3:
            try:
                total()
            except RankFailedError:
                assert mode == "raise"
        first = dist.new_group([0, 2])  # at the point at which one with the newcomer follows
        stages.reach(folder, "lost")
        while not group.get_peer_state([1])[0]:
            pass
        group.recover_ranks([1])
        with pytest.raises(CommTimeoutError, match="ask for this group"):
            early[0].recover_ranks([1], timeout_s=0.1)
        with pytest.raises(RankFailedError):  # every group reports the loss of its own
            early[0].get_peer_state([0, 1])
        assert early[0].get_peer_state([0, 1, 3]) == [True, False, False]
        assert total_of(first) == 2
    sums = []
    for number in range(3):
        everybody = dist.new_group([0, 1, 2])
        twice = dist.new_group([0, 1, 2])
        pair = dist.new_group([1, 2], pg_options=epee.BackendOptions(fault_mode="mask"))
        rest = dist.new_group([0, 2])
        sums += [total_of(everybody), total_of(twice)]
        if rank:
            sums.append(total_of(pair))
        if rank != 1:
            sums.append(total_of(rest))
        if number:
            assert total() == 3
    last = dist.new_group([0, 1], use_local_synchronization=True)
    if rank < 2:
        sums.append(total_of(last))
    dist.barrier()
    if rank == 1:
        dist.destroy_process_group()
        return sums, told
    with pytest.raises(PeerError):  # the newcomer's end is seen in the new groups as in any
        total_of(everybody)
    return sums, told


@pytest.mark.parametrize("mode", ["raise", "mask"])
def test_groups_are_made_again_with_a_replacement(mode: str) -> None:
    results = run_mortal(again, 4, mode, dead={1}, timeout_s=90)
    assert results[0][0] == [3, 3, 2] * 3 + [2]
    assert results[2][0] == [3, 3, 2, 2] * 3
    assert results[3][0] == [3, 3, 2] * 3 + [2]


def among_newcomers(slot: int, num_processes: int, folder: str) -> Any:
    """Ranks 2 and 3 have a world size of 4 and may make a group of themselves; torch refuses it to ranks 0 and 1."""
    joins = slot >= 2
    if joins:
        stages.wait_for(folder, "born")
    group = start(slot, 4 if joins else 2, folder, "raise", joins)
    if joins:
        pair = dist.new_group([2, 3], use_local_synchronization=True)
        assert total_of(pair) == 2
    else:
        stages.reach(folder, "born")
        await_ranks(group, 4)
        group.extend_group_size_to(4)
        with pytest.raises(ValueError, match="world size"):
            dist.new_group([0, 1, 2, 3])
    assert total() == 4
    return "done"


def test_newcomers_make_groups_of_themselves() -> None:
    assert run_mortal(among_newcomers, 4, dead=set(), timeout_s=60) == ["done"] * 4
