"""Collectives on the GPUs of one host: check the results, then time them beside NCCL and torch's symmetric memory.

    python benchmarks/collectives_gpu.py --json bench-out/collectives_gpu.json

Clock: as in `latency_gpu.py`, two CUDA graphs of different numbers of calls, replayed in turn between two events; a
figure is the difference of their times divided by that of their calls: median, 10th and 90th percentile over the
replays, on the slowest rank. So a call begins when the one before has ended, and ends when its result may be read. All
calls use the same tensors, bfloat16; up to some 16 MiB they therefore lie in the caches, for everybody alike. Without a
graph: elapsed time of a call of 100 that are queued at once, and in brackets what a call costs the calling thread
(blocks of 20, queue kept short). All calls are torch's (`dist.all_reduce` ...), on a group of the backend "epee" and on
one of NCCL; `pool`: the former on tensors in the group's memory pool.

Bytes: those of the tensor, for all_gather of the output, for reduce_scatter and all_to_all of the input. `bus` is by
NCCL's formula, bytes x factor / time, with factor 2 (n - 1) / n for all_reduce, 1 for broadcast, (n - 1) / n for the
others. Messages: round trips of the first two ranks (send, then recv; elapsed, queue kept full) and exchanges (a batch
of both). NVLink multicast is not used by anybody: the variables that switch it off must be set (they are only read
here).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import epee  # noqa: F401 - registers the backend
from benchmarks import gpu
from epee.backend.cuda.machine import Collectives
from epee.backend.cuda.plan import CollectivePlan
from epee.backend.cuda.pool import MemoryPool
from epee.errors import CommTimeoutError

DTYPE = torch.bfloat16
OPS = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all")
SIZES = (4, 4 << 10, 64 << 10, 1 << 20, 16 << 20, 256 << 20)
TARGET_US = {4: 5.0, 4 << 10: 5.5, 64 << 10: 7.0, 1 << 20: 12.0, 16 << 20: 88.0, 256 << 20: 1150.0}  # all_reduce
POOL_BYTES = 1 << 30
POOL_ABOVE_BYTES, SYMMETRIC_FROM_BYTES = 1 << 20, 4096  # which sizes are also timed in a pool, in symmetric memory
KINDS = ((torch.bfloat16, "sum"), (torch.float16, "sum"), (torch.float32, "max"))
REPLAYS, TIMEOUT_S = 25, 20.0
GRAPH_CALLS = ((10, 60), (4, 20), (2, 6))  # in the two graphs: of sizes up to 1 MiB, up to 16 MiB, above
MESSAGE_CALLS = (100, 40, 8)  # in a block, by the same sizes
EAGER_CALLS, HOST_CALLS = 100, 20  # in a block
EAGER_BLOCKS, HOST_BLOCKS = 7, 12
CHECKED_COUNTS = (0, 1, 3, 1023, (1 << 20) + 3, (8 << 20) + 8, 32 << 20)  # elements, beside SIZES
GRAPH_COUNT, GRAPH_REPLAYS, BACK_TO_BACK = 3 << 20, 20, 2000
SILENT_COUNTS = (500, 300_000, 8 << 20)
Group = Any  # a process group


def say(text: str) -> None:
    """Print once."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def half_of(group: Group) -> Any:
    """The device half of a group, which has served a call."""
    half = group._on_device
    assert half is not None
    assert not half._off, half._off
    return half


def machine_of(group: Group) -> Collectives:
    """What launches its kernels."""
    machine: Collectives = half_of(group)._machine
    return machine


def make_call(group: Group, op: str, x: torch.Tensor, out: torch.Tensor, reduction: str = "sum", root: int = 0) -> None:
    """A call of a group by torch's names; all_reduce and broadcast in place."""
    op_of = dist.ReduceOp.SUM if reduction == "sum" else dist.ReduceOp.MAX
    if op == "all_reduce":
        dist.all_reduce(x, op=op_of, group=group)
    elif op == "broadcast":
        dist.broadcast(x, root, group=group)
    elif op == "all_gather":
        dist.all_gather_into_tensor(out, x, group=group)
    elif op == "reduce_scatter":
        dist.reduce_scatter_tensor(out, x, op=op_of, group=group)
    else:
        dist.all_to_all_single(out, x, group=group)


# --- results ---


def inputs_of(num_ranks: int, count: int, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """What all ranks bring, made by each of them from the seed."""
    gen = torch.Generator(device="cuda").manual_seed(seed)
    return [torch.randn(count, generator=gen, device="cuda").to(dtype) for _ in range(num_ranks)]


def reduced(rows: list[torch.Tensor], reduction: str) -> torch.Tensor:
    """The rows in rank order, in float32, rounded once."""
    total = rows[0].float()
    for row in rows[1:]:
        total = total + row.float() if reduction == "sum" else torch.maximum(total, row.float())
    return total.to(rows[0].dtype)


def check_op(group: Group, op: str, count: int, kind: tuple[torch.dtype, str], seed: int) -> None:
    """One call, bit for bit; `count` elements in a row."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    is_wide, (dtype, reduction) = op in ("reduce_scatter", "all_to_all"), kind
    rows = inputs_of(num_ranks, count * (num_ranks if is_wide else 1), dtype, seed)
    mine = slice(count * rank, count * (rank + 1))
    x = rows[rank].clone()
    out = torch.full((count * (1 if "reduce" in op else num_ranks),), float("nan"), device="cuda").to(dtype)
    make_call(group, op, x, out, reduction, seed % num_ranks)
    if op == "all_reduce":
        out, want = x, reduced(rows, reduction)
    elif op == "broadcast":
        out, want = x, rows[seed % num_ranks]
    elif op == "reduce_scatter":
        want = reduced([row[mine] for row in rows], reduction)
    else:
        want = torch.cat([row[mine] if is_wide else row for row in rows])
    torch.cuda.synchronize()
    half_of(group).check()
    same = out.view(torch.uint8) == want.view(torch.uint8)
    if not bool(same.all()):
        raise AssertionError(
            f"rank {rank}: {op} of {count} {kind}: {int((~same).sum())} of {same.numel()} bytes differ"
        )


def check_all(group: Group, kinds: tuple[tuple[torch.dtype, str], ...]) -> None:
    """Every op at every size and way, whole and odd, several times over so that memory is used again."""
    counts = [size // 2 for size in SIZES[:-1]] + [*CHECKED_COUNTS]
    seed = 0
    for op in OPS:
        for kind in kinds if "reduce" in op else kinds[:1]:
            for count in counts:
                rows = count // (1 if op in ("all_reduce", "broadcast") else dist.get_world_size())
                for _ in range(3 if count < 1 << 20 else 1):
                    check_op(group, op, rows, kind, seed := seed + 1)
    say(f"check: {seed} calls of {', '.join(OPS)} in {len(kinds)} dtypes, 0 to {max(counts)} elements: every bit right")


def check_graph(group: Group) -> None:
    """A graph of several calls, replayed on new inputs; and many small calls back to back."""
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    x, big = (torch.zeros(count, dtype=DTYPE, device="cuda") for count in (1000, GRAPH_COUNT))
    z = torch.empty(num_ranks * 1000, dtype=DTYPE, device="cuda")

    def calls() -> None:
        make_call(group, "all_reduce", x, x)
        make_call(group, "all_gather", x, z)
        make_call(group, "all_reduce", big, big)

    graph = graph_of(calls, 1)
    for seed in range(GRAPH_REPLAYS):
        rows, bigs = (inputs_of(num_ranks, count, DTYPE, 500 + seed) for count in (1000, GRAPH_COUNT))
        x.copy_(rows[rank])
        big.copy_(bigs[rank])
        graph.replay()
        torch.cuda.synchronize()
        half_of(group).check()
        assert torch.equal(x, reduced(rows, "sum")), f"replay {seed}: all_reduce"
        assert torch.equal(z, x.repeat(num_ranks)), f"replay {seed}: all_gather"
        assert torch.equal(big, reduced(bigs, "sum")), f"replay {seed}: large all_reduce"
    words = torch.arange(BACK_TO_BACK, device="cuda", dtype=torch.float32).to(DTYPE) % 50
    for i in range(BACK_TO_BACK):  # in place, no host wait: each call waits for the others in its own memory only
        dist.all_reduce(words[i : i + 1], group=group)
    torch.cuda.synchronize()
    half_of(group).check()
    want = torch.arange(BACK_TO_BACK, device="cuda", dtype=torch.float32).to(DTYPE) % 50 * num_ranks
    assert torch.equal(words, want), f"{BACK_TO_BACK} calls back to back"
    say(f"check: {GRAPH_REPLAYS} replays of a graph, {BACK_TO_BACK} calls back to back: every bit right")


def check_silent(group: Group) -> None:
    """The last rank stays away from a call of each way: the others are told, nothing hangs or traps, and all go on."""
    last = dist.get_world_size() - 1
    for count in SILENT_COUNTS:
        x, name = torch.ones(count, dtype=DTYPE, device="cuda"), ""
        for is_late in (False, True):
            if (dist.get_rank() == last) == is_late:
                group._engine.timeout_s = 0.3
                try:
                    dist.all_reduce(x, group=group)
                    torch.cuda.synchronize()
                    half_of(group).check()
                except CommTimeoutError as error:
                    name = str(error)
                group._engine.timeout_s = TIMEOUT_S
            dist.barrier()
        assert name or dist.get_rank() == last, f"all_reduce of {count} without rank {last} has not failed"
        half_of(group)._is_lost = True  # also where the late call ended well
        for seed in range(3):
            check_op(group, "all_reduce", count, KINDS[0], 900 + seed)
    say("check: a silent rank is reported in each way, and the calls after are right")


# --- times ---


def graph_of(call: Callable[[], Any], count: int) -> gpu.Graph:
    """`count` calls in one graph; one call before it loads what the graph needs."""
    call()
    torch.cuda.synchronize()
    return gpu.graph_of(call, count)


def replay_us(graph: gpu.Graph) -> float:
    """How long one replay takes."""
    torch.cuda.synchronize()
    dist.barrier()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end) * 1e3)


def step_of(size: int) -> int:
    """Position of a size in `GRAPH_CALLS` and `MESSAGE_CALLS`."""
    return 0 if size <= 1 << 20 else 1 if size <= 16 << 20 else 2


def graph_us(call: Callable[[], Any], size: int, replays: int | None = None) -> gpu.Spread:
    """Microseconds of a call over the replays, slowest rank."""
    counts = GRAPH_CALLS[step_of(size)]
    graphs = [graph_of(call, count) for count in counts]
    for graph in graphs * 2:
        replay_us(graph)
    return gpu.spread(
        [(-replay_us(graphs[0]) + replay_us(graphs[1])) / (counts[1] - counts[0]) for _ in range(replays or REPLAYS)]
    )


def host_us(call: Callable[[], Any]) -> gpu.Spread:
    """Microseconds of the calling thread over blocks of calls, slowest rank."""
    blocks = []
    for _ in range(HOST_BLOCKS):
        torch.cuda.synchronize()
        dist.barrier()
        start = time.perf_counter()
        for _ in range(HOST_CALLS):
            call()
        blocks.append((time.perf_counter() - start) / HOST_CALLS * 1e6)
    torch.cuda.synchronize()
    return gpu.spread(blocks)


class Case:
    """One op at one size: tensors, in a pool if one is given, and the call by each of those who can do it."""

    def __init__(self, op: str, size: int, num_ranks: int, pool: MemoryPool | None = None) -> None:
        self.op, self.size = op, size
        count = max(1, size // 2)
        part = max(1, count // num_ranks)
        empty = partial(torch.empty, device="cuda") if pool is None else pool.empty
        self.x = empty(part if op == "all_gather" else count, dtype=DTYPE).normal_()
        self.out = empty(part if op == "reduce_scatter" else count, dtype=DTYPE).zero_()

    def by(self, group: Group) -> Callable[[], None]:
        """By a group, in place where that is possible: as NCCL does best."""
        x = self.out if self.op == "all_reduce" else self.x
        return lambda: make_call(group, self.op, x, self.out)


def elapsed_us(call: Callable[[], Any]) -> gpu.Spread:
    """Microseconds of a call without a graph, queue kept full, over blocks of calls, slowest rank."""
    blocks = []
    for _ in range(EAGER_BLOCKS):
        torch.cuda.synchronize()
        dist.barrier()
        start = time.perf_counter()
        for _ in range(EAGER_CALLS):
            call()
        torch.cuda.synchronize()
        blocks.append((time.perf_counter() - start) / EAGER_CALLS * 1e6)
    return gpu.spread(blocks)


def bus_gbps(op: str, size: int, us: float, num_ranks: int) -> float:
    """NCCL's bus bandwidth."""
    factor = {"all_reduce": 2 * (num_ranks - 1) / num_ranks, "broadcast": 1.0}.get(op, (num_ranks - 1) / num_ranks)
    return size * factor / us / 1e3


def symm_us(size: int, group: dist.ProcessGroup) -> dict[str, gpu.Spread]:
    """torch's symmetric memory, input already there."""
    import torch.distributed._symmetric_memory as symm

    x = symm.empty(size // 2, dtype=DTYPE, device="cuda")
    symm.rendezvous(x, group)
    found = {}
    if size <= 1 << 20:
        found["one-shot"] = graph_us(lambda: torch.ops.symm_mem.one_shot_all_reduce(x, "sum", group.group_name), size)
    found["two-shot"] = graph_us(lambda: torch.ops.symm_mem.two_shot_all_reduce_(x, "sum", group.group_name), size)
    return found


def target_of(op: str, size: int, nccl_us: float) -> float:
    """What issue 20 asks for."""
    if op == "all_reduce":
        return TARGET_US[size]
    return nccl_us * (0.7 if size <= 1 << 20 else 1.0)


EAGER = (4, 64 << 10, 16 << 20)


def time_all(ours: Group, nccl: Group, sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    """All figures."""
    num_ranks, rows = dist.get_world_size(), []
    for op in OPS:
        for size in sizes:
            if size == 4 and op not in ("all_reduce", "broadcast"):
                continue
            case = Case(op, size, num_ranks)
            row: dict[str, Any] = {"op": op, "bytes": size} | graph_us(case.by(ours), size).columns("epee")
            half_of(ours).check()
            row |= graph_us(case.by(nccl), size).columns("nccl")
            if size > POOL_ABOVE_BYTES:
                pooled = Case(op, size, num_ranks, ours.memory_pool(POOL_BYTES))
                row |= graph_us(pooled.by(ours), size).columns("pool")
                half_of(ours).check()
            row["target_us"] = target_of(op, size, row["nccl_us"])
            if op == "all_reduce" and SYMMETRIC_FROM_BYTES <= size <= 16 << 20:
                found = symm_us(size, nccl)
                row["symm_us"] = {way: times.median for way, times in found.items()}
                row |= min(found.values()).columns("symm_best")
            if size in EAGER:
                for name, group in (("epee", ours), ("nccl", nccl)):
                    row |= host_us(case.by(group)).columns(f"{name}_host")
                    row |= elapsed_us(case.by(group)).columns(f"{name}_eager")
            row["bus_gbps"] = bus_gbps(op, size, row["epee_us"], num_ranks)
            rows.append(row)
    return rows


def print_rows(rows: list[dict[str, Any]]) -> None:
    """A line for each figure."""
    say("us: in a graph | eager, elapsed (host)        epee       NCCL     target        epee          NCCL")
    for row in rows:
        if "nccl_us" not in row:
            continue
        is_met = "met" if row["epee_us"] <= row["target_us"] else "   "
        symm = ", ".join(f"{way} {us:.1f}" for way, us in row.get("symm_us", {}).items())
        pool = f"  pool {row['pool_us']:.1f}" if "pool_us" in row else ""
        eager = ""
        if "epee_host_us" in row:
            both = (f"{row[f'{name}_eager_us']:8.1f} ({row[f'{name}_host_us']:5.1f})" for name in ("epee", "nccl"))
            eager = "  ".join(both)
        say(
            f"{row['op']:15s}{row['bytes']:10d} {row['epee_us']:9.2f} (bus {row['bus_gbps']:5.1f}) "
            f"{row['nccl_us']:9.2f} {row['target_us']:9.2f} {is_met} {eager}{'  symm ' + symm if symm else ''}{pool}"
        )


# --- messages ---

MESSAGE_SIZES = (4, 4 << 10, 64 << 10, 1 << 20, 16 << 20, 256 << 20)
CHECKED_MESSAGES = (0, 1, 4, 4097, 65536, (1 << 20) + 3, 16 << 20, 64 << 20)


def check_messages(group: Group) -> None:
    """Messages of every size, to and fro between neighbours, one by one and as batches: every byte right."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    nxt, before = (rank + 1) % num_ranks, (rank - 1) % num_ranks
    for seed, size in enumerate(CHECKED_MESSAGES):
        rows = [
            torch.randint(0, 256, (size,), generator=torch.Generator("cuda").manual_seed(100 * seed + r), device="cuda")
            for r in range(num_ranks)
        ]
        x, got = rows[rank].to(torch.uint8), torch.zeros(size, dtype=torch.uint8, device="cuda")
        ops = [dist.P2POp(dist.isend, x, nxt, group), dist.P2POp(dist.irecv, got, before, group)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        assert torch.equal(got, rows[before].to(torch.uint8)), f"batch of {size} bytes"
        if rank < 2:
            back = torch.zeros_like(x)
            round_trip(group, x, back, 1)
            assert torch.equal(back, rows[1 - rank].to(torch.uint8)), f"round trip of {size} bytes"
    torch.cuda.synchronize()
    group._messages.check()
    assert not group._messages._pairs.off, group._messages._pairs.off
    say(f"check: messages of 0 to {max(CHECKED_MESSAGES)} bytes, one by one and as batches: every byte right")


def round_trip(group: Group, x: torch.Tensor, got: torch.Tensor, count: int) -> None:
    """Rank 0 sends and receives, rank 1 the other way round; others do nothing."""
    rank = dist.get_rank()
    for _ in range(count):
        if rank == 0:
            dist.send(x, 1, group=group)
            dist.recv(got, 1, group=group)
        elif rank == 1:
            dist.recv(got, 0, group=group)
            dist.send(x, 0, group=group)


def exchange(group: Group, x: torch.Tensor, got: torch.Tensor, count: int) -> None:
    """The first two ranks send to each other at the same time."""
    peer = dist.get_rank() ^ 1
    for _ in range(count if peer < 2 else 0):
        ops = [dist.P2POp(dist.isend, x, peer, group), dist.P2POp(dist.irecv, got, peer, group)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()


def messages_us(make: Callable[..., None], group: Group, size: int) -> tuple[gpu.Spread, gpu.Spread]:
    """Microseconds of a round trip, or of an exchange, eager, queue kept full; and until the host continues."""
    x, got = (torch.zeros(max(1, size), dtype=torch.uint8, device="cuda") for _ in range(2))
    count = MESSAGE_CALLS[step_of(size)]
    make(group, x, got, min(5, count))
    blocks, hosts = [], []
    for _ in range(EAGER_BLOCKS):
        torch.cuda.synchronize()
        dist.barrier()
        start = time.perf_counter()
        make(group, x, got, count)
        hosts.append((time.perf_counter() - start) / count * 1e6)
        torch.cuda.synchronize()
        blocks.append((time.perf_counter() - start) / count * 1e6)
    return gpu.spread(blocks), gpu.spread(hosts)


def time_messages(ours: Group, nccl: Group) -> list[dict[str, Any]]:
    """Round trips and exchanges beside NCCL's; issue 20 asks for 0.7 of NCCL's time up to 1 MiB, then for as much."""
    rows = []
    for name, make in (("round trip", round_trip), ("exchange", exchange)):
        for size in MESSAGE_SIZES:
            row: dict[str, Any] = {"op": name, "bytes": size}
            for side, group in (("epee", ours), ("nccl", nccl)):
                eager, host = messages_us(make, group, size)
                row |= eager.columns(f"{side}_eager") | host.columns(f"{side}_host")
                ours._messages.check()
            rows.append(row)
    return rows


def print_messages(rows: list[dict[str, Any]]) -> None:
    """A line for each figure."""
    say("us, eager            bytes      epee      NCCL     ratio    hosts: epee      NCCL")
    for row in rows:
        ratio = row["epee_eager_us"] / row["nccl_eager_us"]
        is_met = "met" if ratio <= (0.7 if row["bytes"] <= 1 << 20 else 1.0) else ""
        say(
            f"{row['op']:12s} {row['bytes']:12d} {row['epee_eager_us']:9.1f} {row['nccl_eager_us']:9.1f} "
            f"{ratio:9.2f}    {row['epee_host_us']:12.1f} {row['nccl_host_us']:9.1f} {is_met}"
        )


# --- variants ---

MIDDLE = (4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)
LARGE = (1 << 20, 4 << 20, 16 << 20, 256 << 20)
EXCHANGED = (1 << 20, 4 << 20, 16 << 20)
PIPELINED = OPS[:3]
CHUNKS = ((16, 1), (32, 1), (32, 4))  # KiB, and how many a block of the pipeline has at least


def variants(base: CollectivePlan, num_sms: int) -> dict[str, tuple[CollectivePlan, tuple[str, ...], tuple[int, ...]]]:
    """Plans to compare, with the ops and sizes at which they differ."""
    one, two = replace(base, one_shot_bytes=1 << 20), replace(base, one_shot_bytes=0, two_shot_bytes=4 << 20)
    pipe = replace(base, one_shot_bytes=0, two_shot_bytes=0, exchange_bytes=0)
    wide = replace(base, exchange_bytes=4 << 20)
    found: dict[str, tuple[CollectivePlan, tuple[str, ...], tuple[int, ...]]] = {
        "one shot, plain launch": (replace(one, launch="plain"), ("all_reduce",), (4, 4 << 10, 64 << 10)),
        "one shot": (one, ("all_reduce", "broadcast"), (4, *MIDDLE[:-1])),
        "one shot, 4 warps": (replace(one, warps=4), ("all_reduce",), MIDDLE[:-1]),
        "two shots": (two, ("all_reduce", "broadcast"), MIDDLE),
        "two shots, 4 warps": (replace(two, warps=4), ("all_reduce",), MIDDLE),
        "exchange": (wide, ("all_gather", "all_to_all", "reduce_scatter"), EXCHANGED),
    }
    for width in (num_sms, num_sms // 2, max(1, num_sms // 4)):
        for chunk, least in CHUNKS:
            plan = replace(pipe, width=width, chunk_bytes=chunk << 10, min_chunks=least)
            found[f"pipeline, {width} SMs, {chunk} KiB, at least {least}"] = plan, PIPELINED, LARGE
    return found


def sweep(group: Group) -> list[dict[str, Any]]:
    """Times of all variants."""
    machine = machine_of(group)
    rows, usual = [], machine.plan
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    for name, (plan, ops, sizes) in variants(usual, num_sms).items():
        machine.plan = plan
        for op in ops:
            times = {size: graph_us(Case(op, size, dist.get_world_size()).by(group), size, 7).median for size in sizes}
            half_of(group).check()
            rows.append({"variant": name, "op": op, "us": times})
            say(f"{name:52s} {op:10s} " + "  ".join(f"{size}: {us:.2f}" for size, us in times.items()))
    machine.plan = usual
    return rows


# --- ranks ---


def run(rank: int, args: argparse.Namespace, folder: str) -> None:
    """One rank."""
    torch.cuda.set_device(rank)
    store = dist.FileStore(f"{folder}/store", args.num_ranks)
    dist.init_process_group("epee", store=store, rank=rank, world_size=args.num_ranks)
    results: dict[str, Any] = {"num_ranks": args.num_ranks, "rows": []}
    try:
        ours: Any = dist.group.WORLD
        ours._engine.timeout_s = TIMEOUT_S
        nccl: Any = dist.new_group(backend="nccl")
        started = time.perf_counter()
        dist.all_reduce(torch.zeros(1, device="cuda"), group=ours)
        torch.cuda.synchronize()
        mib = machine_of(ours).config.region_layout.nbytes / 2**20
        say(f"first call in {time.perf_counter() - started:.1f} s, {mib:.0f} MiB of each GPU lent")
        dist.all_reduce(torch.zeros(1, device="cuda"), group=nccl)
        if not args.skip_checks:
            check_all(ours, KINDS)
            check_graph(ours)
            check_silent(ours)
        rows = sweep(ours) if args.sweep else []
        sent = []
        if not args.skip_messages and args.num_ranks > 1:
            check_messages(ours)
            sent = time_messages(ours, nccl)
        times = [] if args.skip_times else time_all(ours, nccl, SIZES)
        results["rows"] = rows + times + sent
        torch.cuda.synchronize()
        half_of(ours).check()
        if times:
            print_rows(times)
        if sent:
            print_messages(sent)
        report(results, args)
    except BaseException:  # noqa: BLE001 - the other ranks must not wait for this one
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # NCCL's own end takes seconds and has nothing to do with us


def report(results: dict[str, Any], args: argparse.Namespace) -> None:
    """Say what machine it was; write the file."""
    version = ".".join(map(str, torch.cuda.nccl.version()))
    results |= {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "nccl": version}
    results["date"] = time.strftime("%Y-%m-%d")
    results["multicast_off"] = os.environ.get("NCCL_NVLS_ENABLE") == "0"
    say(f"{args.num_ranks}x {results['device']}, torch {torch.__version__}, NCCL {version}, {results['date']}")
    if dist.get_rank() == 0 and args.json:
        Path(args.json).parent.mkdir(parents=True, exist_ok=True)
        Path(args.json).write_text(json.dumps(results, indent=1))


def main() -> None:
    """Parse the command line and start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--sweep", action="store_true", help="time variants of the plan as well")
    parser.add_argument("--skip-checks", action="store_true")
    parser.add_argument("--skip-times", action="store_true", help="of collectives")
    parser.add_argument("--skip-messages", action="store_true")
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    if os.environ.get("NCCL_NVLS_ENABLE") != "0":
        print("note: NCCL_NVLS_ENABLE is not 0, so NCCL may use multicast", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        gpu.spawn(run, (args, folder), args.num_ranks)


if __name__ == "__main__":
    main()
