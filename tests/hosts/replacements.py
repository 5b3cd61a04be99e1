"""Rounds of deaths and replacements in one group over hosts: `python -m tests.hosts.campaign --replacements N`.

In each round a random rank dies before, in or after a call, and another process takes its place on a random host, maybe
one that had no rank so far. Then all make calls and messages whose values are known. The replacement comes into a
`Buffer` and a `LatencyBuffer` that run, too, whose steps are compared bit for bit. Each process looks at what it has
open: descriptors, threads, mappings of outboxes and mirrors.
"""

from __future__ import annotations

import gc
import itertools
import os
import random
import re
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tests.ep.latency_cases import Shape, check_round, make
from tests.harness import DEAD, run_ranks
from tests.hosts.joins import full, hear, joiner, lose, member, say, sums
from tests.hosts.rejoins import begin, check_all
from tests.loopback import settle
from tests.survive import kill_points

PLACEMENTS = ((0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 0, 1))
AT_ONCE = 10  # rounds of one group
_MEMORY = re.compile(r"/memfd:epee-(outbox|mirror|blank)")


class Change(NamedTuple):
    """A round: which rank dies, at which point of its next call, and on which host its replacement runs."""

    victim: int
    point: str
    host: int


def changes(seed: int, num_rounds: int) -> list[Change]:
    """Return random rounds; hosts are those of the group and one more."""
    dice = random.Random(seed)
    return [
        Change(dice.randrange(4), dice.choice(("before", *kill_points.POINTS)), dice.randrange(3))
        for _ in range(num_rounds)
    ]


def process(index: int, num_processes: int, folder: str, seed: int, mode: str) -> Any:
    """Be a founder (0 ... 3) or the replacement of round `index - 4`; return what was open after each round."""
    torch.set_num_threads(1)
    changed = changes(seed, num_processes - 4)
    placement = list(PLACEMENTS[seed % len(PLACEMENTS)])
    first = 0
    if index < 4:
        rank = index
        settle(placement[rank])
        group = member(rank, 4, folder, mode)
        sums(group, range(4))
        buffers = begin(group), make(Shape())
    else:
        first, rank = index - 4, changed[index - 4].victim
        settle(changed[first].host)
        hear(folder, f"lost{first}", 600.0)
        group = joiner(rank, 4, folder, mode)
        check(group)
        for one in changed[: first + 1]:
            placement[one.victim] = one.host
        buffers = begin(group), make(Shape())
        check_buffers(buffers, placement, first)
        say(folder, f"done{first}-{rank}")
        first += 1
    found = []
    for number in range(first, len(changed)):
        one = changed[number]
        for peer in range(4):
            if number and peer != rank:
                hear(folder, f"done{number - 1}-{peer}")
        if rank == one.victim:
            die(group, one.point)
        lose(group, {one.victim})
        say(folder, f"lost{number}")
        group.recover_ranks([one.victim])
        check(group)
        placement[one.victim] = one.host
        for buffer in buffers:
            mask = torch.ones(4, dtype=torch.int32)
            assert buffer.sync(mask).tolist() == [1] * 4
        check_buffers(buffers, placement, number)
        found.append(whats_open())
        say(folder, f"done{number}-{rank}")
    hosts = group.hosts
    for buffer in buffers:
        buffer.close()
    dist.destroy_process_group()
    return hosts, found


def die(group: Any, point: str) -> None:
    """Die at a point of the next call, or before it."""
    if point != "before":
        kill_points.arm(point, group._engine.seq + 1)
        for _ in range(2):
            dist.all_reduce(full(1, 1))
    kill_points.die()


def check(group: Any) -> None:
    """Make calls and messages with all ranks, and look at every value."""
    sums(group, range(4))
    rank = group.rank()
    for size in (5, 30_000):
        got = [full(size, -1) for _ in range(4)]
        dist.all_to_all(got, [full(size, 10 * rank + peer) for peer in range(4)])
        assert [row.unique().item() for row in got] == [10 * peer + rank for peer in range(4)]
        works = [dist.isend(full(size, rank), peer) for peer in range(4) if peer != rank]
        for peer in range(4):
            if peer != rank:
                x = full(size, -1)
                dist.recv(x, peer)
                assert x.unique().tolist() == [peer]
        for work in works:
            assert work is not None
            work.wait()
    dist.barrier()


def check_buffers(buffers: tuple[Any, Any], placement: list[int], number: int) -> None:
    """Make steps of both buffers and compare them with the oracles, bit for bit."""
    check_all(buffers[0], placement, 10 * number)
    for seed in (2 * number, 2 * number + 1):
        check_round(buffers[1], Shape(), (6, 3, 4, 5), seed, use_hook=seed % 2 == 0, hosts=placement)


def whats_open() -> tuple[int, int, Counter[str]]:
    """Return the number of descriptors, of threads, and of mappings by kind."""
    gc.collect()
    mappings = Counter(_MEMORY.findall(Path("/proc/self/maps").read_text()))
    return len(os.listdir("/proc/self/fd")), threading.active_count(), mappings


def rounds(seed: int) -> Iterator[tuple[int, str]]:
    """Yield the seeds and modes of groups, for `play`."""
    for number in itertools.count(seed):
        yield number, ("mask", "raise")[number % 2]


def play(what: tuple[int, str]) -> dict[str, int]:
    """Run one group through AT_ONCE rounds; return how many replacements that were.

    Raises:
        AssertionError: values were wrong, placements differ, or something was left behind.
    """
    seed, mode = what
    holder, dead = dict(enumerate(range(4))), set()
    for number, one in enumerate(changes(seed, AT_ONCE)):
        dead.add(holder[one.victim])
        holder[one.victim] = 4 + number
    with TemporaryDirectory() as folder:
        results = run_ranks(
            process, 4 + AT_ONCE, folder, seed, mode, backend=None, timeout_s=60 + 30 * AT_ONCE, dead=dead
        )
    alive = [result for result in results if result != DEAD]
    assert len({hosts for hosts, _ in alive}) == 1, f"placements differ: {[hosts for hosts, _ in alive]}"
    for _, found in alive:
        for descriptors, threads, mappings in found:
            assert descriptors <= 100, descriptors  # of three engines; 71 to 87 were seen
            assert threads <= 8, threads
            assert sum(mappings.values()) <= 24, mappings  # 12 and 18 were
    return {"replacements": AT_ONCE}
