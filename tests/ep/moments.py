"""Moments of a buffer's call at which a test acts: the only place that knows which function of the package each is.

A test says at which moment something happens to a rank (a program's exception, a pause, its death) and checks who gets
what. It names no class of the package, so it stays as it is when the code behind a moment moves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import epee
from epee.engine.plan import Plan
from epee.ep.control import words
from epee.ep.hosts.direct import DirectExchange
from epee.ep.hosts.step import RowsPlan
from epee.errors import NoQuorumError

Action = Callable[[], Any]


def _once(holder: Any, name: str, action: Action, goes_on: bool) -> None:
    """Call `action` when a function is called next, and the function itself after it if the call goes on."""
    function = getattr(holder, name)

    def instead(*args: Any, **kwargs: Any) -> Any:
        setattr(holder, name, function)
        action()
        return function(*args, **kwargs) if goes_on else None

    setattr(holder, name, instead)


def after_publishing(exchange: Any, kind: type, act: Callable[[], object]) -> None:
    """Let this process act when the engine has published a call of this kind of plan."""
    members = exchange.engine.members
    exports = members.exports

    class Acting:
        """The exports of these peer regions, which act once more."""

        def __getattr__(self, name: str) -> Any:
            return getattr(exports, name)

        def publish_call(self, peer_regions: Any, cell: int, tag: int, plan: Any, base: int) -> None:
            exports.publish_call(peer_regions, cell, tag, plan, base)
            if isinstance(plan, kind):
                members.exports = exports
                act()

    members.exports = Acting()


def _has_engine(buffer: Any) -> bool:
    return isinstance(getattr(buffer, "_exchange", None), DirectExchange)


def when_it_waits(buffer: Any, act: Action) -> None:
    """Start `act` once when this rank has published its part of the next call, and is about to wait for a peer."""
    exchange = buffer._exchange
    if _has_engine(buffer):
        after_publishing(exchange, Plan, act)
        return
    _once(exchange, "_wait", act, goes_on=True)


def in_a_wait(buffer: Any, action: Action) -> None:
    """Act once while the next call of this rank waits for the others; an exception leaves the wait."""
    if isinstance(buffer, epee.LatencyBuffer):
        _once(buffer._path.wire, "interrupt", action, goes_on=True)
    elif _has_engine(buffer):
        after_publishing(buffer._exchange, RowsPlan, action)
    else:
        _once(buffer._exchange, "_interrupt", action, goes_on=True)


def in_place_of_the_wait(buffer: Any, action: Action) -> None:
    """Act once when this rank has published its part of a call, in place of the wait for the others' parts."""
    if _has_engine(buffer):
        after_publishing(buffer._exchange, RowsPlan, action)
        return
    _once(buffer._exchange, "_wait_rows", action, goes_on=False)


def before_it_goes_on(buffer: Any, action: Action) -> None:
    """Act once when this rank has found all parts of a call, and no rank that aborts it, before it says so."""
    _once(buffer._exchange.end, "go_on", action, goes_on=True)


def before_it_takes_results(buffer: Any, action: Action) -> None:
    """Act once in a combine that all ranks continue, before this rank reads its results."""
    _once(buffer._path, "_pull", action, goes_on=True)


def before_it_sends(buffer: Any, action: Action) -> None:
    """Act once before a low-latency call of this rank sends."""
    _once(buffer._path.wire, "post", action, goes_on=True)


def before_a_wake_up(action: Action) -> None:
    """Act once when this rank has stored a word of a call, before it wakes the ranks that wait for it."""
    _once(words, "futex_wake", action, goes_on=True)


def an_agreement_without_a_quorum(buffer: Any) -> None:
    """From now on an agreement on the view is under way, and finds no quorum."""
    membership = buffer._exchange.membership
    membership._calls.freeze()

    def raise_it() -> None:
        raise NoQuorumError("too few")

    membership._check = raise_it


def num_calls(buffer: Any) -> int:
    """Return the number of the buffer's last call."""
    return int(buffer._exchange.seq)
