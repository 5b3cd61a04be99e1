"""What collectives do when a rank is silent, dead or left out, or the host wants no more: a report, and on they go."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch

from epee.errors import AbortedError, CommTimeoutError, EpeeError
from tests.csrc.collective_cases import OPS, Call, make, play
from tests.csrc.emulated import EmulatedPlatform, all_gather_bytes

SHORT_S = 1.0
WAYS = {"one shot": 500, "two shots": 3000, "pipeline": 9000}  # elements of bfloat16


def error_of(call: Any) -> EpeeError:
    """What `call` raises."""
    try:
        call()
    except EpeeError as error:
        return error
    raise AssertionError("the call has not failed")


def silent(rank: int, num_ranks: int, op: str, count: int) -> Any:
    """The last rank stays away from a call, then comes; all set a new number and go on."""
    last = num_ranks - 1
    call = Call(op, count, root=last)
    machine = make(EmulatedPlatform(), rank, num_ranks, [call, Call("all_reduce", 9)])
    play(machine, call, range(num_ranks))
    machine.timeout_s = SHORT_S
    told: tuple[str, tuple[int, ...], str] = ("", (), "")
    if rank != last:
        error = error_of(lambda: play(machine, Call(op, count, root=last, seed=1), range(num_ranks)))
        told = type(error).__name__, getattr(error, "ranks", ()), str(error)
    all_gather_bytes(b"over")
    if rank == last:  # the others have gone from the call: they hear it now, and it ends on what they left, or fails
        try:
            play(machine, Call(op, count, root=last, seed=1), range(num_ranks))
        except CommTimeoutError as error:
            told = type(error).__name__, error.ranks, str(error)
    all_gather_bytes(b"all out")
    machine.set_number(100)
    all_gather_bytes(b"set")
    machine.timeout_s = 60.0
    for seed in (2, 3, 4):
        play(machine, Call(op, count, root=last, seed=seed), range(num_ranks))
        play(machine, Call("all_reduce", 9, seed=seed), range(num_ranks))
    all_gather_bytes(b"done")
    return told


def left_out(rank: int, num_ranks: int, op: str, count: int) -> None:
    """A middle rank takes no part in some calls, and comes back."""
    out = num_ranks // 2
    machine = make(EmulatedPlatform(), rank, num_ranks, [Call(op, count)])
    rest = [r for r in range(num_ranks) if r != out]
    play(machine, Call(op, count), range(num_ranks))
    machine.set_view(rest if rank != out else range(num_ranks))
    all_gather_bytes(b"set")
    if rank != out:
        for seed in (1, 2, 3):
            play(machine, Call(op, count, root=rest[-1], seed=seed), rest, " without one")
    all_gather_bytes(b"met")
    machine.set_view(range(num_ranks))
    machine.set_number(50)
    all_gather_bytes(b"set again")
    for seed in (4, 5):
        play(machine, Call(op, count, root=out, seed=seed), range(num_ranks), " with all again")
    all_gather_bytes(b"done")


def root_left_out(rank: int, num_ranks: int) -> tuple[str, tuple[int, ...]]:
    """A broadcast of a rank that takes no part fails at once."""
    machine = make(EmulatedPlatform(), rank, num_ranks, [])
    machine.set_view([0, 1])
    all_gather_bytes(b"set")
    error = None
    if rank != 2:
        error = error_of(lambda: play(machine, Call("broadcast", 5, root=2), [0, 1]))
    all_gather_bytes(b"done")
    return type(error).__name__, getattr(error, "ranks", ())


def stopped(rank: int, num_ranks: int, how: str, count: int) -> tuple[str, tuple[int, ...], float]:
    """While rank 0 waits with a long time-out, its host says that the other is dead, or aborts."""
    call = Call("all_reduce", count)
    machine = make(EmulatedPlatform(), rank, num_ranks, [call])
    if rank == 1:
        all_gather_bytes(b"over")
        return "", (), 0.0
    say = threading.Timer(0.5, machine.abort if how == "abort" else lambda: machine.mark_dead([1]))
    say.start()
    start = time.monotonic()
    error = error_of(lambda: play(machine, call, [0, 1]))
    elapsed = time.monotonic() - start
    all_gather_bytes(b"over")
    assert isinstance(error, AbortedError if how == "abort" else CommTimeoutError)
    return type(error).__name__, getattr(error, "ranks", ()), elapsed


def gone_on(rank: int, num_ranks: int) -> str:
    """Rank 0 gives a call up; the late one learns that from its next call, long before its own time is over."""
    call = Call("all_reduce", 5)
    machine = make(EmulatedPlatform(), rank, num_ranks, [call])
    x = torch.ones(5, dtype=torch.bfloat16)
    if rank == 0:
        machine.timeout_s = SHORT_S
        machine.barrier()  # rank 1 is not there
        first = error_of(machine.check)
        all_gather_bytes(b"late")
        machine.all_reduce(x, x)  # fails too: rank 1 waits in the call before
        error_of(machine.check)
        all_gather_bytes(b"over")
        return type(first).__name__
    all_gather_bytes(b"late")
    machine.all_reduce(x, x)  # in place of the barrier: what should come has been given up
    error = error_of(machine.check)
    all_gather_bytes(b"over")
    return str(error)


CASES = [(op, way) for op in OPS for way in WAYS if way != "two shots" or op in ("all_reduce", "broadcast")]
