"""Mooncake's elastic semantics: what a loss looks like to the program, what the program does about it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from epee.compat.mooncake import ep, pg
from epee.errors import CommTimeoutError, EvictedError, InvalidState, RankFailedError
from tests.harness import run_mortal
from tests.survive import stages
from tests.survive.growing import every_operation, ring


def start(rank: int, world_size: int, folder: str, options: Any) -> Any:
    store = dist.FileStore(str(Path(folder) / "store"), -1)
    dist.init_process_group("mooncake-cpu", store=store, rank=rank, world_size=world_size, pg_options=options)
    return dist.group.WORLD


def issue(value: int = 1) -> tuple[Any, torch.Tensor]:
    x = torch.full((1,), value, dtype=torch.int64)
    return dist.all_reduce(x, async_op=True), x


def total(group: Any) -> int:
    x = torch.ones(1, dtype=torch.int64)
    dist.all_reduce(x, group=group)
    return int(x)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def framework_managed(rank: int, num_ranks: int, folder: str) -> None:
    """`auto_deactivate_on_failure=False`: rank 2 dies, and the program acts three calls later."""
    world = start(rank, 4, folder, pg.MooncakeBackendOptions(6, False, False, False))
    active = pg.get_active_ranks(world)
    assert active.tolist() == [1, 1, 1, 1, 0, 0]
    work, x = issue()
    assert pg.get_local_success(work)
    assert (x.item(), pg.get_failed_ranks_hint(work).tolist()) == (4, [0] * 6)
    if rank == 2:
        die()
    for _ in range(3):
        work, x = issue()
        assert work.wait() is True
        assert x.item() == 3
        assert not pg.get_local_success(work)
        assert pg.get_failed_ranks_hint(work).tolist() == [0, 0, 1, 0, 0, 0]
        assert active.tolist() == [1, 1, 1, 1, 0, 0], "the program has not acted"
        assert world.active_ranks().tolist() == [1, 1, 0, 1], "the view has"
    assert pg.deactivate_ranks(world, [2]).status is pg.ProposalStatus.Applied
    assert active.tolist() == [1, 1, 0, 1, 0, 0]
    work, x = issue()
    assert pg.get_local_success(work)
    assert x.item() == 3
    assert pg.get_failed_ranks_hint(work).tolist() == [0] * 6


def test_the_programs_mask_keeps_a_lost_rank_until_the_program_acts() -> None:
    run_mortal(framework_managed, 4, dead={2}, timeout_s=60)


def deactivated_at_once(rank: int, num_ranks: int, folder: str, with_mask: bool) -> None:
    """The default: the call that meets the loss says so, and the live tensor has its zero when it has ended."""
    mask = torch.ones(3, dtype=torch.int32)
    world = start(rank, 3, folder, pg.MooncakeBackendOptions(mask) if with_mask else None)
    active = pg.get_active_ranks(world)
    assert (active is mask) == with_mask
    assert active.tolist() == [1, 1, 1]
    dist.barrier()
    if rank == 1:
        die()
    work, x = issue()
    work.wait()
    assert active.tolist() == [1, 0, 1]
    assert x.item() == 2
    assert not pg.get_local_success(work)
    assert pg.get_failed_ranks_hint(work).tolist() == [0, 1, 0]
    work, x = issue()
    assert pg.get_local_success(work)
    assert pg.get_failed_ranks_hint(work).tolist() == [0, 0, 0]


@pytest.mark.parametrize("with_mask", [False, True], ids=["no options", "mask"])
def test_the_call_that_meets_a_loss_reports_it(with_mask: bool) -> None:
    run_mortal(deactivated_at_once, 3, with_mask, dead={1}, timeout_s=60)


def messages(rank: int, num_ranks: int, folder: str) -> None:
    """Messages to and from a dead rank, begun before its death and after it; a root that is dead."""
    world = start(rank, 3, folder, None)
    dist.barrier()
    if rank == 1:
        dist.recv(torch.zeros(1), src=0)
        die()
    before = torch.full((2,), 7.0)
    open_work = dist.irecv(before, src=1)
    anybody: Any = None
    if rank == 0:
        dist.send(torch.ones(1), dst=1)
    assert open_work.wait() is True
    assert not pg.get_local_success(open_work)
    assert pg.get_failed_ranks_hint(open_work).tolist() == [0, 1, 0]
    assert before.tolist() == [7.0, 7.0]
    dist.barrier()
    for begin in (dist.isend, dist.irecv):
        work = begin(before, 1)
        assert work.wait() is True
        assert not work.is_success()
        assert not pg.get_local_success(work)
        assert pg.get_failed_ranks_hint(work).tolist() == [0, 1, 0]
        assert isinstance(work.exception(), RankFailedError)
    dist.send(before, dst=1)
    dist.recv(before, src=1)
    work = dist.broadcast(before, src=1, async_op=True)
    assert work.wait() is True
    assert not pg.get_local_success(work)
    assert pg.get_failed_ranks_hint(work).tolist() == [0, 1, 0]
    dist.broadcast(before, src=1)
    assert before.tolist() == [7.0, 7.0]
    for begin, peer in (
        ((dist.isend, 2 - rank), (dist.irecv, 2 - rank)) if rank == 0 else ((dist.irecv, 0), (dist.isend, 0))
    ):
        anybody = begin(before, peer)
        assert pg.get_local_success(anybody)
        assert pg.get_failed_ranks_hint(anybody).tolist() == [0, 0, 0]
    assert world.active_ranks().tolist() == [1, 0, 1]
    future = dist.all_reduce(torch.ones(1), async_op=True).get_future()
    assert future.wait()[0].item() == 2


def test_a_message_to_or_from_a_dead_rank_ends_and_wait_is_silent() -> None:
    run_mortal(messages, 3, dead={1}, timeout_s=60)


def shrink(slot: int, num_ranks: int, folder: str, everybody: bool) -> None:
    """4 -> 3 -> 4 -> 3 -> 4: rank 3 is put out, comes back, goes for good; process 4 replaces it."""
    rank = 3 if slot == 4 else slot
    if slot == 4:
        stages.wait_for(folder, "gone")
        world = start(rank, 4, folder, pg.MooncakeBackendOptions(4, True))
        assert total(world) == 1, "it works alone"
        pg.join_group(world)
    else:
        world = start(rank, 4, folder, pg.MooncakeBackendOptions(4))
        assert total(world) == 4
        if slot != 3:
            for _ in range(2):
                if rank == 0 or everybody:
                    answer = pg.deactivate_ranks(world, [3])
                    assert answer.status is pg.ProposalStatus.Applied
                    assert pg.get_active_ranks(world).tolist() == [1, 1, 1, 0]
                    assert answer.new_epoch == pg.get_current_epoch(world)
                while True:
                    work, x = issue()
                    assert pg.get_local_success(work), "who was asked to go is no loss"
                    if x.item() == 3:
                        break
                assert pg.get_active_ranks(world).tolist() == [1, 1, 1, 0]
                while not pg.get_peer_state(world, [3])[0]:
                    assert total(world) == 3
                assert pg.recover_ranks(world, [3]).status is pg.ProposalStatus.Applied
                assert total(world) == 4
                every_operation(world, [0, 1, 2, 3])
        else:
            leave(world, everybody)
            assert total(world) == 4
            every_operation(world, [0, 1, 2, 3])
            leave(world, everybody)
            dist.destroy_process_group()
            stages.reach(folder, "gone")
            return
    if slot == 4:
        assert total(world) == 4
        every_operation(world, [0, 1, 2, 3])
    ring(world, [0, 1, 2, 3])
    assert pg.get_active_ranks(world).tolist() == [1, 1, 1, 1]
    stages.meet(folder, "checked", slot, (0, 1, 2, 4))  # the mask shows who ends, without a call


def call_on(group: Any) -> None:
    while True:
        total(group)


def leave(world: Any, by_itself: bool) -> None:
    """Rank 3 leaves: it asks for that itself, or meets it in a call. It comes back in the first case only."""
    if by_itself:
        assert pg.deactivate_ranks(world, [3]).status is pg.ProposalStatus.Applied
    with pytest.raises(EvictedError, match="as a member asked"):
        call_on(world)
    assert pg.get_active_ranks(world)[3] == 0
    if not hasattr(leave, "again"):
        leave.again = True  # type: ignore[attr-defined]
        pg.join_group(world)


@pytest.mark.parametrize("everybody", [True, False], ids=["all call it", "rank 0 calls it"])
def test_a_healthy_rank_is_put_out_comes_back_and_is_replaced(everybody: bool) -> None:
    run_mortal(shrink, 5, everybody, dead=set(), timeout_s=90)


def seeds_extension(rank: int, num_ranks: int, folder: str, backend: str) -> None:
    """2 -> 4: the newcomers know a larger world size and give no options, as the seeds' programs do."""
    if rank >= 2:
        stages.wait_for(folder, "born")
    store = dist.FileStore(str(Path(folder) / "store"), -1)
    dist.init_process_group(backend, store=store, rank=rank, world_size=4 if rank >= 2 else 2)
    world: Any = dist.group.WORLD
    if rank < 2:
        assert total(world) == 2
        stages.reach(folder, "born")
        while world.get_num_synced_ranks() < 4:
            assert total(world) == 2
        pg.extend_group_size_to(world, 4)
        assert dist.get_world_size() == (2 if backend == "epee" else 4)
    assert total(world) == 4
    every_operation(world, [0, 1, 2, 3])
    ring(world, [0, 1, 2, 3])


@pytest.mark.parametrize("backend", ["mooncake-cpu", "epee"])
def test_a_larger_world_size_without_options_is_an_extension(backend: str) -> None:
    run_mortal(seeds_extension, 4, backend, dead=set(), timeout_s=60)


def reserved(slot: int, num_ranks: int, folder: str) -> None:
    """A maximum of 6: ranks 0 and 1 begin, rank 3 comes before rank 2 (a hole), rank 3 dies, rank 2 comes."""
    rank = slot
    if rank >= 2:
        stages.wait_for(folder, "born" if rank == 3 else "shrunk")
    world = start(rank, 2 if rank < 2 else 4, folder, pg.MooncakeBackendOptions(6, rank >= 2))
    active = pg.get_active_ranks(world)
    if rank >= 2:
        alone(world, rank)
        stages.reach(folder, f"alone-{rank}")
        if rank == 3:
            stages.wait_for(folder, "looked")
        pg.join_group(world)
        assert pg.get_active_ranks(world).tolist() == ([1, 1, 0, 1, 0, 0] if rank == 3 else [1, 1, 1, 0, 0, 0])
    else:
        assert dist.get_world_size() == 2
        assert active.tolist() == [1, 1, 0, 0, 0, 0]
        every_operation(world, [0, 1])
        stages.reach(folder, "born")
        stages.wait_for(folder, "alone-3")
        assert pg.get_peer_state(world, [3]) == [False], "it works alone, and asks for nothing"
        stages.reach(folder, "looked")
        come(world, 3)
        assert active.tolist() == [1, 1, 0, 1, 0, 0]
    if rank != 2:
        assert dist.get_world_size() == 4
        every_operation(world, [0, 1, 3])
        if rank == 3:
            die()
        while total(world) == 3:
            pass
        assert dist.get_world_size() == 2
        assert pg.get_active_ranks(world).tolist() == [1, 1, 0, 0, 0, 0]
        every_operation(world, [0, 1])
        stages.reach(folder, "shrunk")
        come(world, 2)
        assert active.tolist() == [1, 1, 1, 0, 0, 0]
    assert dist.get_world_size() == 3
    every_operation(world, [0, 1, 2])
    work, _ = issue()
    assert pg.get_failed_ranks_hint(work).tolist() == [0] * 6


def come(world: Any, rank: int) -> None:
    """Work on until `rank` has asked to come in, then take it in."""
    while not pg.get_peer_state(world, [rank])[0]:
        assert total(world) == 2
    assert pg.activate_ranks(world, [rank]).status is pg.ProposalStatus.Applied


def alone(world: Any, rank: int) -> None:
    """A process that has not joined yet: its group has itself alone, and the size that it was told."""
    assert dist.get_world_size() == 4
    assert pg.get_active_ranks(world).tolist() == [int(r == rank) for r in range(6)]
    outs = [torch.full((2,), -7.0) for _ in range(4)]
    dist.all_gather(outs, torch.ones(2))
    assert [out.tolist() for out in outs] == [[float(r == rank)] * 2 for r in range(4)]
    wide = torch.full((8,), -7.0)
    dist.all_to_all_single(wide, torch.arange(8.0))
    assert wide.tolist() == [float(i) if i // 2 == rank else 0.0 for i in range(8)]
    assert total(world) == 1
    dist.barrier()
    work = dist.isend(torch.ones(1), 0)
    assert work.wait()
    assert pg.get_failed_ranks_hint(work).tolist() == [1, 0, 0, 0, 0, 0]


def test_a_maximum_reserves_ranks_and_the_size_ends_with_the_highest_that_is_there() -> None:
    run_mortal(reserved, 4, dead={3}, timeout_s=90)


def moved_lists(rank: int, num_ranks: int, folder: str) -> None:
    """A call whose lists were made for a rank that dies: that rank's place is zero, the next one's are shorter."""
    world = start(rank, 3, folder, None)
    dist.barrier()
    if rank == 2:
        for other in range(2):
            stages.wait_for(folder, f"issued-{other}")  # a call that is issued later may be one without this rank
        die()
    outs = [torch.full((2,), -7.0) for _ in range(3)]
    work = dist.all_gather(outs, torch.full((2,), 1.0 + rank), async_op=True)
    wide = torch.full((6,), -7.0)
    later = dist.all_gather_into_tensor(wide, torch.full((2,), 1.0 + rank), async_op=True)
    stages.reach(folder, f"issued-{rank}")
    assert not pg.get_local_success(work)
    assert not pg.get_local_success(later)
    assert [out.tolist() for out in outs] == [[1.0, 1.0], [2.0, 2.0], [0.0, 0.0]]
    assert wide.tolist() == [1.0, 1.0, 2.0, 2.0, 0.0, 0.0]
    assert dist.get_world_size() == 2
    every_operation(world, [0, 1])


def test_a_call_that_loses_its_last_rank_keeps_the_length_of_its_lists() -> None:
    run_mortal(moved_lists, 3, dead={2}, timeout_s=60)


def halves(num_ranks: int, joins: bool) -> list[Any]:
    """Make the groups of a program: two disjoint ones, for GPUs and for CPUs; return one's own."""
    made = []
    for backend in ("mooncake", "mooncake-cpu"):
        for ranks in ([0, 1], [2, 3, *range(4, num_ranks)]):
            mask = torch.ones(len(ranks), dtype=torch.int32)
            options = pg.MooncakeBackendOptions(mask, joins)
            made.append(dist.new_group(ranks, backend=backend, pg_options=options))
    return [group for group in made if group is not dist.GroupMember.NON_GROUP_MEMBER]


def check(group: Any, present: list[int], num_ranks: int) -> None:
    """See that a group counts these of its ranks, and that they reach each other."""
    assert dist.get_world_size(group) == num_ranks
    assert total(group) == len(present)
    assert pg.get_active_ranks(group).tolist()[:num_ranks] == [int(rank in present) for rank in range(num_ranks)]
    outs = [torch.full((1,), -7) for _ in range(num_ranks)]
    dist.all_gather(outs, torch.tensor([group.rank()]), group=group)
    assert [out.item() for out in outs] == [rank if rank in present else 0 for rank in range(num_ranks)]
    place = present.index(group.rank())
    after, before = present[(place + 1) % len(present)], present[place - 1]
    if len(present) > 1:
        got = torch.zeros(70_000)
        work = group.send([torch.full((70_000,), float(group.rank()))], after, 5)
        group.recv([got], before, 5).wait()
        work.wait()
        assert got.unique().tolist() == [float(before)]


def sub_groups(slot: int, num_ranks: int, folder: str) -> None:
    """4 ranks in two halves; rank 3 dies and process 4 replaces it; processes 5 and 6 come as ranks 4 and 5."""
    rank = {4: 3, 5: 4, 6: 5}.get(slot, slot)
    is_late, size = slot >= 4, 6 if slot >= 5 else 4
    if is_late:
        stages.wait_for(folder, "lost" if slot == 4 else "replaced")
    world = start(rank, size, folder, pg.MooncakeBackendOptions(torch.ones(size, dtype=torch.int32), is_late))
    mine = halves(size, is_late)
    assert len(mine) == 2
    if is_late:
        for group in (world, *mine):
            assert total(group) == 1
            assert dist.get_world_size(group) == (size if group is world else size - 2)
        with pytest.raises(InvalidState, match="default group"):
            pg.join_group(mine[0])
        for group in (world, *mine):
            pg.join_group(group)
    else:
        for group in mine:
            check(group, [0, 1], 2)
        stages.meet(folder, "made", slot, range(4))  # torch refuses ranks beyond the last live one in a new group
        if slot == 3:
            die()
        while total(world) == 4:
            pass
        for group in mine if slot == 2 else ():
            work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
            assert not pg.get_local_success(work)
            check(group, [0], 1)
        stages.reach(folder, "lost")
    if slot < 4:
        take_back(world, [3])
        for group in mine if slot == 2 else ():
            take_back(group, [1])
    if slot < 5:
        check(world, [0, 1, 2, 3], 4)
        for group in mine:
            check(group, [0, 1], 2)
        send_tokens(mine[0], 2)
        stages.reach(folder, "replaced")
        take_back(world, [4, 5])
        for group in mine if rank >= 2 else ():
            take_back(group, [2, 3])
    check(world, [0, 1, 2, 3, 4, 5], 6)
    for group in mine:
        check(group, [0, 1, 2, 3] if rank >= 2 else [0, 1], 4 if rank >= 2 else 2)
    if rank < 2:
        return
    if rank == 4:
        die()
    for group in mine:
        while total(group) == 4:
            pass
        check(group, [0, 1, 3], 4)
    if rank == 5:
        assert pg.deactivate_ranks(mine[0], [3]).status is pg.ProposalStatus.Applied
        with pytest.raises(EvictedError):
            total(mine[0])
        check(mine[1], [0, 1, 3], 4)
        stages.wait_for(folder, "shrunk")
        assert mine[0]._place.slots == [2, 3], "it was made with these; whose the other ranks are says the view"
        assert mine[0]._engine.membership._rank_table.slot_of[:4] == [2, 3, 4, 5]
        pg.join_group(mine[0])
    else:
        while total(mine[0]) == 3:
            pass
        check(mine[0], [0, 1], 2)
        check(mine[1], [0, 1, 3], 4)
        stages.reach(folder, "shrunk")
        take_back(mine[0], [3])
    check(mine[0], [0, 1, 3], 4)


def send_tokens(group: Any, num_ranks: int) -> None:
    """Make a buffer on a group that has taken somebody in, and bring tokens there and back."""
    buffer = ep.Buffer(group)
    x = torch.full((4, 512), group.rank() + 1.0, dtype=torch.bfloat16)
    topk_idx = torch.tensor([[0], [1], [0], [1]])
    got, _, handle, *_ = buffer.dispatch(x, topk_idx, None, 8, num_ranks, -1, use_fp8=False)
    back, *_ = buffer.combine(got, topk_idx, torch.ones(4, 1), None, -1, handle)
    assert torch.equal(back, x)


def take_back(group: Any, ranks: list[int]) -> None:
    """Work on until these ranks have asked to come in, then take them in."""
    while not all(pg.get_peer_state(group, ranks)):
        total(group)
    assert pg.recover_ranks(group, ranks).status is pg.ProposalStatus.Applied


def test_replacements_and_growth_in_disjoint_sub_groups() -> None:
    run_mortal(sub_groups, 7, dead={3, 5}, timeout_s=120)


STOP, RESTLESS = 1000, 100  # what a rank adds that ends it all, and what rank 3 adds for itself


def restless(rank: int, num_ranks: int, folder: str, delay_s: float) -> dict[int, int]:
    """Rank 3 is put out and comes back again and again, while rank 2 dies at some time in that.

    Rank 0 says in its sum that all end with it. The sum says as well who was in it, alike on all: `get_active_ranks` is
    about the next call, from which rank 0 may have put rank 3 out meanwhile. Returns the sums, by number of the call.
    """
    world = start(rank, 4, folder, None)
    assert total(world) == 4
    began, sums, num_put_out, stops = time.monotonic(), {}, 0, False
    while not any(value > STOP for value in sums.values()):
        if rank == 2 and time.monotonic() > began + delay_s:
            die()
        x = torch.full((1,), (RESTLESS if rank == 3 else 1) + STOP * stops, dtype=torch.int64)
        try:
            dist.all_reduce(x)
        except EvictedError:
            assert rank == 3
            pg.join_group(world)
            continue
        sums[world._engine.seq] = int(x)
        was_there = int(x) % STOP >= RESTLESS
        if rank == 0 and was_there and num_put_out < 4:
            num_put_out += 1
            assert pg.deactivate_ranks(world, [3]).status is pg.ProposalStatus.Applied
        elif rank != 3 and not was_there and pg.get_peer_state(world, [3])[0]:
            assert pg.recover_ranks(world, [3]).status is pg.ProposalStatus.Applied
        stops = rank == 0 and num_put_out == 4 and pg.get_active_ranks(world).tolist() == [1, 1, 0, 1]
    return sums


@pytest.mark.parametrize("delay_s", [0.0, 0.02, 0.05])
def test_a_death_while_a_rank_goes_and_comes_back(delay_s: float) -> None:
    zero, one, _, three = run_mortal(restless, 4, delay_s, dead={2}, timeout_s=60)
    assert zero == one, "in every call both have the same contributors"
    assert three.items() <= zero.items()


def unanswered(rank: int, num_ranks: int, folder: str) -> None:
    """Rank 1 asks to come back before anybody takes it in, gives up, and asks again; its time-out stays what it was."""
    pg.set_collective_timeout_us(17_000_000)
    world = start(rank, 2, folder, None)
    other = dist.new_group([0, 1])
    assert total(world) == 2
    if rank == 0:
        assert pg.deactivate_ranks(world, [1]).status is pg.ProposalStatus.Applied
        stages.wait_for(folder, "given-up")
        assert pg.recover_ranks(world, [1]).status is pg.ProposalStatus.Rejected
        stages.reach(folder, "rejected")
        assert total(other) == 2
        while not pg.get_peer_state(world, [1])[0]:
            assert total(world) == 1
        assert pg.recover_ranks(world, [1]).status is pg.ProposalStatus.Applied
    else:
        with pytest.raises(EvictedError):
            call_on(world)
        with pytest.raises(CommTimeoutError, match="no member has admitted it"):
            world.join(timeout_s=0.3)
        stages.reach(folder, "given-up")
        stages.wait_for(folder, "rejected")
        assert total(other) == 2
        pg.join_group(world)
    assert total(world) == 2
    assert world.timeout_s == 17.0


def test_who_asks_in_vain_may_ask_again() -> None:
    run_mortal(unanswered, 2, dead=set(), timeout_s=60)
