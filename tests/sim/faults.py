"""What goes wrong, carried out: crashes, stops, holds, partitions, clock jumps, departures, joiners.

A fault lasts until its second half is over (a stopped process goes on, a partition heals); the world waits for calls to
end only from then on. Proof of a death reaches everybody sooner or later, each at its own time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from epee.view.protocol.decision import parts_of
from epee.view.protocol.events import Died, JoinAsked, LeaveAsked, Tick, Wanted
from epee.view.protocol.messages import Want

from .history import DIED
from .plan import (
    AFTER_SEND,
    BACK,
    CRASH,
    CRASH_IN_STEP,
    FAULT_NAMES,
    HOLD,
    INTERRUPT,
    JOIN,
    JUMP,
    LEAVE,
    OUT,
    PART,
    RESTART,
    STOP,
    Fault,
)
from .words import LANE

if TYPE_CHECKING:
    from .world import Process, World


def inject(world: World, fault: Fault) -> None:
    """Let a fault happen now."""
    world.faults_left -= 1
    world.last_fault = max(world.last_fault, world.now)
    if world.trace is not None:
        world.trace(f"{world.now:.6f} FAULT {FAULT_NAMES[fault.kind]} {fault}")
    if fault.kind == PART:
        world.cut(fault.number)
        _until(world, fault.for_s, world.heal, fault.number)
        return
    if fault.kind == JOIN:
        _join(world, fault.slot)
        return
    if fault.kind in (OUT, BACK):
        _want(world, fault, world.now + fault.for_s)
        return
    victims = [p for p in world.all if p.me.slot == fault.slot and not (p.dead or p.ended) and p.engine is not None]
    if not victims:
        return
    victim = victims[-1]
    if fault.kind == CRASH or (fault.kind == RESTART and not victim.stopped):
        crash(world, victim)
    elif fault.kind == CRASH_IN_STEP:
        victim.crash_after = fault.number + (fault.number >= AFTER_SEND)
        _until(world, 0.5, crash, world, victim)
    elif fault.kind == STOP:
        victim.stopped = True
        _until(world, fault.for_s, _resume, world, victim)
    elif fault.kind == HOLD:
        victim.hold_until = max(victim.hold_until, world.now + fault.for_s)
        _until(world, fault.for_s, world.wake, victim, 0.0)
    elif fault.kind == JUMP:
        victim.clock_offset += fault.for_s
        victim.tick_at = float("inf")
        world.agent(victim, Tick())
    elif fault.kind == INTERRUPT and not victim.stopped:
        interrupt(world, victim, fault.number)
    elif fault.kind == LEAVE and not victim.stopped:
        _leave(world, victim)
    if fault.kind == RESTART:
        _until(world, fault.for_s, _join, world, fault.slot)


def _until(world: World, seconds: float, what: Callable[..., None], *args: Any) -> None:
    """Do the second half of a fault later; the faults last until then."""
    when = world.now + seconds
    world.last_fault = max(world.last_fault, when)
    world.at(when, what, *args)


def crash(world: World, process: Process) -> None:
    """Kill a process; everybody gets proof sooner or later."""
    if process.dead:
        return
    process.dead = True
    world.last_fault = max(world.last_fault, world.now)
    if world.trace is not None:
        world.trace(f"{world.now:.6f} {process.name()} DIES")
    me = process.me
    world.note(process, DIED)
    scale = 0.3 if world.random() < 0.05 and not world.calm else 0.004
    for other in world.all:
        if other is not process and not other.dead and other.me.host == me.host:
            world.at(world.now + world.random() * scale, world.agent, other, Died(me.nonce))


def interrupt(world: World, process: Process, step: int = -1) -> None:
    """Have an exception come out of a call of the program: now, or in a step of taking the next decision over."""
    if process.engine is None:
        return
    if step >= 0:
        process.engine.raise_after = step
    elif world.now >= process.hold_until:
        process.engine.now = world.now
        process.engine.interrupt()
        world.wake(process, 0.0)


def _want(world: World, fault: Fault, until: float) -> None:
    """Have a member of the group want that a slot goes or comes back, again and again until it is so."""
    up = [
        p
        for p in world.all
        if p.engine is not None and not (p.stopped or p.engine.is_out) and _is_up(world, p.me.nonce)
    ]
    up = [p for p in up if p.me.slot != fault.slot]
    if not up or world.now > until:
        return
    by = up[fault.number % len(up)]
    engine, agent = by.engine, by.agent
    assert engine is not None
    now = parts_of(agent.decided, LANE).keys()
    if engine.epoch == agent.epoch and (fault.slot in now) == (fault.kind == OUT) and by.me.slot in now:
        out = {fault.slot} if fault.kind == OUT else set()
        members = tuple(sorted((now | {fault.slot}) - out))
        least = len(now) // 2 + 1 if fault.number // 4 % 2 else 0  # with it, who does not answer goes
        want = Want(LANE, members, tuple(out), min(least, len(members)))
        world.wanted.setdefault(agent.epoch, []).append(want)
        world.agent(by, Wanted(want, engine.epoch))
    world.last_fault = max(world.last_fault, world.now)
    world.at(world.now + world.plan.settings.wait_limit_s / 3, _want, world, fault, until)


def _leave(world: World, process: Process) -> None:
    """A program ends in good order: its engine stops, then it says so and goes."""
    world.agent(process, LeaveAsked())
    world.finish(process)
    for other in world.all:
        if not other.dead and other.me.host == process.me.host:
            world.at(world.now + world.random() * 0.004, world.agent, other, Died(process.me.nonce))


def _resume(world: World, process: Process) -> None:
    if process.stopped:
        process.stopped = False
        waiting, process.waiting = process.waiting, []
        for what, args in waiting:
            what(*args)
        world.wake(process, 0.0)


def _join(world: World, slot: int) -> None:
    """A new process asks for `slot`."""
    world.joiners += 1
    _find_group(world, world.spawn(world.member(slot, 0, world.joiners), None))


def _find_group(world: World, joiner: Process, again: bool = False) -> None:
    """Tell a joiner the members of the newest view, as the directory would; again until it is in or out."""
    newest = world.decisions[max(world.decisions)]
    if joiner.dead or joiner.ended or joiner.engine is not None:
        return
    others = [member for member in newest.members if member.nonce != joiner.me.nonce]
    if again and not any(_may_answer(world, member.nonce) for member in others):
        joiner.ended = True  # nobody is left to join
        return
    world.agent(joiner, JoinAsked(tuple(others)))
    for member in others:
        if not _is_up(world, member.nonce) and member.host == joiner.me.host:
            world.agent(joiner, Died(member.nonce))
    world.at(world.now + 0.2, _find_group, world, joiner, True)


def _may_answer(world: World, nonce: bytes) -> bool:
    """Return whether a process can take a joiner in: it is a member and knows it, or hears of it when it goes on."""
    process = world.processes[nonce]
    return _is_up(world, nonce) and (process.agent.epoch > 0 or process.stopped)


def _is_up(world: World, nonce: bytes) -> bool:
    process = world.processes[nonce]
    return not (process.dead or process.ended)
