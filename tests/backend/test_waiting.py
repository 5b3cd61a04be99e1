"""What a wait does besides waiting: leaving a core that it shares with the peer."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any, cast

import pytest

from epee.backend import waiting
from epee.backend.outbox import CORE, STATE_WORDS
from epee.backend.waiting import MOVE_PAUSE_S, Waiting


def made(rank: int) -> tuple[Waiting, list[list[int]]]:
    words = [[0] * STATE_WORDS for _ in range(2)]
    return Waiting(cast(Any, SimpleNamespace(rank=rank, num_ranks=2, words=words, own=words[rank]))), words


def tries(rank: int, monkeypatch: pytest.MonkeyPatch, num_cores_apart: int) -> tuple[bool, Waiting]:
    monkeypatch.setattr(waiting, "_getcpu", lambda: min(os.sched_getaffinity(0)))
    wait, words = made(rank)
    words[1 - rank][CORE] = 1 + min(os.sched_getaffinity(0)) + num_cores_apart
    return wait._part(1 - rank, 100.0), wait


def test_the_higher_rank_leaves_a_shared_core_and_keeps_its_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = os.sched_getaffinity(0)
    if len(allowed) < 2:
        pytest.skip("needs two cores")
    moved, wait = tries(1, monkeypatch, 0)
    assert moved
    assert os.sched_getaffinity(0) == allowed
    assert not wait._part(0, 100.0 + MOVE_PAUSE_S / 2), "moved again at once"
    assert wait._part(0, 100.0 + 2 * MOVE_PAUSE_S)


def test_nobody_moves_without_need(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not tries(0, monkeypatch, 0)[0], "the lower rank stays"
    assert not tries(1, monkeypatch, 1)[0], "the peer is on another core"


def test_a_rank_with_one_core_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert not tries(1, monkeypatch, 0)[0]
        assert os.sched_getaffinity(0) == {min(allowed)}
    finally:
        os.sched_setaffinity(0, allowed)
