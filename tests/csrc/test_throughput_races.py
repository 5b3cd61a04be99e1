"""Races between ranks and blocks of the throughput kernels that a slow thread loses, each made certain by standing
still at the place that matters (`EmulatedPlatform.pause`). The kernels are the GPU's own, built by g++."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from epee import reference
from epee.ep.throughput.gpu.types import CombineOptions, DispatchOptions, DispatchResult
from epee.ep.throughput.order import CombineOrder
from epee.errors import EpeeError
from tests.csrc.emulated import EmulatedPlatform, all_gather_bytes, has_compiler
from tests.csrc.throughput_cases import Case, check_case, expect_equal, expert_output, inputs_of, make_buffer
from tests.csrc.throughput_end import ThroughputEnd
from tests.harness import run_ranks

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.timeout(240),  # the first one builds the kernels
    pytest.mark.skipif(not has_compiler(), reason="no g++ here to build the kernels with"),
]

CASE = Case((9, 7), hidden=64)
LATE_BLOCKS, PLACE_LOADER, PLACE_LEARN, PLACE_ORDER = 0, 6, 12, 13  # of `common/stall.cuh`
SEND = DispatchOptions(timeout_s=8.0)
BACK = CombineOptions(timeout_s=8.0)


def open_buffer(rank: int, case: Case = CASE, **pauses: dict[int, float]) -> ThroughputEnd:
    """A buffer; `pauses` are seconds for each place, by kernel file."""
    buffer = make_buffer(case, rank, "emulated")
    _pause(buffer, **pauses)
    return buffer


def _pause(buffer: ThroughputEnd, **pauses: dict[int, float]) -> None:
    platform = buffer.machine.platform
    assert isinstance(platform, EmulatedPlatform)
    for file, places in pauses.items():
        for place, seconds in places.items():
            platform.pause(file, place, seconds)


def _send(buffer: ThroughputEnd, rank: int, options: DispatchOptions = SEND, case: Case = CASE) -> DispatchResult:
    given = inputs_of(case, rank)
    assert isinstance(given.x, torch.Tensor)
    return buffer.dispatch(given.x, None, given.topk_idx, given.topk_weights, None, options)


def _error_of(call: Any) -> str:
    try:
        call()
    except EpeeError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _combine_error(
    buffer: ThroughputEnd, d: DispatchResult, weights: torch.Tensor | None = None, options: CombineOptions = BACK
) -> str:
    def call() -> None:
        buffer.combine(d.x, d.handle, weights, (), None, options)
        buffer.check()

    return _error_of(call)


def _is_right(buffer: ThroughputEnd, rank: int, case: Case = CASE) -> bool:
    """Whether a dispatch brings the right bits."""
    inputs = [inputs_of(case, src) for src in range(case.num_ranks)]
    want = reference.dispatch(inputs, case.num_experts)[rank].x
    got = _send(buffer, rank, case=case).x
    assert isinstance(want, torch.Tensor)
    return got.shape == want.shape and bool((got == want).all())


def _differing_combine(rank: int, num_ranks: int) -> tuple[str, bool]:
    buffer = open_buffer(rank)
    d = _send(buffer, rank)
    if rank == 0:
        _pause(buffer, combine={PLACE_LEARN: 0.5})  # rank 1 is in its next call before rank 0 looks at its word
    error = _combine_error(buffer, d, d.topk_weights if rank else None)
    _pause(buffer, combine={PLACE_LEARN: 0})
    return error, _is_right(buffer, rank)


def test_slow_rank_reads_what_a_faster_one_said_before_its_next_call() -> None:
    """The word by which a rank joins a combine outlives that rank's next call."""
    (first, is_right), (second, is_right_there) = run_ranks(_differing_combine, 2, timeout_s=100)
    assert "MismatchError" in first
    assert "topk_weights" in first
    assert first == second
    assert is_right
    assert is_right_there


def _late_blocks(rank: int, num_ranks: int, op: str) -> tuple[str, str, bool]:
    buffer = open_buffer(rank)
    d = _send(buffer, rank)
    late = {LATE_BLOCKS: 0.2}
    _pause(buffer, combine=late, dispatch=late, few=late, expert=late)
    if op == "combine":
        error = _combine_error(buffer, d, d.topk_weights if rank else None)
    else:
        layout = "expert" if op == "expert" else "rank"
        options = DispatchOptions(layout, 1 + rank, timeout_s=8.0, num_sms=2 if op == "few" else None)
        error = _error_of(lambda: _send(buffer, rank, options))
    later = _error_of(buffer.check)
    soon = {LATE_BLOCKS: 0.0}
    _pause(buffer, combine=soon, dispatch=soon, few=soon, expert=soon)
    return error, later, _is_right(buffer, rank) and _is_right(buffer, rank)


@pytest.mark.parametrize("op", ["combine", "dispatch", "few", "expert"])
def test_failed_call_ends_behind_its_last_block(op: str) -> None:
    """Blocks that begin when a call has failed already belong to that call, not to the next one."""
    for error, later, is_right in run_ranks(_late_blocks, 2, op, timeout_s=100):
        assert "MismatchError" in error
        assert later == ""
        assert is_right


def _overtaken(rank: int, num_ranks: int) -> tuple[str, str]:
    buffer = open_buffer(rank)
    d = _send(buffer, rank)
    if rank == 1:
        _pause(buffer, combine={PLACE_LOADER: 0.02})  # each lane: 0.6 s for a token
    # the rows lie in a slot and are pulled from there
    first = _combine_error(buffer, d, options=CombineOptions(timeout_s=8.0 if rank else 0.3))
    second = ""
    if rank == 0:
        buffer.refuse(8.0)  # another call that fails here, while rank 1 is still in the first
        d.x.fill_(float("nan"))  # the user has been told and may do so
    else:
        _pause(buffer, combine={PLACE_LOADER: 0})
        second = _error_of(lambda: _send(buffer, rank))
    return first, second


def test_rank_that_gave_a_combine_up_is_heard_behind_its_later_failures() -> None:
    """Rows pulled from a peer that has given up are no result, also when the peer has failed again since."""
    (here, _), (there, later) = run_ranks(_overtaken, 2, timeout_s=100)
    assert "rank 1 was silent too long" in here
    assert "rank 0 aborted the call" in there
    assert later


def _ordered(rank: int, num_ranks: int, case: Case, late: str) -> tuple[str, torch.Tensor]:
    buffer = open_buffer(rank, case)
    d = _send(buffer, rank, case=case)
    y = expert_output(d.x, rank, case)
    timeout_s = 8.0
    if late == "copier" and rank == 1:
        _pause(buffer, combine={LATE_BLOCKS: 0.5})
    if late == "reader":
        d.x.copy_(y)
        y = d.x
        timeout_s = 8.0 if rank else 0.3
        if rank == 1:
            _pause(buffer, order={PLACE_ORDER: 2.0})  # rank 0 may begin late
    options = CombineOptions(num_sms=1, timeout_s=timeout_s, order=CombineOrder())
    out = torch.full((case.num_tokens[rank], case.hidden), float("nan"), dtype=y.dtype)

    def call() -> None:
        buffer.combine(y, d.handle, None, (), out, options)
        buffer.check()

    error = _error_of(call)
    if late == "reader" and rank == 0:
        y.fill_(float("nan"))
    all_gather_bytes(b"done")
    return error, out


def test_ordered_combine_reads_no_row_before_it_was_copied() -> None:
    """Rows that a peer copies from ordinary memory are awaited by an ordered combine, too."""
    inputs = [inputs_of(CASE, rank) for rank in range(2)]
    want = reference.dispatch(inputs, CASE.num_experts)
    ys = [expert_output(there.x, rank, CASE) for rank, there in enumerate(want)]  # type: ignore[arg-type]
    combined = reference.combine(inputs, want, ys)
    for rank, (error, out) in enumerate(run_ranks(_ordered, 2, CASE, "copier", timeout_s=100)):
        assert error == ""
        expect_equal(out, combined[rank], f"rank {rank}")


def test_ordered_combine_hears_that_a_peer_gave_up() -> None:
    """A rank that is late in an ordered combine learns that the rows it read were given up."""
    (here, _), (there, _) = run_ranks(_ordered, 2, CASE, "reader", timeout_s=100)
    assert "rank 1 was silent too long" in here
    assert "rank 0 aborted the call" in there


WIDE = Case((80, 80), hidden=8, num_topk=1, num_local_experts=1, layout="expert", routing="one expert")


def _many_channels(rank: int, num_ranks: int) -> bool:
    given = [inputs_of(WIDE, src) for src in range(2)]
    want = reference.dispatch(given, WIDE.num_experts, layout="expert")[rank].x
    buffer = make_buffer(WIDE, rank, "emulated", num_sms=80 if rank == 0 else 2)
    got = _send(buffer, rank, DispatchOptions("expert", num_sms=70 if rank == 0 else 1, timeout_s=20.0), WIDE).x
    assert isinstance(want, torch.Tensor)
    return got.shape == want.shape and bool((got == want).all())


def test_few_expanders_serve_more_channels_than_they_watch_at_once() -> None:
    """A rank with few multiprocessors receives all rows of a rank that sends with many."""
    assert run_ranks(_many_channels, 2, timeout_s=150) == [True, True]


def _again_of_failed(rank: int, num_ranks: int, is_expert: bool) -> tuple[str, str, bool]:
    """The handle of a dispatch that failed without CPU sync is used again before the host has looked."""
    case = CASE
    buffer = open_buffer(rank, case)
    idx = inputs_of(case, rank).topk_idx
    assert idx is not None
    if rank == 0:
        idx[3, 1] = case.num_experts + 5
    given = inputs_of(case, rank)
    assert isinstance(given.x, torch.Tensor)
    options = DispatchOptions("expert" if is_expert else "rank", sync=False, timeout_s=8.0)
    failed = buffer.dispatch(given.x, None, idx, given.topk_weights, None, options)
    first = _error_of(buffer.check)  # on a GPU the host would be ahead of this
    _error_of(lambda: buffer.dispatch(inputs_of(case, rank).x, None, None, None, failed.handle, options))  # type: ignore[arg-type]
    return first, _error_of(buffer.check), _is_right(buffer, rank)


@pytest.mark.parametrize("is_expert", [False, True])
def test_cached_dispatch_of_a_failed_one_moves_nothing(is_expert: bool) -> None:
    """A handle of a dispatch that failed holds no places; a dispatch that uses it fails on all ranks."""
    for first, again, is_right in run_ranks(_again_of_failed, 2, is_expert, timeout_s=100):
        assert first
        assert "InvalidState" in again
        assert "the dispatch that made this handle has failed" in again
        assert is_right


def _combine_of_failed(rank: int, num_ranks: int) -> tuple[str, bool]:
    buffer = open_buffer(rank)
    given = inputs_of(CASE, rank)
    assert isinstance(given.x, torch.Tensor)
    assert given.topk_idx is not None
    if rank == 0:
        given.topk_idx[3, 1] = CASE.num_experts + 5
    options = DispatchOptions(sync=False, timeout_s=8.0)
    failed = buffer.dispatch(given.x, None, given.topk_idx, given.topk_weights, None, options)
    assert _error_of(buffer.check)
    error = _combine_error(buffer, failed) if rank == 0 else _error_of(lambda: _send(buffer, rank))
    return error, _is_right(buffer, rank)


def test_dispatch_meets_the_combine_of_a_failed_dispatch() -> None:
    """A rank that dispatches learns at once that the other one combines, and cannot."""
    (here, is_right), (there, is_right_there) = run_ranks(_combine_of_failed, 2, timeout_s=100)
    assert "InvalidState" in here
    assert "rank 0 refused the call, the dispatch whose handle it uses had failed there" in there
    assert is_right
    assert is_right_there


EIGHT = {
    "rank": Case((3, 0, 2, 5, 1, 0, 4, 6), num_topk=32, num_local_experts=4, hidden=136, num_bias=1),
    "expert": Case((3, 0, 2, 5, 1, 0, 4, 6), num_topk=32, num_local_experts=4, hidden=136, layout="expert"),
}


@pytest.mark.parametrize("layout", EIGHT)
def test_eight_ranks_and_32_experts_per_token(layout: str) -> None:
    """The widest group and routing, with ranks that have nothing."""
    check_case(replace(EIGHT[layout], expert_alignment=4 if layout == "expert" else 1), "emulated", timeout_s=200)
