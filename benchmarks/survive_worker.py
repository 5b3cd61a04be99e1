"""One rank of `epee bench survive`: a process that knows one version of the backend and times blocks of calls.

It is a script, not a module of the benchmark, because `PYTHONPATH` decides which version of epee it imports. Commands
come on standard input and answers go to standard output, a line of JSON each: [op, bytes, calls, repeats] -> seconds
per call of each repetition. The ranks of one version meet in a barrier of their own before each repetition.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import epee


def call_of(op: str, nbytes: int, num_ranks: int) -> Callable[[], object]:
    """Return the function that makes one call of `op` over zeros."""
    x = torch.zeros(max(1, nbytes // 4))
    if op == "all_reduce":
        return lambda: dist.all_reduce(x)
    if op == "broadcast":
        return lambda: dist.broadcast(x, 0)
    if op == "all_gather":
        out = torch.zeros(num_ranks * len(x))
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return lambda: gather(out, x)
    return dist.barrier


def main() -> None:
    """Take part until standard input ends."""
    rank, num_ranks, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    dist.init_process_group("epee", store=dist.FileStore(store, num_ranks), rank=rank, world_size=num_ranks)
    x = torch.full((3,), float(rank + 1))
    dist.all_reduce(x)
    assert x.tolist() == [num_ranks * (num_ranks + 1) / 2] * 3, "a wrong sum"
    sys.stdout.write(json.dumps(epee.__file__) + "\n")
    sys.stdout.flush()
    for line in sys.stdin:
        op, nbytes, num_calls, repeats = json.loads(line)
        call = call_of(op, nbytes, num_ranks)
        for _ in range(20):
            call()
        times = []
        for _ in range(repeats):
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(num_calls):
                call()
            times.append((time.perf_counter() - begin) / num_calls)
        sys.stdout.write(json.dumps(times) + "\n")
        sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
