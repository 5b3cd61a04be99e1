"""Messages of groups on "GPU" tensors, with the kernels' own sources in the calling process.

A kernel here has ended when its launch returns, so what blocks on a GPU's stream blocks the caller: asynchronous calls
are made in an order in which blocking ones would end, or as batches.
"""

from __future__ import annotations

import contextlib
import os
import random
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
from epee.backend.cuda import meeting as collectives_meeting
from epee.backend.cuda.messages import half as halves
from epee.backend.cuda.messages import meetings
from epee.backend.cuda.messages.params import MessageConfig
from tests.backend.test_staging import _device, _plain, on_gpu
from tests.csrc.emulated import EmulatedPlatform
from tests.survive import stages

To = Callable[[torch.Tensor], torch.Tensor]


def give_messages(timeout_s: float = 60.0, is_staged: bool = False) -> halves.MessageHalf:
    """Let the world's messages on "GPU" tensors run on the device; those that do not fail here, or are staged."""
    group: Any = dist.group.WORLD
    collectives_meeting.has_gpu = lambda: True
    meetings.platform_of = lambda device: EmulatedPlatform()
    meetings.config_of = lambda rank, num_ranks, staging_bytes: MessageConfig(rank, num_ranks, 3, 2, 1024, 512)
    group.set_timeout(timedelta(seconds=timeout_s))
    if not is_staged:
        staging._device = None  # type: ignore[assignment] # whoever comes there fails
    half = group._messages
    assert isinstance(half, halves.MessageHalf)
    return half


@contextlib.contextmanager
def closed_at_end(half: halves.MessageHalf) -> Iterator[None]:
    """Leave together."""
    yield
    half.check()
    dist.barrier()
    half.close(False)


def values(count: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The contents of a message."""
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(count, generator=gen).mul(100).to(dtype)


def same(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether every byte is equal, wherever they are."""
    plain = got.cpu() if got.device.type == "cuda" else _plain(got)
    return torch.equal(plain.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8))


COUNTS = (0, 1, 7, 300, 1536, 20_001)


def blocking(rank: int, num_ranks: int, to: To = on_gpu, counts: tuple[int, ...] = COUNTS) -> None:
    """send and recv of every size and some dtypes, with tags, one way and back; strided; more than the ring."""
    for seed, count in enumerate(counts):
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn):
            x = values(count, seed, dtype)
            if rank == 0:
                dist.send(to(x), 1, tag=seed)
                dist.recv(back := to(torch.zeros(count, dtype=dtype)), 1, tag=7)
                assert same(back, x), (count, dtype)
            elif rank == 1:
                got = to(torch.zeros(count, dtype=dtype))
                assert dist.recv(got, 0, tag=seed) == 0
                assert same(got, x), (count, dtype)
                dist.send(got, 0, tag=7)
    x = values(24, 77).view(4, 6)
    if rank == 0:
        dist.send(to(x).t(), 1)
        dist.send(to(torch.view_as_complex(x.view(4, 3, 2))), 1)
    elif rank == 1:
        wide = to(torch.zeros(6, 8))
        dist.recv(wide[:, ::2], 0)
        assert same(wide[:, ::2], x.t())
        assert same(wide[:, 1::2], torch.zeros(6, 4))
        dist.recv(turned := to(torch.zeros(4, 3, dtype=torch.complex64)), 0)
        assert same(torch.view_as_real(turned), x.view(4, 3, 2))


def batch(plan: list[tuple[int, int, int, int]], rank: int, num_ranks: int, to: To) -> None:
    """One batch of (source, destination, count, seed), all of which all ranks know."""
    ops, checks = [], []
    for src, dst, count, seed in plan:
        if src == rank:
            ops.append(dist.P2POp(dist.isend, to(values(count, seed)), dst, tag=seed % 3))
        if dst == rank:
            got = to(torch.zeros(count))
            ops.append(dist.P2POp(dist.irecv, got, src, tag=seed % 3))
            checks.append((got, count, seed))
    if not ops:
        return
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    for got, count, seed in checks:
        assert same(got, values(count, seed)), (count, seed)


def batches(rank: int, num_ranks: int, to: To = on_gpu, scale: int = 1, how_many: int = 25) -> None:
    """Rings of all ranks, more than fits a ring, messages to oneself, random batches, many operations."""
    nxt, before = (rank + 1) % num_ranks, (rank - 1) % num_ranks
    for count in (1, 500, 20_000 * scale):
        batch([(r, (r + 1) % num_ranks, count, r) for r in range(num_ranks)], rank, num_ranks, to)
    batch([(r, r, 300 * scale, r) for r in range(num_ranks)], rank, num_ranks, to)
    batch([(src, dst, 30 * scale, src * 10 + dst) for src in range(num_ranks) for dst in range(num_ranks)] * 9,
          rank, num_ranks, to)  # fmt: skip
    pick = random.Random(5)
    for number in range(how_many):
        plan = [
            (pick.randrange(num_ranks), pick.randrange(num_ranks), pick.choice((0, 1, 70, 3000)) * scale, seed)
            for seed in range(100 * number, 100 * number + pick.randrange(1, 9))
        ]
        batch(plan, rank, num_ranks, to)
    x = to(values(50, rank))
    got = to(torch.zeros(50))
    ops = [dist.P2POp(dist.irecv, got, before), dist.P2POp(dist.isend, x, nxt)]
    for _ in range(2):  # a list of operations may be used again
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        assert same(got, values(50, before))


def emulated(rank: int, num_ranks: int, name: str) -> None:
    """A case by its name."""
    case: Callable[..., None] = {"blocking": blocking, "batches": batches, "any": any_source, "manager": manager}[name]
    half = give_messages()
    with closed_at_end(half):
        case(rank, num_ranks)
        assert half._pairs.machine is not None or rank > 1, "nothing went from GPU to GPU"


def any_source(rank: int, num_ranks: int, to: To = on_gpu) -> None:
    """recv without a source tells the source."""
    found = []
    if rank:
        dist.send(to(torch.full((40,), float(rank))), 0, tag=3)
        dist.send(to(torch.full((5000,), 10.0 * rank)), 0, tag=4)
    else:
        for tag, count, scale in ((3, 40, 1.0), (4, 5000, 10.0)):
            for _ in range(1, num_ranks):
                src = dist.recv(got := to(torch.zeros(count)), tag=tag)
                assert same(got, torch.full((count,), scale * src))
                found.append(src)
        assert sorted(found) == sorted([*range(1, num_ranks)] * 2)
    dist.barrier()


def manager(rank: int, num_ranks: int, to: To = on_gpu) -> None:
    """Messages in torch's coalescing manager of a device are a batch; group methods without torch's functions work."""
    peer = rank ^ 1
    x, got = to(values(9000, rank)), to(torch.zeros(9000))
    with dist._coalescing_manager(device=torch.device("cuda"), async_ops=True) as cm:
        dist.isend(x, peer)
        dist.irecv(got, peer)
    cm.wait()
    assert same(got, values(9000, peer))
    group: Any = dist.group.WORLD
    if rank == 0:
        group.send([x], peer, 0).wait()
    else:
        work = group.recv([got], peer, 0)
        work.wait()
        assert work.source_rank() == -1
        assert work.get_future().wait()[0] is got
        assert same(got, values(9000, 0))
        assert work.is_completed(), "the host has seen what it brought"


def look_soon(call: Callable[[], Any], half: Any, times: int = 2) -> None:
    """Make a call some times, until what kernels have reported is raised."""
    for _ in range(times):
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        half.check()


def _differ(rank: int, x: torch.Tensor, tag: int, half: Any) -> None:
    """Rank 1 receives what does not fit; rank 0 sends until it has been told."""
    if rank:
        look_soon(lambda: dist.recv(x, 0, tag=tag), half, 1)
        raise AssertionError("not told")
    for _ in range(200):
        look_soon(lambda: dist.send(x, 1, tag=tag), half, 1)
        time.sleep(0.02)


def refusals(rank: int, num_ranks: int, to: To = on_gpu, half: Any = None) -> None:
    """Ends that differ are told at both; what is refused here has sent nothing; then all goes on."""
    half = half or give_messages()
    dist.send(to(values(3, 1)), 1) if rank == 0 else dist.recv(to(torch.zeros(3)), 0)
    cases = [
        ({"count": 3}, {"count": 4}, "bytes"),
        ({"count": 3, "tag": 1}, {"count": 3, "tag": 2}, "tag"),
        ({"count": 3}, {"count": 3, "dtype": torch.int32}, "dtype"),
        ({"count": 20_000}, {"count": 3}, "bytes"),
    ]
    for sent, wanted, word in cases:
        mine = wanted if rank else sent
        x = to(torch.ones(mine["count"], dtype=mine.get("dtype", torch.float32)))  # type: ignore[call-overload]
        tag = mine.get("tag", 0)
        with pytest.raises(epee.MismatchError, match=word):
            _differ(rank, x, tag, half)
        if rank == 0:
            dist.send(to(values(3000, 5)), 1)
        else:
            dist.recv(got := to(torch.zeros(3000)), 0)
            assert same(got, values(3000, 5))
    x = to(values(4, 2))
    if rank == 0:
        with pytest.raises(epee.InvalidArgument, match="overlap itself"):
            dist.recv(x[:1].expand(4), 1)
        bad = [dist.P2POp(dist.isend, x, 1), dist.P2POp(dist.irecv, x[:1].expand(4), 1)]
        with pytest.raises(epee.InvalidArgument, match="overlap itself"):
            dist.batch_isend_irecv(bad)
        dist.send(to(values(4, 9)), 1)
    else:
        dist.recv(got := to(torch.zeros(4)), 0)
        assert same(got, values(4, 9)), "the batch that was refused has sent nothing"
    half.check()
    dist.barrier()


def killed(rank: int, num_ranks: int, is_late: bool) -> float:
    """The last rank is killed; who waits for its message, or sends to it then, is told; the others' messages go on."""
    half = give_messages()
    last, x = num_ranks - 1, on_gpu(values(20_000, 1))
    batch([(r, (r + 1) % num_ranks, 20, r) for r in range(num_ranks)], rank, num_ranks, on_gpu)
    if rank == last:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    if is_late:
        time.sleep(1.0)
    with pytest.raises(epee.PeerError) as caught:
        look_soon(lambda: dist.recv(x, last) if rank == 0 else dist.send(x, last), half)
    assert caught.value.ranks == (last,)
    with pytest.raises(epee.PeerError):
        dist.send(on_gpu(values(4, 1)), last)
    elapsed = time.monotonic() - started
    batch([(0, 1, 5000, 4), (1, 0, 7, 5)], rank, num_ranks, on_gpu)
    with pytest.raises(epee.RankFailedError):
        dist.barrier()
    dist.barrier()  # in the view without it
    batch([(0, 1, 5000, 6), (1, 0, 7, 7)], rank, num_ranks, on_gpu)
    assert set(half._pairs.met) == {rank ^ 1}
    half.check()
    half.close(False)
    return elapsed


def masked_deaths(rank: int, num_ranks: int, folder: str, backend: str, passes: int) -> tuple[int, list[int]]:
    """The last rank is killed somewhere in its kernels; what came whole counts, what did not is told by its work.

    Returns how many of the dead rank's messages came, and whom the last work names.
    """
    options: Any = epee.BackendOptions(fault_mode="mask")
    if backend == "mooncake":
        options = mooncake.MooncakeBackendOptions(num_ranks)
    store = dist.FileStore(f"{folder}/store", num_ranks)
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, pg_options=options)
    half = give_messages(30.0)
    last, num_came, is_lost = num_ranks - 1, 0, False
    batch([(r, (r + 1) % num_ranks, 20, r) for r in range(num_ranks)], rank, num_ranks, on_gpu)
    if rank == last:
        platform: Any = half._pairs.machine.platform  # type: ignore[union-attr]
        platform.die_in("kernels/message/batch.cuh", passes)
        for number in range(10_000):
            ops = [dist.P2POp(dist.isend, on_gpu(values(900, number)), dst) for dst in range(last)]
            for work in dist.batch_isend_irecv(ops):
                work.wait()
    hint: list[int] = []
    for number in range(10_000):
        x, other = on_gpu(torch.zeros(900)), on_gpu(torch.zeros(500))
        made: Any = None
        try:
            made = dist.irecv(x, last)
            made.wait()
        except epee.PeerError as error:
            assert backend == "epee", "nothing is raised where losses are reported"
            if error.ranks != (last,):
                raise
        if made is None or not made.is_success():
            is_lost = True
            hint = [last] if made is None else sorted(made.lost_ranks())
            if backend == "mooncake":
                assert not mooncake.get_local_success(made)
                assert mooncake.get_failed_ranks_hint(made).tolist()[:num_ranks] == [0] * last + [1]
        else:
            assert same(x, values(900, number)), number
            assert not is_lost, "came behind a message that was lost"
            num_came += 1
        if is_lost:
            break
    for number in range(6):  # living pairs work on, also beside the dead in one batch
        x, other = on_gpu(values(500, number + rank)), on_gpu(torch.zeros(500))
        ops = [dist.P2POp(dist.isend, x, rank ^ 1), dist.P2POp(dist.irecv, other, rank ^ 1)]
        if backend == "mooncake" and number % 2:
            ops.insert(number % 3, dist.P2POp(dist.isend, x, last))
        works = dist.batch_isend_irecv(ops)
        for op, work in zip(ops, works, strict=True):
            work.wait()
            assert mooncake.get_local_success(work) == (op.peer != last), number
        assert same(other, values(500, number + (rank ^ 1))), number
    half.close(False)
    return num_came, hint


def shown_deaths(rank: int, num_ranks: int, folder: str, how: str) -> tuple[list[int], int, int]:
    """A message with a rank that is killed fails; return what shows when its `wait` returns."""
    active = torch.ones(num_ranks, dtype=torch.int32)
    store = dist.FileStore(f"{folder}/store", num_ranks)
    options: Any = mooncake.MooncakeBackendOptions(active)
    mooncake.set_fault_reconciliation_window_us(400_000)  # the members agree later than the kernels know
    dist.init_process_group("mooncake", store=store, rank=rank, world_size=num_ranks, pg_options=options)
    group: Any = dist.group.WORLD
    half = give_messages(30.0)
    last = num_ranks - 1
    plan = [(src, dst, 20, src) for src in range(num_ranks) for dst in range(num_ranks) if src != dst]
    batch(plan, rank, num_ranks, on_gpu)
    if rank == last:
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "late":  # the message is made when the death is known
        while not half._pairs.machine.device.is_marked(last):  # type: ignore[union-attr]
            time.sleep(0.001)
    if rank == 0 and how != "send":
        work: Any = dist.irecv(on_gpu(torch.zeros(900)), last)
    elif how == "batch":
        ops = [dist.P2POp(dist.irecv, on_gpu(torch.zeros(900)), last)]
        (work,) = dist.batch_isend_irecv(ops)
    else:
        work = dist.isend(on_gpu(torch.zeros(9000)), last)
    work.wait()
    seen = active.tolist(), dist.get_world_size(), mooncake.get_current_epoch(group)
    assert not mooncake.get_local_success(work)
    stages.meet(folder, "seen", rank, range(last))
    half.close(False)
    return seen


def late(rank: int, num_ranks: int) -> str:
    """A receive that gives up, and a send that comes then: both are told, and the pair works again."""
    half = give_messages(1.0)
    batch([(0, 1, 20, 1), (1, 0, 20, 2)], rank, num_ranks, on_gpu)
    told = ""
    if rank == 0:
        time.sleep(2.5)
    try:
        if rank == 0:
            look_soon(lambda: dist.send(on_gpu(values(20_000, 1)), 1), half, 1)
        else:
            look_soon(lambda: dist.recv(on_gpu(torch.zeros(20_000)), 0), half, 1)
    except epee.CommTimeoutError as error:
        told = str(error)
    half._engine.timeout_s = 60.0
    batch([(0, 1, 9000, 1), (1, 0, 9000, 2)], rank, num_ranks, on_gpu)
    with closed_at_end(half):
        pass
    return told


def no_memory(rank: int, num_ranks: int) -> None:
    """Where one end cannot, both take the way through CPU memory, and the other pairs do not."""
    device = _device()
    half = give_messages(is_staged=True)
    if rank == 1:

        def broken(device: torch.device) -> EmulatedPlatform:
            raise epee.ResourceError("no GPU memory is left")

        meetings.platform_of = broken
    for seed in range(2):
        for src, dst in ((0, 1), (1, 2), (0, 2)):
            if rank == src:
                dist.send(on_gpu(values(50, seed)), dst)
            elif rank == dst:
                dist.recv(got := on_gpu(torch.zeros(50)), src)
                device.synchronize()
                assert same(got, values(50, seed))
    assert set(half._pairs.met) == ({0: {2}, 1: set(), 2: {0}}[rank])
    assert set(half._pairs.off) == ({0: {1}, 1: {0, 2}, 2: {1}}[rank])
    dist.barrier()


def grown(rank: int, num_ranks: int, folder: str, is_early: bool) -> None:
    """A group that half of the ranks make, and the others extend; with `is_early` its first half has sent before."""
    size = num_ranks // 2
    group = grown_group(rank, num_ranks, folder)
    half = give_messages()
    if rank < size:
        if is_early:
            ring(rank, size, on_gpu)
            if rank == 0:
                dist.send(on_gpu(values(100, 3)), 1)  # lies in a ring while the group grows
        stages.reach(folder, "sent")
        group.extend_group_size_to(num_ranks, 60.0)
        if is_early and rank == 1:
            dist.recv(got := on_gpu(torch.zeros(100)), 0)
            assert same(got, values(100, 3))
    dist.all_reduce(torch.ones(1))
    grown_calls(rank, num_ranks, on_gpu)
    with closed_at_end(half):
        assert set(half._pairs.met) >= {*range(num_ranks)} - {rank}
        assert not half._pairs.off


def grown_group(rank: int, num_ranks: int, folder: str) -> Any:
    """Make a group of half of the ranks, which the others join when that calls `extend_group_size_to`."""
    size = num_ranks // 2
    is_new = rank >= size
    if is_new:
        stages.wait_for(folder, "sent", 150.0)  # the others build kernels
    options = epee.BackendOptions(is_extension=is_new)
    store = dist.FileStore(f"{folder}/store", -1)
    dist.init_process_group(
        "epee", store=store, rank=rank, world_size=num_ranks if is_new else size, pg_options=options
    )
    return dist.group.WORLD


def ring(rank: int, num_ranks: int, to: To) -> None:
    """Messages of some sizes around the ranks."""
    for count in (1, 500, 20_000):
        batch([(r, (r + 1) % num_ranks, count, r) for r in range(num_ranks)], rank, num_ranks, to)


def grown_calls(rank: int, num_ranks: int, to: To) -> None:
    """Messages between all ranks of a group that has grown: batches, single ones, and from any source."""
    ring(rank, num_ranks, to)
    batch([(src, dst, 30, src * 20 + dst) for src in range(num_ranks) for dst in range(num_ranks)], rank, num_ranks, to)
    any_source(rank, num_ranks, to)
    first, last = 0, num_ranks - 1
    if rank in (first, last):
        for count in (3, 40_000):
            if rank == first:
                dist.send(to(values(count, 1)), last)
            else:
                dist.recv(got := to(torch.zeros(count)), first)
                assert same(got, values(count, 1))


def first_never_comes(rank: int, num_ranks: int) -> str:
    """Who waits for a peer's first message gives up after the time-out, and may try again."""
    half = give_messages()
    told = ""
    if rank == 0:
        half._engine.timeout_s = 0.5
        with pytest.raises(epee.CommTimeoutError, match="has not come to its first message") as caught:
            dist.send(on_gpu(values(4, 1)), 1)
        told = str(caught.value)
    half._engine.timeout_s = 60.0
    dist.barrier()
    if rank == 0:
        dist.send(on_gpu(values(4, 1)), 1)
    else:
        dist.recv(got := on_gpu(torch.zeros(4)), 0)
        assert same(got, values(4, 1))
    with closed_at_end(half):
        pass
    return told
