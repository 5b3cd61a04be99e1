"""Collectives of a group in mode "mask" beside those of one in mode "raise", and NCCL's, on the GPUs of one host.

    python benchmarks/collectives_mask.py --json bench-out/collectives_mask.json

Clock and tensors as in `collectives_gpu.py`: microseconds of a call in a CUDA graph; results are checked first. Host:
how long an eager call keeps the calling thread, median of 200 calls, each timed by itself; the GPU is idle before every
tenth, so nobody waits for room in its queue. Both on the slowest rank.

Each way has processes of its own, one way after the other: two groups that are used at once in one process share the
GPU (docs/limits.md), and neither has the times of one alone.
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

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import epee
from benchmarks import gpu
from benchmarks.collectives_gpu import KINDS, TIMEOUT_S, Case, check_op, graph_us, half_of, say

OPS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
SIZES = (4, 64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20)
CHECKED_COUNTS = (1, 5000, 300_000, 2_000_000, 5_000_001)  # elements
REPLAYS, EAGER_BLOCKS, EAGER_CALLS = 15, 20, 10
WAYS = ("raise", "mask", "nccl")


def eager_us(call: Callable[[], Any]) -> gpu.Spread:
    """Microseconds of the calling thread over single calls, slowest rank."""
    for _ in range(5):
        call()
    times = []
    for _ in range(EAGER_BLOCKS):
        torch.cuda.synchronize()
        dist.barrier()
        for _ in range(EAGER_CALLS):
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e6)
    torch.cuda.synchronize()
    return gpu.spread(times)


def check(group: Any) -> None:
    """Calls of all ways of the kernels, bit for bit."""
    for count in CHECKED_COUNTS:
        for op in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast"):
            for again in range(4):  # the later ones look like the first: the root, too, which the seed says
                check_op(group, op, count, KINDS[0], count + len(op) + again * dist.get_world_size())


def times_of(group: Any, way: str) -> list[tuple[str, int, dict[str, float]]]:
    """Op, size, times in a graph and of the host of each case."""
    found = []
    for op in OPS:
        for size in SIZES:
            if size == 4 and op != "all_reduce":
                continue
            call = Case(op, size, dist.get_world_size()).by(group)
            graph, host = graph_us(call, size, REPLAYS), eager_us(call)
            found.append((op, size, graph.columns(way) | host.columns(f"{way}_host")))
            say(f"{way}: {op} of {size} bytes: {graph.median:.2f} us in a graph, the host {host.median:.2f} us")
            if way != "nccl":
                half_of(group).check()
    return found


def run(rank: int, num_ranks: int, way: str, folder: str) -> None:
    """One rank of one way; the first one writes what it has found into the folder."""
    torch.cuda.set_device(rank)
    store = dist.FileStore(f"{folder}/store-{way}", num_ranks)
    options = epee.BackendOptions(fault_mode="mask" if way == "mask" else "raise")
    dist.init_process_group("epee", store=store, rank=rank, world_size=num_ranks, pg_options=options)
    try:
        group: Any = dist.new_group(backend="nccl") if way == "nccl" else dist.group.WORLD
        if way != "nccl":
            group._engine.timeout_s = TIMEOUT_S
            check(group)
            say(f"{way}: every bit right")
        found = times_of(group, way)
        if rank == 0:
            Path(f"{folder}/{way}.json").write_text(json.dumps(found))
    except BaseException:  # noqa: BLE001 - the other ranks must not wait for this one
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def joined(found: dict[str, list[tuple[str, int, dict[str, float]]]]) -> list[dict[str, Any]]:
    """A row for each op and size, with the times of all ways."""
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    for cases in found.values():
        for op, size, columns in cases:
            rows.setdefault((op, size), {"op": op, "bytes": size}).update(columns)
    return list(rows.values())


def print_rows(rows: list[dict[str, Any]], ways: list[str]) -> None:
    """A line for each op and size."""
    for row in rows:
        graph, host = (" ".join(f"{way} {row[f'{way}{what}']:8.2f}" for way in ways) for what in ("_us", "_host_us"))
        print(f"{row['op']:15s}{row['bytes']:10d} bytes  graph, us: {graph}   host, us: {host}", flush=True)


def main() -> None:
    """Parse the command line; let the ranks of one way after the other run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for way in args.ways:
            gpu.spawn(run, (args.num_ranks, way, folder), args.num_ranks)
            found[way] = json.loads(Path(f"{folder}/{way}.json").read_text())
    rows = joined(found)
    print_rows(rows, args.ways)
    if args.json:
        facts = {"device": torch.cuda.get_device_name(), "num_ranks": args.num_ranks, "torch": torch.__version__}
        facts |= {"nccl": ".".join(map(str, torch.cuda.nccl.version())), "date": time.strftime("%Y-%m-%d")}
        facts["multicast_off"] = os.environ.get("NCCL_NVLS_ENABLE") == "0"
        Path(args.json).parent.mkdir(parents=True, exist_ok=True)
        Path(args.json).write_text(json.dumps(facts | {"rows": rows}, indent=1))


if __name__ == "__main__":
    main()
