"""Calls that fail on one rank alone: what the ranks compare from then on, and what must not count as a difference."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from epee.ep.throughput.gpu.types import CombineOptions, DispatchOptions, DispatchResult
from epee.ep.throughput.order import CombineOrder
from epee.errors import EpeeError
from tests.csrc.emulated import all_gather_bytes, has_compiler
from tests.csrc.throughput_cases import Case, inputs_of, make_buffer
from tests.csrc.throughput_end import ThroughputEnd
from tests.harness import run_ranks

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not has_compiler(), reason="no g++ here to build the kernels with"),
]
CASE = Case((9, 7), hidden=64)
BIG = Case((0, 4096), hidden=64)  # rank 1 is still placing its tokens when rank 0 has read all counts
LONG_S = 8.0


def _error_of(buffer: ThroughputEnd, call: Callable[[], object]) -> str:
    try:
        call()
        buffer.check()
    except EpeeError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _send(buffer: ThroughputEnd, rank: int, case: Case = CASE, shift: float = 0.0, sync: bool = True) -> DispatchResult:
    given = inputs_of(case, rank)
    assert isinstance(given.x, torch.Tensor)
    options = DispatchOptions(timeout_s=LONG_S, sync=sync)
    return buffer.dispatch(given.x + shift, None, given.topk_idx, given.topk_weights, None, options)


def _one_sided_barrier(buffer: ThroughputEnd, rank: int) -> str:
    """A barrier that times out on rank 0 and ends well on rank 1."""
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["gone"])
    error = _error_of(buffer, lambda: buffer.barrier(0.3 if rank == 0 else LONG_S))
    if rank == 0:
        store.set("gone", "")
    return error.split(":")[0]


def _two_handles(rank: int, num_ranks: int, last: int) -> tuple[str, str]:
    """Rank 0 combines by the first of two handles, rank 1 by the second, behind a call `last` that failed on rank 0."""
    buffer = make_buffer(CASE, rank, "emulated", num_slots=4)
    while buffer.machine.tags() < last - 3:
        buffer.barrier(LONG_S)
    both = [_send(buffer, rank, shift=shift) for shift in (0.0, 100.0)]
    barrier = _one_sided_barrier(buffer, rank)
    mine, options = both[rank], CombineOptions(timeout_s=LONG_S)
    return barrier, _error_of(buffer, lambda: buffer.combine(mine.x, mine.handle, None, (), None, options))


@pytest.mark.parametrize("last", [31, 32, 33])
def test_a_loss_hides_no_difference_of_handles(last: int) -> None:
    first, second = run_ranks(_two_handles, 2, last, timeout_s=200)
    assert (first[0], second[0]) == ("CommTimeoutError", "")
    assert first[1].startswith("MismatchError")
    assert second[1].startswith("MismatchError")


def _same_handle(rank: int, num_ranks: int) -> str:
    buffer = make_buffer(CASE, rank, "emulated")
    d = _send(buffer, rank)
    _one_sided_barrier(buffer, rank)
    options = CombineOptions(timeout_s=LONG_S)
    return _error_of(buffer, lambda: buffer.combine(d.x, d.handle, None, (), None, options))


def test_a_combine_behind_a_loss_says_so() -> None:
    for error in run_ranks(_same_handle, 2, timeout_s=200):
        assert error.startswith("MismatchError")
        assert "an earlier call has failed on one of rank" in error
        assert "call buffer.sync() on all ranks" in error


def _late_first_block(rank: int, num_ranks: int) -> str:
    buffer: Any = make_buffer(CASE, rank, "emulated")
    d = _send(buffer, rank)
    _one_sided_barrier(buffer, rank)
    if rank == 1:
        buffer.machine.platform.pause("combine", 14, 0.02)  # each thread; its other blocks see the difference meanwhile
    options = CombineOptions(timeout_s=LONG_S)
    return _error_of(buffer, lambda: buffer.combine(d.x, d.handle, None, (), None, options))


def test_a_combine_that_another_block_has_failed_already_does_not_look_like_the_peers_loss() -> None:
    for error in run_ranks(_late_first_block, 2, timeout_s=200):
        assert error.startswith("MismatchError"), error
        assert "an earlier call has failed on one of rank" in error


def _refusals(rank: int, num_ranks: int) -> list[str]:
    """Rank 0 refuses two calls and is in the third, a barrier, when rank 1 comes to the first."""
    buffer = make_buffer(CASE, rank, "emulated")
    store, said = dist.distributed_c10d._get_default_store(), []
    all_gather_bytes(b"x")
    if rank == 0:
        buffer.refuse(LONG_S)
        buffer.refuse(LONG_S)
        store.set("in the third", "")
        said.append(_error_of(buffer, lambda: buffer.barrier(LONG_S)))
    else:
        store.wait(["in the third"])
        time.sleep(0.5)  # until its barrier has written its words
        said = [_error_of(buffer, lambda: buffer.barrier(LONG_S)) for _ in range(3)]
    return [*said, *(_error_of(buffer, lambda: _send(buffer, rank)) for _ in range(3))]


def test_refusals_that_come_before_a_barrier_fail_the_same_calls_on_all() -> None:
    first, second = run_ranks(_refusals, 2, timeout_s=200)
    assert first[1:] == second[3:] == [""] * 3
    assert [error.split(":")[0] for error in second[:2]] == ["MismatchError"] * 2


def _overflow(rank: int, num_ranks: int) -> list[str]:
    buffer = make_buffer(BIG, rank, "emulated", max_recv_rows=16)
    said = []
    for _ in range(4):
        all_gather_bytes(b"x")
        said.append(_error_of(buffer, lambda: _send(buffer, rank, BIG, sync=False)))
        said.append(_error_of(buffer, lambda: buffer.barrier(LONG_S)))
    return said


def test_an_overflow_is_told_alike_to_who_is_slower() -> None:
    first, second = run_ranks(_overflow, 2, timeout_s=200)
    assert sum(error.startswith("InvalidArgument") for error in first) == 4
    assert [error for error in first if error] == [error for error in second if error]


def _late_reader(rank: int, num_ranks: int) -> str:
    buffer: Any = make_buffer(CASE, rank, "emulated")
    buffer.barrier(LONG_S)
    d = _send(buffer, rank)
    if rank == 1:
        buffer.machine.platform.pause("order", 13, 5.0)
    options = CombineOptions(timeout_s=0.5 if rank == 0 else LONG_S, order=CombineOrder("rank"))
    return _error_of(buffer, lambda: buffer.combine(d.x, d.handle, None, (), None, options))


def test_a_late_reader_of_an_ordered_combine_is_named_with_the_call_that_it_was_seen_in() -> None:
    error = run_ranks(_late_reader, 2, timeout_s=200)[0]
    assert "CommTimeoutError" in error
    assert "expected call 3, got 1)" in error
