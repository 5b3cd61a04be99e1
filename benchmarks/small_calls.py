"""Blocking calls of few bytes between two ranks, back to back: what a call costs beside its bytes.

    python benchmarks/small_calls.py --json small.json

Clock: wall time of each call on rank 0; of send and receive half a round trip. `--calls` calls of each kind after
`WARM_UP`; p10 and median. Imports nothing but `epee`, so that `scripts/compare --what small` can run this copy with
the package of another checkout.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import epee  # noqa: F401 - registers the backend

WARM_UP, CALLS = 100, 1400
MESSAGE_BYTES = (4, 64 << 10)


def timed(call: Callable[[], Any], calls: int) -> dict[str, float]:
    """Return p10 and median of a call in microseconds."""
    taken = []
    for _ in range(WARM_UP + calls):
        began = time.perf_counter()
        call()
        taken.append(1e6 * (time.perf_counter() - began))
    ordered = sorted(taken[WARM_UP:])
    return {"p10_us": ordered[calls // 10], "median_us": ordered[calls // 2]}


def there_and_back(rank: int, x: torch.Tensor) -> None:
    """Send to rank 1 and receive the same again."""
    for is_sender in (rank == 0, rank == 1):
        if is_sender:
            dist.send(x, 1 - rank)
        else:
            dist.recv(x, 1 - rank)


def measure(rank: int, calls: int, folder: str) -> None:
    """One rank; rank 0 leaves the rows in `folder`."""
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("epee", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    rows = []
    for nbytes in MESSAGE_BYTES:
        x = torch.ones(nbytes, dtype=torch.uint8, device="cpu")
        trip = timed(lambda x=x: there_and_back(rank, x), calls)  # type: ignore[misc]
        rows.append({"op": "send_recv", "bytes": nbytes, "epee": {key: value / 2 for key, value in trip.items()}})
    one = torch.ones(1, dtype=torch.float32, device="cpu")
    both = [torch.ones(1, dtype=torch.float32, device="cpu") for _ in range(2)]
    others: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(one),
        "all_gather": lambda: dist.all_gather(both, one),
        "broadcast": lambda: dist.broadcast(one, 0),
        "barrier": dist.barrier,
    }
    for name, call in others.items():
        rows.append({"op": name, "bytes": 4, "epee": timed(call, calls)})
    if rank == 0:
        report = {"results": [{**row, "num_ranks": 2} for row in rows]}
        Path(folder, "rows.json").write_text(json.dumps(report))
    dist.destroy_process_group()


def main() -> None:
    """Measure, print the rows, and write them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=CALLS)
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, (args.calls, folder), nprocs=2)
        text = Path(folder, "rows.json").read_text()
    for row in json.loads(text)["results"]:
        print(f"{row['op']:12s} {row['bytes']:6d} B  " + "  ".join(f"{k} {v:.1f}" for k, v in row["epee"].items()))
    if args.json:
        Path(args.json).write_text(text)


if __name__ == "__main__":
    main()
