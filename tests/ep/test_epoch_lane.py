"""Whom a wait of a `Buffer` on CPUs accuses when the view changes behind its deadline. The lane's parts are played."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from epee.ep.membership import epochs
from epee.ep.membership.epochs import HEAR_S, EpochLane
from epee.ep.membership.registry import READY

Accused = list[tuple[list[int], int]]


def made(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Accused]:
    """Return the lane of rank 0 in epoch 5, and what it accuses: (ranks, epoch). Rank 1 is behind."""
    accused: Accused = []

    def insist(ranks: list[int], what: str, seq: int, deadline: float, heard: int) -> bool:
        accused.append((ranks, heard))
        return True

    lane: Any = EpochLane.__new__(EpochLane)
    words = {READY: 0}
    lane._peers = {1: SimpleNamespace(line=SimpleNamespace(number=1, words=words, address=0), incarnation=1)}
    lane._line = SimpleNamespace(words={READY: 7})
    lane.roster = SimpleNamespace(
        heard=5, insist=insist, job_handle=SimpleNamespace(on_stall="evict"), view=SimpleNamespace(epoch=5),
        is_gone=lambda rank, incarnation: False,
    )  # fmt: skip
    lane._calls, lane._seen = SimpleNamespace(version=1, frozen=False), 1
    lane._exchange = SimpleNamespace(seq=3)
    lane._rank, lane._number, lane._op, lane._came_with, lane._timeout_s = 0, 1, "dispatch", 7, 60.0
    lane._is_coming_in, lane._patience = False, (0, -1, 0.0)
    lane._interrupt = lane._check = lambda: None
    lane.show = lambda *_: None
    monkeypatch.setattr(epochs, "at_fault", lambda rank, ranks, lines: ranks)
    return lane, accused


def news(lane: Any) -> None:
    """Let a decision come that changes the lane."""
    lane._calls.version, lane.roster.heard = lane._calls.version + 1, lane.roster.heard + 1


def test_who_enters_an_epoch_accuses_nobody_by_news_that_came_in_its_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    lane, accused = made(monkeypatch)
    monkeypatch.setattr(epochs, "futex_sleep", lambda *_: news(lane))
    assert not lane._await_ready(time.monotonic() - 1)
    assert accused == []


def test_who_waits_for_a_payload_gives_its_source_new_time_once_for_each_view(monkeypatch: pytest.MonkeyPatch) -> None:
    lane, accused = made(monkeypatch)
    late = time.monotonic() - 2 * HEAR_S
    assert lane.insist([1], "dispatch", 3, late)
    assert accused == [([1], 5)], "nothing has changed"
    news(lane)
    assert lane.insist([1], "dispatch", 3, late)
    assert len(accused) == 1, "its time has just begun"
    seq, version, until = lane._patience
    assert until > time.monotonic() + 50
    lane._patience = seq, version, late
    assert lane.insist([1], "dispatch", 3, late)
    assert accused[1:] == [([1], 6)], "its new time is over as well"
    news(lane)
    assert lane.insist([1], "dispatch", 3, late)
    assert len(accused) == 2, "a second change gives it time again"
