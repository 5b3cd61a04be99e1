"""`Buffer.sync`: one mask for all, whoever had counted out whom; a stopped rank comes back; too few cannot decide."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import epee
from epee.errors import NoQuorumError
from tests.ep.latency_cases import Shape, check_round, dispatch, inputs, make
from tests.harness import run_ranks
from tests.survive import stages

SHAPE = Shape()
NUM_TOKENS = (6, 3, 0, 5)
LONG_US = 300_000_000  # a wait of that length fails the test by its own time-out


def _mask(*marks: int) -> torch.Tensor:
    return torch.tensor(marks, dtype=torch.int32)


def _healthy(rank: int, num_ranks: int) -> list[list[int]]:
    seen = []
    with make(SHAPE) as buffer:
        for seed in range(12):  # more rounds than decisions are kept
            if seed % 4 == 0:
                check_round(buffer, SHAPE, NUM_TOKENS[:num_ranks], seed)
            seen.append(buffer.sync().tolist())
        mask = torch.full((num_ranks + 1,), 7, dtype=torch.int32)
        buffer.sync(mask)
        seen.append(mask.tolist())
    return seen


def test_healthy_ranks_stay_in() -> None:
    for seen in run_ranks(_healthy, 4):
        assert seen == [[1] * 4] * 12 + [[1, 1, 1, 1, 7]]


def _feud(rank: int, num_ranks: int) -> None:
    """Ranks 0 and 1 count each other out; 2 and 3 see both. Calls differ in who is in; then all are again."""
    with make(SHAPE) as buffer:
        masks = {0: _mask(1, 0, 1, 1), 1: _mask(0, 1, 1, 1)}
        mask = masks.get(rank, _mask(1, 1, 1, 1))
        given = inputs(SHAPE, NUM_TOKENS, 1)[rank]
        got = dispatch(buffer, given, active_ranks=mask)
        assert got.got.tolist() == [bool(mark) for mark in mask.tolist()]
        if rank == 3:  # it makes calls that the others do not
            alone = _mask(0, 0, 0, 1)
            for _ in range(3):
                dispatch(buffer, given, active_ranks=alone)
        assert buffer.sync(mask).tolist() == [1, 1, 1, 1]
        assert mask.all()
        for seed in range(2, 6):
            check_round(buffer, SHAPE, NUM_TOKENS, seed, active_ranks=mask, use_hook=seed % 2 == 0)
        assert mask.all()


def test_ranks_that_counted_each_other_out_meet_again() -> None:
    run_ranks(_feud, 4)


def _are_all_in(mask: torch.Tensor) -> bool:
    """Return the same on all ranks: whether each of them counts all."""
    told = mask.min().clone()
    dist.all_reduce(told, dist.ReduceOp.MIN)
    return bool(told)


def _stopped(rank: int, num_ranks: int, folder: str) -> None:
    """Rank 1 is stopped; the others agree without it, then it goes on and comes back."""
    with make(SHAPE) as buffer:
        mask = torch.ones(num_ranks, dtype=torch.int32)
        check_round(buffer, SHAPE, NUM_TOKENS, 1, active_ranks=mask)
        pid = Path(folder) / "pid"
        if rank == 1:
            pid.write_text(str(os.getpid()))
            dist.barrier()
            os.kill(os.getpid(), signal.SIGSTOP)
            given = inputs(SHAPE, NUM_TOKENS, 2)[rank]
            got = dispatch(buffer, given, active_ranks=mask, timeout_us=30_000_000)
            assert got.got.all()  # the others had sent before they gave it up
            dispatch(buffer, given, active_ranks=mask, timeout_us=30_000_000)
            assert mask.tolist() == [0, 1, 0, 0], mask.tolist()
        else:
            dist.barrier()
            given = inputs(SHAPE, NUM_TOKENS, 2)[rank]
            for _ in range(4):  # the first one waits in vain; nobody else may be lost where the machine is busy
                dispatch(buffer, given, active_ranks=mask, timeout_us=3_000_000 if mask[1] else LONG_US)
            assert mask.tolist() == [1, 0, 1, 1]
            assert buffer.sync(mask, timeout=30).tolist() == [1, 0, 1, 1]
            stages.meet(folder, "agreed", rank, (0, 2, 3))
            if rank == 0:
                stages.await_stop(int(pid.read_text()))
                os.kill(int(pid.read_text()), signal.SIGCONT)
        for _ in range(20):  # who is not in is not waited for: it may come when the others have decided
            if _are_all_in(mask):
                break
            with contextlib.suppress(*([NoQuorumError] if rank == 1 else [])):
                buffer.sync(mask, timeout=20)
        for seed in range(3, 7):
            check_round(buffer, SHAPE, NUM_TOKENS, seed, active_ranks=mask)
        assert mask.all()


def test_a_rank_that_was_stopped_comes_back(tmp_path: Path) -> None:
    run_ranks(_stopped, 4, str(tmp_path))


def _too_few(rank: int, num_ranks: int) -> str:
    """Rank 0 alone is half of two and has the lowest: it decides. Rank 1 alone cannot."""
    with make(SHAPE) as buffer:
        text = ""
        if rank == 1:
            with pytest.raises(NoQuorumError) as caught:
                buffer.sync(_mask(0, 1), timeout=0.2)
            text = str(caught.value)
        dist.barrier()
        if rank == 0:
            mask = _mask(1, 0)
            assert buffer.sync(mask, timeout=0.2).tolist() == [1, 0]
        dist.barrier()
        if rank == 1:
            with pytest.raises(NoQuorumError, match="the others did not sync"):
                buffer.sync(timeout=0.2)
        dist.barrier()
        return text


def test_too_few_ranks_cannot_decide() -> None:
    assert "only ranks [1] of [0, 1] came" in run_ranks(_too_few, 2)[1]


def _deaths(rank: int, num_ranks: int, folder: str) -> None:
    """One after the other dies, rank 0 first, in whose memory the decisions lie; the rest goes on."""
    buffer = make(SHAPE)
    mask = torch.ones(num_ranks, dtype=torch.int32)
    seen: list[Any] = []
    for victim in range(num_ranks):
        dist_free_round(buffer, mask, victim)
        if rank == victim:
            (Path(folder) / f"{rank}.json").write_text(json.dumps(seen))
            os.kill(os.getpid(), signal.SIGKILL)
        seen.append(buffer.sync(mask, timeout=30).tolist())


def dist_free_round(buffer: epee.LatencyBuffer, mask: torch.Tensor, seed: int) -> None:
    """A dispatch with whoever is left."""
    given = inputs(SHAPE, NUM_TOKENS, seed)[buffer.rank]
    got = dispatch(buffer, given, active_ranks=mask, timeout_us=LONG_US)
    assert got.got.tolist() == [bool(mark) for mark in mask.tolist()]


def test_ranks_that_die_one_after_the_other_leave_an_agreed_rest(tmp_path: Path) -> None:
    run_ranks(_deaths, 4, str(tmp_path), dead=range(4))
    masks = [[0, 1, 1, 1], [0, 0, 1, 1], [0, 0, 0, 1]]
    for rank in range(4):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == masks[:rank]
