"""Groups over several hosts that lose ranks, whole hosts and connections: who is left agrees, and goes on.

The ranks say that they are on several hosts (loopback addresses). `tests/hosts/campaign.py` kills at every point of
every operation; here is one of each kind.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import epee
from epee.errors import CommTimeoutError, EpeeError, EvictedError, RankFailedError
from tests.harness import DEAD, Pool, run_ranks
from tests.loopback import settle
from tests.survive import kill_points
from tests.survive.rounds import LONG, KillRound, begin
from tests.survive.stages import reach, wait_for

from .calls import full
from .campaign import HostsRound, play

TWO_BY_TWO, IN_TURNS = (0, 0, 1, 1), (0, 1, 0, 1)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool() as found:
        yield found


def kill(op: str, victims: dict[int, tuple[str, int]], mode: str, length: int = 1) -> KillRound:
    return KillRound(op, victims, 4, mode, length)


KILLS = [
    # rank 0 is source, root and coordinator at once, 2 its gateway on the other host, 1 its heir, 3 another gateway
    HostsRound(kill("all_reduce", {0: ("after_payload", 3)}, "raise", LONG), TWO_BY_TWO),
    HostsRound(kill("broadcast", {0: ("after_tag", 3)}, "mask", LONG), TWO_BY_TWO),
    HostsRound(kill("all_gather", {2: ("mid_copyout", 3)}, "raise"), TWO_BY_TWO),
    HostsRound(kill("all_to_all", {3: ("after_copyout", 3)}, "mask"), TWO_BY_TWO),
    HostsRound(kill("reduce_scatter", {1: ("before_copyout", 3)}, "raise", LONG), IN_TURNS),
    HostsRound(kill("send_recv", {2: ("after_tag", 3)}, "raise"), TWO_BY_TWO),
    # a source and its gateway, the second in the agreement about the first; an heir while it tells
    HostsRound(kill("all_reduce", {1: ("before_send", 3), 3: ("in_agree_board", 0)}, "mask"), TWO_BY_TWO),
    HostsRound(kill("all_gather", {1: ("after_tag", 3), 0: ("in_agree_commit", 0)}, "raise"), TWO_BY_TWO),
    # rank 3 hears of both deaths at once, in the call that the first has ended; rank 2 of the second in the next call
    HostsRound(kill("reduce", {0: ("before_send", 3), 1: ("in_agree_commit", 0)}, "mask"), IN_TURNS),
    # whole hosts, in both modes
    HostsRound(kill("all_reduce", {2: ("after_tag", 3), 3: ("after_copyout", 3)}, "raise"), TWO_BY_TWO),
    HostsRound(kill("all_to_all", {0: ("mid_send", 3), 2: ("after_payload", 3)}, "mask", 100), IN_TURNS),
    HostsRound(kill("reduce", {3: ("after_tag", 4)}, "mask", LONG), (0, 0, 0, 1)),
    # rank 0 is rank 1's heir and rank 4 keeps its mirror: until then the two have no connection
    HostsRound(KillRound("all_reduce", {1: ("after_tag", 3)}, 6, "raise", 1), (0, 0, 0, 1, 1, 1)),
    HostsRound(KillRound("all_gather", {4: ("mid_copyout", 3), 1: ("after_tag", 4)}, 6, "mask", 1), (0, 0, 0, 1, 1, 1)),
    # a gateway of two ranks, and half of three hosts' ranks
    HostsRound(KillRound("all_to_all", {4: ("after_payload", 3)}, 6, "raise", 100), (0, 0, 0, 0, 1, 1)),
    HostsRound(
        KillRound("reduce_scatter", {1: ("mid_send", 3), 4: ("after_tag", 3)}, 6, "mask", 1), (0, 0, 1, 1, 2, 2)
    ),
]


@pytest.mark.parametrize("what", KILLS, ids=lambda what: f"{what.spec.op}-{what.spec.victims}-{what.spec.mode}")
def test_survivors_of_a_kill_agree_and_go_on(pool: Pool, what: HostsRound) -> None:
    assert play(pool, what)["kills"] == len(what.spec.victims)


def reset_links(group: Any) -> int:
    """End this rank's connections as a router does that forgets them; return how many there were."""
    links = group._engine.peer_regions.exports.links
    with links.lock:
        found = [link for link in links.links.values() if link.lost is None]
    for link in found:
        link._socket.shutdown(socket.SHUT_RDWR)
    return len(found)


def among_resets(rank: int, num_ranks: int, folder: str, count: int) -> list[float]:
    """Make calls while connections are reset; no view changes."""
    settle(TWO_BY_TWO[rank])
    group = begin(rank, num_ranks, folder, "raise")
    found = []
    for number in range(12):
        if number % 4 == rank:
            assert reset_links(group) == 1
        x = full(count, rank + number)
        dist.all_reduce(x)
        assert torch.equal(x, full(count, 6 + 4 * number))
        found.append(x[0].item())
        peer = (rank + 2) % 4
        sent, got = full(count, number), full(count, -1)
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, got, peer)]):
            work.wait()
        assert torch.equal(got, sent)
    assert group.epoch == 1
    dist.barrier()
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("count", [1, 300_000])
def test_a_reset_connection_is_made_again_and_costs_nothing(tmp_path: Path, count: int) -> None:
    results = run_ranks(among_resets, 4, str(tmp_path), count, backend=None, timeout_s=60)
    assert results == [[6.0 + 4 * number for number in range(12)]] * 4


def stopped(rank: int, num_ranks: int, folder: str, mode: str, late_rank: int = -1) -> list[str]:
    """Rank 3, the gateway of rank 1, stands still; who is patient waits, the policy "evict" goes on without it.

    `late_rank`: the rank whose agent hears of views a second late.
    """
    settle(TWO_BY_TWO[rank])
    group: Any = begin(rank, num_ranks, folder, mode, timeout_s=3.0)
    if rank == late_rank:
        loop = group._engine.membership.runtime._loop
        decide = loop._decide
        loop._decide = lambda decision: (time.sleep(1.0), decide(decision))
    ends = []
    for number in range(3):
        if rank == 3 and number == 1:
            Path(folder, "pid").write_text(str(os.getpid()))
            reach(folder, "stops")
            os.kill(os.getpid(), signal.SIGSTOP)
        x = full(3, rank)
        try:
            dist.all_reduce(x)
            ends.append(f"{x[0].item()}")
        except EpeeError as exc:
            assert torch.equal(x, full(3, rank))
            ends.append(type(exc).__name__)
    if rank == 0:
        wait_for(folder, "stops")
        os.kill(int(Path(folder, "pid").read_text()), signal.SIGCONT)
    if rank == 3:
        with pytest.raises(EvictedError):
            dist.all_reduce(full(1, 0))
    elif "EvictedError" not in ends:  # rank 1 is silent, too, for the other host: what it says goes through rank 3
        found = group.last_contributors()
        assert found in ((0, 1, 2), (0, 2)), (found, ends)
    dist.destroy_process_group()
    return ends


def test_a_gateway_that_stands_still_is_voted_out(tmp_path: Path) -> None:
    results = run_ranks(stopped, 4, str(tmp_path), "mask", backend=None, timeout_s=60)
    out = ["6.0", "EvictedError", "EvictedError"]
    assert results[:3] in ([["6.0", "3.0", "3.0"]] * 3, [["6.0", "2.0", "2.0"], out, ["6.0", "2.0", "2.0"]])
    assert results[3][0] == "6.0"


def test_a_rank_that_is_late_with_a_view_is_not_voted_out_with_the_lost_one(tmp_path: Path) -> None:
    """Rank 1 waits for what rank 2 tells of the lost rank; it had waited until the time-out before."""
    results = run_ranks(stopped, 4, str(tmp_path), "mask", 2, backend=None, timeout_s=60)
    assert results[:3] == [["6.0", "3.0", "3.0"]] * 3
    assert results[3][0] == "6.0"


def last_words(rank: int, num_ranks: int, folder: str) -> Any:
    """Rank 1 sends messages of several sizes and dies at once: they lie whole in its memory, so they are delivered."""
    settle(TWO_BY_TWO[rank])
    begin(rank, num_ranks, folder, "mask")
    sizes, told = (3, 40_000), None
    x = [full(size, -1) for size in sizes]
    works = [dist.irecv(each, 1) for each in x] if rank == 2 else []
    dist.barrier()
    if rank == 1:
        for size in sizes:
            dist.isend(full(size, size), 2)
        kill_points.die()
    if rank == 2:
        for work in works:
            assert work is not None
            work.wait()
        told = [each.unique().tolist() for each in x]
        with pytest.raises(RankFailedError):
            dist.recv(full(1, 1), 1)
    y = full(1, rank)
    dist.all_reduce(y)
    assert y.item() == 5
    dist.destroy_process_group()
    return told


def test_what_a_rank_has_sent_before_its_death_is_delivered_on_the_other_host(tmp_path: Path) -> None:
    results = run_ranks(last_words, 4, str(tmp_path), backend=None, timeout_s=60, dead={1})
    assert results == [None, DEAD, [[3.0], [40_000.0]], None]


def after_a_time_out(rank: int, num_ranks: int, folder: str) -> list[str]:
    """In a view that has lost a gateway a call times out alike on all ranks, and the next one works."""
    settle(TWO_BY_TWO[rank])
    options = epee.BackendOptions(fault_mode="mask", on_stall="error", op_timeout=20.0)
    store = dist.FileStore(f"{folder}/store", num_ranks)
    dist.init_process_group("epee", store=store, rank=rank, world_size=num_ranks, pg_options=options)
    dist.barrier()
    if rank == 2:
        kill_points.die()
    ends = []
    for number in range(4):
        dist.group.WORLD._engine.timeout_s = 0.5 if number == 2 else 20.0  # type: ignore[union-attr]
        if rank == 3 and number == 2:
            time.sleep(1.5)
        x = full(5, rank)
        try:
            dist.all_reduce(x)
            ends.append(f"{x[0].item()}")
        except CommTimeoutError as exc:
            ends.append("given up" if "on all ranks" in str(exc) else str(exc))
    dist.destroy_process_group()
    return ends


def test_time_outs_end_alike_behind_a_new_gateway(tmp_path: Path) -> None:
    results = run_ranks(after_a_time_out, 4, str(tmp_path), backend=None, timeout_s=60, dead={2})
    assert results[2] == DEAD
    assert [results[rank] for rank in (0, 1, 3)] == [["4.0", "4.0", "given up", "4.0"]] * 3


def every_operation_after_losses(rank: int, num_ranks: int, folder: str, placement: tuple[int, ...]) -> int:
    """Lose two ranks of six, then compare every operation among the rest."""
    settle(placement[rank])
    group = begin(rank, num_ranks, folder, "mask")
    x = full(1, rank)
    dist.all_reduce(x)
    if rank in (0, 4):
        kill_points.die()
    while len(group._engine.members.members) > 4:
        dist.all_reduce(full(1, 1))
    alive = dist.new_group([1, 2, 3, 5], use_local_synchronization=True)
    found = everything_in(alive, group)
    dist.destroy_process_group()
    return found


def everything_in(alive: Any, group: Any) -> int:
    """Make calls in a group of survivors and in the one that lost some."""
    position = dist.get_rank(alive)
    x = full(30_000, position)
    dist.all_reduce(x, group=alive)
    assert torch.equal(x, full(30_000, 6))
    x = full(30_000, group.rank())
    dist.all_reduce(x)
    assert torch.equal(x, full(30_000, 11))
    rows = [full(5, -1) for _ in range(6)]
    dist.all_gather(rows, full(5, group.rank()))
    assert [row[0].item() for row in rows] == [-1, 1, 2, 3, -1, 5]
    return position


@pytest.mark.parametrize("placement", [(0, 0, 0, 1, 1, 1), (0, 1, 2, 0, 1, 2)])
def test_every_view_of_six_ranks_works(tmp_path: Path, placement: tuple[int, ...]) -> None:
    results = run_ranks(
        every_operation_after_losses, 6, str(tmp_path), placement, backend=None, timeout_s=80, dead={0, 4}
    )
    assert results == [DEAD, 0, 1, 2, DEAD, 3]


def another_root(rank: int, num_ranks: int, folder: str) -> tuple[str, int, float]:
    """Rank 2 calls with root 0, which dies then; rank 1, on the other host, has heard of it and takes another root."""
    settle(IN_TURNS[rank])
    group = begin(rank, num_ranks, folder, "mask")
    dist.barrier()
    x, error = full(5, rank), None
    if rank == 0:
        wait_for(folder, "called")
        kill_points.die()
    try:
        if rank == 2:
            work = dist.reduce(x, 0, async_op=True)
            reach(folder, "called")
            work.wait()
        else:
            while group._engine.membership.runtime.view().epoch < 2:
                time.sleep(0.001)
            dist.reduce(x, 1)
    except RankFailedError as exc:
        error = exc
    assert error is not None
    assert error.ranks == (0,), error
    assert torch.equal(x, full(5, rank))
    dist.all_reduce(x)
    dist.destroy_process_group()
    return error.cause, error.seq, x[0].item()


def test_a_call_that_failed_on_another_host_for_its_lost_root_is_waited_for_by_nobody(tmp_path: Path) -> None:
    results = run_ranks(another_root, 3, str(tmp_path), backend=None, timeout_s=60, dead={0})
    assert results == [DEAD, ("aborted the call", 2, 3.0), ("left out of the view", 0, 3.0)]
