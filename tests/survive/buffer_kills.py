"""Rounds in which ranks of a buffer die at random moments, beside calls and syncs; what the survivors must agree on.

Each rank sends tokens whose rows, and what experts make of them, follow from rank, step and token, so everybody can say
what each result must be, given who is in it. Numbers are small enough for all sums to be exact in bfloat16.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import epee
from epee.errors import RankFailedError, StaleHandleError
from tests.harness import DEAD, Pool, collect

from . import stages
from .buffer_rounds import start

LOCAL, HIDDEN, NUM_TOKENS = 2, 128, 5
NUM_SYNCS, STEPS_BETWEEN = 6, 3
LONG_S = 100.0  # longer than a round may take: nobody is lost by a time-out
ROUND_S = 90.0
KINDS = (("throughput", "raise"), ("throughput", "mask"), ("latency", "mask"))
BACKENDS = ("gloo", "epee")


class Spec(NamedTuple):
    """One round: a kind of buffer, and who dies in which stretch between two syncs, and how many ms after its begin."""

    kind: str
    mode: str
    backend: str
    num_ranks: int
    victims: dict[int, tuple[int, float]]


def draw(seed: int) -> Spec:
    """Return the round of a seed."""
    dice = random.Random(seed)
    kind, mode = KINDS[seed % len(KINDS)]
    num_ranks = dice.choice((3, 4))
    victims = dice.sample(range(num_ranks), dice.choice((1, 1, 2)))
    when = {rank: (dice.randrange(NUM_SYNCS - 1), dice.random() * 25) for rank in victims}
    return Spec(kind, mode, dice.choice(BACKENDS), num_ranks, when)


def value(rank: int, step: int) -> float:
    """What every element of a rank's rows is in a step."""
    return 1.0 + rank + 5 * (step % 8)


def routing(rank: int, num_ranks: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two experts, on different ranks, for each token; weights 1 and 2."""
    dice = random.Random(100 * step + rank)
    owners = [dice.sample(range(num_ranks), 2) for _ in range(NUM_TOKENS)]
    idx = torch.tensor([[LOCAL * owner + dice.randrange(LOCAL) for owner in pair] for pair in owners])
    return idx, torch.tensor([[1.0, 2.0]] * NUM_TOKENS)


def rows_for(rank: int, src: int, num_ranks: int, step: int) -> list[float]:
    """The rows that `rank` gets from `src`, one per token and expert of it."""
    idx = routing(src, num_ranks, step)[0]
    return [value(src, step)] * int((idx // LOCAL == rank).sum())


def sums(rank: int, num_ranks: int, step: int, got: list[int]) -> list[float]:
    """What `rank` gets back for its tokens when these ranks answer; experts return twice what they get."""
    idx, weights = routing(rank, num_ranks, step)
    there = torch.tensor(got, dtype=torch.float32)[idx // LOCAL]
    return (2 * value(rank, step) * (weights * there).sum(1)).tolist()


def throughput_step(buffer: epee.Buffer, mask: torch.Tensor, step: int) -> None:
    """A dispatch in the expert layout and a combine; made again when a loss has ended it, as docs/buffer.md says."""
    rank, num_ranks = buffer.rank, buffer.num_ranks
    idx, weights = routing(rank, num_ranks, step)
    x = torch.full((NUM_TOKENS, HIDDEN), value(rank, step), dtype=torch.bfloat16)
    while True:
        try:
            d = buffer.dispatch(x, idx, weights, layout="expert")
            c = buffer.combine(d.x * 2, d.handle)  # type: ignore[operator]
            break
        except (RankFailedError, StaleHandleError):  # the latter in mode "mask", behind a dispatch
            continue
    assert d.got is not None
    assert c.got is not None
    want = sorted(row for src in d.got.nonzero().flatten().tolist() for row in rows_for(rank, src, num_ranks, step))
    assert sorted(d.x[:, 0].tolist()) == want  # type: ignore[call-overload]
    assert c.x[:, 0].tolist() == sums(rank, num_ranks, step, c.got.tolist())
    mask[:] = c.got


def latency_step(buffer: epee.LatencyBuffer, mask: torch.Tensor, step: int) -> None:
    """A dispatch and a combine with a mask."""
    rank, num_ranks = buffer.rank, buffer.num_ranks
    idx, weights = routing(rank, num_ranks, step)
    x = torch.full((NUM_TOKENS, HIDDEN), value(rank, step), dtype=torch.bfloat16)
    d: Any = buffer.dispatch(x, idx, weights, active_ranks=mask)
    rows = [d.x[expert, :count, 0] for expert, count in enumerate(d.num_tokens_per_expert.tolist())]
    want = sorted(row for src in d.got.nonzero().flatten().tolist() for row in rows_for(rank, src, num_ranks, step))
    assert sorted(torch.cat(rows).tolist()) == want
    c: Any = buffer.combine(d.x * 2, d.handle, active_ranks=mask)
    got = c.got.tolist()
    has_tokens = [bool((idx // LOCAL == other).any()) for other in range(num_ranks)]
    assert c.x[:, 0].tolist() == sums(rank, num_ranks, step, got)
    for other in range(num_ranks):  # who counts, and had tokens, has answered
        assert got[other] or not mask[other] or not has_tokens[other], (got, mask.tolist())


def kill_round(rank: int, folder: str, spec: Spec) -> list[list[int]]:
    """Make steps and syncs; return the mask that each sync ended with."""
    group = start(rank, spec.num_ranks, folder, spec.mode, backend=spec.backend, on_stall="error", op_timeout=LONG_S)
    sizes = {"num_experts": LOCAL * spec.num_ranks, "hidden": HIDDEN, "num_topk": 2, "max_tokens_per_rank": NUM_TOKENS}
    more: dict[str, Any] = {}
    if spec.kind == "throughput":  # as many rows as there can be: in some steps all tokens meet at one rank
        more = {"fault_mode": spec.mode, "on_stall": "error", "max_recv_rows": 2 * NUM_TOKENS * spec.num_ranks}
    kinds: dict[str, tuple[Any, Any]] = {
        "throughput": (epee.Buffer, throughput_step),
        "latency": (epee.LatencyBuffer, latency_step),
    }
    make, make_step = kinds[spec.kind]
    buffer = make(group, timeout=LONG_S, **sizes, **more)
    mask = torch.ones(spec.num_ranks, dtype=torch.int32)
    stages.meet(folder, "made", rank, range(spec.num_ranks))
    agreed = []
    for stretch in range(NUM_SYNCS):
        if rank in spec.victims and spec.victims[rank][0] == stretch:
            threading.Timer(spec.victims[rank][1] / 1e3, os.kill, (os.getpid(), signal.SIGKILL)).start()
        for step in range(STEPS_BETWEEN):
            make_step(buffer, mask, STEPS_BETWEEN * stretch + step)
        agreed.append(buffer.sync(mask).tolist())
    if rank in spec.victims:
        threading.Event().wait(LONG_S)  # the timer is under way
    for step in range(3):
        make_step(buffer, mask, 100 + step)
        assert mask.tolist() == [int(other not in spec.victims) for other in range(spec.num_ranks)]
    survivors = [other for other in range(spec.num_ranks) if other not in spec.victims]
    stages.meet(folder, "end", rank, survivors)
    buffer.close()
    dist.destroy_process_group()
    return agreed


def play(pool: Pool, spec: Spec) -> int:
    """Run one round and check that all survivors have agreed on the same masks; return how many have died."""
    workers = pool.hire(spec.num_ranks)
    try:
        with pool.folder() as folder:
            for rank, worker in enumerate(workers):
                worker.start(kill_round, rank, folder, spec, timeout_s=ROUND_S)
            results = collect(workers, set(spec.victims), ROUND_S)
    finally:
        pool.release(workers)
    seen = [result for result in results if result != DEAD]
    assert len(seen) == spec.num_ranks - len(spec.victims), results
    assert all(masks == seen[0] for masks in seen), f"the survivors' syncs differ: {seen}"
    assert all(seen[0][-1][rank] for rank in range(spec.num_ranks) if rank not in spec.victims), seen[0]
    return len(spec.victims)
