"""The one loop and the one look of all waits in kernels, on the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest

from tests.csrc.emulated import has_compiler
from tests.csrc.waits import ABORT, DEAD, WAITING, Gpu, Wait, collective, latency, library, throughput
from tests.harness import run_ranks

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.timeout(240),  # the first one builds the kernels
    pytest.mark.skipif(not has_compiler(), reason="no g++ here to build the kernels with"),
]

MS = 1_000_000
START = 1000 * MS  # any time but 0, which is when nobody has looked yet


# --- the loop ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wait", "polls", "looks", "has_come"),
    [
        (Wait(come_at=1), 1, 0, True),
        (Wait(come_at=64), 64, 0, True),  # a wait that ends with the 64th poll need not look
        (Wait(come_at=65), 65, 1, True),
        (Wait(come_at=1000), 1000, 15, True),
        (Wait(end_at=3), 192, 3, False),
        (Wait(end_at=3, polls_again=1), 193, 3, False),
        (Wait(end_at=3, come_at=193), 192, 3, False),
        (Wait(end_at=3, come_at=193, polls_again=1), 193, 3, True),
        (Wait(idle_at=7), 7, 0, False),
        (Wait(idle_at=7, polls_again=1), 8, 0, False),
        (Wait(idle_at=7, come_at=8, polls_again=1), 8, 0, True),
    ],
)
def test_a_wait_polls_and_looks_so_often(wait: Wait, polls: int, looks: int, has_come: bool) -> None:
    library().run(ctypes.byref(wait))
    assert (wait.polls, wait.looks, bool(wait.has_come)) == (polls, looks, has_come)


# --- the look ---------------------------------------------------------------------------------------------------------


def test_news_are_seen_and_looked_for_again_when_they_are_old() -> None:
    gpu = Gpu(START)
    assert gpu.look(START) == 0
    gpu.host[DEAD], gpu.host[ABORT] = 0b101, 7
    assert gpu.look(START + 19_999) == 0
    assert gpu.look(START + 20_000) == 0b101 << 8 | 1
    gpu.host[DEAD], gpu.host[ABORT] = 0b100, 0
    assert gpu.look(START + 39_999) == 0b101 << 8 | 1
    assert gpu.look(START + 40_000) == 0b100 << 8


def test_the_copy_of_the_dead_has_64_ranks() -> None:
    gpu = Gpu(START)
    gpu.host[DEAD], gpu.host[ABORT] = 1 << 63 | 1, 1
    gpu.look(START + 20_000)
    assert 1 << 63 | 1 in [*gpu._news]


def test_a_look_at_a_clock_that_is_behind_changes_nothing() -> None:
    gpu = Gpu(START)
    gpu.look(START)
    gpu.host[DEAD] = 1
    assert gpu.look(START - 5_000) == 0
    assert gpu.host[WAITING] == 0


def test_the_host_does_not_hear_of_a_short_wait() -> None:
    gpu = Gpu(START)
    for now in range(START, START + MS, 10_000):
        gpu.look(now)
    gpu.look(START + MS - 1)
    assert gpu.host[WAITING] == 0


def test_the_host_hears_of_a_long_wait_once_per_millisecond() -> None:
    gpu = Gpu(START)
    heard = []
    for now in range(START, START + 5 * MS, 50_000):
        gpu.look(now)
        if gpu.host[WAITING] not in (0, *heard):
            heard.append(gpu.host[WAITING])
            assert heard[-1] == now
    assert heard == [START + ms * MS for ms in (1, 2, 3, 4)]


def test_one_word_serves_all_that_wait_on_a_gpu() -> None:
    gpu = Gpu(START)
    gpu.look(START + MS)
    gpu.start_ns = START + MS // 2  # another thread
    gpu.look(START + 2 * MS - 1)
    assert gpu.host[WAITING] == START + MS
    gpu.start_ns = START + 2 * MS  # one that has just begun says nothing
    gpu.look(START + 3 * MS - 1)
    assert gpu.host[WAITING] == START + MS


# --- the kernels ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rank_fn", "args"),
    [(throughput, ("barrier",)), (latency, ()), (collective, ())],
    ids=["throughput", "latency", "collective"],
)
def test_only_who_waits_tells_its_host(rank_fn: Callable[..., Any], args: tuple[str, ...]) -> None:
    found_all_there, waited = run_ranks(rank_fn, 2, *args, timeout_s=200)
    assert waited == (True, False)
    assert found_all_there == (True, True)


def test_a_wait_for_counts_is_told() -> None:
    assert run_ranks(throughput, 2, "dispatch", timeout_s=200)[1] == (True, False)
