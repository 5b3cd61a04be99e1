"""A rank dies, then who tells of it, before all other hosts have been told: those who are left agree all the same.

What counts is said by the decisions (`protocol/outcome.py`, "settled up to"). Calls may be lost on a host, and on that
alone.
"""

from __future__ import annotations

from random import Random

import pytest

from tests.sim.history import LOST, OK, Record
from tests.sim.mutants import make_world
from tests.sim.plan import CRASH, HOLD, HOST_SEEDS, LEAVE, Fault, Plan, make_plan

NUM_PLANS, MOST_PLANS = 80, 1000
TWO, THREE, FOUR = (0, 0, 1, 1, 1, 1), (0, 0, 1, 2, 2, 1), (0, 0, 1, 2, 3, 3)


def plan_of(number: int, placement: tuple[int, ...], end: int) -> Plan:
    """Return a plan in which slot 0 dies, then slot 1 of its host ends, then in every second one of those told."""
    rng = Random(number)
    start = rng.random() * 0.03
    then = start + 0.004 + 0.03 * rng.random()
    faults = [Fault(start, CRASH, 0), Fault(then, end, 1)]
    faults.append(Fault(max(0.0, start - 0.001), HOLD, rng.randrange(2, 6), 0.03 * rng.random()))
    if number % 2:
        faults.append(Fault(then + 0.02 * rng.random(), CRASH, rng.randrange(2, 6)))
    return make_plan(HOST_SEEDS + number)._replace(
        num_members=6,
        num_calls=12,
        hosts=(*placement, *(1,) * 6),
        faults=tuple(sorted(faults)),
        telling_s=0.1,
        max_lag_s=0.01,
        max_delay_s=0.008,
        think_s=0.0005,
        loss=0.0,
        slow_share=0.0,
    )


@pytest.mark.parametrize("end", [CRASH, LEAVE])
@pytest.mark.parametrize("placement", [TWO, THREE, FOUR], ids=["two", "three", "four"])
def test_who_is_left_agrees_when_the_witness_goes(placement: tuple[int, ...], end: int) -> None:
    records: list[Record] = []
    for number in range(NUM_PLANS):
        world = make_world(plan_of(number, placement, end))
        assert world.run() == [], f"plan {number}"
        records += world.records()
    assert any(record.epoch > 2 and record.status == OK for record in records), "calls run in the last view"
    if placement == TWO:
        assert not any(record.status == LOST for record in records), "of two hosts the other one has one memory"


def test_with_three_hosts_a_call_may_be_lost_on_one() -> None:
    worlds = (make_world(plan_of(number, THREE, CRASH)) for number in range(MOST_PLANS))
    assert any(not world.run() and any(r.status == LOST for r in world.records()) for world in worlds)


def test_the_plans_show_why_a_witness_is_not_enough_with_three_hosts() -> None:
    worlds = (make_world(plan_of(number, THREE, CRASH), "WitnessedAnyway") for number in range(MOST_PLANS))
    assert any(world.run() for world in worlds)
