"""`memory.signals`: tags are equal or not, waits end."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epee.memory.shared import SharedRegion
from epee.memory.signals import futex_wake, tag, untag, wait_equal


def nothing() -> None:
    """No peer to look after."""


@pytest.fixture
def region() -> SharedRegion:
    made = SharedRegion.create(4096, "signals")
    yield made
    made.close()


@given(st.integers(0, 2**24 - 1), st.integers(0, 2**40 - 1))
def test_a_tag_names_one_call(epoch: int, seq: int) -> None:
    assert untag(tag(epoch, seq)) == (epoch, seq)
    assert tag(epoch, seq) < 2**64


def test_no_tag_is_what_fresh_memory_holds() -> None:
    assert tag(0, 1) != 0


def test_a_word_that_is_there_is_seen_at_once(region: SharedRegion) -> None:
    words = region.words(0, 4)
    words[2] = 99
    assert wait_equal(words, 2, 99, region.address, time.monotonic() - 1, nothing)


def test_a_wait_ends_at_its_deadline(region: SharedRegion) -> None:
    words = region.words(0, 4)
    words[0] = 5  # a wrong tag is no tag
    assert not wait_equal(words, 0, 6, region.address, time.monotonic() + 0.05, nothing)


@pytest.mark.parametrize("delay_s", [0.0, 0.0005, 0.02])
def test_a_waiter_wakes_in_each_phase(region: SharedRegion, delay_s: float) -> None:
    words = region.words(0, 4)

    def write() -> None:
        time.sleep(delay_s)
        words[3] = 7
        futex_wake(region.address + 24)

    writer = threading.Thread(target=write)
    writer.start()
    assert wait_equal(words, 3, 7, region.address, time.monotonic() + 20, nothing)
    writer.join()


def test_a_lost_wake_only_delays(region: SharedRegion) -> None:
    words = region.words(0, 4)
    writer = threading.Timer(0.02, words.__setitem__, (1, 8))  # no futex_wake
    writer.start()
    assert wait_equal(words, 1, 8, region.address, time.monotonic() + 20, nothing)
    writer.join()


def test_the_check_ends_a_wait(region: SharedRegion) -> None:
    def check() -> None:
        raise ConnectionAbortedError("peer is dead")

    with pytest.raises(ConnectionAbortedError):
        wait_equal(region.words(0, 4), 0, 1, region.address, time.monotonic() + 20, check)


def test_the_check_is_called_again_and_again(region: SharedRegion) -> None:
    calls: list[float] = []

    def check() -> None:
        calls.append(time.monotonic())
        if len(calls) == 20:
            raise ConnectionAbortedError("enough")

    with pytest.raises(ConnectionAbortedError):
        wait_equal(region.words(0, 4), 0, 1, region.address, time.monotonic() + 20, check)
