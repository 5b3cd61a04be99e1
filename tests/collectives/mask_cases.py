"""Groups in mode "mask" whose calls on "GPU" tensors run the kernels' own sources in the calling process."""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import epee
import epee.compat.mooncake.pg as mooncake
from epee.backend.cuda import half as halves
from epee.backend.cuda import meeting
from tests.backend.test_staging import CALLS, _call, _plain, on_gpu
from tests.collectives.cases import CountedCalls, again, closed_at_end, give_half, look_soon
from tests.csrc.collective_mask import LARGE_FILE

LARGE = 40_000  # elements of a row that packets do not hold here
SMALL = 24
NUM_WHOLE = 3  # rounds of `dies_within` in front of the death


def init(rank: int, num_ranks: int, folder: str, backend: str = "epee", **options: Any) -> halves.DeviceHalf:
    """Make the world, in mode "mask"."""
    chosen: Any = epee.BackendOptions(fault_mode="mask", **options)
    if backend == "mooncake":
        chosen = mooncake.MooncakeBackendOptions(options.get("active_ranks", num_ranks))
    store = dist.FileStore(f"{folder}/store", num_ranks)
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, pg_options=chosen)
    dist.group.WORLD.waits_for_streams = False  # type: ignore[union-attr] # there are none
    return give_half(rank)


def same_as_cpu(rank: int, num_ranks: int, folder: str, backend: str) -> None:
    """Every call, sync and async, small and large, has the results of CPU tensors."""
    with closed_at_end(init(rank, num_ranks, folder, backend)):
        for name, is_async in itertools.product(CALLS, (False, True)):
            _, wanted = _call(name, rank, num_ranks, torch.clone, False)
            work, got = _call(name, rank, num_ranks, on_gpu, is_async)
            if is_async:
                assert work.wait()
                assert work.is_success()
                assert work.contributors() == set(range(num_ranks))
            for one, other in zip(got, wanted, strict=True):
                assert torch.equal(_plain(one), other), (name, is_async)
            assert dist.group.WORLD.last_contributors() == tuple(range(num_ranks)), name  # type: ignore[union-attr]
        for count in (SMALL, LARGE, SMALL):
            check_calls(rank, num_ranks, range(num_ranks), count)


def row_of(rank: int, count: int) -> torch.Tensor:
    """What a rank brings; sums are exact."""
    return (torch.arange(count) * (rank + 3) + count) % 101 + 1.0


def check_calls(rank: int, num_ranks: int, members: Any, count: int, size: int = 0) -> None:
    """One call of each kind among `members`, in lists of `size`; rows of others stay as they are, or become zeros."""
    group: Any = dist.group.WORLD
    zeroes, size = group.options.counts_present, size or num_ranks
    rows = [row_of(src, count * num_ranks) for src in range(num_ranks)]
    mine, n = slice(count * rank, count * (rank + 1)), count
    x, wide, out = on_gpu(rows[rank][:n]), on_gpu(rows[rank][: n * size]), on_gpu(torch.zeros(n))
    many = on_gpu(torch.full((n * size,), -1.0))
    absent = torch.zeros(n) if zeroes else torch.full((n,), -1.0)
    dist.all_reduce(x)
    assert torch.equal(_plain(x), sum(rows[src][:n] for src in members))  # type: ignore[arg-type]
    dist.reduce_scatter_tensor(out, wide)
    assert torch.equal(_plain(out), sum(rows[src][mine] for src in members))  # type: ignore[arg-type]
    dist.all_to_all_single(many, wide)
    want = torch.cat([rows[src][mine] if src in members else absent for src in range(size)])
    assert torch.equal(_plain(many), want)
    dist.all_gather_into_tensor(many, on_gpu(rows[rank][:n]))
    want = torch.cat([rows[src][:n] if src in members else absent for src in range(size)])
    assert torch.equal(_plain(many), want)
    dist.broadcast(x, min(members))
    dist.reduce(x, min(members))
    assert group.last_contributors() == tuple(members)


def killed(rank: int, num_ranks: int, folder: str, backend: str, victim: int, is_large: bool) -> list[int]:
    """A rank is killed; the call that meets it succeeds on all others, and so do those behind it."""
    mask = (
        on_gpu(torch.ones(num_ranks, dtype=torch.int32)) if not is_large else torch.ones(num_ranks, dtype=torch.int32)
    )
    half = init(rank, num_ranks, folder, backend, active_ranks=mask)
    group: Any = dist.group.WORLD
    count = LARGE if is_large else SMALL
    check_calls(rank, num_ranks, range(num_ranks), count)
    if rank == victim:
        time.sleep(random.random() * 0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    left = [src for src in range(num_ranks) if src != victim]
    for number in range(3):
        work = dist.all_reduce(x := on_gpu(row_of(rank, count)), async_op=True)
        assert work is not None
        assert work.wait()
        assert torch.equal(_plain(x), sum(row_of(src, count) for src in left)), number  # type: ignore[arg-type]
        assert _plain(mask).tolist() == [int(src != victim) for src in range(num_ranks)], number
        assert group.active_ranks().tolist()[:num_ranks] == [int(src != victim) for src in range(num_ranks)]
        assert group.last_contributors() == tuple(left)
        assert work.contributors() == set(left)
        if number == 0:
            assert work.lost_ranks() == {victim}
    size = group.size()
    check_calls(rank, num_ranks, left, count, size)
    dist.all_reduce(z := torch.ones(2))  # CPU tensors, too, by which the view follows
    assert z.tolist() == [len(left)] * 2
    size = group.size()
    for n in (SMALL, LARGE, SMALL):
        check_calls(rank, num_ranks, left, n, size)
    assert not half._off
    dist.barrier()
    half.close(False)
    return mask.as_subclass(torch.Tensor).tolist()  # type: ignore[no-any-return]


def early_list(rank: int, num_ranks: int, folder: str) -> list[float]:
    """The last rank dies while the others call with lists that have no place for it; then one whose list is wrong."""
    half = init(rank, num_ranks, folder, "mooncake")
    check_calls(rank, num_ranks, range(num_ranks), SMALL)
    if rank == num_ranks - 1:
        threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
        time.sleep(60)
    outs = [on_gpu(torch.full((SMALL,), -1.0)) for _ in range(num_ranks - 1)]
    dist.all_gather(outs, on_gpu(row_of(rank, SMALL)))
    for src, out in enumerate(outs):
        assert torch.equal(_plain(out), row_of(src, SMALL))
    half._engine.timeout_s = 1.0
    if rank == num_ranks - 2:
        with pytest.raises(epee.InvalidArgument, match="one tensor per rank"):
            dist.all_gather([on_gpu(torch.zeros(SMALL)) for _ in range(num_ranks + 2)], on_gpu(torch.zeros(SMALL)))
    else:
        out = on_gpu(torch.zeros(SMALL * (num_ranks - 2)))  # one that lives has no place
        with pytest.raises(epee.InvalidArgument, match="must have"):
            dist.all_gather_into_tensor(out, on_gpu(torch.zeros(SMALL)))
    half._engine.timeout_s = 60.0
    check_calls(rank, num_ranks, range(num_ranks - 1), SMALL, num_ranks - 1)
    dist.barrier()
    half.close(False)
    return [float(_plain(out)[0]) for out in outs]


def leaves(rank: int, num_ranks: int, folder: str) -> None:
    """A rank that leaves in order is as one that has died, at once."""
    half = init(rank, num_ranks, folder)
    check_calls(rank, num_ranks, range(num_ranks), SMALL)
    if rank == 1:
        dist.destroy_process_group()
        time.sleep(3)
        return
    left = [src for src in range(num_ranks) if src != 1]
    started = time.monotonic()
    check_calls(rank, num_ranks, left, SMALL)
    dist.all_reduce(torch.ones(1))
    check_calls(rank, num_ranks, left, LARGE)
    check_calls(rank, num_ranks, left, SMALL)
    assert time.monotonic() - started < 50, "not by the time-out"
    dist.barrier()
    half.close(False)


def silent(rank: int, num_ranks: int, folder: str, count: int) -> str:
    """A rank that lives and stays away: an error of the call; the next one votes it out, and calls go on without it."""
    half = init(rank, num_ranks, folder)
    check_calls(rank, num_ranks, range(num_ranks), SMALL)
    if rank == num_ranks - 1:
        time.sleep(9)
        return "away"
    half._engine.timeout_s = 1.5
    left = list(range(num_ranks - 1))
    told = ""
    try:
        dist.all_reduce(x := on_gpu(row_of(rank, count)))
        half.check()
        assert torch.equal(_plain(x), sum(row_of(src, count) for src in left))  # type: ignore[arg-type]
    except epee.CommTimeoutError as error:
        told = str(error)
    check_calls(rank, num_ranks, left, SMALL)
    check_calls(rank, num_ranks, left, LARGE)
    half._engine.timeout_s = 60.0
    dist.barrier()
    half.close(False)
    return told


def other_calls(rank: int, num_ranks: int, folder: str) -> None:
    """Refused calls, and calls that differ, are errors on all, and outputs of large ones are as they were."""
    half = init(rank, num_ranks, folder)
    check_calls(rank, num_ranks, range(num_ranks), SMALL)
    for count in (SMALL, LARGE):
        x = on_gpu(torch.ones(count, dtype=torch.float64 if rank else torch.float32))
        with pytest.raises(epee.MismatchError, match="ranks disagree"):
            look_soon(lambda: dist.all_reduce(x), half)  # noqa: B023
        if count == LARGE:
            assert bool((_plain(x) == 1).all())
        check_calls(rank, num_ranks, range(num_ranks), count)
    y = on_gpu(torch.ones(4)) if rank else on_gpu(torch.ones(1)).expand(4)
    with pytest.raises((epee.InvalidArgument, epee.MismatchError)):
        look_soon(lambda: dist.all_reduce(y), half)
    with closed_at_end(half):
        check_calls(rank, num_ranks, range(num_ranks), SMALL)


def recorded(rank: int, num_ranks: int, folder: str) -> None:
    """Rows of all sizes may be recorded in a graph: no host meets another, or waits for its GPU."""
    half = init(rank, num_ranks, folder)
    check_calls(rank, num_ranks, range(num_ranks), SMALL)
    platform: Any = half._machine.platform  # type: ignore[union-attr]
    platform.is_capturing = lambda: True
    seq, waits = half._engine.seq, ("is_done", "synchronize", "mark")
    before = {name: getattr(platform, name) for name in waits}
    for name in waits:
        setattr(platform, name, lambda *args: pytest.fail("the host waits"))
    sizes = [2 * LARGE] + [LARGE] * (num_ranks - 1)
    sent, out = on_gpu(torch.ones(sum(sizes))), on_gpu(torch.zeros(sizes[rank] * num_ranks))
    for count in (SMALL, LARGE):
        dist.all_reduce(x := on_gpu(torch.ones(count)))
        assert _plain(x).tolist() == [num_ranks] * count
    dist.all_to_all_single(out, sent, [sizes[rank]] * num_ranks, sizes)
    assert bool((_plain(out) == 1).all())
    assert half._engine.seq == seq
    for name, usual in before.items():
        setattr(platform, name, usual)
    platform.is_capturing = lambda: False
    with closed_at_end(half):
        check_calls(rank, num_ranks, range(num_ranks), SMALL)


def lost_root(rank: int, num_ranks: int, folder: str, backend: str, count: int) -> str:
    """A call whose root is dead: raised, or told by its work; the group works on."""
    half = init(rank, num_ranks, folder, backend)
    group: Any = dist.group.WORLD
    check_calls(rank, num_ranks, range(num_ranks), SMALL)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    told = ""
    for _ in range(2):
        try:
            work = dist.broadcast(on_gpu(torch.ones(count)), 1, async_op=True)
            assert work is not None
            work.wait()
            half.check()
            if work.exception() is not None:
                told = f"told: {type(work.exception()).__name__}"
        except epee.RankFailedError as error:
            told = f"raised without {error.ranks}"
        if told:
            break
    left = [src for src in range(num_ranks) if src != 1]
    check_calls(rank, num_ranks, left, SMALL, group.size())
    check_calls(rank, num_ranks, left, LARGE, group.size())
    dist.barrier()
    half.close(False)
    return told


def made_again(rank: int, num_ranks: int, folder: str, count: int) -> list[int]:
    """Calls that look like earlier ones, see `cases.again`."""
    init(rank, num_ranks, folder)
    return again(rank, num_ranks, count)


def no_room_for_a_copy(rank: int, num_ranks: int, folder: str) -> None:
    """A rank that has no memory for the copy of a sum in place: an error on all, also of a call that is known."""
    half = init(rank, num_ranks, folder)
    check_calls(rank, num_ranks, range(num_ranks), SMALL)

    def broken(tensor: torch.Tensor, **options: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("no GPU memory is left")

    for num_before in (0, 4):
        for _ in range(num_before):
            dist.all_reduce(x := on_gpu(torch.ones(LARGE)))
            assert bool((_plain(x) == num_ranks).all())
        x = on_gpu(torch.ones(LARGE))
        if rank == 0:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(torch, "empty_like", broken)
                with pytest.raises(torch.OutOfMemoryError, match="no GPU memory is left"):
                    dist.all_reduce(x)
        else:
            with pytest.raises(epee.MismatchError, match="rank 0"):
                look_soon(lambda: dist.all_reduce(x), half)  # noqa: B023
        assert bool((_plain(x) == 1).all())
        check_calls(rank, num_ranks, range(num_ranks), LARGE)
    with closed_at_end(half):
        pass


def dies_behind(rank: int, num_ranks: int, folder: str, count: int) -> None:
    """A rank that dies behind a call is in it, whenever its work is asked."""
    half = init(rank, num_ranks, folder)
    group: Any = dist.group.WORLD
    everybody, left = set(range(num_ranks)), set(range(num_ranks - 1))
    works = [dist.all_reduce(on_gpu(row_of(rank, count)), async_op=True) for _ in range(5)]
    assert group.last_contributors() == tuple(everybody)
    dist.barrier()
    if rank == num_ranks - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    works.append(dist.all_reduce(on_gpu(row_of(rank, count)), async_op=True))
    assert group.last_contributors() == tuple(left)
    told = [(work.contributors(), work.lost_ranks()) for work in works if work is not None and work.wait()]
    assert told == [(everybody, set())] * 5 + [(left, {num_ranks - 1})]
    dist.barrier()
    half.close(False)


def dies_within(rank: int, num_ranks: int, folder: str, place: int, passes: int) -> tuple[list[Any], int]:
    """A rank dies somewhere in large calls that look like earlier ones: who is in each says its work as the group.

    Args:
        place, passes: where, as in `EmulatedPlatform.die_in`.

    Returns who was in each call, and how many went the short way.
    """
    meeting.KnownCalls = CountedCalls  # type: ignore[misc]
    half = init(rank, num_ranks, folder)
    group: Any = dist.group.WORLD
    victim, mine = num_ranks - 1, slice(LARGE * rank, LARGE * (rank + 1))
    found: list[Any] = []
    for number in range(NUM_WHOLE + 6):
        if number == NUM_WHOLE and rank == victim:
            platform: Any = half._machine.platform  # type: ignore[union-attr]
            platform.die_in(LARGE_FILE, passes, place)
        rows = [row_of(src, LARGE * num_ranks) + number for src in range(num_ranks)]
        x, wide = on_gpu(rows[rank][:LARGE]), on_gpu(rows[rank])
        for way in ("all_reduce", "reduce_scatter"):
            before = set(range(num_ranks)) - set(half.lost())
            if way == "all_reduce":
                work = dist.all_reduce(x, async_op=True)
            else:
                work = dist.reduce_scatter_tensor(wide[mine], wide, async_op=True)
            assert work is not None
            assert work.wait()
            there = group.last_contributors()
            part, got = (slice(LARGE), x) if way == "all_reduce" else (mine, wide[mine])
            assert torch.equal(_plain(got), sum(rows[src][part] for src in there)), (number, way, there)  # type: ignore[arg-type]
            assert work.contributors() == set(there)
            assert work.lost_ranks() == before - set(there)
            found.append(there)
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    short = half._again[True]
    assert isinstance(short, CountedCalls)
    dist.all_reduce(torch.ones(1))
    dist.barrier()
    half.close(False)
    return found, short.num_made
