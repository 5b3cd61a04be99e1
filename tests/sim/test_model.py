"""The agreement of three members with up to two deaths, all states; and the mistakes that this finds."""

from __future__ import annotations

import pytest

from epee.view.protocol.agent import Agent
from tests.sim import mutants
from tests.sim.model import explore


def test_no_order_of_messages_deaths_and_time_outs_gives_two_decisions() -> None:
    num_states, split = explore(Agent, num_members=3, max_deaths=2, max_late=1, max_states=100_000)
    assert split is None
    assert 1000 < num_states < 100_000, "the search came to an end, and had something to search"


@pytest.mark.parametrize("mutant", ["DeathsWithoutBoards", "AnyHalf", "CommitWithoutQuorum"])
def test_a_mistake_gives_two_decisions(mutant: str) -> None:
    _, split = explore(mutants.MUTANTS[mutant], num_members=3, max_deaths=2, max_late=1, max_states=100_000)
    assert split is not None
