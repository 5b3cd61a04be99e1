"""Kills in dispatch and combine over hosts: at every point of a step of a `Buffer`, at random moments of both classes.

The ranks say that they are on several hosts (loopback addresses, real links). Programs and checks are those of
`survival_steps.py` (kills at points: one rank, two, or a host, each at a point of its own) and of
`tests/survive/buffer_kills.py` (kills at moments): every row is of a source that `got` names as a whole, sums are those
over `got`, `lost_weight` is the weight of the others, and all survivors agree on who is left.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from epee.link.topology import Topology
from tests.harness import DEAD, Pool, collect
from tests.loopback import settle
from tests.survive import buffer_kills
from tests.survive.buffer_kills import NUM_SYNCS, ROUND_S, Spec, kill_round

from .losses import check_leftovers, is_outvoted, ranks_of
from .stand_in import POINTS, shorten_rounds
from .survival_rounds import latency_step
from .survival_steps import BETWEEN, check, whole_program

PLACEMENTS = ((0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 1, 1), (0, 0, 0, 1), (0, 1, 2, 2), (0, 0, 1, 2))
SIX_RANKS = ((0, 0, 0, 1, 1, 1), (0, 0, 0, 0, 1, 1), (0, 0, 1, 1, 2, 2))
NUM_STEPS = 6
MOST_MS = 25.0


class EpRound(NamedTuple):
    """A round. With `kind` "points" the victims die at (step, point), else (stretch, ms): see `buffer_kills.Spec`."""

    kind: str
    mode: str
    placement: tuple[int, ...]
    victims: dict[int, tuple[int, Any]]


def rounds(seed: int, is_host: bool) -> Iterator[EpRound]:
    """Yield rounds; half of them have points. `is_host`: all ranks of a host die, at moments within a millisecond."""
    dice = random.Random(f"{seed} {is_host}")
    while True:
        kind = dice.choice(("points", "points", "throughput", "latency"))
        mode = "mask" if kind == "latency" else dice.choice(("raise", "mask"))
        placement = dice.choice(PLACEMENTS if dice.random() < 0.7 else SIX_RANKS)
        dying = dice.sample(range(len(placement)), dice.choice((1, 1, 2)))
        if is_host:
            dying = sorted(ranks_of(placement, dice.choice(placement)))
        if is_outvoted(placement, dying):
            continue  # the group's rounds have those who must stop
        if kind == "points":
            step = dice.randrange(1, NUM_STEPS)
            victims: dict[int, tuple[int, Any]] = {rank: (step, dice.choice([*POINTS, BETWEEN])) for rank in dying}
        else:
            stretch, when = dice.randrange(NUM_SYNCS - 1), dice.random() * MOST_MS
            victims = {rank: (stretch, when + dice.random()) for rank in dying}
            if not is_host:
                victims = {rank: (dice.randrange(NUM_SYNCS - 1), dice.random() * MOST_MS) for rank in dying}
        yield EpRound(kind, mode, placement, victims)


def on_host(rank: int, folder: str, spec: EpRound) -> Any:
    """One rank's program on its host."""
    settle(spec.placement[rank])
    shorten_rounds()
    num_ranks = len(spec.placement)
    if spec.kind == "points":
        told = whole_program(rank, num_ranks, folder, spec.mode, spec.placement, spec.victims, "both", NUM_STEPS)
        dist.destroy_process_group()
        return told
    buffer_kills.latency_step = latency_step
    return kill_round(rank, folder, Spec(spec.kind, spec.mode, "epee", num_ranks, spec.victims))


def play(pool: Pool, spec: EpRound) -> dict[str, Any]:
    """Run one round and check it; return what was covered: where, and as what, victims died."""
    workers = pool.hire(len(spec.placement))
    dead = set(spec.victims)
    try:
        with pool.folder() as folder:
            for rank, worker in enumerate(workers):
                worker.start(on_host, rank, folder, spec, timeout_s=ROUND_S)
            told = collect(workers, dead, ROUND_S)
    except AssertionError:
        for worker in workers:
            worker.result = None  # one that was to die may live: not to be used again
        raise
    finally:
        pool.release(workers)
    if spec.kind == "points":
        check(told, spec.mode, NUM_STEPS, dead, len(dead))
    else:
        seen = [answer for answer in told if answer != DEAD]
        assert all(masks == seen[0] for masks in seen), f"the survivors' syncs differ: {seen}"
    check_leftovers(pool, spec.placement, dead)
    where = {rank: point if spec.kind == "points" else spec.kind for rank, (_, point) in spec.victims.items()}
    return {
        "kills": len(dead),
        "covered": {f"{where[rank]} {_role(rank, spec.placement)} {spec.mode}" for rank in dead},
    }


def _role(rank: int, placement: Sequence[int]) -> str:
    """Return what a rank is beside a source and a destination: the gateway of how many."""
    return f"gateway of {len(Topology(rank, [str(host) for host in placement]).sources())}"
