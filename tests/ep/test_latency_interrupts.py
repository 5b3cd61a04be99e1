"""An exception from a signal handler at any line of a `LatencyBuffer`'s call leaves a buffer that works on.

A trace function raises at a chosen line of epee's latency code, as a handler may. Afterwards the ranks repeat the
step until it succeeds on all, with a `sync` where the documents ask for one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist

import epee
from tests.ep.latency_cases import BF16, Shape, make
from tests.harness import run_ranks

SHAPE = Shape(num_experts=4, hidden=512, num_topk=1, max_tokens=4)
TRACED = ("/ep/latency/",)
MOST = 20  # attempts until a step must succeed on all ranks


class Interrupted(TimeoutError, ValueError, TypeError, KeyError):
    """An exception of a watchdog, say; code that expects one of these classes gets it too."""


class At:
    """Raises at the n-th line of epee's latency code that is run while it is armed."""

    def __init__(self, line: int, kind: type[BaseException]) -> None:
        self.line, self.kind, self.seen = line, kind, 0

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if not any(part in frame.f_code.co_filename for part in TRACED):
            return None
        return self._line

    def _line(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            self.seen += 1
            if self.seen == self.line:
                sys.settrace(None)
                raise self.kind
        return self._line


def step(buffer: epee.LatencyBuffer, with_hook: bool) -> bool:
    """Make a dispatch and a combine that must give every token back."""
    idx = torch.arange(4).remainder(4)[:, None]
    x = torch.full((4, SHAPE.hidden), 2.0 + buffer.rank, dtype=BF16)
    got = buffer.dispatch(x, idx, torch.ones(4, 1), return_hook=with_hook)
    if got.hook is not None:
        got.hook()
    back = buffer.combine(got.x, got.handle, return_hook=with_hook)
    if back.hook is not None:
        back.hook()
    return bool((back.x == x).all())


def attempt(call: Callable[[], bool]) -> str:
    try:
        return "right" if call() else "wrong"
    except (epee.EpeeError, Interrupted, KeyboardInterrupt, RecursionError, MemoryError) as exc:
        return f"{type(exc).__name__}: {exc}"


def everybodys(mine: str, num_ranks: int) -> list[str]:
    found: list[Any] = [None] * num_ranks
    dist.all_gather_object(found, mine)
    return found


def sweep(rank: int, num_ranks: int, kind: type[BaseException], with_hook: bool, first: int, stride: int) -> int:
    """Interrupt rank 0 at every `stride`-th line of a step, from the `first` on; returns how many lines were hit."""
    count = 0
    line = first
    with make(SHAPE, timeout=0.5) as buffer:
        step(buffer, with_hook)
        while True:
            at = At(line, kind)
            if rank == 0:
                sys.settrace(at)
            try:
                told = attempt(lambda: step(buffer, with_hook))
            finally:
                sys.settrace(None)
            was_hit = everybodys(str(at.seen >= line), num_ranks)[0] == "True"
            told_by_all = everybodys(told, num_ranks)
            assert not any(text == "wrong" for text in told_by_all), (line, told_by_all)
            for number in range(MOST):
                told_by_all = everybodys(attempt(lambda: step(buffer, with_hook)), num_ranks)
                assert not any(text == "wrong" for text in told_by_all), (line, told_by_all)
                assert not any("not received" in text for text in told_by_all), (line, told_by_all)
                if all(text == "right" for text in told_by_all):
                    break
                if number:  # an interrupt before the call began has left the ranks one call apart
                    attempt(lambda: bool(len(buffer.sync(timeout=20.0))))
            assert told_by_all == ["right"] * num_ranks, (line, told_by_all)
            if not was_hit:
                return count
            count += 1
            line += stride


SHARDS = [
    pytest.param(50, 271),
    *(pytest.param(first, 148, marks=pytest.mark.slow) for first in range(1, 149, 8)),
]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, Interrupted])
@pytest.mark.parametrize("with_hook", [False, True], ids=["blocking", "hook"])
@pytest.mark.parametrize(("first", "stride"), SHARDS)
def test_a_step_works_again_after_an_interrupt_at_any_line(
    kind: type[BaseException], with_hook: bool, first: int, stride: int
) -> None:
    hit = run_ranks(sweep, 2, kind, with_hook, first, stride)
    assert hit[0] == hit[1] > 0


def behind_begin(rank: int, num_ranks: int) -> None:
    """Rank 0 is interrupted when the second of two calls has just taken its slot, and knows nothing of it yet."""

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_name != "begin" or not frame.f_code.co_filename.endswith("ep/latency/wire.py"):
            return None

        def at_the_end(frame: FrameType, event: str, _: Any) -> Any:
            if event == "return":
                sys.settrace(None)
                raise KeyboardInterrupt
            return at_the_end

        return at_the_end

    with make(SHAPE, timeout=20.0) as buffer:
        step(buffer, False)
        if rank == 0:
            sys.settrace(trace)
        try:
            told = attempt(lambda: step(buffer, False))
        finally:
            sys.settrace(None)
        kinds = [text.split(":")[0] for text in everybodys(told, num_ranks)]
        assert kinds == ["KeyboardInterrupt", "MismatchError"]  # the peer need not wait for its time-out
        for _ in range(4):
            assert step(buffer, False)


def test_a_call_that_is_interrupted_as_it_takes_its_slot_is_refused_at_once_and_the_next_ones_work() -> None:
    run_ranks(behind_begin, 2)


def dropped(rank: int, num_ranks: int) -> None:
    """Results whose hooks nobody has any more, more of them than there are slots."""
    with make(SHAPE, timeout=5.0) as buffer:
        idx = torch.arange(4).remainder(4)[:, None]
        x = torch.ones(4, SHAPE.hidden, dtype=BF16)
        for _ in range(5):
            attempt(lambda: buffer.dispatch(x, idx, torch.ones(4, 1), return_hook=True).hook is not None)
            dist.barrier()
        for _ in range(MOST):
            if everybodys(attempt(lambda: step(buffer, False)), num_ranks) == ["right"] * num_ranks:
                return
            buffer.sync()
    raise AssertionError("the buffer did not recover")


def test_calls_whose_hooks_were_dropped_do_not_hold_their_slots() -> None:
    run_ranks(dropped, 2)
