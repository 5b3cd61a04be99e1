"""Groups whose calls on "GPU" tensors run the kernels' own sources in the calling process."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import epee
import epee.compat.mooncake.pg as mooncake
from epee.backend import staging
from epee.backend.cuda import half as halves
from epee.backend.cuda import meeting
from epee.backend.cuda.interface import Policy
from epee.gpu.device import GpuDevice
from tests.backend.test_staging import CALLS, OnGpu, _call, _device, _plain, on_gpu
from tests.csrc.emulated import EmulatedPlatform
from tests.survive import stages

STAGING_BYTES = 64 << 10


def give_half(rank: int, timeout_s: float = 60.0) -> halves.DeviceHalf:
    """Let the world's calls on "GPU" tensors run on the device; those that do not fail here go through staging."""
    group: Any = dist.group.WORLD
    meeting.has_gpu = lambda: True
    meeting.platform_of = lambda device: EmulatedPlatform()
    meeting.current_device = lambda: torch.device("cpu")
    group.set_timeout(timedelta(seconds=timeout_s))
    options = group.options
    policy = Policy(options.fault_mode == "mask", options.counts_present, options.on_stall == "wait")
    group._on_device = halves.DeviceHalf(group._engine, rank, STAGING_BYTES, policy)
    torch.cuda.get_device_capability = lambda device=None: (9, 0)  # type: ignore[method-assign] # dist.broadcast asks
    staging._device = None  # type: ignore[assignment] # whoever comes there fails
    return group._on_device


@contextlib.contextmanager
def closed_at_end(half: halves.DeviceHalf) -> Iterator[None]:
    """Leave together."""
    yield
    dist.barrier()
    half.close(False)


def same_as_cpu(rank: int, num_ranks: int) -> None:
    """Every call, sync and async, has the results of CPU tensors."""
    with closed_at_end(give_half(rank)):
        for name in CALLS:
            for is_async in (False, True):
                _, wanted = _call(name, rank, num_ranks, torch.clone, False)
                work, got = _call(name, rank, num_ranks, on_gpu, is_async)
                if is_async:
                    assert work.wait()
                    assert work.is_completed()
                    assert work.is_success()
                for one, other in zip(got, wanted, strict=True):
                    assert torch.equal(_plain(one), other), (name, is_async)


def _values(rank: int, count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    gen = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype is torch.bool:
        return torch.randint(0, 2, (count,), generator=gen).bool()
    if dtype.is_complex:
        return torch.randn(count, generator=gen, dtype=dtype)
    if dtype.is_floating_point:
        return torch.randn(count, generator=gen).to(dtype)
    return torch.randint(0, 100, (count,), generator=gen).to(dtype)


REDUCTIONS = {
    torch.bfloat16: ("SUM", "AVG", "MIN", "MAX", "PRODUCT"),
    torch.float16: ("SUM", "AVG", "MIN", "MAX", "PRODUCT"),
    torch.float32: ("SUM", "AVG", "MIN", "MAX", "PRODUCT"),
    torch.float64: ("SUM", "AVG", "MIN", "MAX", "PRODUCT"),
    torch.int8: ("SUM", "MIN", "MAX", "PRODUCT", "BAND", "BOR", "BXOR"),
    torch.uint8: ("SUM", "MIN", "MAX", "PRODUCT", "BAND", "BOR", "BXOR"),
    torch.int16: ("SUM", "MIN", "MAX", "PRODUCT", "BAND", "BOR", "BXOR"),
    torch.int32: ("SUM", "MIN", "MAX", "PRODUCT", "BAND", "BOR", "BXOR"),
    torch.int64: ("SUM", "MIN", "MAX", "PRODUCT", "BAND", "BOR", "BXOR"),
    torch.bool: ("MIN", "MAX", "BAND", "BOR", "BXOR"),
    torch.complex64: ("SUM", "AVG"),
    torch.complex128: ("SUM", "AVG"),
}


SOME = {  # to compile less for a real GPU
    torch.bfloat16: ("SUM", "AVG", "MAX"),
    torch.float32: ("SUM", "AVG", "PRODUCT"),
    torch.float64: ("SUM",),
    torch.int16: ("MIN",),
    torch.int32: ("SUM",),
    torch.int64: ("BXOR",),
    torch.bool: ("BOR",),
    torch.complex64: ("SUM",),
}


def reductions(
    rank: int,
    num_ranks: int,
    to: Callable[[torch.Tensor], torch.Tensor] = on_gpu,
    kinds: dict[torch.dtype, tuple[str, ...]] = REDUCTIONS,
) -> None:
    """Every dtype and operation that the kernels have gives the bits of CPU tensors, small and large."""
    seed = 0
    for dtype, names in kinds.items():
        for name in names:
            for count in (5, 30_001):
                seed += 1
                mine = _values(rank, count, dtype, seed)
                wanted, got = mine.clone(), to(mine)
                dist.all_reduce(wanted, op=getattr(dist.ReduceOp, name))
                dist.all_reduce(got, op=getattr(dist.ReduceOp, name))
                back = got.cpu() if got.device.type == "cuda" else _plain(got)
                assert torch.equal(back.view(torch.uint8), wanted.view(torch.uint8)), (dtype, name, count)


def reductions_emulated(rank: int, num_ranks: int) -> None:
    """See there."""
    with closed_at_end(give_half(rank)):
        reductions(rank, num_ranks)


def uneven(rank: int, num_ranks: int, to: Callable[[torch.Tensor], torch.Tensor] = on_gpu, scale: int = 1) -> None:
    """all_to_all with sizes of their own, zeros among them, single and as lists, in memory that overlaps."""
    for seed in range(4):
        sizes = [[(3 * src + 5 * dst + seed) % 4 * scale for dst in range(num_ranks)] for src in range(num_ranks)]
        sent, got = sizes[rank], [row[rank] for row in sizes]
        x = _values(rank, sum(sent) * 3, torch.float32, seed).view(-1, 3)
        results = []
        for place in (torch.clone, to):
            out = place(torch.full((sum(got), 3), -1.0))
            dist.all_to_all_single(out, place(x), got, sent)
            many = [place(torch.full((n, 3), -1.0)) for n in got]
            dist.all_to_all(many, list(place(x).split(sent)))
            results.append(torch.cat([out, *many]).cpu())
        assert torch.equal(results[0].as_subclass(torch.Tensor), results[1].as_subclass(torch.Tensor)), seed
    results = []
    for place in (torch.clone, to) if num_ranks > 1 else ():
        y = place(_values(rank, 40 * num_ranks, torch.float32, 9).view(-1, 4))
        half = y.shape[0] // num_ranks
        dist.all_to_all_single(y, y)
        dist.reduce_scatter_tensor(y[num_ranks - 1 : num_ranks - 1 + half], y)
        dist.all_gather_into_tensor(y, y[half // 2 : half // 2 + half])
        results.append(y.cpu().as_subclass(torch.Tensor))
    assert num_ranks == 1 or torch.equal(*results)


def uneven_emulated(rank: int, num_ranks: int) -> None:
    """See there."""
    with closed_at_end(give_half(rank)):
        uneven(rank, num_ranks, scale=700)


def look_soon(call: Callable[[], Any], half: halves.DeviceHalf) -> None:
    """Make a call, and another one, by which the failure of the first is known."""
    for _ in range(2):
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        half.check()


def refusals(rank: int, num_ranks: int) -> None:
    """A refused call and calls that differ are errors on all, and the group works on."""
    half = give_half(rank)
    x = on_gpu(torch.arange(4.0))
    dist.all_reduce(x)
    if rank == 0:
        with pytest.raises(epee.InvalidArgument, match="overlap itself"):
            dist.all_reduce(x[:1].expand(4))
    else:
        with pytest.raises(epee.MismatchError, match="ranks disagree: rank 0"):
            dist.all_reduce(x, async_op=True).wait()
    dist.all_reduce(y := on_gpu(torch.ones(3)))
    assert _plain(y).tolist() == [num_ranks] * 3
    for count in (3, 12_000):  # of the larger ones each rank uses another kernel
        other = on_gpu(torch.ones(count, dtype=torch.float64 if rank else torch.float32))
        with pytest.raises(epee.MismatchError, match="ranks disagree"):
            look_soon(lambda: dist.all_reduce(other), half)  # noqa: B023
        dist.all_reduce(y := on_gpu(torch.ones(3)))
        assert _plain(y).tolist() == [num_ranks] * 3
    with pytest.raises(epee.InvalidArgument, match="float8"):
        dist.all_reduce(on_gpu(torch.ones(3).to(torch.float8_e4m3fn)))
    dist.all_reduce(y)
    with closed_at_end(half):
        pass


def staged(rank: int, num_ranks: int) -> None:
    """What no kernel makes goes through CPU memory, on all ranks."""
    half = give_half(rank)
    device = _device()
    x = on_gpu(torch.full((3,), rank + 4))
    dist.all_reduce(x, op=dist.ReduceOp.AVG)
    device.synchronize()
    assert _plain(x).tolist() == [sum(range(4, 4 + num_ranks)) // num_ranks] * 3
    assert half._machine is None, "the kernels had no call yet"
    dist.all_reduce(y := on_gpu(torch.ones(2)))
    assert _plain(y).tolist() == [num_ranks] * 2
    assert half._machine is not None
    with closed_at_end(half):
        pass


def barriers(rank: int, num_ranks: int) -> None:
    """A barrier that names a GPU runs on its stream, before and after other calls; others stay on the CPUs."""
    half = give_half(rank)
    launched: list[str] = []
    opts = dist.BarrierOptions()
    opts.device, opts.asyncOp = torch.device("cuda"), False
    group: Any = dist.group.WORLD

    def count() -> None:
        machine: Any = half._machine
        run = machine.run
        machine.run = lambda move, *rest: (launched.append(move.op), run(move, *rest))[1]

    group.barrier(opts)
    count()
    for is_async in (False, True):
        opts.asyncOp = is_async
        work = group.barrier(opts)
        assert work.wait()
        assert work.is_completed()
    dist.all_reduce(x := on_gpu(torch.full((3,), rank + 1.0)))
    group.barrier(opts).wait()
    dist.barrier()
    assert _plain(x).tolist() == [sum(range(1, num_ranks + 1))] * 3
    assert launched == ["barrier", "barrier", "all_reduce", "barrier"]
    if rank == 1:
        with pytest.raises(epee.CommTimeoutError, match="has lost this call"):
            late_barrier(half, opts, 1.5)
    else:
        with pytest.raises(epee.CommTimeoutError):
            late_barrier(half, opts, 0.0)
    half._engine.timeout_s = 60.0
    dist.all_reduce(y := on_gpu(torch.ones(3)))
    half.check()
    assert _plain(y).tolist() == [num_ranks] * 3
    with closed_at_end(half):
        pass


def late_barrier(half: halves.DeviceHalf, opts: Any, seconds: float) -> None:
    """Come to a barrier so much later than others, whose time-out is half a second."""
    half._engine.timeout_s = 0.5
    time.sleep(seconds)
    group: Any = dist.group.WORLD
    for _ in range(2):
        group.barrier(opts).wait()
        half.check()


def waiting(rank: int, num_ranks: int, folder: str, fault_mode: str) -> list[str]:
    """With on_stall="wait" calls wait for a late rank beyond the time-out, and a warning names it."""
    options = epee.BackendOptions(fault_mode=fault_mode, on_stall="wait")
    store = dist.FileStore(f"{folder}/store", num_ranks)
    dist.init_process_group("epee", store=store, rank=rank, world_size=num_ranks, pg_options=options)
    half = give_half(rank)
    dist.all_reduce(on_gpu(torch.ones(3)))
    half._engine.timeout_s = 0.5
    logging.getLogger("epee").addHandler(heard := Heard())
    for count in (3, 40_000):
        if rank == 1:
            time.sleep(4.0)
        dist.all_reduce(y := on_gpu(torch.ones(count)))
        half.check()
        assert _plain(y).tolist() == [num_ranks] * count
    half._engine.timeout_s = 60.0
    with closed_at_end(half):
        pass
    return heard.texts


class Heard(logging.Handler):
    """Keeps the warnings of this process."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def no_memory(rank: int, num_ranks: int) -> None:
    """Where one rank cannot, nobody does."""
    half = give_half(rank)
    device = _device()

    def broken(device: torch.device) -> EmulatedPlatform:
        raise epee.ResourceError("no GPU memory is left")

    if rank == 1:
        meeting.platform_of = broken
    for _ in range(2):
        dist.all_reduce(x := on_gpu(torch.ones(2)))
        device.synchronize()
        assert _plain(x).tolist() == [num_ranks] * 2
    assert half._machine is None
    assert "no GPU memory is left" in half._off
    dist.barrier()


def killed(rank: int, num_ranks: int, timeout_s: float, deaf: int = -1) -> tuple[float, float]:
    """The last rank is killed; survivors hear of it in a call on the device and go on without it.

    The host of rank `deaf` never tells its kernels.
    """
    if rank == deaf:
        GpuDevice.mark_dead = lambda self, ranks: None  # type: ignore[method-assign]
    half = give_half(rank, timeout_s)
    x = on_gpu(torch.ones(3))
    dist.all_reduce(x)
    assert _plain(x).tolist() == [num_ranks] * 3
    if rank == num_ranks - 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(epee.RankFailedError) as caught:
        look_soon(lambda: dist.all_reduce(on_gpu(torch.ones(3))), half)
    elapsed = time.monotonic() - start
    assert caught.value.ranks == (num_ranks - 1,)
    for count in (3, 40_000):
        dist.all_reduce(y := on_gpu(torch.ones(count)))
        half.check()
        assert torch.equal(_plain(y), torch.full((count,), num_ranks - 1.0))
    z = torch.ones(2)
    dist.all_reduce(z)  # CPU tensors, too
    assert z.tolist() == [num_ranks - 1.0] * 2
    dist.barrier()
    half.close(False)
    return start, elapsed


def late(rank: int, num_ranks: int) -> str:
    """A rank that comes too late: those who waited are told, then it, then all go on."""
    half = give_half(rank, 1.0)
    dist.all_reduce(x := on_gpu(torch.ones(3)))
    told = ""
    if rank == 1:
        time.sleep(2.5)
    try:
        dist.all_reduce(x, async_op=True).wait()
        half.check()
    except epee.CommTimeoutError as error:
        told = str(error)
    half._engine.timeout_s = 60.0
    dist.all_reduce(y := on_gpu(torch.ones(3)))
    half.check()
    assert _plain(y).tolist() == [num_ranks] * 3
    with closed_at_end(half):
        pass
    return told


def asynchronous(rank: int, num_ranks: int) -> None:
    """Futures and works show the tensors of the call; a group keeps none of them."""
    with closed_at_end(give_half(rank)):
        x = on_gpu(torch.full((4,), rank + 1.0))
        work = dist.all_reduce(x, async_op=True)
        assert work is not None
        assert work.get_future().wait()[0] is x
        assert work.result()[0] is x
        assert _plain(x).tolist() == [sum(range(1, num_ranks + 1))] * 4
        with dist._coalescing_manager():
            dist.all_reduce(x)
            dist.all_reduce(y := on_gpu(torch.ones(5)))
        assert _plain(y).tolist() == [num_ranks] * 5
        group: Any = dist.group.WORLD
        inputs = [on_gpu(torch.full((n,), rank + 10.0 * n)) for n in (2, 40_000)]
        outputs = [[on_gpu(torch.zeros(n)) for n in (2, 40_000)] for _ in range(num_ranks)]
        group.allgather_coalesced(outputs, inputs)
        for src, (small, large) in enumerate(outputs):
            assert bool((_plain(small) == src + 20.0).all())
            assert bool((_plain(large) == src + 400_000.0).all())


def _again_calls(rank: int, num_ranks: int, to: Callable[[torch.Tensor], torch.Tensor], seed: int, n: int) -> list[Any]:
    """Calls of one look, of rows of `n`, on tensors of their own; each writes the last of its tensors."""
    x, out, wide, other = (
        to(_values(rank, count, torch.float32, seed + i))
        for i, count in enumerate((n, n, n * num_ranks, n * num_ranks))
    )
    mine = slice(n * rank, n * (rank + 1))
    return [
        (lambda: dist.all_reduce(x), x),
        (lambda: dist.all_reduce(x, op=dist.ReduceOp.MAX), x),
        (lambda: dist.broadcast(x, num_ranks - 1), x),
        (lambda: dist.all_gather_into_tensor(wide, x), wide),
        (lambda: dist.reduce_scatter_tensor(out, wide), out),
        (lambda: dist.all_to_all_single(other, wide), other),
        (lambda: dist.all_gather_into_tensor(wide, wide[mine]), wide),
        (lambda: dist.reduce_scatter_tensor(wide[mine], wide), wide),
        (lambda: dist.all_gather_into_tensor(wide, wide[n // 2 : n // 2 + n]), wide),  # memory that meets otherwise
        (lambda: dist.reduce_scatter_tensor(wide[3 : 3 + n], wide), wide),
        (lambda: dist.all_to_all_single(wide, wide), wide),
        (lambda: dist.all_to_all_single(other, wide, [n] * num_ranks, [n] * num_ranks), other),
        (lambda: dist.all_reduce(wide[::num_ranks]), wide),  # as many elements, not contiguous
        (lambda: dist.all_reduce(x[:0]), x),
        (lambda: dist.all_reduce(x.t()), x),
    ]


class CountedCalls(meeting.KnownCalls):
    """Counts the calls that went the short way."""

    num_made = 0

    def run(self, *args: Any) -> int | None:
        stream = super().run(*args)
        self.num_made += stream is not None
        return stream


def again(rank: int, num_ranks: int, n: int = 24) -> list[int]:
    """Calls that look like earlier ones do what they did, and what looks otherwise, or meets, does not pass for them.

    Returns how many calls went the short way, pass for pass.
    """
    meeting.KnownCalls = CountedCalls  # type: ignore[misc]
    half = give_half(rank)
    short = [0]
    for seed in range(5):
        wanted = _again_calls(rank, num_ranks, torch.clone, 100 * seed, n)
        made = _again_calls(rank, num_ranks, on_gpu, 100 * seed, n)
        for (there, result), (call, got) in zip(wanted, made, strict=True):
            there()
            call()
            assert torch.equal(_plain(got).view(torch.int32), result.view(torch.int32)), seed
        again = half._again[False]
        assert isinstance(again, CountedCalls)
        short.append(again.num_made)
    for _ in range(2):  # a call that is not looked for, as the hosts meet, is not taken for the one missed before
        again._missed = ("missed",)
        half._epoch = -1
        dist.all_reduce(on_gpu(torch.ones(7)))
    assert ("missed",) not in again._plans
    y = on_gpu(torch.ones(n))
    half._engine.timeout_s = 30.0  # other arguments of the kernels
    dist.all_reduce(y)
    # each of the two looks like one before
    with pytest.raises(epee.MismatchError, match="ranks disagree"):
        look_soon(lambda: dist.all_reduce(y, op=dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM), half)
    for _ in range(3):
        dist.all_reduce(y := on_gpu(torch.ones(n)))
        assert _plain(y).tolist() == [num_ranks] * n
    with closed_at_end(half):
        pass
    return [now - before for before, now in itertools.pairwise(short)]


__all__ = [
    "OnGpu",
    "again",
    "asynchronous",
    "killed",
    "late",
    "no_memory",
    "reductions",
    "refusals",
    "same_as_cpu",
    "staged",
]


def grown(rank: int, num_ranks: int, folder: str) -> None:
    """Half of the ranks make a group, which the others extend: kernels and memory of that size make the calls."""
    size = num_ranks // 2
    if rank >= size:
        stages.wait_for(folder, "born", 150.0)  # the others build kernels, on a machine that may be busy
    options = mooncake.MooncakeBackendOptions(size) if rank < size else None  # without any, a process joins here
    store, world_size = dist.FileStore(f"{folder}/store", -1), num_ranks if rank >= size else size
    dist.init_process_group("mooncake", store=store, rank=rank, world_size=world_size, pg_options=options)
    group: Any = dist.group.WORLD
    group.waits_for_streams = False  # there are none
    half = give_half(rank)
    if rank < size:
        _sums(half, size)
        smaller = half._machine
        stages.reach(folder, "born")
        while mooncake.get_num_synced_ranks(group) != num_ranks:
            dist.all_reduce(torch.ones(1))
        mooncake.extend_group_size_to(group, num_ranks)
        assert half._machine is smaller
    _sums(half, num_ranks)
    assert half._machine is not None
    assert half._machine.config.num_ranks == num_ranks
    with closed_at_end(half):
        pass


def _sums(half: halves.DeviceHalf, num_ranks: int) -> None:
    for count in (3, 40_000, 3):
        dist.all_reduce(x := on_gpu(torch.full((count,), half._rank + 1.0)))
        half.check()
        assert torch.equal(_plain(x), torch.full((count,), sum(range(1, num_ranks + 1)) * 1.0))
    rows = [on_gpu(torch.zeros(5)) for _ in range(num_ranks)]
    dist.all_gather(rows, on_gpu(torch.full((5,), half._rank + 1.0)))
    half.check()
    assert [_plain(row)[0].item() for row in rows] == [rank + 1.0 for rank in range(num_ranks)]
    assert not half._off, half._off
