"""Processes of the job come into groups of `new_group` over hosts; what they offer need not reach anybody but one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import epee
from epee.engine.membership.group_membership import GroupMembership
from epee.errors import EvictedError, RankFailedError
from epee.view.transport.wire import PING, GroupReport
from tests.harness import DEAD, run_ranks
from tests.hosts.joins import STEP_S, full, hear, member, say, sums
from tests.loopback import settle
from tests.survive import kill_points


def tell_nothing(group: Any, *slots: int) -> None:
    """Have nothing that this process tells of its groups from now on reach these slots."""
    switchboard = group._engine.membership.runtime._loop.switchboard
    send = switchboard.send

    def silent(to: Any, message: Any, now: float) -> None:
        if not (isinstance(message, GroupReport) and message.group_id != PING.group_id and to.slot in slots):
            send(to, message, now)

    switchboard.send = silent


def read_alone(rank: int, folder: str) -> None:
    """Have rank 2 read who takes part before rank 3, which comes in by the same view, tells that it is in."""
    parts, attach = GroupMembership.parts, GroupMembership.attach

    def reads(self: GroupMembership, *args: Any) -> Any:
        found = parts(self, *args)
        say(folder, "read")
        return found

    def waits(self: GroupMembership, *args: Any) -> None:
        hear(folder, "read")
        attach(self, *args)

    if rank == 2:
        GroupMembership.parts = reads  # type: ignore[method-assign]
    else:
        GroupMembership.attach = waits  # type: ignore[method-assign]


def together(rank: int, num_ranks: int, folder: str, placement: tuple[int, ...]) -> Any:
    """Ranks 2 and 3 are put out of a group, and come back by one view; neither hears from the other what it offers."""
    settle(placement[rank])
    world = member(rank, num_ranks, folder)
    chosen = epee.BackendOptions(fault_mode="mask", op_timeout=STEP_S)
    group: Any = dist.new_group([0, 1, 2, 3], pg_options=chosen)
    sums(group, range(4))
    if rank in (2, 3):
        hear(folder, "out")
        with pytest.raises(EvictedError):
            dist.all_reduce(full(1, 1), group=group)
        tell_nothing(world, 5 - rank)
        read_alone(rank, folder)
        say(folder, f"ready{rank}")
        group.join()
    else:
        group.put_out([2, 3])
        sums(group, range(2))
        say(folder, "out")
        hear(folder, "ready2")
        hear(folder, "ready3")
        group.recover_ranks([2, 3])
    sums(group, range(4))
    sums(world, range(4))
    hosts = group.hosts
    dist.destroy_process_group()
    return hosts


@pytest.mark.parametrize("placement", [(0, 0, 1, 2), (0, 1, 0, 1)])
def test_two_that_one_view_takes_in_need_not_hear_each_others_offers(
    tmp_path: Path, placement: tuple[int, ...]
) -> None:
    results = run_ranks(together, 4, str(tmp_path), placement, backend=None, timeout_s=80)
    assert results == [tuple(tuple(r for r in range(4) if placement[r] == h) for h in sorted({*placement}))] * 4


def told_to_one(rank: int, num_ranks: int, folder: str, mode: str, step: str) -> Any:
    """Rank 2 comes into a group of ranks 0 and 1, beyond its end; rank 0 hears what it offers, rank 1 never does."""
    settle((0, 1, 0)[rank])
    options: dict[str, Any] = {"fault_mode": mode, "op_timeout": STEP_S}
    world = member(rank, num_ranks, folder, mode)
    if rank == 2:
        tell_nothing(world, 1)
        hear(folder, "born")
        group: Any = dist.new_group([0, 1, 2], pg_options=epee.BackendOptions(is_extension=True, **options))
        if step == "lives":
            sums(group, range(3))
            dist.destroy_process_group()
            return None
        kill_points.die()
    group = dist.new_group([0, 1], pg_options=epee.BackendOptions(max_group_size=3, **options))
    sums(group, range(2))
    say(folder, "born")
    group.extend_group_size_to(3)
    if step == "lives":
        sums(group, range(3))
        dist.destroy_process_group()
        return None
    if mode == "raise":
        with pytest.raises(RankFailedError) as caught:
            dist.all_reduce(full(1, 1), group=group)
        assert caught.value.ranks == (2,)
    sums(group, range(2))
    dist.destroy_process_group()
    return None


def test_what_is_offered_to_one_is_known_to_all(tmp_path: Path) -> None:
    results = run_ranks(told_to_one, 3, str(tmp_path), "mask", "lives", backend=None, timeout_s=60)
    assert results == [None] * 3


@pytest.mark.parametrize("mode", ["mask", "raise"])
def test_who_dies_between_two_tells_is_lost_for_all_alike(tmp_path: Path, mode: str) -> None:
    results = run_ranks(told_to_one, 3, str(tmp_path), mode, "dies", backend=None, timeout_s=60, dead={2})
    assert results == [None, None, DEAD]


def one_after_the_other(slot: int, num_processes: int, folder: str, placement: tuple[int, ...]) -> Any:
    """Slot 2 comes into a group of ranks 0 and 1 as rank 2, and dies; slot 3 comes in as rank 2 after it."""
    settle(placement[slot])
    options: dict[str, Any] = {"fault_mode": "mask", "op_timeout": STEP_S}
    member(slot, num_processes, folder)
    if slot in (2, 3):
        hear(folder, ("born", "lost")[slot - 2])
        group: Any = dist.new_group([0, 1, slot], pg_options=epee.BackendOptions(is_extension=True, **options))
        sums(group, range(3))
        if slot == 2:
            kill_points.die()
    else:
        group = dist.new_group([0, 1], pg_options=epee.BackendOptions(max_group_size=3, **options))
        sums(group, range(2))
        say(folder, "born")
        group.extend_group_size_to(3)
        sums(group, range(3))
        while 2 in group.last_contributors():
            dist.all_reduce(full(1, 1), group=group)
        say(folder, "lost")
        group.recover_ranks([2])
        sums(group, range(3))
    dist.destroy_process_group()
    return None


@pytest.mark.parametrize("placement", [(0, 0, 0, 0), (0, 1, 0, 1)])
def test_a_rank_that_a_group_has_grown_by_goes_to_another_process(tmp_path: Path, placement: tuple[int, ...]) -> None:
    results = run_ranks(one_after_the_other, 4, str(tmp_path), placement, backend=None, timeout_s=80, dead={2})
    assert results == [None, None, DEAD, None]
