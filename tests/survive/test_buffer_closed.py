"""A rank closes its buffer after a call that met a death: slower ranks learn from what it leaves how that ended."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from epee.errors import RankFailedError
from tests.ep import moments
from tests.harness import DEAD, run_mortal
from tests.survive import stages
from tests.survive.buffer_rounds import arm, die, make_buffer, make_step, routing, rows, start


def closes_soon(rank: int, num_ranks: int, folder: str, on_stall: str) -> Any:
    """Rank 1 dies; rank 0 is told and closes its buffer; rank 2 comes to its verdict after that."""
    group = start(rank, num_ranks, folder, "raise", on_stall=on_stall, op_timeout=20.0)
    buffer = make_buffer(group, timeout=20.0)
    make_step(buffer, 0, "rank")
    stages.meet(folder, "made", rank, range(num_ranks))
    if rank == 1:
        stages.wait_for(folder, "begun")
        die()
    if rank == 2:
        moments.before_it_learns_of_a_loss(buffer, lambda: stages.wait_for(folder, "closed"))
        stages.reach(folder, "begun")
    with pytest.raises(RankFailedError) as caught:
        make_step(buffer, 1, "rank")
    assert caught.value.ranks == (1,)
    buffer.close()
    if rank == 0:
        stages.reach(folder, "closed")
    with pytest.raises(RankFailedError):  # the group tells it once as well
        dist.barrier(group=group)
    dist.barrier(group=group)
    return group.last_contributors()


@pytest.mark.parametrize("on_stall", ["error", "evict"])
def test_a_loss_is_told_alike_though_a_rank_that_knows_it_has_closed_the_buffer(on_stall: str) -> None:
    results = run_mortal(closes_soon, 4, on_stall, dead={1})
    assert results == [(0, 2, 3), DEAD, (0, 2, 3), (0, 2, 3)]


def finishes_and_closes(rank: int, num_ranks: int, folder: str, mode: str) -> Any:
    """Rank 0 has all rows of a combine, finishes it and closes; rank 1 dies before rank 2 has noted its own rows."""
    group = start(rank, num_ranks, folder, mode, on_stall="error", op_timeout=20.0)
    buffer = make_buffer(group, timeout=20.0)
    make_step(buffer, 0, "rank")
    stages.meet(folder, "made", rank, range(num_ranks))
    if rank == 1:
        arm(buffer, "combine: pulled", lambda: (stages.wait_for(folder, "closed"), die()))
    if rank == 2:
        # the combine of the second step; while a call goes on, the ranks of an engine cannot agree on its death
        moments.in_a_combine(buffer, lambda: stages.wait_for(folder, "closed"))
    idx, weights = routing(rank, num_ranks, 1)
    dispatched = buffer.dispatch(rows(rank, 1), idx, weights)
    got = buffer.combine(dispatched.x, dispatched.handle).got.tolist()
    buffer.close()
    if rank == 0:
        stages.reach(folder, "closed")
    stages.meet(folder, "end", rank, (0, 2))
    return got


@pytest.mark.parametrize("mode", ["raise", "mask"])
def test_a_call_ends_well_that_a_rank_has_finished_and_closed_after(mode: str) -> None:
    assert run_mortal(finishes_and_closes, 3, mode, dead={1}) == [[1, 1, 1], DEAD, [1, 1, 1]]
