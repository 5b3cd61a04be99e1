"""Collectives of the backend on GPU tensors, on real GPUs: bits, streams, graphs, failures.

Ranks share a GPU where there are fewer GPUs than ranks.
"""

from __future__ import annotations

import functools
import logging
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
from epee.backend.cuda import meeting
from epee.backend.cuda.machine import Collectives
from tests.backend.test_staging import CALLS, _call
from tests.collectives import cases
from tests.harness import run_mortal, run_ranks
from tests.messages import cases as message_cases
from tests.survive import stages

pytestmark = [pytest.mark.gpu(1), pytest.mark.timeout(240)]
STALL_ONE_IN = 24
SIZES = (0, 1, 7, 1023, 65_537, 131_072, (1 << 20) + 3, 9_000_001)  # elements of a row, of two bytes


def _begin(rank: int, timeout_s: float = 60.0) -> tuple[torch.device, Any]:
    """Take a GPU; returns it and the group, whose calls run on the device from now on."""
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    group: Any = dist.group.WORLD
    group.set_timeout(timedelta(seconds=timeout_s))
    dist.all_reduce(torch.ones(1, device=device))
    assert group._on_device is not None
    assert not group._on_device._off, group._on_device._off
    assert group._on_device._machine is not None
    return device, group._on_device


def _same_as_cpu(rank: int, num_ranks: int) -> None:
    device, half = _begin(rank)
    for name in CALLS:
        for is_async in (False, True):
            _, wanted = _call(name, rank, num_ranks, torch.clone, False)
            work, got = _call(name, rank, num_ranks, lambda x: x.to(device), is_async)
            if is_async:
                assert work.wait()
            for one, other in zip(got, wanted, strict=True):
                assert torch.equal(one.cpu(), other), (name, is_async)
    half.check()
    cases.reductions(rank, num_ranks, lambda x: x.to(device), cases.SOME)
    for scale in (1, 70_000):
        cases.uneven(rank, num_ranks, lambda x: x.to(device), scale)
    half.check()
    dist.barrier()


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_every_collective_has_the_bits_of_cpu_tensors(num_ranks: int) -> None:
    run_ranks(_same_as_cpu, num_ranks, backend="epee", timeout_s=220)


def _rows(num_ranks: int, count: int, seed: int, device: torch.device) -> list[torch.Tensor]:
    gen = torch.Generator(device=device).manual_seed(seed)
    return [torch.randn(count, generator=gen, device=device).bfloat16() for _ in range(num_ranks)]


def _sum(rows: list[torch.Tensor]) -> torch.Tensor:
    total = rows[0].float()
    for row in rows[1:]:
        total = total + row.float()
    return total.bfloat16()


def _one_call(rank: int, num_ranks: int, op: str, count: int, seed: int, device: torch.device) -> tuple[Any, Any]:
    """Queue a call; returns what it writes and what it must be."""
    mine = slice(count * rank, count * (rank + 1))
    is_wide = op in ("reduce_scatter", "all_to_all")
    rows = _rows(num_ranks, count * (num_ranks if is_wide else 1), seed, device)
    x, root = rows[rank].clone(), seed % num_ranks
    if op == "all_reduce":
        dist.all_reduce(x)
        return x, _sum(rows)
    if op == "reduce":
        dist.reduce(x, root)
        return x, _sum(rows) if rank == root else rows[rank]
    if op == "broadcast":
        dist.broadcast(x, root)
        return x, rows[root]
    out = torch.full((count * (1 if is_wide and op[0] == "r" else num_ranks),), -1.0, device=device).bfloat16()
    if op == "all_gather":
        dist.all_gather_into_tensor(out, x)
        return out, torch.cat(rows)
    if op == "reduce_scatter":
        dist.reduce_scatter_tensor(out, x)
        return out, _sum([row[mine] for row in rows])
    dist.all_to_all_single(out, x)
    return out, torch.cat([row[mine] for row in rows])


OPS = ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all")


def _sizes(rank: int, num_ranks: int) -> None:
    device, half = _begin(rank)
    for seed, (op, count) in enumerate((op, count) for op in OPS for count in SIZES):
        out, wanted = _one_call(rank, num_ranks, op, count, seed, device)
        assert torch.equal(out.view(torch.int16), wanted.view(torch.int16)), (op, count)
    x = torch.arange(12.0, device=device).view(3, 4)
    dist.all_reduce(x.t())
    dist.all_reduce(x[:, ::2])
    wanted = torch.arange(12.0, device=device).view(3, 4) * num_ranks
    wanted[:, ::2] *= num_ranks
    assert torch.equal(x, wanted)
    half.check()


def test_every_size_has_the_bits_of_torch() -> None:
    run_ranks(_sizes, 2, backend="epee", timeout_s=220)


def _huge(rank: int, num_ranks: int) -> None:
    device, half = _begin(rank)
    count = (1 << 31) + 4099
    x = torch.full((count,), rank + 1, dtype=torch.uint8, device=device)
    x[-1] = 7 + rank
    dist.all_reduce(x)
    assert int(x[-1]) == 15
    assert bool((x[:-1] == 3).all())
    x.fill_(rank)
    dist.broadcast(x, 1)
    assert bool((x == 1).all())
    half.check()


@pytest.mark.gpu(2)
def test_more_than_two_to_the_31_bytes() -> None:
    run_ranks(_huge, 2, backend="epee", timeout_s=220)


def _huge_rows(rank: int, num_ranks: int) -> None:
    """Rows that are short of 2^31 bytes, of outputs and inputs that are not."""
    device, half = _begin(rank)
    count = (1 << 30) + 4099
    whole = torch.full((num_ranks * count,), 9, dtype=torch.uint8, device=device)
    row = torch.full((count,), rank + 1, dtype=torch.uint8, device=device)
    dist.all_gather_into_tensor(whole, row)
    for src in range(num_ranks):
        assert bool((whole[src * count : (src + 1) * count] == src + 1).all())
    dist.reduce_scatter_tensor(row, whole)
    assert bool((row == num_ranks * (rank + 1)).all())
    whole[:count].fill_(10 * rank)
    whole[count:].fill_(10 * rank + 1)
    other = torch.zeros_like(whole)
    dist.all_to_all_single(other, whole)
    for src in range(num_ranks):
        assert bool((other[src * count : (src + 1) * count] == 10 * src + rank).all())
    half.check()


@pytest.mark.gpu(2)
def test_outputs_of_more_than_two_to_the_31_bytes() -> None:
    run_ranks(_huge_rows, 2, backend="epee", timeout_s=220)


def _one_visible(rank: int, num_ranks: int) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)  # before anything of CUDA is in use in this process
    assert torch.cuda.device_count() == 1
    device, half = _begin(rank)
    for seed, (op, count) in enumerate((op, count) for op in OPS for count in (7, 70_000, 1_000_003)):
        out, wanted = _one_call(rank, num_ranks, op, count, seed, device)
        assert torch.equal(out.view(torch.int16), wanted.view(torch.int16)), (op, count)
    half.check()
    plan = [(0, 1, 3_000_000, 1), (1, 0, 3_000_000, 2), (0, 1, 5, 3)]
    message_cases.batch(plan, rank, num_ranks, lambda x: x.to(device))
    group: Any = dist.group.WORLD
    group._messages.check()
    assert set(group._messages._pairs.met) == {rank ^ 1}
    dist.barrier()


@pytest.mark.gpu(2)
def test_each_process_sees_one_gpu_only() -> None:
    run_ranks(_one_visible, 2, backend="epee", timeout_s=200)


def _random(rank: int, num_ranks: int, how_many: int, stall_one_in: int) -> None:
    """Calls in random order on two streams, some behind work that takes its time, and looked at only at the end.

    One in `stall_one_in` places of warps stands still for up to 20 us (`csrc/common/stall.cuh`).
    """
    pytest.MonkeyPatch().setattr(meeting, "Collectives", functools.partial(Collectives, stall_one_in=stall_one_in))
    device, half = _begin(rank)
    assert half._machine._stall_one_in == stall_one_in
    pick = random.Random(1)
    streams = [torch.cuda.Stream(device) for _ in range(2)]
    found = []
    for seed in range(how_many):
        with torch.cuda.stream(streams[pick.randrange(2)]):
            op, count = pick.choice(OPS), pick.choice((1, 100, 5000, 70_000, 700_000))
            if (seed + rank) % 7 == 0:
                torch.cuda._sleep(200_000)
            found.append((op, count, *_one_call(rank, num_ranks, op, count, seed, device)))
        if seed % 50 == 49:
            torch.cuda.synchronize()
            for op, count, out, wanted in found:
                assert torch.equal(out.view(torch.int16), wanted.view(torch.int16)), (seed, op, count)
            found.clear()
    half.check()


@pytest.mark.parametrize("stall_one_in", [0, STALL_ONE_IN])
def test_random_calls_on_two_streams(stall_one_in: int) -> None:
    run_ranks(_random, 2, 10_000, stall_one_in, backend="epee", timeout_s=220)


def _graphs(rank: int, num_ranks: int) -> None:
    device, half = _begin(rank)
    counts = 1000, 3 << 20
    x, big = (torch.zeros(count, dtype=torch.bfloat16, device=device) for count in counts)
    z = torch.zeros(num_ranks * 1000, dtype=torch.bfloat16, device=device)

    def calls() -> None:
        dist.all_reduce(x)
        dist.all_gather_into_tensor(z, x)
        work = dist.all_reduce(big, async_op=True)
        assert work is not None
        work.wait()

    calls()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls()
    for seed in range(20):
        rows, bigs = (_rows(num_ranks, count, 100 + seed, device) for count in counts)
        x.copy_(rows[rank])
        big.copy_(bigs[rank])
        graph.replay()
        assert torch.equal(x, _sum(rows)), seed
        assert torch.equal(z, _sum(rows).repeat(num_ranks)), seed
        assert torch.equal(big, _sum(bigs)), seed
        if seed % 3 == 0:  # a call without the graph, in between
            y = torch.ones(5, device=device)
            dist.all_reduce(y)
            assert y.tolist() == [num_ranks] * 5
    half.check()
    dist.barrier()
    torch.cuda.synchronize()


def test_graphs_replay_on_new_values() -> None:
    run_ranks(_graphs, 2, backend="epee", timeout_s=220)


def _first_in_graph(rank: int, num_ranks: int) -> None:
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    x = torch.ones(4, device=device)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(epee.InvalidState, match="graph cannot record"), torch.cuda.graph(graph):
        dist.all_reduce(x)
    dist.all_reduce(x)
    assert x.tolist() == [num_ranks] * 4


def test_the_first_call_cannot_be_recorded() -> None:
    run_ranks(_first_in_graph, 2, backend="epee", timeout_s=200)


def _no_host_wait(rank: int, num_ranks: int) -> None:
    """The host goes on while the GPU is busy in front of the call."""
    device, half = _begin(rank)
    side = torch.cuda.Stream(device)
    count = 4 << 20
    for is_first in (True, False):  # what is used for the first time may wait for the GPU: torch loads kernels then
        x = torch.ones(count, device=device)
        torch.cuda.synchronize()
        busy = torch.cuda.Event()
        torch.cuda._sleep(1000 if is_first else 2_000_000_000)
        busy.record()
        work = dist.all_reduce(x, async_op=True)
        assert work is not None
        was_done = busy.query()
        with torch.cuda.stream(side):
            work.wait()
            total = x.sum()
        assert is_first or not was_done, "the call has waited for the GPU"
        assert is_first or not busy.query(), "wait() has waited for the GPU"
        assert is_first or not work.is_completed()
        side.synchronize()
        assert work.is_completed()
        assert total.item() == num_ranks * count
        future = dist.all_reduce(x, async_op=True).get_future()  # type: ignore[union-attr]
        assert future.wait()[0].sum().item() == num_ranks**2 * count
        half.check()


def test_the_host_waits_for_nobody() -> None:
    run_ranks(_no_host_wait, 2, backend="epee", timeout_s=200)


def _killed(rank: int, num_ranks: int, count: int) -> float:
    device, half = _begin(rank)
    x = torch.ones(count, device=device)
    for _ in range(3):
        dist.all_reduce(x)
    torch.cuda.synchronize()
    dist.barrier()
    if rank == num_ranks - 1:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(epee.RankFailedError) as caught:
        cases.look_soon(lambda: dist.all_reduce(x), half)
    elapsed = time.monotonic() - start - 0.2
    assert caught.value.ranks == (num_ranks - 1,)
    for size in (3, count):
        y = torch.ones(size, device=device)
        dist.all_reduce(y)
        assert torch.equal(y, torch.full_like(y, num_ranks - 1.0)), "the context lives, and the group goes on"
    half.check()
    dist.barrier()
    return elapsed


@pytest.mark.parametrize("count", [100, 5 << 20])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_survivors_of_a_kill_go_on(num_ranks: int, count: int) -> None:
    results = run_ranks(_killed, num_ranks, count, backend="epee", timeout_s=200, dead=(num_ranks - 1,))
    print("seconds from kill to error:", [round(result, 4) for result in results[:-1]])
    assert all(elapsed < 20 for elapsed in results[:-1]), "long before the time-out of 60 s"


def _differ(rank: int, num_ranks: int, count: int) -> None:
    device, half = _begin(rank)
    x = torch.ones(count, dtype=torch.float64 if rank else torch.float32, device=device)
    with pytest.raises(epee.MismatchError, match="ranks disagree"):
        cases.look_soon(lambda: dist.all_reduce(x), half)
    dist.all_reduce(y := torch.ones(count, device=device))
    assert torch.equal(y, torch.full_like(y, num_ranks))
    half.check()
    half._engine.timeout_s = 0.5
    if rank:
        time.sleep(2)
    told = ""
    try:
        dist.all_reduce(y)
        torch.cuda.synchronize()
        half.check()
    except epee.CommTimeoutError as error:
        told = str(error)
    assert told or rank
    half._engine.timeout_s = 60.0
    dist.all_reduce(z := torch.ones(count, device=device))
    assert torch.equal(z, torch.full_like(z, num_ranks))
    half.check()
    dist.barrier()


@pytest.mark.parametrize("count", [100, 200_000, 5 << 20])
def test_calls_that_differ_and_ranks_that_are_late_are_told(count: int) -> None:
    run_ranks(_differ, 2, count, backend="epee", timeout_s=200)


def _differ_unheard(rank: int, num_ranks: int, count: int) -> str:
    """The last rank makes another call, of which no word comes to rank 0."""
    device, half = _begin(rank)
    last = num_ranks - 1
    nowhere = torch.zeros(half._machine.config.region_layout.nbytes, dtype=torch.uint8, device=device)
    if rank == last:
        half._machine._set("peers", [nowhere.data_ptr()])
    torch.cuda.synchronize()
    dist.barrier()
    x = torch.ones(count, dtype=torch.float64 if rank == last else torch.float32, device=device)
    with pytest.raises(epee.MismatchError, match="ranks disagree") as caught:
        cases.look_soon(lambda: dist.all_reduce(x), half)
    dist.all_reduce(y := torch.ones(count, device=device))
    assert torch.equal(y, torch.full_like(y, num_ranks))
    half.check()
    dist.barrier()
    return str(caught.value)


@pytest.mark.parametrize("count", [100, 200_000, 5 << 20])
def test_a_call_that_differs_is_told_by_who_has_found_it(count: int) -> None:
    told = run_ranks(_differ_unheard, 3, count, backend="epee", timeout_s=200)
    assert "rank 2 makes another call" in told[0], told


def _subgroups(rank: int, num_ranks: int) -> None:
    """Two groups with ranks in common, on streams of their own."""
    device, half = _begin(rank)
    pairs = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    streams = [torch.cuda.Stream(device) for _ in pairs]
    found = []
    for step in range(50):
        for number, (group, stream) in enumerate(zip(pairs, streams, strict=True)):
            if rank - number in (0, 1):
                with torch.cuda.stream(stream):
                    x = torch.full((1 << (step % 21),), float(rank), device=device)
                    dist.all_reduce(x, group=group)
                    found.append((x, 2.0 * number + 1))
    torch.cuda.synchronize()
    assert all(bool((x == wanted).all()) for x, wanted in found)
    half.check()
    dist.barrier()


def test_groups_side_by_side() -> None:
    run_ranks(_subgroups, 3, backend="epee", timeout_s=220)


def _fsdp(rank: int, num_ranks: int) -> list[float]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    device, half = _begin(rank)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8)).to(device)
    mesh = init_device_mesh("cuda", (num_ranks,))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = torch.randn(5, num_ranks, 32, 64, generator=torch.Generator().manual_seed(1)).to(device)
    losses = []
    for batch in data:
        loss = model(batch[rank]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach_(), op=dist.ReduceOp.AVG)
        losses.append(loss.item())
    half.check()
    return losses


def test_fsdp2_trains_as_one_process_does() -> None:
    first, second = run_ranks(_fsdp, 2, backend="epee", timeout_s=220)
    assert first == second
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = torch.randn(5, 2, 32, 64, generator=torch.Generator().manual_seed(1)).cuda()
    for batch, wanted in zip(data, first, strict=True):
        loss = model(batch.flatten(0, 1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert abs(loss.item() - wanted) < 1e-4 * max(1.0, wanted)


def _barriers(rank: int, num_ranks: int) -> None:
    """Barriers that name a GPU order the streams of all; the cpu waits, and graphs record them."""
    device, half = _begin(rank)
    x = torch.zeros(1 << 20, device=device)
    dist.barrier(device_ids=[device.index])
    begun = time.monotonic()
    if rank == 1:
        torch.cuda._sleep(1_000_000_000)  # half a second
    dist.barrier(device_ids=[device.index])
    if rank == 0:
        assert time.monotonic() - begun > 0.2, "the barrier did not wait for the other rank's stream"
    work: Any = dist.barrier(device_ids=[device.index], async_op=True)
    assert work.wait()
    assert work.is_completed()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(1)
        dist.barrier(device_ids=[device.index])
        x.add_(1)
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    assert bool((x == 40).all())
    half.check()
    dist.all_reduce(y := torch.ones(3, device=device))
    assert y.tolist() == [num_ranks] * 3
    dist.barrier()


def test_barriers_that_name_a_gpu_are_barriers_of_streams() -> None:
    run_ranks(_barriers, 2, backend="epee", timeout_s=200)


def _masked_barriers(rank: int, num_ranks: int, folder: str) -> None:
    _init(rank, num_ranks, folder, fault_mode="mask")
    _barriers(rank, num_ranks)


def _init(rank: int, num_ranks: int, folder: str, **options: Any) -> None:
    torch.cuda.set_device(rank % torch.cuda.device_count())
    store = dist.FileStore(f"{folder}/store", num_ranks)
    chosen: Any = epee.BackendOptions(**options)
    dist.init_process_group("epee", store=store, rank=rank, world_size=num_ranks, pg_options=chosen)


def test_barriers_of_mode_mask() -> None:
    run_mortal(_masked_barriers, 2, dead=set(), timeout_s=200)


def _waiting(rank: int, num_ranks: int, folder: str, fault_mode: str) -> list[str]:
    _init(rank, num_ranks, folder, fault_mode=fault_mode, on_stall="wait")
    device, half = _begin(rank)
    half._engine.timeout_s = 0.5
    logging.getLogger("epee").addHandler(heard := cases.Heard())
    for count in (3, 200_000, 9_000_000):
        if rank == 1:
            time.sleep(2.5)
        dist.all_reduce(x := torch.ones(count, device=device))
        torch.cuda.synchronize()
        half.check()
        assert bool((x == num_ranks).all())
    half._engine.timeout_s = 60.0
    dist.barrier()
    return heard.texts


@pytest.mark.parametrize("fault_mode", ["raise", "mask"])
def test_calls_of_a_group_that_waits_have_no_time_out(fault_mode: str) -> None:
    first, second = run_mortal(_waiting, 2, fault_mode, dead=set(), timeout_s=200)
    assert sum("waits for rank(s) 1 for" in text for text in first) >= 3, first
    assert second == []


def _grown(rank: int, num_ranks: int, folder: str) -> None:
    """A group of mode "mask", under Mooncake's names, whose kernels are those that take long to compile."""
    size = num_ranks // 2
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    if rank >= size:
        stages.wait_for(folder, "born", 150.0)  # the others compile kernels, on a machine that may be busy
    options = mooncake.MooncakeBackendOptions(size) if rank < size else None
    store, world_size = dist.FileStore(f"{folder}/store", -1), num_ranks if rank >= size else size
    dist.init_process_group("mooncake", store=store, rank=rank, world_size=world_size, pg_options=options)
    group: Any = dist.group.WORLD
    if rank < size:
        _sums(rank, size, device)
        stages.reach(folder, "born")
        while mooncake.get_num_synced_ranks(group) != num_ranks:
            dist.all_reduce(torch.ones(1))
        mooncake.extend_group_size_to(group, num_ranks)
    _end_grown(rank, num_ranks, device)


def _grown_far(rank: int, num_ranks: int, folder: str) -> None:
    """A group of mode "raise" that grows to more than eight ranks."""
    size = num_ranks // 2
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    group = message_cases.grown_group(rank, num_ranks, folder)
    if rank < size:
        _sums(rank, size, device)
        stages.reach(folder, "sent")
        group.extend_group_size_to(num_ranks, 100.0)
    dist.all_reduce(torch.ones(1))
    _end_grown(rank, num_ranks, device)


def _end_grown(rank: int, num_ranks: int, device: torch.device) -> None:
    group: Any = dist.group.WORLD
    group.set_timeout(timedelta(seconds=150))  # kernels for as many ranks are compiled first
    _sums(rank, num_ranks, device)
    assert group._on_device._machine.config.num_ranks == num_ranks
    dist.barrier()
    torch.cuda.synchronize()


def _sums(rank: int, num_ranks: int, device: torch.device) -> None:
    group: Any = dist.group.WORLD
    for count in (3, 200_000, 5_000_000, 3):
        dist.all_reduce(x := torch.full((count,), rank + 1.0, device=device))
        assert bool((x == sum(range(1, num_ranks + 1))).all())
        group._on_device.check()
    assert not group._on_device._off, group._on_device._off


@pytest.mark.parametrize(("function", "num_ranks"), [(_grown, 4), (_grown_far, 12)])
def test_a_group_that_has_grown_makes_its_calls_on_the_gpus(function: Any, num_ranks: int) -> None:
    run_mortal(function, num_ranks, dead=set(), timeout_s=220)
