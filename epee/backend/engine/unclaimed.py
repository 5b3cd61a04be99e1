"""Calls whose callers got an error before the end was known: the next call may be a repetition of one.

A call that has completed although its caller got an exception, or may still complete, is *unclaimed*: its results go to
private copies. The next call is taken for its repetition if it is of the same kind: it continues the number and gets
the results. So the ranks stay in step. Everything runs under the engine's lock; nothing is shared with others, and a
crash leaves nothing.
"""

from __future__ import annotations

import time

from ...errors import InvalidArgument
from ..collectives.plan import Make, Plan
from ..engine_face import EngineFace
from .operation import Operation


def disown(engine: EngineFace, op: Operation, exc: BaseException) -> None:
    """End a call whose caller gets `exc` instead, or leave it unclaimed."""
    try:
        op.disown(exc)
    except MemoryError:  # for the private copies: its results cannot be kept
        op.fail(exc)
    if op.told is not None and op not in engine.unclaimed:
        engine.unclaimed.append(op)


def claim(engine: EngineFace, make: Make) -> Operation | None:
    """Return the unclaimed call that `make` repeats, its results in the places of the repetition; None: a new call.

    The end of that call must be known first. A call of another kind repeats none of them: its caller goes on without
    their results, as the other ranks do that have them.

    Raises:
        CommTimeoutError: the end is still open; nothing was issued, the call may be repeated.
    """
    for op in engine.unclaimed[:]:
        plan = _repetition(op, make)
        if plan is None:
            continue
        if not op.done:
            engine.drive(op, time.monotonic() + engine.timeout_s)
        if op.error is None:
            plan.deliver(op.plan.sinks())
            engine.contributors = op.box.members
            del engine.unclaimed[: engine.unclaimed.index(op) + 1]
            return op
        engine.unclaimed.remove(op)
    engine.unclaimed.clear()
    return None


def _repetition(op: Operation, make: Make) -> Plan | None:
    """Return the plan of an unclaimed call for the places of the call that `make` plans, if it repeats it."""
    try:
        plan = make(op.box)
    except InvalidArgument:  # it does not fit that call's members
        return None
    return plan if plan.is_like(op.plan) else None
