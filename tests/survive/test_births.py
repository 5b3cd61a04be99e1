"""A rank that is killed at any step of making a group or a buffer: all others raise the same, or go on, and name it.

The victim ends itself at its n-th call of one of epee's functions, so a sweep of n goes through all steps. A rank that
dies before it has written its record is one that does not come, for the others: they raise that at their time-out.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist

import epee
from epee.engine.outbox import LIFE
from epee.engine.replication.exports import Exports
from epee.errors import CommTimeoutError, PeerError, RankFailedError
from tests.harness import DEAD, run_ranks
from tests.hosts import run_on_loopbacks

from . import stages

ROOT = str(Path(epee.__file__).parent)
TIMEOUT_S, LONG_S = 2.0, 30.0
VICTIM = 1
Outcome = tuple[str, tuple[int, ...]]


def _die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at_call(nth: int) -> None:
    """Let this process end itself at its n-th call of a function of epee's, on this thread."""
    left = [nth]

    def look(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(ROOT):
            left[0] -= 1
            if left[0] == 0:
                _die()

    sys.setprofile(look)


def _outcome(call: Callable[[], object]) -> Outcome:
    try:
        call()
    except (RankFailedError, CommTimeoutError, PeerError) as error:
        return type(error).__name__, error.ranks
    return "", ()


def _init(rank: int, num_ranks: int, folder: str, backend: str, timeout_s: float = TIMEOUT_S) -> None:
    store = dist.FileStore(f"{folder}/store", num_ranks)
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=timeout)


def _ended(rank: int, num_ranks: int, folder: str, found: list[Outcome]) -> list[Outcome]:
    """End the victim if it has lived so long, and the others when all of them have their outcomes."""
    if rank == VICTIM:
        _die()
    stages.meet(folder, "ended", rank, [other for other in range(num_ranks) if other != VICTIM])
    return found


def make_group(rank: int, num_ranks: int, folder: str, nth: int) -> list[Outcome]:
    if rank == VICTIM:
        die_at_call(nth)
    found = [_outcome(lambda: _init(rank, num_ranks, folder, "epee"))]
    if rank != VICTIM and not found[0][0]:
        found += [_outcome(lambda: dist.all_reduce(torch.ones(2))) for _ in range(2)]
    return _ended(rank, num_ranks, folder, found)


def make_buffer(
    rank: int, num_ranks: int, folder: str, nth: int, backend: str, kind: type[Any] = epee.Buffer
) -> list[Outcome]:
    _init(rank, num_ranks, folder, backend)
    dist.barrier()
    stages.meet(folder, "made", rank, range(num_ranks))
    if rank == VICTIM:
        die_at_call(nth)
    made: list[Any] = []
    arguments: dict[str, Any] = {"num_experts": num_ranks, "hidden": 8, "num_topk": 1, "max_tokens_per_rank": 4}
    found = [_outcome(lambda: made.append(kind(timeout=TIMEOUT_S, **arguments)))]
    if rank != VICTIM and made:
        x, idx = torch.ones(2, 8, dtype=torch.bfloat16), torch.zeros(2, 1, dtype=torch.int64)
        found += [_outcome(lambda: made[0].dispatch(x, idx, torch.ones(2, 1))) for _ in range(2)]
    return _ended(rank, num_ranks, folder, found)


def _check(results: list[Any], *allowed: Outcome) -> None:
    """Check that all survivors have the same outcomes: one error at most, which is one of those allowed."""
    survivors = [result for result in results if result != DEAD]
    assert survivors == [survivors[0]] * (len(results) - 1), survivors
    errors = [outcome for outcome in survivors[0] if outcome[0]]
    assert len(errors) == 1, survivors[0]
    assert errors[0] in allowed, errors


FAILED, LATE = ("RankFailedError", (VICTIM,)), ("CommTimeoutError", (VICTIM,))
GROUP_FAILED = ("PeerError", ())  # of gloo, before the ranks know each other's processes
QUICK = [3, 330]
SLOW = [pytest.param(nth, marks=pytest.mark.slow) for nth in range(1, 1000, 83)]


@pytest.mark.parametrize("nth", [*QUICK, *SLOW])
def test_a_death_while_a_group_is_made(tmp_path: Path, nth: int) -> None:
    _check(run_ranks(make_group, 3, str(tmp_path), nth, backend=None, dead={VICTIM}), FAILED, LATE)


@pytest.mark.parametrize("nth", [3, pytest.param(700, marks=pytest.mark.slow), *SLOW])
def test_a_death_while_a_group_over_hosts_is_made(tmp_path: Path, nth: int) -> None:
    _check(run_on_loopbacks(make_group, (0, 0, 1), str(tmp_path), nth, backend=None, dead={VICTIM}), FAILED, LATE)


def _die_ready() -> None:
    """End this process when its host can read that it is ready, and before that is sent to others."""
    word = Exports.word

    def look(self: Exports, index: int, value: int) -> None:
        if index == LIFE:
            _die()
        word(self, index, value)

    setattr(Exports, "word", look)  # noqa: B010 - mypy


def make_with_a_death_behind(rank: int, num_ranks: int, folder: str, kind: str) -> list[Outcome]:
    is_group = kind == "group"
    if not is_group:
        _init(rank, num_ranks, folder, "epee", LONG_S)
        dist.barrier()
        stages.meet(folder, "made", rank, range(num_ranks))
    if rank == VICTIM:
        _die_ready()
    if is_group:
        found = [_outcome(lambda: _init(rank, num_ranks, folder, "epee", LONG_S))]
        if not found[0][0]:
            found.append(_outcome(lambda: dist.all_reduce(torch.ones(2))))
        return _ended(rank, num_ranks, folder, found)
    made: list[Any] = []
    arguments: dict[str, Any] = {"num_experts": num_ranks, "hidden": 8, "num_topk": 1, "max_tokens_per_rank": 4}
    found = [_outcome(lambda: made.append(getattr(epee, kind)(timeout=LONG_S, **arguments)))]
    if made:
        x, idx = torch.ones(2, 8, dtype=torch.bfloat16), torch.zeros(2, 1, dtype=torch.int64)
        found.append(_outcome(lambda: made[0].dispatch(x, idx, torch.ones(2, 1))))
    return _ended(rank, num_ranks, folder, found)


@pytest.mark.parametrize("kind", ["group", "Buffer", "LatencyBuffer"])
@pytest.mark.parametrize("placement", [(0, 0, 1), (0, 1, 1)])
def test_a_rank_that_dies_ready_is_told_alike_on_all_hosts(
    tmp_path: Path, placement: tuple[int, ...], kind: str
) -> None:
    found = run_on_loopbacks(make_with_a_death_behind, placement, str(tmp_path), kind, backend=None, dead={VICTIM})
    _check(found, FAILED)


@pytest.mark.parametrize("nth", [3, 250, *SLOW])
@pytest.mark.parametrize("backend", ["gloo", "epee"])
def test_a_death_while_a_buffer_is_made(tmp_path: Path, backend: str, nth: int) -> None:
    found = run_ranks(make_buffer, 3, str(tmp_path), nth, backend, backend=None, dead={VICTIM})
    _check(found, FAILED, *([GROUP_FAILED] if backend == "gloo" else []))


@pytest.mark.parametrize("nth", [3, 250, *SLOW[1::4]])
@pytest.mark.parametrize("backend", ["gloo", "epee"])
def test_a_death_while_a_latency_buffer_is_made(tmp_path: Path, backend: str, nth: int) -> None:
    found = run_ranks(make_buffer, 3, str(tmp_path), nth, backend, epee.LatencyBuffer, backend=None, dead={VICTIM})
    _check(found, FAILED, *([GROUP_FAILED] if backend == "gloo" else []))


@pytest.mark.parametrize("nth", [250, *(pytest.param(n, marks=pytest.mark.slow) for n in range(3, 1400, 233))])
@pytest.mark.parametrize("placement", [(0, 0, 1), (0, 1, 1)])
def test_a_death_while_a_buffer_over_hosts_is_made(tmp_path: Path, placement: tuple[int, ...], nth: int) -> None:
    found = run_on_loopbacks(make_buffer, placement, str(tmp_path), nth, "epee", backend=None, dead={VICTIM})
    _check(found, FAILED, LATE)


@pytest.mark.parametrize("nth", [2200, *(pytest.param(nth, marks=pytest.mark.slow) for nth in range(34, 3000, 249))])
@pytest.mark.parametrize("placement", [(0, 0, 1), (0, 1, 1)])
def test_a_death_while_a_latency_buffer_over_hosts_is_made(
    tmp_path: Path, placement: tuple[int, ...], nth: int
) -> None:
    args = str(tmp_path), nth, "epee", epee.LatencyBuffer
    found = run_on_loopbacks(make_buffer, placement, *args, backend=None, dead={VICTIM})
    survivors = [result for result in found if result != DEAD]
    assert survivors[0] == survivors[1], survivors
    errors = [outcome for outcome in survivors[0] if outcome[0]]
    assert errors in ([FAILED], [LATE], [FAILED, FAILED])  # of its making, or of each call without a mask
