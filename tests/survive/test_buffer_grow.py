"""A Buffer on a group that has grown, beside one that was made before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import epee
from tests.harness import run_mortal

from . import stages
from .buffer_rounds import HIDDEN, LOCAL, NUM_TOPK, TIMEOUT_S, make_step
from .growing import await_ranks, start


def buffer_of(num_ranks: int) -> epee.Buffer:
    return epee.Buffer(
        dist.group.WORLD,
        num_experts=LOCAL * num_ranks,
        hidden=HIDDEN,
        num_topk=NUM_TOPK,
        max_tokens_per_rank=16,
        dtype=torch.float32,
        timeout=TIMEOUT_S,
    )


def grows(rank: int, num_processes: int, folder: str, mode: str) -> list[Any]:
    """Ranks 0 and 1 found the group, 2 and 3 come; all make a buffer together, the founders keep their own."""
    small, done = None, []
    if rank < 2:
        group = start(rank, 2, folder, mode)
        small = buffer_of(2)
        done.append(make_step(small, 0, "rank"))
        stages.reach(folder, "born")
        await_ranks(group, 4)
        group.extend_group_size_to(4)
    else:
        stages.wait_for(folder, "born")
        start(rank, 4, folder, mode, joins=True)
    wide = buffer_of(4)
    assert wide.num_ranks == 4
    done += [make_step(wide, 1, "expert"), make_step(wide, 2, "rank")]
    if small is not None:
        done.append(make_step(small, 3, "rank"))  # the newcomers do not concern it
    return done


@pytest.mark.parametrize("mode", ["raise", "mask"])
def test_a_buffer_on_a_group_that_has_grown(mode: str) -> None:
    results = run_mortal(grows, 4, mode, dead=set(), timeout_s=60)
    assert results[0] == results[1]
    assert results[2] == results[3] == results[0][1:3]
    assert [got for _, _, got in results[0]] == [(1, 1), (1,) * 4, (1,) * 4, (1, 1)]
    assert results[0][0][1] == results[0][3][1], "the small buffer's epoch"
