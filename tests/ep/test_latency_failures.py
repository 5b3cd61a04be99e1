"""`LatencyBuffer` when a rank stays away, exits, is killed or stopped, at any step; and who takes part afterwards.

Four ranks, one of them the victim. It acts at a given step of its second round. The survivors go on with their masks
and compare everything with the oracle, told what each call reports in `got`: whatever the victim had sent before, a
source is in a result as a whole or not at all. Their reports come back through files, because the harness counts an
exit as a failure of the run.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import epee
from epee.reference import latency as oracle
from tests.ep.latency_cases import (
    BF16,
    Shape,
    bits,
    check_dispatched,
    combine,
    dispatch,
    inputs,
    make,
)
from tests.harness import RankFailure, run_ranks

SHAPE = Shape(num_experts=8, hidden=256, num_topk=3, max_tokens=5)
NUM_TOKENS = (5, 3, 4, 5)
VICTIM = 1
LONG_US = 300_000_000  # a wait of that length fails the test by its own time-out
SHORT_US = 3_000_000  # a busy machine may keep a rank that is well from its core for a second or two


def outputs(x: torch.Tensor, rank: int, num_local: int) -> torch.Tensor:
    """Expert outputs that follow from the rows alone, wherever these lie: the row times a factor of the expert."""
    factors = torch.arange(rank * num_local, (rank + 1) * num_local) % 3 + 1
    return (x.to(torch.float32) * factors[:, None, None]).to(BF16)


def masked_round(
    buffer: epee.LatencyBuffer,
    mask: torch.Tensor,
    seed: int,
    timeout_us: int,
    step: Callable[[str], None] = lambda name: None,
    late_weights: bool = False,
) -> tuple[list[bool], list[bool]]:
    """One round with hooks; returns the `got` of both calls, after comparing everything with the oracle."""
    rank, num_ranks = buffer.rank, buffer.num_ranks
    given = inputs(SHAPE, NUM_TOKENS[:num_ranks], seed)
    options: dict[str, Any] = {"active_ranks": mask, "timeout_us": timeout_us, "return_hook": True}
    num_local = SHAPE.num_experts // num_ranks
    step("before dispatch")
    there = dispatch(buffer, given[rank], **options)
    step("dispatch sent")
    assert there.hook is not None
    there.hook()
    step("received")
    reported = there.got.tolist()
    check_dispatched(
        there, oracle.dispatch(given, SHAPE.num_experts, SHAPE.max_tokens, got=[reported] * num_ranks)[rank]
    )
    assert isinstance(there.x, torch.Tensor)
    weights = [torch.ones_like(each.topk_weights) if late_weights else each.topk_weights for each in given]
    y = outputs(there.x, rank, num_local)
    back = combine(buffer, y, there, **options, topk_weights=weights[rank] if late_weights else None)
    step("combine sent")
    assert back.hook is not None
    back.hook()
    step("combined")
    counted = back.got.tolist()
    full = oracle.dispatch(given, SHAPE.num_experts, SHAPE.max_tokens)
    everything = [outputs(each.x, src, num_local) for src, each in enumerate(full) if isinstance(each.x, torch.Tensor)]
    want = oracle.combine(given, full, everything, topk_weights=weights, got=[counted] * num_ranks)[rank]
    assert torch.equal(bits(back.x), bits(want))
    assert torch.equal(back.lost_weight, oracle.lost_weight(given[rank], num_local, counted, weights[rank]))
    lost = [src for src in range(num_ranks) if not (reported[src] and counted[src])]
    assert all(mask[src] == 0 for src in lost)
    return reported, counted


def act(kind: str) -> None:
    """What a victim does."""
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "exit":
        os._exit(0)
    elif kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(3600)  # away


def post_after(buffer: epee.LatencyBuffer, num_posts: int, then: Callable[[], None]) -> None:
    """Let this rank post that many halves more, then do something before the next one: its rows lie there, no tag."""
    wire = buffer._path.wire  # type: ignore[union-attr]
    posts = [num_posts]
    post = wire.post

    def counted(*args: Any) -> None:
        if not posts[0]:
            then()
        posts[0] -= 1
        post(*args)

    wire.post = counted  # type: ignore[method-assign]


HALVES = {
    "rows without a tag": 0,
    "dispatch sent to one": 1,
    "dispatch sent to two": 2,
    "partials without a tag": 4,
    "combine sent to one": 5,
}
STEPS = ("before dispatch", "dispatch sent", "received", "combine sent", "combined")


def _survive(rank: int, num_ranks: int, folder: str, kind: str, when: str) -> None:
    buffer = make(SHAPE, timeout=60)
    pid = Path(folder) / "victim"
    if rank == VICTIM:
        pid.write_text(str(os.getpid()))
    mask = torch.ones(num_ranks + 2, dtype=torch.int32)  # longer than needed
    masked_round(buffer, mask, 0, LONG_US)
    assert mask.all()
    timeout_us = SHORT_US if kind in ("away", "stop") else LONG_US
    seen = []
    if rank == VICTIM:
        if when in HALVES:
            post_after(buffer, HALVES[when], lambda: act(kind))

        def step(name: str) -> None:
            if name == when:
                act(kind)

        masked_round(buffer, mask, 1, timeout_us, step)
    for seed in range(1, 12):
        wait_limit_us = timeout_us if mask[VICTIM] else LONG_US  # nobody else is to be lost
        seen.append(masked_round(buffer, mask, seed, wait_limit_us, late_weights=seed % 2 == 0))
    agreed = buffer.sync(mask, timeout=30)
    assert torch.equal(agreed, mask[:num_ranks])
    last = masked_round(buffer, mask, 99, LONG_US)
    report = {"seen": seen, "mask": mask.tolist(), "last": last}
    partial = Path(folder) / f"{rank}.partial"
    partial.write_text(json.dumps(report))
    partial.rename(Path(folder) / f"{rank}.json")
    if rank == 0:  # the run ends when all ranks have: one that is away or stopped would keep it waiting
        while not all((Path(folder) / f"{other}.json").exists() for other in range(num_ranks) if other != VICTIM):
            time.sleep(0.01)
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid.read_text()), signal.SIGKILL)


def survivors_of(kind: str, when: str, folder: Path) -> list[dict[str, Any]]:
    """Run the ranks; returns the survivors' reports."""
    if kind == "exit":
        with pytest.raises(RankFailure) as caught:
            run_ranks(_survive, 4, str(folder), kind, when)
        assert all(f"rank {rank}:" not in str(caught.value) for rank in range(4) if rank != VICTIM), caught.value
    else:
        run_ranks(_survive, 4, str(folder), kind, when, dead={VICTIM})
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(4) if rank != VICTIM]


def check_reports(reports: list[dict[str, Any]]) -> None:
    """Nobody healthy was lost, and everybody lost the victim by the round after."""
    others = [rank for rank in range(4) if rank != VICTIM]
    for report in reports:
        assert report["mask"] == [1, 0, 1, 1, 1, 1]
        for reported, counted in report["seen"]:
            assert all(reported[rank] and counted[rank] for rank in others)
        for reported, counted in [*report["seen"][2:], report["last"]]:
            assert not reported[VICTIM]
            assert not counted[VICTIM]


@pytest.mark.parametrize("when", [*STEPS, *HALVES])
def test_survivors_of_a_kill_go_on(tmp_path: Path, when: str) -> None:
    check_reports(survivors_of("kill", when, tmp_path))


@pytest.mark.parametrize("when", ["dispatch sent"])
def test_survivors_of_an_exit_go_on(tmp_path: Path, when: str) -> None:
    check_reports(survivors_of("exit", when, tmp_path))


@pytest.mark.parametrize(
    ("kind", "when"),
    [
        ("away", "before dispatch"),
        ("away", "combine sent to one"),
        ("stop", "dispatch sent to one"),
        ("stop", "received"),
        ("stop", "partials without a tag"),
    ],
)
def test_a_silent_rank_is_left_out_after_the_time_out(tmp_path: Path, kind: str, when: str) -> None:
    check_reports(survivors_of(kind, when, tmp_path))
