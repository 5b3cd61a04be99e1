"""Processes come into groups over hosts: in the place of a lost rank, on any host, and beyond the end."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import epee
from epee.engine.bootstrap.group_note import IN
from epee.errors import EvictedError
from epee.view.transport.wire import PING, GroupReport
from tests.harness import DEAD, run_ranks
from tests.hosts.calls import everything
from tests.hosts.joins import full, hear, joiner, lose, member, say, sums
from tests.loopback import settle
from tests.survive import kill_points

TWO_BY_TWO = (0, 0, 1, 1)


def replaced(rank: int, num_processes: int, folder: str, placement: tuple[int, ...], victim: int, host: int) -> Any:
    """The last process takes the place of `victim`, on `host`; then all make every call."""
    num_ranks = len(placement)
    if rank == num_ranks:
        settle(host)
        hear(folder, "lost")
        group, rank = joiner(victim, num_ranks, folder), victim
    else:
        settle(placement[rank])
        group = member(rank, num_ranks, folder)
        sums(group, range(num_ranks))
        if rank == victim:
            kill_points.die()
        lose(group, {victim})
        say(folder, "lost")
        group.recover_ranks([victim])
    sums(group, range(num_ranks))
    found = everything(rank, num_ranks, (3, 1000, 40_000))
    assert group.get_peer_state(list(range(num_ranks))) == [True] * num_ranks
    hosts = group.hosts
    dist.destroy_process_group()
    return found, hosts


def hosts_of(placement: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    found: dict[int, tuple[int, ...]] = {}
    for rank, host in enumerate(placement):
        found[host] = (*found.get(host, ()), rank)
    return tuple(found.values())


@pytest.mark.parametrize(
    ("placement", "victim", "host"),
    [
        (TWO_BY_TWO, 3, 1),
        (TWO_BY_TWO, 3, 0),
        (TWO_BY_TWO, 3, 2),
        (TWO_BY_TWO, 0, 0),
        (TWO_BY_TWO, 0, 1),
        ((0, 1, 0, 1), 1, 2),
        ((0, 1), 1, 1),
        ((0, 0, 1), 2, 2),
        ((0, 1, 2), 1, 0),
    ],
)
def test_a_lost_rank_is_replaced(tmp_path: Path, placement: tuple[int, ...], victim: int, host: int) -> None:
    num = len(placement)
    results = run_ranks(
        replaced, num + 1, str(tmp_path), placement, victim, host, backend=None, timeout_s=60, dead={victim}
    )
    assert results.pop(victim) == DEAD
    after = hosts_of((*placement[:victim], host, *placement[victim + 1 :]))
    assert [found[1] for found in results] == [after] * num
    assert all(found[0] == results[0][0] > 0 for found in results)


def grown(rank: int, num_processes: int, folder: str, placement: tuple[int, ...], num_founders: int) -> Any:
    """The processes above the founders come in, all at once; nobody was lost."""
    settle(placement[rank])
    if rank >= num_founders:
        hear(folder, "ready")
        group = joiner(rank, num_processes, folder)
    else:
        group = member(rank, num_founders, folder, max_group_size=num_processes)
        sums(group, range(num_founders))
        if rank == 0:
            say(folder, "ready")
        group.extend_group_size_to(num_processes)
    sums(group, range(num_processes))
    found = len(rows_of(rank, num_processes))
    hosts = group.hosts
    dist.destroy_process_group()
    return found, hosts


def rows_of(rank: int, num_ranks: int) -> list[Any]:
    """Gather and exchange rows; torch's calls on objects count the ranks that there were at birth."""
    for size in (3, 40_000):
        rows = [full(size, -1) for _ in range(num_ranks)]
        dist.all_gather(rows, full(size, rank))
        assert [row.unique().item() for row in rows] == list(range(num_ranks))
        dist.all_to_all(rows, [full(size, 10 * rank + peer) for peer in range(num_ranks)])
        assert [row.unique().item() for row in rows] == [10 * peer + rank for peer in range(num_ranks)]
    return rows


@pytest.mark.parametrize(
    ("placement", "num_founders"), [((0, 1, 2), 2), ((0, 1, 1, 0), 2), ((0, 0, 1, 1, 2, 2), 4), ((0, 1, 1, 0, 2), 2)]
)
def test_a_group_grows_onto_hosts(tmp_path: Path, placement: tuple[int, ...], num_founders: int) -> None:
    args = placement, num_founders
    results = run_ranks(grown, len(placement), str(tmp_path), *args, backend=None, timeout_s=60)
    assert [found[1] for found in results] == [hosts_of(placement)] * len(placement)
    assert all(found[0] == results[0][0] > 0 for found in results)


def begun_on_one(rank: int, num_processes: int, folder: str, placement: tuple[int, ...], num_founders: int) -> Any:
    """As `grown`, where the founders say that the group may come to run over several hosts; with a Buffer before."""
    if rank < num_founders:
        os.environ["EPEE_OVER_HOSTS"] = "1"
        settle(placement[rank])
        group = member(rank, num_founders, folder, max_group_size=num_processes)
        assert group.hosts == (tuple(range(num_founders)),)
        everything(rank, num_founders, (3, 1000, 40_000, 700_000))
        with epee.Buffer(group, num_experts=8, num_topk=2, hidden=128, max_tokens_per_rank=16) as buffer:
            x = torch.full((8, 128), rank + 1.0, dtype=torch.bfloat16, device="cpu")
            got = buffer.dispatch(x, torch.tensor([[token, token ^ 4] for token in range(8)], device="cpu"))
            assert torch.equal(buffer.combine(got.x, got.handle).x, 2 * x), "both ranks give it back"
        dist.barrier()
        if rank == 0:
            say(folder, "ready")
        group.extend_group_size_to(num_processes)
    else:
        settle(placement[rank])
        hear(folder, "ready")
        group = joiner(rank, num_processes, folder)
    sums(group, range(num_processes))
    found = len(rows_of(rank, num_processes))
    if rank == num_founders - 1:
        kill_points.die()
    lose(group, {num_founders - 1})
    sums(group, [peer for peer in range(num_processes) if peer != num_founders - 1])
    hosts = group.hosts
    dist.destroy_process_group()
    return found, hosts


@pytest.mark.parametrize("placement", [(0, 0, 1), (0, 0, 1, 2)])
def test_a_group_that_began_on_one_host_grows_onto_others_if_its_ranks_have_said_so(
    tmp_path: Path, placement: tuple[int, ...]
) -> None:
    args = placement, 2
    results = run_ranks(begun_on_one, len(placement), str(tmp_path), *args, backend=None, timeout_s=80, dead={1})
    assert results.pop(1) == DEAD
    assert all(found == (len(placement), hosts_of(placement)) for found in results), results


def begun_with_one(rank: int, num_processes: int, folder: str, placement: tuple[int, ...]) -> Any:
    """Rank 0 is a group of one that may come to run over several hosts; the others come, and one of them is lost."""
    os.environ["EPEE_OVER_HOSTS"] = "1"
    settle(placement[rank])
    if rank == 0:
        group = member(0, 1, folder)
        assert group.hosts == ((0,),)
        sums(group, range(1))
        say(folder, "ready")
        group.extend_group_size_to(num_processes)
    else:
        hear(folder, "ready")
        group = joiner(rank, num_processes, folder)
    sums(group, range(num_processes))
    found, hosts = len(rows_of(rank, num_processes)), group.hosts
    if rank == num_processes - 1:
        kill_points.die()
    lose(group, {num_processes - 1})
    sums(group, range(num_processes - 1))
    dist.destroy_process_group()
    return found, hosts


@pytest.mark.parametrize("placement", [(0, 1), (0, 1, 0), (0, 0, 1), (0, 1, 2)])
def test_a_group_that_began_with_one_rank_grows_onto_hosts(tmp_path: Path, placement: tuple[int, ...]) -> None:
    num = len(placement)
    results = run_ranks(begun_with_one, num, str(tmp_path), placement, backend=None, timeout_s=60, dead={num - 1})
    assert results.pop() == DEAD
    assert results == [(num, hosts_of(placement))] * (num - 1)


def tell_late(group: Any, slot: int) -> None:
    """Have nothing that this process tells of the group before it has come in reach `slot`."""
    switchboard = group._engine.membership.runtime._loop.switchboard
    send = switchboard.send

    def late(to: Any, message: Any, now: float) -> None:
        is_told = isinstance(message, GroupReport) and message.group_id != PING.group_id
        if not (is_told and to.slot == slot and message.data[:4] != IN.to_bytes(4, "little")):
            send(to, message, now)

    switchboard.send = late


def shrunk(rank: int, num_processes: int, folder: str, comes_back: bool, late: int = -1) -> Any:
    """Rank 3 is put out; then it comes back, or another process of a new host takes its place.

    What it offers comes to rank `late` after the view that takes it in.
    """
    if rank == 4:
        settle(2)
        hear(folder, "left")
        group, rank = joiner(3, 4, folder), 3
    else:
        settle(TWO_BY_TWO[rank])
        group = member(rank, 4, folder)
        sums(group, range(4))
        if rank == 3:
            hear(folder, "out")
            with pytest.raises(EvictedError):
                dist.all_reduce(full(1, 1))
            if not comes_back:
                dist.destroy_process_group()
                say(folder, "left")
                return None
            tell_late(group, late)
            say(folder, "left")
            group.join()
        else:
            group.put_out([3])
            sums(group, range(3))
            say(folder, "out")
            hear(folder, "left")
            group.recover_ranks([3])
    sums(group, range(4))
    found = everything(rank, 4, (3, 40_000))
    hosts = group.hosts
    dist.destroy_process_group()
    return found, hosts


def test_who_was_put_out_comes_back(tmp_path: Path) -> None:
    results = run_ranks(shrunk, 4, str(tmp_path), True, backend=None, timeout_s=60)
    assert [found[1] for found in results] == [((0, 1), (2, 3))] * 4


def test_who_offers_is_taken_in_by_those_who_hear_of_it_after_the_view(tmp_path: Path) -> None:
    results = run_ranks(shrunk, 4, str(tmp_path), True, 1, backend=None, timeout_s=60)
    assert [found[1] for found in results] == [((0, 1), (2, 3))] * 4


def test_a_rank_that_was_put_out_is_replaced_on_a_new_host(tmp_path: Path) -> None:
    results = run_ranks(shrunk, 5, str(tmp_path), False, backend=None, timeout_s=60)
    assert results.pop(3) is None
    assert [found[1] for found in results] == [((0, 1), (2,), (3,))] * 4


def messages(rank: int, num_processes: int, folder: str, victim: int, host: int) -> Any:
    """Messages to and from a newcomer that are made before anybody has read its mirror, in a ring that goes on."""
    if rank == 4:
        settle(host)
        hear(folder, "lost")
        group, rank = joiner(victim, 4, folder), victim
    else:
        settle(TWO_BY_TWO[rank])
        group = member(rank, 4, folder)
        for size in (3, 40_000):  # numbers that the newcomer's must not be mistaken for
            got = full(size, -1)
            ops = [dist.P2POp(dist.isend, full(size, rank), peer) for peer in range(4) if peer != rank]
            ops += [dist.P2POp(dist.irecv, got, peer) for peer in range(4) if peer != rank]
            for work in dist.batch_isend_irecv(ops):
                work.wait()
        if rank == victim:
            dist.barrier()
            kill_points.die()
        dist.barrier()
        lose(group, {victim})
        say(folder, "lost")
        group.recover_ranks([victim])
    found = []
    for size in (5, 70_000):
        sent = [dist.isend(full(size, 10 * rank + peer), peer) for peer in range(4) if peer != rank]
        for peer in range(4):
            if peer != rank:
                got = full(size, -1)
                dist.recv(got, peer)
                found.append(got.unique().tolist() == [10 * peer + rank])
        for work in sent:
            assert work is not None
            work.wait()
    dist.barrier()
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize(("victim", "host"), [(3, 1), (3, 0), (0, 2), (2, 0)])
def test_messages_of_newcomers(tmp_path: Path, victim: int, host: int) -> None:
    results = run_ranks(messages, 5, str(tmp_path), victim, host, backend=None, timeout_s=60, dead={victim})
    assert results.pop(victim) == DEAD
    assert results == [[True] * 6] * 4
