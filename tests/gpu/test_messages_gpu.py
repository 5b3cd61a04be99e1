"""Messages of the backend between real GPUs: bytes, streams, graphs, failures.

Ranks share a GPU where there are few.
"""

from __future__ import annotations

import os
import random
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import epee
import epee.compat.mooncake.pg as mooncake
from tests.harness import DEAD, run_mortal, run_ranks
from tests.messages import cases
from tests.survive import stages

pytestmark = [pytest.mark.gpu(1), pytest.mark.timeout(240)]


def _begin(rank: int, timeout_s: float = 60.0) -> tuple[torch.device, Any]:
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    group: Any = dist.group.WORLD
    group.set_timeout(timedelta(seconds=timeout_s))
    assert group._messages is not None
    return device, group._messages


def _end(half: Any) -> None:
    torch.cuda.synchronize()
    half.check()
    assert half._pairs.met, "nothing went from GPU to GPU"
    assert not half._pairs.off, half._pairs.off
    dist.barrier()


def _play(rank: int, num_ranks: int, name: str) -> None:
    device, half = _begin(rank)
    to = lambda x: x.to(device)  # noqa: E731
    if name == "blocking":
        cases.blocking(rank, num_ranks, to, (0, 1, 7, 300, 65_537, 1_048_579, 9_000_001))
    elif name == "batches":
        cases.batches(rank, num_ranks, to, scale=100, how_many=40)
    elif name == "any":
        cases.any_source(rank, num_ranks, to)
    elif name == "manager":
        cases.manager(rank, num_ranks, to)
    else:
        cases.refusals(rank, num_ranks, to, half)
    _end(half)


@pytest.mark.parametrize(
    ("name", "num_ranks"),
    [("blocking", 2), ("batches", 2), ("batches", 3), ("batches", 4), ("any", 3), ("manager", 2), ("refusals", 2)],
)
def test_messages_do_what_they_do_on_cpu_tensors(name: str, num_ranks: int) -> None:
    run_ranks(_play, num_ranks, name, backend="epee", timeout_s=220)


def _huge(rank: int, num_ranks: int) -> None:
    device, half = _begin(rank)
    count = (1 << 31) + 4099
    x = torch.full((count,), 3, dtype=torch.uint8, device=device)
    if rank == 0:
        x[-1], x[1 << 31] = 9, 7
        dist.send(x, 1)
    else:
        dist.recv(x.fill_(0), 0)
        assert int(x[-1]) == 9
        assert int(x[1 << 31]) == 7
        x[-1] = x[1 << 31] = 3
        assert bool((x == 3).all())
    _end(half)


@pytest.mark.gpu(2)
def test_more_than_two_to_the_31_bytes() -> None:
    run_ranks(_huge, 2, backend="epee", timeout_s=220)


def _asynchronous(rank: int, num_ranks: int) -> None:
    """isend and irecv in any order, above the ring, on streams that are busy, without a host that waits."""
    device, half = _begin(rank)
    peer, pick = rank ^ 1, random.Random(rank)
    cases.batch([(0, 1, 5, 1), (1, 0, 5, 2)], rank, num_ranks, lambda x: x.to(device))
    streams = [torch.cuda.Stream(device) for _ in range(2)]
    torch.cuda._sleep(1000)  # what is used for the first time may wait for the GPU
    assert bool((torch.full((4_000_000,), 1.0, device=device) == 1.0).all())
    for number in range(30):
        found, works = [], []
        torch.cuda._sleep(2_000_000)
        for n in range(4):
            seed = number * 10 + n
            count = random.Random(seed).choice((10, 3000, 4_000_000))  # as the peer's
            with torch.cuda.stream(streams[pick.randrange(2)]):
                x = torch.full((count,), float(seed + rank), device=device)
                got = torch.full((count,), -1.0, device=device)
                calls = [lambda x=x: dist.isend(x, peer), lambda got=got: dist.irecv(got, peer)]
                if pick.random() < 0.5:
                    calls.reverse()
                works += [call() for call in calls]
                del x  # the allocator must keep it
                found.append((got, float(seed + peer)))
        for work in works:
            work.wait()
        for got, wanted in found:
            assert bool((got == wanted).all()), (number, wanted)
    _end(half)


@pytest.mark.gpu(2)
def test_isend_and_irecv_in_any_order_on_busy_streams() -> None:
    run_ranks(_asynchronous, 2, backend="epee", timeout_s=220)


def _no_host_wait(rank: int, num_ranks: int) -> None:
    """The host goes on while the GPU is busy in front of a message, and while the peer has not come."""
    device, half = _begin(rank)
    peer = rank ^ 1
    for is_first in (True, False):  # what is used for the first time may wait for the GPU
        x, got = torch.ones(1 << 20, device=device), torch.zeros(1 << 20, device=device)
        torch.cuda.synchronize()
        dist.barrier()
        busy = torch.cuda.Event()
        torch.cuda._sleep(1000 if is_first else 1_000_000_000)
        busy.record()
        ops = [dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, got, peer)]
        works = dist.batch_isend_irecv(ops)
        for work in works:
            work.wait()
        if rank == 0:
            dist.send(x, peer)
        else:
            dist.recv(got, peer)
        assert is_first or not busy.query(), "a message has waited for the GPU"
        torch.cuda.synchronize()
        assert all(work.is_completed() for work in works)
        assert bool((got == 1).all())
    _end(half)


@pytest.mark.gpu(2)
def test_the_host_waits_for_nobody() -> None:
    run_ranks(_no_host_wait, 2, backend="epee", timeout_s=200)


def _graphs(rank: int, num_ranks: int) -> None:
    device, half = _begin(rank)
    peer = rank ^ 1
    x, got, back = (torch.zeros(count, device=device) for count in (100_000, 100_000, 100_000))
    to = lambda tensor: tensor.to(device)  # noqa: E731
    cases.batch([(0, 1, 5, 1), (1, 0, 5, 2)], rank, num_ranks, to)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops = [dist.P2POp(dist.irecv, got, peer, tag=1), dist.P2POp(dist.isend, x, peer, tag=1)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        if rank == 0:
            dist.send(got, peer)
            dist.recv(back, peer)
        else:
            dist.recv(back, peer)
            dist.send(got, peer)
    for seed in range(20):
        x.fill_(10.0 * seed + rank)
        graph.replay()
        assert bool((got == 10.0 * seed + peer).all()), seed
        assert bool((back == 10.0 * seed + rank).all()), seed
        if seed % 3 == 0:
            cases.batch([(0, 1, 70_000, seed), (1, 0, 9, seed)], rank, num_ranks, to)
    with pytest.raises(epee.UnsupportedError, match="any source"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        dist.irecv(x)
    _end(half)


@pytest.mark.gpu(2)
def test_graphs_replay_on_new_values() -> None:
    run_ranks(_graphs, 2, backend="epee", timeout_s=200)


def _killed(rank: int, num_ranks: int, count: int) -> float:
    device, half = _begin(rank)
    last, to = num_ranks - 1, lambda x: x.to(device)
    cases.batch([(r, (r + 1) % num_ranks, 20, r) for r in range(num_ranks)], rank, num_ranks, to)
    if rank == last:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    x = torch.zeros(count, device=device)
    with pytest.raises(epee.PeerError) as caught:
        cases.look_soon(lambda: dist.recv(x, last), half)
    assert caught.value.ranks == (last,)
    elapsed = time.monotonic() - started - 0.3
    if num_ranks > 2:
        cases.batch([(0, 1, 50_000, 3), (1, 0, 2_000_000, 4)], rank, num_ranks, to)
    torch.cuda.synchronize()
    half.check()
    return elapsed


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_who_waits_for_a_dead_rank_is_told_and_the_context_lives(num_ranks: int) -> None:
    results = run_ranks(_killed, num_ranks, 5_000_000, backend="epee", timeout_s=200, dead=(num_ranks - 1,))
    print("seconds from kill to error:", [round(result, 4) for result in results[:-1]])
    assert all(elapsed < 20 for elapsed in results[:-1]), "long before the time-out of 60 s"


def _grown(rank: int, num_ranks: int, folder: str) -> None:
    size = num_ranks // 2
    group = cases.grown_group(rank, num_ranks, folder)
    device, half = _begin(rank, 100.0)
    to = lambda x: x.to(device)  # noqa: E731
    if rank < size:
        cases.ring(rank, size, to)
        torch.cuda.synchronize()
        stages.reach(folder, "sent")
        group.extend_group_size_to(num_ranks, 100.0)
    dist.all_reduce(torch.ones(1))
    cases.grown_calls(rank, num_ranks, to)
    _end(half)


@pytest.mark.parametrize("num_ranks", [4, 12])
def test_a_group_that_has_grown_sends_from_gpu_to_gpu(num_ranks: int) -> None:
    run_mortal(_grown, num_ranks, dead=set(), timeout_s=200)


def _masked(rank: int, num_ranks: int, folder: str) -> list[int]:
    """Mooncake's names: what meets the dead raises nothing and is told by its work; the others' messages go on."""
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    options: Any = mooncake.MooncakeBackendOptions(num_ranks)
    store = dist.FileStore(f"{folder}/store", num_ranks)
    dist.init_process_group("mooncake", store=store, rank=rank, world_size=num_ranks, pg_options=options)
    half: Any = dist.group.WORLD._messages  # type: ignore[union-attr]
    last, to = num_ranks - 1, lambda x: x.to(device)
    cases.batch([(r, (r + 1) % num_ranks, 20, r) for r in range(num_ranks)], rank, num_ranks, to)
    if rank == last:
        for dst in range(last):
            dist.send(torch.full((1000,), 5.0, device=device), dst)
        torch.cuda.synchronize()
        os.kill(os.getpid(), signal.SIGKILL)
    came, never = torch.zeros(1000, device=device), torch.zeros(5_000_000, device=device)
    first, second = dist.irecv(came, last), dist.irecv(never, last)
    assert not mooncake.get_local_success(second)
    assert mooncake.get_local_success(first), "what was sent before the death counts"
    assert bool((came == 5).all())
    hint: list[int] = mooncake.get_failed_ranks_hint(second).tolist()
    for number in range(20):
        x, got = torch.full((70_000,), float(number + rank), device=device), torch.zeros(70_000, device=device)
        ops = [dist.P2POp(dist.isend, x, rank ^ 1), dist.P2POp(dist.irecv, got, rank ^ 1)]
        if number % 2:
            ops.insert(number % 3, dist.P2POp(dist.isend, x, last))
        for op, work in zip(ops, dist.batch_isend_irecv(ops), strict=True):
            work.wait()
            assert mooncake.get_local_success(work) == (op.peer != last), number
        assert bool((got == number + (rank ^ 1)).all()), number
    torch.cuda.synchronize()
    half.check()
    return hint


def test_in_mode_mask_a_dead_end_is_told_by_the_work_and_living_pairs_go_on() -> None:
    assert run_mortal(_masked, 3, dead={2}, timeout_s=200) == [[0, 0, 1], [0, 0, 1], DEAD]
