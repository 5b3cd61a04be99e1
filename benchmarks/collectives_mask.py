"""Collectives of a group in mode "mask" beside those of one in mode "raise", on the GPUs of one host.

    python benchmarks/collectives_mask.py --json bench-out/collectives_mask.json

Clock and tensors as in `collectives_gpu.py`: microseconds of a call in a CUDA graph. Results are checked first.
Both groups are in one process; nothing else runs on the GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import epee
from benchmarks.collectives_gpu import KINDS, TIMEOUT_S, Case, check_op, graph_us, half_of, host_us, say

OPS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
SIZES = (4, 64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20)
MODES = ("raise", "mask")


def times(groups: dict[str, Any]) -> list[dict[str, Any]]:
    """A line for each op and size."""
    rows = []
    for op in OPS:
        for size in SIZES:
            if size == 4 and op != "all_reduce":
                continue
            case = Case(op, size, dist.get_world_size())
            row: dict[str, Any] = {"op": op, "bytes": size}
            for mode in MODES:
                row[f"{mode}_us"] = graph_us(case.by(groups[mode]), size, 15)
                row[f"{mode}_host_us"] = host_us(case.by(groups[mode]))
                half_of(groups[mode]).check()
            rows.append(row)
            graph, host = (
                " ".join(f"{mode} {row[f'{mode}{what}']:7.2f}" for mode in MODES) for what in ("_us", "_host_us")
            )
            say(f"{op:15s}{size:9d} bytes  graph, us: {graph}   host, us: {host}")
    return rows


def run(rank: int, num_ranks: int, path: str, folder: str) -> None:
    """One rank."""
    torch.cuda.set_device(rank)
    store = dist.FileStore(f"{folder}/store", num_ranks)
    dist.init_process_group("epee", store=store, rank=rank, world_size=num_ranks)
    try:
        groups: dict[str, Any] = {"raise": dist.group.WORLD}
        groups["mask"] = dist.new_group(backend="epee", pg_options=epee.BackendOptions(fault_mode="mask"))
        for group in groups.values():
            group._engine.timeout_s = TIMEOUT_S
            for count in (1, 5000, 300_000, 2_000_000, 5_000_001):
                for op in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast"):
                    check_op(group, op, count, KINDS[0], count + len(op))
        say("check: every bit right in both modes")
        rows = times(groups)
        if rank == 0 and path:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            found = {"device": torch.cuda.get_device_name(), "num_ranks": num_ranks, "rows": rows}
            Path(path).write_text(json.dumps(found, indent=1))
    except BaseException:  # noqa: BLE001 - the other ranks must not wait for this one
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def main() -> None:
    """Parse the command line and start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (args.num_ranks, args.json, folder), args.num_ranks)


if __name__ == "__main__":
    main()
