"""What a buffer has of a GPU: the order of its calls on streams, and the words that kernels read and write."""

from __future__ import annotations

import time
from typing import Any

import pytest

from epee.errors import InvalidState
from epee.gpu.device import GpuDevice
from epee.gpu.params import REPORT_WORDS
from tests.csrc.emulated import EmulatedPlatform


class _Platform(EmulatedPlatform):
    """Streams are numbers, and notes say what was asked of them."""

    def __init__(self) -> None:
        super().__init__()
        self.current, self.is_recording, self.is_busy = 7, False, False
        self.notes: list[tuple[Any, ...]] = []

    def stream(self) -> int:
        return self.current

    def is_capturing(self) -> bool:
        return self.is_recording

    def mark(self, stream: int) -> Any:
        self.notes.append(("mark", stream))
        return stream

    def wait(self, mark: Any, stream: int | None = None) -> None:
        self.notes.append(("wait", mark))

    def is_done(self, mark: Any) -> bool:
        return not self.is_busy

    def synchronize(self) -> None:
        self.notes.append(("synchronize",))


@pytest.fixture
def platform() -> _Platform:
    return _Platform()


@pytest.fixture
def device(platform: _Platform) -> GpuDevice:
    return GpuDevice(platform, "", {})


def test_another_stream_waits_for_the_last_one(platform: _Platform, device: GpuDevice) -> None:
    for stream in (7, 7, 8, 8, 7):
        device.follow(stream)
    assert platform.notes == [("mark", 7), ("wait", 7), ("mark", 8), ("wait", 8)]


def test_a_stream_is_quiet_when_nothing_has_happened_on_it(platform: _Platform, device: GpuDevice) -> None:
    assert device.quiet_stream() is None, "before the first call"
    device.follow(7)
    assert device.quiet_stream() == 7
    platform.current = 8
    assert device.quiet_stream() is None
    platform.current, platform.is_recording = 7, True
    assert device.quiet_stream() is None
    platform.is_recording = False
    device.report.words[3 * REPORT_WORDS] = 5
    assert device.has_reports
    assert device.quiet_stream() is None
    device.report.words[3 * REPORT_WORDS] = 0
    device.report.words[3 * REPORT_WORDS + 1] = 5  # what is no code is no report
    assert not device.has_reports
    assert device.quiet_stream() == 7
    device.require_open()
    device.close()
    device.close()
    assert device.quiet_stream() is None
    with pytest.raises(InvalidState, match="closed"):
        device.require_open()


def test_kernels_are_waited_for_and_aborted_when_they_take_too_long(platform: _Platform, device: GpuDevice) -> None:
    device.drain(0.0)
    assert platform.notes == [], "nothing was launched"
    device.follow(7)
    device.drain(0.0)
    assert platform.notes == [("mark", 7), ("synchronize",)]
    assert device.news.words[0] == 0
    platform.is_busy, started = True, time.monotonic()
    device.drain(0.01)
    assert time.monotonic() - started >= 0.01
    assert device.news.words[0] == 1
    platform.notes.clear()
    platform.is_recording = True
    device.drain(0.0)
    assert platform.notes == []


def test_the_dead_are_told_by_their_bits(device: GpuDevice) -> None:
    device.mark_dead([0, 3])
    assert [rank for rank in range(5) if device.is_marked(rank)] == [0, 3]
    device.news.words[2] = 9
    assert device.waiting() == 9
