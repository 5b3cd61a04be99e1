"""A soak: groups and buffers over a network that loses and delays packets, now a little, now so much that it hurts.

Nobody may be voted out, every result is right, and descriptors, threads and own resident memory do not grow.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.harness import collect, take_until

from .hosts import Hosts
from .relay import Link
from .run import started_on_hosts
from .soak_steps import LONG_S, live

PLACEMENTS = ((0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 1, 2))
MOST_S = 300.0  # of one group
HARD = {"30 % loss": Link(loss=0.3), "200 ms": Link(delay_s=0.2)}
GROWTH_KIB = 16 << 10


class SoakRound(NamedTuple):
    """One group: where its ranks are, for how long, and from which seed."""

    placement: tuple[int, ...]
    seconds: float
    seed: int


def rounds(seed: int, seconds: float) -> Iterator[SoakRound]:
    """Yield rounds that last `seconds` together."""
    dice = random.Random(f"{seed} soak")
    while True:
        yield SoakRound(dice.choice(PLACEMENTS), min(MOST_S, seconds), dice.randrange(1 << 30))
        seconds = max(1.0, seconds - MOST_S)


def play(spec: SoakRound) -> dict[str, Any]:
    """Run one round and check it: a fifth of the time 30 % of all packets are lost, for another fifth all are late."""
    dice = random.Random(spec.seed)
    num_hosts = 1 + max(spec.placement)
    with (
        tempfile.TemporaryDirectory() as folder,
        Hosts(num_hosts, "tun", seed=spec.seed) as hosts,
        started_on_hosts(
            hosts,
            live,
            spec.placement,
            folder,
            spec.placement,
            spec.seed,
            timeout_s=spec.seconds + 4 * LONG_S,
            backend=None,
        ) as workers,
    ):
        for share, hard in zip((0.3, 0.15, 0.15), (*HARD, None), strict=True):
            _set_all(hosts, num_hosts, dice)
            assert not _has_ended(workers, share * spec.seconds), [worker.result for worker in workers]
            if hard is not None:
                _set_all(hosts, num_hosts, dice, HARD[hard])
                assert not _has_ended(workers, 0.2 * spec.seconds), [worker.result for worker in workers]
        (Path(folder) / "stop").touch()
        told = collect(workers, (), 4 * LONG_S)
    check(told)
    slowest = max(answer["slowest_s"] for answer in told)
    return {
        "soak_s": spec.seconds,
        "calls": sum(answer["calls"] for answer in told),
        "steps": sum(answer["steps"] for answer in told),
        "covered": {str(spec.placement)},
        "times_ms": {"slowest call of a group": [1e3 * slowest]},
    }


def _set_all(hosts: Hosts, num_hosts: int, dice: random.Random, link: Link | None = None) -> None:
    for src in range(num_hosts):
        for dst in range(num_hosts):
            if src != dst:
                found = link or Link(dice.choice((0.0, 0.001, 0.005)), dice.choice((0.0, 0.01, 0.03)))
                hosts.set_link(src, dst, delay_s=found.delay_s, loss=found.loss)


def _has_ended(workers: list[Any], seconds: float) -> bool:
    """Wait for a time; true: somebody has ended."""
    until = time.monotonic() + seconds
    return take_until(workers, lambda: any(worker.result for worker in workers), until - time.monotonic())


def check(told: list[dict[str, Any]]) -> None:
    """See that nobody was lost, and that the last quarter of a process's life held no more than the first."""
    for rank, answer in enumerate(told):
        assert answer["epoch"] == 1, (rank, answer["epoch"])
        held = answer["held"]
        quarter = len(held) // 4
        if quarter:
            first, last = held[:quarter], held[-quarter:]
            for what, slack in ((0, 0), (1, 0), (2, GROWTH_KIB)):
                most, least = max(row[what] for row in first), min(row[what] for row in last)
                assert least <= most + slack, (rank, ("descriptors", "threads", "KiB")[what], first, last)
