"""Rounds over invented hosts: ranks, or whole hosts, die at random moments beside calls and syncs of a buffer.

The program and what it checks are those of `tests/survive/buffer_kills.py`. By hand, many of them, and deaths at drawn
points of a step (`survival_steps.py`):

    python -m tests.hosts.survival_rounds --kills 200 --host-kills 40
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from typing import Any

import torch

import epee
from tests.harness import DEAD, Pool, collect, run_mortal
from tests.survive import buffer_kills
from tests.survive.buffer_kills import KINDS, LONG_S, NUM_SYNCS, ROUND_S, Spec, kill_round, routing, sums, value

from .stand_in import POINTS, invent_hosts
from .stand_in_latency import invent_hosts_for_latency
from .survival_steps import BETWEEN, check, program

PLACEMENTS = ((0, 0, 1, 1), (0, 1, 1, 1), (0, 1, 2, 2), (0, 1, 0, 1), (0, 0, 0, 1))
NUM_STEPS = 6
assert LONG_S > ROUND_S


def draw(seed: int, is_host: bool) -> tuple[Spec, tuple[int, ...]]:
    """Return the round of a seed and where its ranks are; `is_host`: all ranks of a host die within a millisecond."""
    dice = random.Random(seed)
    kind, mode = KINDS[seed % len(KINDS)]
    placement = dice.choice(PLACEMENTS)
    victims = dice.sample(range(4), dice.choice((1, 1, 2)))
    stretch, when = dice.randrange(NUM_SYNCS - 1), dice.random() * 25
    if is_host:
        host = dice.choice([host for host in set(placement) if placement.count(host) <= 2])
        victims = [rank for rank in range(4) if placement[rank] == host]
    moments = {
        rank: (stretch, when + dice.random()) if is_host else (dice.randrange(NUM_SYNCS - 1), dice.random() * 25)
        for rank in victims
    }
    return Spec(kind, mode, "epee", 4, moments), placement


def latency_step(buffer: epee.LatencyBuffer, mask: torch.Tensor, step: int) -> None:
    """A dispatch and a combine with a mask: whole sources, and sums over those whom the combine names."""
    rank, num_ranks = buffer.rank, buffer.num_ranks
    idx, weights = routing(rank, num_ranks, step)
    x = torch.full((len(idx), buffer.config.hidden), value(rank, step), dtype=torch.bfloat16)
    d: Any = buffer.dispatch(x, idx, weights, active_ranks=mask)
    rows = [d.x[expert, :count, 0] for expert, count in enumerate(d.num_tokens_per_expert.tolist())]
    sources = d.got.nonzero().flatten().tolist()
    want = [row for src in sources for row in buffer_kills.rows_for(rank, src, num_ranks, step)]
    assert sorted(torch.cat(rows).tolist()) == sorted(want)
    c: Any = buffer.combine(d.x * 2, d.handle, active_ranks=mask)
    got = c.got.tolist()
    assert c.x[:, 0].tolist() == sums(rank, num_ranks, step, got)
    there = torch.tensor(got, dtype=torch.bool)[idx // buffer_kills.LOCAL]
    assert torch.equal(c.lost_weight, torch.where(there, 0.0, weights).sum(1))


def on_hosts(rank: int, folder: str, spec: Spec, placement: tuple[int, ...]) -> Any:
    """One rank's program."""
    if spec.kind == "latency":
        invent_hosts_for_latency(placement)
        buffer_kills.latency_step = latency_step
    else:
        invent_hosts(placement)
    return kill_round(rank, folder, spec)


def play(pool: Pool, spec: Spec, placement: tuple[int, ...]) -> int:
    """Run one round; all survivors must have agreed on the same masks. Return how many have died."""
    workers = pool.hire(spec.num_ranks)
    try:
        with pool.folder() as folder:
            for rank, worker in enumerate(workers):
                worker.start(on_hosts, rank, folder, spec, placement, timeout_s=ROUND_S)
            results = collect(workers, set(spec.victims), ROUND_S)
    finally:
        pool.release(workers)
    seen = [result for result in results if result != DEAD]
    assert len(seen) == spec.num_ranks - len(spec.victims), results
    assert all(masks == seen[0] for masks in seen), f"the survivors' syncs differ: {seen}"
    return len(spec.victims)


def play_at_a_point(seed: int, is_host: bool) -> int:
    """Kill at a drawn point of a step; return how many have died."""
    dice = random.Random(seed)
    spec, placement = draw(seed, is_host)
    step = dice.randrange(1, NUM_STEPS)
    victims = {rank: (step, dice.choice([*POINTS, BETWEEN])) for rank in spec.victims}
    mode = dice.choice(("raise", "mask"))
    told = run_mortal(program, 4, mode, placement, victims, "both", NUM_STEPS, dead=set(victims))
    check(told, mode, NUM_STEPS, set(victims), len(victims))
    return len(victims)


def main() -> int:
    """Parse the command line, run, report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=0, help="ranks to kill, one half at points, one at moments")
    parser.add_argument("--host-kills", type=int, default=0, help="hosts to kill, likewise")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    began, violations = time.monotonic(), 0
    with Pool() as pool:
        for is_host, wanted in ((False, args.kills), (True, args.host_kills)):
            done = rounds = 0
            while done < wanted:
                seed = args.seed + rounds
                try:
                    died = play(pool, *draw(seed, is_host)) if rounds % 2 else play_at_a_point(seed, is_host)
                    done += 1 if is_host else died
                except AssertionError as error:
                    violations += 1
                    done += 1
                    print(f"seed {seed}, {'hosts' if is_host else 'ranks'}, round {rounds}: {error}", flush=True)
                rounds += 1
            print(f"{done} {'hosts' if is_host else 'ranks'} killed in {rounds} rounds", flush=True)
    print(f"{violations} violations, {time.monotonic() - began:.0f} s")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
