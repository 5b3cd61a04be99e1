"""Hosts in the simulator: who runs where, what goes wrong between them, and what their processes see of each other.

Between hosts nobody sees boards or deaths: agents tell them (`Obituary`). A host that is cut off, in one direction or
both, is silent, and one whose processes have all ended resets every connection; the control connections of the others
find out (`Watch`, the simulator's `transport/switchboard.py`).

An outbox of another host is seen through a copy that a connection fills (`RemoteMirror`): late, and not at all while
the hosts are cut. Once its owner was removed nothing more comes, except from who tells: a member of the group on the
owner's host, who sees the memory itself (`Settlement`). That one may be lost before it has told, or when it has told
one host and not another. Where nobody is left to tell, a call that counts for all, because somebody has completed it,
ends as LOST on a host that lacks a part of it.

Runs of seeds from HOST_SEEDS on have hosts. Their calls are not given up, because how one is withdrawn between hosts is
no rule of the view's either.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from epee.view.protocol.decision import parts_of
from epee.view.protocol.events import HostLost
from epee.view.protocol.messages import LEFT, Decision

from .lane import Engine
from .plan import AFTER_SEND, CRASH, CRASH_IN_STEP, HOLD, JOIN, LEAVE, PART, SILENT_S, STOP, Fault, Plan
from .words import LANE, Mirror, Outbox

if TYPE_CHECKING:
    from .world import Process, World

NUM_SLOTS = 12
LOOK_S = 0.02
RESET_S = 0.05  # how long a connection that was reset is tried again


def with_hosts(plan: Plan, rng: Random) -> Plan:
    """Return a plan over hosts in place of one on a single host."""
    num_hosts = rng.choice((2, 2, 2, 3, 3, 4))
    num_members = plan.num_members
    shape = rng.random()
    if shape < 0.5:
        hosts = tuple(slot * num_hosts // num_members for slot in range(num_members))
    elif shape < 0.8:
        hosts = tuple(slot % num_hosts for slot in range(num_members))
    else:
        hosts = tuple(rng.randrange(num_hosts) for _ in range(num_members))
    num_places = num_hosts + (rng.random() < 0.3)  # of those that join; with more than two hosts other rules hold
    hosts += tuple(rng.randrange(num_places) for _ in range(NUM_SLOTS - num_members))
    is_untold = rng.random() < 0.12
    if is_untold:
        num_members = max(5, num_members)
        hosts = (2, *(0,) * (num_members - 4), 1, 0, *(1,) * (NUM_SLOTS + 1 - num_members))
    settings = plan.settings._replace(policy=rng.choice(("evict", "evict", "wait")))
    plan = plan._replace(
        num_members=num_members, hosts=hosts, settings=settings, is_patient=False, num_calls=plan.num_calls * 2
    )
    plan = plan._replace(telling_s=rng.choice((0.0, 0.01, 0.1, 0.1)))
    return plan._replace(faults=_untold(plan, rng) if is_untold else _faults(plan, rng))


def _untold(plan: Plan, rng: Random) -> tuple[Fault, ...]:
    """The lowest, alone on its host, is cut off when all have promised; it decides by those who die as they accept.

    What they have accepted stands on their boards, and one of their host is left to tell it to another.
    """
    n = plan.num_members
    start = rng.random() * 0.6 * plan.num_calls * (plan.think_s + 0.006)
    cut = start + rng.choice((0.004, 0.01, 0.02)) * rng.random()
    mask = sum(1 << slot | 1 << slot * NUM_SLOTS for slot in (n - 3, n - 2))
    faults = [Fault(start, CRASH, n - 1), Fault(cut, PART, 0, 1.5, mask)]
    faults += [
        Fault(cut, CRASH_IN_STEP, slot, 0.0, AFTER_SEND + rng.choice((1, 1, 1, 2, 3))) for slot in range(1, n - 3)
    ]
    return tuple(sorted(faults))


def _faults(plan: Plan, rng: Random) -> tuple[Fault, ...]:
    """Draw faults of whole hosts and between hosts, and others near them."""
    span = plan.num_calls * (plan.think_s + 0.006)
    faults = list(plan.faults) if rng.random() < 0.5 else []
    for _ in range(rng.choice((0, 1)) if faults else rng.choice((1, 1, 2))):
        start = rng.random() * span
        draw = (_death, _host_dies, _host_dies_unheard, _host_stops, _cut, _cut, _heir_dies, _tellers_go, _tellers_go)
        faults += rng.choice(draw)(plan, rng, start)
        if rng.random() < 0.3:
            then = max(0.0, start + rng.choice((0.005, 0.05, 0.5)) * (rng.random() - 0.3))
            faults += rng.choice((_death, _cut, _newcomer))(plan, rng, then)
    return tuple(sorted(faults))


def _slots_of(plan: Plan, host: int) -> list[int]:
    return [slot for slot in range(plan.num_members) if plan.hosts[slot] == host]


def _any_host(plan: Plan, rng: Random) -> int:
    return plan.hosts[rng.randrange(plan.num_members)]


def _step(rng: Random) -> int:
    return rng.choice((0, 1, 2, 3, AFTER_SEND, AFTER_SEND, AFTER_SEND + 1))


def _death(plan: Plan, rng: Random, start: float) -> list[Fault]:
    return [Fault(start, rng.choice((CRASH, CRASH_IN_STEP, LEAVE)), rng.randrange(plan.num_members), 0.0, _step(rng))]


def _heir_dies(plan: Plan, rng: Random, start: float) -> list[Fault]:
    """One dies, and those of its host while they tell of it."""
    slots = _slots_of(plan, _any_host(plan, rng))
    rng.shuffle(slots)
    later = [start + rng.choice((0.001, 0.01, 0.1)) * rng.random() for _ in slots[1:]]
    kinds = [rng.choice((CRASH, CRASH_IN_STEP)) for _ in later]
    rest = zip(later, kinds, slots[1:], strict=True)
    return [Fault(start, CRASH, slots[0]), *(Fault(when, kind, slot, 0.0, _step(rng)) for when, kind, slot in rest)]


def _tellers_go(plan: Plan, rng: Random, start: float) -> list[Fault]:
    """One dies, and when the view has said so the rest of its host, before it has told all others; then one of these.

    They die or leave in order. Where a host is told later than another, this one has seen more.
    """
    first, *rest = _slots_of(plan, rng.choice(plan.hosts[: plan.num_members]))
    others = [slot for slot in range(plan.num_members) if plan.hosts[slot] != plan.hosts[first]]
    then = start + 0.004 + rng.choice((0.002, 0.01, 0.03)) * rng.random()
    faults = [Fault(start, rng.choice((CRASH, CRASH, CRASH_IN_STEP)), first, 0.0, _step(rng))]
    for slot in rest:
        faults.append(Fault(then, rng.choice((CRASH, CRASH, CRASH_IN_STEP, LEAVE)), slot, 0.0, _step(rng)))
        then += rng.choice((0.0, 0.002, 0.02)) * rng.random()
    if others and rng.random() < 0.5:
        then += rng.choice((0.001, 0.02)) * rng.random()
        faults.append(Fault(then, rng.choice((CRASH, CRASH_IN_STEP, LEAVE)), rng.choice(others), 0.0, _step(rng)))
    if others and rng.random() < 0.5:
        faults.append(Fault(start - 0.002 * rng.random(), HOLD, rng.choice(others), 0.02 + 0.1 * rng.random()))
    return [fault._replace(time_s=max(0.0, fault.time_s)) for fault in faults]


def _host_dies(plan: Plan, rng: Random, start: float) -> list[Fault]:
    """All processes of a host are killed, one very soon after the other."""
    host = _any_host(plan, rng)
    return [Fault(start + 0.004 * rng.random(), CRASH, slot) for slot in _slots_of(plan, host)]


def _host_dies_unheard(plan: Plan, rng: Random, start: float) -> list[Fault]:
    """A death is told, then all of its host die while one elsewhere does not look: others have seen more of them."""
    host = _any_host(plan, rng)
    first, *rest = _slots_of(plan, host)
    others = [slot for slot in range(plan.num_members) if plan.hosts[slot] != host]
    then = start + 0.003
    faults = [Fault(start, HOLD, slot, 0.15 * (0.5 + rng.random())) for slot in others[:1]]
    later = [Fault(then + rng.choice((0.001, 0.02, 0.04)) * rng.random(), CRASH, slot) for slot in rest]
    return [*faults, Fault(then, CRASH, first), *later]


def _host_stops(plan: Plan, rng: Random, start: float) -> list[Fault]:
    """All processes of a host stand still for a while; its kernel answers."""
    for_s = rng.choice((0.1, 0.6, 1.0)) * (0.5 + rng.random())
    return [Fault(start, STOP, slot, for_s) for slot in _slots_of(plan, _any_host(plan, rng))]


def _cut(plan: Plan, rng: Random, start: float) -> list[Fault]:
    """One host is cut from the others, or from one of them, both ways or one; it heals before anybody minds, or not."""
    one = _any_host(plan, rng)
    others = {plan.hosts[slot] for slot in range(NUM_SLOTS)} - {one}
    if others and rng.random() < 0.3:
        others = {rng.choice(sorted(others))}
    ways = rng.choice((3, 3, 1, 2))
    mask = 0
    for a in range(NUM_SLOTS):
        for b in range(NUM_SLOTS):
            out, back = (plan.hosts[a], plan.hosts[b]), (plan.hosts[b], plan.hosts[a])
            if (ways & 1 and out[0] == one and out[1] in others) or (ways & 2 and back[0] == one and back[1] in others):
                mask |= 1 << a * NUM_SLOTS + b
    return [Fault(start, PART, 0, rng.choice((0.1, 0.3, 0.6, 1.5)) * (0.5 + rng.random()), mask)]


def _newcomer(plan: Plan, rng: Random, start: float) -> list[Fault]:
    return [Fault(start, JOIN, rng.randrange(plan.num_members + 1))]


class RemoteMirror(Mirror):
    """A copy of an outbox of another host, as a connection fills it."""

    __slots__ = ("reader", "since", "world", "writer")

    def __init__(self, peer_regions: Outbox, lag: float, world: World, writer: int, since: int, reader: int) -> None:
        super().__init__(peer_regions, lag + world.random() * world.plan.max_delay_s)
        self.world, self.writer, self.since, self.reader = world, writer, since, reader

    def sync(self, until: float) -> list[int]:
        """Take in what has come; once the owner was removed, what this host has of it, all at once."""
        if self.seen == len(self.log):
            return self.words
        limit = self.world.settlement.limit(self)
        if limit is None:
            until = min(until, self.world.cut_since(self.writer, self.reader)) - self.lag
        log, end = self.log, len(self.log) if limit is None else limit
        while self.seen < end and (limit is not None or log[self.seen][0] <= until):
            _, word, what = log[self.seen]
            self.words[word] = what
            self.seen += 1
        return self.words

    def coherent(self, until: float) -> list[int]:
        """Like `sync`: nobody withdraws a call in these runs."""
        return self.sync(until)

    def see_all(self) -> None:
        """Wait, as before: who is dead is told of."""


class Watch:
    """What the control connections of the processes show of other hosts."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._since: dict[tuple[bytes, str], tuple[bool, float]] = {}
        self._told: dict[tuple[bytes, str], float] = {}
        world.at(LOOK_S, self.look)

    def look(self) -> None:
        """Look at all connections, again and again."""
        world = self.world
        for process in world.all:
            if process.agent.epoch and not (process.dead or process.ended or process.stopped):
                self._look_from(process)
        world.at(world.now + LOOK_S, self.look)

    def _look_from(self, process: Process) -> None:
        world, agent = self.world, process.agent
        theirs: dict[str, list[Process]] = {}
        for slot, member in agent.members.items():
            if member.host != process.me.host and slot not in agent.gone:
                theirs.setdefault(member.host, []).append(world.processes[member.nonce])
        for host, others in theirs.items():
            key = (process.me.nonce, host)
            if not all(_is_silent(world, process, other) for other in others):
                self._since.pop(key, None)
                continue
            is_reset = all(other.dead or other.ended for other in others)
            known = self._since.get(key)
            if known is None or known[0] != is_reset:
                known = self._since[key] = (is_reset, world.now)
            is_due = world.now - known[1] >= (RESET_S if is_reset else SILENT_S)
            if is_due and world.now - self._told.get(key, -1.0) >= world.plan.settings.wait_limit_s / 3:
                self._told[key] = world.now
                world.agent(process, HostLost(host))


def _is_silent(world: World, one: Process, other: Process) -> bool:
    """Return whether a connection is of no use: its end is gone, or nothing gets through, in whatever direction."""
    if other.dead or other.ended:
        return True
    return min(world.cut_since(one.me.slot, other.me.slot), world.cut_since(other.me.slot, one.me.slot)) < world.now


class Settlement:
    """Who tells of those who were removed, to which host, and when.

    All of a host read one mirror of a rank elsewhere. It stands still once somebody there knows that the rank was
    removed, until the rank's heir has told the rest, which takes its time; no call is judged there before. An heir that
    is dead, stands still or is out of reach tells nothing. Where a decision says that none is left, the mirror stays as
    it is, or as a part of an answer has made it.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self._lost: dict[tuple[int, int], tuple[int, bool]] = {}  # in which epoch, and whether it has left in order
        self._limits: dict[tuple[int, int, int], dict[int, int]] = {}  # per lost rank and host, by `id` of the outbox
        self._settled: set[tuple[int, int, int]] = set()
        self.untold: set[tuple[int, int]] = set()  # lost ranks of which nobody was left to tell all

    def note(self, decision: Decision, before: dict[int, int], now: dict[int, int]) -> None:
        """A decision is known: those in the group `before` who are not in it `now` are told of from what is there."""
        has_left = {removal.slot for removal in decision.removed if removal.cause == LEFT}
        for slot, since in before.items():
            if now.get(slot) != since:
                self._lost[slot, since] = decision.epoch, slot in has_left

    def _loss(self, slot: int, since: int) -> tuple[int, bool]:
        """Return in which epoch one was removed, and whether it had left; with mistakes not all decide the same."""
        return self._lost.get((slot, since), (max(self.world.decisions), False))

    def limit(self, mirror: RemoteMirror) -> int | None:
        """Return how many stores of an outbox its reader's host has; None: they still come."""
        limits = self._limits.get((mirror.writer, mirror.since, self.world.host_of(mirror.reader)))
        return None if limits is None else limits.get(id(mirror.peer_regions), 0)

    def settle(self, engine: Engine, slot: int, since: int) -> bool:
        """A process knows that one was removed; return whether its host has all that it will ever have of it."""
        host = self.world.host_of(engine.slot)
        key = (slot, since, host)
        if host == self.world.host_of(slot):
            return True
        if key not in self._limits:
            epoch_regions = self.world.shared.boxes_of(slot, since)
            self._limits[key] = {id(peer_regions): self._seen(peer_regions, host) for peer_regions in epoch_regions}
            if self._loss(slot, since)[1]:  # it has told all before
                self._end(key, True)
            else:
                self._later(key, self.world.random() * self.world.random() * self.world.plan.telling_s)
        return key in self._settled

    def _seen(self, peer_regions: Outbox, host: int) -> int:
        engines = [p.engine for p in self.world.all if p.engine is not None and self.world.host_of(p.me.slot) == host]
        return max(
            (m.seen for engine in engines for m in engine.mirrors.values() if m.peer_regions is peer_regions), default=0
        )

    def _later(self, key: tuple[int, int, int], seconds: float) -> None:
        self.world.at(self.world.now + seconds, self._tell, key)

    def heir(self, slot: int, since: int, epoch: int) -> int:
        """Return the lowest slot of the host of a removed one that is in the group of an epoch and was before; else -1.

        Who came later has never seen the memory.
        """
        world = self.world
        parts = parts_of(world.decisions[epoch], LANE)
        host, lost_in = world.host_of(slot), self._loss(slot, since)[0]
        there = [other for other, when in parts.items() if world.host_of(other) == host and when < lost_in]
        return min(there, default=-1)

    def _tell(self, key: tuple[int, int, int]) -> None:
        slot, since, host = key
        world = self.world
        askers = [p for p in self._engines(host) if not (p.dead or p.ended)]
        known = [p.engine.heard for p in askers if p.engine is not None and (slot, since) in p.engine.unheard]
        if not known:  # those who knew of the loss are lost themselves, others of their host hear of it later
            if askers:
                self._later(key, 0.005)
            return
        heir = self.heir(slot, since, max(known))
        if heir < 0:
            self._end(key, False)
            return
        process = world.in_lane[heir, parts_of(world.decisions[max(known)], LANE)[heir]]
        is_up = not (process.dead or process.ended or process.stopped) and process.engine is not None
        lost_in = self._loss(slot, since)[0]
        is_up = is_up and process.agent.epoch >= lost_in and not self._is_forgotten(lost_in, [process, *askers])
        if is_up and max(world.cut_since(heir, p.me.slot) for p in askers) > world.now:
            self._end(key, True)
        else:
            self._later(key, 0.002 + 0.005 * world.random())

    def _is_forgotten(self, lost_in: int, concerned: list[Process]) -> bool:
        """Return whether one who was there has gone on to a placement in which those lost in an epoch have no place."""
        if not self.world.shared.is_gated:
            return False
        engines = [process.engine for process in concerned if process.engine is not None]
        return any(engine.incarnation < lost_in <= engine.placed for engine in engines)

    def _engines(self, host: int) -> list[Process]:
        return [p for p in self.world.all if p.engine is not None and self.world.host_of(p.me.slot) == host]

    def _end(self, key: tuple[int, int, int], has_all: bool) -> None:
        """A host has all that there is, or will never have more than a part."""
        slot, since, host = key
        limits = self._limits[key]
        for peer_regions in self.world.shared.boxes_of(slot, since):
            had = limits.get(id(peer_regions), 0)
            if has_all:
                limits[id(peer_regions)] = len(peer_regions.log)
                continue
            self.untold.add((slot, since))
            if self.world.random() < 0.5:
                limits[id(peer_regions)] = had + int((len(peer_regions.log) - had) * self.world.random())
        self._settled.add(key)
        for process in self._engines(host):
            assert process.engine is not None
            process.engine.unheard.discard((slot, since))
            self.world.wake(process, 0.0)
