"""What collectives do when a rank is silent, dead or left out, or the host wants no more: a report, and on they go."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import torch

from epee.backend.cuda import moves
from epee.errors import AbortedError, CommTimeoutError, EpeeError, RankFailedError
from tests.csrc.collective_cases import ALL, OPS, Call, make, play, start
from tests.csrc.emulated import EmulatedPlatform, all_gather_bytes

SHORT_S = 1.0
Way = dict[str, int]  # of a `Call`
WAYS: dict[str, Way] = {
    "one shot": {"count": 500},  # elements of bfloat16
    "two shots": {"count": 3000},
    "pipeline": {"count": 9000},
    "pool": {"count": 9000, "in_pool": ALL},
}


def error_of(call: Any) -> EpeeError:
    """What `call` raises."""
    try:
        call()
    except EpeeError as error:
        return error
    raise AssertionError("the call has not failed")


def silent(rank: int, num_ranks: int, op: str, way: Way) -> Any:
    """The last rank stays away from a call, then comes; all set a new number and go on."""
    last = num_ranks - 1
    call = Call(op, root=last, **way)
    machine = make(EmulatedPlatform(), rank, num_ranks, [call, Call("all_reduce", 9)])
    play(machine, call, range(num_ranks))
    machine.timeout_s = SHORT_S
    told: tuple[str, tuple[int, ...], str] = ("", (), "")
    if rank != last:
        error = error_of(lambda: play(machine, Call(op, root=last, seed=1, **way), range(num_ranks)))
        told = type(error).__name__, getattr(error, "ranks", ()), str(error)
    all_gather_bytes(b"over")
    if rank == last:  # the others have gone from the call: they hear it now, and it ends on what they left, or fails
        try:
            play(machine, Call(op, root=last, seed=1, **way), range(num_ranks))
        except CommTimeoutError as error:
            told = type(error).__name__, error.ranks, str(error)
    all_gather_bytes(b"all out")
    start(machine, 100)
    machine.timeout_s = 60.0
    for seed in (2, 3, 4):
        play(machine, Call(op, root=last, seed=seed, **way), range(num_ranks))
        play(machine, Call("all_reduce", 9, seed=seed), range(num_ranks))
    all_gather_bytes(b"done")
    return told


def left_out(rank: int, num_ranks: int, op: str, way: Way) -> None:
    """A middle rank takes no part in some calls, and comes back."""
    out = num_ranks // 2
    machine = make(EmulatedPlatform(), rank, num_ranks, [Call(op, **way)])
    rest = [r for r in range(num_ranks) if r != out]
    play(machine, Call(op, **way), range(num_ranks))
    start(machine, 10, rest if rank != out else range(num_ranks))
    if rank != out:
        for seed in (1, 2, 3):
            play(machine, Call(op, root=rest[-1], seed=seed, **way), rest, " without one")
    all_gather_bytes(b"met")
    start(machine, 50)
    for seed in (4, 5):
        play(machine, Call(op, root=out, seed=seed, **way), range(num_ranks), " with all again")
    all_gather_bytes(b"done")


def root_left_out(rank: int, num_ranks: int) -> tuple[str, tuple[int, ...]]:
    """A broadcast of a rank that takes no part fails at once."""
    machine = make(EmulatedPlatform(), rank, num_ranks, [])
    start(machine, 0, [0, 1])
    error = None
    if rank != 2:
        error = error_of(lambda: play(machine, Call("broadcast", 5, root=2), [0, 1]))
    all_gather_bytes(b"done")
    return type(error).__name__, getattr(error, "ranks", ())


def stopped(rank: int, num_ranks: int, how: str, way: Way) -> tuple[str, tuple[int, ...], float]:
    """While rank 0 waits with a long time-out, its host says that the other is dead, or aborts."""
    call = Call("all_reduce", **way)
    machine = make(EmulatedPlatform(), rank, num_ranks, [call])
    if rank == 1:
        all_gather_bytes(b"over")
        return "", (), 0.0
    say = threading.Timer(0.5, machine.device.abort if how == "abort" else lambda: machine.device.mark_dead([1]))
    say.start()
    start = time.monotonic()
    error = error_of(lambda: play(machine, call, [0, 1]))
    elapsed = time.monotonic() - start
    all_gather_bytes(b"over")
    assert isinstance(error, AbortedError if how == "abort" else RankFailedError)
    return type(error).__name__, getattr(error, "ranks", ()), elapsed


def told_by_a_peer(rank: int, num_ranks: int, way: Way) -> tuple[str, tuple[int, ...]]:
    """The last rank stays away from a call; rank 0's host says that it is dead, no other host does.

    Rank 1 waits in the call then, rank 2 begins it when rank 0 has made another one in vain.
    """
    call, last = Call("all_reduce", **way), num_ranks - 1
    machine = make(EmulatedPlatform(), rank, num_ranks, [call])
    error = None
    if rank == 2:
        all_gather_bytes(b"late")
    if rank == 0:
        threading.Timer(0.3, machine.device.mark_dead, [[last]]).start()
    if rank != last:
        error = error_of(lambda: play(machine, call, range(num_ranks)))
    if rank == 0:
        x = moves.row_of(torch.ones(5, dtype=torch.bfloat16))
        machine.run(moves.all_reduce(num_ranks, x, x, (torch.bfloat16, "sum")))
    if rank != 2:
        all_gather_bytes(b"late")
    all_gather_bytes(b"over")
    return type(error).__name__, getattr(error, "ranks", ())


def gone_on(rank: int, num_ranks: int) -> tuple[str, str]:
    """Rank 0 gives a call up; nobody's next call does its work, and all hear why. After a new start all is well."""
    call = Call("all_reduce", 5)
    machine = make(EmulatedPlatform(), rank, num_ranks, [call])
    first = second = ""
    if rank == 0:
        machine.timeout_s = SHORT_S
        first = str(error_of(lambda: play(machine, call, range(num_ranks))))
        all_gather_bytes(b"late")
    else:
        all_gather_bytes(b"late")
        first = str(error_of(lambda: play(machine, call, range(num_ranks))))
    machine.timeout_s = 60.0
    x = moves.row_of(torch.ones(5, dtype=torch.bfloat16))
    machine.run(moves.all_reduce(num_ranks, x, x, (torch.bfloat16, "sum")))
    second = "nothing" if not machine.device.take_reports() else "told again"
    start(machine, 20)
    for seed in range(3):
        play(machine, Call("all_reduce", 5, seed=seed), range(num_ranks))
    all_gather_bytes(b"over")
    return first, second


def other_call(rank: int, num_ranks: int, mine: Call, others: Call) -> str:
    """Ranks make different calls: all that wait for each other are told at once, the rest by their next call."""
    call = mine if rank == 0 else others
    machine = make(EmulatedPlatform(), rank, num_ranks, [mine, others, Call("all_reduce", 3)])
    start_s = time.monotonic()
    told = []
    for again in (call, Call("all_reduce", 3)):
        try:
            play(machine, again, range(num_ranks))
        except AssertionError:
            pass  # the values of a call that was none
        except EpeeError as error:
            told.append(type(error).__name__)
    assert time.monotonic() - start_s < 30
    all_gather_bytes(b"over")
    start(machine, 20)
    play(machine, Call("all_reduce", 9, seed=4), range(num_ranks))
    all_gather_bytes(b"done")
    return told[0] if told else ""


def other_call_told(rank: int, num_ranks: int, way: Way, is_late: bool, is_masked: bool) -> str:
    """The last rank makes another call, of which no word comes to rank 0: the ranks between must tell it.

    Rank 0 waits in the call then, or begins it when the others have lost it.
    """
    last = num_ranks - 1
    call = Call("all_reduce", dtype=torch.float16 if rank == last else torch.bfloat16, **way)
    machine = make(EmulatedPlatform(), rank, num_ranks, [call, Call("all_reduce", 9)], is_masked=is_masked)
    nowhere = torch.zeros(machine.config.region_layout.nbytes, dtype=torch.uint8)
    if rank == last:
        machine._set("peers", [nowhere.data_ptr()])
    if is_late and rank == 0:
        all_gather_bytes(b"late")
    told = ""
    for seed in range(2):  # who does not wait for the odd word finds it in the next call
        try:
            play(machine, replace(call, seed=seed), range(num_ranks))
        except AssertionError:
            continue  # the values of a call that was none
        except EpeeError as error:
            told = f"{type(error).__name__}: {error}"
            break
    if is_late and rank != 0:
        all_gather_bytes(b"late")
    all_gather_bytes(b"over")
    start(machine, 20)
    play(machine, Call("all_reduce", 9, seed=4), range(num_ranks))
    all_gather_bytes(b"done")
    return told


CASES = [(op, way) for op in OPS[:5] for way in WAYS if way != "two shots" or op in ("all_reduce", "broadcast")]
