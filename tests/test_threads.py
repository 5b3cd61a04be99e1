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
from epee.errors import InvalidArgument, MismatchError, PeerError, ResourceError
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


# ---- one thread for calls that nobody waits for


def helpers() -> int:
    """Return how many threads drive calls that nobody waits for."""
    return [thread.name for thread in threading.enumerate()].count("epee-backend")


def several_groups(rank: int, num_ranks: int, folder: str) -> list[int]:
    store = dist.FileStore(f"{folder}/store", num_ranks)
    dist.init_process_group("epee", store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=30))
    groups = [dist.group.WORLD, *(dist.new_group() for _ in range(3))]
    seen = [helpers()]
    dist.barrier()
    with without_thread(0):
        for group in groups:
            with pytest.raises(InvalidArgument if rank == 0 else MismatchError):  # refused by one rank
                dist.all_reduce(torch.ones(1).expand(4) if rank == 0 else torch.ones(4), group=group)
        works, tensors = [], [torch.full((300_000,), float(index)) for index in range(4)]
        for tensor, group in zip(tensors, groups, strict=True):
            works.append(dist.all_reduce(tensor, group=group, async_op=True))
            works.append(dist.isend(tensor, 1) if rank == 0 else dist.irecv(torch.zeros(300_000), 0))
        deadline = time.monotonic() + 30
        while not all(work.is_completed() for work in works):  # type: ignore[union-attr]  # nobody waits for them
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert [tensor[-1].item() for tensor in tensors] == [2.0 * index for index in range(4)]
    seen.append(helpers())
    for group in groups[1:]:
        dist.destroy_process_group(group)
    dist.all_reduce(tensors[0], async_op=True).wait()  # type: ignore[union-attr]
    seen.append(helpers())
    dist.barrier()
    dist.destroy_process_group()
    seen.append(helpers())
    return seen


def test_a_process_has_one_thread_for_all_its_groups_and_no_call_starts_one(tmp_path: Path) -> None:
    assert run_ranks(several_groups, 2, str(tmp_path), backend=None) == [[1, 1, 1, 0]] * 2


def forked(rank: int, num_ranks: int, folder: str) -> list[int]:
    """The parent has a group and its thread; both children make a group of their own."""
    dist.init_process_group("epee", store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(torch.ones(1), async_op=True).wait()  # type: ignore[union-attr]
    before = helpers()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 10 * helpers()
            dist.distributed_c10d._world = dist.distributed_c10d._World()
            store = dist.FileStore(f"{folder}/store", num_ranks)
            dist.init_process_group("epee", store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=30))
            x = torch.ones(300_000)
            work = dist.all_reduce(x, async_op=True)
            deadline = time.monotonic() + 30
            while not work.is_completed() and time.monotonic() < deadline:  # type: ignore[union-attr]
                time.sleep(0.01)
            status += helpers() + 100 * (x[0].item() != 2.0)
            dist.barrier()
            dist.destroy_process_group()
        finally:
            os._exit(int(status))
    _, ended = os.waitpid(child, 0)
    dist.destroy_process_group()
    return [before, os.waitstatus_to_exitcode(ended), helpers()]


def test_a_forked_child_has_a_thread_of_its_own_with_its_first_group(tmp_path: Path) -> None:
    assert run_ranks(forked, 2, str(tmp_path), backend=None) == [[1, 1, 0]] * 2
