"""Groups over several hosts whose links are NIXL's: results, ends, kills and cuts as over TCP.

`EPEE_NIXL_KILLS=30 EPEE_NIXL_CUTS=20 pytest tests/hosts/test_nixl.py` is the campaign; without it there are a few.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from epee.errors import MismatchError
from epee.link import engine
from epee.link.nixl.agent import NixlAgent
from epee.link.nixl.link import NixlLink
from tests.harness import DEAD, Pool, Worker, run_ranks
from tests.link.pairs import UCX

from . import Hosts, campaign, run_on_hosts, run_on_loopbacks, test_join_faults, test_joins
from .calls import everything, full
from .campaign import HostsRound, play
from .test_ends import left_over
from .test_faults import after_a_fault, check, check_cut
from .test_survival import KILLS, among_resets

NIXL = UCX | {"EPEE_LINK": "nixl"}
NUM_KILLS = int(os.environ.get("EPEE_NIXL_KILLS", "2"))
NUM_CUTS = int(os.environ.get("EPEE_NIXL_CUTS", "1"))

pytestmark = pytest.mark.nixl


def _over_nixl(rank: int, num_ranks: int, sizes: tuple[int, ...]) -> int:
    group: Any = dist.group.WORLD
    links = group._engine.peer_regions.exports.links.links
    assert links
    assert all(isinstance(link, NixlLink) for link in links.values())
    return everything(rank, num_ranks, sizes)


@pytest.mark.hosts
@pytest.mark.parametrize("placement", [(0, 0, 1, 1), (0, 1, 2)])
def test_every_operation_on_hosts_equals_its_closed_form(placement: tuple[int, ...]) -> None:
    run_on_hosts(_over_nixl, placement, (1, 1000, 40_000, 700_000), env=NIXL, timeout_s=80)


def test_every_operation_on_loopbacks_equals_its_closed_form() -> None:
    run_on_loopbacks(_over_nixl, (0, 1, 0, 1), (1, 700_000), env=NIXL, timeout_s=80)


def test_payloads_are_proved_where_that_is_asked_for() -> None:
    run_on_loopbacks(_over_nixl, (0, 1), (1, 40_000, 700_000), env=NIXL | {"EPEE_LINK_MAC": "1"}, timeout_s=80)


def _make_with_another_engine(rank: int, num_ranks: int) -> str:
    os.environ["EPEE_LINK"] = "nixl" if rank == 1 else "tcp"
    with pytest.raises(MismatchError) as found:
        dist.new_group(backend="epee")
    return str(found.value)


def test_ranks_with_different_engines_make_no_group() -> None:
    told = run_on_loopbacks(_make_with_another_engine, (0, 1), backend="gloo", env=UCX, timeout_s=60)
    assert all("EPEE_LINK must be equal on all ranks" in text for text in told)


def _make_and_end(rank: int, num_ranks: int, num_more: int) -> int:
    found = (0, 0, 0)
    for number in range(3 + num_more):
        group = dist.new_group(backend="epee")
        x = full(5000, rank)
        dist.all_reduce(x, group=group)
        assert torch.equal(x, full(5000, sum(range(num_ranks))))
        dist.destroy_process_group(group)
        del group
        if number == 2:
            dist.barrier()
            time.sleep(0.5)  # the links end a moment later
            found = left_over()
    until = time.monotonic() + 20.0
    while any(now > before for now, before in zip(left_over(), found, strict=True)):
        assert time.monotonic() < until, (left_over(), found)
        time.sleep(0.05)
    dist.barrier()
    return found[2]


def test_nothing_is_left_of_groups_that_have_ended() -> None:
    assert run_on_loopbacks(_make_and_end, (0, 1), 8, backend="gloo", env=NIXL, timeout_s=100) == [0, 0]


@pytest.mark.hosts
@pytest.mark.parametrize("seed", range(NUM_KILLS))
def test_a_killed_rank_is_an_error_on_all_once(seed: int) -> None:
    choose = random.Random(seed)
    victim, count, delay_s = choose.randrange(4), (1, 1_500_000)[seed % 2], choose.uniform(0.0, 0.3)

    def kill(_: Hosts, workers: list[Worker]) -> None:
        time.sleep(delay_s)
        workers[victim].process.kill()

    check(after_a_fault(kill, count, (victim,), env=NIXL), {victim})


@pytest.mark.hosts
@pytest.mark.parametrize("seed", range(NUM_CUTS))
def test_a_host_that_is_cut_off_goes(seed: int) -> None:
    choose = random.Random(seed)

    def cut(hosts: Hosts, _: list[Worker]) -> None:
        time.sleep(choose.uniform(0.0, 0.3))
        hosts.cut(1)

    check_cut(after_a_fault(cut, (1, 1_500_000)[seed % 2], env=NIXL))


# ---- as in `test_survival.py`; EPEE_LINK=nixl python -m tests.hosts.campaign is the campaign


def round_over_nixl(rank: int, folder: str, spec: Any, placement: tuple[int, ...]) -> Any:
    """As `campaign.on_host`, over agents."""
    os.environ.update(NIXL)
    found = campaign.on_host(rank, folder, spec, placement)
    assert agents(), "no agent was made"
    return found


def agents() -> int:
    """Return how many agents this process has made."""
    return NixlAgent.num_made


@pytest.mark.parametrize("what", KILLS[::4], ids=lambda what: f"{what.spec.op}-{what.spec.victims}-{what.spec.mode}")
def test_survivors_of_a_kill_agree_and_go_on(what: HostsRound, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaign, "on_host", round_over_nixl)
    with Pool() as pool:
        play(pool, what)


def resets_over_nixl(rank: int, num_ranks: int, folder: str, count: int) -> tuple[list[float], int]:
    """As `among_resets`, over agents, of which each may be left by two links."""
    os.environ.update(NIXL)
    engine.MAX_LEFT = 2
    before = agents()
    return among_resets(rank, num_ranks, folder, count), agents() - before


@pytest.mark.parametrize("count", [1, 300_000])
def test_a_reset_connection_is_made_again_and_costs_nothing(tmp_path: Path, count: int) -> None:
    results = run_ranks(resets_over_nixl, 4, str(tmp_path), count, backend=None, timeout_s=60)
    assert [found for found, _ in results] == [[6.0 + 4 * number for number in range(12)]] * 4
    assert all(num_agents > 1 for _, num_agents in results), results


# ---- as in `test_joins.py` and `test_join_faults.py`


def joins_over_nixl(rank: int, num_processes: int, folder: str, what: str, *args: Any) -> Any:
    """As the function `what` of those tests, over agents."""
    os.environ.update(NIXL)
    module = test_joins if hasattr(test_joins, what) else test_join_faults
    found = getattr(module, what)(rank, num_processes, folder, *args)
    assert agents(), "no agent was made"
    return found


@pytest.mark.parametrize(("victim", "host"), [(3, 1), (0, 2)])
def test_a_lost_rank_is_replaced(tmp_path: Path, victim: int, host: int) -> None:
    args = "replaced", (0, 0, 1, 1), victim, host
    results = run_ranks(joins_over_nixl, 5, str(tmp_path), *args, backend=None, timeout_s=80, dead={victim})
    assert results.pop(victim) == DEAD
    placement = [0, 0, 1, 1]
    placement[victim] = host
    assert [found[1] for found in results] == [test_joins.hosts_of(tuple(placement))] * 4
    assert all(found[0] == results[0][0] > 0 for found in results)


def test_a_group_grows_onto_a_new_host(tmp_path: Path) -> None:
    placement = (0, 1, 1, 0, 2)
    results = run_ranks(joins_over_nixl, 5, str(tmp_path), "grown", placement, 2, backend=None, timeout_s=80)
    assert [found[1] for found in results] == [test_joins.hosts_of(placement)] * 5


def test_a_joiner_that_dies_disturbs_nobody(tmp_path: Path) -> None:
    args = "dies_coming", "linked", 2, "mask"
    results = run_ranks(joins_over_nixl, 6, str(tmp_path), *args, backend=None, timeout_s=80, dead={3, 4})
    assert [result for result in results if result != DEAD] == [((0, 1), (2,), (3,))] * 4
