"""What gloo does with the bad input of the table in README.md beside it; no test, a script that shows it.

    python -m tests.backend.gloo_bad_input [--backend epee] [words of a row's name]

Every row runs in fresh processes with a time-out of 5 s for calls and 20 s for the row; the ranks may crash.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import epee

CALL_S, ROW_S = 5, 20
Op = dist.ReduceOp


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


def all_reduce(x: torch.Tensor, **options: Any) -> Any:
    dist.all_reduce(x, **options)
    return x


def broadcast(x: torch.Tensor, root: int) -> Any:
    dist.broadcast(x, root)
    return x


def other_order(rank: int) -> Any:
    calls = [lambda: dist.all_reduce(ones(2)), lambda: dist.broadcast(ones(2), 0)]
    for call in calls if rank == 0 else reversed(calls):
        call()


def strided(x: torch.Tensor, base: torch.Tensor) -> Any:
    dist.all_reduce(x)
    return base


def message(rank: int, sent: torch.Tensor, received: torch.Tensor) -> Any:
    if rank == 0:
        dist.send(sent, 1)
        return "sent"
    dist.recv(received, 0)
    return received


def gathered(rank: int, outputs: list[torch.Tensor], x: torch.Tensor) -> Any:
    dist.all_gather(outputs, x)
    return outputs


def forked(rank: int) -> Any:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, repr(all_reduce(ones(2))).encode())
        except BaseException as exc:  # noqa: BLE001 - shown
            os.write(writer, repr(exc).encode())
        os._exit(0)
    os.close(writer)
    time.sleep(9)
    ended = os.waitpid(child, os.WNOHANG)[0] != 0
    if not ended:
        os.kill(child, signal.SIGKILL)
    return f"child {'ended' if ended else 'hangs after 9 s'}: {os.read(reader, 300)!r}"


def after_destroy(rank: int) -> Any:
    group: Any = dist.group.WORLD
    dist.destroy_process_group()
    x = ones(2)
    group.allreduce([x]).wait()
    return x


def from_handler(rank: int) -> Any:
    told: list[Any] = []

    def handler(*_: Any) -> None:
        try:
            told.append(all_reduce(ones(1)))
        except BaseException as exc:  # noqa: BLE001 - shown
            told.append(exc)

    if rank == 0:
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        dist.all_reduce(ones(2))
        time.sleep(0.1)
        return told
    time.sleep(1)
    dist.all_reduce(ones(2))
    if dist.get_backend() == "gloo":
        dist.all_reduce(ones(1))
    return "peer"


def threads(rank: int) -> Any:
    wrong, errors = [], []

    def worker(number: int) -> None:
        for i in range(100):
            x = torch.full((4,), float(1000 * number + i))
            try:
                dist.all_reduce(x)
            except RuntimeError as exc:
                errors.append(exc)
                return
            if x[0].item() != 2 * (1000 * number + i):
                wrong.append(i)

    workers = [threading.Thread(target=worker, args=(n,)) for n in range(4)]
    for thread in workers:
        thread.start()
    for thread in workers:
        thread.join()
    return f"{len(wrong)} of 400 wrong, {len(errors)} errors"


def gather_without_list(rank: int) -> Any:
    told: list[Any] = []
    calls: list[Callable[[], Any]] = [
        lambda: dist.gather(ones(2), None, dst=0),  # torch asks the root for a list, before any backend is called
        lambda: all_reduce(torch.full((1,), 1.0)),
        lambda: all_reduce(torch.full((1,), 10.0)),
        lambda: all_reduce(torch.full((1,), 100.0)),
    ]
    for call in calls:
        try:
            told.append(call())
        except (RuntimeError, ValueError) as exc:
            told.append(f"{type(exc).__name__}: {str(exc)[:50]}")
    return told


ROWS: dict[str, Callable[[int], Any]] = {
    "dtype, same size": lambda r: all_reduce(ones(4) if r == 0 else ones(4, dtype=torch.int32)),
    "dtype, other size": lambda r: all_reduce(ones(4) if r == 0 else ones(4, dtype=torch.float64)),
    "count": lambda r: all_reduce(ones(4 + 4 * r)),
    "count of a large tensor": lambda r: all_reduce(ones(100_000 + 4 * r)),
    "reduce op": lambda r: all_reduce(torch.arange(8.0) + r, op=(Op.SUM, Op.MAX)[r]),
    "reduce op, large": lambda r: all_reduce(torch.full((100_000,), 2.0 + r), op=(Op.SUM, Op.MAX)[r]).unique(),
    "root of broadcast": lambda r: broadcast(ones(4), r),
    "root of reduce": lambda r: dist.reduce(ones(4), r),
    "order": other_order,
    "operation": lambda r: all_reduce(ones(4)) if r == 0 else dist.barrier(),
    "splits": lambda r: dist.all_to_all_single(ones(2 + 2 * r), ones(2 + 2 * r)),
    "splits that do not add up": lambda r: dist.all_to_all_single(ones(4), ones(4), None, [3, 3] if r == 0 else [2, 2]),
    "strided x[::2]": lambda r: (lambda b: strided(b[::2], b))(torch.ones(8)),
    "strided x.t()": lambda r: (lambda b: strided(b.t(), b))(torch.arange(6.0).view(2, 3)),
    "strided output of all_gather": lambda r: gathered(r, [torch.zeros(8)[::2] for _ in range(2)], ones(4)),
    "expanded, 4": lambda r: all_reduce(torch.ones(1).expand(4)),
    "expanded, 65536": lambda r: all_reduce(torch.ones(1).expand(65536)).sum(),
    "overlapping": lambda r: all_reduce(torch.ones(70000).as_strided((65536,), (1,))[:4].as_strided((2, 3), (1, 1))),
    "conjugate view": lambda r: gathered(r, [torch.zeros(2, dtype=torch.complex64) for _ in range(2)],
                                         torch.tensor([1j, 2j]).conj()),
    "leaf that requires grad": lambda r: all_reduce(torch.nn.Parameter(ones(2))),
    "sparse": lambda r: all_reduce(torch.eye(3).to_sparse()),
    "meta": lambda r: all_reduce(torch.ones(2, device="meta")),
    "quantised": lambda r: all_reduce(torch.quantize_per_tensor(ones(2), 0.1, 0, torch.qint8)),
    "recv too small": lambda r: message(r, ones(8), torch.zeros(4)),
    "recv too large": lambda r: message(r, ones(4), torch.zeros(8)),
    "recv of another dtype": lambda r: message(r, ones(4), torch.zeros(4, dtype=torch.int32)),
    "send to self": lambda r: dist.group.WORLD.send([ones(2)], r, 0),
    "negative tag": lambda r: dist.group.WORLD.send([ones(2)], 1 - r, -1),
    "0 elements": lambda r: all_reduce(ones(0)),
    "0 dimensions": lambda r: all_reduce(torch.tensor(1.0)),
    "list of the wrong length": lambda r: gathered(r, [ones(2)] * (1 if r == 0 else 2), ones(2)),
    "tensor of the wrong size": lambda r: gathered(r, [ones(2), ones(3 if r == 0 else 2)], ones(2)),
    "outputs that are one tensor": lambda r: gathered(r, [torch.zeros(2)] * 2, torch.full((2,), r + 1.0)),
    "two tensors": lambda r: dist.group.WORLD.allreduce([ones(1), ones(1)]).wait(),
    "root out of range": lambda r: broadcast_root(7),
    "negative root": lambda r: broadcast_root(-1),
    "BAND on floats": lambda r: all_reduce(ones(2), op=Op.BAND),
    "BAND on floats on one rank": lambda r: all_reduce(ones(2), op=(Op.BAND, Op.SUM)[r]),
    "SUM of bool": lambda r: all_reduce(torch.tensor([True, False, bool(r)])),
    "AVG of floats": lambda r: all_reduce(ones(2), op=Op.AVG),
    "AVG of integers": lambda r: all_reduce(ones(2, dtype=torch.int32), op=Op.AVG),
    "SUM of complex": lambda r: all_reduce(ones(2, dtype=torch.complex64)),
    "MAX of complex": lambda r: all_reduce(ones(2, dtype=torch.complex64), op=Op.MAX),
    "SUM of float8": lambda r: all_reduce(ones(2).to(torch.float8_e4m3fn)),
    "SUM of uint16": lambda r: all_reduce(ones(2, dtype=torch.uint16)),
    "PREMUL_SUM": lambda r: all_reduce(ones(2), op=torch._C._distributed_c10d._make_nccl_premul_sum(2.0)),
    "fork": forked,
    "after destroy": after_destroy,
    "from a signal handler": from_handler,
    "threads": threads,
    "gather without a list": gather_without_list,
}  # fmt: skip


def broadcast_root(root: int) -> Any:
    opts = torch._C._distributed_c10d.BroadcastOptions()
    opts.rootRank = root
    dist.group.WORLD.broadcast([ones(2)], opts).wait()


def run_rank(name: str, rank: int, folder: str, backend: str) -> None:
    warnings.simplefilter("ignore")
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group(backend, store=store, rank=rank, world_size=2, timeout=timedelta(seconds=CALL_S))
    begin = time.monotonic()
    stay_s = 0.5
    try:
        told = f"returned {ROWS[name](rank)!r}"
    except BaseException as exc:  # noqa: BLE001 - shown
        told = f"{type(exc).__name__}: {exc}"
        stay_s = max(stay_s, begin + CALL_S + 2 - time.monotonic())  # a peer must not learn it from a closed connection
    print(f"{' '.join(told.split())[:260]}  [{time.monotonic() - begin:.1f} s]", flush=True)
    time.sleep(stay_s)
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("words", help="only rows whose name holds all these words", nargs="*")
    given = parser.parse_args()
    print(f"torch {torch.__version__}, epee {epee.__version__}, backend {given.backend}")
    for name in ROWS:
        if not all(word in name for word in given.words):
            continue
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "tests.backend.gloo_bad_input", "--rank"]
            ranks = [
                subprocess.Popen([*command, name, str(rank), folder, given.backend], stdout=subprocess.PIPE, text=True,
                                 stderr=subprocess.DEVNULL)
                for rank in range(2)
            ]  # fmt: skip
            until = time.monotonic() + ROW_S
            print(f"\n{name}")
            for rank, process in enumerate(ranks):
                try:
                    out, _ = process.communicate(timeout=max(0.1, until - time.monotonic()))
                    how = "" if process.returncode == 0 else f"exit {process.returncode} "
                except subprocess.TimeoutExpired:
                    process.kill()
                    out, _ = process.communicate()
                    how = f"did not end within {ROW_S} s "
                print(f"  rank {rank}: {how}{out.strip()}", flush=True)


if __name__ == "__main__":
    if "--rank" in sys.argv:
        run_rank(sys.argv[2], int(sys.argv[3]), sys.argv[4], sys.argv[5])
    else:
        main()
