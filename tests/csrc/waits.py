"""What is asked of `csrc/common/wait.cuh`: a small library around it, and ranks that wait for each other in kernels."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from epee.backend.cuda import moves
from epee.gpu.params import COPIED_WORDS
from epee.jit.source import flatten
from tests.csrc import collective_cases, latency_cases, throughput_cases
from tests.csrc.emulated import _FLAGS, EmulatedPlatform, _gxx
from tests.csrc.latency_cases import Plan, Round
from tests.csrc.made import made
from tests.harness.meeting import meet

LONG_S = 60.0  # a test that waits so long fails by its own time-out
ABORT, DEAD, WAITING = range(3)  # words of the host
CASE = throughput_cases.Case((4, 4), hidden=64)
SPLIT = Round((3, 2), is_split=True)

_TEXT = r"""
extern "C" u64 look(u64* host, u64* news, u64 start, u64 now) {
  const HostState found = latest_news(host, news, start, now);
  return found.dead << 8 | (found.aborted != 0);
}

struct Wait {
  unsigned come_at, end_at, idle_at, polls_again, polls, looks, has_come;
};

template <AtEnd kAtEnd>
void wait(const void* params) {
  Wait& w = **static_cast<Wait* const*>(params);
  w.has_come = bounded_wait<64, kAtEnd>([&] { return ++w.polls == w.come_at; }, [&] { return ++w.looks == w.end_at; },
                                        [&] { return w.polls == w.idle_at; });
}

extern "C" void run(Wait* w) { emulation::launch(1, 1, 0, w->polls_again ? wait<kPollAgain> : wait<kLeave>, &w); }
"""


class Wait(ctypes.Structure):
    """A wait whose thing comes with poll `come_at`, which is told to end by look `end_at`, or is idle behind poll
    `idle_at` (0: never); and what became of it."""

    _fields_ = tuple(
        (name, ctypes.c_uint) for name in ("come_at", "end_at", "idle_at", "polls_again", "polls", "looks", "has_come")
    )


@functools.cache
def library() -> ctypes.CDLL:
    """Build `wait.cuh` with a way in."""
    text = flatten("common/wait.cuh", "") + _TEXT
    key = hashlib.sha256("\0".join([text, *_FLAGS]).encode()).hexdigest()[:32]
    found = ctypes.CDLL(str(made(f"{key}.so", lambda so: _gxx(text, so, "-shared", "-lpthread"))))
    found.look.restype = ctypes.c_uint64
    return found


class Gpu:
    """The words of a host and of one GPU; both have time 0 when it is made, and `start` is when the waits began."""

    def __init__(self, start_ns: int) -> None:
        self.start_ns = start_ns
        self.host, self._news = (ctypes.c_uint64 * 3)(), (ctypes.c_uint64 * COPIED_WORDS)()

    def look(self, now_ns: int) -> int:
        """Let a thread that waits look at the news."""
        times = ctypes.c_uint64(self.start_ns), ctypes.c_uint64(now_ns)
        return int(library().look(self.host, self._news, *times))


# --- ranks that wait for each other -----------------------------------------------------------------------------------


def first_comes_the_last(rank: int, words: memoryview, call: Callable[[], None]) -> tuple[bool, bool]:
    """Make a call in which rank 1 waits for rank 0, which comes when rank 1's host has heard that it waits.

    Returns:
        Whether the word stood at 0 before, and whether it does afterwards.
    """
    before = words[WAITING] == 0
    store = dist.distributed_c10d._get_default_store()

    def tell() -> None:
        deadline = time.monotonic() + LONG_S
        while words[WAITING] == 0 and time.monotonic() < deadline:
            time.sleep(1e-3)
        store.set("rank 1 waits", str(words[WAITING]))

    if rank == 1:
        teller = threading.Thread(target=tell)
        teller.start()
        call()
        teller.join()
    else:
        assert int(store.get("rank 1 waits")), "the host has heard of no wait"
        call()
    meet("both have ended", rank, 2)
    return before, words[WAITING] == 0


def throughput(rank: int, num_ranks: int, op: str) -> tuple[bool, bool]:
    """A barrier, or a dispatch whose counts rank 1 awaits."""
    core: Any = throughput_cases.make_buffer(CASE, rank, "emulated")

    def barrier() -> None:
        core.barrier(LONG_S)
        core.check()

    def dispatch() -> None:
        given = throughput_cases.inputs_of(CASE, rank)
        core.dispatch(given.x, None, given.topk_idx, given.topk_weights, None, throughput_cases.DispatchOptions())

    return first_comes_the_last(rank, core.machine.device.news.words, {"barrier": barrier, "dispatch": dispatch}[op])


def latency(rank: int, num_ranks: int) -> tuple[bool, bool]:
    """A dispatch in halves: when rank 0 comes, all of rank 1 lies there."""
    plan = Plan((SPLIT,))
    core = latency_cases.make_core(plan, rank, "emulated")

    def dispatch() -> None:
        options = latency_cases.options_of(SPLIT, LONG_S)
        d = latency_cases.send(core, SPLIT, latency_cases.inputs_of(plan, SPLIT, rank), options)
        assert d.hook is not None
        d.hook()
        core.check()

    return first_comes_the_last(rank, core.device.news.words, dispatch)


def collective(rank: int, num_ranks: int) -> tuple[bool, bool]:
    """A barrier of the collectives."""
    machine = collective_cases.make(EmulatedPlatform(), rank, num_ranks, [])

    def barrier() -> None:
        machine.run(moves.barrier(num_ranks))
        assert not machine.device.take_reports()

    return first_comes_the_last(rank, machine.device.news.words, barrier)
