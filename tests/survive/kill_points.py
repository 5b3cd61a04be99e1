"""Where a victim kills itself: the names of notes on kill points, mapped to places in the backend.

The product has no hooks: the victim's own process replaces a method by one that calls `SIGKILL` on itself before, in
the middle of, or after the real one, when the call with the chosen number runs.
"""

from __future__ import annotations

import os
import signal
from typing import Any

from epee.backend import engine, operation
from epee.backend.operation import Operation, Plan

POINTS = ("before_send", "mid_send", "after_payload", "after_tag", "before_copyout", "mid_copyout", "after_copyout")


def die() -> None:
    """End this process at once, as a crash would."""
    os.kill(os.getpid(), signal.SIGKILL)


def arm(point: str, seq: int) -> None:
    """Make this process die at `point` of its collective number `seq`, on the fast path and on the slow one."""
    if point not in POINTS:
        raise ValueError(f"unknown kill point {point}")
    made = Operation.__init__

    def init(self: Operation, plan: Plan, own_seq: int, *args: Any, **kwargs: Any) -> None:
        made(self, plan, own_seq, *args, **kwargs)
        if own_seq == seq:
            if point == "before_send":
                die()
            _arm_plan(plan, point)

    Operation.__init__ = init  # type: ignore[method-assign]
    if point in ("after_payload", "after_tag"):
        _arm_publish(point, seq)


def _arm_plan(plan: Any, point: str) -> None:
    """Replace the steps of one call's plan."""
    put, take, commit = plan.put, plan.take, plan.commit

    def dying_put(*args: Any) -> None:
        if point == "mid_send":
            die()
        put(*args)

    def dying_take(*args: Any) -> None:
        if point == "before_copyout":
            die()
        take(*args)
        if point == "mid_copyout":
            die()

    def dying_commit() -> None:
        commit()
        if point == "after_copyout":
            die()

    plan.put, plan.take, plan.commit = dying_put, dying_take, dying_commit


def _arm_publish(point: str, seq: int) -> None:
    """Replace the store of the tag: die just before it (the payload is there) or just after."""
    real = engine.publish_word

    def publish_word(box: Any, index: int, value: int) -> None:
        is_tag = value == box.epoch_bits | seq
        if is_tag and point == "after_payload":
            die()
        real(box, index, value)
        if is_tag and point == "after_tag":
            die()

    for module in (engine, operation):
        module.publish_word = publish_word  # type: ignore[attr-defined]
