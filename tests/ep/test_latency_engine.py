"""`LatencyBuffer`s on CPUs that have an engine of their own (`epee/ep/latency/one_host/members.py`), on trial.

The programs are those of the tests of a buffer without an engine: what holds for one holds for the other. With
`EPEE_TEST_ENGINE=1` all of these tests run in this way.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from epee.ep.hosts.rows import RowsPlan
from epee.ep.latency.one_host.members import EpochMembers, MemberExchange
from epee.errors import MismatchError
from tests.ep import test_latency_lane as lane
from tests.ep import test_latency_rejoin as rejoin
from tests.ep import test_latency_sync as sync
from tests.ep.latency_cases import Shape, check_round, make
from tests.harness import run_ranks


@pytest.fixture(autouse=True)
def _engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPEE_TEST_ENGINE", "1")


def _rounds(rank: int, num_ranks: int) -> str:
    with make(lane.SHAPE) as buffer:
        for seed in range(4):
            check_round(buffer, lane.SHAPE, (6, 3, 0, 5)[:num_ranks], seed, use_hook=seed % 2 == 0)
        assert buffer.all_gather_bytes(bytes([rank])) == [bytes([other]) for other in range(num_ranks)]
        return type(buffer._exchange.membership).__name__


def test_the_buffer_has_an_engine_and_the_results_of_the_reference() -> None:
    assert run_ranks(_rounds, 3) == [EpochMembers.__name__] * 3


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

    with make(lane.SHAPE, timeout=60) as buffer:
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


WITH_FOLDER: list[Callable[[Path], None]] = [
    sync.test_a_rank_that_was_stopped_comes_back,
    lane.test_who_does_not_come_to_sync_is_told_and_comes_back,
    lane.test_who_closes_its_buffer_is_lost_at_once,
    lane.test_nobody_waits_for_ever_for_who_was_taken_out_of_its_sync,
]
OTHERS: list[tuple[Callable[..., None], tuple[Any, ...]]] = [
    (sync.test_too_few_ranks_cannot_decide, ()),
    (lane.test_who_is_taken_out_of_a_sync_that_was_decided_enters_with_its_next_call, (KeyboardInterrupt, "move")),
    (lane.test_who_is_taken_out_of_a_sync_that_was_decided_enters_with_its_next_call, (KeyboardInterrupt, "use")),
    (lane.test_many_lives_leave_nothing, (12,)),
    (lane.test_a_buffer_that_cannot_be_made_leaves_nothing, ()),
    (rejoin.test_after_a_replacement_the_results_are_those_of_a_fresh_job, ((0, 0, 1),)),
    (rejoin.test_a_newcomer_that_dies_on_the_way_disturbs_nobody_and_the_next_one_comes_in, ("its line",)),
    (rejoin.test_a_member_that_dies_while_a_newcomer_comes_in, ("hello",)),
    (rejoin.test_a_newcomer_that_cannot_map_the_members_keeps_none_of_them_out, ()),
    (rejoin.test_a_stopped_rank_that_was_replaced_wakes_up_and_disturbs_nobody, ("writing",)),
]


@pytest.mark.parametrize("outcome", WITH_FOLDER, ids=lambda value: value.__name__)
def test_outcomes_in_a_folder(outcome: Callable[[Path], None], tmp_path: Path) -> None:
    outcome(tmp_path)


@pytest.mark.parametrize(("outcome", "args"), OTHERS, ids=lambda value: getattr(value, "__name__", None))
def test_outcomes(outcome: Callable[..., None], args: tuple[Any, ...]) -> None:
    outcome(*args)
