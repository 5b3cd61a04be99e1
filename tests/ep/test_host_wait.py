"""The host's wait for a kernel's answer: what it leaves to other threads, and how it ends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from epee.errors import CommTimeoutError
from epee.gpu import device

TICK_S = 1e-4  # that the clock below goes on with each look


class Clock:
    """Stands in for `time`: goes on with each look and sleep; after `limit` sleeps `then` happens."""

    def __init__(self, limit: int, then: Any) -> None:
        self.now, self.slept, self._limit, self._then = 5.0, [], limit, then

    def monotonic(self) -> float:
        self.now += TICK_S
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append((self.now, seconds))
        self.now += seconds
        if len(self.slept) == self._limit:
            self._then()


def mailboxes() -> tuple[device.Mailboxes, memoryview, list[int]]:
    """Mailboxes of two words, their words, and where interrupts are noted."""
    words = memoryview(bytearray(16 * device.NUM_MAILBOXES)).cast("Q")
    platform: Any = SimpleNamespace(mapped_words=lambda count: SimpleNamespace(words=words, address=0))
    return device.Mailboxes(platform, 2), words, []


def test_sleeps_again_and_again_once_a_wait_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    made, words, asked = mailboxes()

    def answer() -> None:
        words[1], words[0] = 7, 1

    clock = Clock(5, answer)
    monkeypatch.setattr(device, "time", clock)
    assert made.wait(0, 2, 60.0, lambda: asked.append(1)) == [1, 0, 7, 0]
    assert len(clock.slept) == 5
    assert clock.slept[0][0] - 5.0 > device.SPIN_S, "a short wait keeps the lock"
    assert all(seconds > 0 for _, seconds in clock.slept), "a sleep of nothing lets nobody in"
    assert len(asked) > 5


def test_an_answer_that_is_there_costs_neither_sleep_nor_look(monkeypatch: pytest.MonkeyPatch) -> None:
    made, words, asked = mailboxes()
    words[0] = 1
    clock = Clock(1, lambda: None)
    monkeypatch.setattr(device, "time", clock)
    assert made.wait(0, 2, 60.0, lambda: asked.append(1)) == [1, 0, 0, 0]
    assert clock.now == 5.0
    assert asked == []


def test_ends_when_the_gpu_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    made, _, asked = mailboxes()
    clock = Clock(0, lambda: None)
    monkeypatch.setattr(device, "time", clock)
    monkeypatch.setattr(device, "PAUSE_S", 1.0)
    with pytest.raises(CommTimeoutError, match="the GPU gave no answer"):
        made.wait(0, 2, 3.0, lambda: asked.append(1))
    assert clock.now - 5.0 > 3.0 + device.HOST_GRACE_S
