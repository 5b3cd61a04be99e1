"""Processes come into groups between hosts that are namespaces; who made a group has a new Buffer with them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import epee
from tests.harness import DEAD, run_ranks
from tests.hosts import run_on_hosts
from tests.hosts.calls import everything
from tests.hosts.joins import full, hear, joiner, lose, member, say, sums
from tests.hosts.machine import address_of
from tests.loopback import settle
from tests.survive import kill_points

SIZES: dict[str, Any] = {"num_experts": 8, "num_topk": 2, "hidden": 128, "max_tokens_per_rank": 16}


def comes(rank: int, num_processes: int, folder: str, victim: int, hosts_of: tuple[int, ...]) -> Any:
    """Process 4, on the last of the hosts, takes the place of a lost rank."""
    os.environ["EPEE_HOST_IP"] = address_of(hosts_of[rank])
    if rank == 4:
        hear(folder, "lost")
        group, rank = joiner(victim, 4, folder), victim
    else:
        group = member(rank, 4, folder)
        sums(group, range(4))
        if rank == victim:
            kill_points.die()
        lose(group, {victim})
        say(folder, "lost")
        group.recover_ranks([victim])
    sums(group, range(4))
    found = everything(rank, 4, (3, 40_000))
    hosts = group.hosts
    dist.destroy_process_group()
    return found > 0, hosts


@pytest.mark.hosts
@pytest.mark.parametrize(("victim", "host"), [(3, 1), (3, 0), (3, 2), (0, 2), (0, 1)])
def test_a_rank_is_replaced_between_hosts(tmp_path: Path, victim: int, host: int) -> None:
    hosts_of = (0, 0, 1, 1, host)
    results = run_on_hosts(comes, hosts_of, str(tmp_path), victim, hosts_of, backend=None, dead={victim})
    assert results.pop(victim) == DEAD
    placement = [0, 0, 1, 1]
    placement[victim] = host
    hosts = tuple(sorted(tuple(r for r in range(4) if placement[r] == h) for h in set(placement)))
    assert results == [(True, hosts)] * 4


def step(buffer: Any, rank: int) -> bool:
    """Send tokens to experts on all ranks and get back their sum: every expert gives back what it got."""
    x = torch.full((8, 128), float(rank + 1), dtype=torch.bfloat16, device="cpu")
    experts = torch.tensor([[token, (token + 3) % 8] for token in range(8)], device="cpu")
    got = buffer.dispatch(x, experts)
    y = buffer.combine(got.x, got.handle)
    y = y if isinstance(y, torch.Tensor) else y.x
    ranks = torch.tensor([len({int(e) // 2 for e in row}) for row in experts.tolist()], device="cpu")
    return bool(torch.equal(y.float(), (rank + 1.0) * ranks[:, None].float().expand(8, 128)))


def with_buffers(rank: int, num_processes: int, folder: str) -> Any:
    """A Buffer that was closed is over, the next one that runs takes the newcomer in; others are made with it."""
    if rank == 4:
        settle(2)
        hear(folder, "lost")
        group, rank, kept = joiner(1, 4, folder), 1, None
    else:
        settle((0, 0, 1, 1)[rank])
        group = member(rank, 4, folder)
        old, kept = (epee.Buffer(group, **SIZES) for _ in range(2))
        assert step(old, rank)
        assert step(kept, rank)
        if rank == 1:
            kill_points.die()
        lose(group, {1})
        old.close()
        say(folder, "lost")
        group.recover_ranks([1])
    sums(group, range(4))
    mask = torch.ones(4, dtype=torch.int32, device="cpu")
    if kept is None:
        kept = epee.Buffer(group, **SIZES)
    else:
        assert kept.sync(mask).tolist() == [1, 1, 1, 1]
    found = [step(kept, rank)]
    for kind in (epee.Buffer, epee.Buffer):
        with kind(group, **SIZES) as buffer:
            found += [step(buffer, rank) for _ in range(3)]
    with epee.LatencyBuffer(group, **SIZES) as buffer:
        dist.barrier()
    sums(group, range(4))
    found += [kept.sync(mask).tolist() == [1, 1, 1, 1], step(kept, rank)]
    dist.barrier()
    kept.close()
    pair = dist.new_group([1, 2])
    if rank in (1, 2):
        x = full(3, rank)
        dist.all_reduce(x, group=pair)
        found.append(x[0].item() == 3)
    sums(group, range(4))
    dist.destroy_process_group()
    return all(found)


def test_buffers_and_groups_that_are_made_with_a_newcomer(tmp_path: Path) -> None:
    results = run_ranks(with_buffers, 5, str(tmp_path), backend=None, timeout_s=80, dead={1})
    assert results.pop(1) == DEAD
    assert results == [True] * 4
