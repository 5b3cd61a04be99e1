"""What `Buffer.sync(mask)` costs on CPUs when all come, and the first call after it, which enters the new epoch.

    python benchmarks/sync.py --num-ranks 2,4,8

Wall time on rank 0 from a barrier of the group (gloo), median and 90th percentile of `ROUNDS` rounds, each of which
checks the mask. For comparison the same call without a sync before it.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import epee

ROUNDS = 40


def timed(call: Callable[[], object]) -> float:
    """Return the milliseconds that a call takes from a barrier on."""
    dist.barrier()
    began = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - began)


def measure(rank: int, num_ranks: int, folder: str) -> None:
    """One rank; rank 0 leaves its line in `folder`."""
    store = dist.FileStore(f"{folder}/store", num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    times = []
    with epee.Buffer(num_experts=4 * num_ranks, hidden=64, num_topk=2, max_tokens_per_rank=16) as buffer:
        mask = torch.ones(num_ranks, dtype=torch.int32)
        buffer.all_gather_bytes(b"")
        for _ in range(ROUNDS):
            plain_ms = timed(lambda: buffer.all_gather_bytes(b""))
            sync_ms = timed(lambda: buffer.sync(mask))
            if mask.tolist() != [1] * num_ranks:
                raise SystemExit(f"sync has left out {mask.tolist()}")
            times.append((sync_ms, timed(lambda: buffer.all_gather_bytes(b"")), plain_ms))
        dist.barrier()
    if rank == 0:
        p50, p90 = np.percentile(np.array(times), (50, 90), axis=0)
        names = ("sync", "first call after it", "a call without")
        told = (f"{name} {a:.2f} / {b:.2f}" for name, a, b in zip(names, p50, p90, strict=True))
        Path(folder, "line").write_text(f"{num_ranks} ranks, ms p50 / p90: {', '.join(told)}")
    dist.destroy_process_group()


def main() -> None:
    """Measure for each number of ranks and print a line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-ranks", default="2,4,8")
    for num_ranks in map(int, parser.parse_args().num_ranks.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(measure, (num_ranks, folder), nprocs=num_ranks)
            print(Path(folder, "line").read_text(), flush=True)


if __name__ == "__main__":
    main()
