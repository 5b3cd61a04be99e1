"""`LatencyBuffer`s on CPUs: interrupts in the calls of their engine (`epee/ep/latency/one_host/members.py`)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from epee.ep.latency.one_host.members import MemberExchange
from epee.ep.members.rows import RowsPlan
from epee.errors import MismatchError
from tests.ep import test_latency_lane as latency_tests
from tests.ep import test_latency_rejoin as rejoin
from tests.ep.latency_cases import Shape, make
from tests.harness import run_ranks


def _mixed(rank: int, num_ranks: int) -> list[int]:
    """Rank 1 makes a call with a number of bytes while rank 0 waits in `sync`: both hear of it, and may go on."""
    with make(Shape(), timeout=60) as buffer:
        mask = torch.ones(num_ranks, dtype=torch.int32)
        with pytest.raises(MismatchError, match="another call"):
            buffer.sync(mask) if rank == 0 else buffer.all_gather_bytes(bytes(80))
        found: list[int] = buffer.sync(mask).tolist()
        return found


def test_a_sync_is_no_call_with_bytes() -> None:
    assert run_ranks(_mixed, 2) == [[1, 1]] * 2


def _interrupted(rank: int, num_ranks: int, moment: str) -> list[int]:
    """An interrupt takes rank 1 out of the call of the engine that ends its `sync`: it enters with its next call."""
    owner: Any = MemberExchange if moment == "behind" else RowsPlan
    name = "run" if moment == "behind" else "commit"
    works = getattr(owner, name)

    def breaks(*args: Any) -> None:
        works(*args)
        setattr(owner, name, works)
        raise KeyboardInterrupt(moment)

    with make(latency_tests.SHAPE, timeout=60) as buffer:
        mask = torch.ones(num_ranks, dtype=torch.int32)
        if rank == 1:
            setattr(owner, name, breaks)
            with pytest.raises(KeyboardInterrupt):
                buffer.sync(mask)
        else:
            assert buffer.sync(mask).tolist() == [1] * num_ranks
        for seed in range(1, 4):
            rejoin.masked_round(buffer, mask, seed, rejoin.without(num_ranks))
        assert buffer.sync(mask).tolist() == [1] * num_ranks
        rejoin.masked_round(buffer, mask, 5, rejoin.without(num_ranks))
        return [buffer.epoch]


@pytest.mark.parametrize("moment", ["inside", "behind"])
def test_who_is_interrupted_in_the_call_of_a_sync_enters_with_its_next_call(moment: str) -> None:
    assert run_ranks(_interrupted, 3, moment) == [[3]] * 3
