"""Failures of the throughput kernels, on any platform: the right error on every rank, and a buffer that
works on."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from epee import reference
from epee.ep.throughput.gpu.types import CombineOptions, DispatchOptions, DispatchResult
from epee.errors import CommTimeoutError, EpeeError, InvalidArgument, InvalidState, MismatchError
from tests.csrc.emulated import all_gather_bytes
from tests.csrc.throughput_cases import Case, device_of, ends_of, expect_equal, expert_output, inputs_of, make_buffer
from tests.csrc.throughput_end import ThroughputEnd
from tests.harness import run_ranks

CASE = Case((9, 7), hidden=64)
OPTIONS = DispatchOptions(timeout_s=10.0)


def open_buffer(rank: int, platform: str, **sizes: int) -> ThroughputEnd:
    """A buffer for `CASE`."""
    if platform == "cuda":
        torch.cuda.set_device(device_of(rank))
    return make_buffer(CASE, rank, platform, **sizes)


def _send(buffer: ThroughputEnd, rank: int, options: DispatchOptions = OPTIONS, **changes: Any) -> DispatchResult:
    given = inputs_of(CASE, rank)
    device = buffer.machine.platform.device
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


def _wait_for_gpu(buffer: ThroughputEnd) -> None:
    if buffer.machine.platform.device.type == "cuda":
        torch.cuda.synchronize()


def _works(buffer: ThroughputEnd, rank: int) -> int:
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
        buffer.refuse(10.0)
        _wait_for_gpu(buffer)
        error = _error_of(buffer.check)  # nothing: this rank raises its own error
    else:
        error = _error_of(lambda: _send(buffer, rank))
    return error, _works(buffer, rank)


def refused_combine(rank: int, num_ranks: int, platform: str) -> Any:
    buffer = open_buffer(rank, platform)
    d = _send(buffer, rank)
    if rank == 0:
        buffer.refuse(10.0)
    else:
        buffer.combine(d.x, d.handle, None, (), None, CombineOptions(timeout_s=10.0))
    _wait_for_gpu(buffer)
    return _error_of(buffer.check), _works(buffer, rank)


def overflow(rank: int, num_ranks: int, platform: str) -> Any:
    buffer = open_buffer(rank, platform, max_recv_rows=6)
    error = _error_of(lambda: _send(buffer, rank))
    region = buffer.machine.slots[rank]
    _wait_for_gpu(buffer)
    untouched = bool((region.lease(0, region.nbytes, None) == 255).all())
    few = torch.full((1, CASE.num_topk), 0)
    given = inputs_of(CASE, rank)
    assert isinstance(given.x, torch.Tensor)
    d = _send(buffer, rank, x=given.x[:1], route=few, topk_weights=None)
    return error, untouched, d.x.shape[0]


def _await_time_out(rank: int) -> None:
    """Let rank 1 come to a call when rank 0 has given it up."""
    if rank == 1:
        dist.distributed_c10d._get_default_store().wait(["given up"])


def _say_time_out(rank: int) -> None:
    """Rank 0 has."""
    if rank == 0:
        dist.distributed_c10d._get_default_store().set("given up", "")


def late_peer(rank: int, num_ranks: int, platform: str) -> Any:
    buffer = open_buffer(rank, platform)
    _await_time_out(rank)
    error = _error_of(lambda: _send(buffer, rank, DispatchOptions(timeout_s=0.4)))
    if not error[0]:
        _wait_for_gpu(buffer)
        error = _error_of(buffer.check)
    _say_time_out(rank)
    return error, _works(buffer, rank)


def _fail_late(buffer: ThroughputEnd, rank: int) -> tuple[DispatchResult, tuple[str, str]]:
    """A dispatch without CPU sync that rank 1 enters when rank 0 has given it up; returns what rank 0 raised then."""
    _await_time_out(rank)
    given = inputs_of(CASE, rank)
    assert isinstance(given.x, torch.Tensor)
    failed = _send(buffer, rank, DispatchOptions(timeout_s=0.5, sync=False), x=given.x + 1)
    _wait_for_gpu(buffer)
    error = _error_of(buffer.check)
    _say_time_out(rank)
    return failed, error


def late_stores(rank: int, num_ranks: int, platform: str) -> Any:
    buffer = open_buffer(rank, platform, num_slots=1)
    d = _send(buffer, rank)  # holds the only slot, so that the next dispatch grants the landing place
    y = expert_output(d.x, rank, CASE)
    error = _fail_late(buffer, rank)[1]
    out, _ = buffer.combine(y, d.handle, None, (), None, CombineOptions(timeout_s=10.0))
    _wait_for_gpu(buffer)
    buffer.check()
    return error[0], out.cpu()


def late_grant(rank: int, num_ranks: int, platform: str) -> Any:
    buffer = open_buffer(rank, platform, num_slots=2)
    d = _send(buffer, rank)
    failed, error = _fail_late(buffer, rank)
    del failed  # its slot is free, but a late peer may still store into it
    while_haunted = buffer.combine_input(d.handle, d.x.dtype) is None
    buffer.combine(d.x, d.handle, None, (), None, CombineOptions(timeout_s=10.0))  # all join this
    _wait_for_gpu(buffer)
    later = buffer.combine_input(d.handle, d.x.dtype) is None
    return error[0], while_haunted, later


def combine_of_failed(rank: int, num_ranks: int, platform: str) -> Any:
    buffer = open_buffer(rank, platform)
    failed, _ = _fail_late(buffer, rank)
    all_gather_bytes(b"both have left it")  # else rank 0's next calls would overwrite what rank 1 is to see
    buffer.combine(failed.x, failed.handle, None, (), None, CombineOptions(timeout_s=10.0))
    _wait_for_gpu(buffer)
    return _error_of(buffer.check), _works(buffer, rank)


def hoard(rank: int, num_ranks: int, platform: str) -> Any:
    buffer = open_buffer(rank, platform, num_slots=2)
    held = [_send(buffer, rank) for _ in range(4)]
    copies = buffer.machine.pool.num_copies
    rows = [d.x.clone() for d in held]
    for d in held[1:]:
        expect_equal(d.x, held[0].x, "a result that was held")
    del d, held
    later = _send(buffer, rank)
    return copies, buffer.machine.pool.num_copies, bool((rows[0] == later.x).all())


def overflow_unseen(rank: int, num_ranks: int, platform: str) -> Any:
    buffer = open_buffer(rank, platform, max_recv_rows=6)
    handle = _send(buffer, rank, DispatchOptions(timeout_s=10.0, sync=False)).handle
    _wait_for_gpu(buffer)
    return _error_of(buffer.check), {name: ends.cpu() for name, ends in ends_of(buffer, handle).items()}


def barriers(rank: int, num_ranks: int, platform: str, num_rounds: int) -> int:
    """Count how often a rank came through a barrier that another had not reached; calls of other kinds in between."""
    buffer, store = open_buffer(rank, platform), dist.distributed_c10d._get_default_store()
    num_early = 0
    for i in range(num_rounds):
        if i % 3 == rank:
            time.sleep(0.01)
        store.add(f"reached {i}", 1)
        buffer.barrier(10.0)
        _wait_for_gpu(buffer)
        num_early += store.add(f"reached {i}", 0) != num_ranks
        if i % 5 == 4:
            _works(buffer, rank)
    buffer.check()
    return num_early


def silent_at_barrier(rank: int, num_ranks: int, platform: str) -> Any:
    buffer = open_buffer(rank, platform)
    buffer.barrier(10.0)
    _wait_for_gpu(buffer)
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["given up"])
    buffer.barrier(0.4)
    _wait_for_gpu(buffer)
    error = _error_of(buffer.check)
    if rank == 0:
        store.set("given up", "")
    buffer.barrier(10.0)
    _wait_for_gpu(buffer)
    differs = _error_of(buffer.check)
    tags = [int.from_bytes(tag, "little") for tag in all_gather_bytes(buffer.machine.tags().to_bytes(8, "little"))]
    buffer.machine.set_view([True] * num_ranks, max(tags) + 8, {})
    all_gather_bytes(b"both have the view")
    buffer.barrier(10.0)
    return error, differs, _works(buffer, rank)


def barrier_or(rank: int, num_ranks: int, platform: str, other: str) -> Any:
    """Rank 0 makes a barrier, rank 1 another call."""
    buffer = open_buffer(rank, platform)
    d = _send(buffer, rank)
    if rank == 0:
        buffer.barrier(10.0)
    elif other == "refusal":
        buffer.refuse(10.0)
    elif other == "combine":
        buffer.combine(d.x, d.handle, None, (), None, CombineOptions(timeout_s=10.0))
    else:
        _send(buffer, rank, DispatchOptions(timeout_s=10.0, sync=False))
    _wait_for_gpu(buffer)
    error = _error_of(buffer.check)
    buffer.barrier(10.0)
    return error, _works(buffer, rank)


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
    for error, rows in run_ranks(mismatch, 2, platform, timeout_s=200):
        assert error[0] == MismatchError.__name__
        assert "ranks disagree about expert_alignment: rank 0 has 1, rank 1 has 2" in error[1]
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
    # a rank that looks late sees the next call of the other one instead
    texts = ("rank 0 refused the call, an argument was invalid", "rank 0 aborted this call")
    assert any(text in peers[1] for text in texts), peers[1]
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
        late = rank == 1 and "rank 0 aborted the call" in error[1]  # it has seen rank 0 in a later call already
        assert late or f"rank {1 - rank} was silent too long" in error[1]
        assert rows > 0


def check_late_stores_do_not_reach_what_a_later_combine_sends(platform: str) -> None:
    """A late peer's rows of a failed dispatch land where a combine puts its copies, but before them."""
    inputs = [inputs_of(CASE, rank) for rank in range(2)]
    want = reference.dispatch(inputs, CASE.num_experts)
    ys = [expert_output(there.x, rank, CASE) for rank, there in enumerate(want)]  # type: ignore[arg-type]
    combined = reference.combine(inputs, want, ys)
    for rank, (error, out) in enumerate(run_ranks(late_stores, 2, platform, timeout_s=200)):
        assert error == CommTimeoutError.__name__
        expect_equal(out, combined[rank], f"rank {rank}: combine")


def check_slot_of_failed_dispatch_holds_no_combine_input_until_all_have_left_it(platform: str) -> None:
    """A slot that a failed dispatch granted is lent for a combine only after a call that everybody joined."""
    (error, while_haunted, later), _ = run_ranks(late_grant, 2, platform, timeout_s=200)
    assert error == CommTimeoutError.__name__
    assert while_haunted
    assert not later


def check_combine_behind_a_failed_dispatch_is_refused(platform: str) -> None:
    """A handle of a dispatch that failed is not used: the peers are told, and everybody goes on."""
    (mine, rows), (peers, _) = run_ranks(combine_of_failed, 2, platform, timeout_s=200)
    assert mine[0] == InvalidState.__name__
    assert "the dispatch that made this handle has failed" in mine[1]
    assert peers[0] == MismatchError.__name__
    assert "rank 0 refused the call, the dispatch whose handle it uses had failed there" in peers[1]
    assert rows > 0


def check_results_are_copied_out_when_no_slot_is_free(platform: str) -> None:
    """Results are copied out when no slot is free."""
    for copies, copies_later, is_same in run_ranks(hoard, 2, platform, timeout_s=200):
        assert copies == 2
        assert copies_later == 2  # the dead tensors gave their slots back
        assert is_same


def check_a_call_that_fails_leaves_no_sums_to_go_by(platform: str) -> None:
    """What is read on the GPU behind a failed dispatch says that nothing came."""
    for error, ends in run_ranks(overflow_unseen, 2, platform, timeout_s=200):
        assert error[0] == InvalidArgument.__name__
        for name, values in ends.items():
            assert not values.any(), (name, values)


def check_no_rank_passes_a_barrier_before_all_have_come(platform: str) -> None:
    """Nobody comes through any of many barriers early."""
    assert run_ranks(barriers, 2, platform, 30, timeout_s=200) == [0, 0]


def check_silent_peer_at_a_barrier_is_named_with_what_was_seen(platform: str) -> None:
    """Who waits says for whom, and which call it has seen; who comes late has missed nobody, which both hear of."""
    (error, differs, rows), (late, differs_there, rows_there) = run_ranks(silent_at_barrier, 2, platform, timeout_s=200)
    assert error[0] == CommTimeoutError.__name__
    for words in ("barrier (rank=0, peer=1, seq=2)", "rank 1 was silent too long", "expected call 2, got 1"):
        assert words in error[1], error[1]
    assert late == ("", "")
    assert differs[0] == differs_there[0] == MismatchError.__name__
    assert "an earlier call has failed on one of rank 0 and rank 1" in differs[1]
    assert rows > 0
    assert rows_there > 0


def check_barrier_against_another_call_is_a_mismatch_on_both(platform: str) -> None:
    """A barrier and another call end each other at once, and name both."""
    for other in ("dispatch", "combine"):
        for error, rows in run_ranks(barrier_or, 2, platform, other, timeout_s=200):
            assert error[0] == MismatchError.__name__, error
            assert f"ranks disagree about op: rank 0 has barrier, rank 1 has {other}" in error[1]
            assert rows > 0


def check_refused_call_ends_a_barrier_at_once(platform: str) -> None:
    """A rank whose call was refused is named to those in a barrier."""
    (error, rows), (mine, _) = run_ranks(barrier_or, 2, platform, "refusal", timeout_s=200)
    assert mine == ("", "")
    assert error[0] == MismatchError.__name__
    assert "rank 1 refused the call, an argument was invalid" in error[1]
    assert rows > 0


CHECKS = {
    check.__name__.removeprefix("check_").replace("_", " "): check
    for check in (
        check_bad_expert_id_is_named_and_refuses_the_call_everywhere,
        check_different_calls_are_a_mismatch_on_every_rank,
        check_refused_call_ends_at_once_for_the_peers,
        check_refused_combine_ends_at_once_for_the_peers,
        check_too_many_rows_are_an_error_on_every_rank_and_write_nothing,
        check_silent_peer_is_named_and_both_ranks_work_afterwards,
        check_late_stores_do_not_reach_what_a_later_combine_sends,
        check_slot_of_failed_dispatch_holds_no_combine_input_until_all_have_left_it,
        check_combine_behind_a_failed_dispatch_is_refused,
        check_results_are_copied_out_when_no_slot_is_free,
        check_a_call_that_fails_leaves_no_sums_to_go_by,
        check_no_rank_passes_a_barrier_before_all_have_come,
        check_silent_peer_at_a_barrier_is_named_with_what_was_seen,
        check_barrier_against_another_call_is_a_mismatch_on_both,
        check_refused_call_ends_a_barrier_at_once,
    )
}
