"""The numbers of calls have an end: there a group ends in words, on all ranks, and a new one takes over."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from epee.engine import operation
from epee.errors import InvalidState
from epee.memory.signals import SEQ_BITS
from tests.harness import run_ranks
from tests.survive import stages

from . import cases

LAST = 20


def _sum(x: torch.Tensor, async_op: bool) -> None:
    work = dist.all_reduce(x, async_op=async_op)
    if work is not None:
        work.wait()


def beyond_the_last(rank: int, num_ranks: int, folder: str) -> int:
    operation.LAST_SEQ = LAST
    cases.init(rank, num_ranks, folder, op_timeout=30.0)
    engine = dist.group.WORLD._engine  # type: ignore[union-attr]
    while engine.seq < LAST:
        x = torch.full((3,), rank + 1.0)
        dist.all_reduce(x)
        assert x.tolist() == [3.0] * 3
    for turn in range(operation.NUM_CELLS + 8):  # as often as it is tried, also by calls that nobody waits for at once
        x = torch.full((3,), rank + 1.0)
        with pytest.raises(InvalidState, match="make a new one"):
            _sum(x, bool(turn % 2))
        assert x.tolist() == [rank + 1.0] * 3
    stages.meet(folder, "refused", rank, range(num_ranks))  # no refusal waits for the other rank
    dist.destroy_process_group()
    operation.LAST_SEQ = 1 << SEQ_BITS
    Path(f"{folder}/again").mkdir(exist_ok=True)
    cases.init(rank, num_ranks, f"{folder}/again")
    x = torch.full((3,), rank + 1.0)
    dist.all_reduce(x)
    dist.destroy_process_group()
    return int(x[0].item())


def test_a_group_whose_numbers_are_used_up_ends_in_words_on_all_ranks(tmp_path: Path) -> None:
    assert operation.LAST_SEQ < (1 << SEQ_BITS) - (1 << 31), "refused calls use up numbers as well"
    assert run_ranks(beyond_the_last, 2, str(tmp_path), backend=None) == [3, 3]
