"""Callbacks of futures that block: they hold up neither the calls of other groups nor those of their own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.harness import run_ranks
from tests.test_threads import without_thread

LENGTH = 300_000  # such a call needs its ranks' threads several times
BLOCKED = 4


def _until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def _begin(group: Any = None) -> tuple[torch.Tensor, Any]:
    tensor = torch.ones(LENGTH)
    return tensor, dist.all_reduce(tensor, group=group, async_op=True)


def _listened(rank: int, callback: Callable[[Any], Any], group: Any) -> Any:
    """Begin a call; on rank 0 `callback` follows it, which torch runs at once where the call has ended already."""
    result = None
    if rank == 0:
        _, work = _begin(group)
        result = work.get_future().then(callback)
    dist.barrier()
    if rank != 0:
        _, work = _begin(group)
    return result


def _names() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name in ("epee-backend", "epee-standby"))


def blocked(rank: int, num_ranks: int) -> list[str]:
    """On rank 0 callbacks of several groups block, one after the other; nobody waits for any call."""
    groups = [dist.new_group() for _ in range(BLOCKED + 1)]
    go, inside, results = threading.Event(), [threading.Event() for _ in range(BLOCKED)], []

    def block(number: int) -> Callable[[Any], Any]:
        def callback(future: Any) -> int:
            inside[number].set()
            assert go.wait(30)
            return number

        return callback

    for number, group in enumerate(groups[:BLOCKED]):
        results.append(_listened(rank, block(number), group))
        if rank == 0:
            assert inside[number].wait(20), f"callback {number} does not run while {number} block"
        for other in (None, group, groups[-1]):  # nor are other calls of its group held up
            tensor, work = _begin(other)
            _until(work.is_completed)
            assert tensor[-1].item() == num_ranks
        _, work = _begin(groups[-1])
        ended: list[int] = []
        work.get_future().add_done_callback(lambda _, ended=ended: ended.append(1))
        _until(lambda ended=ended: bool(ended))
    go.set()
    assert rank != 0 or [result.wait() for result in results] == list(range(BLOCKED))
    _until(lambda: len(_names()) <= 2)
    dist.barrier()
    return _names()


def test_callbacks_that_block_hold_up_no_call_and_no_other_callback() -> None:
    first, second = run_ranks(blocked, 2, backend="epee", timeout_s=60)
    assert len(first) == 2, "one leads, one stands by"
    assert second == ["epee-backend", "epee-standby"]


def waiting(rank: int, num_ranks: int) -> float:
    """A callback waits for a future of another group, which was asked for before, and for a call that it makes."""
    other = dist.new_group()
    last = dist.new_group()
    found: list[float] = []

    def callback(_: Any) -> None:
        theirs[1].get_future().wait()
        future.wait()
        found.append(theirs[0][-1].item() + tensor[-1].item())

    theirs: Any = _begin(other) if rank == 0 else None
    tensor, work = _begin(last) if rank == 0 else (torch.ones(1), None)
    future = work.get_future() if work is not None else None
    _listened(rank, callback, dist.new_group())
    if rank != 0:
        time.sleep(0.3)  # the callback waits meanwhile
        _begin(other), _begin(last)
    else:
        _until(lambda: bool(found))
    dist.barrier()
    return sum(found)


def test_a_callback_may_wait_for_calls_of_another_group() -> None:
    assert run_ranks(waiting, 2, backend="epee", timeout_s=60) == [4.0, 0]


def without(rank: int, num_ranks: int) -> None:
    """The system gives no thread for a stand-by: futures complete as before."""
    with without_thread(0):
        for _ in range(3):
            _, work = _begin()
            assert work.get_future().then(lambda future: future.value()[0][-1].item()).wait() == num_ranks
        assert "epee-standby" not in _names()
    _, work = _begin()
    work.get_future().wait()
    dist.barrier()


def test_futures_complete_where_no_further_thread_is_to_be_had() -> None:
    run_ranks(without, 2, backend="epee", timeout_s=60)


def ends(rank: int, num_ranks: int, folder: str) -> float:
    """The group ends while a callback blocks: nobody waits longer than for the thread."""
    store = dist.FileStore(f"{folder}/store", num_ranks)
    dist.init_process_group("epee", store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=30))
    go, inside = threading.Event(), threading.Event()
    _listened(rank, lambda _: (inside.set(), go.wait(2.0)), dist.new_group())
    assert rank != 0 or inside.wait(20)
    dist.barrier()
    before = time.monotonic()
    dist.destroy_process_group()
    took_s = time.monotonic() - before
    go.set()
    _until(lambda: not _names())
    return took_s


@pytest.mark.parametrize("turn", range(2))
def test_a_group_can_be_destroyed_while_a_callback_blocks(tmp_path: Path, turn: int) -> None:
    for took_s in run_ranks(ends, 2, str(tmp_path), backend=None, timeout_s=60):
        assert took_s < 20
