"""`Buffer` on the GPUs of one host: check the results, then time them.

    python benchmarks/ep_gpu.py --num-ranks 4 --json bench-out/ep_gpu.json

Clock: CUDA events on every rank, from just before the first kernel of a call to just behind its last, with the queue
kept full behind a long sleep, L2 flushed and all ranks aligned by a device barrier before each call. A figure is the
median (and p10, p90, p99) over the calls on the slowest rank. Bytes:
    logical GB/s = rows received * bytes of a row / time (rows that stay on their rank included)
    wire GB/s    = rows received from other ranks * bytes of a row / time
NCCL's all_to_all_single moves the same rows in the same run.

`--v1`, `--v2` and `--latency-names` time calls by DeepEP's names instead (`calls_gpu.py`, whose clock they have).

Host time of `epee.Buffer` calls (`host_us` in the JSON): median over the calls on the slowest rank, in a row (the GPU
is behind) and each after a synchronisation (the caches are cold).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import epee
from benchmarks import calls_gpu, gpu
from epee.ep.throughput.gpu.types import CombineOptions, DispatchOptions, DispatchResult
from epee.gpu.shapes import ThroughputConfig
from tests.csrc.throughput_end import ThroughputEnd

NUM_EXPERTS, NUM_TOPK, HIDDEN = 256, 8, 7168
FLUSH_BYTES = 256 << 20  # more than L2 holds
WIRE_GBPS = 389.0  # the best copy seen on 4x H200, per direction
FP8 = torch.float8_e4m3fn
CHECKED_SMS = (24, 8)
WARM_UP, HOST_WARM_UP = 5, 20  # calls before those that are timed
TIMEOUT_S = 5.0


@dataclass
class Case:
    """One thing to time."""

    name: str
    tokens: int
    num_sms: int
    call: Callable[[], Any]
    row_bytes: int


@dataclass
class Row:
    """One line of the result."""

    name: str
    tokens: int
    num_sms: int
    median_us: float
    p10_us: float
    p90_us: float
    p99_us: float
    logical_gbps: float
    wire_gbps: float
    host_us: float


class Inputs:
    """Seeded inputs of all ranks, so that every rank can compute what it must receive."""

    def __init__(self, rank: int, num_ranks: int, num_tokens: int, seed: int = 0) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        self.x, self.topk_idx, self.topk_weights = [], [], []
        for src in range(num_ranks):
            gen = torch.Generator(device="cuda").manual_seed(1000 * seed + src)
            self.x.append(torch.randn(num_tokens, HIDDEN, device="cuda", generator=gen).to(torch.bfloat16))
            scores = torch.randn(num_tokens, NUM_EXPERTS, device="cuda", generator=gen).abs() + 1
            self.topk_idx.append(scores.topk(NUM_TOPK, dim=-1)[1])
            self.topk_weights.append(torch.rand(num_tokens, NUM_TOPK, device="cuda", generator=gen))
        self.num_local = NUM_EXPERTS // num_ranks

    def goes(self, src: int, dst: int) -> torch.Tensor:
        """Which tokens of `src` go to `dst`."""
        return (self.topk_idx[src] // self.num_local == dst).any(1)

    def rows(self, rank: int) -> tuple[int, int]:
        """Rows that `rank` receives: all, and from other ranks."""
        counts = [int(self.goes(src, rank).sum()) for src in range(self.num_ranks)]
        return sum(counts), sum(counts) - counts[rank]


def all_gather_bytes(mine: bytes) -> list[bytes]:
    """Everybody's bytes over the (gloo half of the) default group; all of one length here."""
    rows = [torch.zeros(len(mine), dtype=torch.uint8) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, torch.frombuffer(bytearray(mine), dtype=torch.uint8))
    return [row.numpy().tobytes() for row in rows]


def fp8_pair(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and one scale for each 128 channels."""
    blocks = x.float().view(x.shape[0], x.shape[1] // 128, 128)
    scale = blocks.abs().amax(-1).clamp(min=1e-4) / 448.0
    return (blocks / scale[..., None]).view(x.shape).to(FP8), scale.contiguous()


def check_rank_layout(buffer: ThroughputEnd, data: Inputs, num_sms: int) -> None:
    """Dispatch and combine in the rank layout, bit for bit."""
    rank = data.rank
    options = DispatchOptions(num_sms=num_sms, timeout_s=TIMEOUT_S)
    d = buffer.dispatch(data.x[rank], None, data.topk_idx[rank], data.topk_weights[rank], None, options)
    masks = [data.goes(src, rank) for src in range(data.num_ranks)]
    expect(d.x, torch.cat([x[m] for x, m in zip(data.x, masks, strict=True)]), "recv_x")
    idx = torch.cat([t[m] for t, m in zip(data.topk_idx, masks, strict=True)])
    is_here = idx // data.num_local == rank
    assert d.topk_idx is not None
    assert d.topk_weights is not None
    expect(d.topk_idx, torch.where(is_here, idx - rank * data.num_local, -1), "topk_idx")
    weights = torch.cat([t[m] for t, m in zip(data.topk_weights, masks, strict=True)])
    expect(d.topk_weights, torch.where(is_here, weights, 0.0), "topk_weights")
    expect(d.src_token, torch.cat([m.nonzero()[:, 0] for m in masks]), "src_token")
    d.x.mul_((rank + 1) / 4)
    want = torch.zeros(data.x[rank].shape, device="cuda")
    for dst in range(data.num_ranks):
        row = data.x[rank] * ((dst + 1) / 4)
        want = torch.where(data.goes(rank, dst)[:, None], want + row.float(), want)
    options_back = CombineOptions(num_sms=num_sms, timeout_s=TIMEOUT_S)
    y, w = buffer.combine(d.x, d.handle, d.topk_weights, (), None, options_back)
    expect(y, want.bfloat16(), "combine in place")
    assert w is not None
    expect(w, data.topk_weights[rank], "combined weights")
    y, _ = buffer.combine(d.x.clone(), d.handle, None, (data.x[rank],), None, options_back)
    expect(y, (want + data.x[rank].float()).bfloat16(), "combine from ordinary memory, with bias")
    again = buffer.dispatch(data.x[rank] + 1, None, None, None, d.handle, options)
    expect(again.x, torch.cat([x[m] + 1 for x, m in zip(data.x, masks, strict=True)]), "cached dispatch")
    pair = [fp8_pair(x) for x in data.x]
    f = buffer.dispatch(pair[rank][0], pair[rank][1], data.topk_idx[rank], None, None, options)
    assert f.scales is not None
    expect(
        f.x.view(torch.uint8), torch.cat([p[0][m] for p, m in zip(pair, masks, strict=True)]).view(torch.uint8), "fp8"
    )
    expect(f.scales.view(torch.float32), torch.cat([p[1][m] for p, m in zip(pair, masks, strict=True)]), "scales")


def expert_rows(data: Inputs, alignment: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Source rank, token and k of each row of the expert layout; -1 in padding."""
    parts = []
    for expert in range(data.rank * data.num_local, (data.rank + 1) * data.num_local):
        block = []
        for src, idx in enumerate(data.topk_idx):
            found = (idx == expert).nonzero()
            block.append(torch.cat([torch.full_like(found[:, :1], src), found], 1))
        rows = torch.cat(block)
        pad = -rows.shape[0] % alignment
        parts += [rows, torch.full((pad, 3), -1, device="cuda", dtype=rows.dtype)]
    columns = torch.cat(parts)
    return columns[:, 0], columns[:, 1], columns[:, 2]


def check_expert_layout(buffer: ThroughputEnd, data: Inputs, alignment: int) -> None:
    """Dispatch and combine in the expert layout, bit for bit."""
    rank = data.rank
    options = DispatchOptions(layout="expert", expert_alignment=alignment, timeout_s=TIMEOUT_S)
    src, token, k = expert_rows(data, alignment)
    is_row = src >= 0
    where = (src.clamp(min=0), token.clamp(min=0))
    for fp8 in (False, True):
        pairs = [fp8_pair(x) for x in data.x] if fp8 else [(x, None) for x in data.x]
        d = buffer.dispatch(pairs[rank][0], pairs[rank][1], data.topk_idx[rank], data.topk_weights[rank], None, options)
        values = torch.stack([p[0].view(torch.uint8) for p in pairs])[where] * is_row[:, None]
        expect(d.x.view(torch.uint8), values, f"expert rows, fp8={fp8}")
        expect(d.src_token, token, "src_token")
        assert d.src_rank is not None
        assert d.topk_weights is not None
        expect(d.src_rank, src, "src_rank")
        expect(d.topk_weights, torch.stack(data.topk_weights)[where[0], where[1], k.clamp(min=0)] * is_row, "weights")
        if fp8:
            assert d.scales is not None
            expect(d.scales.view(torch.float32), torch.stack([p[1] for p in pairs])[where] * is_row[:, None], "scales")
            continue
        y, w = buffer.combine(
            d.x * ((rank + 1) / 4), d.handle, d.topk_weights, (), None, CombineOptions(timeout_s=TIMEOUT_S)
        )
        want = torch.zeros(data.x[rank].shape, device="cuda")
        for dst in range(data.num_ranks):
            part = torch.zeros_like(want)
            row = (data.x[rank] * ((dst + 1) / 4)).float()
            for slot in range(NUM_TOPK):
                there = (data.topk_idx[rank][:, slot] // data.num_local == dst)[:, None]
                part = torch.where(there, part + data.topk_weights[rank][:, slot : slot + 1] * row, part)
            want += part
        expect(y, want.bfloat16(), "expert combine")
        assert w is not None
        expect(w, data.topk_weights[rank], "expert combined weights")


def expect(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    """Fail with the first difference."""
    if got.shape == want.shape and torch.equal(got, want):
        return
    if got.shape != want.shape:
        raise AssertionError(f"{what}: shape {tuple(got.shape)}, expected {tuple(want.shape)}")
    bad = (got != want).nonzero()
    at = tuple(bad[0].tolist())
    raise AssertionError(f"{what}: {bad.shape[0]} of {got.numel()} differ, first at {at}: {got[at]} for {want[at]}")


class Times(NamedTuple):
    """Microseconds of a call on the GPU, and the host's median; each of the rank where it is largest."""

    median: float
    p10: float
    p90: float
    p99: float
    host: float

    def columns(self) -> dict[str, float]:
        """Return the GPU's times as columns of a result's row."""
        return {f"{name}_us": getattr(self, name) for name in ("median", "p10", "p90", "p99")}


class Bench:
    """Times calls on one rank."""

    def __init__(self, buffer: ThroughputEnd, num_calls: int) -> None:
        self.buffer, self.num_calls = buffer, num_calls
        self.flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    def time(self, call: Callable[[], Any]) -> Times:
        """Return the times of `num_calls` calls."""
        for _ in range(WARM_UP):
            call()
        torch.cuda.synchronize()
        dist.barrier()
        starts = [torch.cuda.Event(enable_timing=True) for _ in range(self.num_calls)]
        ends = [torch.cuda.Event(enable_timing=True) for _ in range(self.num_calls)]
        torch.cuda._sleep(60_000_000)
        host = []
        for start, end in zip(starts, ends, strict=True):
            self.flush.zero_()
            self.buffer.barrier(5.0)
            start.record()
            before = time.perf_counter()
            call()
            host.append((time.perf_counter() - before) * 1e6)
            end.record()
        torch.cuda.synchronize()
        self.buffer.check()
        times = sorted(start.elapsed_time(end) * 1e3 for start, end in zip(starts, ends, strict=True))
        found = [times[int(len(times) * part)] for part in (0.5, 0.1, 0.9, 0.99)]
        mine = torch.tensor([*found, sorted(host)[len(host) // 2]])
        dist.all_reduce(mine, op=dist.ReduceOp.MAX)
        return Times(*mine.tolist())


def dispatch_call(
    buffer: ThroughputEnd, data: Inputs, options: DispatchOptions, fp8: bool
) -> Callable[[], DispatchResult]:
    """A fresh dispatch without CPU sync."""
    rank = data.rank
    x, scales = fp8_pair(data.x[rank]) if fp8 else (data.x[rank], None)
    return lambda: buffer.dispatch(x, scales, data.topk_idx[rank], data.topk_weights[rank], None, options)


def cases_for(buffer: ThroughputEnd, data: Inputs, tokens: int, num_sms: int, with_expert: bool) -> list[Case]:
    """What is timed at one size."""
    plain = DispatchOptions(sync=False, timeout_s=TIMEOUT_S, num_sms=num_sms)
    out = torch.empty(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
    held = buffer.dispatch(
        data.x[data.rank], None, data.topk_idx[data.rank], None, None, DispatchOptions(timeout_s=TIMEOUT_S)
    )
    ordinary = held.x.clone()
    back = CombineOptions(num_sms=num_sms, timeout_s=TIMEOUT_S)
    fp8_bytes = HIDDEN + 4 * HIDDEN // 128
    cases = [
        Case("dispatch bf16", tokens, num_sms, dispatch_call(buffer, data, plain, False), 2 * HIDDEN),
        Case("dispatch fp8", tokens, num_sms, dispatch_call(buffer, data, plain, True), fp8_bytes),
        Case("combine bf16", tokens, num_sms,
             lambda: buffer.combine(held.x, held.handle, None, (), out, back), 2 * HIDDEN),
        Case("combine bf16 from ordinary memory", tokens, num_sms,
             lambda: buffer.combine(ordinary, held.handle, None, (), out, back), 2 * HIDDEN),
    ]  # fmt: skip
    if with_expert:
        for name, alignment in (("expert dispatch", 128), ("expert dispatch, no padding,", 1)):
            expert = DispatchOptions(
                sync=False, timeout_s=TIMEOUT_S, num_sms=num_sms, layout="expert", expert_alignment=alignment
            )
            cases += [
                Case(f"{name} bf16", tokens, num_sms, dispatch_call(buffer, data, expert, False), 2 * HIDDEN),
                Case(f"{name} fp8", tokens, num_sms, dispatch_call(buffer, data, expert, True), fp8_bytes),
            ]
    return cases


GRAPH_TOKENS, GRAPH_PAIRS = 128, 8


def make_buffer(rank: int, num_ranks: int, tokens: int, num_slots: int) -> ThroughputEnd:
    """A buffer for the standard setting."""
    rows = math.ceil(1.5 * tokens * NUM_TOPK)  # half as many again as a balanced routing brings
    config = ThroughputConfig(
        rank, num_ranks, NUM_EXPERTS, HIDDEN, NUM_TOPK, tokens, torch.bfloat16, num_ranks * tokens, rows, num_slots
    )
    return ThroughputEnd(gpu.platform_of(rank), config, all_gather_bytes)


def graph_times(rank: int, num_ranks: int, num_sms: int | None, num_calls: int) -> dict[str, float]:
    """Median us, slowest rank, of what runs in CUDA graphs: one dispatch + combine with L2 flushed before, one of
    eight in a row, one of twenty barriers in a row."""
    buffer = make_buffer(rank, num_ranks, GRAPH_TOKENS, GRAPH_PAIRS + 2)
    bench = Bench(buffer, num_calls)
    data = Inputs(rank, num_ranks, GRAPH_TOKENS)
    x, idx, weights = data.x[rank].clone(), data.topk_idx[rank].clone(), data.topk_weights[rank]
    out = torch.empty_like(x)
    options = DispatchOptions(sync=False, timeout_s=TIMEOUT_S, num_sms=num_sms)
    back = CombineOptions(num_sms=num_sms, timeout_s=TIMEOUT_S)

    def pair() -> None:
        d = buffer.dispatch(x, None, idx, weights, None, options)
        buffer.combine(d.x, d.handle, None, (), out, back)

    calls = ((1, pair), (GRAPH_PAIRS, pair), (20, lambda: buffer.barrier(TIMEOUT_S)))
    graphs = [gpu.graph_of(call, count) for count, call in calls]
    for seed in range(3):
        fresh = Inputs(rank, num_ranks, GRAPH_TOKENS, seed + 7)
        x.copy_(fresh.x[rank])
        idx.copy_(fresh.topk_idx[rank])
        graphs[0].replay()
        times = torch.stack([fresh.goes(rank, dst) for dst in range(num_ranks)]).sum(0)
        want = torch.zeros(x.shape, device="cuda")
        for count in range(num_ranks):
            want = torch.where((times > count)[:, None], want + x.float(), want)
        expect(out, want.bfloat16(), f"graph replay {seed}")
    cold, warm, barriers = (bench.time(graph.replay).median for graph in graphs)
    buffer.close()
    return {"pair_cold_us": cold, "pair_us": warm / GRAPH_PAIRS, "barrier_us": barriers / 20}


def host_times(rank: int, num_ranks: int, num_tokens: int, num_calls: int) -> dict[str, dict[str, float]]:
    """Median us that the host spends in a call of `epee.Buffer` without CPU sync, slowest rank."""
    data = Inputs(rank, num_ranks, num_tokens)
    x, idx, weights = data.x[rank], data.topk_idx[rank], data.topk_weights[rank]
    times = {}
    with epee.Buffer(
        num_experts=NUM_EXPERTS, hidden=HIDDEN, num_topk=NUM_TOPK, max_tokens_per_rank=num_tokens, device="cuda",
        timeout=TIMEOUT_S,
    ) as buffer:  # fmt: skip
        held = buffer.dispatch(x, idx, weights, sync=False)
        expert = buffer.dispatch(x, idx, weights, sync=False, layout="expert")
        calls: dict[str, Callable[[], Any]] = {
            "dispatch": lambda: buffer.dispatch(x, idx, weights, sync=False),
            "expert dispatch": lambda: buffer.dispatch(x, idx, weights, sync=False, layout="expert"),
            "cached dispatch": lambda: buffer.dispatch(x, handle=held.handle, sync=False),
            "combine": lambda: buffer.combine(held.x, held.handle),  # type: ignore[arg-type]
            "expert combine": lambda: buffer.combine(expert.x, expert.handle),  # type: ignore[arg-type]
        }
        for name, call in calls.items():
            times[name] = {"in_a_row": _host_time(call, num_calls, False), "cold": _host_time(call, num_calls, True)}
        buffer.check()
    return times


def _host_time(call: Callable[[], Any], num_calls: int, is_cold: bool) -> float:
    for _ in range(HOST_WARM_UP):
        call()
    torch.cuda.synchronize()
    spent = []
    for _ in range(num_calls):
        before = time.perf_counter()
        call()
        spent.append((time.perf_counter() - before) * 1e6)
        if is_cold:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    mine = torch.tensor([sorted(spent)[len(spent) // 2]])
    dist.all_reduce(mine, op=dist.ReduceOp.MAX)
    return float(mine)


def profile(rank: int, name: str, call: Callable[[], Any]) -> dict[str, float]:
    """Print and return the mean duration in us of every kernel of a call, as the profiler of this rank sees it."""
    from torch.profiler import ProfilerActivity

    for _ in range(5):
        call()
    torch.cuda.synchronize()
    dist.barrier()
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as prof:
        torch.cuda._sleep(40_000_000)
        for _ in range(20):
            call()
        torch.cuda.synchronize()
    found = {}
    for event in prof.key_averages():
        if "throughput" in event.key or "barrier" in event.key:
            found[event.key] = event.device_time_total / event.count
            say(rank, f"    {name}: {event.key} {found[event.key]:.1f} us x {event.count // 20}")
    return found


def nccl_time(bench: Bench, data: Inputs, group: Any) -> Times:
    """The same rows over NCCL."""
    rank, row = data.rank, HIDDEN
    send = [int(data.goes(rank, dst).sum()) for dst in range(data.num_ranks)]
    recv = [int(data.goes(src, rank).sum()) for src in range(data.num_ranks)]
    x = torch.randn(sum(send), row, device="cuda").to(torch.bfloat16)
    out = torch.empty(sum(recv), row, device="cuda", dtype=torch.bfloat16)
    return bench.time(lambda: dist.all_to_all_single(out, x, recv, send, group=group))


def run(rank: int, args: argparse.Namespace, folder: str) -> None:
    """One rank."""
    torch.cuda.set_device(rank)
    store = dist.FileStore(f"{folder}/store", args.num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=args.num_ranks)
    num_ranks = args.num_ranks
    started = time.perf_counter()
    buffer = make_buffer(rank, num_ranks, max([*args.tokens, *args.check, 128]), 3)
    say(rank, f"buffer of {buffer.machine.nbytes / 1e6:.0f} MB in {time.perf_counter() - started:.2f} s")
    results: dict[str, Any] = {"num_ranks": num_ranks, "rows": []}
    try:
        for tokens in args.check:
            data = Inputs(rank, num_ranks, tokens, seed=1)
            for num_sms in CHECKED_SMS:
                check_rank_layout(buffer, data, num_sms)
            check_expert_layout(buffer, data, 128)
            buffer.check()
            say(rank, f"check {tokens} tokens: every bit as expected")
        if args.tokens:
            time_all(rank, args, buffer, results)
    except BaseException:  # noqa: BLE001 - the other ranks must not wait for this one
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    if rank == 0 and args.json:
        results |= {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "date": time.strftime("%Y-%m-%d"),
        }
        Path(args.json).parent.mkdir(parents=True, exist_ok=True)
        Path(args.json).write_text(json.dumps(results, indent=1))
    dist.barrier()
    buffer.close()
    dist.destroy_process_group()


def time_all(rank: int, args: argparse.Namespace, buffer: ThroughputEnd, results: dict[str, Any]) -> None:
    """Time every case at every size."""
    bench = Bench(buffer, args.calls)
    for tokens in args.tokens:
        data = Inputs(rank, args.num_ranks, tokens)
        received, remote = data.rows(rank)
        for num_sms in args.sms:
            for case in cases_for(buffer, data, tokens, num_sms, with_expert=True):
                if args.only and args.only not in case.name:
                    continue
                if args.profile:
                    name = f"{case.name} {tokens}"
                    results.setdefault("kernels_us", {})[name] = profile(rank, name, case.call)
                    continue
                took = bench.time(case.call)
                logical, wire = (n * case.row_bytes / took.median / 1e3 for n in (received, remote))
                row = Row(case.name, tokens, num_sms, *took[:4], logical, wire, took.host)
                results["rows"].append(asdict(row))
                say(
                    rank,
                    f"{case.name:36s} {tokens:5d} tokens {num_sms:3d} SMs: {took.median:7.1f} us (p10 {took.p10:7.1f},"
                    f" p90 {took.p90:7.1f}) logical {logical:5.0f} wire {wire:4.0f} GB/s = {wire / WIRE_GBPS:4.0%}, "
                    f"host {took.host:4.0f} us",
                )
    if args.only in "host":
        for tokens in dict.fromkeys((GRAPH_TOKENS, *args.tokens)):
            results.setdefault("host_us", {})[tokens] = host_times(rank, args.num_ranks, tokens, args.calls)
            for name, spent in results["host_us"][tokens].items():
                say(
                    rank,
                    f"host of Buffer, {name:16s} {tokens:5d} tokens: {spent['in_a_row']:5.1f} us in a row, "
                    f"{spent['cold']:5.1f} us after a synchronisation",
                )
    if not args.only:
        for num_sms in args.graph_sms:
            times = graph_times(rank, args.num_ranks, num_sms or None, args.calls)
            results[f"graph_{num_sms or 'default'}_sms"] = times
            say(
                rank,
                f"graph, {GRAPH_TOKENS} tokens, {num_sms or 'default'} SMs: "
                + ", ".join(f"{k} {v:.1f}" for k, v in times.items()),
            )
    if args.nccl:
        group = dist.new_group(backend="nccl")
        for tokens in args.tokens:
            took = nccl_time(bench, Inputs(rank, args.num_ranks, tokens), group)
            results["rows"].append({"name": "nccl all_to_all_single bf16", "tokens": tokens} | took.columns())
            say(rank, f"nccl all_to_all_single bf16 {tokens} tokens: {took.median:.1f} us (p90 {took.p90:.1f})")


def plot(json_path: str, image_path: str) -> None:
    """Draw bandwidth against tokens (24 SMs) and against SMs (4096 tokens) from a result file."""
    import matplotlib.pyplot as plt

    rows = [row for row in json.loads(Path(json_path).read_text())["rows"] if "wire_gbps" in row]
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), sharey=True)
    for axis, key, fixed, value in ((axes[0], "tokens", "num_sms", 24), (axes[1], "num_sms", "tokens", 4096)):
        for name in sorted({row["name"] for row in rows}):
            points = sorted((row[key], row["wire_gbps"]) for row in rows if row["name"] == name and row[fixed] == value)
            axis.plot(*zip(*points, strict=True), marker="o", label=name)
        axis.axhline(WIRE_GBPS, color="grey", linestyle=":", label="best copy seen")
        axis.set_xlabel("tokens per rank, 24 SMs" if key == "tokens" else "SMs, 4096 tokens")
        axis.grid(alpha=0.3)
    axes[0].set_xscale("log", base=2)
    axes[0].set_ylabel("GB/s over NVLink, per direction")
    axes[0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(image_path, dpi=120)


def say(rank: int, text: str) -> None:
    """Print once."""
    if rank == 0:
        print(text, flush=True)


def numbers(text: str) -> list[int]:
    """`1,2,3` as a list."""
    return [int(part) for part in text.split(",") if part]


def main() -> None:
    """Parse the command line and start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--tokens", type=numbers, default=[4096])
    parser.add_argument("--sms", type=numbers, default=[24])
    parser.add_argument(
        "--check", type=numbers, default=[0, 1, 17, 4096], help="token counts whose results are checked"
    )
    parser.add_argument(
        "--graph-sms", type=numbers, default=[0, 24, 48], help="SMs for the graphs of 128 tokens, 0 for the default"
    )
    parser.add_argument("--calls", type=int, default=50)
    parser.add_argument("--only", default="", help="time only cases with this in their name; host: of Buffer's calls")
    parser.add_argument("--profile", action="store_true", help="print the kernels' own durations instead")
    parser.add_argument("--nccl", action="store_true")
    for group in ("v1", "v2", "latency-names"):
        parser.add_argument(f"--{group}", action="store_true", help=f"only: calls_gpu.py --only {group}")
    parser.add_argument("--json", default="")
    parser.add_argument("--plot", nargs=2, metavar=("JSON", "IMAGE"), help="only draw a result file")
    args = parser.parse_args()
    if args.plot:
        plot(*args.plot)
        return
    if names := [name for name in ("v1", "v2", "latency-names") if getattr(args, name.replace("-", "_"))]:
        calls_gpu.start(args.num_ranks, names, json_path=args.json)
        return
    with tempfile.TemporaryDirectory() as folder:
        gpu.spawn(run, (args, folder), args.num_ranks)


if __name__ == "__main__":
    main()
