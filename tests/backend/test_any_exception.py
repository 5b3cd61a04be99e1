"""Exceptions of any class in the worst places: in the midst of writing results, in a call that drives another one, near
the limit of the stack, and again and again.

`test_interrupts.py` goes through the lines of a call; here stands what an exception means for the other ranks, for
other calls and for the group.
"""

from __future__ import annotations

import linecache
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist

import epee
from epee.backend import group
from epee.backend.collectives.reducing_hosts import AllReduce
from epee.backend.work import Done
from epee.engine.engine import Engine
from epee.engine.waiting import GAVE_THE_CALL_UP
from epee.errors import CommTimeoutError, EpeeError, MismatchError, PeerError
from tests.harness import run_ranks
from tests.stand_in import stand_in
from tests.survive import stages

from . import cases

ROOT = str(Path(epee.__file__).parent)
NEVER = "return done"
KINDS = (KeyboardInterrupt, TimeoutError, MemoryError, RecursionError, CommTimeoutError)


def failing_commits(num: int, kind: type[BaseException]) -> list[int]:
    """Let the next `num` commits of an all_reduce raise; returns the list that counts them."""
    commit, seen = AllReduce.commit, []

    @stand_in
    def broken(plan: AllReduce) -> None:
        if len(seen) < num:
            seen.append(1)
            raise kind("in the midst of writing")
        commit(plan)

    AllReduce.commit = broken  # type: ignore[method-assign]
    return seen


def outcome(value: float) -> str:
    """Make a call; return its sum."""
    x = torch.full((3,), value)
    dist.all_reduce(x)
    assert len(set(x.tolist())) == 1, x
    return str(x[0].item())


def fails_once(rank: int, num_ranks: int, kind: type[BaseException]) -> tuple[str, list[float], list[str]]:
    dist.all_reduce(torch.ones(3))
    if rank == 0:
        failing_commits(1, kind)
    x, told = torch.full((3,), rank + 1.0), ""
    try:
        dist.all_reduce(x)
    except kind as exc:
        told = type(exc).__name__
    repeated = [outcome(rank + 1.0)] if rank == 0 else []
    return told, x.tolist(), [*repeated, outcome(10.0), outcome(20.0)]


@pytest.mark.parametrize("kind", [MemoryError, RecursionError, TimeoutError, KeyboardInterrupt])
def test_results_whose_writing_is_broken_off_once_are_complete(kind: type[BaseException]) -> None:
    broken, other = run_ranks(fails_once, 2, kind, backend="epee")
    assert broken == (kind.__name__, [3.0] * 3, ["3.0", "20.0", "40.0"])
    assert other == ("", [3.0] * 3, ["20.0", "40.0"])


def fails_twice(rank: int, num_ranks: int, folder: str, is_async: bool) -> list[str]:
    cases.init(rank, num_ranks, folder, op_timeout=20.0)
    dist.all_reduce(torch.ones(3))
    if rank == 0:
        failing_commits(2, MemoryError)
    told = []
    for k in range(4):
        x = torch.full((3,), rank + 1.0)
        try:
            work = dist.all_reduce(x, async_op=is_async and k == 0)
            if work is not None:
                work.wait()
            told.append(str(x[0].item()))
        except (EpeeError, MemoryError) as exc:
            told.append(f"{type(exc).__name__}: {exc}")
    stages.reach(folder, f"{rank} done")
    for other in range(num_ranks):
        stages.wait_for(folder, f"{other} done")
    dist.destroy_process_group()
    return told


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("is_async", [False, True])
def test_results_that_cannot_be_written_twice_end_the_group_on_all_ranks(
    tmp_path: Path, num_ranks: int, is_async: bool
) -> None:
    broken, *others = run_ranks(fails_twice, num_ranks, str(tmp_path), is_async, backend=None)
    for text in broken:
        assert text.startswith("AbortedError")
        assert "ended on all ranks" in text
        assert "failed twice in writing its results" in text
        assert "initialise again" in text
    for first, *later in others:
        assert first == str(num_ranks * (num_ranks + 1) / 2)
        assert all(text.split(":")[0] in ("AbortedError", "PeerError") for text in later), later
        assert all("rank(s) 0" in text and "ended on all ranks" in text for text in later), later


def returns_late(rank: int, num_ranks: int, kind: type[BaseException], changes: bool) -> list[Any]:
    """Rank 0's call has ended, and a handler raises before the group has returned to torch."""
    group: Any = dist.group.WORLD

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code.co_name == "call" and frame.f_code.co_filename.endswith("backend/group.py"):
            if event == "line" and group._engine.latest.op is not None:
                sys.settrace(None)
                raise kind("behind the call")
            return trace
        return trace if event == "call" else None

    out, x = torch.zeros(2 * num_ranks), torch.full((2,), rank + 1.0)
    found: list[Any] = []
    for step in range(3):
        try:
            if rank == 0 and step == 1:
                sys.settrace(trace)
            dist.all_gather_into_tensor(out, x * (step + 1))
        except kind:
            found.append(out.tolist())
            out = torch.zeros(2 * num_ranks) if changes else out
            dist.all_gather_into_tensor(out, x * (step + 1))
        finally:
            sys.settrace(None)
        found.append(out.tolist())
    assert group._engine.latest.op is None
    return found


@pytest.mark.parametrize("changes", [False, True], ids=["same", "other"])
@pytest.mark.parametrize("kind", [KeyboardInterrupt, TimeoutError, CommTimeoutError, MemoryError])
def test_a_call_that_has_ended_before_the_exception_is_repeated_as_itself(
    kind: type[BaseException], changes: bool
) -> None:
    wanted = [[(step + 1.0) * (src + 1) for src in range(2) for _ in range(2)] for step in range(3)]
    first, second = run_ranks(returns_late, 2, kind, changes, backend="epee")
    assert second == wanted
    assert first == [wanted[0], wanted[1], wanted[1], wanted[2]]


def raised_in_torch(rank: int, num_ranks: int, kind: type[BaseException], count: int) -> tuple[list[float], Any]:
    """Rank 0's handler raises in torch's lines behind the group's method; rank 0 repeats, rank 1 calls next."""

    def wait() -> None:
        raise kind("behind the call")

    x = torch.full((3,), rank + 1.0)
    if rank == 0:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Done, "wait", staticmethod(wait))
            with pytest.raises(kind, match="behind the call"):
                dist.all_reduce(x)
    else:
        dist.all_reduce(x)
    again = torch.full((3,), 1.0) if rank == 0 else torch.full((count,), 20.0)
    try:
        dist.all_reduce(again)
    except MismatchError:
        return x.tolist(), "MismatchError"
    return x.tolist(), again.tolist()


@pytest.mark.parametrize("kind", [KeyboardInterrupt, TimeoutError])
@pytest.mark.parametrize(("count", "second"), [(3, [21.0] * 3), (4, "MismatchError")], ids=["equal", "unlike"])
def test_an_exception_in_torchs_lines_behind_a_call_leaves_it_made(
    kind: type[BaseException], count: int, second: object
) -> None:
    """docs/limits.md names it: the tensors are complete, and a repetition is one call more."""
    assert run_ranks(raised_in_torch, 2, kind, count, backend="epee") == [([3.0] * 3, second)] * 2


def repeats_at_every_line(rank: int, num_ranks: int, kind: type[BaseException], is_async: bool) -> int:
    """Rank 0 is interrupted before each line of epee that issues a collective in turn, and repeats the call."""
    step, is_hit = 0, True
    while is_hit:
        step, left, is_hit = step + 1, step + 1, False

        def trace(frame: FrameType, event: str, arg: Any) -> Any:
            nonlocal left
            if not frame.f_code.co_filename.startswith(ROOT):
                return None
            # CPython runs no handler between the store before this line and the return, a tracer does
            is_line = event == "line" and linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip() != NEVER
            left -= is_line
            if left == 0 and is_line:
                sys.settrace(None)
                raise kind(f"{frame.f_code.co_filename}:{frame.f_lineno}")
            return trace

        x, is_done = torch.full((4,), 10.0 * step + rank), False
        while not is_done:
            try:
                sys.settrace(trace if rank == 0 and not is_hit else None)
                work = dist.all_reduce(x, async_op=is_async)
                sys.settrace(None)
                if work is not None:
                    work.wait()
                is_done = True
            except (CommTimeoutError, MismatchError):
                assert rank == 1
            except kind:
                is_hit = True
            finally:
                sys.settrace(None)
        assert x.tolist() == [20.0 * step + 1] * 4, step
        more = torch.tensor([float(is_hit)])
        dist.broadcast(more, 0)
        is_hit = bool(more.item())
    return step


@pytest.mark.parametrize("is_async", [False, True], ids=["blocking", "async"])
@pytest.mark.parametrize("kind", [KeyboardInterrupt, TimeoutError])
def test_a_collective_that_any_line_of_epee_interrupts_is_repeated_as_itself(
    kind: type[BaseException], is_async: bool
) -> None:
    first, second = run_ranks(repeats_at_every_line, 2, kind, is_async, backend="epee")
    assert first == second > 60


def behind_its_call(act: Any) -> Any:
    """Return a trace function that calls `act` once, where the thread's next collective has left the engine."""
    left = []

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        name, at = frame.f_code.co_name, frame.f_code.co_filename
        if (name, event) == ("run", "return") and at.endswith("engine/engine.py"):
            left.append(1)
        if left and (name, event) == ("call", "line") and at.endswith("backend/group.py"):
            sys.settrace(None)
            act()
        return trace

    return trace


def interrupted_beside_another(rank: int, num_ranks: int, is_within: bool) -> list[list[float]]:
    """Rank 0's main thread is interrupted behind its call, while another thread has made one or is behind its own."""
    outs = [torch.zeros(num_ranks) for _ in range(3)]
    made, may_end = threading.Event(), threading.Event()

    def gather(at: int) -> None:
        dist.all_gather_into_tensor(outs[at], torch.full((1,), 10.0 * at + rank))

    def stop() -> None:
        made.set()
        assert may_end.wait(20.0)

    def another() -> None:
        sys.settrace(behind_its_call(stop) if is_within else None)
        gather(1)
        sys.settrace(None)
        made.set()

    def interrupt() -> None:
        thread.start()
        assert made.wait(20.0)
        raise KeyboardInterrupt

    thread = threading.Thread(target=another)
    if rank == 0:
        sys.settrace(behind_its_call(interrupt))
        with pytest.raises(KeyboardInterrupt):
            gather(0)
        sys.settrace(None)
        outs[0].zero_()
        gather(0)
        may_end.set()
        thread.join(20.0)
    else:
        gather(0)
        gather(1)
    gather(2)
    return [out.tolist() for out in outs]


@pytest.mark.parametrize("is_within", [False, True], ids=["made", "behind"])
def test_an_exception_in_one_thread_is_not_about_the_call_of_another(is_within: bool) -> None:
    assert run_ranks(interrupted_beside_another, 2, is_within, backend="epee") == [[[0, 1], [10, 11], [20, 21]]] * 2


def loses_its_work(rank: int, num_ranks: int, folder: str) -> tuple[str, list[float]]:
    """Rank 0 has no memory for the work of a call that it has issued; then rank 1 begins, and both repeat the call."""
    x, told = torch.full((3,), rank + 1.0), ""
    if rank == 0:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(group, "Work", _no_memory)
            with pytest.raises(MemoryError):
                dist.all_reduce(x, async_op=True)
    stages.meet(folder, "issued", rank, range(num_ranks))
    for _ in range(2 - (rank == 0)):
        try:
            dist.all_reduce(x, async_op=True).wait()
            break
        except CommTimeoutError as exc:
            told = str(exc)
    return told, x.tolist()


def _no_memory(*_: object) -> None:
    raise MemoryError


def test_a_call_whose_work_cannot_be_made_is_aborted_on_all_ranks(tmp_path: Path) -> None:
    first, second = run_ranks(loses_its_work, 2, str(tmp_path), backend="epee")
    assert first == ("", [3.0] * 3)
    assert "rank(s) 0 aborted the call" in second[0]
    assert second[1] == [3.0] * 3


def drives_another(rank: int, num_ranks: int, kind: type[BaseException], folder: str) -> tuple[float, bool, float]:
    """Rank 0's blocking call stands behind an asynchronous one, which rank 1 makes later."""
    x, y = torch.full((2,), rank + 1.0), torch.full((5,), rank + 10.0)
    if rank == 1:
        stages.wait_for(folder, "raised")
        dist.all_reduce(x)
        with pytest.raises((CommTimeoutError, MismatchError)):
            dist.all_reduce(y)
        dist.all_reduce(y)
        return 0.0, True, x[0].item() + y[0].item()

    def handler(*_: Any) -> None:
        raise kind("raised by a signal handler")

    signal.signal(signal.SIGALRM, handler)
    me, began = threading.get_ident(), time.monotonic()
    work = dist.all_reduce(x, async_op=True)
    cases.when_asleep(dist.group.WORLD._engine, lambda: signal.pthread_kill(me, signal.SIGALRM))
    with pytest.raises(kind, match="by a signal handler"):
        dist.all_reduce(y)
    took, is_open = time.monotonic() - began, not work.is_completed()
    stages.reach(folder, "raised")
    work.wait()
    assert y.tolist() == [10.0] * 5
    dist.all_reduce(y)
    return took, is_open, x[0].item() + y[0].item()


@pytest.mark.parametrize("kind", KINDS)
def test_an_exception_ends_the_call_that_waits_and_no_other(tmp_path: Path, kind: type[BaseException]) -> None:
    (took, is_open, sums), (_, _, others) = run_ranks(drives_another, 2, kind, str(tmp_path), backend="epee")
    assert is_open
    assert sums == others == 24.0
    assert took < 30.0, "it waited for the other rank"


def deep(depth: int, call: Any) -> None:
    if depth > 0:
        deep(depth - 1, call)
    else:
        call()


def near_the_limit(rank: int, num_ranks: int) -> int:
    """Rank 0 makes each call with less stack to spare than the one before, and repeats it with enough."""
    num_raised = 0
    limit = sys.getrecursionlimit()
    for spare in range(60, 2, -1):
        for attempt in range(8):
            x = torch.full((3,), 10.0 * spare + rank)
            try:
                if rank == 0 and attempt == 0:
                    frame, used = sys._getframe(), 0
                    while frame is not None:
                        frame, used = frame.f_back, used + 1  # type: ignore[assignment]
                    deep(limit - used - spare, lambda x=x: dist.all_reduce(x))  # type: ignore[misc]
                else:
                    dist.all_reduce(x)
            except RecursionError:
                num_raised += 1
                continue
            except (MismatchError, CommTimeoutError):
                continue
            break
        assert x.tolist() == [20.0 * spare + 1] * 3, (spare, attempt)
    return num_raised


def test_calls_near_the_limit_of_the_stack_are_right_or_made_again() -> None:
    assert run_ranks(near_the_limit, 2, backend="epee")[0] > 5


def again_and_again(rank: int, num_ranks: int, kind: type[BaseException]) -> int:
    """Rank 0's handler raises every 0.3 ms while it makes a call, until calls were broken off often enough.

    On a quick machine most calls are over before that, so the ranks agree after each further call whether to go on.
    """
    num_raised = 0
    is_armed = [False]

    def handler(_: int, frame: Any) -> None:
        while frame is not None and frame.f_code is not Engine.run.__code__:
            frame = frame.f_back  # what comes behind the call cannot be seen by it
        if is_armed[0] and frame is not None:
            raise kind("raised by a signal handler")

    signal.signal(signal.SIGALRM, handler)
    for k in range(1, 1000):
        for attempt in range(60):
            x = torch.full((70_000,), 10.0 * k + rank)
            try:
                try:
                    if rank == 0 and attempt < 2:
                        is_armed[0] = True
                        signal.setitimer(signal.ITIMER_REAL, 3e-4, 3e-4)
                    dist.all_reduce(x)
                finally:
                    is_armed[0] = False
                    signal.setitimer(signal.ITIMER_REAL, 0)
            except kind as exc:
                if "by a signal handler" in str(exc):
                    num_raised += 1
                continue
            except (MismatchError, CommTimeoutError):
                continue
            except PeerError as exc:  # rank 0 has aborted the call between its two steps
                if exc.cause != GAVE_THE_CALL_UP:
                    raise
                continue
            break
        assert x.unique().tolist() == [20.0 * k + 1], (k, attempt)
        if k >= 39:
            enough = torch.tensor([float(rank == 0 and num_raised > 5)])
            dist.all_reduce(enough)
            if enough.item():
                break
    return num_raised


@pytest.mark.parametrize("kind", [KeyboardInterrupt, TimeoutError])
def test_a_handler_that_raises_again_and_again_leaves_results_right(kind: type[BaseException]) -> None:
    assert run_ranks(again_and_again, 2, kind, backend="epee")[0] > 5
