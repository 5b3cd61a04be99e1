"""A group grows beyond its size at birth, loses what it has grown by, shrinks and grows again."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from epee.errors import EpeeError, InvalidArgument, PeerError, RankFailedError
from epee.view.protocol.messages import Decision
from epee.view.runtime import Runtime
from tests.harness import DEAD, run_mortal

from . import stages
from .growing import await_ranks, every_operation, ring, start, total

MODES = ("raise", "mask")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def grown(slot: int, num_processes: int, folder: str, mode: str) -> Any:
    """Processes 0 and 1 are a group of two; 2 and 3 come with a world size of four."""
    joins = slot >= 2
    if joins:
        stages.wait_for(folder, "born")
    group = start(slot, 4 if joins else 2, folder, mode, joins)
    if not joins:
        assert total() == 2
        assert group.num_slots == 2
        stages.reach(folder, "born")
        await_ranks(group, 4)
        assert group.get_peer_state([0, 1, 2, 3, 4]) == [True] * 4 + [False]
        assert total() == 2, "who only asks takes no part"
        group.extend_group_size_to(4)
    sizes = (group.num_slots, group.active_ranks().tolist(), dist.get_world_size())
    sums = [(total(), group.epoch) for _ in range(5)]
    every_operation(group, [0, 1, 2, 3])
    ring(group, [0, 1, 2, 3])
    assert group._engine.flags == 0, "calls are on their shortest way again"
    group.extend_group_size_to(4)  # nothing to do
    assert group.get_num_synced_ranks() == 4
    return sizes, sums


@pytest.mark.parametrize("mode", MODES)
def test_a_group_of_two_grows_to_four(mode: str) -> None:
    results = run_mortal(grown, 4, mode, dead=set(), timeout_s=80)
    for slot, (sizes, sums) in enumerate(results):
        assert sizes == (4, [1, 1, 1, 1], 4 if slot >= 2 else 2)
        assert sums == results[0][1]
        assert [value for value, _ in sums] == [4] * 5


def back(slot: int, num_processes: int, folder: str, mode: str) -> Any:
    """2 -> 4, ranks 2 and 3 go (one is killed, one leaves in order), 4 -> 2, and 2 -> 3 -> 4 with processes 4 and 5."""
    rank, joins = {4: 2, 5: 3}.get(slot, slot), slot >= 2
    if joins:
        stages.wait_for(folder, "born" if slot < 4 else f"room{rank}", 60.0)
    group = start(rank, 3 if slot == 4 else 4 if joins else 2, folder, mode, joins)
    if slot < 4:
        if not joins:
            stages.reach(folder, "born")
            group.extend_group_size_to(4)
        every_operation(group, [0, 1, 2, 3])
        if slot == 2:
            die()
        if slot == 3:
            dist.destroy_process_group()
            return "left"
        seen = lose(group, 2)
        assert group.num_slots == 4, "a loss changes no lists"
        every_operation(group, [0, 1])
        with pytest.raises(InvalidArgument, match="1 are members"):
            group.extend_group_size_to(1)
        group.extend_group_size_to(2)
        assert group.num_slots == 2
        every_operation(group, [0, 1])
        with pytest.raises(InvalidArgument):
            dist.all_gather([torch.zeros(1)] * 4, torch.zeros(1))
        with pytest.raises(PeerError):
            dist.send(torch.zeros(1), 2)
        stages.reach(folder, "room2")
        group.extend_group_size_to(3)
        every_operation(group, [0, 1, 2])
        stages.reach(folder, "room3")
        group.extend_group_size_to(4)
    else:
        seen = []
        if slot == 4:
            every_operation(group, [0, 1, 2])
            group.extend_group_size_to(4)
    every_operation(group, [0, 1, 2, 3])
    ring(group, [0, 1, 2, 3])
    return seen


def lose(group: Any, num_left: int) -> list[str]:
    """Make calls until only `num_left` ranks are in the next one; return what they raised.

    `active_ranks` alone would end it early: it shows who has left at once, the call that tells of it comes after.
    """
    deadline = time.monotonic() + 20
    seen = []
    while len(group._engine.members.members) > num_left:
        assert time.monotonic() < deadline, (seen[-3:], group.active_ranks(), group.epoch)
        try:
            total()
        except PeerError as exc:
            seen.append(f"{type(exc).__name__} {list(exc.ranks)}")
    return seen


@pytest.mark.parametrize("mode", MODES)
def test_it_shrinks_and_grows_again(mode: str) -> None:
    results = run_mortal(back, 6, mode, dead={2}, timeout_s=100)
    assert results[2] == DEAD
    assert results[3] == "left"
    assert results[0] == results[1]
    assert bool(results[0]) == (mode == "raise")


def one_asks(slot: int, num_processes: int, folder: str, mode: str) -> Any:
    """Rank 0 takes rank 3 in, by name; rank 2 never comes. Old ranks are told at their first call with lists."""
    joins = slot == 2
    rank = 3 if joins else slot
    if joins:
        stages.wait_for(folder, "born")
    group = start(rank, 4 if joins else 2, folder, mode, joins)
    if not joins:
        assert total() == 2
        stages.reach(folder, "born")
    if rank == 0:
        group.recover_ranks([3])
        stages.reach(folder, "in")
    stages.wait_for(folder, "in")
    assert group.num_slots == (4 if joins else 2)
    told = ""
    outs = list(torch.full((group.num_slots, 1), -1))
    try:
        dist.all_gather(outs, torch.tensor([rank]))
    except EpeeError as exc:
        told = f"{type(exc).__name__}: {exc}"
    every_operation(group, [0, 1, 3])
    with pytest.raises(RankFailedError, match="rank 2 is not in the view"):
        dist.send(torch.zeros(1), 2)
    with pytest.raises(InvalidArgument, match="size 4"):
        dist.send(torch.zeros(1), 4)
    every_operation(group, [0, 1, 3])
    return told


@pytest.mark.parametrize("mode", MODES)
def test_who_did_not_know_is_told_and_a_hole_stays_open(mode: str) -> None:
    told = run_mortal(one_asks, 3, mode, dead=set(), timeout_s=60)
    for other in told:
        assert other.startswith("MismatchError"), told
    assert "counts 4 ranks" in told[0]
    assert "counts 4 ranks" in told[1]


def dying(slot: int, num_processes: int, folder: str, mode: str, moment: str) -> Any:
    """Rank 2 of three dies about when the others take rank 3 in; later process 4 takes rank 2."""
    rank, joins = {4: 2}.get(slot, slot), slot >= 3
    if joins:
        stages.wait_for(folder, "born" if slot == 3 else "lost", 60.0)
    group = start(rank, 4 if joins else 3, folder, mode, joins)
    errors = []

    def tried(call: Any) -> Any:
        while True:
            try:
                return call()
            except RankFailedError as exc:
                errors.append((exc.ranks, exc.epoch))
                assert len(errors) < 5

    if slot < 3:
        assert total() == 3
        stages.reach(folder, "born")
        await_ranks(group, 4)
        if slot == 2:
            if moment == "asked":
                stages.wait_for(folder, "asks")
            die()
        if moment == "before":
            time.sleep(0.2)  # the death may be known or not: both must work
        if moment == "asked":
            stages.reach(folder, "asks")
        tried(lambda: group.extend_group_size_to(4))
    sums = []
    if slot < 4:
        sums = [tried(total) for _ in range(3)]
        tried(lambda: every_operation(group, [0, 1, 3]))
        stages.reach(folder, "lost")
        group.recover_ranks([2])
    assert total() == 4
    every_operation(group, [0, 1, 2, 3])
    ring(group, [0, 1, 2, 3])
    return sums, errors


@pytest.mark.parametrize("moment", ["before", "asked", "at once"])
@pytest.mark.parametrize("mode", MODES)
def test_growth_while_a_rank_dies(mode: str, moment: str) -> None:
    results = run_mortal(dying, 5, mode, moment, dead={2}, timeout_s=90)
    assert results[0] == results[1]
    sums, errors = results[0]
    assert sums == [3] * 3
    assert results[3][0] == [3] * 3
    assert [ranks for ranks, _ in errors] == ([(2,)] if mode == "raise" else [])


def hold_back_joining(is_late: Callable[[Decision], bool]) -> None:
    """Let the thread that joins a job go on only when the agent, which has joined, knows such a view."""
    await_decision = Runtime.await_decision

    def held(runtime: Runtime, after_epoch: int, timeout_s: float) -> Decision | None:
        setattr(Runtime, "await_decision", await_decision)  # noqa: B010 - mypy
        deadline = time.monotonic() + timeout_s
        seen = runtime.await_decision(after_epoch, timeout_s)
        while seen is not None and not is_late(seen):
            seen = runtime.await_decision(seen.epoch, deadline - time.monotonic())
        return seen

    setattr(Runtime, "await_decision", held)  # noqa: B010 - mypy


def behind_a_loss(slot: int, num_processes: int, folder: str, mode: str) -> list[Any]:
    """Rank 3 is taken in, the others begin a call with it, rank 2 dies, and only then rank 3 learns that it is in."""
    joins = slot == 3
    if joins:
        stages.wait_for(folder, "born")
        hold_back_joining(lambda view: all(member.slot != 2 for member in view.members))
    group = start(slot, 4 if joins else 3, folder, mode, joins)
    if not joins:
        assert total() == 3
        stages.reach(folder, "born")
        await_ranks(group, 4)
        group.extend_group_size_to(4)
    if slot == 2:
        for other in (0, 1):
            stages.wait_for(folder, f"begun{other}")
        die()
    outcomes: list[Any] = []
    try:
        x = torch.ones(1, dtype=torch.int64)
        work = dist.all_reduce(x, async_op=True)
        stages.reach(folder, f"begun{slot}")
        work.wait()
        outcomes.append(int(x))
    except PeerError as exc:
        outcomes.append((type(exc), exc.ranks, exc.seq, exc.epoch))
    outcomes += [total() for _ in range(2)]
    every_operation(group, [0, 1, 3])
    ring(group, [0, 1, 3])
    return outcomes


@pytest.mark.parametrize("mode", MODES)
def test_a_joiner_that_learns_of_its_join_behind_a_loss_begins_with_the_call_of_its_join(mode: str) -> None:
    outcomes, second, _, joiner = run_mortal(behind_a_loss, 4, mode, dead={2}, timeout_s=80)
    assert outcomes == second == joiner
    assert outcomes[1:] == [3, 3]
    assert outcomes[0] == 3 if mode == "mask" else outcomes[0][:2] == (RankFailedError, (2,))


def claimed(slot: int, num_processes: int, folder: str) -> Any:
    """Processes 2 and 3 both want to be rank 2, before anybody takes them in."""
    joins = slot >= 2
    if joins:
        stages.wait_for(folder, "born")
        try:
            group = start(2, 3, folder, "raise", True)
        except EpeeError as exc:
            stages.reach(folder, "refused")
            return f"{type(exc).__name__}: {exc}"
    else:
        group = start(slot, 2, folder, "raise")
        stages.reach(folder, "born")
        deadline = time.monotonic() + 30
        while len(group._engine.membership.runtime._loop.agent.joins.requests) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        stages.reach(folder, f"seen{slot}")
        stages.wait_for(folder, f"seen{1 - slot}")
        group.extend_group_size_to(3)
    stages.wait_for(folder, "refused")
    sums = [total() for _ in range(3)]
    every_operation(group, [0, 1, 2])
    return sums


def test_of_two_claimants_of_a_slot_one_wins_and_the_other_is_told() -> None:
    results = run_mortal(claimed, 4, dead=set(), timeout_s=60)
    outcomes = sorted(results[2:], key=str)
    assert outcomes[1] == [3] * 3 or outcomes[0] == [3] * 3
    told = next(outcome for outcome in outcomes if isinstance(outcome, str))
    assert told.startswith("SlotTakenError")
    assert "slot 2" in told
    assert "taken" in told
    assert results[0] == results[1] == [3] * 3
