"""Calls with a root in the simulator, and what goes wrong: the root is lost, and somebody else a moment later.

The program chooses the root among those that it is shown (`Engine.shown`). Where that one is lost before the call is
whole, the call moves to a view without its root, so it ends there, for everybody. A process that hears of the next loss
at the same time must end it there, too, and not take it for a call that the second loss has hit
(`Course.place`, "rootless"): what is shown behind the call, and where the next one runs, is the same for all (C-12).

Runs of seeds from ROOT_SEEDS on are about that: on one host, over several, and with newcomers there. In three of four
programs call one by one; where they do not, somebody may choose a root that others know to be lost. Then all find two
roots in the headers, or no header of who has ended the call already, and the call fails.
"""

from __future__ import annotations

from random import Random

from .plan import AFTER_SEND, CRASH, CRASH_IN_STEP, HOLD, LEAVE, OVERLAP_SEEDS, PART, STOP, Fault, Plan

NUM_SLOTS = 12


def with_roots(plan: Plan, rng: Random) -> Plan:
    """Return a plan about calls with a root; in most two go one after the other, and somebody hears of both at once."""
    plan = plan._replace(
        window=rng.choice((1, 1, 1, max(2, plan.window))),
        raises=rng.random() < 0.25,
        num_calls=max(8, plan.num_calls),
    )
    if plan.seed >= OVERLAP_SEEDS:
        plan = plan._replace(window=rng.choice((2, 3)), raises=True, is_patient=True)
    if rng.random() < 0.25:
        return plan
    plan = plan._replace(num_members=max(4, plan.num_members), think_s=rng.choice((0.0005, 0.002, 0.01)))
    draw = rng.choice((_two_go, _one_goes_as_it_tells))
    return plan._replace(faults=tuple(sorted([*draw(plan, rng), *_others(plan, rng)])))


def _one_goes_as_it_tells(plan: Plan, rng: Random) -> list[Fault]:
    """One goes, and who tells the others of it when some have heard: the rest hear of both losses at once."""
    slots = list(range(plan.num_members))
    first = 0 if rng.random() < 0.5 else rng.choice(slots)
    slots.remove(first)
    start = rng.random() * 0.7 * plan.num_calls * (plan.think_s + 0.006)
    num_sent = 2 * (len(slots) - 1) + rng.randrange(len(slots))  # when it has asked all, and all again to accept
    second = Fault(start + 0.0001, CRASH_IN_STEP, slots[0], 0.0, AFTER_SEND + num_sent)
    return [Fault(start, rng.choice((CRASH, CRASH, LEAVE)), first), second]


def _two_go(plan: Plan, rng: Random) -> list[Fault]:
    """One goes, then another when the others have heard of it; somebody hears of it late."""
    slots = list(range(plan.num_members))
    first = 0 if rng.random() < 0.5 else rng.choice(slots)
    slots.remove(first)
    second, late = rng.sample(slots, 2)
    start = rng.random() * 0.7 * plan.num_calls * (plan.think_s + 0.006)
    then = start + rng.choice((0.003, 0.006, 0.012, 0.03, 0.06)) * (0.3 + rng.random())
    faults = [
        Fault(start, rng.choice((CRASH, CRASH, CRASH_IN_STEP, LEAVE)), first, 0.0, rng.randrange(4)),
        Fault(then, rng.choice((CRASH, CRASH, CRASH_IN_STEP)), second, 0.0, rng.choice((0, 1, 2, AFTER_SEND, 102))),
    ]
    for_s = then - start + rng.choice((0.005, 0.02, 0.05)) * (0.5 + rng.random())
    hearing = start + rng.choice((0.0, 0.001, 0.003)) * rng.random()
    how = rng.random()
    if how < 0.55:
        faults.append(Fault(hearing, HOLD, late, for_s))
    elif how < 0.7:
        faults.append(Fault(hearing, STOP, late, for_s))
    elif how < 0.85:
        faults.append(Fault(hearing, PART, late, for_s, sum(1 << slot * NUM_SLOTS + late for slot in (*slots, first))))
    return faults


def _others(plan: Plan, rng: Random) -> list[Fault]:
    """Return the faults that a plan had, now and then."""
    return list(plan.faults) if rng.random() < 0.3 else []
