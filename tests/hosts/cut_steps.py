"""What a rank does while its host, or another one, is cut off: random operations until it is told to stop.

Ranks that go on are in step: each knows from the seed which operation comes next, and every sixteenth call asks whether
to stop. One that is cut off goes on until it has no quorum; where the network heals, until it knows that it is out.
"""

from __future__ import annotations

import os
import random
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import epee
from epee.errors import EpeeError, EvictedError, NoQuorumError, RankFailedError
from tests.harness import tell
from tests.survive.histories import ALL_OPS, COLLECTIVES, Entry
from tests.survive.rounds import LONG, STAGING_BYTES, exchange_all, one_call

from .machine import address_of

STOP_EVERY = 16
GOING = 20  # calls after which the fault may come
LENGTHS = (1, 1, 100, LONG, 8 * LONG)
LEARNS_S = 60.0  # within which a zombie must have learned that it is out
LOST, OUT = "lost", "out"  # what ranks tell: those that go on, those that do not


class CutRound(NamedTuple):
    """A round: which host is cut off, how, when, and until when.

    Attributes:
        kind: "cut": both ways; "one way": only packets from `host` to `dst` are lost; "zombie": cut, and healed when it
            is out; "stopped": its processes stand still until it is out.
        timeout_s: EPEE_HOST_TIMEOUT_S.
        op_timeout_s: of calls.
        wait_s: from the moment when all ranks are going to the fault.
        heal_s: from the moment when all survivors go on without the host to the end of the fault, for zombies.
        seed: of operations and sizes.
    """

    kind: str
    placement: tuple[int, ...]
    host: int
    dst: int
    mode: str
    timeout_s: int
    op_timeout_s: float
    wait_s: float
    heal_s: float
    seed: int

    @property
    def has_zombies(self) -> bool:
        """Whether the host comes back."""
        return self.kind in ("zombie", "stopped")


def live(rank: int, num_ranks: int, folder: str, spec: CutRound) -> list[Entry]:
    """Make calls until the file `stop` is there, or this rank is out; return what was seen."""
    warnings.filterwarnings("ignore", category=FutureWarning)  # torch's own about names that both exist
    os.environ["EPEE_HOST_IP"] = address_of(spec.placement[rank])
    options = epee.BackendOptions(
        fault_mode=spec.mode,
        op_timeout=spec.op_timeout_s,
        staging_bytes=STAGING_BYTES,
        on_stall="evict" if spec.kind == "stopped" else "error",
    )
    store = dist.FileStore(f"{folder}/store", num_ranks)
    dist.init_process_group("epee", store=store, rank=rank, world_size=num_ranks, pg_options=options)
    group: Any = dist.group.WORLD
    entries: list[Entry] = []
    number, has_told = 0, False
    while True:
        number += 1
        if number % STOP_EVERY == 0:
            if _shall_stop(group, folder, entries):
                break
        else:
            dice = random.Random(1_000_003 * number + spec.seed)
            ops = (
                COLLECTIVES if spec.kind == "stopped" else ALL_OPS
            )  # a message to who stands still ends by its time-out
            entries.append(_call(group, dice.choice(ops), number, dice.choice(LENGTHS)))
        if number == GOING:
            tell("going")
        if entries and entries[-1].status in ("NoQuorumError", "EvictedError"):
            entries += _until_evicted(group, spec)
            break
        if not has_told and entries and _is_without(entries[-1], num_ranks):
            has_told = True
            tell(LOST)
    dist.destroy_process_group()
    return entries


def _is_without(entry: Entry, num_ranks: int) -> bool:
    """Return whether a call has run without somebody: not before that may anybody be told to stop."""
    return entry.op != "send_recv" and entry.status == "ok" and len(entry.contributors) < num_ranks


def _call(group: Any, op: str, number: int, length: int) -> Entry:
    """Make one call; messages to each other rank are one, and what ends it is an outcome as well."""
    if op != "send_recv":
        return one_call(group, op, length)
    try:
        return exchange_all(group, number, length)
    except EpeeError as exc:
        return _failed(group, exc)


def _failed(group: Any, exc: EpeeError) -> Entry:
    ranks, ended = tuple(getattr(exc, "ranks", ())), time.monotonic_ns()
    name = type(exc).__name__
    return Entry(-1, "send_recv", name, ranks, 0, (), [], 0.0, group.rank(), ended_ns=ended, text=str(exc))


def _shall_stop(group: Any, folder: str, entries: list[Entry]) -> bool:
    """Ask together whether to stop; an error that is no loss goes to the entries."""
    flag = torch.tensor([int((Path(folder) / "stop").exists())])
    try:
        dist.all_reduce(flag, dist.ReduceOp.MAX)
    except RankFailedError:
        return False  # the same on all
    except EpeeError as exc:
        entries.append(_failed(group, exc))
        return not isinstance(exc, (EvictedError, NoQuorumError))
    return bool(flag)


def _until_evicted(group: Any, spec: CutRound) -> list[Entry]:
    """Go on trying: a zombie until it knows that it was voted out, another one three times."""
    tell(OUT)
    entries: list[Entry] = []
    until = time.monotonic() + LEARNS_S
    while spec.has_zombies and not (entries and entries[-1].status == "EvictedError"):
        assert time.monotonic() < until, f"nobody has told a zombie that it is out: {entries[-3:]}"
        entries.append(one_call(group, "all_reduce"))
        time.sleep(0.05)
    entries += [one_call(group, "all_gather") for _ in range(3)]
    if spec.has_zombies:
        tell("learned")
    return entries
