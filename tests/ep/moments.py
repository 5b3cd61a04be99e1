"""Moments of a buffer's call at which a test acts: the only place that knows which function of the package each is.

A test says at which moment something happens to a rank (a program's exception, a pause, its death) and checks who gets
what. It names no class of the package, so it stays as it is when the code behind a moment moves.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import epee
from epee.engine.entry import NEWS, TROUBLED
from epee.engine.operation import Operation
from epee.ep.members.header import OP_COMBINE
from epee.ep.members.rows import RowsPlan
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


class Known:
    """The view of the job, as a rank of a `Buffer` on CPUs of one host knows it.

    Args:
        buffer: of the rank.
    """

    def __init__(self, buffer: Any) -> None:
        self._exchange, self._members = buffer._exchange, buffer._exchange.membership

    @property
    def runtime(self) -> Any:
        """The control plane of this process."""
        return self._exchange.engine.membership.runtime

    @property
    def job(self) -> Any:
        """The job of the buffer."""
        return self._members._job

    @property
    def epoch(self) -> int:
        """The newest epoch of the job."""
        return self.runtime.view().epoch

    @property
    def newest(self) -> int:
        """The newest epoch that may have changed something for the buffer."""
        return self.epoch

    @property
    def ranks(self) -> list[int]:
        """The ranks that are in the buffer, or may come into it."""
        present = self._exchange.engine.membership.admission.present()
        return sorted({*present, *self._members._in_group()})

    def check(self) -> None:
        """Raise why this rank's calls cannot succeed."""
        self._exchange.engine.membership.hooks.raise_trouble()


def when_it_waits(buffer: Any, action: Action) -> None:
    """Act once when this rank has published its part of the next call, and is about to wait for a peer.

    One store publishes it to all ranks and wakes them, so there is no moment between these steps. An exception leaves
    the wait.
    """
    if isinstance(buffer, epee.LatencyBuffer):
        _once(buffer._path.wire, "interrupt", action, goes_on=True)
    else:
        after_publishing(buffer._exchange, RowsPlan, action)


def before_it_goes_on(buffer: Any, action: Action) -> None:
    """Act once when this rank has found all parts of a call, and no rank that aborts it, before it says so.

    An error ends the call as one that the wait raises.
    """
    engine = buffer._exchange.engine
    engine._run_short = lambda op: False  # the call takes the long way, whose last step has a function of its own

    def act() -> None:
        del engine._run_short
        action()

    _once(Operation, "finish", act, goes_on=True)


def before_it_takes_results(buffer: Any, action: Action) -> None:
    """Act once in a combine that all ranks continue, before this rank reads its results."""
    _once(buffer._path, "_pull", action, goes_on=True)


def before_its_row(buffer: Any, action: Action) -> None:
    """Act once in the next call of this rank, before any other rank can know of it."""
    _once(buffer._exchange, "_row", action, goes_on=True)


def in_a_combine(buffer: Any, action: Action) -> None:
    """Act once when this rank has published its part of the next combine."""
    exchange, make_row = buffer._exchange, buffer._exchange._row

    def row(header: Any, *args: Any) -> Any:
        if header.op == OP_COMBINE:
            exchange._row = make_row
            after_publishing(exchange, RowsPlan, action)
        return make_row(header, *args)

    exchange._row = row


def when_it_has_all_rows(buffer: Any, action: Action) -> None:
    """Act once in a call of which this rank has all rows, before it copies them."""
    _once(buffer._exchange, "_read", action, goes_on=False)


def before_it_learns_of_a_loss(buffer: Any, action: Action) -> None:
    """Act once when a loss ends a call of this rank, before it finds out what becomes of the call."""
    _once(buffer._exchange.engine.membership, "take_news", action, goes_on=True)


def sleep_until_the_view_changes(engine: Any, action: Action = lambda: None) -> None:
    """Let this rank act once when it waits for a word, and look at none before a view has been decided.

    It gives the lock back, as a sleep does, so that the agents can agree.
    """
    poll = engine.waits.poll

    def sleep_long(words: Any, index: int, value: int) -> bool:
        engine.waits.poll = poll
        end = time.monotonic() + 60.0
        engine.entry.let_go()
        try:
            action()
            while not engine.flags & NEWS:
                assert time.monotonic() < end, "no view is decided"
                time.sleep(0.001)
        finally:
            engine.entry.take_back()
        return bool(words[index] == value)

    engine.waits.poll = sleep_long


def before_it_sends(buffer: Any, action: Action) -> None:
    """Act once before a low-latency call of this rank sends."""
    _once(buffer._path.wire, "post", action, goes_on=True)


def an_agreement_without_a_quorum(buffer: Any) -> None:
    """From now on an agreement on the view is under way, and finds no quorum."""
    engine = buffer._exchange.engine
    hooks: Any = engine.membership.hooks
    hooks.freeze()
    hooks._put_out = NoQuorumError("too few")
    engine.raise_flag(TROUBLED)


def num_calls(buffer: Any) -> int:
    """Return the number of the buffer's last call."""
    return int(buffer._exchange.seq)
