"""CUDA tensors on a group, with a device whose streams run late: whoever reads too early sees poison."""

from __future__ import annotations

import contextlib
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

import epee
import epee.compat.mooncake.pg
from epee.arrays import array_of, copy_array
from epee.backend import staging
from epee.backend.staging import Twin
from tests.harness import run_ranks
from tests.survive import stages

LATE_LOOKS = 3  # how often a mark says "not yet"


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU. Its bytes are read and written by `LateDevice` only."""

    is_cpu = False  # type: ignore[assignment]
    is_cuda = True  # type: ignore[assignment]


def on_gpu(values: torch.Tensor) -> torch.Tensor:
    return values.clone().as_subclass(OnGpu)


class LateDevice:
    """One stream that is the caller's and one that is ours; both do nothing until somebody waits for a mark."""

    def __init__(self) -> None:
        self.streams: dict[str, deque[Callable[[], Any]]] = {"caller": deque(), "own": deque()}
        self.looks: Counter[Any] = Counter()
        self.reached: set[Any] = set()
        self.num_marks = 0

    def cpu_like(self, tensor: torch.Tensor) -> torch.Tensor:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        host.view(-1).view(torch.uint8).fill_(0xA5)
        return host

    def copy(self, destination: torch.Tensor, source: torch.Tensor, stream: str = "caller") -> None:
        # a GPU's copy is made by no thread: the modes of the one that runs this here have no say
        self.streams[stream].append(lambda: copy_array(array_of(_plain(destination)), array_of(_plain(source))))

    def marks(self, twins: Sequence[Twin]) -> list[Any]:
        return [self._mark("caller")] if twins else []

    def here(self) -> list[Any]:
        return [self._mark("caller")]

    def _mark(self, stream: str) -> tuple[str, int]:
        self.num_marks += 1
        mark = (stream, self.num_marks)
        self.streams[stream].append(lambda: self.reached.add(mark))
        return mark

    def _run_to(self, mark: tuple[str, int]) -> None:
        while mark not in self.reached:
            self.streams[mark[0]].popleft()()

    def is_done(self, mark: Any) -> bool:
        self.looks[mark] += 1
        if self.looks[mark] > LATE_LOOKS:
            self._run_to(mark)
        return mark in self.reached

    def copy_back(self, twins: Sequence[Twin], behind: Sequence[Any]) -> list[Any]:
        self.streams["own"].extend(partial(self._run_to, mark) for mark in behind)
        for twin in twins:
            self.copy(twin.tensor, twin.cpu, "own")
        return [self._mark("own")] if twins else []

    def join(self, marks: Sequence[Any]) -> None:
        self.streams["caller"].extend(partial(self._run_to, mark) for mark in marks)

    def future(self, twins: Sequence[Twin]) -> Any:
        return torch.futures.Future()

    def fulfil(self, future: Any, value: Any, marks: Sequence[Any]) -> None:
        self.join(marks)
        future.set_result(value)

    def synchronize(self) -> None:
        """What `torch.cuda.current_stream().synchronize()` does."""
        while self.streams["caller"]:
            self.streams["caller"].popleft()()


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(torch.Tensor)


def _device() -> LateDevice:
    device = LateDevice()
    staging._device = device
    torch.cuda.get_device_capability = lambda device=None: (9, 0)  # type: ignore[method-assign] # dist.broadcast asks
    return device


def _call(name: str, rank: int, num_ranks: int, to: Callable[[torch.Tensor], torch.Tensor], is_async: bool) -> Any:
    """Make one call on tensors made by `to`; returns its work and what it wrote."""
    prepared: list[torch.Tensor] = []
    start = _prepare(name, rank, num_ranks, to, is_async, prepared)
    return start(), prepared


def _prepare(
    name: str,
    rank: int,
    num_ranks: int,
    to: Callable[[torch.Tensor], torch.Tensor],
    is_async: bool,
    prepared: list[torch.Tensor],
) -> Callable[[], Any]:
    """Return what makes one call on tensors made by `to`; they are added to `prepared`."""
    x = to(torch.arange(6, dtype=torch.float32).view(2, 3) + 10 * rank)
    wide = to(torch.full((num_ranks * 2, 3), -1.0))
    many = [to(torch.full((2, 3), -1.0)) for _ in range(num_ranks)]
    rows = [to(torch.full((2, 3), float(rank + r))) for r in range(num_ranks)]
    line = to(torch.arange(6.0 * num_ranks).view(-1, 3))
    run: dict[str, Callable[[], Any]] = {
        "broadcast": lambda: dist.broadcast(x, 1, async_op=is_async),
        "all_reduce": lambda: dist.all_reduce(x, async_op=is_async),
        "reduce": lambda: dist.reduce(x, 1, async_op=is_async),
        "all_gather": lambda: dist.all_gather(many, x, async_op=is_async),
        "all_gather_single": lambda: dist.all_gather_into_tensor(wide, x, async_op=is_async),
        "gather": lambda: dist.gather(x, many if rank == 1 else None, 1, async_op=is_async),
        "scatter": lambda: dist.scatter(x, rows if rank == 1 else None, 1, async_op=is_async),
        "reduce_scatter": lambda: dist.reduce_scatter(x, rows, async_op=is_async),
        "reduce_scatter_single": lambda: dist.reduce_scatter_tensor(x, wide, async_op=is_async),
        "all_to_all": lambda: dist.all_to_all(many, rows, async_op=is_async),
        "all_to_all_single": lambda: dist.all_to_all_single(wide, line, async_op=is_async),
        "strided": lambda: dist.all_reduce(turned, async_op=is_async),
    }
    turned = wide.t()
    prepared += [x, wide, *many, *rows]
    return run[name]


CALLS = [
    "broadcast",
    "all_reduce",
    "reduce",
    "all_gather",
    "all_gather_single",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_single",
    "all_to_all",
    "all_to_all_single",
    "strided",
]


def _same_as_cpu(rank: int, num_ranks: int) -> None:
    device = _device()
    for name in CALLS:
        for is_async in (False, True):
            _, wanted = _call(name, rank, num_ranks, torch.clone, False)
            work, got = _call(name, rank, num_ranks, on_gpu, is_async)
            if is_async:
                assert work.wait()
            device.synchronize()
            for one, other in zip(got, wanted, strict=True):
                assert torch.equal(_plain(one), other), (name, is_async)


@pytest.mark.parametrize(("num_ranks", "backend"), [(2, "epee"), (3, "epee"), (2, "mooncake")])
def test_every_collective_does_what_it_does_on_cpu_tensors(num_ranks: int, backend: str) -> None:
    run_ranks(_same_as_cpu, num_ranks, backend=backend)


def _in_and_outside_a_mode(rank: int, num_ranks: int, kind: str) -> None:
    """Issued in a mode and waited for outside of it, and the other way round."""
    device = _device()
    mode: Callable[[], Any] = torch.inference_mode
    if kind == "fake":
        mode = (lambda: FakeTensorMode(allow_non_fake_inputs=True)) if rank == 0 else contextlib.nullcontext
    for name in CALLS:
        _, wanted = _call(name, rank, num_ranks, torch.clone, False)
        for is_issued_inside in (True, False):
            prepared: list[Any] = []
            with mode() if kind == "inference" and is_issued_inside else contextlib.nullcontext():
                start = _prepare(name, rank, num_ranks, on_gpu, True, prepared)
            with mode() if is_issued_inside else contextlib.nullcontext():
                work = start()
            with contextlib.nullcontext() if is_issued_inside else mode():
                assert work.wait()
            device.synchronize()
            for one, other in zip(prepared, wanted, strict=True):
                assert torch.equal(_plain(one), other), (name, is_issued_inside)


@pytest.mark.parametrize("kind", ["inference", "fake"])
def test_the_mode_of_a_thread_does_not_matter(kind: str) -> None:
    run_ranks(_in_and_outside_a_mode, 2, kind, backend="epee")


def _messages(rank: int, num_ranks: int) -> None:
    device = _device()
    x = on_gpu(torch.arange(5.0) + rank)
    if rank == 0:
        dist.send(x, 1)
        work = dist.isend(x, 1, tag=4)
        assert work is not None
        work.wait()
        x.copy_(torch.zeros(5))  # ours again
    else:
        got, other = on_gpu(torch.full((5,), -1.0)), on_gpu(torch.full((5,), -1.0))
        dist.recv(got, 0)
        assert dist.recv(other, None, tag=4) == 0
        device.synchronize()
        assert torch.equal(_plain(got), torch.arange(5.0))
        assert torch.equal(_plain(other), torch.arange(5.0))
    reqs = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, (y := on_gpu(torch.zeros(5))), 1 - rank)]
    )
    for req in reqs:
        req.wait()
    device.synchronize()
    assert torch.equal(_plain(y), torch.arange(5.0) + 1 if rank == 0 else torch.zeros(5))


def test_messages() -> None:
    run_ranks(_messages, 2, backend="epee")


def _asynchronous(rank: int, num_ranks: int) -> None:
    device = _device()
    x = on_gpu(torch.full((4,), rank + 1.0))
    work = dist.all_reduce(x, async_op=True)
    future = work.get_future()
    assert future.wait()[0] is x
    device.synchronize()
    assert _plain(x).tolist() == [3.0] * 4
    assert work.is_completed()
    assert work.is_success()

    y = on_gpu(torch.full((4,), rank + 1.0))
    work = dist.all_reduce(y, async_op=True)
    while not work.is_completed():  # without a wait: true only when the values are there
        pass
    assert _plain(y).tolist() == [3.0] * 4

    z = on_gpu(torch.full((4,), rank + 1.0))
    dist.all_reduce(z, async_op=True)  # nobody asks for it
    dist.barrier()
    deadline = time.monotonic() + 20
    while _plain(z).tolist() != [3.0] * 4 and time.monotonic() < deadline:  # the background thread puts its copy there
        while device.streams["own"]:
            device.streams["own"].popleft()()
        time.sleep(0.001)
    assert _plain(z).tolist() == [3.0] * 4
    dist.barrier()


def test_asynchronous_calls_end_as_streams_expect() -> None:
    run_ranks(_asynchronous, 2, backend="epee")


def _errors(rank: int, num_ranks: int) -> None:
    device = _device()
    x = on_gpu(torch.arange(4.0))
    with pytest.raises(epee.InvalidArgument if rank else epee.MismatchError, match=r"overlap itself"):
        dist.all_reduce(x[:1].expand(4) if rank else x)
    with pytest.raises(epee.MismatchError, match="float64"):
        dist.all_reduce(x.double() if rank else x)
    device.synchronize()
    assert torch.equal(_plain(x), torch.arange(4.0))
    if rank == 0:
        device.is_done = lambda mark: False  # type: ignore[method-assign] # a GPU that never comes
        dist.group.WORLD.set_timeout(timedelta(seconds=0.3))  # type: ignore[union-attr]
        with pytest.raises(epee.CommTimeoutError, match="this rank's GPU has not come"):
            dist.all_reduce(x)
        del device.is_done
        dist.group.WORLD.set_timeout(timedelta(seconds=30))  # type: ignore[union-attr]
    else:
        with pytest.raises(epee.MismatchError, match="rank 0 refused"):
            dist.all_reduce(x)
    dist.all_reduce(x)
    device.synchronize()
    assert torch.equal(_plain(x), torch.arange(4.0) * num_ranks)


def test_errors_reach_every_rank_and_the_group_works_on() -> None:
    run_ranks(_errors, 2, backend="epee")


def _mixed(rank: int, num_ranks: int) -> None:
    device = _device()
    x = torch.full((3,), rank + 1.0)
    x = on_gpu(x) if rank else x
    dist.all_reduce(x)
    device.synchronize()
    assert _plain(x).tolist() == [3.0] * 3
    out = torch.zeros(num_ranks * 3)
    dist.all_gather_into_tensor(out, on_gpu(torch.full((3,), float(rank))))
    device.synchronize()
    assert out.tolist() == [0.0] * 3 + [1.0] * 3


def test_ranks_and_arguments_may_lie_on_different_devices() -> None:
    run_ranks(_mixed, 2, backend="epee")


def _dependent(rank: int, num_ranks: int) -> None:
    device = _device()
    for _ in range(5):
        x = on_gpu(torch.ones(4))
        works = [dist.all_reduce(x, async_op=True), dist.all_reduce(x[1:], async_op=True)]
        dist.all_reduce(x[:2])  # blocks; a view that both have written to
        device.synchronize()
        assert _plain(x).tolist() == [4.0, 8.0, 4.0, 4.0]
        for work in reversed(works):
            work.wait()

        y = on_gpu(torch.full((4,), rank + 1.0))
        out = on_gpu(torch.zeros(2 * num_ranks, 4))
        works = [
            dist.broadcast(y, 0, async_op=True),
            dist.all_gather_single(out[::2], y, async_op=True)
            if hasattr(dist, "all_gather_single")
            else dist.all_gather_into_tensor(out[::2], y, async_op=True),
            dist.all_reduce(out, async_op=True),
        ]
        works[-1].wait()
        device.synchronize()
        assert _plain(out)[::2].eq(2.0).all()
        assert _plain(out)[1::2].eq(0.0).all()
        assert _plain(y).tolist() == [1.0] * 4


def test_calls_on_one_tensor_give_what_they_give_in_order() -> None:
    run_ranks(_dependent, 2, backend="epee")


def _dependent_messages(rank: int, num_ranks: int) -> None:
    device = _device()
    x = on_gpu(torch.full((4,), rank + 1.0))
    works = [dist.isend(x, 1) if rank == 0 else dist.irecv(x, 0), dist.all_reduce(x, async_op=True)]
    if rank == 0:
        works += [dist.irecv(x[:2], 1), dist.irecv(x[1:3], 1)]
    else:
        works += [dist.isend(x[:2], 0), dist.isend(on_gpu(torch.full((2,), 9.0)), 0)]
    for work in works:
        assert work is not None
        work.wait()
    device.synchronize()
    assert _plain(x).tolist() == ([2.0, 9.0, 9.0, 2.0] if rank == 0 else [2.0] * 4)
    for _ in range(3):  # within a batch nobody waits for anybody
        y, half = on_gpu(torch.full((4,), rank + 1.0)), on_gpu(torch.zeros(4))
        ops = [dist.P2POp(dist.irecv, half[:2], 1 - rank), dist.P2POp(dist.irecv, half[1:3], 1 - rank)]
        for work in dist.batch_isend_irecv([*ops, *[dist.P2POp(dist.isend, y[:2], 1 - rank) for _ in range(2)]]):
            work.wait()
        device.synchronize()
        assert _plain(half).tolist() == [2.0 - rank] * 3 + [0.0]


def test_messages_and_collectives_on_one_tensor() -> None:
    run_ranks(_dependent_messages, 2, backend="epee")


def _then_reduce(x: torch.Tensor) -> None:
    """A call on `x`, with a message to rank 1 that it may come as soon as the call before is looked at."""
    group: Any = dist.group.WORLD
    wait = group._engine.wait

    def tell_and_wait(*args: Any) -> None:
        group._engine.wait = wait
        dist.send(torch.zeros(1), 1)
        wait(*args)

    group._engine.wait = tell_and_wait
    dist.all_reduce(x)


def _independent(rank: int, num_ranks: int) -> None:
    _device()
    group: Any = dist.group.WORLD
    x, y = on_gpu(torch.ones(4)), on_gpu(torch.ones(4))
    if rank == 0:
        works = [dist.all_reduce(x, async_op=True), dist.all_reduce(y, async_op=True)]
        assert [op.published for op in group._engine.queue] == [True, True], "nobody has come, and both are issued"
        dist.send(torch.zeros(1), 1)
    else:
        dist.recv(torch.zeros(1), 0)
        works = [dist.all_reduce(x, async_op=True), dist.all_reduce(y, async_op=True)]
    for work in works:
        work.wait()
    if rank == 1:
        dist.recv(torch.zeros(1), 0)
    failed = dist.all_reduce(x[: 3 + rank], async_op=True)
    if rank == 0:  # rank 1 has not called it yet
        with pytest.raises(epee.MismatchError, match="not run: it reads"):
            _then_reduce(x)
    else:
        with pytest.raises(epee.MismatchError, match="disagree"):
            failed.wait()
        with pytest.raises(epee.MismatchError, match="rank 0 refused"):
            dist.all_reduce(x)
    dist.all_reduce(y)


def test_calls_on_other_tensors_are_issued_at_once_and_a_failed_input_is_an_error() -> None:
    run_ranks(_independent, 2, backend="epee")


def test_a_group_keeps_no_tensor_of_a_call_that_has_ended() -> None:
    run_ranks(_forgets, 2, backend="epee")


def _forgets(rank: int, num_ranks: int) -> None:
    _device()
    group: Any = dist.group.WORLD
    x = on_gpu(torch.ones(4))
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    dist.all_reduce(x)
    deadline = time.monotonic() + 20
    while any(result.work is not None for result in group._staging._results) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert all(result.work is None for result in group._staging._results)


def _meets(rank: int, num_ranks: int, backend: str) -> None:
    """What the stream had before a barrier is done when that returns, where the group is one for GPUs."""
    device, done = _device(), []
    device.streams["caller"].append(lambda: done.append(rank))
    dist.barrier()
    assert done == ([rank] if backend == "mooncake" else [])
    device.synchronize()
    if backend == "mooncake" and rank == 1:
        group: Any = dist.group.WORLD
        device.is_done = lambda mark: False  # type: ignore[method-assign]
        group.set_timeout(timedelta(seconds=0.2))
        with pytest.raises(epee.CommTimeoutError, match="GPU has not come"):
            dist.barrier()
    elif backend == "mooncake":
        with pytest.raises(epee.MismatchError, match="GPU has not come"):
            dist.barrier()


@pytest.mark.parametrize("backend", ["mooncake", "mooncake-cpu"])
def test_a_barrier_of_mooncakes_gpu_group_waits_for_the_current_stream(backend: str) -> None:
    run_ranks(_meets, 2, backend, backend=backend)


def _loses(rank: int, num_ranks: int) -> None:
    """Calls that a loss ends write nothing to GPU tensors, and with Mooncake's names their waits are silent."""
    device = _device()
    group: Any = dist.group.WORLD
    x = on_gpu(torch.full((4,), 7.0))
    dist.barrier()
    if rank == 1:
        group.shutdown()
        return
    works = [dist.irecv(x, 1)]
    works[0].wait()
    works += [dist.isend(x, 1), dist.irecv(x, 1), dist.broadcast(x, 1, async_op=True)]
    dist.broadcast(x, 1)
    dist.recv(x, 1)
    for work in works:
        assert work.wait() is True
        assert not epee.compat.mooncake.pg.get_local_success(work)
        assert epee.compat.mooncake.pg.get_failed_ranks_hint(work).tolist() == [0, 1]
    device.synchronize()
    assert _plain(x).tolist() == [7.0] * 4
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    device.synchronize()
    assert _plain(x).tolist() == [7.0] * 4, "its own value is all that is left"
    assert dist.get_world_size() == 1


def _loses_before_the_next(rank: int, num_ranks: int, folder: str) -> None:
    """A call reads what an earlier one is to write, which the loss ends while the later one waits for it."""
    device = _device()
    group: Any = dist.group.WORLD
    x = on_gpu(torch.full((4,), 7.0))
    dist.barrier()
    if rank == 1:
        stages.wait_for(folder, "later")
        time.sleep(0.5)
        group.shutdown()
        return
    works = [dist.irecv(x, 1)]
    stages.reach(folder, "later")
    works += [dist.broadcast(x, 1, async_op=True), dist.isend(x, 1)]
    for work in works:
        assert work.wait() is True
        assert not epee.compat.mooncake.pg.get_local_success(work)
        assert epee.compat.mooncake.pg.get_failed_ranks_hint(work).tolist() == [0, 1]
    device.synchronize()
    assert _plain(x).tolist() == [7.0] * 4


def test_a_loss_is_reported_by_a_call_that_waited_for_the_one_it_ended(tmp_path: Path) -> None:
    run_ranks(_loses_before_the_next, 2, str(tmp_path), backend="mooncake")


def test_a_loss_leaves_gpu_tensors_alone_and_is_reported() -> None:
    run_ranks(_loses, 2, backend="mooncake")
