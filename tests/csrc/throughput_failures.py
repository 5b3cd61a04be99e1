"""What throughput mode does when something is wrong, on any platform: the right error on every rank, and a buffer that
works on."""

from __future__ import annotations

import time
from typing import Any

import torch

from epee.ep.throughput import Throughput
from epee.ep.throughput_types import CombineOptions, DispatchOptions, Received
from epee.errors import CommTimeoutError, EpeeError, InvalidArgument, MismatchError
from tests.csrc.throughput_cases import Case, expect_equal, inputs_of, make_buffer
from tests.harness import run_ranks

CASE = Case((9, 7), hidden=64)
OPTIONS = DispatchOptions(timeout_s=10.0)


def open_buffer(rank: int, platform: str, **sizes: int) -> Throughput:
    """A buffer for `CASE`."""
    if platform == "cuda":
        torch.cuda.set_device(rank)
    return make_buffer(CASE, rank, platform, **sizes)


def _send(buffer: Throughput, rank: int, options: DispatchOptions = OPTIONS, **changes: Any) -> Received:
    given = inputs_of(CASE, rank)
    device = buffer._machine.platform.device
    arguments: dict[str, Any] = {"x": given.x, "route": given.topk_idx, "topk_weights": given.topk_weights} | changes
    for name, value in arguments.items():
        arguments[name] = None if value is None else value.to(device)
    return buffer.dispatch(arguments["x"], None, arguments["route"], arguments["topk_weights"], None, options)


def _error_of(call: Any) -> tuple[str, str]:
    try:
        call()
    except EpeeError as error:
        return type(error).__name__, str(error)
    return "", ""


def _wait_for_gpu(buffer: Throughput) -> None:
    if buffer._machine.platform.device.type == "cuda":
        torch.cuda.synchronize()


def _works(buffer: Throughput, rank: int) -> int:
    return _send(buffer, rank).x.shape[0]


def bad_expert(rank: int, num_ranks: int, platform: str) -> Any:
    buffer = open_buffer(rank, platform)
    idx = inputs_of(CASE, rank).topk_idx
    assert idx is not None
    if rank == 0:
        idx[3, 1] = CASE.num_experts + 5
    return _error_of(lambda: _send(buffer, rank, route=idx)), _works(buffer, rank)


def mismatch(rank: int, num_ranks: int, platform: str) -> Any:
    buffer = open_buffer(rank, platform)
    options = DispatchOptions(expert_alignment=1 + rank, timeout_s=10.0)
    return _error_of(lambda: _send(buffer, rank, options)), _works(buffer, rank)


def refusal(rank: int, num_ranks: int, platform: str) -> Any:
    buffer = open_buffer(rank, platform)
    error = ("", "")
    if rank == 0:
        buffer.refuse_dispatch(10.0)
        _wait_for_gpu(buffer)
        error = _error_of(buffer.check)  # nothing: this rank raises its own error
    else:
        error = _error_of(lambda: _send(buffer, rank))
    return error, _works(buffer, rank)


def refused_combine(rank: int, num_ranks: int, platform: str) -> Any:
    buffer = open_buffer(rank, platform)
    d = _send(buffer, rank)
    if rank == 0:
        buffer.refuse_combine(10.0)
    else:
        buffer.combine(d.x, d.handle, None, (), None, CombineOptions(timeout_s=10.0))
    _wait_for_gpu(buffer)
    return _error_of(buffer.check), _works(buffer, rank)


def overflow(rank: int, num_ranks: int, platform: str) -> Any:
    buffer = open_buffer(rank, platform, max_recv_rows=6)
    error = _error_of(lambda: _send(buffer, rank))
    region = buffer._machine.slots[rank]
    _wait_for_gpu(buffer)
    untouched = bool((region.lease(0, region.nbytes, None) == 255).all())
    few = torch.full((1, CASE.num_topk), 0)
    given = inputs_of(CASE, rank)
    assert isinstance(given.x, torch.Tensor)
    d = _send(buffer, rank, x=given.x[:1], route=few, topk_weights=None)
    return error, untouched, d.x.shape[0]


def late_peer(rank: int, num_ranks: int, platform: str) -> Any:
    buffer = open_buffer(rank, platform)
    if rank == 1:
        time.sleep(1.5)
    error = _error_of(lambda: _send(buffer, rank, DispatchOptions(timeout_s=0.4)))
    if not error[0]:
        _wait_for_gpu(buffer)
        error = _error_of(buffer.check)
    return error, _works(buffer, rank)


def hoard(rank: int, num_ranks: int, platform: str) -> Any:
    buffer = open_buffer(rank, platform, num_slots=2)
    held = [_send(buffer, rank) for _ in range(4)]
    copies = buffer.num_copies
    rows = [d.x.clone() for d in held]
    for d in held[1:]:
        expect_equal(d.x, held[0].x, "a result that was held")
    del d, held
    later = _send(buffer, rank)
    return copies, buffer.num_copies, bool((rows[0] == later.x).all())


def check_bad_expert_id_is_named_and_refuses_the_call_everywhere(platform: str) -> None:
    """A bad expert id is named where it was given and refuses the call everywhere."""
    (mine, rows), (peers, _) = run_ranks(bad_expert, 2, platform, timeout_s=200)
    assert mine[0] == InvalidArgument.__name__
    assert f"got {CASE.num_experts + 5} at token 3, k 1" in mine[1]
    assert peers[0] == MismatchError.__name__
    assert "rank 0 refused the call" in peers[1]
    assert rows > 0


def check_different_calls_are_a_mismatch_on_every_rank(platform: str) -> None:
    """Different calls are a mismatch on every rank."""
    for rank, (error, rows) in enumerate(run_ranks(mismatch, 2, platform, timeout_s=200)):
        assert error[0] == MismatchError.__name__
        assert f"rank {1 - rank} makes another call" in error[1]
        assert rows > 0


def check_refused_call_ends_at_once_for_the_peers(platform: str) -> None:
    """A refused call ends at once for the peers."""
    (mine, _), (error, rows) = run_ranks(refusal, 2, platform, timeout_s=200)
    assert mine == ("", "")
    assert error[0] == MismatchError.__name__
    assert "rank 0 refused the call, an argument was invalid" in error[1]
    assert rows > 0


def check_refused_combine_ends_at_once_for_the_peers(platform: str) -> None:
    """A combine that one rank refuses is an error on the others only, and both work afterwards."""
    (mine, rows), (peers, _) = run_ranks(refused_combine, 2, platform, timeout_s=200)
    assert mine == ("", "")
    assert peers[0] == MismatchError.__name__
    assert "rank 0 refused the call, an argument was invalid" in peers[1]
    assert rows > 0


def check_too_many_rows_are_an_error_on_every_rank_and_write_nothing(platform: str) -> None:
    """Too many rows are an error on every rank and write nothing."""
    for rank, (error, untouched, rows) in enumerate(run_ranks(overflow, 2, platform, timeout_s=200)):
        assert error[0] == InvalidArgument.__name__
        assert "its rank layout holds 6; make the buffer with max_recv_rows=" in error[1]
        assert untouched
        assert rows == (2 if rank == 0 else 0)


def check_silent_peer_is_named_and_both_ranks_work_afterwards(platform: str) -> None:
    """A silent peer is named, and both ranks work afterwards."""
    results = run_ranks(late_peer, 2, platform, timeout_s=200)
    for rank, (error, rows) in enumerate(results):
        assert error[0] == CommTimeoutError.__name__, error
        assert f"rank {1 - rank} was silent too long" in error[1]
        assert rows > 0


def check_results_are_copied_out_when_no_slot_is_free(platform: str) -> None:
    """Results are copied out when no slot is free."""
    for copies, copies_later, is_same in run_ranks(hoard, 2, platform, timeout_s=200):
        assert copies == 2
        assert copies_later == 2  # the dead tensors gave their slots back
        assert is_same


CHECKS = {
    check.__name__.removeprefix("check_").replace("_", " "): check
    for check in (
        check_bad_expert_id_is_named_and_refuses_the_call_everywhere,
        check_different_calls_are_a_mismatch_on_every_rank,
        check_refused_call_ends_at_once_for_the_peers,
        check_refused_combine_ends_at_once_for_the_peers,
        check_too_many_rows_are_an_error_on_every_rank_and_write_nothing,
        check_silent_peer_is_named_and_both_ranks_work_afterwards,
        check_results_are_copied_out_when_no_slot_is_free,
    )
}
