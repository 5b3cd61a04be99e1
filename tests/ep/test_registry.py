"""The search for another process's list of buffers, around that process's end and while it opens a buffer."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

from epee.ep.membership import group_view, registry
from epee.errors import EvictedError, NoQuorumError, ResourceError
from epee.memory.shared import process_start_time
from epee.view.process.detector import is_leaving, is_torn_down


def _forbidden(path: str) -> list[str]:
    raise PermissionError(13, "Permission denied", path)


def test_a_dying_process_has_no_list_but_a_living_one_that_is_closed_to_us_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`/proc/PID/fd` of a process without memory is root's: others may not look, and need not."""
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    start = process_start_time(sleeper.pid)
    try:
        assert registry.find(1, sleeper.pid, start) is None
        assert not is_leaving(sleeper.pid, start)
        assert is_leaving(sleeper.pid, start + 1), "another process of that number"
        with monkeypatch.context() as patch:
            patch.setattr(os, "listdir", _forbidden)
            with pytest.raises(ResourceError, match="must run as one user"):
                registry.find(1, sleeper.pid, start)
        sleeper.kill()
        deadline = time.monotonic() + 30
        while not is_torn_down(sleeper.pid, start):  # a zombie: nobody has waited for it
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert is_leaving(sleeper.pid, start)
        with monkeypatch.context() as patch:
            patch.setattr(os, "listdir", _forbidden)
            assert registry.find(1, sleeper.pid, start) is None
    finally:
        sleeper.kill()
        sleeper.wait()
    assert is_leaving(sleeper.pid, start)
    assert registry.find(1, sleeper.pid, start) is None


class Errors:
    """A control plane whose error is `error` for so many looks."""

    def __init__(self, error: Exception, looks: int) -> None:
        self.left, self.told = looks, error

    @property
    def error(self) -> Exception | None:
        self.left -= 1
        return self.told if self.left >= 0 else None


def test_a_call_without_a_quorum_waits_a_moment_for_news() -> None:
    """Repeated calls would spin otherwise, and end before the next decision."""
    roster = group_view.Roster.__new__(group_view.Roster)
    roster._trouble = None
    for error, looks, is_raised in (
        (NoQuorumError("too few"), 5, False),
        (NoQuorumError("too few"), 1 << 30, True),
        (EvictedError("out"), 1, True),
    ):
        roster.job_handle = SimpleNamespace(runtime=Errors(error, looks))  # type: ignore[assignment]
        with pytest.raises(type(error)) if is_raised else contextlib.nullcontext():
            roster.check()


def test_a_process_that_is_dying_is_not_taken_for_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its descriptors are closed before it has ended, so its memory cannot be mapped: that is waited out, no error."""
    asked: list[tuple[int, int]] = []
    roster = group_view.Roster.__new__(group_view.Roster)
    member = group_view.Member(1, 1, bytes(16), b"")
    roster.state = 1, group_view.View(1, {1: member}, {}, group_view.Agreed(0, ()))
    monkeypatch.setattr(group_view, "process_of", lambda member: (7, 8))
    for dying in (False, True):
        monkeypatch.setattr(group_view, "is_leaving", lambda *process, dying=dying: asked.append(process) or dying)
        assert roster.is_alive(1) is not dying
    assert asked == [(7, 8)] * 2
    assert not roster.is_alive(2), "it is no member"


class Stores:
    """The header's words; looks at the list of buffers before and after each store."""

    def __init__(self, words: Any, look: Any) -> None:
        self.words, self.look = words, look

    def __getitem__(self, index: int) -> int:
        return int(self.words[index])

    def __setitem__(self, index: int, value: int) -> None:
        self.look()
        self.words[index] = value
        self.look()


def test_a_buffer_that_is_just_being_opened_does_not_look_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a replacement makes a new buffer, alone, while the others take part in the one that runs."""
    own = registry.Registry.make(77)
    seen = registry.find(77, os.getpid(), process_start_time(os.getpid()))
    assert seen is not None
    looks = []
    monkeypatch.setattr(own, "_words", Stores(own._words, lambda: looks.append(seen.has_closed(1))))
    first = own.open(1, [3])
    assert looks == [False, False]

    def opens_after_the_look() -> dict[int, registry.Line]:
        found = registry.Registry.numbers(seen)
        own.open(2, 1, [3])
        return found

    monkeypatch.setattr(seen, "numbers", opens_after_the_look)
    assert not seen.has_closed(2)
    monkeypatch.undo()
    assert not seen.has_closed(2)
    assert not seen.has_closed(1)
    first.mark_closed()
    assert seen.has_closed(1)
    assert not seen.has_closed(3)


def test_nobody_sees_that_a_rank_has_come_to_sync_beside_ranks_of_another_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is stopped between two stores must not look as if it had come and counted on nobody."""
    own = registry.Registry.make(79)
    line = own.open(1, [3])
    words = line.words
    seen = []

    def look() -> None:
        seen.append((words[registry.SYNC], words[registry.COUNTED]))

    monkeypatch.setattr(line, "words", Stores(words, look))
    for shown in ((6, 7), (8, 3), (0, 0)):
        line.come_to_sync(*shown)
    assert {counted for mark, counted in seen if mark == 6} == {7}
    assert {counted for mark, counted in seen if mark == 8} == {3}


def test_whose_buffer_could_not_be_opened_has_neither_had_nor_closed_it() -> None:
    own = registry.Registry.make(80)
    line = own.open(1, [3])
    line.words[registry.NUMBER] = 0
    own.forget(1)
    assert own.had == set()
    assert not own.has_closed(1)
    own.open(1, [3]).mark_closed()
    assert own.has_closed(1)
