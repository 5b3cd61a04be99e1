"""What the first CPU buffer on a group of another backend costs its ranks, who found a job for it; and a further one.

    python benchmarks/first_buffer.py --num-ranks 2,4,8

Wall time of the constructor on rank 0 from a barrier of the group (gloo), median of `LIVES` lives, each of which closes
both buffers again; and how many descriptors and threads rank 0 has more with the first buffer, and with the second.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import threading
import time
from pathlib import Path

import torch.distributed as dist
import torch.multiprocessing as mp

import epee

LIVES = 9


def held() -> tuple[int, int]:
    """Return how many descriptors and Python threads this process has."""
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def made(num_ranks: int) -> tuple[epee.Buffer, float]:
    """Make a buffer behind a barrier; return it and the milliseconds that it took."""
    dist.barrier()
    began = time.perf_counter()
    buffer = epee.Buffer(num_experts=4 * num_ranks, hidden=64, num_topk=2, max_tokens_per_rank=16)
    return buffer, 1e3 * (time.perf_counter() - began)


def measure(rank: int, num_ranks: int, folder: str) -> None:
    """One rank; rank 0 leaves its line in `folder`."""
    store = dist.FileStore(f"{folder}/store", num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    times: list[tuple[float, float]] = []
    for _ in range(LIVES):
        alone = held()
        first, first_ms = made(num_ranks)
        one = held()
        second, second_ms = made(num_ranks)
        two = held()
        times.append((first_ms, second_ms))
        dist.barrier()
        second.close()
        first.close()
    if rank == 0:
        ms = [statistics.median(column) for column in zip(*times, strict=True)]
        Path(folder, "line").write_text(
            f"{num_ranks} ranks: first {ms[0]:.0f} ms, {one[0] - alone[0]} descriptors, {one[1] - alone[1]} thread(s); "
            f"second {ms[1]:.0f} ms, {two[0] - one[0]} descriptors, {two[1] - one[1]} threads"
        )
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Measure for each number of ranks and print a line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-ranks", default="2,4,8")
    for num_ranks in map(int, parser.parse_args().num_ranks.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(measure, (num_ranks, folder), nprocs=num_ranks)
            print(Path(folder, "line").read_text())


if __name__ == "__main__":
    main()
