"""Time calls as users make them, from Python, eager: elapsed and host time of a call.

    python benchmarks/calls_gpu.py --num-ranks 4 --json bench-out/calls_gpu.json
    python benchmarks/calls_gpu.py --only latency,v1 --default-device

Clock: CUDA events around a block of calls back to back, divided by their number (elapsed), and the host's clock around
the same block without the wait for the GPU (host); the best of five blocks, each begun by all ranks together, on the
slowest rank; beside it the median, least and largest elapsed time of the five. `tensor.add_` of one element is timed in
the same way, as a measure of the machine's host; with several ranks NCCL's `all_to_all_single` as well. Every result is
checked against a closed form first.

Groups (`--only`): "barrier"; "latency" (`LatencyBuffer`, 128 tokens) and "latency-names" (the same by DeepEP's names);
"throughput" (`Buffer`); "v1" and "v2" (DeepEP's `Buffer` and `ElasticBuffer`). Hidden 7168, top-8 of 256 experts.

The rows of the barrier:

    V2 names           epee.compat.deep_ep.ElasticBuffer.barrier()
    Buffer             epee.Buffer.barrier()
    launch             the kernel alone, arguments prepared
    graph of one       a CUDA graph with one barrier, replayed
    graph of twenty    a CUDA graph with twenty, replayed; time of one barrier
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
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import epee
import epee.compat.deep_ep as deep_ep
from benchmarks import gpu

TIMEOUT_S = 20
BLOCKS, WARM_UP = 5, 20
IN_GRAPH = 20
HIDDEN, NUM_TOPK, NUM_EXPERTS = 7168, 8, 256
FEW, MANY = 128, 4096


class Times(NamedTuple):
    """Microseconds of a call: the best block's elapsed and host time; median, least and largest elapsed time."""

    elapsed: float
    host: float
    median: float
    least: float
    largest: float


Rows = dict[str, Times]


def block_times(call: Callable[[], object], num_calls: int) -> Times:
    """Return the times of a call over the blocks, each of the rank where it is largest."""
    for _ in range(WARM_UP):
        call()
    times = []
    for _ in range(BLOCKS):
        torch.cuda.synchronize()
        dist.barrier()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        began = time.perf_counter()
        for _ in range(num_calls):
            call()
        host = time.perf_counter() - began
        end.record()
        torch.cuda.synchronize()
        times.append((start.elapsed_time(end) * 1e3 / num_calls, host * 1e6 / num_calls))
    elapsed = sorted(block[0] for block in times)
    found = [elapsed[0], min(host for _, host in times), elapsed[len(elapsed) // 2], elapsed[0], elapsed[-1]]
    mine = torch.tensor(found, device="cpu", dtype=torch.float64)
    dist.all_reduce(mine, op=dist.ReduceOp.MAX)
    return Times(*mine.tolist())


class Inputs:
    """Rows and routing of this rank, equal weights; `num_ranks_of[token]` ranks receive a token."""

    def __init__(self, rank: int, num_ranks: int, num_tokens: int) -> None:
        generator = torch.Generator("cpu").manual_seed(100 * num_tokens + rank)
        scores = torch.rand(num_tokens, NUM_EXPERTS, generator=generator, device="cpu", dtype=torch.float32)
        idx = scores.topk(NUM_TOPK, dim=1).indices
        owners = idx // (NUM_EXPERTS // num_ranks)
        reached = torch.zeros(num_tokens, num_ranks, dtype=torch.int64, device="cpu").scatter_(1, owners, 1)
        rows = torch.randn(num_tokens, HIDDEN, generator=generator, device="cpu", dtype=torch.float32)
        self.x = rows.bfloat16().cuda()
        self.idx = idx.cuda()
        self.weights = torch.full((num_tokens, NUM_TOPK), 1 / NUM_TOPK, dtype=torch.float32, device="cuda")
        self.num_ranks_of = reached.sum(1).cuda()

    def check_summed(self, got: torch.Tensor) -> None:
        """Raise unless `got` is what comes back when every rank returns the rows as they came."""
        wanted = (self.x.float() * self.num_ranks_of[:, None]).bfloat16()
        assert torch.equal(got[: len(wanted)], wanted), "a combine of what was dispatched gave other rows"

    def check_weighted(self, got: torch.Tensor) -> None:
        """Raise unless `got` is x but for roundings: FP8 there, bfloat16 back."""
        assert torch.allclose(got.float(), self.x.float(), rtol=0.1, atol=0.1), "a latency pair gave other rows"


def time_latency(rank: int, num_ranks: int, num_calls: int) -> Rows:
    """Time `LatencyBuffer`: a pair with FP8, and each call alone."""
    given = Inputs(rank, num_ranks, FEW)
    buffer = epee.LatencyBuffer(
        num_experts=NUM_EXPERTS,
        hidden=HIDDEN,
        num_topk=NUM_TOPK,
        max_tokens_per_rank=FEW,
        device="cuda",
        timeout=TIMEOUT_S,
    )
    got = buffer.dispatch(given.x, given.idx, given.weights)
    assert isinstance(got.x, torch.Tensor)
    given.check_weighted(buffer.combine(got.x, got.handle).x)
    rows, handle = got.x, got.handle

    def pair() -> None:
        back = buffer.dispatch(given.x, given.idx, given.weights, use_fp8=True)
        buffer.combine(rows, back.handle)

    return {
        "LatencyBuffer pair, FP8": block_times(pair, num_calls),
        "LatencyBuffer dispatch, FP8": block_times(
            lambda: buffer.dispatch(given.x, given.idx, given.weights, use_fp8=True), num_calls
        ),
        "LatencyBuffer combine": block_times(lambda: buffer.combine(rows, handle), num_calls),
    }


def time_latency_names(rank: int, num_ranks: int, num_calls: int) -> Rows:
    """Time the same calls by DeepEP's names."""
    given = Inputs(rank, num_ranks, FEW)
    nbytes = deep_ep.Buffer.get_low_latency_rdma_size_hint(FEW, HIDDEN, num_ranks, NUM_EXPERTS)
    buffer = deep_ep.Buffer(
        dist.group.WORLD, 0, nbytes, low_latency_mode=True, num_qps_per_rank=NUM_EXPERTS // num_ranks
    )
    rows, _, handle, _, _ = buffer.low_latency_dispatch(given.x, given.idx, FEW, NUM_EXPERTS, use_fp8=False)
    assert isinstance(rows, torch.Tensor)
    given.check_weighted(buffer.low_latency_combine(rows, given.idx, given.weights, handle)[0])

    def pair() -> None:
        back = buffer.low_latency_dispatch(given.x, given.idx, FEW, NUM_EXPERTS)
        buffer.low_latency_combine(rows, given.idx, given.weights, back[2])

    return {"low_latency pair, FP8": block_times(pair, num_calls)}


def time_throughput(rank: int, num_ranks: int, num_calls: int) -> Rows:
    """Time `Buffer`: dispatch with and without CPU sync, cached, combine."""
    rows: Rows = {}
    for num_tokens in (FEW, MANY):
        given = Inputs(rank, num_ranks, num_tokens)
        buffer = epee.Buffer(
            num_experts=NUM_EXPERTS,
            hidden=HIDDEN,
            num_topk=NUM_TOPK,
            max_tokens_per_rank=num_tokens,
            device="cuda",
            timeout=TIMEOUT_S,
        )
        got = buffer.dispatch(given.x, given.idx, given.weights)
        assert isinstance(got.x, torch.Tensor)
        given.check_summed(buffer.combine(got.x, got.handle).x)
        num = num_calls if num_tokens == FEW else num_calls // 4
        calls = {
            "dispatch": lambda given=given, buffer=buffer: buffer.dispatch(
                given.x, given.idx, given.weights, sync=False
            ),
            "dispatch, CPU sync": lambda given=given, buffer=buffer: buffer.dispatch(given.x, given.idx, given.weights),
            "cached dispatch": lambda given=given, buffer=buffer, got=got: buffer.dispatch(given.x, handle=got.handle),
            "combine": lambda buffer=buffer, got=got: buffer.combine(got.x, got.handle),
        }
        for name, call in calls.items():
            rows[f"Buffer {name}, {num_tokens}"] = block_times(call, num)
        del got, calls
        buffer.close()
    return rows


def time_v1(rank: int, num_ranks: int, num_calls: int) -> Rows:
    """Time DeepEP V1's names: the layout, a step, and its calls alone."""
    rows: Rows = {}
    buffer = deep_ep.Buffer(dist.group.WORLD, 1 << 30)
    for num_tokens in (FEW, MANY):
        given = Inputs(rank, num_ranks, num_tokens)

        def dispatch(given: Inputs = given) -> Any:
            per_rank, _, per_expert, is_in, _ = buffer.get_dispatch_layout(given.idx, NUM_EXPERTS)
            return buffer.dispatch(
                given.x,
                num_tokens_per_rank=per_rank,
                is_token_in_rank=is_in,
                num_tokens_per_expert=per_expert,
                topk_idx=given.idx,
                topk_weights=given.weights,
            )

        def step(dispatch: Callable[[], Any] = dispatch) -> None:
            got = dispatch()
            buffer.combine(got[0], got[4])

        got = dispatch()
        given.check_summed(buffer.combine(got[0], got[4])[0])
        num = num_calls if num_tokens == FEW else num_calls // 4
        calls = {
            "get_dispatch_layout": lambda given=given: buffer.get_dispatch_layout(given.idx, NUM_EXPERTS),
            "layout + dispatch + combine": step,
            "cached dispatch": lambda given=given, got=got: buffer.dispatch(given.x, handle=got[4]),
            "combine": lambda got=got: buffer.combine(got[0], got[4]),
        }
        for name, call in calls.items():
            rows[f"V1 {name}, {num_tokens}"] = block_times(call, num)
        del got, calls
    return rows


def time_v2(rank: int, num_ranks: int, num_calls: int) -> Rows:
    """Time DeepEP V2's names: a step with and without CPU sync."""
    rows: Rows = {}
    for num_tokens in (FEW, MANY):
        given = Inputs(rank, num_ranks, num_tokens)
        buffer = deep_ep.ElasticBuffer(
            dist.group.WORLD,
            num_max_tokens_per_rank=num_tokens,
            num_cpu_timeout_secs=TIMEOUT_S,
            explicitly_destroy=True,
        )
        for do_cpu_sync in (False, True):

            def step(given: Inputs = given, buffer: Any = buffer, do_cpu_sync: bool = do_cpu_sync) -> torch.Tensor:
                got = buffer.dispatch(
                    given.x, given.idx, given.weights, num_experts=NUM_EXPERTS, do_cpu_sync=do_cpu_sync
                )
                return buffer.combine(got[0], got[3])[0]

            given.check_summed(step())
            num = num_calls if num_tokens == FEW else num_calls // 4
            rows[f"V2 dispatch + combine, {num_tokens}, do_cpu_sync={int(do_cpu_sync)}"] = block_times(step, num)
        buffer.destroy()
    return rows


def time_machine(num_ranks: int, num_calls: int) -> Rows:
    """Time what a call of anybody costs here: `tensor.add_`, and NCCL's exchange of one row a rank."""
    word = torch.zeros(1, device="cuda")
    rows: Rows = {"tensor.add_": block_times(lambda: word.add_(1), num_calls)}
    if num_ranks > 1:
        group = dist.new_group(backend="nccl")
        there, back = (torch.zeros(num_ranks, 64, device="cuda") for _ in range(2))
        rows["NCCL all_to_all_single"] = block_times(
            lambda: dist.all_to_all_single(back, there, group=group), num_calls
        )
    return rows


def time_barrier(rank: int, num_ranks: int, num_calls: int) -> Rows:
    """Time the barrier; the first dispatch makes the buffer's memory."""
    buffer = deep_ep.ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=128, num_cpu_timeout_secs=TIMEOUT_S)
    x = torch.ones(16, 256, dtype=torch.bfloat16, device="cuda")
    idx = torch.arange(32, device="cuda").view(16, 2) % (4 * num_ranks)
    buffer.dispatch(x, idx, num_experts=4 * num_ranks)
    assert buffer.runtime is not None
    whole: Any = buffer.runtime._rooms.whole
    path: Any = whole._path
    machine, barrier = path.machine, path.machine._barrier
    stream = machine.platform.stream()

    def launch() -> None:
        machine.announce()
        barrier.call.ordinal = machine.num_calls
        barrier.kernel(1, 32, 0, stream, "plain")

    rows: Rows = {}
    rows["V2 names"] = block_times(buffer.barrier, num_calls)
    rows["Buffer"] = block_times(whole.barrier, num_calls)
    rows["launch"] = block_times(launch, num_calls)
    one, many = gpu.graph_of(buffer.barrier, 1), gpu.graph_of(buffer.barrier, IN_GRAPH)
    rows["graph of one"] = block_times(one.replay, num_calls)
    twenty = block_times(many.replay, max(1, num_calls // IN_GRAPH))
    rows["graph of twenty"] = Times(*(us / IN_GRAPH for us in twenty))
    buffer.barrier(with_cpu_sync=True)
    return rows


GROUPS: dict[str, Callable[[int, int, int], Rows]] = {
    "barrier": time_barrier,
    "latency": time_latency,
    "latency-names": time_latency_names,
    "throughput": time_throughput,
    "v1": time_v1,
    "v2": time_v2,
}


def run(rank: int, args: argparse.Namespace, folder: str) -> None:
    """One rank."""
    torch.cuda.set_device(rank)
    store = dist.FileStore(f"{folder}/store", args.num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=args.num_ranks)
    if args.default_device:
        torch.set_default_device("cuda")
    rows: Rows = {}
    try:
        rows.update(time_machine(args.num_ranks, args.calls))
        for name in args.only:
            rows.update(GROUPS[name](rank, args.num_ranks, args.calls))
    except BaseException:  # noqa: BLE001 - the other ranks must not wait for this one
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    if rank == 0:
        report(rows, args)
    dist.barrier()
    dist.destroy_process_group()


def report(rows: Rows, args: argparse.Namespace) -> None:
    """Print the rows, and write them where that is asked for."""
    mode = ", set_default_device" if args.default_device else ""
    print(f"{args.num_ranks}x {torch.cuda.get_device_name()}, torch {torch.__version__}, {args.calls} calls{mode}")
    unit = rows["tensor.add_"][1]
    for name, times in rows.items():
        print(
            f"  {name:44s} elapsed {times.elapsed:8.2f} us ({times.least:.1f} to {times.largest:.1f})   "
            f"host {times.host:8.2f} us = {times.host / unit:5.2f} add_",
            flush=True,
        )
    if args.json:
        Path(args.json).parent.mkdir(parents=True, exist_ok=True)
        facts = {"num_ranks": args.num_ranks, "device": torch.cuda.get_device_name(), "torch": torch.__version__}
        facts |= {"default_device": args.default_device, "date": time.strftime("%Y-%m-%d")}
        best = {name: (times.elapsed, times.host) for name, times in rows.items()}
        blocks = {name: (times.median, times.least, times.largest) for name, times in rows.items()}
        Path(args.json).write_text(
            json.dumps({**facts, "elapsed_and_host_us": best, "elapsed_of_blocks_us": blocks}, indent=1)
        )


def main() -> None:
    """Parse the command line and start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--only", default=",".join(GROUPS), help="groups, separated by commas")
    parser.add_argument("--default-device", action="store_true", help="with torch.set_default_device('cuda')")
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    start(args.num_ranks, args.only.split(","), args.calls, args.default_device, args.json)


def start(
    num_ranks: int, names: list[str], calls: int = 300, default_device: bool = False, json_path: str = ""
) -> None:
    """Time groups of calls on so many ranks, and report."""
    args = argparse.Namespace(
        num_ranks=num_ranks, only=names, calls=calls, default_device=default_device, json=json_path
    )
    with tempfile.TemporaryDirectory() as folder:
        gpu.spawn(run, (args, folder), num_ranks)


if __name__ == "__main__":
    main()
