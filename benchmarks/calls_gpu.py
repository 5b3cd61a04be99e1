"""Time calls as users make them, from Python, eager: elapsed and host time of a call. So far the barrier.

    python benchmarks/calls_gpu.py --num-ranks 2

Clock: CUDA events around a block of calls back to back, divided by their number (elapsed), and the host's clock around
the same block without the wait for the GPU (host); the best of five blocks, each begun by all ranks together, on the
slowest rank. `tensor.add_` of one element is timed in the same way, as a measure of the machine's host. The rows:

    V2 names           epee.compat.deep_ep.ElasticBuffer.barrier()
    Buffer             epee.Buffer.barrier()
    core               epee.ep.throughput.gpu.core.Throughput.barrier(timeout)
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
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import epee.compat.deep_ep as deep_ep
from epee.ep.throughput.shapes import LaunchShape

TIMEOUT_S = 20
BLOCKS = 5
IN_GRAPH = 20


def block_times(call: Callable[[], object], num_calls: int) -> tuple[float, float]:
    """Return elapsed and host microseconds of a call: best block, slowest rank."""
    for _ in range(20):
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
    best = torch.tensor([min(elapsed for elapsed, _ in times), min(host for _, host in times)])
    dist.all_reduce(best, op=dist.ReduceOp.MAX)
    return float(best[0]), float(best[1])


def graph_of(call: Callable[[], object], count: int) -> torch.cuda.CUDAGraph:
    """Record a call several times."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            call()
    return graph


def time_barrier(num_ranks: int, num_calls: int) -> dict[str, Any]:
    """Time everything; the first dispatch makes the buffer's memory."""
    buffer = deep_ep.ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=128, num_cpu_timeout_secs=TIMEOUT_S)
    x = torch.ones(16, 256, dtype=torch.bfloat16, device="cuda")
    idx = torch.arange(32, device="cuda").view(16, 2) % (4 * num_ranks)
    buffer.dispatch(x, idx, num_experts=4 * num_ranks)
    assert buffer.runtime is not None
    (room,) = buffer.runtime._rooms.values()
    core: Any = room.core._path._core  # type: ignore[union-attr]
    machine, one_warp = core._machine, LaunchShape(1, 32, 0, 0, 0)
    stream = machine.platform.stream()
    kernel = machine.kernel("barrier", float(TIMEOUT_S))

    def launch() -> None:
        machine.announce()
        kernel(1, 32, one_warp.shared_bytes, stream, "plain")

    word = torch.zeros(1, device="cuda")
    rows: dict[str, Any] = {"tensor.add_": block_times(lambda: word.add_(1), num_calls)}
    rows["V2 names"] = block_times(buffer.barrier, num_calls)
    rows["Buffer"] = block_times(room.core.barrier, num_calls)
    rows["core"] = block_times(lambda: core.barrier(float(TIMEOUT_S)), num_calls)
    rows["launch"] = block_times(launch, num_calls)
    one, many = graph_of(buffer.barrier, 1), graph_of(buffer.barrier, IN_GRAPH)
    rows["graph of one"] = block_times(one.replay, num_calls)
    elapsed, host = block_times(many.replay, max(1, num_calls // IN_GRAPH))
    rows["graph of twenty"] = elapsed / IN_GRAPH, host / IN_GRAPH
    buffer.barrier(with_cpu_sync=True)
    return rows


def run(rank: int, args: argparse.Namespace, folder: str) -> None:
    """One rank."""
    torch.cuda.set_device(rank)
    store = dist.FileStore(f"{folder}/store", args.num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=args.num_ranks)
    try:
        rows = time_barrier(args.num_ranks, args.calls)
    except BaseException:  # noqa: BLE001 - the other ranks must not wait for this one
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    if rank == 0:
        print(f"{args.num_ranks}x {torch.cuda.get_device_name()}, torch {torch.__version__}, {args.calls} calls")
        unit = rows["tensor.add_"][1]
        for name, value in rows.items():
            if isinstance(value, tuple):
                print(
                    f"  {name:16s} elapsed {value[0]:6.2f} us = {value[0] / unit:4.2f} add_   host {value[1]:6.2f} us",
                    flush=True,
                )
            else:
                print(f"  {name:16s} {value:6.2f} us", flush=True)
        if args.json:
            Path(args.json).parent.mkdir(parents=True, exist_ok=True)
            facts = {"num_ranks": args.num_ranks, "device": torch.cuda.get_device_name(), "torch": torch.__version__}
            Path(args.json).write_text(json.dumps({**facts, "barrier_us": rows}, indent=1))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Parse the command line and start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, args=(args, folder), nprocs=args.num_ranks)


if __name__ == "__main__":
    main()
