"""Groups on emulated devices whose tensors lie in memory pools."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import epee
from epee.backend.cuda import half as halves
from epee.backend.cuda import meeting
from epee.backend.cuda.pool import MemoryPool
from tests.backend.test_staging import OnGpu, _plain, on_gpu
from tests.collectives.cases import Heard, closed_at_end, give_half, look_soon
from tests.csrc.emulated import EmulatedPlatform, EmulatedRegion

POOL_BYTES = 8 << 20
COUNT = 40_000  # float32 elements: more than packets hold, one row of each of up to three ranks
PATTERN = 0x5A
DIRECT = "kernels/collective/direct.cuh"
# Calls on rows inside of tensors: those of odd lengths do not all begin at a multiple of 16 bytes, as pools want it.
CUT = ("all_gather in place", "reduce_scatter", "all_to_all")


def give_pool(rank: int, timeout_s: float = 60.0) -> tuple[halves.DeviceHalf, MemoryPool]:
    """The world's device half, and this rank's pool."""
    half = give_half(rank, timeout_s)
    group: Any = dist.group.WORLD
    return half, group.memory_pool(POOL_BYTES)


def in_pool(pool: MemoryPool, values: torch.Tensor) -> torch.Tensor:
    """A tensor of the pool, a "GPU" one of an emulated GPU's."""
    x = pool.empty(*values.shape, dtype=values.dtype).copy_(values)
    return x if x.is_cuda else x.as_subclass(OnGpu)


def slots(half: halves.DeviceHalf) -> torch.Tensor:
    """The memory that large calls go through, where they are not copy-free."""
    machine = half._machine
    assert machine is not None
    layout = machine.config.region_layout
    return machine._own.lease(layout.offset("chunks"), layout["chunks"].nbytes, None)


def calls(
    rank: int, num_ranks: int, to: Callable[[torch.Tensor], torch.Tensor], seed: int, count: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Make each large call on new tensors and yield its name and result, which lies where inputs do if that matters."""
    gen = torch.Generator().manual_seed(100 * seed + rank)
    row, wide = torch.randn(count, generator=gen), torch.randn(count * num_ranks, generator=gen)
    dist.all_reduce(x := to(row))
    yield "all_reduce", x
    dist.broadcast(x := to(row), num_ranks - 1)
    yield "broadcast", x
    dist.all_gather_into_tensor(out := to(wide), to(row))
    yield "all_gather", out
    out = to(wide)
    dist.all_gather_into_tensor(out, out[count * rank : count * (rank + 1)])
    yield "all_gather in place", out
    dist.reduce_scatter_tensor(out := to(row), to(wide))
    yield "reduce_scatter", out
    dist.all_to_all_single(out := to(wide), to(wide))
    yield "all_to_all", out
    dist.reduce(x := to(row), 0)
    yield "reduce", x if rank == 0 else to(torch.zeros(1))


def compare(
    half: halves.DeviceHalf,
    to: Callable[[torch.Tensor], torch.Tensor],
    seed: int,
    count: int = COUNT,
    *,
    are_pooled: bool,
) -> None:
    """Make all calls: each has the bits of one on CPU tensors, and slots are written by those that copy, only.

    Args:
        count: float32 elements of a row.
        are_pooled: `to` makes tensors of the pool on all ranks.
    """
    rank, num_ranks, machine = dist.get_rank(), dist.get_world_size(), half._machine
    assert machine is not None
    is_large = 4 * count > machine.config.packet_bytes
    wanted = dict(calls(rank, num_ranks, torch.clone, seed, count))

    def begin() -> None:
        slots(half).fill_(PATTERN)
        machine.platform.synchronize()
        dist.barrier()

    begin()
    for name, got in calls(rank, num_ranks, to, seed, count):
        machine.platform.synchronize()
        half.check()
        found = _plain(got).cpu().view(torch.int32)
        assert torch.equal(found, wanted[name].view(torch.int32)), (name, seed, count, are_pooled)
        dist.barrier()  # all have written
        is_read_in_place = are_pooled and (count % 4 == 0 or name not in CUT)
        is_target = rank < num_ranks - 1 if name == "broadcast" else rank == 0 if name == "reduce" else True
        is_untouched = bool((slots(half) == PATTERN).all())
        assert is_untouched != (is_large and is_target and not is_read_in_place), (name, seed, count, are_pooled)
        begin()


def copy_free(rank: int, num_ranks: int) -> None:
    """Calls in pools are right and leave the slots alone; those that are not, on one rank or all, go through them."""
    half, pool = give_pool(rank)
    with closed_at_end(half):
        for seed, count in enumerate((COUNT, COUNT + 3, 0)):
            for where in ("pool", "elsewhere", "pool", "pool of one"):
                is_here = where == "pool" or (where == "pool of one" and rank == 0)
                to = functools.partial(in_pool, pool) if is_here else on_gpu
                compare(half, to, seed, count, are_pooled=where == "pool")


def killed(rank: int, num_ranks: int) -> None:
    """A rank dies while others read its pool; the survivors hear of it, and go on in theirs."""
    half, pool = give_pool(rank)
    dist.all_reduce(x := in_pool(pool, torch.ones(COUNT)))
    assert torch.equal(_plain(x), torch.full((COUNT,), float(num_ranks)))
    if rank == num_ranks - 1:
        platform: Any = half._machine.platform  # type: ignore[union-attr]
        platform.die_in(DIRECT, 1, 3)
        dist.all_reduce(in_pool(pool, torch.ones(COUNT)))
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(epee.RankFailedError) as caught:
        look_soon(lambda: dist.all_reduce(in_pool(pool, torch.ones(COUNT))), half)
    assert caught.value.ranks == (num_ranks - 1,)
    for _ in range(3):
        dist.all_reduce(x := in_pool(pool, torch.ones(COUNT)))
        half.check()
        assert torch.equal(_plain(x), torch.full((COUNT,), num_ranks - 1.0))
    dist.barrier()
    half.close(False)


def late_reader(rank: int, num_ranks: int) -> str:
    """A rank that reads when its peer has given up, and has new values there, gets an error and no result."""
    half, pool = give_pool(rank)
    dist.all_reduce(in_pool(pool, torch.ones(COUNT)))
    machine: Any = half._machine
    machine.plan = replace(machine.plan, direct_lanes=(2, 2))
    platform = machine.platform
    pauses = (ctypes.c_uint * 16).in_dll(platform._libraries[DIRECT], "emulated_pause_us")
    x = in_pool(pool, torch.ones(COUNT))
    told = ""
    if rank == 0:
        half._engine.timeout_s = 0.5
    else:
        pauses[3] = 400_000  # of each warp of a block: longer than rank 0 is on its way, however busy the machine is
    try:
        dist.all_reduce(x)
        half.check()
    except epee.EpeeError as error:
        told = f"{type(error).__name__}: {error}"
    x.fill_(7.0)  # the program's, from now on
    pauses[3] = 0
    half._engine.timeout_s = 60.0
    dist.barrier()  # rank 1 has left its call
    assert bool((_plain(x) == 7.0).all()), "nobody stores into tensors of another rank"
    dist.all_reduce(x := in_pool(pool, torch.ones(COUNT)))
    half.check()
    assert torch.equal(_plain(x), torch.full((COUNT,), float(num_ranks)))
    with closed_at_end(half):
        pass
    return told


def bad_place(rank: int, num_ranks: int) -> str:
    """A place outside of its owner's pool is not read: an error on all."""
    half, pool = give_pool(rank)
    dist.all_reduce(in_pool(pool, torch.ones(COUNT)))
    assert half._machine is not None
    if rank == 0:
        half._machine._set("pool_bytes", [512] * num_ranks)  # as if the others' pools were smaller than they say
    dist.barrier()
    try:
        look_soon(lambda: dist.all_reduce(in_pool(pool, torch.ones(COUNT))), half)
    except epee.EpeeError as error:
        told = f"{type(error).__name__}: {error}"
    dist.all_reduce(x := in_pool(pool, torch.ones(COUNT)))  # behind a meeting
    half.check()
    assert torch.equal(_plain(x), torch.full((COUNT,), float(num_ranks)))
    with closed_at_end(half):
        pass
    return told


class PoorPlatform(EmulatedPlatform):
    """Has no memory for a pool at first."""

    is_poor = True

    def create(self, nbytes: int) -> EmulatedRegion:
        if self.is_poor and nbytes == POOL_BYTES:
            raise epee.ResourceError("no GPU memory is left")
        return super().create(nbytes)


class FarPlatform(EmulatedPlatform):
    """Cannot map pools at first."""

    is_far = True

    def attach(self, blob: bytes) -> EmulatedRegion:
        region = super().attach(blob)
        if self.is_far and region.nbytes // 4096 == POOL_BYTES // 4096:
            region.close()
            raise epee.ResourceError("no descriptors are left")
        return region


def unmapped(rank: int, num_ranks: int) -> None:
    """Where one rank cannot map pools all go on on the GPUs as without, are told once, and may try again."""
    half = give_half(rank)
    group: Any = dist.group.WORLD
    if rank == 1:
        meeting.platform_of = lambda device: FarPlatform()
    logging.getLogger("epee").addHandler(heard := Heard())
    pool = group.memory_pool(POOL_BYTES)
    to = functools.partial(in_pool, pool)
    compare(half, to, 0, are_pooled=False)
    half._is_lost = True  # the next call meets, and finds the same
    compare(half, to, 1, are_pooled=False)
    assert [text for text in heard.texts if "pools" in text] == heard.texts[:1]
    assert re.search(r"as without memory pools: rank 1 cannot map the pool of rank \d: no descriptors", heard.texts[0])
    machine: Any = half._machine
    usual, machine.lies_in_pool = machine.lies_in_pool, lambda move: True  # as a graph of better times has it
    machine.plan = replace(machine.plan)  # known calls are fitted anew
    compare(half, to, 2, are_pooled=False)
    machine.lies_in_pool = usual
    machine.plan = replace(machine.plan)
    FarPlatform.is_far = False
    assert group.memory_pool(POOL_BYTES) is pool
    compare(half, to, 3, are_pooled=True)
    assert heard.texts[1:] == []
    with closed_at_end(half):
        pass


def no_memory(rank: int, num_ranks: int) -> None:
    """Where one rank has no memory for a pool all are told, calls work, and another attempt may succeed."""
    half = give_half(rank)
    group: Any = dist.group.WORLD
    if rank == 1:
        meeting.platform_of = lambda device: PoorPlatform()
    with pytest.raises(epee.ResourceError, match=r"rank\(s\) \[1\] could not make one") as caught:
        group.memory_pool(POOL_BYTES)
    assert (caught.value.__cause__ is not None) == (rank == 1)
    dist.all_reduce(x := on_gpu(torch.ones(COUNT)))
    assert torch.equal(_plain(x), torch.full((COUNT,), float(num_ranks)))
    PoorPlatform.is_poor = False
    kind, text = (
        (epee.InvalidArgument, "1 or more")
        if rank == 1
        else (epee.ResourceError, r"rank\(s\) \[1\] could not make one")
    )
    with pytest.raises(kind, match=text):  # who is refused meets the others all the same
        group.memory_pool(0 if rank == 1 else POOL_BYTES)
    pool = group.memory_pool(POOL_BYTES)
    dist.all_reduce(x := in_pool(pool, torch.ones(COUNT)))
    assert torch.equal(_plain(x), torch.full((COUNT,), float(num_ranks)))
    assert group.memory_pool(1) is pool
    with pytest.raises(epee.InvalidArgument, match="does not grow"):
        group.memory_pool(POOL_BYTES + 1024)
    with pytest.raises(epee.InvalidArgument, match="1 or more"):
        group.memory_pool(0)
    with closed_at_end(half):
        pass
