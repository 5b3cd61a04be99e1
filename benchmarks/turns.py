"""Calls of two checkouts in turns of milliseconds, so that they meet the same machine: `scripts/compare --what turns`.

    python benchmarks/turns.py BEFORE_FOLDER AFTER_FOLDER --cases barrier,all_reduce:4,dispatch:64 --turns 60

On a shared machine a whole run takes twice as long as the next one, and no median of such runs tells a change of 5 %.
Here the ranks of all checkouts live at once, each checkout's in processes and a group of their own, and one word in a
file that all map says whose turn it is. Only rank 0 of a checkout reads it; it sleeps until the turn is its own, and
its peers sleep in the barrier that it has not joined yet. Then the ranks make `CALLS` calls, rank 0 times each, and
rank 0 hands the word on. Turns of the checkouts that follow each other are compared with each other.

    case            what is timed
    barrier         `dist.barrier()`
    OP:BYTES        all_reduce, broadcast, all_gather, all_to_all of BYTES per rank; send_recv: half a round trip
    dispatch:TOKENS, combine:TOKENS    `Buffer` with 2048 bfloat16 per row, top-4 of 32 experts

Clock: wall time of each call on rank 0. A turn's figures are p10 and median of its calls in microseconds. Imports
nothing but `epee` and torch, and only what commits of long ago have too. A rank that waits longer than `LIMIT_S` for
its turn gives up, as a checkout whose ranks have died hands nothing on.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

NUM_RANKS, WARM_UP, CALLS, FEW_CALLS, LARGE_BYTES = 2, 5, 200, 40, 256 << 10
LIMIT_S = 60.0
HIDDEN, NUM_TOPK, NUM_EXPERTS = 2048, 4, 32
CASES = (
    "barrier,all_reduce:4,all_reduce:65536,all_reduce:1048576,broadcast:4,broadcast:1048576,all_gather:4,"
    "all_gather:1048576,all_to_all:4,all_to_all:1048576,send_recv:4,send_recv:65536,dispatch:1,combine:1,"
    "dispatch:64,combine:64,dispatch:512,combine:512"
)
COLLECTIVES = ("barrier", "all_reduce", "broadcast", "all_gather", "all_to_all", "send_recv")
OF_BUFFERS = ("dispatch", "combine")
Turns = list[dict[str, dict[str, float]]]  # per turn, case -> p10 and median in microseconds


def measure(trees: list[Path], cases: list[str], turns: int, calls: int = CALLS) -> list[Turns]:
    """Measure `cases` in each of `trees`, folders of checkouts, in turns; return each one's figures per turn.

    Raises:
        ValueError: a case is none of those above.
        RuntimeError: a rank of a checkout has ended with an error, whose end it quotes, or not ended in time.
    """
    for case in cases:
        op, _, size = case.partition(":")
        if op not in (*COLLECTIVES, *OF_BUFFERS) or (bool(size) == (op == "barrier")) or (size and not size.isdigit()):
            raise ValueError(f"cases: {case!r} is none of barrier, OP:BYTES, dispatch:TOKENS, combine:TOKENS")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "turn").write_bytes(bytes(8))
        task = {"folder": folder, "cases": cases, "turns": turns, "calls": calls, "num_trees": len(trees)}
        ranks = []
        try:
            for number, tree in enumerate(trees):
                for rank in range(NUM_RANKS):
                    one = json.dumps({**task, "number": number, "rank": rank})
                    command = [sys.executable, __file__, "--rank", one]
                    env = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
                    with Path(folder, f"log{number}.{rank}").open("w") as log:
                        ranks.append(subprocess.Popen(command, cwd=tree, env=env, stdout=log, stderr=log))
            deadline = time.monotonic() + LIMIT_S + len(cases) * turns * len(trees)  # a turn takes far below 1 s
            _await_end(ranks, deadline, folder)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        return [json.loads(Path(folder, f"turns{number}.json").read_text()) for number in range(len(trees))]


def _await_end(ranks: list[subprocess.Popen[bytes]], deadline: float, folder: str) -> None:
    """Wait until all ranks have ended well."""
    while any(process.poll() is None for process in ranks):
        if any(process.poll() for process in ranks) or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    ends = [process.poll() for process in ranks]
    if not any(ends) and None not in ends:
        return
    place = next((at for at, end in enumerate(ends) if end), None)
    how = "ended with {}" if place is not None else "has not ended in time"
    place = ends.index(None) if place is None else place
    number, rank = divmod(place, NUM_RANKS)
    text = Path(folder, f"log{number}.{rank}").read_text()[-2000:]
    raise RuntimeError(f"turns: rank {rank} of checkout {number} {how.format(ends[place])}:\n{text}")


def run_rank(folder: str, cases: list[str], turns: int, calls: int, num_trees: int, number: int, rank: int) -> None:
    """One rank of one checkout; rank 0 leaves the figures in `folder`."""
    import torch
    import torch.distributed as dist

    import epee  # noqa: F401 - registers the backend

    warnings.simplefilter("ignore")  # torch renames its collectives from time to time
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store{number}", NUM_RANKS)
    dist.init_process_group(
        "epee", store=store, rank=rank, world_size=NUM_RANKS, timeout=timedelta(seconds=LIMIT_S * num_trees)
    )
    found: Turns = [{} for _ in range(turns)]
    with Path(folder, "turn").open("r+b") as file, mmap.mmap(file.fileno(), 8) as word:
        for case in cases:
            call, divisor, close = _case(case, rank)
            count = min(calls, FEW_CALLS) if int(case.partition(":")[2] or 0) >= LARGE_BYTES or close else calls
            for turn in found:
                if rank == 0:
                    _await_turn(word, number)
                dist.barrier()
                taken = []
                for _ in range(WARM_UP + count):
                    began = time.perf_counter()
                    call()
                    taken.append(1e6 * (time.perf_counter() - began) / divisor)
                dist.barrier()
                ordered = sorted(taken[WARM_UP:])
                turn[case] = {"p10_us": ordered[count // 10], "median_us": ordered[count // 2]}
                if rank == 0:
                    word[0] = (number + 1) % num_trees
            if close is not None:
                close()
    if rank == 0:
        Path(folder, f"turns{number}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def _await_turn(word: mmap.mmap, number: int) -> None:
    """Sleep until the word names this checkout."""
    deadline = time.monotonic() + LIMIT_S
    while word[0] != number:
        if time.monotonic() > deadline:
            raise TimeoutError(f"turns: no turn for {LIMIT_S:g} s: the ranks of another checkout have stopped")
        time.sleep(0.0003)


def _case(case: str, rank: int) -> tuple[Callable[[], Any], int, Callable[[], None] | None]:
    """Return the call of a case, by how much its time is divided, and what is to be closed afterwards."""
    import torch
    import torch.distributed as dist

    op, _, size = case.partition(":")
    if op in OF_BUFFERS:
        return _buffer_case(op, int(size), rank)
    if op == "barrier":
        return dist.barrier, 1, None
    x = torch.zeros(int(size) // 4)
    many = torch.zeros(NUM_RANKS * len(x))

    def there_and_back() -> None:
        for is_sender in (rank == 0, rank == 1):
            if is_sender:
                dist.send(x, 1 - rank)
            else:
                dist.recv(x, 1 - rank)

    calls: dict[str, tuple[Callable[[], Any], int]] = {
        "all_reduce": (lambda: dist.all_reduce(x), 1),
        "broadcast": (lambda: dist.broadcast(x, 0), 1),
        "all_gather": (lambda: dist.all_gather_into_tensor(many, x), 1),
        "all_to_all": (lambda: dist.all_to_all_single(many, many.clone()), 1),
        "send_recv": (there_and_back, 2),
    }
    return *calls[op], None


def _buffer_case(op: str, num_tokens: int, rank: int) -> tuple[Callable[[], Any], int, Callable[[], None]]:
    """Return a call of a `Buffer` of its own."""
    import torch
    import torch.distributed as dist

    import epee

    buffer = epee.Buffer(
        dist.group.WORLD,
        num_experts=NUM_EXPERTS,
        hidden=HIDDEN,
        num_topk=NUM_TOPK,
        max_tokens_per_rank=num_tokens,
        dtype=torch.bfloat16,
    )
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(num_tokens, HIDDEN, generator=generator).to(torch.bfloat16)
    weights, idx = torch.rand(num_tokens, NUM_EXPERTS, generator=generator).topk(NUM_TOPK, dim=1)
    if op == "dispatch":
        return (lambda: buffer.dispatch(x, idx, weights)), 1, buffer.close
    got = buffer.dispatch(x, idx, weights)
    rows = got.x.clone()
    return (lambda: buffer.combine(rows, got.handle)), 1, buffer.close


def main() -> None:
    """Measure two checkouts and write their figures, or be one of the ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trees", nargs="*", type=Path)
    parser.add_argument("--cases", default=CASES)
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--rank", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        run_rank(**json.loads(args.rank))
        return
    for tree, found in zip(args.trees, measure(args.trees, args.cases.split(","), args.turns), strict=True):
        for case in found[0]:
            best = min(turn[case]["p10_us"] for turn in found)
            print(f"{tree.name:20s} {case:24s} best p10 {best:8.1f} us")


if __name__ == "__main__":
    main()
