"""`LatencyBuffer` on the GPUs of one host: check the results, then time them. One call does all.

    python benchmarks/latency_gpu.py --json bench-out/latency_gpu.json

Setting: hidden 7168, top-8 of 288 experts, random routing, as many tokens on every rank. Clock: two CUDA graphs of
`CALLS` calls, replayed in turn between two events; a figure is the difference of their times divided by that of their
calls: median, 10th and 90th percentile over the replays, on the slowest rank. So a call begins when the one before has
ended, and ends when its result may be read; that ranks begin a replay apart (their hosts meet within some 10 us) drops
out. The halves are timed by the profiler, each with everything that it waits for already there: so long they occupy the
GPU.

Bytes that cross NVLink (`wire`): tokens that go to another rank x bytes of a record, packets or not.

Every rank has a GPU of its own. A mode in which two GPUs stood for four ranks is gone: the kernels would have had to
know it. `results/latency_gpu_4ranks_on_2xh200.json` was measured in it.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import gpu
from epee.ep.latency.gpu.core import LatencyCore
from epee.ep.latency.gpu.params import PACKET_TOKENS
from epee.ep.latency.gpu.plan import LatencyCombinePlan, LatencyDispatchPlan
from epee.ep.latency.gpu.shapes import LatencyConfig, packet_bytes
from epee.ep.latency.gpu.types import CoreOptions, CoreReceived
from epee.reference.latency import quantise

NUM_EXPERTS, NUM_TOPK, HIDDEN, MAX_TOKENS = 288, 8, 7168, 128
CALLS, REPLAYS = (10, 60), 40
HALVES = 30  # calls whose halves are timed
TIMEOUT_S = 5.0
DEVICE = "cuda"
TARGET_US = {"dispatch fp8": {128: 18.0, 16: 10.0, 1: 8.0}, "combine bf16": {128: 22.0, 16: 10.0, 1: 8.0}}
TARGET_HALF_US = {"dispatch fp8": 11.0, "combine bf16": 18.0}  # the send half, 128 tokens


@dataclass(frozen=True)
class Inputs:
    """What all ranks send, made by each of them from the seed."""

    rank: int
    x: torch.Tensor  # [num_ranks, num_tokens, HIDDEN]
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor

    @classmethod
    def make(cls, rank: int, num_ranks: int, num_tokens: int, seed: int) -> Inputs:
        """Random rows, experts and weights."""
        gen = torch.Generator().manual_seed(seed)
        x = torch.randn(num_ranks, num_tokens, HIDDEN, generator=gen).to(torch.bfloat16)
        idx = torch.rand(num_ranks, num_tokens, NUM_EXPERTS, generator=gen).topk(NUM_TOPK, dim=-1)[1]
        weights = torch.rand(num_ranks, num_tokens, NUM_TOPK, generator=gen)
        return cls(rank, x.to(DEVICE), idx.to(DEVICE), weights.to(DEVICE))

    @property
    def num_ranks(self) -> int:
        """Ranks."""
        return self.x.shape[0]

    @property
    def num_tokens(self) -> int:
        """Of each rank."""
        return self.x.shape[1]

    def goes(self, src: int) -> torch.Tensor:
        """`[num_tokens, num_ranks]`: where the tokens of `src` go."""
        owners = self.topk_idx[src] // (NUM_EXPERTS // self.num_ranks)
        return torch.stack([(owners == dst).any(1) for dst in range(self.num_ranks)], 1)

    def places(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return (local expert, row, source token over all ranks) of all rows of this rank."""
        num_local = NUM_EXPERTS // self.num_ranks
        local = self.topk_idx.flatten(0, 1) - self.rank * num_local
        chosen = torch.zeros(local.shape[0], num_local, dtype=torch.bool, device=DEVICE)
        here = (local >= 0) & (local < num_local)
        chosen[here.nonzero()[:, 0], local[here]] = True
        row = chosen.long().cumsum(0) - 1
        token, expert = chosen.nonzero(as_tuple=True)
        return expert, row[token, expert], token


def all_gather_bytes(mine: bytes) -> list[bytes]:
    """Everybody's bytes, all of one length."""
    rows = [torch.zeros(len(mine), dtype=torch.uint8) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, torch.frombuffer(bytearray(mine), dtype=torch.uint8))
    return [row.numpy().tobytes() for row in rows]


def slowest(value: float) -> float:
    """The largest over the ranks."""
    word = torch.tensor([value])
    dist.all_reduce(word, op=dist.ReduceOp.MAX)
    return float(word)


def expect(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    """Fail unless every byte is equal."""
    same = got.contiguous().view(torch.uint8) == want.contiguous().view(torch.uint8)
    if not bool(same.all()):
        raise AssertionError(f"{what}: {int((~same).sum())} of {same.numel()} bytes differ")


def expert_rows(x: torch.Tensor, rank: int, expert: torch.Tensor) -> torch.Tensor:
    """What local experts of `rank` make of rows."""
    return (x.float() * (1.0 + 0.37 * rank) + 0.01 * expert[:, None]).to(torch.bfloat16)


def check(core: LatencyCore, data: Inputs, options: CoreOptions, is_wide: bool, who: str) -> None:
    """A dispatch and two combines, bit for bit."""
    rank = data.rank
    plan = core.plans.dispatch(data.num_tokens, 2 * HIDDEN, options)
    d = core.dispatch(plan, data.x[rank], data.topk_idx[rank], data.topk_weights[rank])
    if d.hook is not None:
        d.hook()
    expert, row, token = data.places()
    rows = data.x.flatten(0, 1)
    if options.use_fp8:
        values, scales = (part.to(DEVICE) for part in quantise(rows.cpu(), round_scale=options.round_scale))
        expect(d.x[expert, row], values[token], f"{who}: values")
        assert d.scales is not None
        expect(d.scales[expert, row], scales[token], f"{who}: scales")
    else:
        expect(d.x[expert, row], rows[token], f"{who}: rows")
    counts = torch.bincount(expert, minlength=core.config.num_local_experts).int()
    expect(d.handle.num_tokens_per_expert, counts, f"{who}: counts")
    y = torch.full((core.config.num_local_experts, core.config.capacity, HIDDEN), float("nan"), device=DEVICE)
    y = y.to(torch.bfloat16)
    y[expert, row] = expert_rows(rows[token], rank, expert)
    want = sums(data, is_wide)
    given = CoreOptions(TIMEOUT_S, return_hook=options.return_hook)
    for weights in (None, data.topk_weights[rank]):
        c = core.combine(core.plans.combine(data.num_tokens, given, is_wide, weights is not None), y, d.handle, weights)
        if c.hook is not None:
            c.hook()
        expect(c.x, want, f"{who}: combine, weights {'of dispatch' if weights is None else 'given'}")
    torch.cuda.synchronize()
    core.check()
    assert core.lost() == (), who


def sums(data: Inputs, is_wide: bool) -> torch.Tensor:
    """What the combine of this rank must bring."""
    rank, num_local = data.rank, NUM_EXPERTS // data.num_ranks
    total = torch.full((data.num_tokens, HIDDEN), -0.0, device=DEVICE)
    for dst in range(data.num_ranks):
        partial = torch.full_like(total, -0.0)
        for k in range(NUM_TOPK):
            local = data.topk_idx[rank][:, k] - dst * num_local
            here = ((local >= 0) & (local < num_local))[:, None]
            product = data.topk_weights[rank][:, k : k + 1] * expert_rows(data.x[rank], dst, local).float()
            partial = torch.where(here, partial + product, partial)
        if not is_wide:
            partial = partial.to(torch.bfloat16).float()
        total = torch.where(data.goes(rank)[:, dst : dst + 1], total + partial, total)
    return total.to(torch.bfloat16)


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


def graph_time(call: Callable[[], Any]) -> dict[str, float]:
    """Microseconds of a call over the replays, slowest rank."""
    graphs = [graph_of(call, count) for count in CALLS]
    for graph in graphs * 3:
        replay_us(graph)
    times = [(-replay_us(graphs[0]) + replay_us(graphs[1])) / (CALLS[1] - CALLS[0]) for _ in range(REPLAYS)]
    return {f"{name}_us": us for name, us in gpu.spread(times)._asdict().items()}


def half_times(call: Callable[[], Callable[[], None] | None], name: str) -> tuple[float, float]:
    """Median microseconds of the send and of the receive half, slowest rank: kernels as the profiler sees them."""
    from torch.profiler import ProfilerActivity

    def both() -> None:
        hook = call()
        assert hook is not None
        torch.cuda._sleep(400_000)  # some 200 us: everything arrives meanwhile
        hook()
        torch.cuda.synchronize()
        dist.barrier()

    both()
    torch.cuda.synchronize()
    dist.barrier()
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as prof:
        for _ in range(HALVES):
            both()
        torch.cuda.synchronize()
    kind = torch.autograd.DeviceType.CUDA
    kernels = [event for event in prof.events() if name in event.name and event.device_type == kind]
    kernels.sort(key=lambda event: event.time_range.start)
    spent = [event.time_range.end - event.time_range.start for event in kernels]
    if len(spent) != 2 * HALVES:
        seen = f"{len(spent)} kernels of {2 * HALVES}"
        say(dist.get_rank(), f"{name}: the profiler saw {seen}, so the halves are not timed")
        spent = [float("nan")] * 2 * HALVES
    halves = (sorted(spent[first::2])[HALVES // 2] for first in (0, 1))
    send, receive = (slowest(float(half)) for half in halves)
    return send, receive


def wire_bytes(core: LatencyCore, data: Inputs, row_words: int, meta_words: int) -> int:
    """Bytes of records that this rank sends to others."""
    words = meta_words + row_words
    is_packed = data.num_tokens <= core.config.packet_tokens
    remote = data.goes(data.rank)
    count = int(remote.sum()) - int(remote[:, data.rank].sum())
    return count * (packet_bytes(words) if is_packed else 4 * words)


def make_core(rank: int, num_ranks: int, packet_tokens: int) -> LatencyCore:
    """A buffer for the setting."""
    config = LatencyConfig(rank, num_ranks, NUM_EXPERTS, HIDDEN, NUM_TOPK, MAX_TOKENS, packet_tokens=packet_tokens)
    return LatencyCore(gpu.platform_of(rank), config, all_gather_bytes)


def say(rank: int, text: str) -> None:
    """Print once."""
    if rank == 0:
        print(text, flush=True)


def check_all(core: LatencyCore, sizes: list[int]) -> None:
    """Every way at every size."""
    rank, num_ranks = core.config.rank, core.config.num_ranks
    for number, tokens in enumerate([*sizes, *reversed(sizes)]):  # growing and shrinking batches
        data = Inputs.make(rank, num_ranks, tokens, 100 + number)
        for use_fp8, round_scale, hook, is_wide in (
            (True, False, False, False), (True, True, True, True), (False, False, False, False),
        ):  # fmt: skip
            options = CoreOptions(TIMEOUT_S, False, hook, use_fp8, round_scale)
            check(core, data, options, is_wide, f"rank {rank}, {tokens} tokens, {options}")
    say(rank, f"check {sizes} tokens, up to {core.config.packet_tokens} in packets: every bit as expected")


def time_size(core: LatencyCore, tokens: int, with_halves: bool) -> list[dict[str, Any]]:
    """All figures of one size."""
    rank = core.config.rank
    data = Inputs.make(rank, core.config.num_ranks, tokens, 7)
    x, idx, weights = data.x[rank], data.topk_idx[rank], data.topk_weights[rank]
    held: list[CoreReceived] = []

    @functools.cache
    def dispatches(use_fp8: bool, hook: bool) -> LatencyDispatchPlan:
        return core.plans.dispatch(tokens, 2 * HIDDEN, CoreOptions(TIMEOUT_S, return_hook=hook, use_fp8=use_fp8))

    @functools.cache
    def combines(given: bool, is_wide: bool, hook: bool) -> LatencyCombinePlan:
        return core.plans.combine(tokens, CoreOptions(TIMEOUT_S, return_hook=hook), is_wide, given)

    def dispatch(use_fp8: bool, hook: bool = False) -> Callable[[], None] | None:
        return core.dispatch(dispatches(use_fp8, hook), x, idx, weights).hook

    held.append(core.dispatch(dispatches(False, False), x, idx, weights))
    y = torch.randn(held[0].x.shape, device=DEVICE, dtype=torch.bfloat16)
    out = torch.empty_like(x)

    def combine(given: bool = False, is_wide: bool = False, hook: bool = False) -> Callable[[], None] | None:
        plan = combines(given, is_wide, hook)
        return core.combine(plan, y, held[0].handle, weights if given else None, out).hook

    def pair() -> None:
        d = core.dispatch(dispatches(True, False), x, idx, weights)
        core.combine(combines(False, False, False), y, d.handle, None, out)

    meta = core.config.meta_words
    fp8_words, bf16_words = HIDDEN // 4 + HIDDEN // 128, HIDDEN // 2
    cases: list[tuple[str, Callable[[], Any], int, int]] = [
        ("dispatch fp8", lambda: dispatch(True), fp8_words, meta),
        ("dispatch bf16", lambda: dispatch(False), bf16_words, meta),
        ("combine bf16", lambda: combine(), bf16_words, 0),
        ("combine bf16, weights given", lambda: combine(True), bf16_words, 0),
        ("combine f32", lambda: combine(False, True), HIDDEN, 0),
    ]
    rows = []
    for name, call, words, meta_words in cases:
        sent = wire_bytes(core, data, words, meta_words)
        row = {"name": name, "tokens": tokens} | graph_time(call) | {"wire_bytes": sent}
        row |= {"packet_tokens": core.config.packet_tokens, "target_us": TARGET_US.get(name, {}).get(tokens)}
        rows.append(row)
    rows.append({"name": "pair fp8 + bf16", "tokens": tokens} | graph_time(pair))
    if with_halves:
        for name, call, kernel in (
            ("dispatch fp8", lambda: dispatch(True, True), "dispatch_latency_fp8"),
            ("combine bf16", lambda: combine(hook=True), "combine_latency_bf16"),
        ):
            send, receive = half_times(call, kernel)
            rows.append({"name": f"{name}, halves", "tokens": tokens, "send_us": send, "receive_us": receive})
            if tokens == MAX_TOKENS:
                rows[-1]["target_us"] = TARGET_HALF_US[name]
    torch.cuda.synchronize()
    core.check()
    assert core.lost() == ()
    return rows


def print_rows(rank: int, packet_tokens: int, rows: list[dict[str, Any]]) -> None:
    """A line for each figure."""
    say(rank, f"up to {packet_tokens} tokens in packets")
    for row in rows:
        target = f" goal {row['target_us']:.0f}" if row.get("target_us") else ""
        if "send_us" in row:
            say(rank, f"  {row['name']:28s} {row['tokens']:4d} tokens: send {row['send_us']:6.2f} us, receive "
                      f"{row['receive_us']:6.2f} us{target}")  # fmt: skip
            continue
        wire = f", wire {row['wire_bytes'] / 1e6:5.2f} MB" if "wire_bytes" in row else ""
        say(rank, f"  {row['name']:28s} {row['tokens']:4d} tokens: {row['median_us']:6.2f} us (p10 "
                  f"{row['p10_us']:6.2f}, p90 {row['p90_us']:6.2f}){wire}{target}")  # fmt: skip


def run(rank: int, args: argparse.Namespace, folder: str) -> None:
    """One rank."""
    torch.cuda.set_device(rank)
    store = dist.FileStore(f"{folder}/store", args.num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=args.num_ranks)
    results: dict[str, Any] = {"num_ranks": args.num_ranks, "rows": []}
    try:
        for packet_tokens in args.packets:
            started = time.perf_counter()
            core = make_core(rank, args.num_ranks, packet_tokens)
            say(rank, f"buffer of {core.memory.nbytes / 1e6:.0f} MB in {time.perf_counter() - started:.2f} s")
            check_all(core, args.check if packet_tokens == args.packets[0] else args.check[-2:])
            for tokens in args.tokens:
                rows = time_size(core, tokens, packet_tokens == args.packets[0])
                print_rows(rank, packet_tokens, rows)
                results["rows"] += rows
            dist.barrier()
            core.close()
    except BaseException:  # noqa: BLE001 - the other ranks must not wait for this one
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    if rank == 0 and args.json:
        results |= {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        results["date"] = time.strftime("%Y-%m-%d")
        Path(args.json).parent.mkdir(parents=True, exist_ok=True)
        Path(args.json).write_text(json.dumps(results, indent=1))
    dist.barrier()
    dist.destroy_process_group()


def numbers(text: str) -> list[int]:
    """`1,2,3` as a list."""
    return [int(part) for part in text.split(",") if part]


def main() -> None:
    """Parse the command line and start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--tokens", type=numbers, default=[1, 16, 128])
    parser.add_argument("--check", type=numbers, default=[0, 1, 16, 33, 128], help="token counts that are checked")
    parser.add_argument(
        "--packets",
        type=numbers,
        default=[PACKET_TOKENS, 0, MAX_TOKENS],
        help="values of packet_tokens, one buffer each",
    )
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        gpu.spawn(run, (args, folder), args.num_ranks)


if __name__ == "__main__":
    main()
