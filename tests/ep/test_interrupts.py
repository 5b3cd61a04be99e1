"""Exceptions of any class from signal handlers before the lines of a buffer's call.

Rank 0 is interrupted. Where its call had not been announced nothing has happened, and its repetition is the call that
the others wait in. Else all ranks make the step again; where a buffer says that this cannot be right they make a new
one. No rank ever gets a value of another step, nor waits for its time-out.
"""

from __future__ import annotations

import functools
import linecache
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import epee
import epee.ep
from epee.errors import CommTimeoutError, EpeeError
from tests.harness import run_ranks

_FOLDER = str(Path(epee.ep.__file__).parent)
HIDDEN = 8
TIMEOUT_S = 120.0  # far longer than the test
MOST_S = 15.0  # for the lines of one test, however busy the machine is


class Watchdog(TimeoutError, ValueError, TypeError, KeyError, MemoryError):
    """An exception of a program's own, which its signal handler raises; code that expects one of these gets it too."""


ERRORS: tuple[type[BaseException], ...] = (
    KeyboardInterrupt,
    Watchdog,
    RecursionError,
    MemoryError,
    CommTimeoutError,
)
STRIDE = 37
NUM_SHARES = 3
SHARES = [
    pytest.param((error,), share, NUM_SHARES, marks=pytest.mark.slow, id=f"{error.__name__}-{share}")
    for error in ERRORS[:3]
    for share in range(NUM_SHARES)
]
SHARES.append(pytest.param(ERRORS, 0, STRIDE, id="every 37th"))


@functools.cache
def _begins_with(path: str, line: int) -> bool:
    return linecache.getline(path, line).lstrip().startswith("with ")


class Interrupt:
    """Runs code and raises an exception before its `at`-th line in the buffers."""

    def __init__(self, at: int, kind: type[BaseException]) -> None:
        self.left = at
        self.where = "not interrupted"
        self.error = kind("raised by a signal handler")

    def _trace(self, frame: Any, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(_FOLDER):
            return None
        # Python handles signals behind calls and at jumps back, so never between the body of a `with` and its end, for
        # which there is a second line event at the `with`.
        if event == "line" and not _begins_with(frame.f_code.co_filename, frame.f_lineno):
            self._line()
            if self.left == 0:
                self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"
                sys.settrace(None)
                raise self.error
        return self._trace

    def _line(self) -> None:
        self.left -= 1

    def run(self, call: Callable[[], Any]) -> Any:
        """Return what the call returns; None where it was interrupted."""
        sys.settrace(self._trace)
        try:
            value = call()
        except BaseException as exc:
            if exc is not self.error:
                raise
            return None
        finally:
            sys.settrace(None)
        assert self.left > 0, f"the exception was swallowed: {self.where}"
        return value


def _buffer(num_ranks: int, is_latency: bool) -> Any:
    sizes = {"num_experts": 2 * num_ranks, "hidden": HIDDEN, "num_topk": 2, "max_tokens_per_rank": 4}
    if is_latency:
        return epee.LatencyBuffer(timeout=TIMEOUT_S, **sizes)
    return epee.Buffer(timeout=TIMEOUT_S, dtype=torch.float32, **sizes)


class Calls:
    """One kind of call, on a buffer that is made again when need be; the value of call `k` is `k`."""

    def __init__(self, kind: str, num_ranks: int) -> None:
        self.kind, self.num_ranks = kind, num_ranks
        self.buffer: Any = None
        self.begin()

    def begin(self) -> None:
        """Make the buffer."""
        if self.buffer is not None:
            self.buffer.close()
        self.buffer = _buffer(self.num_ranks, self.kind.startswith("latency"))
        if self.kind == "combine":
            self.handle = self._dispatch(1).handle
        elif self.kind == "latency combine":
            self.handle = self.buffer.dispatch(torch.ones(1, HIDDEN).bfloat16(), torch.tensor([[0, 2]])).handle

    @property
    def num_announced(self) -> int:
        """Calls that the peers may know of."""
        found: int = self.buffer._path.num_announced(0)
        return found

    def _dispatch(self, k: int) -> Any:
        return self.buffer.dispatch(torch.full((1, HIDDEN), float(k)), torch.tensor([[0, 2]]), torch.ones(1, 2))

    def make(self, k: int) -> float:
        """Make call `k`; each rank has one token, for an expert on each of the first two ranks."""
        if self.kind == "dispatch":
            return float(self._dispatch(k).x.mean())
        if self.kind == "combine":
            rows = torch.full((self.handle.num_recv, HIDDEN), float(k))
            return float(self.buffer.combine(rows, self.handle).x.mean()) / 2
        if self.kind == "bytes":
            parts = self.buffer.all_gather_bytes(k.to_bytes(4, "little"))
            return sum(int.from_bytes(part, "little") for part in parts) / self.num_ranks
        x = torch.full((1, HIDDEN), float(k)).bfloat16()
        if self.kind == "latency dispatch":
            return float(self.buffer.dispatch(x, torch.tensor([[0, 2]])).x[0, : self.num_ranks].float().mean())
        rows = torch.full((2, 4 * self.num_ranks, HIDDEN), float(k)).bfloat16()
        return float(self.buffer.combine(rows, self.handle).x.float().mean()) / 2


def agreed(is_well: bool) -> bool:
    """Return whether all is well on all ranks."""
    x = torch.tensor([float(is_well)])
    dist.all_reduce(x, op=dist.ReduceOp.MIN)
    return bool(x.item())


def _attempt(calls: Calls, k: int, make: Callable[[], float | None], where: str) -> bool:
    """Make call `k` once on all ranks; return whether all have its value."""
    try:
        value = make()
    except EpeeError as error:
        if "silent" in str(error):
            raise AssertionError(f"{where}: it waited for {TIMEOUT_S} s") from error
        value = None
    assert value in (None, float(k)), f"a value of another step: {value} for {k}, {where}"
    return agreed(value is not None)


def at_every_line(
    rank: int, num_ranks: int, kind: str, stride: int, errors: tuple[type[BaseException], ...], first: int
) -> tuple[int, int]:
    calls = Calls(kind, num_ranks)
    until = time.monotonic() + MOST_S
    k = num_made = 0
    for error in errors:
        at, was_interrupted = 1 + first, True
        while was_interrupted:
            k = k % 200 + 1  # bfloat16 holds these
            interrupt = Interrupt(at, error)

            def interrupted(k: int = k, interrupt: Interrupt = interrupt) -> float | None:
                before = calls.num_announced
                value: float | None = interrupt.run(lambda: calls.make(k))
                if value is None and calls.num_announced == before:
                    return calls.make(k)  # the others wait for it
                return value

            is_well = _attempt(calls, k, interrupted if rank == 0 else lambda k=k: calls.make(k), interrupt.where)  # type: ignore[misc]
            for attempt in range(3):
                if is_well:
                    break
                if attempt == 1:
                    calls.begin()  # the buffer has ended, on all ranks
                    num_made += 1
                is_well = _attempt(calls, k, lambda k=k: calls.make(k), interrupt.where)  # type: ignore[misc]
            assert is_well, f"not even a new buffer works: {interrupt.where}"
            was_interrupted = agreed(rank > 0 or (interrupt.left == 0 and time.monotonic() < until))
            at += stride
    calls.buffer.close()
    return k, num_made


@pytest.mark.parametrize(("errors", "share", "stride"), SHARES)
@pytest.mark.parametrize("kind", ["dispatch", "combine", "bytes", "latency dispatch", "latency combine"])
def test_an_exception_before_any_line_of_a_call_leaves_no_rank_with_a_value_of_another(
    kind: str, errors: Any, share: int, stride: int
) -> None:
    run_ranks(at_every_line, 2, kind, stride, errors, share, backend="epee", timeout_s=55)


class Count(Interrupt):
    """Counts the lines of a call before it is announced, and raises nothing."""

    def __init__(self, calls: Calls) -> None:
        super().__init__(1 << 30, KeyboardInterrupt)
        self.lines, self._calls, self._before = 0, calls, calls.num_announced

    def _line(self) -> None:
        self.lines += self._calls.num_announced == self._before


def unmade(rank: int, num_ranks: int, kind: str) -> int:
    """Rank 0 is interrupted before it announces its call, again and again; the other waits in the call meanwhile."""
    calls = Calls(kind, num_ranks)
    calls.make(1)
    count = Count(calls)
    assert count.run(lambda: calls.make(2)) == 2.0
    for at in range(1, count.lines, 5) if rank == 0 else ():
        before, interrupt = calls.num_announced, Interrupt(at, Watchdog)
        assert interrupt.run(lambda: calls.make(3)) is None
        assert calls.num_announced == before, f"it was refused: {interrupt.where}"
    assert calls.make(3) == 3.0
    calls.buffer.close()
    return count.lines


@pytest.mark.parametrize("kind", ["dispatch", "bytes", "latency combine"])
def test_a_call_that_any_exception_ends_before_it_is_announced_has_not_been_made(kind: str) -> None:
    assert run_ranks(unmade, 2, kind, backend="epee", timeout_s=55)[0] > 20
