"""Calls of a buffer beside changes of the view end alike on all ranks, whatever decides that.

Real processes and the public interface only: what each rank gets from its calls, in which epoch, and who is in it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import epee
from epee.ep.throughput.cpu import CpuPath
from epee.errors import CommTimeoutError, RankFailedError
from tests.harness import DEAD, run_mortal

from . import stages
from .buffer_rounds import check_dispatch, die, make_buffer, make_step, routing, rows, start

NUM_STEPS, TIMEOUT_S = 6, 0.3
LATENCY = {"num_experts": 6, "hidden": 8, "num_topk": 2, "max_tokens_per_rank": 4}


def repeated(step: Callable[[], float]) -> tuple[float, int]:
    """Make a step until it succeeds; return its value, and how often it failed before.

    Raises:
        AssertionError: it failed in another way than by its timeout, or too often.
    """
    for failures in range(60):
        try:
            return step(), failures
        except CommTimeoutError:
            pass
    raise AssertionError("60 attempts of a step have failed")


def of_bytes(buffer: epee.Buffer, number: int, pause: Callable[[], None]) -> float:
    """Gather bytes that say which step it is, and return their mean."""
    pause()
    return sum(part[0] for part in buffer.all_gather_bytes(bytes([number]))) / buffer.num_ranks


def of_layer(buffer: epee.Buffer, number: int, pause: Callable[[], None]) -> float:
    """Let experts multiply ones by the number of the step; a rank may be late before either call."""
    pause()
    d = buffer.dispatch(torch.ones(1, 8), torch.tensor([[0, 2]]), torch.ones(1, 2), layout="expert")
    assert isinstance(d.x, torch.Tensor)
    pause()
    return buffer.combine(d.x * number, d.handle).x[0, 0].item() / 2


def of_latency(buffer: Any, number: int, pause: Callable[[], None]) -> float:
    """Do the same with the calls of a `LatencyBuffer`."""
    pause()
    d = buffer.dispatch(torch.ones(1, 8).bfloat16(), torch.tensor([[0, 2]]))
    pause()
    return float(buffer.combine(d.x * number, d.handle).x[0, 0]) / 2


STEPS: dict[str, Any] = {"bytes": of_bytes, "layer": of_layer, "latency": of_latency}


def late_at_random(rank: int, num_ranks: int, folder: str, what: str) -> list[tuple[float, int]]:
    """Any rank may be late for any call, several at once, so several give it up."""
    start(rank, num_ranks, folder, "raise")
    made = dict(LATENCY, num_experts=2 * num_ranks)
    buffer: Any = (
        epee.LatencyBuffer(timeout=TIMEOUT_S, **made)
        if what == "latency"
        else epee.Buffer(timeout=TIMEOUT_S, dtype=torch.float32, **made)
    )
    dice = random.Random(rank)
    lengths = [*(dice.choice((0, 0, 0, 0, 0, 0.5, 1.0, 1.5, 2.5)) for _ in range(3 + rank)), 3.0]  # then no more

    def pause() -> None:
        time.sleep(TIMEOUT_S * lengths.pop(0) if lengths else 0.0)

    stages.meet(folder, "made", rank, range(num_ranks))
    ends = [repeated(lambda number=number: STEPS[what](buffer, number, pause)) for number in range(1, NUM_STEPS + 1)]  # type: ignore[misc]
    stages.meet(folder, "end", rank, range(num_ranks))
    return ends


@pytest.mark.parametrize(("what", "num_ranks"), [("bytes", 4), ("layer", 2), ("layer", 4), ("latency", 3)])
def test_steps_stay_together_whichever_ranks_give_calls_up(what: str, num_ranks: int) -> None:
    """A call that some gave up has ended for all, or for none: no step meets another, no rank is a step ahead."""
    all_ends = run_mortal(late_at_random, num_ranks, what, dead=set())
    for ends in all_ends:
        assert [value for value, _ in ends] == [float(number) for number in range(1, NUM_STEPS + 1)]
    assert any(times for ends in all_ends for _, times in ends), "no call was given up, so nothing was tested"


def late_and_slow(rank: int, num_ranks: int, folder: str) -> list[tuple[float, int]]:
    """Rank 1 comes to a dispatch with little of the others' time left, and is slow with its payload then."""
    start(rank, num_ranks, folder, "raise")
    buffer = epee.Buffer(timeout=1.5, dtype=torch.float32, **LATENCY)
    send = CpuPath._send

    def slow(*args: Any) -> None:
        time.sleep(1.0)
        send(*args)

    ends = []
    for number in range(1, 4):
        is_slow = rank == 1 and number == 2
        CpuPath._send = slow if is_slow else send  # type: ignore[method-assign]
        stages.meet(folder, f"{number}", rank, range(num_ranks))
        time.sleep(0.9 if is_slow else 0.0)
        ends.append(repeated(lambda number=number: of_layer(buffer, number, lambda: None)))  # type: ignore[misc]
    stages.meet(folder, "end", rank, range(num_ranks))
    return ends


def test_a_rank_that_comes_late_to_a_dispatch_has_the_whole_time_for_its_payload() -> None:
    """Ranks that have its payload complete the call, so none may give it up once all have the rows."""
    assert run_mortal(late_and_slow, 3, dead=set()) == [[(1.0, 0), (2.0, 0), (3.0, 0)]] * 3


def late_in_the_next_epoch(rank: int, num_ranks: int, folder: str) -> tuple[list[int], int]:
    """1 and 2 are behind; 2 dies before 0's time is over; 1 comes after that, within the time of the new view."""
    group = start(rank, num_ranks, folder, "mask", on_stall="evict", op_timeout=60.0)
    buffer = make_buffer(group, timeout=6.0)
    make_step(buffer, 0, "rank")
    stages.meet(folder, "made", rank, range(num_ranks))
    if rank:
        stages.wait_for(folder, "begins")
        time.sleep(4.0 if rank == 2 else 7.0)
        if rank == 2:
            die()
    stages.reach(folder, "begins")
    idx, weights = routing(rank, num_ranks, 1)
    d = buffer.dispatch(rows(rank, 1), idx, weights)
    check_dispatch(d, rank, num_ranks, 1, 1)
    assert d.got is not None
    stages.meet(folder, "end", rank, range(2))
    return d.got.tolist(), buffer.epoch


def test_a_rank_has_its_whole_time_in_each_view() -> None:
    """With on_stall="evict" a rank is voted out for what it did not do in this view, not for the view before."""
    first, second, dead = run_mortal(late_in_the_next_epoch, 3, dead={2})
    assert dead is DEAD
    assert first == second == ([1, 1, 0], 2)


def a_successor_before_any_call(slot: int, num_ranks: int, folder: str, mode: str) -> list[list[int]]:
    """Rank 2 dies while no call runs; 3 takes its place, and all sync before they make a call."""
    if slot == 3:
        stages.wait_for(folder, "lost")
        buffer = make_buffer(start(2, 3, folder, mode, joins=True, on_stall="error"))
    else:
        group = start(slot, 3, folder, mode, on_stall="error")
        buffer = make_buffer(group)
        make_step(buffer, 0, "rank")
        stages.meet(folder, "made", slot, range(3))
        if slot == 2:
            die()
        stages.reach(folder, "lost")
        while slot == 0 and group.waiting_ranks() != (2,):
            time.sleep(0.005)
        if slot == 0:
            group.recover_ranks([2])
    mask = torch.ones(3, dtype=torch.int32)
    ends = [buffer.sync(mask, timeout=60.0).tolist()]
    for number in (1, 2):
        d = buffer.dispatch(rows(buffer.rank, number), *routing(buffer.rank, 3, number))
        check_dispatch(d, buffer.rank, 3, number, 1)
        assert d.got is not None
        ends.append(d.got.tolist())
    stages.meet(folder, "end", slot, (0, 1, 3))
    return ends


@pytest.mark.parametrize("mode", ["mask", "raise"])
def test_a_sync_that_takes_a_successor_in_reports_no_loss(mode: str) -> None:
    ends = run_mortal(a_successor_before_any_call, 4, mode, dead={2})
    assert [ends[slot] for slot in (0, 1, 3)] == [[[1, 1, 1]] * 3] * 3


def a_loss_reported_once(rank: int, num_ranks: int, folder: str) -> list[Any]:
    """2 dies in its third call, wherever the others are in it."""
    group = start(rank, num_ranks, folder, "raise", on_stall="error")
    buffer = make_buffer(group)
    dice = random.Random(rank)
    ends: list[Any] = []
    for number in range(1, 7):
        if rank == 2 and number == 3:
            die()
        time.sleep(dice.random() * 0.05)
        idx, weights = routing(rank, num_ranks, number)
        try:
            d = buffer.dispatch(rows(rank, number), idx, weights)
        except RankFailedError as error:
            ends.append(error.ranks)
        else:
            assert d.got is not None
            ends.append((d.got.tolist(), buffer.epoch))
    stages.meet(folder, "end", rank, (0, 1, 3))
    return ends


def test_a_loss_is_the_end_of_the_same_call_on_all_ranks() -> None:
    ends = run_mortal(a_loss_reported_once, 4, dead={2})
    whole, rest = ([1, 1, 1, 1], 1), ([1, 1, 0, 1], 2)
    assert [ends[rank] for rank in (0, 1, 3)] == [[whole, whole, (2,), rest, rest, rest]] * 3
