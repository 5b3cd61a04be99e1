"""Background threads in a process that is given none: the error comes in time, and nothing stays behind."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from epee import threads
from epee.errors import PeerError, ResourceError
from tests.harness import run_ranks


def test_a_thread_that_makes_no_first_step_is_an_error_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "START_S", 0.2)
    ran, goes_on = threading.Event(), threading.Event()
    thread = threads.BackgroundThread(ran.set, "late")
    real = thread.start

    def hang() -> None:
        goes_on.wait(30)  # as `Thread.start` does where the new thread finds no memory
        real()

    monkeypatch.setattr(thread, "start", hang)
    with pytest.raises(ResourceError, match=r"no thread can be started for this test: .* free memory"):
        thread.begin("this test")
    goes_on.set()
    while thread.ident is None:  # it comes late
        pass
    thread.join(30)
    assert not ran.is_set(), "nobody waits for its work any more"


@pytest.mark.parametrize("kind", [RuntimeError, MemoryError])
def test_a_thread_that_the_system_refuses_is_a_shortage(monkeypatch: pytest.MonkeyPatch, kind: type[Exception]) -> None:
    thread = threads.BackgroundThread(print, "refused")

    def refuse() -> None:
        raise kind

    monkeypatch.setattr(thread, "start", refuse)
    with pytest.raises(ResourceError, match="raise the limits on threads"):
        thread.begin("this test")


# ---- groups

NUM_ATTEMPTS = 8


@contextmanager
def without_thread(number: int) -> Iterator[None]:
    """Refuse every thread of epee from the given one on."""
    real, started = threading.Thread.start, [0]

    def start(thread: threading.Thread) -> None:
        if thread.name.startswith("epee"):
            started[0] += 1
            if started[0] > number:
                raise RuntimeError("can't start new thread")
        real(thread)

    threading.Thread.start = start  # type: ignore[method-assign]
    try:
        yield
    finally:
        threading.Thread.start = real  # type: ignore[method-assign]


def make(rank: int, store: dist.Store, number: int) -> str:
    """Make a group, in which rank 0 may start some threads only; return "" when it works, else the error."""
    group = {"store": store, "rank": rank, "world_size": 2, "timeout": timedelta(seconds=30)}
    try:
        with without_thread(number if rank == 0 else 100):
            dist.init_process_group("epee", **group)
    except (ResourceError, PeerError) as exc:
        return f"{type(exc).__name__}: {exc}"
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == 2.0
    dist.destroy_process_group()
    return ""


def attempts(rank: int, num_ranks: int, folder: str, spans: bool) -> tuple[list[str], list[int]]:
    os.environ["EPEE_RUNTIME_DIR"] = f"{folder}/run"
    os.environ["EPEE_OVER_HOSTS"] = str(int(spans))
    store = dist.FileStore(f"{folder}/store", num_ranks)
    told, opened = [], []
    for turn in range(2 + NUM_ATTEMPTS):  # the first and the last one have all threads
        number = 100 if turn in (0, 1 + NUM_ATTEMPTS) else turn % 2
        told.append(make(rank, dist.PrefixStore(f"attempt{turn}", store), number))
        store.set(f"done{turn}/{rank}", "1")
        store.wait([f"done{turn}/{other}" for other in range(num_ranks)])
        opened.append(num_open(opened[0] if opened else 0))
    return told, opened


def num_open(wanted: int) -> int:
    """Return the number of open descriptors, when links of a group that has ended have said goodbye."""
    deadline = time.monotonic() + 10
    while True:
        gc.collect()
        found = len(os.listdir("/proc/self/fd"))
        if not wanted or found <= wanted or time.monotonic() > deadline:
            return found
        time.sleep(0.01)


@pytest.mark.parametrize("spans", [False, True])
def test_attempts_without_threads_leave_nothing_open(tmp_path: Path, spans: bool) -> None:
    results = run_ranks(attempts, 2, str(tmp_path), spans, backend=None, timeout_s=55)
    for rank, (told, opened) in enumerate(results):
        assert told[0] == told[-1] == ""
        assert "" not in told[2:-1:2], "without any thread there is no group"
        for text in filter(None, told):
            assert text.startswith("PeerError" if rank else "ResourceError: no thread can be started"), text
        assert max(opened[1:]) <= opened[0], opened
    assert os.listdir(tmp_path / "run") == []
