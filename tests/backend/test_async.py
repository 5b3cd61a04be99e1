"""Asynchronous calls: outstanding ones, futures, time-outs, progress without waiting, threads."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from epee.errors import CommTimeoutError
from tests.harness import run_ranks
from tests.survive import stages

from .cases import reduced, same, values


def outstanding(rank: int, num_ranks: int, length: int, count: int) -> None:
    tensors = [values(rank, (length,), torch.float32, i) for i in range(count)]
    works = [dist.all_reduce(t, async_op=True) for t in tensors]
    for work in reversed(works):  # any order of waiting
        work.wait()
    for i, t in enumerate(tensors):
        expected = reduced([values(r, (length,), torch.float32, i) for r in range(num_ranks)], dist.ReduceOp.SUM)
        same(t, expected, f"call {i}")


@pytest.mark.parametrize(("length", "count"), [(3, 300), (2_000, 100), (100_000, 70), (300_000, 66)])
def test_many_calls_may_be_outstanding(length: int, count: int) -> None:
    run_ranks(outstanding, 2, length, count, backend="epee")


def options_changed_behind_calls(rank: int, num_ranks: int) -> list[float]:
    """Two more reductions wait for the tensor of the first, and are planned again when their turn comes."""
    options: Any = dist.ReduceOptions()
    options.asyncOp = True
    x = torch.full((300_000,), float(rank + 1))
    works = []
    for root in (0, 1, 0):
        options.rootRank = root
        works.append(dist.group.WORLD.reduce([x], options))  # type: ignore[union-attr]
    for work in works:
        work.wait()
    return x.unique().tolist()


def test_a_call_keeps_its_root_when_its_options_serve_the_next_one() -> None:
    assert run_ranks(options_changed_behind_calls, 2, backend="epee") == [[8.0], [5.0]]


def publishes_at_issue(rank: int, num_ranks: int, folder: str) -> None:
    x = torch.full((4,), float(rank + 1))
    if rank == 0:
        work = dist.all_reduce(x, async_op=True)
        for other in range(1, num_ranks):  # no call of the backend on this rank until the others have finished
            stages.wait_for(folder, f"through-{other}")
        work.wait()
    else:
        dist.all_reduce(x)
        stages.reach(folder, f"through-{rank}")
    assert x[0].item() == sum(range(1, num_ranks + 1))


def test_peers_do_not_need_our_next_call(tmp_path: Path) -> None:
    run_ranks(publishes_at_issue, 3, str(tmp_path), backend="epee")


def unwaited(rank: int, num_ranks: int) -> None:
    for length in (10, 200_000, 12_000_000):
        x = torch.full((length,), float(rank + 1))
        work = dist.all_reduce(x, async_op=True)
        deadline = time.monotonic() + 15
        while not work.is_completed() and time.monotonic() < deadline:
            time.sleep(0.002)
        assert work.is_completed()
        assert work.is_success()
        assert x[-1].item() == sum(range(1, num_ranks + 1))


def test_a_call_nobody_waits_for_completes_by_itself() -> None:
    run_ranks(unwaited, 2, backend="epee")


def futures(rank: int, num_ranks: int) -> None:
    x = torch.full((5,), float(rank + 1))
    future = dist.all_reduce(x, async_op=True).get_future()
    value = future.wait()
    assert value[0] is x or torch.equal(value[0], x)
    assert x[0].item() == 3
    chained = dist.all_reduce(x, async_op=True).get_future().then(lambda f: f.value()[0].sum().item())
    assert chained.wait() == 30.0
    bad = dist.all_reduce(torch.ones(3 + rank), async_op=True)
    with pytest.raises(RuntimeError, match="disagree"):
        bad.get_future().wait()
    done = dist.all_reduce(torch.ones(1), async_op=True)
    done.wait()
    assert done.get_future().wait()[0].item() == 2.0
    other = torch.zeros(2)
    seen: list[float] = []

    def reduce_again(_: Any) -> None:  # a callback may start a call
        dist.all_reduce(other.fill_(1.0))
        seen.append(other[0].item())

    dist.all_reduce(x, async_op=True).get_future().then(reduce_again).wait()
    assert seen == [2.0]


def test_futures_complete_with_the_tensors_or_raise() -> None:
    run_ranks(futures, 2, backend="epee")


def wait_timeout(rank: int, num_ranks: int, folder: str) -> None:
    x = torch.ones(3)
    if rank == 0:
        work = dist.all_reduce(x, async_op=True)
        begin = time.monotonic()
        with pytest.raises(CommTimeoutError, match="seq=1"):
            work.wait(timedelta(milliseconds=100))
        assert 0.09 < time.monotonic() - begin < 15.0
        assert x.tolist() == [1.0] * 3
        stages.reach(folder, "told")
        work.wait()
        work.wait(timedelta(milliseconds=1))
    else:
        stages.wait_for(folder, "told")
        dist.all_reduce(x)
    assert x.tolist() == [2.0] * 3


def test_wait_honours_its_timeout_and_may_be_called_again(tmp_path: Path) -> None:
    run_ranks(wait_timeout, 2, str(tmp_path), backend="epee")


def two_groups(rank: int, num_ranks: int) -> None:
    other = dist.new_group(list(range(num_ranks)), backend="epee")
    left = dist.new_group([0, 1], backend="epee")
    right = dist.new_group([1, 2], backend="epee")
    works = []
    tensors = []
    for i in range(30):
        for group, members in ((dist.group.WORLD, (0, 1, 2)), (other, (0, 1, 2)), (left, (0, 1)), (right, (1, 2))):
            if rank in members:
                t = torch.full((100 + i,), float(rank + i))
                works.append(dist.all_reduce(t, group=group, async_op=True))
                tensors.append((t, sum(r + i for r in members)))
    for work in works:
        work.wait()
    for t, expected in tensors:
        assert t.unique().tolist() == [float(expected)]


def test_overlapping_groups_run_side_by_side() -> None:
    run_ranks(two_groups, 3, backend="epee")


def two_threads(rank: int, num_ranks: int) -> None:
    groups = [dist.group.WORLD, dist.new_group(list(range(num_ranks)), backend="epee")]
    errors: list[BaseException] = []

    def work(group: Any, base: int) -> None:
        try:
            for i in range(150):
                t = torch.full((1 + 700 * (i % 5),), float(base + i + rank))
                dist.all_reduce(t, group=group)
                assert t[-1].item() == sum(base + i + r for r in range(num_ranks))
        except BaseException as exc:  # noqa: BLE001 - shown by the main thread
            errors.append(exc)

    threads = [threading.Thread(target=work, args=(group, 1000 * k)) for k, group in enumerate(groups)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not errors, errors


def test_two_threads_with_a_group_each() -> None:
    run_ranks(two_threads, 2, backend="epee")


def threads_on_one_group(rank: int, num_ranks: int) -> None:
    """The ranks cannot agree on an order of their threads, so equal calls are issued by each."""
    errors: list[BaseException] = []
    total = torch.zeros(1)
    lock = threading.Lock()

    def work() -> None:
        try:
            for _ in range(100):
                t = torch.ones(8)
                dist.all_reduce(t)
                assert t.tolist() == [num_ranks] * 8
                with lock:
                    total.add_(1)
        except BaseException as exc:  # noqa: BLE001 - shown by the main thread
            errors.append(exc)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not errors, errors
    assert total.item() == 300
    if rank == 0:
        messages = [dist.isend(torch.full((3,), float(i)), 1, tag=i) for i in range(4)]
        for message in messages:
            message.wait()
    elif rank == 1:
        outs = [torch.zeros(3) for _ in range(4)]
        threads = [threading.Thread(target=dist.recv, args=(out, 0), kwargs={"tag": i}) for i, out in enumerate(outs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert [out[0].item() for out in outs] == [0.0, 1.0, 2.0, 3.0]


def test_several_threads_on_one_group() -> None:
    run_ranks(threads_on_one_group, 2, backend="epee")


def receive_beside_collectives(rank: int, num_ranks: int) -> None:
    """A thread that waits for a message does not hold up collectives of another thread."""
    out = torch.zeros(2)
    if rank == 1:
        thread = threading.Thread(target=dist.recv, args=(out, 0))
        thread.start()
    for _ in range(20):
        dist.all_reduce(torch.ones(2))
    if rank == 0:
        dist.send(torch.ones(2), 1)
    elif rank == 1:
        thread.join(20)
        assert out.tolist() == [1.0, 1.0]


def test_a_waiting_receive_does_not_block_collectives() -> None:
    run_ranks(receive_beside_collectives, 2, backend="epee")
