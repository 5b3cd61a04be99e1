"""`LatencyBuffer`: hooks, open calls, bad arguments, ranks that disagree, errors without a mask, corrupt memory."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import epee
from epee.ep.latency.wire import SectionHeader
from epee.ep.members.rows import RowsPlan
from epee.errors import AbortedError, ForkError, InvalidState, MismatchError, ProtocolError, StaleHandleError
from epee.reference import latency as oracle
from tests.ep import moments
from tests.ep.latency_cases import (
    BF16,
    Shape,
    bits,
    check_dispatched,
    check_round,
    combine,
    dispatch,
    expert_outputs,
    inputs,
    make,
)
from tests.harness import DEAD, run_ranks
from tests.survive import stages

SHAPE = Shape()
NUM_TOKENS = (6, 3, 0, 5)


def _two_in_flight(rank: int, num_ranks: int, num_slots: int) -> None:
    with make(SHAPE, num_slots=num_slots) as buffer:
        for seed in range(6):
            pending_calls = []
            for nth in range(num_slots):
                given = inputs(SHAPE, NUM_TOKENS[:num_ranks], 10 * seed + nth)
                packed = oracle.dispatch(given, SHAPE.num_experts, SHAPE.max_tokens)
                pending_calls.append((given, packed, dispatch(buffer, given[rank], return_hook=True)))
            with pytest.raises(InvalidState, match=f"{num_slots} calls have been sent and not received"):
                dispatch(buffer, given[rank])
            order = pending_calls if seed % 2 else list(reversed(pending_calls))
            for _, packed, got in order:
                assert got.hook is not None
                got.hook()
                check_dispatched(got, packed[rank])
                with pytest.raises(InvalidState, match="called already"):
                    got.hook()
            backs = []
            for nth, (_, packed, got) in enumerate(order):
                y = expert_outputs(packed, nth)[rank]
                backs.append(combine(buffer, y, got, return_hook=True))
            for nth, ((given, packed, got), back) in enumerate(reversed(list(zip(order, backs, strict=True)))):
                assert back.hook is not None
                back.hook()
                want = oracle.combine(given, packed, expert_outputs(packed, num_slots - 1 - nth))[rank]
                assert torch.equal(bits(back.x), bits(want))
                check_dispatched(got, packed[rank])


@pytest.mark.parametrize("num_slots", [2, 3])
def test_calls_in_flight_do_not_mix_whatever_the_order_of_their_hooks(num_slots: int) -> None:
    run_ranks(_two_in_flight, 4, num_slots)


def _overlapped(rank: int, num_ranks: int) -> None:
    with make(SHAPE) as buffer:
        given = [inputs(SHAPE, NUM_TOKENS[:num_ranks], seed) for seed in range(12)]
        packed = [oracle.dispatch(each, SHAPE.num_experts, SHAPE.max_tokens) for each in given]
        waiting = dispatch(buffer, given[0][rank], return_hook=True)
        for seed in range(11):  # the combine of one batch runs while the dispatch of the next is in flight
            assert waiting.hook is not None
            waiting.hook()
            coming = dispatch(buffer, given[seed + 1][rank], return_hook=True)
            check_dispatched(waiting, packed[seed][rank])
            outputs = expert_outputs(packed[seed], seed)
            back = combine(buffer, outputs[rank], waiting)
            assert torch.equal(bits(back.x), bits(oracle.combine(given[seed], packed[seed], outputs)[rank]))
            waiting = coming
        assert waiting.hook is not None
        waiting.hook()


def test_two_batches_overlap() -> None:
    run_ranks(_overlapped, 4)


def _states(rank: int, num_ranks: int) -> None:
    buffer = make(SHAPE)
    given = inputs(SHAPE, NUM_TOKENS[:num_ranks], 1)[rank]
    got = dispatch(buffer, given, return_hook=True)
    y = buffer.combine_input(got.handle)
    error = InvalidState if rank == 0 else epee.MismatchError
    call: Callable[[], Any] = (lambda: combine(buffer, y, got)) if rank == 0 else (lambda: dispatch(buffer, given))
    with pytest.raises(error, match="call its hook first"):
        call()
    with pytest.raises(InvalidState, match="not received"):
        buffer.sync()
    assert got.hook is not None
    got.hook()
    y.zero_()
    for _ in range(3):  # a handle serves as often as it is wanted
        assert not combine(buffer, y, got).x.any()
    assert buffer.nbytes > 0
    buffer.check()
    buffer.join()
    with make(SHAPE) as other, pytest.raises(StaleHandleError, match="another buffer"):
        combine(other, y, got)
    pending = dispatch(buffer, given, return_hook=True)
    buffer.close()
    assert pending.hook is not None
    with pytest.raises(InvalidState, match="closed"):
        pending.hook()
    with pytest.raises(InvalidState, match="closed"):
        dispatch(buffer, given)
    assert torch.equal(bits(got.x), bits(got.x))  # results outlive the buffer


def test_states() -> None:
    run_ranks(_states, 2)


WRONG_DISPATCH: list[tuple[str, Callable[[dict[str, Any]], dict[str, Any]]]] = [
    ("x must be bfloat16", lambda call: {"x": call["x"].float()}),
    ("x must be bfloat16", lambda call: {"x": call["x"][:, :8]}),
    ("x must have at most max_tokens_per_rank=6", lambda call: {"x": call["x"][:1].expand(7, -1)}),
    ("topk_idx must be int64", lambda call: {"topk_idx": call["topk_idx"].int()}),
    ("topk_idx must be int64", lambda call: {"topk_idx": call["topk_idx"][:, :1]}),
    ("topk_idx must hold expert ids", lambda call: {"topk_idx": call["topk_idx"] + 8}),
    ("topk_weights must be float32", lambda call: {"topk_weights": call["topk_weights"].double()}),
    ("round_scale needs use_fp8", lambda call: {"round_scale": True}),
    ("use_ue8m0 needs", lambda call: {"use_fp8": True, "use_ue8m0": True}),
    ("use_fp8 must be True or False", lambda call: {"use_fp8": 1}),
    ("active_ranks must have an entry for each", lambda call: {"active_ranks": torch.ones(1, dtype=torch.int32)}),
    ("active_ranks must be int32", lambda call: {"active_ranks": torch.ones(4)}),
    ("timeout_us must be an int of 1 ...", lambda call: {"timeout_us": -1}),
    ("timeout and timeout_us say the same", lambda call: {"timeout_us": 5, "timeout": 5.0}),
    ("return_hook must be", lambda call: {"return_hook": 3}),
    ("exclude each other", lambda call: {"return_hook": True, "async_op": True}),
]
WRONG_COMBINE: list[tuple[str, Callable[[dict[str, Any]], dict[str, Any]]]] = [
    ("y must be bfloat16", lambda call: {"y": call["y"][:, :1]}),
    ("y must be contiguous", lambda call: {"y": call["y"].transpose(0, 1).contiguous().transpose(0, 1)}),
    ("handle must be the .handle", lambda call: {"handle": None}),
    ("topk_weights must be float32", lambda call: {"topk_weights": torch.ones(5, 9)}),
    ("partial_dtype must be", lambda call: {"partial_dtype": torch.float16}),
    ("out must be bfloat16", lambda call: {"out": torch.empty(1, 1, dtype=BF16)}),
    ("out must be contiguous", lambda call: {"out": torch.empty(SHAPE.hidden, 6, dtype=BF16).t()}),
    ("out must not share memory with y", lambda call: {"out": call["y"].view(-1, SHAPE.hidden)[:6]}),
]


def _refusals(rank: int, num_ranks: int) -> list[tuple[str, str]]:
    seen = []
    with make(SHAPE) as buffer:
        given = inputs(SHAPE, (6, 6), 3)[rank]
        mask = torch.ones(2, dtype=torch.int32)
        call = {"x": given.x, "topk_idx": given.topk_idx, "topk_weights": given.topk_weights}
        error = epee.InvalidArgument if rank == 0 else epee.MismatchError
        for number, (word, wrong) in enumerate(WRONG_DISPATCH):
            changes: Any = wrong(call) if rank == 0 else {"active_ranks": mask if number % 2 else None}
            with pytest.raises(error) as caught:
                buffer.dispatch(**{**call, **changes})
            seen.append((word, str(caught.value)))
        got = dispatch(buffer, given)
        back: dict[str, Any] = {"y": got.x, "handle": got.handle}
        out = torch.full((6, SHAPE.hidden), 5.0, dtype=BF16)
        for word, wrong in WRONG_COMBINE:
            changes = wrong(back) if rank == 0 else {"out": out}
            with pytest.raises(error) as caught:
                buffer.combine(**{**back, **changes})
            seen.append((word, str(caught.value)))
        assert (out == 5).all()
        assert mask.all()
        check_round(buffer, SHAPE, (6, 6), 4)
    return seen


def test_bad_arguments_are_named_on_all_ranks_and_the_buffer_goes_on() -> None:
    here, peer = run_ranks(_refusals, 2)
    for (word, mine), (_, told) in zip(here, peer, strict=True):
        assert word in mine
        assert "rank 0 refused its call" in told
        assert word in told


def _disagreements(rank: int, num_ranks: int) -> list[str]:
    texts = []
    with make(SHAPE) as buffer:
        given = inputs(SHAPE, (6, 6), 3)[rank]
        first, second = dispatch(buffer, given), dispatch(buffer, given)
        y = buffer.combine_input(first.handle).zero_()
        pairs: list[tuple[Callable[[], Any], Callable[[], Any]]] = [
            (lambda: dispatch(buffer, given), lambda: dispatch(buffer, given, use_fp8=True)),
            (
                lambda: dispatch(buffer, given, use_fp8=True, round_scale=True),
                lambda: dispatch(buffer, given, use_fp8=True),
            ),
            (lambda: dispatch(buffer, given), lambda: combine(buffer, y, first)),
            (lambda: combine(buffer, y, first), lambda: combine(buffer, y, second)),
            (
                lambda: combine(buffer, y, first),
                lambda: combine(buffer, y, first, topk_weights=given.topk_weights),
            ),
            (lambda: combine(buffer, y, first), lambda: combine(buffer, y, first, partial_dtype=torch.float32)),
        ]
        for pair in pairs:
            for call in (pair[rank], pair[1 - rank]):
                with pytest.raises(epee.MismatchError) as caught:
                    call()
                texts.append(str(caught.value))
        check_round(buffer, SHAPE, (6, 6), 4, late_weights=True)
    return texts


def test_ranks_that_disagree_hear_about_what() -> None:
    words = ("type of the rows", "type of the rows", "the call", "handle in use", "topk_weights", "type of the rows")
    for texts in run_ranks(_disagreements, 2):
        for number, text in enumerate(texts):
            assert words[number // 2] in text or "refused its call" in text
        assert sum("disagree" in text for text in texts) >= len(texts) // 2


def _modes(rank: int, num_ranks: int) -> None:
    for changes, word in (
        ({"num_slots": 1}, "num_slots"),
        ({"max_tokens_per_rank": 1 << 15}, "tokens per rank"),
    ):
        with pytest.raises(epee.InvalidArgument, match=word):
            make(SHAPE, **changes)
    sizes = {"num_experts": 8, "hidden": 512, "num_topk": 2, "max_tokens_per_rank": 6}
    other_kind = "disagree about kind of buffer: rank 0 has Buffer, rank 1 has LatencyBuffer"
    with pytest.raises(epee.MismatchError, match=other_kind):
        (epee.LatencyBuffer if rank else epee.Buffer)(**sizes)
    with epee.Buffer(**sizes) as buffer:
        given = inputs(SHAPE, (6, 6), 3)[rank]
        with pytest.raises(epee.MismatchError, match="all ranks must call sync with a mask"):
            buffer.sync(torch.ones(2, dtype=torch.int32) if rank == 0 else None)
        assert buffer.sync().tolist() == [1, 1]
        got = buffer.dispatch(given.x, given.topk_idx)
        with make(SHAPE) as other, pytest.raises(epee.InvalidArgument, match="handle must be"):
            other.combine(got.x, got.handle)  # type: ignore[arg-type]


def test_modes_do_not_mix() -> None:
    run_ranks(_modes, 2)


def _silent(rank: int, num_ranks: int) -> str:
    text = ""
    with make(SHAPE) as buffer:
        check_round(buffer, SHAPE, NUM_TOKENS[:num_ranks], 1)
        given = inputs(SHAPE, NUM_TOKENS[:num_ranks], 2)
        if rank == 1:
            dist.barrier()
            with pytest.raises(epee.CommTimeoutError, match="aborted the call"):
                dispatch(buffer, given[rank])  # too late for the others, whose halves lie there
        else:
            with pytest.raises(epee.CommTimeoutError) as caught:
                dispatch(buffer, given[rank], timeout_us=2_000_000)
            text = str(caught.value)
            assert caught.value.ranks == (1,)
            dist.barrier()
        for seed in range(3, 8):
            check_round(buffer, SHAPE, NUM_TOKENS[:num_ranks], seed, use_hook=seed % 2 == 0)
    return text


def test_without_a_mask_a_silent_rank_is_an_error_and_the_buffer_goes_on() -> None:
    results = run_ranks(_silent, 4)
    for rank in (0, 2, 3):
        for words in ("dispatch", f"rank={rank}", "peer=1", "seq=3", "waited ", "rank 1 did not send its part"):
            assert words in results[rank]


def _dead(rank: int, num_ranks: int, folder: str) -> list[int]:
    buffer = make(SHAPE)
    check_round(buffer, SHAPE, NUM_TOKENS[:num_ranks], 1)
    dist.barrier()
    stages.meet(folder, "through", rank, range(num_ranks))  # nobody is in gloo's barrier any more
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    given = inputs(SHAPE, NUM_TOKENS[:num_ranks], 2)[rank]
    pending = dispatch(buffer, given, return_hook=True)
    assert pending.hook is not None
    for call in (pending.hook, lambda: dispatch(buffer, given)):
        with pytest.raises(epee.RankFailedError, match="rank 1 is dead") as caught:
            call()
        assert (caught.value.ranks, caught.value.op) == ((1,), "dispatch")
    mask = torch.ones(num_ranks, dtype=torch.int32)
    dispatch(buffer, given, active_ranks=mask)
    stages.meet(folder, "over", rank, (0, 2, 3))
    return mask.tolist()


def test_without_a_mask_a_dead_rank_is_an_error(tmp_path: Path) -> None:
    mask = [1, 0, 1, 1]
    assert run_ranks(_dead, 4, str(tmp_path), dead={1}) == [mask, DEAD, mask, mask]


def _corrupt(rank: int, num_ranks: int) -> None:
    with make(SHAPE) as buffer:
        wire = buffer._path.wire  # type: ignore[union-attr]
        given = inputs(SHAPE, (6, 6), 3, "everywhere")[rank]
        post, write_meta = wire.post, wire.write_meta

        def bad_head(dst: int, seq: int, head: SectionHeader, reason: bytes = b"") -> None:
            post(dst, seq, head._replace(num_rows=1 << 20) if dst != rank else head, reason)

        def bad_meta(dst: int, seq: int, tokens: Any, *what: Any) -> None:
            write_meta(dst, seq, tokens + (7 if dst != rank else 0), *what)

        for name, lie in (("post", bad_head), ("write_meta", bad_meta)):
            setattr(wire, name, lie)
            with pytest.raises(ProtocolError, match="memory is corrupt"):
                dispatch(buffer, given)
            wire.post, wire.write_meta = post, write_meta  # type: ignore[method-assign]
        check_round(buffer, SHAPE, (6, 6), 4)


def test_what_a_peer_says_is_checked() -> None:
    run_ranks(_corrupt, 2)


def _interrupted(rank: int, num_ranks: int) -> None:
    """Ctrl-C in rank 0 while it writes: the others hear of it, and everybody goes on in step."""
    with make(SHAPE) as buffer:
        wire = buffer._path.wire  # type: ignore[union-attr]
        given = inputs(SHAPE, (6, 6), 3, "everywhere")[rank]
        got = dispatch(buffer, given)
        y = buffer.combine_input(got.handle).zero_()
        for call in (lambda: dispatch(buffer, given), lambda: combine(buffer, y, got)):
            write_rows = wire.write_rows

            def press(*args: Any) -> None:
                raise KeyboardInterrupt

            if rank == 0:
                wire.write_rows = press  # type: ignore[method-assign]
            with pytest.raises(KeyboardInterrupt if rank == 0 else epee.MismatchError):
                call()
            wire.write_rows = write_rows  # type: ignore[method-assign]
            check_round(buffer, SHAPE, (6, 6), 4)
        assert buffer.all_gather_bytes(bytes([rank])) == [b"\0", b"\1"]
        error = epee.InvalidArgument("of a caller of this buffer")
        if rank == 0:
            buffer.refuse(error)
        else:
            with pytest.raises(epee.MismatchError, match="of a caller"):
                dispatch(buffer, given)
        check_round(buffer, SHAPE, (6, 6), 5)


def test_an_interrupted_call_is_told_to_the_peers() -> None:
    run_ranks(_interrupted, 2)


def _fails_midway(rank: int, num_ranks: int) -> None:
    """Rank 1 fails when it has written the rows of the first of its peers, and lets that one look for them.

    It tells its peers one after the other, slowly: who hears of it last sees before that the others have left the call.
    """
    num_tokens = NUM_TOKENS[:num_ranks]
    with make(SHAPE) as buffer:
        wire: Any = buffer._path.wire  # type: ignore[union-attr]
        post = wire.post

        def tell(dst: int, seq: int, head: Any, *reason: bytes) -> None:
            post(dst, seq, head, *reason)
            if head.refused:
                time.sleep(0.05)

        wire.post = tell
        given = inputs(SHAPE, num_tokens, 3, "everywhere")[rank]
        got = dispatch(buffer, given)
        y = buffer.combine_input(got.handle).zero_()
        calls: list[Callable[[], Any]] = [
            lambda: dispatch(buffer, given),
            lambda: combine(buffer, y, got),
            lambda: combine(buffer, y, got, topk_weights=given.topk_weights),
        ]
        for call in calls:
            write_rows, written = wire.write_rows, [0]

            def fail(
                *args: Any, write_rows: Callable[..., None] = write_rows, written: list[int] = written, **more: Any
            ) -> None:
                written[0] += 1
                if written[0] == 2:
                    time.sleep(0.3)
                    raise MemoryError("no memory for rows")
                write_rows(*args, **more)

            if rank == 1:
                wire.write_rows = fail
            with pytest.raises(MemoryError if rank == 1 else epee.MismatchError):
                call()
            wire.write_rows = write_rows
            check_round(buffer, SHAPE, num_tokens, 4, late_weights=True)


def test_a_send_half_that_fails_midway_fails_on_all() -> None:
    run_ranks(_fails_midway, 4)


def _strided(rank: int, num_ranks: int) -> None:
    with make(SHAPE) as buffer:
        given = inputs(SHAPE, (6, 6), 3)
        columns = given[rank].x.t().contiguous().t()
        twice = torch.stack([given[rank].x, given[rank].x], 1)[:, 0]
        idx = given[rank].topk_idx.t().contiguous().t()
        for use_fp8 in (False, True):
            packed = oracle.dispatch(given, SHAPE.num_experts, SHAPE.max_tokens, use_fp8=use_fp8)
            for x in (columns, twice):
                got = dispatch(buffer, oracle.Sent(x, idx, given[rank].topk_weights), use_fp8=use_fp8)
                check_dispatched(got, packed[rank])


def test_rows_may_have_any_strides() -> None:
    run_ranks(_strided, 2)


def _closing(rank: int, num_ranks: int) -> None:
    buffer = make(SHAPE)
    given = inputs(SHAPE, (6, 6), 3)[rank]
    if rank == 0:
        wire = buffer._path.wire  # type: ignore[union-attr]
        wait, timer = wire._wait, threading.Timer(0.05, buffer.close)

        def waiting(*args: Any) -> Any:
            wire._wait = wait  # type: ignore[method-assign]
            timer.start()  # not before: the call has begun, and rank 1 does not come
            return wait(*args)

        wire._wait = waiting  # type: ignore[method-assign]
        with pytest.raises(AbortedError, match="closed"):
            dispatch(buffer, given)
        timer.join()
    dist.barrier()
    again = make(SHAPE)
    check_round(again, SHAPE, (6, 6), 4)
    pid = os.fork()
    if pid == 0:
        try:
            dispatch(again, given)
        except ForkError:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        again = make(SHAPE)  # the old one is dropped, not closed
        check_round(again, SHAPE, (6, 6), 5)
        gc.collect()
        dist.barrier()
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 1


def test_closing_forking_and_dropping() -> None:
    run_ranks(_closing, 2)


def _slow(rank: int, num_ranks: int) -> None:
    """Rank 1 comes after rank 0 has given it up: it gets what rank 0 had sent, and hears then that it is out."""
    with make(SHAPE) as buffer:
        mask = torch.ones(num_ranks, dtype=torch.int32)
        given = inputs(SHAPE, (6, 6), 3)[rank]
        if rank == 1:
            dist.barrier()
        got = dispatch(buffer, given, active_ranks=mask, timeout_us=100_000)
        if rank == 0:
            dist.barrier()
        assert mask.tolist() == ([1, 0] if rank == 0 else [1, 1])
        assert got.got.tolist() == ([True, False] if rank == 0 else [True, True])
        dist.barrier()
        got = dispatch(buffer, given, active_ranks=mask, timeout_us=300_000_000)
        assert mask.tolist() == [int(src == rank) for src in range(2)]
        assert got.got.tolist() == [src == rank for src in range(2)]
        dist.barrier()  # a rank whose process ends would be left out for that


def _not_had(rank: int, num_ranks: int) -> None:
    """Rank 0 has not got rank 1's tokens, rank 1 has got rank 0's; both count on each other again in the combine."""
    with make(SHAPE) as buffer:
        mask = torch.ones(num_ranks, dtype=torch.int32)
        given = inputs(SHAPE, (6, 6), 3)
        if rank == 1:
            dist.barrier()
        got = dispatch(buffer, given[rank], active_ranks=mask, timeout_us=100_000)
        if rank == 0:
            dist.barrier()
        packed = oracle.dispatch(given, SHAPE.num_experts, SHAPE.max_tokens, got=[[True, False], [True, True]])
        check_dispatched(got, packed[rank])
        mask.fill_(1)
        dist.barrier()
        outputs = expert_outputs(packed, 3)
        back = combine(buffer, outputs[rank], got, active_ranks=mask, timeout_us=300_000_000)
        assert mask.all()
        assert back.got.tolist() == oracle.counted(packed, rank) == [[True, True], [False, True]][rank]
        assert torch.equal(bits(back.x), bits(oracle.combine(given, packed, outputs)[rank]))
        dist.barrier()


def test_a_rank_without_the_tokens_has_no_part_in_their_sums() -> None:
    run_ranks(_not_had, 2)


def test_who_is_cut_off_does_not_wait() -> None:
    run_ranks(_slow, 2)


def _patient(rank: int, num_ranks: int) -> None:
    """Rank 2 stays away. Rank 1 waits four seconds for it; the others do not, and wait less for rank 1."""
    with make(SHAPE) as buffer:
        given = inputs(SHAPE, NUM_TOKENS, 3)[rank]
        mask = torch.tensor([1, 1, int(rank in (1, 2)), 1], dtype=torch.int32)
        if rank != 2:
            got = dispatch(buffer, given, active_ranks=mask, timeout_us=4_000_000)
            assert got.got.tolist() == [True, True, False, True]
            y = buffer.combine_input(got.handle).zero_()
            back = combine(buffer, y, got, active_ranks=mask, timeout_us=4_000_000 if rank == 1 else 1_500_000)
            assert back.got.tolist() == [True, True, False, True]
            assert mask.tolist() == [1, 1, 0, 1]
        dist.barrier()


def test_a_rank_that_waits_for_another_is_not_silent() -> None:
    run_ranks(_patient, 4)


def interrupted(rank: int, num_ranks: int, folder: str) -> None:
    """Rank 1 is interrupted in a gather when the others have its result: nobody goes on as if it had it, too."""

    def too_late() -> None:
        for other in (0, 2):
            stages.wait_for(folder, f"has-{other}")
        raise KeyboardInterrupt

    with make(Shape(num_experts=6)) as buffer:
        if rank == 1:
            moments.when_it_has_all_rows(buffer, too_late)
            with pytest.raises(KeyboardInterrupt):
                buffer.all_gather_bytes(b"1")
        else:
            assert buffer.all_gather_bytes(bytes([rank])) == [b"\0", b"1", b"\2"]
            stages.reach(folder, f"has-{rank}")
        for _ in range(2):
            with pytest.raises(InvalidState if rank == 1 else MismatchError, match="others have completed it"):
                buffer.all_gather_bytes(b"1")
        assert buffer.sync().tolist() == [1] * num_ranks
        assert buffer.all_gather_bytes(bytes([rank])) == [b"\0", b"\1", b"\2"]


def test_a_gather_that_has_no_result_on_one_rank_alone_is_no_other_one_of_the_others(tmp_path: Path) -> None:
    run_ranks(interrupted, 3, str(tmp_path))


def closed_meanwhile(rank: int, num_ranks: int, folder: str) -> None:
    """Another thread of rank 0 closes the buffer while a gather of it waits for rank 1: that ends at once."""
    buffer = make(Shape(num_experts=6), timeout=300)  # a wait of that length fails the test by its own time-out
    if rank == 0:
        closers = [threading.Thread(target=buffer.close)]
        moments.after_publishing(buffer._exchange, RowsPlan, closers[0].start)
        with pytest.raises(AbortedError):
            buffer.all_gather_bytes(b"0")
        closers[0].join()
        stages.reach(folder, "closed")
    stages.wait_for(folder, "closed")
    buffer.close()


def test_closing_in_another_thread_ends_a_gather(tmp_path: Path) -> None:
    run_ranks(closed_meanwhile, 2, str(tmp_path))
