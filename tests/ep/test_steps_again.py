"""A step that is made again after an error never meets another step: each value is of that step on all ranks.

Rank 0 stands still once in a step until all others have given the call up (in that step time-outs of 0.4 s).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import epee
from epee.errors import AbortedError, CommTimeoutError, EpeeError, InvalidState, MismatchError
from tests.harness import run_mortal, run_ranks
from tests.survive import stages

from . import moments

NUM_STEPS = 4
STILL_AT = 2
HIDDEN = 8
SHORT_S, LONG_S = 0.4, 20.0
Step = Callable[[int, Callable[[], None]], Any]


def _buffer(num_ranks: int, what: str = "", timeout: float = LONG_S) -> Any:
    sizes = {"num_experts": 2 * num_ranks, "hidden": HIDDEN, "num_topk": 2, "max_tokens_per_rank": 4}
    if what in ("latency", "hooks"):
        return epee.LatencyBuffer(timeout=timeout, **sizes)
    return epee.Buffer(timeout=timeout, dtype=torch.float32, **sizes)


def _tokens(num_ranks: int) -> torch.Tensor:
    """One token; its two experts are on the first two ranks."""
    return torch.tensor([[0, 2]])


def _limit(k: int, short_s: float) -> float | None:
    """Return the time-out of a step's calls, None: the buffer's. A busy machine may be slower than the short one."""
    return short_s if k == STILL_AT else None


def _layer(buffer: epee.Buffer, short_s: float) -> Step:
    """A whole layer, whose experts multiply by its number; rank 0 stands still between dispatch and combine."""

    def step(k: int, pause: Callable[[], None]) -> float:
        tokens, limit = torch.ones(1, HIDDEN), _limit(k, short_s)
        d = buffer.dispatch(tokens, _tokens(buffer.num_ranks), torch.ones(1, 2), layout="expert", timeout=limit)
        assert isinstance(d.x, torch.Tensor)
        pause()
        return buffer.combine(d.x * k, d.handle, timeout=limit).x[0, 0].item() / 2

    return step


def _combine(buffer: epee.Buffer, short_s: float) -> Step:
    """Combines with one handle."""
    d = buffer.dispatch(torch.ones(1, HIDDEN), _tokens(buffer.num_ranks))

    def step(k: int, pause: Callable[[], None]) -> float:
        pause()
        y = torch.full((d.handle.num_recv, HIDDEN), float(k))
        return buffer.combine(y, d.handle, timeout=_limit(k, short_s)).x[0, 0].item() / 2

    return step


def _gather(buffer: epee.Buffer, short_s: float) -> Step:
    """Bytes that say which step it is."""

    def step(k: int, pause: Callable[[], None]) -> float:
        pause()
        parts = buffer.all_gather_bytes(bytes([k]), timeout=_limit(k, short_s))
        return sum(int.from_bytes(part, "little") for part in parts) / buffer.num_ranks

    return step


def _dispatch(buffer: epee.Buffer, short_s: float) -> Step:
    """Rows that say which step it is."""

    def step(k: int, pause: Callable[[], None]) -> float:
        pause()
        x = torch.full((1, HIDDEN), float(k))
        d = buffer.dispatch(x, _tokens(buffer.num_ranks), timeout=_limit(k, short_s))
        assert isinstance(d.x, torch.Tensor)
        return d.x[0, 0].item() if len(d.x) else float(k)

    return step


def _latency(buffer: epee.Buffer, short_s: float, use_hook: bool = False) -> Step:
    """A whole layer through a `LatencyBuffer`."""

    def step(k: int, pause: Callable[[], None]) -> float:
        options: Any = {"return_hook": use_hook, "timeout": _limit(k, short_s)}
        d: Any = buffer.dispatch(torch.ones(1, HIDDEN).bfloat16(), _tokens(buffer.num_ranks), **options)
        if use_hook:
            d.hook()
        pause()
        c: Any = buffer.combine(d.x * k, d.handle, **options)
        if use_hook:
            c.hook()
        return float(c.x[0, 0]) / 2

    return step


STEPS: dict[str, Callable[[epee.Buffer, float], Step]] = {
    "layer": _layer,
    "combine": _combine,
    "bytes": _gather,
    "dispatch": _dispatch,
    "latency": _latency,
    "hooks": lambda buffer, short_s: _latency(buffer, short_s, use_hook=True),
}


def _until_it_succeeds(step: Callable[[], float], on_error: Callable[[], None]) -> tuple[float, list[str]]:
    errors: list[str] = []
    while True:
        try:
            return step(), errors
        except (EpeeError, KeyboardInterrupt) as error:
            errors.append(type(error).__name__)
            on_error()
            assert len(errors) < 30, errors


def _make_steps(rank: int, num_ranks: int, folder: str, what: str) -> list[tuple[float, list[str]]]:
    buffer = _buffer(num_ranks, what)
    step = STEPS[what](buffer, SHORT_S)
    has_stood: list[int] = []

    def pause(k: int) -> None:
        if rank == 0 and k == STILL_AT and not has_stood:
            has_stood.append(k)
            for other in range(1, num_ranks):
                stages.wait_for(folder, f"{other} gave up")

    def gave_up() -> None:
        stages.reach(folder, f"{rank} gave up")

    dist.barrier()
    return [_until_it_succeeds(lambda k=k: step(k, lambda: pause(k)), gave_up) for k in range(1, NUM_STEPS + 1)]  # type: ignore[misc]


@pytest.mark.parametrize(("backend", "num_ranks"), [("epee", 2), ("gloo", 3)])
@pytest.mark.parametrize("what", STEPS)
def test_a_rank_that_stands_still_ends_with_the_others(what: str, backend: str, num_ranks: int, tmp_path: Any) -> None:
    results = run_ranks(_make_steps, num_ranks, str(tmp_path), what, backend=backend)
    for rank, steps in enumerate(results):
        assert [value for value, _ in steps] == [1.0, 2.0, 3.0, 4.0], (rank, steps)
        for k, (_, errors) in enumerate(steps, 1):
            assert set(errors) <= {"CommTimeoutError"}, (rank, k, steps)
            assert bool(errors) == (k == STILL_AT), (rank, k, steps)


def interrupt() -> None:
    """Do what a signal handler of the program may do."""
    raise KeyboardInterrupt


def _interrupted(rank: int, num_ranks: int, folder: str, what: str) -> list[tuple[float, list[str]]]:
    """Rank 1 is interrupted in its wait for rank 0, which makes its call afterwards."""
    buffer = _buffer(num_ranks, what)
    step = STEPS[what](buffer, LONG_S)

    def pause(k: int) -> None:
        if k == STILL_AT and rank == 0:
            stages.wait_for(folder, "1 gave up")
        if k == STILL_AT and rank == 1 and not has_been:
            has_been.append(k)
            moments.when_it_waits(buffer, interrupt)

    def gave_up() -> None:
        stages.reach(folder, f"{rank} gave up")

    has_been: list[int] = []
    dist.barrier()
    return [_until_it_succeeds(lambda k=k: step(k, lambda: pause(k)), gave_up) for k in range(1, NUM_STEPS + 1)]  # type: ignore[misc]


@pytest.mark.parametrize("what", ["layer", "bytes", "latency"])
def test_an_interrupt_when_it_waits_ends_the_call_on_all(what: str, tmp_path: Any) -> None:
    results = run_ranks(_interrupted, 3, str(tmp_path), what, backend="epee")
    for rank, steps in enumerate(results):
        assert [value for value, _ in steps] == [1.0, 2.0, 3.0, 4.0], (rank, steps)
        assert steps[1][1] == ["KeyboardInterrupt" if rank == 1 else "CommTimeoutError"]


def _undecided(rank: int, num_ranks: int, folder: str, completes: bool) -> list[str]:
    """Rank 1 stands still between its second look and its word, while rank 0 gives the call up."""
    buffer = _buffer(num_ranks)
    seen = []
    if rank == 0:

        def impatient() -> None:
            stages.wait_for(folder, "looked")
            raise CommTimeoutError("made up", [1])

        moments.before_it_goes_on(buffer, impatient)
    else:

        def dawdle() -> None:
            stages.reach(folder, "looked")
            stages.wait_for(folder, "0 saw no end")
            if not completes:
                interrupt()

        moments.before_it_goes_on(buffer, dawdle)
    for _ in range(3):
        try:
            parts = buffer.all_gather_bytes(b"x")
            seen.append(b"".join(parts).decode())
        except (EpeeError, KeyboardInterrupt) as error:
            seen.append(type(error).__name__)
        if rank == 0:
            stages.reach(folder, "0 saw no end")
    return seen


def test_who_cannot_know_how_a_call_ended_says_so_and_does_not_go_on(tmp_path: Any) -> None:
    late, first = run_ranks(_undecided, 2, str(tmp_path), True)
    assert first == ["xx", "MismatchError", "MismatchError"], "the other is told"
    assert late == ["CommTimeoutError", "InvalidState", "InvalidState"]


def test_a_call_that_was_open_may_end_well(tmp_path: Any) -> None:
    late, first = run_ranks(_undecided, 2, str(tmp_path), False)
    assert late == ["CommTimeoutError", "xx", "xx"]
    assert first == ["KeyboardInterrupt", "xx", "xx"]


def _interrupted_pull(rank: int, num_ranks: int) -> list[str]:
    """A combine that is interrupted when all have gathered it has its result on the other ranks only."""
    buffer = _buffer(num_ranks)
    d = buffer.dispatch(torch.ones(1, HIDDEN), _tokens(num_ranks))
    if rank == 0:
        moments.before_it_takes_results(buffer, interrupt)
    seen = []
    for _ in range(3):
        try:
            buffer.combine(torch.ones(d.handle.num_recv, HIDDEN), d.handle)
            seen.append("result")
        except (InvalidState, MismatchError, KeyboardInterrupt, AbortedError) as error:
            seen.append(type(error).__name__)
    return seen


def test_a_result_that_one_rank_lacks_ends_the_buffer() -> None:
    assert run_ranks(_interrupted_pull, 2) == [
        ["KeyboardInterrupt", "InvalidState", "InvalidState"],
        ["result", "MismatchError", "MismatchError"],
    ]


# ---- found by a review: ranks that end a call without a word


def _dies_in_its_send_half(rank: int, num_ranks: int, folder: str) -> list[str]:
    store = dist.FileStore(f"{folder}/store", num_ranks)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    buffer = _buffer(num_ranks, "latency", timeout=5)
    x = torch.ones(1, HIDDEN).bfloat16()
    buffer.dispatch(x, _tokens(num_ranks))
    if rank == 1:
        moments.before_it_sends(buffer, lambda: os.kill(os.getpid(), signal.SIGKILL))
        buffer.dispatch(x, _tokens(num_ranks))
    seen = []
    mask = torch.ones(num_ranks, dtype=torch.int32)
    for active_ranks in (None, None, mask, mask):
        try:
            buffer.dispatch(x, _tokens(num_ranks), active_ranks=active_ranks)
            seen.append("result")
        except EpeeError as error:
            seen.append(type(error).__name__)
    return [*seen, str(mask.tolist())]


def test_a_death_in_a_send_half_leaves_nothing_open() -> None:
    survivor, _ = run_mortal(_dies_in_its_send_half, 2, dead={1})
    assert survivor == ["RankFailedError", "RankFailedError", "result", "result", "[1, 0]"]


def _refuses(rank: int, num_ranks: int) -> list[str]:
    """Rank 2 gives a bad argument once, when rank 0 may have sent its half to rank 1 already."""
    buffer = _buffer(num_ranks, "latency")
    idx = torch.tensor([[0, 2], [2, 4], [0, 4]])
    d = buffer.dispatch(torch.ones(3, HIDDEN).bfloat16(), idx, torch.ones(3, 2))
    seen = []
    for attempt in range(2):
        weights = torch.ones(1 if rank == 2 and not attempt else 3, 2)
        try:
            buffer.combine(d.x, d.handle, topk_weights=weights)
            seen.append("result")
        except EpeeError as error:
            seen.append(type(error).__name__)
    return seen


def test_a_refusal_that_meets_a_send_half_ends_the_call_on_all() -> None:
    *others, refuser = run_ranks(_refuses, 3)
    assert refuser == ["InvalidArgument", "result"]
    for seen in others:
        assert seen[0] in ("MismatchError", "CommTimeoutError")
        assert seen[1] == "result"


def _refusal_and_interrupt(rank: int, num_ranks: int) -> list[str]:
    """Rank 0 is interrupted when it has sent its row of a call that rank 1 refuses."""
    buffer = _buffer(num_ranks)
    d = buffer.dispatch(torch.ones(1, HIDDEN), _tokens(num_ranks))
    assert isinstance(d.x, torch.Tensor)
    seen = []
    for attempt in range(3):
        if rank == 0 and not attempt:
            moments.when_it_waits(buffer, interrupt)
        try:
            buffer.combine(d.x if rank == 0 or attempt else d.x[:, :4], d.handle)
            seen.append("result")
        except (EpeeError, KeyboardInterrupt) as error:
            seen.append(type(error).__name__)
    assert moments.num_calls(buffer) >= 3
    return seen


def test_a_refused_call_that_is_interrupted_elsewhere_leaves_nothing_open() -> None:
    interrupted, refuser = run_ranks(_refusal_and_interrupt, 2)
    assert interrupted == ["KeyboardInterrupt", "result", "result"]
    assert refuser == ["InvalidArgument", "result", "result"]


def _no_quorum(rank: int, num_ranks: int) -> str:
    """Rank 0 does not know yet how its combine ends when an agreement begins that finds no quorum."""
    buffer = _buffer(num_ranks, timeout=500.0)
    d = buffer.dispatch(torch.ones(1, HIDDEN), _tokens(num_ranks), torch.ones(1, 2))
    assert isinstance(d.x, torch.Tensor)
    if rank == 0:
        moments.when_it_waits(buffer, lambda: moments.an_agreement_without_a_quorum(buffer))
    try:
        buffer.combine(d.x, d.handle, timeout=1.0)
        told = ""
    except EpeeError as error:
        told = type(error).__name__
    dist.barrier()
    return told


def test_a_call_without_a_quorum_ends_at_its_own_time_out() -> None:
    first, second = run_ranks(_no_quorum, 2, timeout_s=40)
    assert first == "NoQuorumError"
    # it has all rows; but it may be told that the other has given up, as its own part comes behind that
    assert second in ("", "CommTimeoutError")
