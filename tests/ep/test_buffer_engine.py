"""Buffers on CPUs that have an engine of their own (`epee/ep/hosts/direct.py`), on trial: outcomes and results.

The programs are those of tests/survive and of the drawn cases: what holds for a buffer without an engine holds for one
with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from epee.ep import base
from tests.ep.test_buffer_properties import agrees
from tests.harness import run_mortal
from tests.survive import test_buffer_return as returns
from tests.survive import test_buffer_sync as syncs
from tests.survive import test_buffer_tables as outcomes
from tests.survive.buffer_rounds import make_buffer, start


@pytest.fixture(autouse=True)
def _engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPEE_TEST_ENGINE", "1")


def around(rank: int, num_ranks: int, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function in a rank whose buffers have engines."""
    base.ON_ENGINE = True
    try:
        return function(rank, num_ranks, *args)
    finally:
        base.ON_ENGINE = False


def _kind(rank: int, num_ranks: int, folder: str, backend: str) -> str:
    with make_buffer(start(rank, num_ranks, folder, "raise", backend=backend)) as buffer:
        return type(buffer._exchange).__name__


@pytest.mark.parametrize("backend", outcomes.BACKENDS)
def test_the_buffer_has_an_engine(backend: str) -> None:
    assert run_mortal(_kind, 2, backend, dead=set()) == ["DirectExchange"] * 2


@pytest.mark.parametrize("moment", ["before", "inside"])
@pytest.mark.parametrize("op", ["dispatch", "combine", "all_gather_bytes"])
@pytest.mark.parametrize(("mode", "backend"), [("raise", "gloo"), ("mask", "epee")])
def test_a_call_that_loses_a_rank(mode: str, backend: str, op: str, moment: str) -> None:
    outcomes.test_a_call_that_loses_a_rank(mode, backend, op, moment)


OUTCOMES: list[tuple[Callable[..., None], tuple[Any, ...]]] = [
    (outcomes.test_each_loss_is_raised_once, ("raise",)),
    (outcomes.test_each_loss_is_raised_once, ("mask",)),
    (outcomes.test_a_refused_call_beside_a_loss, ()),
    (outcomes.test_a_rank_that_has_left, ("raise", "epee")),
    (outcomes.test_a_rank_that_has_left, ("mask", "gloo")),
    (outcomes.test_on_stall_error_names_the_silent_rank_and_all_may_repeat, ("dispatch", "epee")),
    (outcomes.test_on_stall_error_names_the_silent_rank_and_all_may_repeat, ("combine", "epee")),
    (outcomes.test_on_stall_evict_votes_the_silent_rank_out_for_good, ("raise", "epee")),
    (outcomes.test_on_stall_evict_votes_the_silent_rank_out_for_good, ("mask", "gloo")),
    (outcomes.test_on_stall_wait_waits, ()),
    (outcomes.test_calls_that_cannot_be_made, ("gloo",)),
    (outcomes.test_an_interrupt_in_a_wait_gives_the_call_up_on_all_ranks, ("dispatch",)),
    (outcomes.test_an_interrupt_in_a_wait_gives_the_call_up_on_all_ranks, ("combine",)),
    (outcomes.test_a_buffer_closed_in_mid_call_ends_the_call, ()),
    (outcomes.test_a_rank_that_does_not_come_to_sync_is_out_and_may_come_back, ("raise", "epee")),
    (outcomes.test_a_rank_that_does_not_come_to_sync_is_out_and_may_come_back, ("mask", "gloo")),
    (outcomes.test_sync_does_not_wait_for_a_rank_on_which_nobody_counts, ("gloo",)),
    (outcomes.test_losses_that_sync_shows_are_not_raised_again, ("raise", "epee")),
    (outcomes.test_losses_that_sync_shows_are_not_raised_again, ("mask", "gloo")),
    (outcomes.test_too_few_in_sync_decide_nothing, ()),
    (outcomes.test_a_replacement_takes_part_from_the_next_call_on, ("raise",)),
    (outcomes.test_a_replacement_takes_part_from_the_next_call_on, ("mask",)),
    (outcomes.test_handles_of_an_earlier_epoch_are_refused, ()),
    (syncs.test_after_a_time_out_sync_brings_all_to_the_same_call, ("epee",)),
    (syncs.test_sync_goes_on_without_who_dies, ("epee", "raise")),
    (syncs.test_a_replacement_is_waited_for_and_taken_in, ()),
    (returns.test_a_call_given_up_before_a_death_keeps_the_ranks_in_step, (True,)),
    (returns.test_after_a_replacement_the_results_are_those_of_a_fresh_job, ("raise",)),
    (returns.test_a_new_buffer_may_be_made_with_a_replacement, ()),
    (returns.test_buffers_made_after_a_loss, ("raise",)),
    (returns.test_buffers_made_after_a_loss, ("mask",)),
]


@pytest.mark.parametrize(("outcome", "args"), OUTCOMES, ids=lambda value: getattr(value, "__name__", None))
def test_outcomes(outcome: Callable[..., None], args: tuple[Any, ...]) -> None:
    outcome(*args)


@pytest.mark.parametrize(("num_ranks", "max_examples"), [(2, 6), (3, 4)])
def testagrees_with_the_reference(num_ranks: int, max_examples: int) -> None:
    agrees(num_ranks, max_examples, around)
