"""Where a victim kills (or stops) itself: the names of notes on kill points, mapped to places in the backend.

The product has no hooks: the victim's own process replaces a method by one that calls `SIGKILL` on itself before, in
the middle of, or after the real one, when the call with the chosen number runs. What has no such place in a given call
(a barrier puts nothing) hits the victim at the beginning of its next call instead; the record says so.
"""

from __future__ import annotations

import os
import signal
import struct
import time
from collections.abc import Callable
from typing import Any

from epee.engine.operation import Operation
from epee.engine.outbox import NoExports
from epee.engine.p2p import ends
from epee.engine.plan import Plan
from epee.engine.replication.exports import Exports
from epee.view.process.board import Board
from epee.view.protocol.agent import Agent

POINTS = ("before_send", "mid_send", "after_payload", "after_tag", "before_copyout", "mid_copyout", "after_copyout")
AGREE_POINTS = ("in_agree_prepare", "in_agree_board", "in_agree_accept", "in_agree_commit")

_RECORD = struct.Struct("<QQ")  # when, 1 when the point was not on the way
_record_fd = [-1]
_has_acted: list[bool] = []


def record_to(path: str) -> None:
    """Write the moment of the signal to this file."""
    _record_fd[0] = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)


def read_record(path: str) -> tuple[int, bool]:
    """Return (monotonic time of the signal in ns, whether the point was on the way)."""
    with open(path, "rb") as file:
        when, missed = _RECORD.unpack(file.read())
    return when, not missed


def _note(missed: bool) -> None:
    if _record_fd[0] >= 0:
        os.pwrite(_record_fd[0], _RECORD.pack(time.monotonic_ns(), missed), 0)


def die(missed: bool = False) -> None:
    """End this process at once, as a crash would."""
    _note(missed)
    os.kill(os.getpid(), signal.SIGKILL)


def stop(missed: bool = False) -> None:
    """Stop this process once, with all its threads, until somebody sends SIGCONT."""
    if not _has_acted:
        _has_acted.append(True)
        _note(missed)
        os.kill(os.getpid(), signal.SIGSTOP)


def arm(point: str, seq: int, act: Callable[..., None] = die) -> None:
    """Make this process die at `point` of its collective number `seq`, on the fast path and on the slow one."""
    if point not in POINTS:
        raise ValueError(f"unknown kill point {point}")
    made = Operation.__init__

    def init(self: Operation, plan: Plan, own_seq: int, *args: Any, **kwargs: Any) -> None:
        made(self, plan, own_seq, *args, **kwargs)
        if own_seq == seq:
            if point == "before_send":
                act()
            _arm_plan(plan, point, act)
        elif own_seq == seq + 1:
            act(True)

    Operation.__init__ = init  # type: ignore[method-assign]
    if point in ("after_payload", "after_tag"):
        _arm_publish(point, seq, act)


def _arm_plan(plan: Any, point: str, act: Callable[..., None]) -> None:
    """Replace the steps of one call's plan."""
    put, take, commit = plan.put, plan.take, plan.commit

    def dying_put(*args: Any) -> None:
        if point == "mid_send":
            act()
        put(*args)

    def dying_take(*args: Any) -> None:
        if point == "before_copyout":
            act()
        take(*args)
        if point == "mid_copyout":
            act()

    def dying_commit() -> None:
        commit()
        if point == "after_copyout":
            act()

    plan.put, plan.take, plan.commit = dying_put, dying_take, dying_commit


def _arm_publish(point: str, seq: int, act: Callable[..., None]) -> None:
    """Replace the store of the tag: die just before it (the payload is there) or just after."""
    _wrap_publishing(
        "publish_call",
        act,
        point == "after_payload",
        lambda peer_regions, cell, tag: tag == peer_regions.epoch_bits | seq,
    )


def _wrap_publishing(name: str, act: Callable[..., None], is_before: bool, concerns: Callable[..., bool]) -> None:
    """Run `act` before or after each store by a method of `Exports` that `concerns(peer_regions, index, value)`."""

    def wrapped(real: Callable[..., None]) -> Callable[..., None]:
        def publish(exports: Any, peer_regions: Any, index: int, value: int, *moved: Any) -> None:
            is_it = concerns(peer_regions, index, value)
            if is_it and is_before:
                act()
            real(exports, peer_regions, index, value, *moved)
            if is_it and not is_before:
                act()

        return publish

    def stored(real: Callable[..., None]) -> Callable[..., None]:
        return lambda exports, *call: real(*call)

    setattr(NoExports, name, wrapped(stored(getattr(NoExports, name))))
    setattr(Exports, name, wrapped(getattr(Exports, name)))


def arm_messages(point: str, act: Callable[..., None] = die) -> None:
    """Make this process die at `point` of the messages that it sends and receives from now on.

    Copying out is the receiver's part: before the first message is taken, before its verdict is stored, after it.
    """
    if point == "before_send":
        act()
    elif point == "mid_send":
        ends.Sender._write = _wrapped(ends.Sender._write, act, True)  # type: ignore[method-assign]
    elif point in ("after_payload", "after_tag"):
        is_before = point == "after_payload"
        _wrap_publishing("publish_fragment", act, is_before, lambda *word: True)
    elif point == "before_copyout":
        ends.Receiver._pull = _wrapped(ends.Receiver._pull, act, True)  # type: ignore[method-assign]
    else:
        is_before = point == "mid_copyout"
        _wrap_publishing("publish", act, is_before, _is_verdict)


def _is_verdict(peer_regions: Any, index: int, value: int) -> bool:
    return bool(peer_regions.verdict_base[0] <= index < peer_regions.channel_base[0])


def arm_agreement(point: str, act: Callable[..., None] = die) -> None:
    """Make this process die in its part of the next agreement.

    Before it promises, when its board is written but the answer has not left, before it accepts, or when it has learned
    the decision but nothing of its own knows it.
    """
    if point == "in_agree_board":
        Board.write = _wrapped(Board.write, act, False)  # type: ignore[method-assign]
        return
    name = {"in_agree_prepare": "_give_promise", "in_agree_accept": "_take", "in_agree_commit": "_learn"}[point]
    setattr(Agent, name, _wrapped(getattr(Agent, name), act, True))


def _wrapped(real: Callable[..., Any], act: Callable[..., None], is_before: bool) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if is_before:
            act()
        result = real(*args, **kwargs)
        if not is_before:
            act()
        return result

    return wrapper
