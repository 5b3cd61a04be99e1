"""What a review found: calls that left the ranks out of step, and settings of one process that leaked into results."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist

from epee.errors import EpeeError
from tests.harness import run_ranks


def _in_step(rank: int, num_ranks: int) -> None:
    """Numbers that differ from call to call: a rank that is one call behind gets another sum."""
    for number in range(3):
        x = torch.full((3,), float(10**number))
        dist.all_reduce(x)
        assert x.tolist() == [num_ranks * 10.0**number] * 3


def _mixed_coalesced(rank: int, num_ranks: int) -> list[str]:
    group = dist.group.WORLD
    opts = torch._C._distributed_c10d.AllreduceCoalescedOptions()
    gather_opts = torch._C._distributed_c10d.AllgatherOptions()
    seen = []
    other = torch.int64 if rank == 0 else torch.float32
    wide = torch.ones(1).expand(3) if rank == 0 else torch.ones(3)
    lists = [[torch.ones(2 if rank == 0 else 3)] for _ in range(num_ranks)]
    for call in (
        lambda: group.allreduce_coalesced([torch.ones(2), torch.ones(2, dtype=other)], opts).wait(),
        lambda: group.allreduce_coalesced([torch.ones(3), wide], opts).wait(),
        lambda: group.allgather_coalesced(lists, [torch.ones(3)], gather_opts).wait(),
        lambda: dist.all_to_all_single(torch.ones(4), torch.ones(4), None, [2.0, 2.0] if rank == 0 else [2, 2]),
    ):
        try:
            call()
            seen.append("returned")
        except (EpeeError, TypeError) as exc:
            seen.append(type(exc).__name__)
        _in_step(rank, num_ranks)
    return seen


def test_refusals_of_one_rank_leave_all_in_step() -> None:
    refused, peers = run_ranks(_mixed_coalesced, 2, backend="epee")
    assert refused[:3] == ["InvalidArgument"] * 3
    assert refused[3] in ("InvalidArgument", "TypeError")
    assert peers == ["MismatchError"] * 4


def _numpy_settings(rank: int, num_ranks: int, count: int) -> None:
    if rank == 0:
        np.seterr(all="raise")
    x = torch.full((count,), float("inf") if rank == 0 else float("-inf"))
    dist.all_reduce(x)
    assert x.isnan().all()
    y = torch.full((count,), 3e38)
    dist.all_reduce(y)
    assert y.isinf().all()
    _in_step(rank, num_ranks)


@pytest.mark.parametrize("count", [2, 200_000])
def test_numpy_settings_of_one_rank_do_not_decide_a_reduction(count: int) -> None:
    run_ranks(_numpy_settings, 2, count, backend="epee")
