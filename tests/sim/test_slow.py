"""A host is lost while a process on another one stands still: it is waited for as long as a host may be silent.

Whoever is slow and not accused stays; whoever stands still for longer goes, so the removal of the lost host is late by
that time at most.
"""

from __future__ import annotations

from random import Random

import pytest

from epee.view.protocol.messages import STALLED, UNREACHABLE
from tests.sim.history import VIEW
from tests.sim.mutants import make_world
from tests.sim.plan import CRASH, HOST_SEEDS, SILENT_S, STOP, Fault, Plan, make_plan

NUM_PLANS = 25
HOSTS = (0, 0, 1, 1, 2, 2, 3, 3)
SLOW_S, GONE_S = 0.7 * SILENT_S, 5.0


def plan_of(number: int, stopped: int, for_s: float) -> Plan:
    """Return a plan in which a host that is not that of slot `stopped` dies while this one stands still.

    Calls have time enough, so that nobody accuses anybody.
    """
    rng = Random(number)
    start = 0.01 + rng.random() * 0.03
    victim = rng.choice([host for host in range(4) if host != HOSTS[stopped]])
    faults = [Fault(start + 0.002 * rng.random(), CRASH, slot) for slot in range(len(HOSTS)) if HOSTS[slot] == victim]
    faults.append(Fault(start * rng.random(), STOP, stopped, for_s))
    plan = make_plan(HOST_SEEDS + number)
    return plan._replace(
        num_members=len(HOSTS),
        num_calls=12,
        hosts=(*HOSTS, *(1,) * 4),
        settings=plan.settings._replace(policy="evict"),
        faults=tuple(sorted(faults)),
        op_timeout_s=10.0,
        loss=0.0,
        slow_share=0.0,
    )


def removed(number: int, stopped: int, for_s: float, mutant: str = "") -> dict[int, str]:
    """Run a plan in which only a mistake breaks a rule; return who was removed, and why."""
    world = make_world(plan_of(number, stopped, for_s), mutant)
    found = world.run()
    causes = {r.slot: r.cause for d in world.decisions.values() for r in d.removed}
    assert [v.rule for v in found] == (["V-7"] if mutant and STALLED in causes.values() else []), f"plan {number}"
    return causes


@pytest.mark.parametrize("stopped", [0, 3, 5])
def test_who_is_slow_stays_when_another_host_is_lost(stopped: int) -> None:
    for number in range(NUM_PLANS):
        causes = removed(number, stopped, SLOW_S)
        assert UNREACHABLE in causes.values(), f"plan {number}"
        assert stopped not in causes, f"plan {number}"


@pytest.mark.parametrize("stopped", [0, 3, 5])
def test_who_stands_still_for_longer_than_a_host_may_goes_with_it(stopped: int) -> None:
    for number in range(NUM_PLANS):
        world = make_world(plan_of(number, stopped, GONE_S))
        assert world.run() == [], f"plan {number}"
        causes = {r.slot: r.cause for d in world.decisions.values() for r in d.removed}
        assert causes[stopped] == STALLED, f"plan {number}"
        views = [r for r in world.records() if r.kind == VIEW and r.epoch == 2 and r.slot != stopped]
        assert views
        assert all(SILENT_S < r.time_s < 2 * SILENT_S for r in views), "the lost host goes then, of virtual time"


def test_the_plans_show_who_puts_out_the_slow() -> None:
    assert any(STALLED in removed(number, 3, SLOW_S, "PutsOutTheSlow").values() for number in range(NUM_PLANS))
