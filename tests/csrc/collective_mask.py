"""Ranks that die in the kernels of mode "mask": what the survivors make of the calls, and who was in each.

A victim is killed when its threads have come a random number of times to places where the kernels may stand still
(`common/stall.cuh`): in front of a word, between the packets for two ranks, behind a fence, while it waits, while it
mends a call that another one has died in. Survivors hear of it when its process has ended, each for itself and late, as
on GPUs. Every call of theirs is compared with plain torch on the inputs of those that the kernel says were in; the
test compares who that was, rank by rank.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Sequence
from typing import Any

import torch

from epee.backend.cuda import moves
from epee.backend.cuda.machine import Collectives
from epee.backend.cuda.mask.losses import ranks_of
from epee.backend.cuda.mask.moves import masked
from epee.backend.cuda.moves import Move
from epee.errors import RankFailedError
from epee.gpu.death_notifier import DeathNotifier
from epee.memory.claim import process_start_time
from tests.csrc.collective_cases import Call, check, make, move_of, place, reduced, same, sizes_of, values
from tests.csrc.emulated import EmulatedPlatform, all_gather_bytes

FILE = "kernels/collective/mask/masked.cuh"
LARGE_FILE = "kernels/collective/mask/tries.cuh"
OPS = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "reduce", "gather", "scatter")
COUNTS = (1, 95, 768, 1025, 2047, 4096)  # elements of bfloat16; packets hold 4096
NUM_CALLS = 14
DIE_AMONG = 1600  # comings of all threads to such places in a run


LARGE_COUNTS = (4099, 9000, 20_000)
NUM_LARGE = 6
DIE_AMONG_LARGE = 40  # for each rank, of one build


def is_narrow(seed: int) -> bool:
    """Whether rows of a run have one lane each, and victims die between the packets, or words, for two ranks."""
    return seed % 2 == 1


def calls_of(seed: int) -> list[Call]:
    """A run of calls, without a root that may die."""
    pick = random.Random(seed)
    counts = (1,) if is_narrow(seed) else COUNTS
    ops = ("broadcast", "scatter") if seed % 4 == 3 else OPS  # in which words count for those that send no row
    return [
        Call(
            pick.choice(ops), pick.choice(counts), root=0, is_in_place=pick.random() < 0.5, shift=pick.choice((0, 1)),
            seed=seed * 100 + number,
        )
        for number in range(NUM_CALLS)
    ]  # fmt: skip


def large_calls_of(seed: int) -> list[Call]:
    """A run of calls whose rows packets do not hold, some small ones and split sizes among them; no root dies."""
    pick = random.Random(seed)
    return [
        Call(
            pick.choice((*OPS, "uneven")), pick.choice((*LARGE_COUNTS, 1025)), root=0, is_in_place=pick.random() < 0.5,
            shift=pick.choice((0, 0, 1)), seed=seed * 100 + number,
        )
        for number in range(NUM_LARGE)
    ]  # fmt: skip


def watch(machine: Collectives) -> DeathNotifier:
    """Tell kernels of ranks whose process has ended."""
    rank = machine.config.rank
    mine = f"{os.getpid()} {process_start_time(os.getpid())}".encode()
    rows = [tuple(map(int, row.split())) for row in all_gather_bytes(mine)]
    notifier = DeathNotifier(machine.device.mark_dead, machine.device.waiting, "deaths", needs_end=True)
    notifier.start({peer: (row[0], row[1]) for peer, row in enumerate(rows) if peer != rank})
    return notifier


def again_of(move: Move, rank: int, spare: torch.Tensor) -> Move:
    """The move from memory for what it writes over, as `Prepared.again` has it."""
    own = move.inputs[rank]
    if move.kind == moves.MOVED or own != move.outputs[rank]:
        return move
    return move._replace(inputs=tuple(spare.data_ptr() if at == own else at for at in move.inputs))


def play(machine: Collectives, call: Call, out_before: set[int]) -> tuple[int, ...]:
    """Make a call and compare it with what those bring who were in it; returns who."""
    rank, num_ranks, device = machine.config.rank, machine.config.num_ranks, machine.platform.device
    n, mine = call.count, slice(call.count * rank, call.count * (rank + 1))
    is_wide, is_uneven = call.op in ("reduce_scatter", "all_to_all", "scatter"), call.op == "uneven"
    usual = [n] * (num_ranks if is_wide else 1)
    sent = [sizes_of(call, src, num_ranks, True) if is_uneven else usual for src in range(num_ranks)]
    got = sizes_of(call, rank, num_ranks, False) if is_uneven else [n] * num_ranks
    inputs = [values(call, src, sum(sent[src])) for src in range(num_ranks)]
    x = place(call, device, inputs[rank])
    is_placed = call.op in ("all_gather", "gather", "all_to_all", "uneven")
    blank = torch.full((sum(got) if is_placed else n,), 1, dtype=call.dtype)
    out = place(call, device, blank)
    is_in_place = call.is_in_place and call.op not in ("all_to_all", "scatter", "uneven")
    if call.op == "broadcast" or (is_in_place and call.op in ("all_reduce", "reduce")):
        out = x
    elif is_in_place and call.op == "reduce_scatter":
        out = x[mine]
    elif is_in_place and is_placed and (call.op == "all_gather" or rank == call.root):
        x = out[mine].copy_(x)
        blank = out.clone()
    before = out.clone()
    move = masked(move_of(call, rank, num_ranks, x, out), rank, num_ranks, num_ranks)
    count = machine.counts.take()
    assert count is not None
    spare = torch.full((out.nbytes,), 0xA5, dtype=torch.uint8)
    machine.run(move, again_of(move, rank, spare), count)
    check(machine)
    there = ranks_of(machine.contributors())
    assert rank in there
    assert ranks_of(count.ranks()) == there, "the call's own word and the last call's say the same"
    assert not out_before.intersection(there)
    rows = [row[mine] if is_wide else row for row in inputs]
    if is_uneven:
        rows = [row.split(sent[src])[rank] for src, row in enumerate(inputs)]
    if call.op in ("reduce", "gather") and rank != call.root:
        want = before
    elif call.op in ("broadcast", "scatter"):
        want = rows[call.root]
    elif is_placed:
        parts = list(blank.split(got))
        for src in range(num_ranks):
            if src in there:
                parts[src] = rows[src]
            elif src not in out_before:
                parts[src] = torch.zeros_like(parts[src])  # lost in this very call
        want = torch.cat(parts)
    else:
        want = reduced([rows[src] for src in there], call.reduction)
    same(out, want, f"rank {rank}: {call} of {there}")
    return there


def mortal(
    rank: int, num_ranks: int, seed: int, victims: Sequence[int], stall_one_in: int = 0, is_large: bool = False
) -> list[tuple[int, ...]]:
    """Make the calls; the victims die somewhere in them. Returns who was in each."""
    calls = large_calls_of(seed) if is_large else calls_of(seed)
    machine = make(EmulatedPlatform(), rank, num_ranks, calls, stall_one_in, is_masked=True)
    notifier = watch(machine)
    shown = torch.ones(num_ranks, dtype=torch.int32)
    machine.shown = shown.data_ptr(), num_ranks
    all_gather_bytes(b"all watch")
    if rank in victims:
        at = (5 if seed % 4 == 1 else 1) if is_narrow(seed) else 0
        most = NUM_CALLS * (num_ranks - 1) if at else DIE_AMONG
        platform: Any = machine.platform
        pick = random.Random(seed * 8 + rank)
        if is_large:  # in a try, what makes it again, a vote, or a small call; of sums, or of what is only moved
            path, build = pick.choice((LARGE_FILE, LARGE_FILE, FILE)), pick.choice((0, -1))
            platform.die_in(path, pick.randrange(1, DIE_AMONG_LARGE * num_ranks), 0, build)
        else:
            platform.die_in(FILE, pick.randrange(1, most), at)
    found: list[tuple[int, ...]] = []
    out: set[int] = set()
    for call in calls:
        found.append(play(machine, call, out))
        absent, out = set(range(num_ranks)) - set(found[-1]), set(ranks_of(machine.told.words[0]))
        assert {r for r in range(num_ranks) if not shown[r]} == out
        assert absent == out or (is_large and absent < out), "who dies behind its part of a large call is in it"
    if rank in victims:
        os.kill(os.getpid(), signal.SIGKILL)
    notifier.stop()
    return found


def root_dies(rank: int, num_ranks: int, op: str, seed: int) -> list[str]:
    """The root of one call after the other dies: until then all is well, then all survivors raise that."""
    calls = [Call(op, 2047, root=1, seed=number) for number in range(12)]
    machine = make(EmulatedPlatform(), rank, num_ranks, calls, 0, is_masked=True)
    notifier = watch(machine)
    all_gather_bytes(b"all watch")
    if rank == 1:
        machine.platform.die_in(FILE, random.Random(seed).randrange(1, 2500))  # type: ignore[attr-defined]
    told = []
    for call in calls:
        try:
            play(machine, call, set())
            told.append("well")
        except RankFailedError as error:
            told.append(f"failed without {error.ranks}")
            break
        except Exception as error:  # noqa: BLE001 - the test shows it
            told.append(f"{type(error).__name__}: {error}")
            break
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    notifier.stop()
    return told


def no_bytes(rank: int, num_ranks: int) -> None:
    """Calls of no bytes are barriers."""
    machine = make(EmulatedPlatform(), rank, num_ranks, [], 0, is_masked=True)
    x = torch.empty(0)
    for _ in range(3):
        machine.run(moves.all_gather(moves.row_of(x), [moves.row_of(x)] * num_ranks, torch.float32))
        check(machine)
        assert ranks_of(machine.contributors()) == tuple(range(num_ranks))
    all_gather_bytes(b"done")
