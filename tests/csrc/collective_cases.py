"""Calls of the collective kernels on any platform, each compared bit for bit with plain torch on all ranks' inputs."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from epee.backend.cuda import moves
from epee.backend.cuda.half import error_of
from epee.backend.cuda.machine import Collectives
from epee.backend.cuda.mask.moves import masked
from epee.backend.cuda.moves import row_of, rows_of
from epee.backend.cuda.params import CollectiveConfig
from epee.backend.cuda.plan import CollectivePlan
from epee.backend.cuda.pool import ALIGN
from epee.gpu.ranks import MAX_LOCAL
from tests.csrc.emulated import EmulatedPlatform, all_gather_bytes

# Small enough that a few kilobytes are "large": several chunks for each of two lanes, slots used many times over.
SMALL = {"packet_bytes": 8 << 10, "num_lanes": 2, "num_slots": 2, "chunk_bytes": 1024}
PLAN = CollectivePlan(
    one_shot_bytes=2 << 10, two_shot_bytes=8 << 10, exchange_bytes=2 << 10, max_blocks=3, chunk_bytes=1024,
    min_chunks=1, direct_lanes=(5, 5), bulk_bytes=0, pipeline=(96, 1), width=4,
)  # fmt: skip
INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.int64)
FULL = {torch.bfloat16: torch.float32, torch.float16: torch.float32}  # what halves are reduced in


@dataclass(frozen=True)
class Call:
    """One call: `op`, elements of a row, dtype, and what the op needs beside."""

    op: str
    count: int
    dtype: torch.dtype = torch.bfloat16
    reduction: str = "sum"
    root: int = 0
    is_in_place: bool = False
    shift: int = 0  # elements by which tensors are off their alignment
    seed: int = 0
    in_pool: int = 0  # a bit for each rank whose tensors lie in its pool


ALL = (1 << MAX_LOCAL) - 1
NEVER = 1 << 62
POOL_BYTES = 1 << 20


def make(
    platform: Any, rank: int, num_ranks: int, calls: Sequence[Call], stall_one_in: int = 0, is_masked: bool = False,
    pushers: int = ALL,
) -> Collectives:  # fmt: skip
    """The machine of a rank with the kernels that `calls` need; `pushers`: a bit for each rank that sends in bulk."""
    kinds = sorted({(call.dtype, call.reduction) for call in calls if "reduce" in call.op}, key=str)
    config = CollectiveConfig(rank, num_ranks, **SMALL, is_masked=is_masked)
    plan = PLAN if pushers >> rank & 1 else replace(PLAN, bulk_bytes=NEVER)
    machine = Collectives(platform, config, kinds, plan, stall_one_in)
    if any(call.in_pool >> rank & 1 for call in calls):
        machine.lend(POOL_BYTES)
    start(machine)
    machine.timeout_s = 60.0
    return machine


def start(machine: Collectives, number: int = 0, members: Sequence[int] | None = None) -> None:
    """What hosts do when they meet."""
    blobs = dict(enumerate(all_gather_bytes(machine.blob)))
    pools = all_gather_bytes(b"-" if machine.pool is None else machine.pool.blob)
    machine.admit(blobs, {rank: blob for rank, blob in enumerate(pools) if blob != b"-"})
    machine.begin(list(blobs) if members is None else members, number)
    all_gather_bytes(b"begun")


def check(machine: Collectives) -> None:
    """Raise what kernels have reported."""
    for report in machine.device.take_reports():
        raise error_of(report, machine.config.rank)


def values(call: Call, rank: int, count: int) -> torch.Tensor:
    """What a rank brings."""
    gen = torch.Generator().manual_seed(1000 * call.seed + rank)
    if call.dtype in INTEGERS:
        low, high = max(torch.iinfo(call.dtype).min, -(1 << 62)), min(torch.iinfo(call.dtype).max, 1 << 62)
        return torch.randint(low, high, (count,), generator=gen, dtype=call.dtype)
    x = torch.randn(count, generator=gen, dtype=torch.float64)
    return (x * 10.0 ** torch.randint(-3, 4, (count,), generator=gen)).to(call.dtype)


def reduced(rows: Sequence[torch.Tensor], reduction: str) -> torch.Tensor:
    """The rows in order, one operation at a time, halves in float32."""
    op: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = {
        "sum": torch.add,
        "product": torch.mul,
        "min": torch.minimum,
        "max": torch.maximum,
        "and": torch.bitwise_and,
        "or": torch.bitwise_or,
        "xor": torch.bitwise_xor,
        "avg": torch.add,
    }[reduction]
    full = FULL.get(rows[0].dtype, rows[0].dtype)
    total = rows[0].to(full)
    for row in rows[1:]:
        total = op(total, row.to(full))
    if reduction == "avg":
        total = total / len(rows)
    return total.to(rows[0].dtype)


def same(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    """Fail unless every byte is equal."""
    equal = got.contiguous().view(torch.uint8) == want.contiguous().view(torch.uint8)
    if not bool(equal.all()):
        first = int((~equal).nonzero()[0])
        raise AssertionError(f"{what}: {int((~equal).sum())} of {equal.numel()} bytes differ, first at {first}")


def place(call: Call, device: torch.device, x: torch.Tensor, machine: Collectives | None = None) -> torch.Tensor:
    """A copy that starts `shift` elements behind an aligned address, in the pool of a rank that has it there."""
    count = call.shift + x.numel() + 64
    if machine is not None and machine.pool is not None and call.in_pool >> machine.config.rank & 1:
        rows = machine.config.rank + call.seed % 3
        aside = machine.pool.empty(ALIGN * rows, dtype=torch.uint8)  # so ranks have other offsets
        room = machine.pool.empty(count, dtype=x.dtype)
        del aside
    else:
        room = torch.empty(count, dtype=x.dtype, device=device)
    room.view(torch.uint8).fill_(0xA5)
    return room[call.shift : call.shift + x.numel()].copy_(x)


def move_of(call: Call, rank: int, num_ranks: int, x: torch.Tensor, out: torch.Tensor) -> moves.Move:
    """The move of a rank."""
    one, to, root = row_of(x), row_of(out), call.root
    kind = call.dtype, call.reduction
    has_rows = call.op != "gather" or rank == root
    return {
        "all_reduce": lambda: moves.all_reduce(num_ranks, one, to, kind),
        "reduce": lambda: moves.reduce(num_ranks, rank, one, to, kind, root),
        "broadcast": lambda: moves.broadcast(num_ranks, rank, one, root, call.dtype),
        "reduce_scatter": lambda: moves.reduce_scatter(rows_of(x, num_ranks), to, kind),
        "all_gather": lambda: moves.all_gather(one, rows_of(out, num_ranks), call.dtype),
        "gather": lambda: moves.gather(
            num_ranks, rank, one, rows_of(out, num_ranks) if has_rows else [], root, call.dtype
        ),
        "scatter": lambda: moves.scatter(
            num_ranks, rank, to, rows_of(x, num_ranks) if rank == root else [], root, call.dtype
        ),
        "all_to_all": lambda: moves.all_to_all(rows_of(x, num_ranks), rows_of(out, num_ranks), call.dtype, True),
        "uneven": lambda: moves.all_to_all(
            _cut(x, sizes_of(call, rank, num_ranks, True)), _cut(out, sizes_of(call, rank, num_ranks, False)),
            call.dtype, False,
        ),
    }[call.op]()  # fmt: skip


def _uneven(call: Call, src: int, dst: int) -> int:
    """Elements that go from one rank to another."""
    return (call.count * (1 + src + 2 * dst + call.seed)) % (call.count + 3)


def sizes_of(call: Call, rank: int, num_ranks: int, is_sent: bool) -> list[int]:
    """Elements that a rank sends to each, or gets from each."""
    return [_uneven(call, rank, r) if is_sent else _uneven(call, r, rank) for r in range(num_ranks)]


def _cut(tensor: torch.Tensor, sizes: Sequence[int]) -> list[moves.Stretch]:
    return [row_of(part) for part in tensor.split(list(sizes))]


def play(machine: Collectives, call: Call, active: Sequence[int], who: str = "") -> None:
    """Make one call and compare; nothing around the output may have changed."""
    rank, num_ranks, device = machine.config.rank, machine.config.num_ranks, machine.platform.device
    n, mine = call.count, slice(call.count * rank, call.count * (rank + 1))
    counts = [n * (num_ranks if call.op in ("reduce_scatter", "all_to_all", "scatter") else 1)] * num_ranks
    if call.op == "uneven":
        counts = [sum(sizes_of(call, src, num_ranks, True)) for src in range(num_ranks)]
    inputs = [values(call, src, counts[src]) for src in range(num_ranks)]
    x = place(call, device, inputs[rank], machine)
    blank = torch.full((n * num_ranks,), 1, dtype=call.dtype)
    is_taker = call.op not in ("reduce", "gather") or rank == call.root
    if call.op in ("all_reduce", "broadcast", "reduce"):
        want = inputs[call.root]
        if call.op != "broadcast":
            want = reduced([inputs[src] for src in active], call.reduction)
        out = x if call.is_in_place or call.op == "broadcast" else place(call, device, blank[:n], machine)
    elif call.op == "reduce_scatter":
        want = reduced([inputs[src][mine] for src in active], call.reduction)
        out = x[mine] if call.is_in_place else place(call, device, blank[:n], machine)
    elif call.op == "scatter":
        want = inputs[call.root][mine]
        out = x[mine] if call.is_in_place and rank == call.root else place(call, device, blank[:n], machine)
    elif call.op == "uneven":
        parts = [inputs[src].split(sizes_of(call, src, num_ranks, True))[rank] for src in range(num_ranks)]
        want = torch.cat([row if src in active else row * 0 + 1 for src, row in enumerate(parts)])
        out = place(call, device, torch.full((want.numel(),), 1, dtype=call.dtype), machine)
    else:
        rows = [inputs[src][mine] if call.op == "all_to_all" else inputs[src] for src in range(num_ranks)]
        want = torch.cat([row if src in active else blank[:n] for src, row in enumerate(rows)])
        out = place(call, device, blank, machine)
        if call.is_in_place and call.op != "all_to_all" and is_taker:
            x = out[mine].copy_(x)
    if not is_taker:
        want = out.cpu().clone()
    move = move_of(call, rank, num_ranks, x, out)
    machine.run(masked(move, rank, num_ranks, num_ranks) if machine.config.is_masked else move)
    machine.platform.synchronize()
    check(machine)
    same(out.cpu(), want, f"rank {rank}{who}: {call}")
    if not call.is_in_place:
        same(x.cpu(), want if call.op == "broadcast" else inputs[rank], f"rank {rank}{who}: input of {call}")
    if not (call.is_in_place and call.op in ("reduce_scatter", "scatter")):
        around = torch.as_strided(out, (64,), (1,), out.storage_offset() + out.numel()).cpu()
        assert bool((around.view(torch.uint8) == 0xA5).all()), f"rank {rank}: written behind the output of {call}"


def run_calls(
    rank: int, num_ranks: int, calls: Sequence[Call], stall_one_in: int = 0, is_masked: bool = False,
    pushers: int = ALL,
) -> None:  # fmt: skip
    """All calls one after the other, with barriers between some."""
    machine = make(EmulatedPlatform(), rank, num_ranks, calls, stall_one_in, is_masked, pushers)
    for number, call in enumerate(calls):
        play(machine, call, range(num_ranks))
        if number % 5 == 4:
            machine.run(moves.barrier(num_ranks))
            check(machine)
    all_gather_bytes(b"done")
    machine.close()


OPS = (
    "all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "reduce", "gather", "scatter", "uneven",
)  # fmt: skip


def random_calls(seed: int, how_many: int, num_ranks: int) -> list[Call]:
    """Any op, any size around the borders of the ways, any place."""
    pick = random.Random(seed)
    counts = (0, 1, 3, 95, 768, 1023, 1024, 1025, 2047, 3000, 4096, 5001, 9000)
    return [
        Call(
            pick.choice(OPS), pick.choice(counts), root=pick.randrange(num_ranks), is_in_place=pick.random() < 0.3,
            shift=pick.choice((0, 0, 1, 8)), seed=seed * 1000 + number, in_pool=pick.choice((0, ALL, ALL, 0b101)),
        )
        for number in range(how_many)
    ]  # fmt: skip
