"""The gate in the simulator: the product's own (`engine/replication/loss_resolution.py`), and what goes round it.

A view that takes somebody in begins a new placement: rows and mirrors of a slot get another owner, and those who were
lost by then have no place in it. So from the moment at which a process takes such a view over

    it tells nothing more of those who were lost by it, though it is their heir (`hosts.Settlement`)
    its host is told nothing more of them: their rows are others' now

and who still needs a word of them waits for ever. The gate is there that nobody does. That a process has turned its
host sees on its board at once; others are told, late, again after a cut, and maybe not at all if it dies meanwhile.

A newcomer may run on a host of its own; who takes a lost slot runs on that one's host.

Runs of seeds from GATE_SEEDS on are about that.
"""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from epee.engine.bootstrap.group_note import FOUNDER, Offer
from epee.engine.replication.loss_resolution import Gate

from .plan import CRASH, CRASH_IN_STEP, HOLD, JOIN, LEAVE, STOP, Fault, Plan

if TYPE_CHECKING:
    from collections.abc import Callable

    from .lane import Engine
    from .world import Process, World

AGAIN_S = 0.1  # a connection that was cut is made again
LOST_SHARE = 0.3  # of what was under way from one that has died


class _Lane:
    """What the gate reads of an engine, as occupants and as what is settled."""

    def __init__(self, engine: Engine, group_id: int, num_slots: int) -> None:
        self._engine = engine
        self.group_id = group_id
        self.rank_of = {slot: slot for slot in range(num_slots)}
        self.roles = SimpleNamespace(topology=SimpleNamespace(rank=engine.slot))

    @property
    def since(self) -> dict[int, int]:
        """Who takes part, as far as decisions have been taken over: slot -> since when."""
        engine = self._engine
        return {slot: since for (epoch, slot), since in engine.incarnations.items() if epoch == engine.epoch}

    @property
    def unsettled(self) -> set[tuple[int, int]]:
        """Of whom not all is here."""
        return self._engine.unheard

    def hear(self, epoch: int, lost: list[int]) -> None:
        """Heirs follow from the newest view that was heard of (`Engine.heard`)."""


def gate_of(kind: type[Gate], engine: Engine, group_id: int, num_slots: int, tell: Callable[[int], None]) -> Gate:
    """Return the gate of an engine."""
    seen: Any = _Lane(engine, group_id, num_slots)
    return kind(seen, seen, tell)


class Turns:
    """Who has turned, as the others see it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._heard: dict[tuple[bytes, bytes], int] = {}  # (reader, who): on other hosts

    def tell(self, engine: Engine, epoch: int) -> None:
        """Show that the process of an engine needs nothing of those who were lost by an epoch."""
        engine.turned = epoch
        process = self._process(engine)
        for other in self.world.all:
            if other.me.host != process.me.host and not (other.dead or other.ended):
                self._later(process, other, self.world.plan.max_delay_s)

    def told(self, engine: Engine) -> dict[int, Offer]:
        """Return what the process of an engine knows of the others."""
        reader = self._process(engine)
        found: dict[int, int] = {}
        for member in reader.agent.decided.members:
            other = self.world.processes[member.nonce]
            if other.engine is not None and other is not reader:
                is_here = member.host == reader.me.host
                epoch = other.engine.turned if is_here else self._heard.get((reader.me.nonce, member.nonce), 0)
                found[member.slot] = epoch
        return {slot: Offer(FOUNDER, slot, 64, b"", 1, epoch) for slot, epoch in found.items()}

    def _process(self, engine: Engine) -> Process:
        return self.world.in_lane[engine.slot, engine.incarnation]

    def _later(self, process: Process, other: Process, seconds: float) -> None:
        self.world.at(self.world.now + 0.00005 + self.world.random() * seconds, self._hear, process, other)

    def _hear(self, process: Process, other: Process) -> None:
        if other.dead or other.ended or process.engine is None:
            return
        if process.dead and self.world.random() < LOST_SHARE:
            return
        if self.world.cut_since(process.me.slot, other.me.slot) <= self.world.now:
            if not (process.dead or process.ended):
                self._later(process, other, AGAIN_S)
            return
        self._heard[other.me.nonce, process.me.nonce] = process.engine.turned
        self.world.wake(other, 0.0)


def with_joins(plan: Plan, rng: Random) -> Plan:
    """Return a plan over hosts in which processes come while others go; sometimes with the faults that it had."""
    span = 0.8 * plan.num_calls * (plan.think_s + 0.006)
    faults = list(plan.faults) if rng.random() < 0.3 else []
    for _ in range(rng.choice((1, 1, 2, 3))):
        faults += _replaced(plan, rng, rng.random() * span) if rng.random() < 0.7 else _grown(plan, rng, span)
    telling_s = rng.choice((0.0, 0.02, 0.1, 0.2))
    faults = sorted(fault for fault in faults if fault.time_s >= 0)
    # what a newcomer waits for is told, looked at and made up for first, in looks of some 10 ms each
    return plan._replace(telling_s=telling_s, op_timeout_s=1.0, faults=tuple(faults))


def _replaced(plan: Plan, rng: Random, start: float) -> list[Fault]:
    """One dies, another process takes its place, and while it comes it, or a member, goes or stands still."""
    victim = rng.randrange(plan.num_members)
    comes = start + rng.choice((0.001, 0.005, 0.02, 0.1)) * (0.5 + rng.random())
    faults = [Fault(start, rng.choice((CRASH, CRASH, CRASH_IN_STEP)), victim, 0.0, rng.randrange(4))]
    return [*faults, Fault(comes, JOIN, victim), *_meanwhile(plan, rng, comes, victim)]


def _grown(plan: Plan, rng: Random, span: float) -> list[Fault]:
    comes = rng.random() * span
    return [Fault(comes, JOIN, plan.num_members), *_meanwhile(plan, rng, comes, plan.num_members)]


def _meanwhile(plan: Plan, rng: Random, comes: float, newcomer: int) -> list[Fault]:
    faults = []
    for _ in range(rng.choice((0, 0, 1, 1, 2))):
        when = comes + rng.choice((0.003, 0.01, 0.05)) * rng.random() - 0.002
        slot = newcomer if rng.random() < 0.35 else rng.randrange(plan.num_members)
        kind = rng.choice((CRASH, CRASH, CRASH_IN_STEP, HOLD, HOLD, STOP, LEAVE))
        for_s = 0.02 + 0.1 * rng.random() if kind in (HOLD, STOP) else 0.0
        faults.append(Fault(when, kind, slot, for_s, rng.randrange(4)))
    return faults
