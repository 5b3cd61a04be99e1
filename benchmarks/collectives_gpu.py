"""Collectives on the GPUs of one host: check the results, then time them beside NCCL and torch's symmetric memory.

    python benchmarks/collectives_gpu.py --json bench-out/collectives_gpu.json

Clock: as in `latency_gpu.py`, two CUDA graphs of different numbers of calls, replayed in turn between two events; a
figure is the difference of their times divided by that of their calls, median over the replays, on the slowest rank. So
a call begins when the one before has ended, and ends when its result may be read. All calls use the same tensors,
bfloat16; up to some 16 MiB they therefore lie in the caches, for everybody alike. `host` is what a call costs the
calling thread when no graph is used (elapsed per call, queue kept short).

Bytes: those of the tensor, for all_gather of the output, for reduce_scatter and all_to_all of the input. `bus` is by
NCCL's formula, bytes x factor / time, with factor 2 (n - 1) / n for all_reduce, 1 for broadcast, (n - 1) / n for the
others. NVLink multicast is not used by anybody: the variables that switch it off must be set (they are only read here).
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
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from epee.collectives.machine import CollectivePlan, Collectives
from epee.collectives.params import MAX_LANES, CollectiveConfig
from epee.ep.gpu.platform import CudaPlatform
from epee.errors import CommTimeoutError

DTYPE = torch.bfloat16
OPS = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all")
SIZES = (4, 4 << 10, 64 << 10, 1 << 20, 16 << 20, 256 << 20)
TARGET_US = {4: 5.0, 4 << 10: 5.5, 64 << 10: 7.0, 1 << 20: 12.0, 16 << 20: 88.0, 256 << 20: 1150.0}  # all_reduce
KINDS = ((torch.bfloat16, "sum"), (torch.float16, "sum"), (torch.float32, "max"))
REPLAYS, TIMEOUT_S = 25, 5.0


def say(text: str) -> None:
    """Print once."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def slowest(value: float) -> float:
    """The largest over the ranks."""
    word = torch.tensor([value])
    dist.all_reduce(word, op=dist.ReduceOp.MAX)
    return float(word)


def all_gather_bytes(mine: bytes) -> list[bytes]:
    """Everybody's bytes, all of one length."""
    rows = [torch.zeros(len(mine), dtype=torch.uint8) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, torch.frombuffer(bytearray(mine), dtype=torch.uint8))
    return [row.numpy().tobytes() for row in rows]


# --- results ---


def inputs_of(num_ranks: int, count: int, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """What all ranks bring, made by each of them from the seed."""
    gen = torch.Generator(device="cuda").manual_seed(seed)
    return [torch.randn(count, generator=gen, device="cuda").to(dtype) for _ in range(num_ranks)]


def reduced(rows: list[torch.Tensor], reduction: str) -> torch.Tensor:
    """The rows in rank order, in float32, rounded once."""
    total = rows[0].float()
    for row in rows[1:]:
        total = total + row.float() if reduction == "sum" else torch.maximum(total, row.float())
    return total.to(rows[0].dtype)


def check_op(machine: Collectives, op: str, count: int, kind: tuple[torch.dtype, str], seed: int) -> None:
    """One call, bit for bit; `count` elements in a row."""
    rank, num_ranks = machine.config.rank, machine.config.num_ranks
    is_wide, (dtype, reduction) = op in ("reduce_scatter", "all_to_all"), kind
    rows = inputs_of(num_ranks, count * (num_ranks if is_wide else 1), dtype, seed)
    mine = slice(count * rank, count * (rank + 1))
    x = rows[rank].clone()
    out = torch.full((count * (1 if "reduce" in op else num_ranks),), float("nan"), device="cuda").to(dtype)
    if op == "all_reduce":
        machine.all_reduce(x, out, reduction)
        want = reduced(rows, reduction)
    elif op == "broadcast":
        machine.broadcast(x, seed % num_ranks)
        out, want = x, rows[seed % num_ranks]
    elif op == "reduce_scatter":
        machine.reduce_scatter(x, out, reduction)
        want = reduced([row[mine] for row in rows], reduction)
    else:
        getattr(machine, op)(x, out)
        want = torch.cat([row[mine] if is_wide else row for row in rows])
    torch.cuda.synchronize()
    machine.check()
    same = out.view(torch.uint8) == want.view(torch.uint8)
    if not bool(same.all()):
        raise AssertionError(
            f"rank {rank}: {op} of {count} {kind}: {int((~same).sum())} of {same.numel()} bytes differ"
        )


def check_all(machine: Collectives, kinds: tuple[tuple[torch.dtype, str], ...]) -> None:
    """Every op at every size and way, whole and odd, several times over so that memory is used again."""
    counts = [size // 2 for size in SIZES[:-1]] + [0, 1, 3, 1023, (1 << 20) + 3, (8 << 20) + 8, 32 << 20]
    seed = 0
    for op in OPS:
        for kind in kinds if "reduce" in op else kinds[:1]:
            for count in counts:
                rows = count // (1 if op in ("all_reduce", "broadcast") else machine.config.num_ranks)
                for _ in range(3 if count < 1 << 20 else 1):
                    check_op(machine, op, rows, kind, seed := seed + 1)
    say(f"check: {seed} calls of {', '.join(OPS)} in {len(kinds)} dtypes, 0 to {max(counts)} elements: every bit right")


def check_graph(machine: Collectives) -> None:
    """A graph of several calls, replayed on new inputs; and many small calls back to back."""
    num_ranks, rank = machine.config.num_ranks, machine.config.rank
    x, big = (torch.empty(count, dtype=DTYPE, device="cuda") for count in (1000, 3 << 20))
    y, big_y, z = torch.empty_like(x), torch.empty_like(big), torch.empty(num_ranks * 1000, dtype=DTYPE, device="cuda")

    def calls() -> None:
        machine.all_reduce(x, y)
        machine.all_gather(y, z)
        machine.all_reduce(big, big_y)
        machine.barrier()

    calls()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls()
    for seed in range(20):
        rows, bigs = (inputs_of(num_ranks, count, DTYPE, 500 + seed) for count in (1000, 3 << 20))
        x.copy_(rows[rank])
        big.copy_(bigs[rank])
        graph.replay()
        torch.cuda.synchronize()
        machine.check()
        assert torch.equal(y, reduced(rows, "sum")), f"replay {seed}: all_reduce"
        assert torch.equal(z, y.repeat(num_ranks)), f"replay {seed}: all_gather"
        assert torch.equal(big_y, reduced(bigs, "sum")), f"replay {seed}: large all_reduce"
    words = torch.arange(2000, device="cuda", dtype=torch.float32).to(DTYPE) % 50
    for i in range(2000):  # in place, no host wait: each call waits for the others in its own memory only
        machine.all_reduce(words[i : i + 1], words[i : i + 1])
    torch.cuda.synchronize()
    machine.check()
    want = torch.arange(2000, device="cuda", dtype=torch.float32).to(DTYPE) % 50 * num_ranks
    assert torch.equal(words, want), "2000 calls back to back"
    say("check: 20 replays of a graph, 2000 calls back to back: every bit right")


def check_silent(machine: Collectives) -> None:
    """The last rank stays away from a call of each way: the others are told, nothing hangs or traps, and all go on."""
    last = machine.config.num_ranks - 1
    for number, count in enumerate((500, 300_000, 8 << 20), 1):
        x, name = torch.ones(count, dtype=DTYPE, device="cuda"), ""
        machine.timeout_s = 0.2
        for is_late in (False, True):
            if (machine.config.rank == last) == is_late:
                machine.all_reduce(x, x)
                torch.cuda.synchronize()
                try:
                    machine.check()
                except CommTimeoutError as error:
                    name = str(error)
            dist.barrier()
        assert name or machine.config.rank == last, f"all_reduce of {count} without rank {last} has not failed"
        machine.set_number(1_000_000 * number)
        machine.timeout_s = TIMEOUT_S
        dist.barrier()
        for seed in range(3):
            check_op(machine, "all_reduce", count, KINDS[0], 900 + seed)
    say("check: a silent rank is reported in each way, and the calls after are right")


# --- times ---


def graph_of(call: Callable[[], Any], count: int) -> torch.cuda.CUDAGraph:
    """`count` calls in one graph."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            call()
    return graph


def replay_us(graph: torch.cuda.CUDAGraph) -> float:
    """How long one replay takes."""
    torch.cuda.synchronize()
    dist.barrier()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end) * 1e3)


def graph_us(call: Callable[[], Any], size: int, replays: int = REPLAYS) -> float:
    """Microseconds of a call, median over the replays, slowest rank."""
    counts = (10, 60) if size <= 1 << 20 else (4, 20) if size <= 16 << 20 else (2, 6)
    graphs = [graph_of(call, count) for count in counts]
    for graph in graphs * 2:
        replay_us(graph)
    times = sorted((-replay_us(graphs[0]) + replay_us(graphs[1])) / (counts[1] - counts[0]) for _ in range(replays))
    return slowest(times[len(times) // 2])


def host_us(call: Callable[[], Any]) -> float:
    """Microseconds of the calling thread, median of blocks of 20 calls, slowest rank."""
    blocks = []
    for _ in range(12):
        torch.cuda.synchronize()
        dist.barrier()
        start = time.perf_counter()
        for _ in range(20):
            call()
        blocks.append((time.perf_counter() - start) / 20 * 1e6)
    torch.cuda.synchronize()
    return slowest(sorted(blocks)[len(blocks) // 2])


class Case:
    """One op at one size: tensors, and the call by each of those who can do it."""

    def __init__(self, op: str, size: int, num_ranks: int) -> None:
        self.op, self.size = op, size
        count = max(1, size // 2)
        part = max(1, count // num_ranks)
        self.x = torch.randn(part if op == "all_gather" else count, device="cuda").to(DTYPE)
        self.out = torch.empty(part if op == "reduce_scatter" else count, dtype=DTYPE, device="cuda")

    def ours(self, machine: Collectives) -> Callable[[], None]:
        """By the kernels here."""
        if self.op == "broadcast":
            return lambda: machine.broadcast(self.x, 0)
        return lambda: getattr(machine, self.op)(self.x, self.out)

    def nccl(self, group: dist.ProcessGroup) -> Callable[[], Any]:
        """By NCCL; all_reduce in place, as it does best."""
        x, out = self.x, self.out
        return {
            "all_reduce": lambda: dist.all_reduce(out, group=group),
            "broadcast": lambda: dist.broadcast(x, 0, group=group),
            "all_gather": lambda: dist.all_gather_into_tensor(out, x, group=group),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(out, x, group=group),
            "all_to_all": lambda: dist.all_to_all_single(out, x, group=group),
        }[self.op]


def bus_gbps(op: str, size: int, us: float, num_ranks: int) -> float:
    """NCCL's bus bandwidth."""
    factor = {"all_reduce": 2 * (num_ranks - 1) / num_ranks, "broadcast": 1.0}.get(op, (num_ranks - 1) / num_ranks)
    return size * factor / us / 1e3


def symm_us(size: int, group: dist.ProcessGroup) -> dict[str, float]:
    """torch's symmetric memory, input already there."""
    import torch.distributed._symmetric_memory as symm

    x = symm.empty(size // 2, dtype=DTYPE, device="cuda")
    symm.rendezvous(x, group)
    found = {}
    if size <= 1 << 20:
        found["one-shot"] = graph_us(lambda: torch.ops.symm_mem.one_shot_all_reduce(x, "sum", group.group_name), size)
    found["two-shot"] = graph_us(lambda: torch.ops.symm_mem.two_shot_all_reduce_(x, "sum", group.group_name), size)
    return found


def target_of(op: str, size: int, nccl_us: float) -> float:
    """What issue 20 asks for."""
    if op == "all_reduce":
        return TARGET_US[size]
    return nccl_us * (0.7 if size <= 1 << 20 else 1.0)


def time_all(machine: Collectives, nccl: dist.ProcessGroup, sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    """All figures."""
    num_ranks, rows = machine.config.num_ranks, []
    for op in OPS:
        for size in sizes:
            if size == 4 and op not in ("all_reduce", "broadcast"):
                continue
            case = Case(op, size, num_ranks)
            row: dict[str, Any] = {"op": op, "bytes": size, "epee_us": graph_us(case.ours(machine), size)}
            machine.check()
            row["nccl_us"] = graph_us(case.nccl(nccl), size)
            row["target_us"] = target_of(op, size, row["nccl_us"])
            if op == "all_reduce" and 4096 <= size <= 16 << 20:
                row["symm_us"] = symm_us(size, nccl)
            if size == 64 << 10:
                row["epee_host_us"], row["nccl_host_us"] = host_us(case.ours(machine)), host_us(case.nccl(nccl))
            row["bus_gbps"] = bus_gbps(op, size, row["epee_us"], num_ranks)
            rows.append(row)
    barrier = graph_us(machine.barrier, 0)
    rows.append({"op": "barrier", "bytes": 0, "epee_us": barrier})
    return rows


def print_rows(rows: list[dict[str, Any]]) -> None:
    """A line for each figure."""
    for row in rows:
        if "nccl_us" not in row:
            say(f"{row['op']:15s}            epee {row['epee_us']:8.2f} us")
            continue
        is_met = "met" if row["epee_us"] <= row["target_us"] else "   "
        symm = ", ".join(f"{way} {us:.1f}" for way, us in row.get("symm_us", {}).items())
        host = f"  host {row['epee_host_us']:.1f}, NCCL {row['nccl_host_us']:.1f}" if "epee_host_us" in row else ""
        say(
            f"{row['op']:15s}{row['bytes']:10d} epee {row['epee_us']:8.2f} us (bus {row['bus_gbps']:5.1f} GB/s)  NCCL "
            f"{row['nccl_us']:8.2f}  target {row['target_us']:8.2f} {is_met}{'  symm ' + symm if symm else ''}{host}"
        )


# --- variants ---

MIDDLE = (4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)
LARGE = (1 << 20, 4 << 20, 16 << 20, 256 << 20)


def variants(base: CollectivePlan, num_sms: int) -> dict[str, tuple[CollectivePlan, tuple[str, ...], tuple[int, ...]]]:
    """Plans to compare, with the ops and sizes at which they differ."""
    one, two = replace(base, one_shot_bytes=1 << 20), replace(base, one_shot_bytes=0, two_shot_bytes=4 << 20)
    pipe = replace(base, one_shot_bytes=0, two_shot_bytes=0, exchange_bytes=0)
    wide = replace(base, exchange_bytes=4 << 20)
    found: dict[str, tuple[CollectivePlan, tuple[str, ...], tuple[int, ...]]] = {
        "one shot, plain launch": (replace(one, launch="plain"), ("all_reduce",), (4, 4 << 10, 64 << 10)),
        "one shot": (one, ("all_reduce", "broadcast"), (4, *MIDDLE[:-1])),
        "one shot, 4 warps": (replace(one, warps=4), ("all_reduce",), MIDDLE[:-1]),
        "two shots": (two, ("all_reduce", "broadcast"), MIDDLE),
        "two shots, 4 warps": (replace(two, warps=4), ("all_reduce",), MIDDLE),
        "exchange": (wide, ("all_gather", "all_to_all", "reduce_scatter"), (1 << 20, 4 << 20, 16 << 20)),
    }
    blocks = num_sms * base.pipeline[1]
    for part in (1, 2):
        lanes = min(MAX_LANES, blocks // 2 // part), min(MAX_LANES, blocks // 3 // part)
        for chunk, least in ((16, 1), (32, 1), (32, 4), (64, 1)):
            plan = replace(pipe, lanes=lanes, chunk_bytes=chunk << 10, min_chunks=least)
            name = f"pipeline {base.pipeline}, lanes {lanes}, {chunk} KiB, at least {least}"
            found[name] = plan, ("all_reduce", "broadcast", "all_gather"), LARGE
    return found


def sweep(machine: Collectives) -> list[dict[str, Any]]:
    """Times of all variants."""
    rows, usual = [], machine.plan
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    for name, (plan, ops, sizes) in variants(usual, num_sms).items():
        machine.plan = plan
        for op in ops:
            times = {size: graph_us(Case(op, size, machine.config.num_ranks).ours(machine), size, 7) for size in sizes}
            machine.check()
            rows.append({"variant": name, "op": op, "us": times})
            say(f"{name:52s} {op:10s} " + "  ".join(f"{size}: {us:.2f}" for size, us in times.items()))
    machine.plan = usual
    return rows


# --- ranks ---


def pipeline_of(text: str) -> tuple[int, int]:
    """`256,2`: threads of a block, blocks on a multiprocessor."""
    threads, blocks = (int(part) for part in text.split(","))
    return threads, blocks


def make_machine(rank: int, num_ranks: int, args: argparse.Namespace, pipeline: tuple[int, int]) -> Collectives:
    """The machine of a rank."""
    started = time.perf_counter()
    config = CollectiveConfig(
        rank, num_ranks, packet_bytes=4 << 20, chunk_bytes=args.chunk << 10, num_slots=args.slots, num_lanes=MAX_LANES
    )
    plan = replace(CollectivePlan(), pipeline=pipeline)
    kinds = KINDS[: 1 if args.skip_checks else None]
    machine = Collectives(CudaPlatform(torch.device("cuda", rank)), config, all_gather_bytes, kinds, plan)
    machine.timeout_s = TIMEOUT_S
    say(f"pipeline {pipeline}: {machine.nbytes / 2**20:.0f} MiB lent, made in {time.perf_counter() - started:.1f} s")
    return machine


def run_pipeline(rank: int, args: argparse.Namespace, nccl: dist.ProcessGroup, pipeline: tuple[int, int]) -> list[Any]:
    """Everything with one build of the kernels."""
    machine = make_machine(rank, args.num_ranks, args, pipeline)
    if not args.skip_checks and pipeline == args.pipeline[0]:
        check_all(machine, KINDS)
        check_graph(machine)
        check_silent(machine)
    rows = sweep(machine) if args.sweep else []
    if not args.skip_times:
        times = time_all(machine, nccl, SIZES)
        print_rows(times)
        rows += times
    torch.cuda.synchronize()
    machine.check()
    dist.barrier()
    machine.close()
    return rows


def run(rank: int, args: argparse.Namespace, folder: str) -> None:
    """One rank."""
    torch.cuda.set_device(rank)
    store = dist.FileStore(f"{folder}/store", args.num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=args.num_ranks)
    results: dict[str, Any] = {"num_ranks": args.num_ranks, "rows": []}
    try:
        nccl = dist.new_group(backend="nccl")
        dist.all_reduce(torch.zeros(1, device="cuda"), group=nccl)
        for pipeline in args.pipeline:
            results["rows"] += run_pipeline(rank, args, nccl, pipeline)
    except BaseException:  # noqa: BLE001 - the other ranks must not wait for this one
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    version = ".".join(map(str, torch.cuda.nccl.version()))
    results |= {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "nccl": version}
    results["date"] = time.strftime("%Y-%m-%d")
    results["multicast_off"] = os.environ.get("NCCL_NVLS_ENABLE") == "0"
    say(f"{args.num_ranks}x {results['device']}, torch {torch.__version__}, NCCL {version}, {results['date']}")
    if rank == 0 and args.json:
        Path(args.json).parent.mkdir(parents=True, exist_ok=True)
        Path(args.json).write_text(json.dumps(results, indent=1))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # NCCL's own end takes seconds and has nothing to do with us


def main() -> None:
    """Parse the command line and start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--pipeline", type=pipeline_of, nargs="+", default=[CollectivePlan().pipeline])
    parser.add_argument("--slots", type=int, default=2, help="chunks of a rank in a lane at once")
    parser.add_argument("--chunk", type=int, default=32, help="KiB of a slot")
    parser.add_argument("--sweep", action="store_true", help="time variants of the plan as well")
    parser.add_argument("--skip-checks", action="store_true")
    parser.add_argument("--skip-times", action="store_true")
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    if os.environ.get("NCCL_NVLS_ENABLE") != "0":
        print("note: NCCL_NVLS_ENABLE is not 0, so NCCL may use multicast", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, args=(args, folder), nprocs=args.num_ranks)


if __name__ == "__main__":
    main()
