"""What goes wrong in a run, drawn from its seed: how many processes, how patient, which faults and when."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import NamedTuple

from epee.view.protocol.events import AgentSettings

CRASH, CRASH_IN_STEP, STOP, HOLD, RESTART, JOIN, PART, JUMP, LEAVE, INTERRUPT, OUT, BACK = range(12)
FAULT_MIX = (CRASH, CRASH, CRASH_IN_STEP, CRASH_IN_STEP, STOP, STOP, HOLD, RESTART, JOIN, PART, JUMP, LEAVE)
FAULT_NAMES = (
    "crash",
    "crash in a step",
    "stop",
    "hold",
    "restart",
    "join",
    "partition",
    "clock jump",
    "leave",
    "interrupt",
    "put out",
    "take back",
)


AFTER_SEND = 100
HOST_SEEDS = 1 << 31  # seeds from here on are about several hosts
GATE_SEEDS = 3 << 30  # and from here on about processes that come into these
ROOT_SEEDS = 1 << 32  # and from here on about calls with a root, on one host or several: see `roots.py`
OVERLAP_SEEDS = 5 << 30  # and from here on about such calls, several open at once, in mode "raise"
SILENT_S = 0.4  # how long a host, or a process that nobody accuses, may be silent


class Fault(NamedTuple):
    """One fault.

    Attributes:
        time_s: when; faults are in order of time.
        kind: see above. A RESTART is a crash followed by a joiner in the same slot, at once or a little later.
        slot: the victim, or the slot of a joiner.
        for_s: how long a stop, a hold, a partition lasts; how far a clock jumps; the delay of a restart; how long it is
            wanted that a slot goes or comes back in the group.
        number: of a CRASH_IN_STEP after how many effects, or, from `AFTER_SEND` on, after how many messages; of PART
            the mask of cut directions (bit from * 12 + to); of INTERRUPT in which step of taking the next decision over
            an exception comes (and out of the call with it), -1 for one that comes out of the call at once; of OUT and
            BACK which of those in the group wants it.
    """

    time_s: float
    kind: int
    slot: int
    for_s: float = 0.0
    number: int = 0


class Plan(NamedTuple):
    """A run. Times in seconds of virtual time."""

    seed: int
    num_members: int
    num_calls: int
    window: int
    raises: bool
    settings: AgentSettings
    op_timeout_s: float
    think_s: float
    max_delay_s: float
    slow_share: float
    loss: float
    dup: float
    max_lag_s: float
    is_patient: bool
    faults: tuple[Fault, ...]
    hosts: tuple[int, ...] = ()  # of each slot, also of those that join; none: all on one
    telling_s: float = 0.0  # so long it takes at most to tell another host of a lost rank

    def is_calm(self) -> bool:
        """Return whether nothing happens that may make a live process look stalled (V-7)."""
        quiet = all(fault.kind in (CRASH, CRASH_IN_STEP, LEAVE, JUMP, JOIN, INTERRUPT) for fault in self.faults)
        return quiet and not self.loss and self.slow_share == 0.0 and self.max_lag_s <= 0.003

    def has_answers_in_time(self) -> bool:
        """Return whether every live process answers within the time that a host may be silent."""
        stops: Counter[int] = Counter()
        for fault in self.faults:
            stops[fault.slot] += fault.for_s if fault.kind in (STOP, HOLD) else 0.0  # held calls cannot freeze
        kinds = (CRASH, CRASH_IN_STEP, LEAVE, INTERRUPT, STOP, HOLD)
        quiet = all(fault.kind in kinds for fault in self.faults) and not self.loss and self.slow_share == 0.0
        return quiet and max(stops.values(), default=0.0) < 0.75 * self.settings.silence_s


def is_gated(seed: int) -> bool:
    """Return whether processes come into groups over hosts."""
    return GATE_SEEDS <= seed < ROOT_SEEDS or (seed >= ROOT_SEEDS and seed // 2 % 4 == 3)


def is_over_hosts(seed: int) -> bool:
    """Return whether a run is about several hosts."""
    return HOST_SEEDS <= seed < ROOT_SEEDS or (seed >= ROOT_SEEDS and seed // 2 % 4 >= 2)


def make_plan(seed: int) -> Plan:
    """Draw a plan."""
    rng = Random(seed)
    num_members = rng.choice((2, 3, 3, 3, 4, 4, 4, 5, 5, 6, 8))
    policy = rng.choice(("evict", "evict", "evict", "error", "wait"))
    bad_net = rng.random() < 0.3
    settings = AgentSettings(policy, answer_s=0.02, wait_limit_s=0.15, no_quorum_s=1.5, silence_s=SILENT_S)
    num_calls = rng.randint(5, 9)
    think_s = rng.choice((0.0005, 0.002, 0.01, 0.03))
    span = num_calls * (think_s + 0.006)
    plan = Plan(
        seed=seed,
        num_members=num_members,
        num_calls=num_calls,
        window=rng.choice((1, 1, 2, 3)),
        raises=rng.random() < 0.4,
        settings=settings,
        op_timeout_s=0.25,
        think_s=think_s,
        max_delay_s=rng.choice((0.0005, 0.002, 0.008)),
        slow_share=0.15 if bad_net else 0.0,
        loss=rng.choice((0.05, 0.2)) if bad_net and rng.random() < 0.6 else 0.0,
        dup=0.2 if rng.random() < 0.4 else 0.0,
        max_lag_s=rng.choice((0.0, 0.0005, 0.003, 0.02)),
        is_patient=seed % 3 > 0,
        faults=_faults(rng, num_members, span),
    )
    from .gates import with_joins
    from .hosts import with_hosts  # these are built of the faults here
    from .roots import with_roots

    if is_over_hosts(seed):
        plan = with_hosts(plan, rng)
        plan = with_joins(plan, rng) if is_gated(seed) else plan
    if seed >= ROOT_SEEDS:
        plan = with_roots(plan, rng)
        is_interrupted = (seed % 3 == 1 or seed >= OVERLAP_SEEDS) and not is_over_hosts(
            seed
        )  # there no call is given up
        return plan._replace(faults=_with_interrupts(plan, rng)) if is_interrupted else plan
    if seed >= HOST_SEEDS:
        return plan
    if seed % 8 == 7 and num_members < 7:
        plan = _with_newcomer(plan, rng)
    if seed % 16 == 10 and num_members > 2:
        plan = plan._replace(num_calls=plan.num_calls * 2, faults=_with_parts(plan, rng))
    return plan._replace(faults=_with_interrupts(plan, rng)) if seed % 3 == 1 else plan


def _with_interrupts(plan: Plan, rng: Random) -> tuple[Fault, ...]:
    """Return the faults of a plan, and exceptions that come out of calls, many of them when the others happen."""
    span = plan.num_calls * (plan.think_s + 0.006)
    faults = list(plan.faults)
    for _ in range(rng.randint(1, 4)):
        near = rng.choice(plan.faults).time_s if plan.faults and rng.random() < 0.5 else rng.random() * span
        slot, step = rng.randrange(plan.num_members), rng.choice((-1, -1, 0, 1, 2))
        faults.append(Fault(near + rng.choice((0.0, 0.005, 0.05)) * rng.random(), INTERRUPT, slot, 0.0, step))
    return tuple(sorted(faults))


def _faults(rng: Random, num_members: int, span: float) -> tuple[Fault, ...]:
    """Draw faults: mostly anything at any time, sometimes a course of events that chance alone rarely finds."""
    draw = rng.choice(STYLES) if num_members > 2 else _anything
    return draw(rng, num_members, span)


def _with_newcomer(plan: Plan, rng: Random) -> Plan:
    """Return a plan about a newcomer whose first moments as a member are the worst; everything else as drawn."""
    if rng.random() < 0.5:
        return plan._replace(faults=_unheard(rng, plan))
    plan = plan._replace(window=max(2, plan.window), num_calls=20, think_s=0.002, max_delay_s=0.0005)
    return plan._replace(faults=_overtaken(rng, plan.num_members))


def _with_parts(plan: Plan, rng: Random) -> tuple[Fault, ...]:
    """Return the faults of a plan, and slots that are put out of the group and taken back while the others happen."""
    span = plan.num_calls * (plan.think_s + 0.006)
    faults = list(plan.faults) if rng.random() < 0.7 else []
    for _ in range(rng.randint(1, 2)):
        near = rng.choice(faults).time_s if faults and rng.random() < 0.5 else rng.random() * span
        slot, number = rng.randrange(plan.num_members), rng.randrange(8)
        faults.append(Fault(near, OUT, slot, 0.3, number))
        if rng.random() < 0.8:
            later = near + rng.choice((0.003, 0.03, 0.2)) * rng.random()
            faults.append(Fault(later, BACK, slot, 0.6, rng.randrange(8)))
        if rng.random() < 0.5:  # who goes may not hear of it, and goes on
            kind, then = rng.choice((STOP, HOLD, CRASH_IN_STEP)), max(0.0, near + 0.02 * rng.random() - 0.01)
            faults.append(Fault(then, kind, slot, 0.3 * rng.random(), _step(rng)))
    return tuple(sorted(faults))


def _step(rng: Random) -> int:
    """Draw in which step of an agent a crash falls: see `Fault.number`."""
    return rng.choice((0, 1, 2, 3, AFTER_SEND, AFTER_SEND, AFTER_SEND + 1))


def _around(slot: int, num_members: int) -> int:
    """Return the mask that cuts all links of one slot."""
    return sum((1 << slot * 12 + j) | (1 << j * 12 + slot) for j in range(num_members) if j != slot)


def _duel(rng: Random, num_members: int, span: float) -> tuple[Fault, ...]:
    """While the lowest agrees on a death it is cut off or stopped, and another dies, so its rival proposes another."""
    start = rng.random() * span
    victims = rng.sample(range(1, num_members), 2)
    then = start + rng.choice((0.002, 0.01, 0.03)) * rng.random()
    if rng.random() < 0.5:
        middle = Fault(then, PART, 0, 0.01 + 0.4 * rng.random(), _around(0, num_members))
    else:
        middle = Fault(then, STOP, 0, 0.01 + 0.1 * rng.random())
    last = Fault(then + rng.choice((0.0, 0.01, 0.05)) * rng.random(), CRASH, victims[1])
    return tuple(sorted((Fault(start, CRASH, victims[0]), middle, last)))


def _rivals(rng: Random, num_members: int, span: float) -> tuple[Fault, ...]:
    """The lowest stops while it agrees on a death; its rival gets through, but cannot tell; then the lowest wakes up.

    Meanwhile the findings change (another death, a joiner), so that the two propose differently, and voters die as soon
    as they have voted.
    """
    start = rng.random() * span
    victim = rng.randrange(2, num_members)
    stopped = start + rng.choice((0.0, 0.002, 0.01)) * rng.random()
    cut = stopped + 0.04 + 0.03 * rng.random()
    faults = [Fault(start, CRASH, victim), Fault(stopped, STOP, 0, 0.04 + 0.1 * rng.random())]
    outwards = sum(1 << 12 + j for j in range(num_members) if j != 1)
    faults.append(Fault(cut, PART, 1, 0.1 + 0.3 * rng.random(), outwards))
    changed = stopped + 0.03 * rng.random()
    if rng.random() < 0.3:
        faults.append(Fault(changed, JOIN, num_members))
    others = [slot for slot in range(2, num_members) if slot != victim]
    rng.shuffle(others)
    for slot in others[: rng.randint(0, 2)]:
        kind = rng.choice((CRASH, CRASH_IN_STEP))
        faults.append(Fault(changed, kind, slot, 0.0, _step(rng)))
    return tuple(sorted(faults))


def _lost_vote(rng: Random, num_members: int, span: float) -> tuple[Fault, ...]:
    """A rival of the stopped lowest gets its votes from members that die as they vote; the lowest never hears of it."""
    start = rng.random() * span
    faults = [Fault(max(0.0, start - 0.001), STOP, 0, 0.07 + 0.05 * rng.random())]
    faults.append(Fault(start, PART, 1, 0.3, 1 << 12))
    faults.append(Fault(start, CRASH, num_members - 1))
    for slot in range(2, num_members - 1):
        faults.append(Fault(start + 0.004, CRASH_IN_STEP, slot, 0.0, AFTER_SEND + rng.randrange(1, 5)))
    return tuple(sorted(faults))


def _laggard(rng: Random, num_members: int, span: float) -> tuple[Fault, ...]:
    """One is cut off while the others go through several views, dying; all that it can see is their boards."""
    start = rng.random() * span
    one = rng.choice((0, 0, rng.randrange(num_members)))
    others = [slot for slot in range(num_members) if slot != one]
    rng.shuffle(others)
    faults = [Fault(start, PART, one, 0.3 + rng.random(), _around(one, num_members))]
    for slot in others[: rng.randint(1, len(others))]:
        start += rng.choice((0.01, 0.1, 0.3)) * rng.random()
        faults.append(Fault(start, rng.choice((CRASH, RESTART)), slot, rng.choice((0.0, 0.05))))
    return tuple(faults)


def _replace(rng: Random, num_members: int, span: float) -> tuple[Fault, ...]:
    """Some die and are replaced, perhaps while nobody calls; then another dies or stalls."""
    start = rng.random() * span
    faults = []
    for _ in range(rng.randint(1, 3)):
        slot = rng.randrange(num_members)
        faults.append(Fault(start, CRASH, slot))
        faults.append(Fault(start + rng.choice((0.005, 0.05)) * rng.random(), JOIN, slot))
        start += rng.choice((0.01, 0.1)) * rng.random()
    kind = rng.choice((CRASH, STOP, CRASH_IN_STEP))
    faults.append(Fault(start, kind, rng.randrange(num_members), 0.6, _step(rng)))
    return tuple(sorted(faults))


def _grow(rng: Random, num_members: int, span: float) -> tuple[Fault, ...]:
    """The group grows, and somebody stalls or dies soon after."""
    start = rng.random() * span * 0.7
    faults = [Fault(start, JOIN, num_members + i) for i in range(rng.randint(1, 2))]
    for _ in range(rng.randint(1, 2)):
        start += rng.choice((0.005, 0.01, 0.02, 0.1)) * rng.random()
        kind = rng.choice((CRASH, STOP, STOP, CRASH_IN_STEP))
        faults.append(Fault(start, kind, rng.randrange(num_members + 1), 0.3 + 0.5 * rng.random(), _step(rng)))
    return tuple(faults)


def _minority_wakes_up(rng: Random, num_members: int, span: float) -> tuple[Fault, ...]:
    """Some are stopped and cut off; when they are voted out, most voters die and the lowest is stopped; they wake up.

    This is the example of epee/view/protocol/PROTOCOL.md: who counts deaths without reading boards
    decides a second time.
    """
    start = rng.random() * span
    num_out = (num_members - 1) // 2
    out = range(num_members - num_out, num_members)
    mask = sum((1 << i * 12 + j) | (1 << j * 12 + i) for i in range(num_members - num_out) for j in out)
    over = start + 0.25 + rng.random() * 0.3
    faults = [Fault(start, PART, 0, 1.0 + rng.random(), mask)]
    faults += [Fault(start, STOP, slot, 0.5 + 0.1 * rng.random()) for slot in out]
    faults += [Fault(over, CRASH, slot) for slot in range(1, num_members - num_out)]
    faults.append(Fault(over, STOP, 0, 1.0))
    return tuple(sorted(faults))


def _overtaken(rng: Random, num_members: int) -> tuple[Fault, ...]:
    """Somebody comes in, one member stands still in a call from before, another goes ahead of it and dies.

    What the dead one has put is whole for the newcomer's first call, and not for the one before it.
    """
    start = rng.random() * 0.005
    faults = []
    for newcomer in range(num_members, num_members + 3):
        held, victim = rng.sample(range(num_members), 2)
        then = start + 0.001 + 0.003 * rng.random()
        faults.append(Fault(start, JOIN, newcomer))
        faults.append(Fault(then, HOLD, held, 0.03))
        faults.append(Fault(then + 0.002 + 0.02 * rng.random(), CRASH, victim))
        start = then + 0.06
    return tuple(sorted(faults))


def _unheard(rng: Random, plan: Plan) -> tuple[Fault, ...]:
    """Somebody is taken in and does not hear of it; then another dies, and it hears of that first."""
    newcomer = plan.num_members
    start = rng.random() * 0.6 * plan.num_calls * (plan.think_s + 0.006)
    inwards = sum(1 << i * 12 + newcomer for i in range(plan.num_members))
    for_s = 0.003 + 0.03 * rng.random()
    victim = rng.randrange(plan.num_members)
    faults = [Fault(start, JOIN, newcomer), Fault(start, PART, newcomer, for_s, inwards)]
    faults.append(Fault(start + for_s - (0.002 + plan.max_delay_s) * rng.random(), CRASH, victim))
    if rng.random() < 0.5:
        faults.append(Fault(start + for_s + 0.05 * rng.random(), CRASH, rng.randrange(plan.num_members)))
    return tuple(sorted(faults))


def _cascade(rng: Random, num_members: int, span: float) -> tuple[Fault, ...]:
    """One dies, and one after the other of those who take over dies within a step."""
    start = rng.random() * span
    victims = [rng.randrange(num_members), *range(num_members - 1)][: rng.randint(2, num_members)]
    faults = [Fault(start, CRASH, victims[0])]
    for slot in victims[1:]:
        start += rng.random() * 0.002
        faults.append(Fault(start, CRASH_IN_STEP, slot, 0.0, _step(rng)))
    return tuple(faults)


def _zombie(rng: Random, num_members: int, span: float) -> tuple[Fault, ...]:
    """One is stopped, perhaps cut off, replaced in its slot, and wakes up; perhaps somebody dies in between."""
    start = rng.random() * span
    slot = rng.randrange(num_members)
    wakes = start + 0.3 + rng.random() * 0.6
    faults = [Fault(start, STOP, slot, wakes - start), Fault(start + rng.random() * 0.5, JOIN, slot)]
    if rng.random() < 0.5:
        for_s = wakes - start + rng.random() * 0.3
        faults.append(Fault(start, PART, slot, for_s, _around(slot, num_members)))
    if rng.random() < 0.5:
        victim = rng.randrange(num_members)
        faults.append(Fault(start + rng.random() * 0.7, CRASH_IN_STEP, victim, 0.0, _step(rng)))
    return tuple(sorted(faults))


def _anything(rng: Random, num_members: int, span: float) -> tuple[Fault, ...]:
    faults: list[Fault] = []
    time_s = rng.random() * span
    next_slot = num_members
    for _ in range(rng.choice((0, 1, 1, 2, 2, 3, 3, 4, 5))):
        kind = rng.choice(FAULT_MIX)
        slot = rng.randrange(num_members)
        number = 0
        for_s = rng.choice((0.003, 0.03, 0.3, 1.0)) * (0.5 + rng.random())
        if kind == CRASH_IN_STEP:
            number = _step(rng)
        elif kind == RESTART:
            for_s = rng.choice((0.0, 0.002, 0.05))
        elif kind == JOIN:
            if rng.random() < 0.6 and next_slot < 11:
                slot = next_slot
                next_slot += 1
        elif kind == PART:
            number = _cuts(rng, num_members)
        elif kind == JUMP:
            for_s = rng.choice((-10.0, -0.1, 0.1, 10.0, 1e5))
        faults.append(Fault(time_s, kind, slot, for_s, number))
        time_s += rng.choice((0.0003, 0.003, 0.03, 0.3)) * rng.random()
    return tuple(faults)


def _cuts(rng: Random, num_members: int) -> int:
    """Draw which directions a partition cuts: between two sides, both ways or one, or single links."""
    mask = 0
    if rng.random() < 0.7:
        side = [rng.random() < 0.5 for _ in range(num_members)]
        one_way = rng.random() < 0.3
        for i in range(num_members):
            for j in range(num_members):
                if side[i] != side[j] and not (one_way and side[i]):
                    mask |= 1 << (i * 12 + j)
    else:
        for _ in range(rng.randint(1, num_members)):
            mask |= 1 << (rng.randrange(num_members) * 12 + rng.randrange(num_members))
    return mask


STYLES = (
    *(_anything,) * 8,
    *(_duel,) * 3,
    *(_rivals,) * 3,
    *(_lost_vote,) * 2,
    *(_zombie,) * 2,
    *(_replace,) * 2,
    *(_grow,) * 3,
    _minority_wakes_up,
    _cascade,
    _laggard,
)
