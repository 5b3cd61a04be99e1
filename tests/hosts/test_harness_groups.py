"""Groups over hosts of the harness, with gloo: placements, results, failures, bytes on the wire."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import hosts
from tests.harness import DEAD, RankFailure, collect
from tests.hosts import Hosts, interface_bytes, run_on_hosts, run_on_loopbacks, started_on_hosts

PLACEMENTS = [(0, 0, 1, 1), (0, 1, 1, 1), (0, 1, 0, 1), (0, 1, 2, 3)]
NUM_SENT = 8 << 20


def sum_of_ranks(rank: int, num_ranks: int, factor: int) -> tuple[torch.Tensor, str]:
    x = torch.full((1000,), float(rank * factor), dtype=torch.float32, device="cpu")
    dist.all_reduce(x)
    return x, socket.gethostname()


def facts(rank: int, num_ranks: int) -> dict[str, Any]:
    Path("/dev/shm/mark").write_text(str(rank))
    Path(os.environ["EPEE_RUNTIME_DIR"], "mark").write_text(str(rank))
    dist.barrier()
    return {
        "shared": (Path("/dev/shm/mark").read_text(), Path(os.environ["EPEE_RUNTIME_DIR"], "mark").read_text()),
        "pid": os.getpid(),
        "processes": sorted(int(path.name) for path in Path("/proc").glob("[0-9]*")),
        "first": Path("/proc/1/comm").read_text(),
        "address": socket.gethostbyname(socket.gethostname()),
        "spaces": {kind: os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "pid", "mnt", "ipc", "uts")},
    }


def raise_on_one(rank: int, num_ranks: int, guilty: int) -> int:
    if rank == guilty:
        raise ZeroDivisionError("guilty as charged")
    return rank


def hang_on_one(rank: int, num_ranks: int, guilty: int) -> int:
    while rank == guilty:
        time.sleep(1)
    return rank


def die_on_one(rank: int, num_ranks: int, guilty: int) -> int:
    if rank == guilty:
        os.kill(os.getpid(), 9)
    return rank


def exit_on_one(rank: int, num_ranks: int, guilty: int) -> int:
    if rank == guilty:
        os._exit(3)
    return rank


def environment(rank: int, num_ranks: int) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(("EPEE_", "SAID"))}


def broadcast_bytes(rank: int, num_ranks: int) -> tuple[int, int]:
    x = torch.full((NUM_SENT,), 1 - min(rank, 1), dtype=torch.uint8, device="cpu")
    before = interface_bytes()
    dist.broadcast(x, 0)
    dist.barrier()
    received, sent = (after - first for after, first in zip(interface_bytes(), before, strict=True))
    assert x.min() == 1
    return received, sent


@pytest.mark.hosts
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_group_has_its_ranks_where_they_shall_be(placement: tuple[int, ...]) -> None:
    for rank, (x, name) in enumerate(run_on_hosts(sum_of_ranks, placement, 3, backend="gloo")):
        assert x.unique().tolist() == [18.0]
        assert name == f"host{placement[rank]}"


@pytest.mark.hosts
def test_a_group_of_epee_lives_on_a_host() -> None:
    for x, _ in run_on_hosts(sum_of_ranks, (0, 0), 1, backend="epee"):
        assert x.unique().tolist() == [1.0]


@pytest.mark.hosts("tun")
def test_a_group_works_over_relayed_packets() -> None:
    for x, _ in run_on_hosts(sum_of_ranks, (0, 0, 1, 1), 1, backend="gloo", wire="tun"):
        assert x.unique().tolist() == [6.0]


def test_a_group_works_over_loopback_addresses() -> None:
    for x, _ in run_on_loopbacks(sum_of_ranks, (0, 0, 1, 1), 1, backend="gloo"):
        assert x.unique().tolist() == [6.0]


@pytest.mark.hosts
def test_hosts_share_nothing_and_ranks_of_one_host_do() -> None:
    first, second, third, fourth = run_on_hosts(facts, (0, 0, 1, 1), backend="gloo")
    for one, other in ((first, second), (third, fourth)):
        assert one["spaces"] == other["spaces"]
        assert one["shared"] == other["shared"]
        assert one["pid"] != other["pid"]
        assert {one["pid"], other["pid"]} < set(one["processes"])
    here = {kind: os.readlink(f"/proc/self/ns/{kind}") for kind in first["spaces"]}
    for spaces in (first["spaces"], third["spaces"]):
        assert not set(spaces.values()) & set(here.values())
    assert not set(first["spaces"].values()) & set(third["spaces"].values())
    assert set(first["shared"]) <= {"0", "1"}
    assert set(third["shared"]) <= {"2", "3"}
    # The first process, the store and two ranks on host 0: who saw the others' would see more.
    assert len(first["processes"]) <= 4
    assert len(third["processes"]) <= 3
    assert [first["address"], third["address"]] == ["10.77.0.1", "10.77.0.2"]


@pytest.mark.hosts
def test_a_rank_without_a_group_has_its_environment() -> None:
    for found in run_on_hosts(environment, (0, 1), backend=None, env={"SAID": "yes"}):
        assert found["SAID"] == "yes"
        assert found["EPEE_RUNTIME_DIR"] == "/run/epee"


def test_ranks_on_loopbacks_have_the_environment_of_their_host() -> None:
    found = run_on_loopbacks(environment, (0, 1, 1), backend=None, env={"SAID": "yes"})
    assert [one["EPEE_HOST_KEY"] for one in found] == ["0", "1", "1"]
    assert [one["EPEE_HOST_IP"] for one in found] == ["127.0.77.1", "127.0.77.2", "127.0.77.2"]
    assert found[0]["EPEE_RUNTIME_DIR"] != found[1]["EPEE_RUNTIME_DIR"] == found[2]["EPEE_RUNTIME_DIR"]
    assert {(one["EPEE_TEST"], one["SAID"]) for one in found} == {("1", "yes")}


RUNS = [pytest.param(run_on_hosts, marks=pytest.mark.hosts, id="hosts"), pytest.param(run_on_loopbacks, id="loopbacks")]


@pytest.mark.parametrize("run", RUNS)
def test_an_exception_comes_back_with_the_name_of_its_rank(run: Any) -> None:
    with pytest.raises(RankFailure, match=r"(?s)^--- rank 2: Traceback.*guilty as charged"):
        run(raise_on_one, (0, 1, 1), 2, backend=None)


@pytest.mark.parametrize("run", RUNS)
def test_a_rank_that_hangs_is_named(run: Any) -> None:
    with pytest.raises(RankFailure, match=r"^--- rank 1: did not answer in time"):
        run(hang_on_one, (0, 1), 1, backend=None, timeout_s=1.5)


@pytest.mark.parametrize("run", RUNS)
def test_a_rank_that_is_killed_is_dead_if_it_had_to_be(run: Any) -> None:
    assert run(die_on_one, (0, 1), 1, backend=None, dead={1}) == [0, DEAD]
    with pytest.raises(RankFailure, match=r"^--- rank 0: died without a word"):
        run(die_on_one, (0, 1), 0, backend=None)


@pytest.mark.parametrize("run", RUNS)
def test_a_rank_that_ends_otherwise_is_named_with_its_exit_code(run: Any) -> None:
    with pytest.raises(RankFailure, match=r"^--- rank 1: died without a word \(exit code 3\)"):
        run(exit_on_one, (0, 1), 1, backend=None)


@pytest.mark.hosts
def test_bytes_are_counted_on_the_interface() -> None:
    with Hosts(2) as made:
        before = [made.counters(host) for host in range(2)]
        with started_on_hosts(made, broadcast_bytes, (0, 1), backend="gloo") as workers:
            seen = collect(workers, (), 60.0)
        after = [made.counters(host) for host in range(2)]
    most = NUM_SENT * 1.08 + (64 << 10)
    assert NUM_SENT <= seen[0][1] <= most
    assert NUM_SENT <= seen[1][0] <= most
    assert max(seen[0][0], seen[1][1]) < NUM_SENT / 4  # acknowledgements
    for host, (received, sent) in enumerate(seen):  # what the test sees is what the ranks see, and how they met
        assert after[host][0] - before[host][0] >= received
        assert after[host][1] - before[host][1] >= sent


def test_a_placement_has_a_rank_on_each_host() -> None:
    assert hosts.num_hosts_of((0, 1, 0, 2)) == 3
    with pytest.raises(ValueError, match="each host from 0 to 2 must have a rank"):
        hosts.num_hosts_of((0, 2))
