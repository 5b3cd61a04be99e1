"""Rounds in which a host is cut off, between network namespaces: in both directions, in one, and for a while.

Of the parts that a cut leaves one goes on (docs/hosts.md says which); there all histories are alike and right. The
other part has results only from before the cut, then `NoQuorumError`, and `EvictedError` when the network heals.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.harness import Worker, collect, take_until
from tests.survive.campaign import first_without
from tests.survive.histories import Entry, check_histories

from .cut_steps import LOST, OUT, CutRound, live
from .hosts import Hosts
from .losses import check_survivors, ranks_of, winners
from .run import num_hosts_of, started_on_hosts

NAMES = {"cut": "cuts", "one way": "one-way cuts", "zombie": "zombie hosts"}
PLACEMENTS = ((0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 0, 1), (0, 1, 1, 1), (0, 0, 1, 2), (0, 1, 1, 2), (0, 1, 2))
OP_TIMEOUT_S, STALL_S = 6.0, 5.0
ROUND_S = 90.0


def rounds(seed: int, name: str) -> Iterator[CutRound]:
    """Yield rounds of a kind; one zombie in three was stopped, not cut."""
    dice = random.Random(f"{seed} {name}")
    while True:
        placement = dice.choice(PLACEMENTS)
        num_hosts = num_hosts_of(placement)
        host, dst = dice.sample(range(num_hosts), 2)
        kind = dice.choice(("zombie", "zombie", "stopped")) if name == "zombie" else name
        if kind == "stopped" and ranks_of(placement, host) <= winners(placement, host):
            continue  # those who stand still would win the vote, and the others wait for them
        yield CutRound(
            kind,
            placement,
            host,
            dst,
            dice.choice(("raise", "mask")),
            timeout_s=dice.choice((1, 2, 3)),
            op_timeout_s=STALL_S if kind == "stopped" else OP_TIMEOUT_S,
            wait_s=dice.random(),
            heal_s=dice.random() * 1.5,
            seed=dice.randrange(1 << 30),
        )


def play(spec: CutRound) -> dict[str, Any]:
    """Run one round and check it; return the survivors' times in ms."""
    with (
        tempfile.TemporaryDirectory() as folder,
        Hosts(num_hosts_of(spec.placement), "tun" if spec.kind == "one way" else "veth") as hosts,
        started_on_hosts(
            hosts,
            live,
            spec.placement,
            folder,
            spec,
            timeout_s=ROUND_S,
            backend=None,
            env={"EPEE_HOST_TIMEOUT_S": str(spec.timeout_s)},
        ) as workers,
    ):
        _await(workers, workers, "going")
        time.sleep(spec.wait_s)
        began_ns = time.monotonic_ns()
        _begin(hosts, spec)
        left = _await_the_loss(workers, spec)
        others = [worker for rank, worker in enumerate(workers) if rank not in left]
        if spec.has_zombies:
            time.sleep(spec.heal_s)
            _end(hosts, spec)
            _await(workers, others, "learned")
        else:
            _await(workers, others, OUT)
        (Path(folder) / "stop").touch()
        told: list[list[Entry]] = collect(workers, (), ROUND_S)
    check(spec, told, left)
    times = []
    for rank in sorted(left):
        met = [first_without(told[rank], victim) for victim in range(len(told)) if victim not in left]
        ended_ns = min(entry.ended_ns for entry in met if entry is not None)
        times.append((ended_ns - began_ns) / 1e6 - 1e3 * spec.timeout_s)
    covered = {f"{spec.kind} of {spec.host} in {spec.placement} {spec.mode} {spec.timeout_s} s"}
    return {"covered": covered, "times_ms": {} if spec.kind == "stopped" else {"host cut": times}}


def _begin(hosts: Hosts, spec: CutRound) -> None:
    if spec.kind == "one way":
        hosts.set_link(spec.host, spec.dst, is_cut=True)
    elif spec.kind == "stopped":
        hosts.stop(spec.host)
    else:
        hosts.cut(spec.host)


def _end(hosts: Hosts, spec: CutRound) -> None:
    if spec.kind == "stopped":
        hosts.cont(spec.host)
    else:
        hosts.heal(spec.host)


def _await(workers: list[Worker], some: list[Worker], what: str) -> None:
    done = take_until(workers, lambda: all(what in worker.told for worker in some), ROUND_S)
    assert done, f"not all say {what!r}: {[(worker.told, worker.result) for worker in workers]}"


def _await_the_loss(workers: list[Worker], spec: CutRound) -> set[int]:
    """Wait until those who go on do; return their ranks. Between two of three hosts either end may be put out."""
    candidates = [winners(spec.placement, spec.host)]
    if spec.kind == "one way" and num_hosts_of(spec.placement) > 2:
        everybody = set(range(len(workers)))
        candidates = [everybody - ranks_of(spec.placement, host) for host in (spec.host, spec.dst)]
    found: list[set[int]] = []

    def is_met() -> bool:
        say = {rank for rank, worker in enumerate(workers) if LOST in worker.told}
        found[:] = [left for left in candidates if left <= say]
        return bool(found)

    assert take_until(workers, is_met, ROUND_S), [(worker.told, worker.result) for worker in workers]
    return found[0]


def check(spec: CutRound, told: list[list[Entry]], left: set[int]) -> None:
    """Check the histories of those who went on, `left`, and of the others."""
    num_ranks, num_hosts = len(told), num_hosts_of(spec.placement)
    lost = set(range(num_ranks)) - left
    check_survivors([told[rank] for rank in sorted(left)], num_hosts, num_ranks, lost)
    for rank in left:
        collectives = [entry for entry in told[rank] if entry.op != "send_recv"]
        assert collectives[-1].contributors == tuple(sorted(left)), collectives[-1]
    for rank in lost:
        history = told[rank]
        first = next(i for i, entry in enumerate(history) if entry.status in ("NoQuorumError", "EvictedError"))
        check_histories([history[:first]], num_ranks, set())
        kinds = ["NoQuorumError", "EvictedError", "CommTimeoutError"]
        assert all(entry.status in kinds for entry in history[first:]), (rank, history[first:])
        if spec.has_zombies:
            assert all(entry.status == "EvictedError" for entry in history[-3:]), (rank, history[-4:])
