"""SIGKILL of a rank in the middle of a collective: all survivors end the call alike, and the next one works."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import epee
from epee.errors import EpeeError

from . import kill_points
from .histories import Entry, check_histories, make_call
from .processes import DEAD, run_mortal

OPS = ("all_reduce", "all_gather", "broadcast", "barrier")
NUM_CALLS = 6  # and more where more ranks die


def calls_until_the_end(
    rank: int, num_ranks: int, folder: str, op: str, victims: dict[int, tuple[str, int]], mode: str, length: int
) -> list[Entry]:
    """Make `NUM_CALLS` calls of `op`; a victim dies at its point of its call. Return what was seen."""
    store = dist.FileStore(str(Path(folder) / "store"), num_ranks)
    options = epee.BackendOptions(fault_mode=mode, op_timeout=10.0, staging_bytes=64 << 10)
    dist.init_process_group("epee", store=store, rank=rank, world_size=num_ranks, pg_options=options)
    if rank in victims:
        kill_points.arm(*victims[rank])
    group: Any = dist.group.WORLD
    entries = []
    for seq in range(1, NUM_CALLS + len(victims)):
        call, read = make_call(op, rank, num_ranks, seq, dist, length)
        began = time.perf_counter()
        try:
            call()
            status, ranks, epoch = "ok", (), group.epoch
        except EpeeError as exc:
            status, ranks = type(exc).__name__, tuple(getattr(exc, "ranks", ()))
            epoch = getattr(exc, "epoch", 0)
        elapsed = time.perf_counter() - began
        members = group.last_contributors() if status == "ok" else ()
        entries.append(Entry(seq, op, status, ranks, epoch, members, read(), elapsed, rank))
    return entries


def run_and_check(
    op: str, victims: dict[int, tuple[str, int]], num_ranks: int = 4, mode: str = "raise", length: int = 1
) -> list[list[Entry]]:
    """Run the calls with these victims and check what the survivors saw; return it."""
    results = run_mortal(calls_until_the_end, num_ranks, op, victims, mode, length, dead=set(victims), timeout_s=40)
    histories = [[Entry(*entry) for entry in result] for result in results if result != DEAD]
    check_histories(histories, num_ranks, set(victims))
    return histories


CASES = [
    (op, point, 0 if point == "mid_send" else (OPS.index(op) + kill_points.POINTS.index(point)) % 4)
    for op in OPS
    for point in kill_points.POINTS
    if (op, point) != ("barrier", "mid_send")  # a barrier puts nothing
]


@pytest.mark.parametrize(("op", "point", "victim"), CASES)
def test_survivors_agree_and_go_on(op: str, point: str, victim: int) -> None:
    histories = run_and_check(op, {victim: (point, 3)})
    failed = [entry for entry in histories[0] if entry.status != "ok"]
    assert len(failed) == 1, failed
    assert failed[0].seq in (3, 4)
    assert failed[0].ranks == (victim,)


@pytest.mark.parametrize("op", OPS)
def test_in_mask_mode_the_call_succeeds_without_the_dead(op: str) -> None:
    histories = run_and_check(op, {2: ("before_send", 3)}, mode="mask")
    assert [entry.status for entry in histories[0]] == ["ok"] * NUM_CALLS
    assert [entry.contributors for entry in histories[0]][1:4] == [(0, 1, 2, 3), (0, 1, 3), (0, 1, 3)]


@pytest.mark.parametrize("mode", ["raise", "mask"])
@pytest.mark.parametrize("point", ["after_payload", "after_tag", "mid_copyout"])
def test_a_call_of_many_rounds(point: str, mode: str) -> None:
    length = (1 << 20) // 8  # 1 MiB: more than the staging holds
    histories = run_and_check("all_reduce", {1: (point, 3)}, num_ranks=3, mode=mode, length=length)
    assert {entry.status for entry in histories[0]} == ({"ok"} if mode == "mask" else {"ok", "RankFailedError"})


@pytest.mark.parametrize("mode", ["raise", "mask"])
def test_two_die_in_the_same_call(mode: str) -> None:
    run_and_check("all_reduce", {0: ("after_tag", 3), 2: ("before_send", 3)}, num_ranks=5, mode=mode)


def test_eight_ranks_become_one() -> None:
    victims = {rank: (kill_points.POINTS[rank % 7], 2 + i) for i, rank in enumerate((0, 7, 3, 1, 6, 2, 4))}
    histories = run_and_check("all_reduce", victims, num_ranks=8, mode="mask")
    assert len(histories) == 1
    assert histories[0][-1].contributors == (5,)
