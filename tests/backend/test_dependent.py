"""Asynchronous calls that meet in memory: each behaves as if those before it had been made first."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from epee.engine.overlap import meet, spans_of
from epee.errors import CommTimeoutError, MismatchError
from tests.harness import run_mortal, run_ranks
from tests.survive import stages

from . import cases
from .test_interrupts import Interrupt

NUM_ROUNDS = 10
SIZES = [4, 300_000, 600_000]  # one step; two steps; rounds that reuse the staging (of 1 MiB here)
BEYOND_LANE = 5_000_000  # elements of 4 bytes: a message that does not fit its group of 16 MiB


def _init(rank: int, num_ranks: int, folder: str, **options: Any) -> Any:
    cases.init(rank, num_ranks, folder, staging_bytes=1 << 20, **options)
    return dist.group.WORLD._engine


# ---- the patterns of the review


def _reduce_twice(x: torch.Tensor, rank: int, num_ranks: int) -> tuple[list[Any], torch.Tensor]:
    x.fill_(1.0)
    return [dist.all_reduce(x, async_op=True), dist.all_reduce(x, async_op=True)], torch.tensor(num_ranks**2)


def _broadcast_then_reduce(x: torch.Tensor, rank: int, num_ranks: int) -> tuple[list[Any], torch.Tensor]:
    x.fill_(rank + 1.0)
    return [dist.broadcast(x, 0, async_op=True), dist.all_reduce(x, async_op=True)], torch.tensor(num_ranks)


def _reduce_then_block(x: torch.Tensor, rank: int, num_ranks: int) -> tuple[list[Any], torch.Tensor]:
    x.fill_(1.0)
    work = dist.all_reduce(x, async_op=True)
    dist.all_reduce(x)
    return [work], torch.tensor(num_ranks**2)


def _reduce_coalesced(x: torch.Tensor, rank: int, num_ranks: int) -> tuple[list[Any], torch.Tensor]:
    """A coalesced call copies its input when it is planned."""
    x.fill_(1.0)
    first = dist.all_reduce(x, async_op=True)
    half = x.shape[0] // 2
    with dist._coalescing_manager(async_ops=True) as block:  # type: ignore[attr-defined]
        dist.all_reduce(x[:half])
        dist.all_reduce(x[half:])
    return [first, block], torch.tensor(num_ranks**2)


def _three_in_a_row(x: torch.Tensor, rank: int, num_ranks: int) -> tuple[list[Any], torch.Tensor]:
    x.fill_(1.0)
    return [dist.all_reduce(x, async_op=True) for _ in range(3)][::-1], torch.tensor(num_ranks**3)


def _gather_then_reduce(x: torch.Tensor, rank: int, num_ranks: int) -> tuple[list[Any], torch.Tensor]:
    """One output, of which the input is a part."""
    size = x.shape[0] // num_ranks
    mine = x[rank * size : (rank + 1) * size]
    mine.fill_(rank + 1.0)
    works = [cases.all_gather_single(x, mine, async_op=True), dist.all_reduce(x, async_op=True)]
    return works, torch.arange(1, num_ranks + 1).repeat_interleave(size).view(-1, *[1] * (x.dim() - 1)) * num_ranks


def _send_what_was_reduced(x: torch.Tensor, rank: int, num_ranks: int) -> tuple[list[Any], torch.Tensor]:
    """isend after a collective that writes it; irecv before one that reads it."""
    x.fill_(rank + 1.0)
    works = [dist.all_reduce(x, async_op=True)]
    wanted = num_ranks * (num_ranks + 1) / 2
    if rank < 2:
        got = torch.zeros_like(x)
        works.append(dist.isend(x, 1 - rank))
        works.append(dist.irecv(got, 1 - rank))
    else:
        got = x.clone().fill_(wanted)
    works.append(dist.all_reduce(got, async_op=True))
    for work in reversed(works):
        work.wait()
    x.copy_(got)
    return [], torch.tensor(wanted * num_ranks)


def _reduce_what_was_received(x: torch.Tensor, rank: int, num_ranks: int) -> tuple[list[Any], torch.Tensor]:
    """irecv(x), then all_reduce(x); isend(x), then a collective that writes x."""
    x.fill_(rank + 1.0)
    works = []
    if rank == 0:
        works.append(dist.isend(x, 1))
    elif rank == 1:
        works.append(dist.irecv(x, 0))
    works.append(dist.all_reduce(x, async_op=True))
    return works[::-1], torch.tensor(1.0 + 1.0 + sum(range(3, num_ranks + 1)))


def _receive_twice(x: torch.Tensor, rank: int, num_ranks: int) -> tuple[list[Any], torch.Tensor]:
    """Two receives into one tensor; the one of the second message ends last."""
    x.fill_(rank + 1.0)
    if rank == 0:
        return [dist.isend(x, 1, tag=7), dist.isend(2 * x, 1, tag=5)], torch.tensor(1.0)
    if rank == 1:
        return [dist.irecv(x, 0, tag=7), dist.irecv(x, 0, tag=5)][::-1], torch.tensor(2.0)
    return [], torch.tensor(rank + 1.0)


PATTERNS: list[Callable[..., Any]] = [
    _reduce_twice,
    _broadcast_then_reduce,
    _gather_then_reduce,
    _reduce_then_block,
    _reduce_coalesced,
    _three_in_a_row,
    _send_what_was_reduced,
    _reduce_what_was_received,
    _receive_twice,
]


def run_patterns(rank: int, num_ranks: int, folder: str, size: int, is_strided: bool) -> None:
    engine = _init(rank, num_ranks, folder)
    count = size // num_ranks * num_ranks
    for turn in range(NUM_ROUNDS):
        for pattern in PATTERNS:
            x = torch.zeros(count, 2)[:, 0] if is_strided else torch.zeros(count)
            works, wanted = pattern(x, rank, num_ranks)
            for work in works:
                work.wait()
            assert torch.equal(x, wanted.to(torch.float32).expand(count)), (turn, pattern.__name__, x[:2], x[-2:])
    assert not engine.mail.held
    dist.destroy_process_group()


@pytest.mark.parametrize(("size", "is_strided"), [(4, False), (4, True), (300_000, False), (600_000, True)])
def test_calls_on_one_tensor_give_what_they_give_in_order(tmp_path: Path, size: int, is_strided: bool) -> None:
    run_ranks(run_patterns, 2, str(tmp_path), size, is_strided, backend=None)


def test_three_ranks_too(tmp_path: Path) -> None:
    run_ranks(run_patterns, 3, str(tmp_path), 6, False, backend=None)


def slow_send(rank: int, num_ranks: int, folder: str) -> None:
    """A send is read until it is in its channel: what writes the tensor comes after that."""
    engine = _init(rank, num_ranks, folder)
    x = torch.full((BEYOND_LANE,), rank + 1.0)
    if rank == 0:
        sent = dist.isend(x, 1)
        cast = dist.broadcast(x, 1, async_op=True)
        assert not engine.queue[0].published
        stages.reach(folder, "issued")
        cast.wait()
        sent.wait()
        assert (x == 7).all()
    else:
        stages.wait_for(folder, "issued")
        dist.recv(x, 0)
        assert (x == 1).all()
        dist.broadcast(x.fill_(7.0), 1)
    dist.destroy_process_group()


def test_a_tensor_that_is_being_sent_is_written_afterwards(tmp_path: Path) -> None:
    run_ranks(slow_send, 2, str(tmp_path), backend=None)


def unattended(rank: int, num_ranks: int, folder: str) -> None:
    engine = _init(rank, num_ranks, folder)
    x = torch.full((4,), rank + 1.0)
    if rank == 0:
        works = [dist.irecv(x, 1, tag=tag) for tag in (3, 2, 1)]
        assert len(engine.mail.held) == 2
        stages.reach(folder, "posted")
        works += [dist.all_reduce(x, async_op=True), dist.isend(x, 1)]
        deadline = time.monotonic() + 20
        while not works[-1].is_completed() and time.monotonic() < deadline:
            time.sleep(0.001)
        assert x.tolist() == [3.0] * 4
    else:
        stages.wait_for(folder, "posted")
        for tag in (1, 2, 3):
            dist.isend(torch.full((4,), float(tag)), 0, tag=tag)
        got = torch.full((4,), 2.0)
        dist.all_reduce(got)
        dist.recv(x, 0)
        assert x.tolist() == [3.0] * 4
    dist.destroy_process_group()


def test_what_is_held_back_goes_on_although_nobody_waits(tmp_path: Path) -> None:
    run_ranks(unattended, 2, str(tmp_path), backend=None)


# ---- what is independent stays concurrent


def concurrent_collectives(rank: int, num_ranks: int, folder: str) -> None:
    engine = _init(rank, num_ranks, folder)
    whole = torch.full((64,), rank + 1.0)
    x, y, shared = whole[:16], whole[16:32], whole[32:48]
    outs = [torch.zeros(32) for _ in range(2)]
    if rank:
        stages.wait_for(folder, "issued")
    works = [
        dist.all_reduce(x, async_op=True),
        dist.all_reduce(y, async_op=True),  # neighbours in one storage
        *[cases.all_gather_single(out, shared, async_op=True) for out in outs],  # both read the same
        dist.broadcast(whole[48:], 0, async_op=True),
        dist.broadcast(whole[48:], 0, async_op=True) if rank == 0 else dist.broadcast(outs[0][:16], 0, async_op=True),
    ]
    if rank == 0:
        assert [op.published for op in engine.queue] == [True] * 6, "nobody has come yet, and all are published"
        held = dist.all_reduce(x[8:], async_op=True)
        last = dist.all_reduce(torch.ones(1), async_op=True)
        assert [op.published for op in engine.queue] == [True] * 6 + [False] * 2
        stages.reach(folder, "issued")
    else:
        held, last = dist.all_reduce(x[8:], async_op=True), dist.all_reduce(torch.ones(1), async_op=True)
    for work in (last, held, *works):
        work.wait()
    assert x.tolist() == [3.0] * 8 + [6.0] * 8
    assert y.tolist() == [3.0] * 16
    assert outs[1].tolist() == [1.0] * 16 + [2.0] * 16
    dist.destroy_process_group()


def test_collectives_on_other_memory_are_published_at_once(tmp_path: Path) -> None:
    run_ranks(concurrent_collectives, 2, str(tmp_path), backend=None)


def concurrent_messages(rank: int, num_ranks: int, folder: str) -> None:
    engine = _init(rank, num_ranks, folder)
    x, y, z = (torch.full((4,), rank + 1.0) for _ in range(3))
    if rank == 0:
        reduced = dist.all_reduce(x, async_op=True)
        sent = dist.isend(y, 1)
        held = [dist.isend(x, 1, tag=3), dist.isend(y, 1, tag=3)]
        dist.isend(y, 1, tag=4).wait()  # passes them
        assert len(engine.mail.held) == 2, "the second has the group and tag of the first"
        stages.reach(folder, "passed")
        for work in (sent, reduced, *held):
            work.wait()
        got = dist.irecv(z, 1, tag=5)
        dist.all_reduce(y)  # ends while the receive is open
        assert not got.is_completed()
        stages.reach(folder, "reduced")
        got.wait()
        assert z.tolist() == [2.0] * 4
    else:
        dist.recv(y, 0)  # rank 0's all_reduce is open and cannot end
        dist.recv(z, 0, tag=4)
        stages.wait_for(folder, "passed")
        dist.all_reduce(x)
        for wanted in (3.0, 1.0):
            dist.recv(z, 0, tag=3)
            assert z.tolist() == [wanted] * 4
        dist.all_reduce(y)
        stages.wait_for(folder, "reduced")
        dist.send(torch.full((4,), 2.0), 0, tag=5)
    assert not engine.mail.held
    dist.destroy_process_group()


def test_messages_on_other_memory_pass(tmp_path: Path) -> None:
    run_ranks(concurrent_messages, 2, str(tmp_path), backend=None)


def batches(rank: int, num_ranks: int, folder: str) -> None:
    engine = _init(rank, num_ranks, folder)
    other = 1 - rank
    for count in (4, BEYOND_LANE):  # the send of the second cannot end before the receive has begun
        x = torch.full((count,), rank + 1.0)
        swap = [dist.P2POp(dist.isend, x, other), dist.P2POp(dist.irecv, x[: count // 2], other)]
        if rank == 1:
            swap = [dist.P2POp(dist.irecv, x, other), dist.P2POp(dist.isend, x[: count // 2], other)]
        for work in dist.batch_isend_irecv(swap):  # a race, as the program has it; it ends
            work.wait()
    for _ in range(20):  # independent tensors, behind a call that writes what is sent; the list is used again
        x, got = torch.full((6,), rank + 1.0), torch.zeros(6)
        ops = [dist.P2POp(dist.irecv, got, other), dist.P2POp(dist.isend, x, other)]
        works = [dist.all_reduce(x, async_op=True)]
        works += dist.batch_isend_irecv(ops)
        works += dist.batch_isend_irecv(ops)  # another batch: its receive comes after the first one's
        works.append(dist.all_reduce(got, async_op=True))
        for work in reversed(works):
            work.wait()
        assert x.tolist() == [3.0] * 6
        assert got.tolist() == [6.0] * 6
    assert not engine.mail.held
    dist.destroy_process_group()


def test_messages_of_a_batch_do_not_wait_for_each_other(tmp_path: Path) -> None:
    run_ranks(batches, 2, str(tmp_path), backend=None)


# ---- errors


def failed_input(rank: int, num_ranks: int, folder: str) -> None:
    engine = _init(rank, num_ranks, folder)
    x, y, z = (torch.full((4,), rank + 1.0) for _ in range(3))
    if rank == 1:
        stages.wait_for(folder, "issued")  # else the first call could fail before the others are issued
    first = dist.all_reduce(x[: 3 + rank], async_op=True)  # a mismatch
    if rank == 0:
        works = [dist.all_reduce(x, async_op=True), dist.all_reduce(y, async_op=True), dist.isend(x, 1)]
        stages.reach(folder, "issued")
        for work in (first, works[0], works[2]):
            with pytest.raises(MismatchError, match="disagree" if work is first else r"not run: it reads .* disagree"):
                work.wait()
        works[1].wait()
        dist.send(z, 1)
    else:
        with pytest.raises(MismatchError, match="disagree"):
            first.wait()
        with pytest.raises(MismatchError, match="not run: it reads"):
            dist.all_reduce(torch.ones(4))
        dist.all_reduce(y)
        dist.recv(z, 0)  # what could not be sent has left nothing in the group
        assert z.tolist() == [1.0] * 4
    assert x.tolist() == [rank + 1.0] * 4
    assert y.tolist() == [3.0] * 4
    assert not engine.mail.held
    dist.destroy_process_group()


def test_a_call_whose_input_was_not_made_fails_on_every_rank(tmp_path: Path) -> None:
    run_ranks(failed_input, 2, str(tmp_path), backend=None)


def _wait(work: Any) -> None:
    assert work is not None, "a blocking call raises"
    work.wait()


def interleaved(rank: int, num_ranks: int, folder: str) -> int:
    """A receive into one view and a send of another one whose range meets it; both ranks alike, so order would hang."""
    _init(rank, num_ranks, folder, op_timeout=20.0)
    other, num_pairs = 1 - rank, 0
    for got_part, sent_part in INTERLEAVED:
        matrix = torch.arange(48.0).view(6, 8) + 100 * rank
        wanted, theirs = matrix.clone(), torch.arange(48.0).view(6, 8) + 100 * other
        got_part(wanted).copy_(sent_part(theirs))
        received = dist.irecv(got_part(matrix), other)
        sent = dist.isend(sent_part(matrix), other)
        for work in (sent, received):
            work.wait()
        assert torch.equal(matrix, wanted), num_pairs
        num_pairs += 1
    column = dist.irecv(matrix[:, 0], other)
    dist.all_reduce(matrix[:, 1])  # blocks: rank 1 sends afterwards only
    dist.isend(matrix[:, 1], other).wait()
    column.wait()
    assert torch.equal(matrix[:, 0], matrix[:, 1])
    dist.destroy_process_group()
    return num_pairs


INTERLEAVED: list[tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]] = [
    (lambda m: m[:, 0], lambda m: m[:, 1]),
    (lambda m: m[:, :3], lambda m: m[:, 5:]),  # rows of some elements
    (lambda m: m[1:, 3], lambda m: m[:-1, 4]),  # ranges that begin in other rows
    (lambda m: m[::2, 1:3], lambda m: m[1::2, 1:3]),
    (lambda m: m.view(-1)[::2], lambda m: m.view(-1)[1::2]),
    (lambda m: m.view(3, 2, 8)[:, 0], lambda m: m.view(3, 2, 8)[:, 1]),
    (lambda m: m.t()[2:4], lambda m: m.t()[6:]),  # columns of the transposed one
    (lambda m: m.view(-1)[::6], lambda m: m.view(-1)[1:32:4]),  # other steps
    (lambda m: m[:2, 4], lambda m: m[0, 5:7]),  # a strided view and a contiguous one within its range
]


def test_views_without_a_common_element_do_not_hold_each_other_back(tmp_path: Path) -> None:
    assert run_ranks(interleaved, 2, str(tmp_path), backend=None) == [len(INTERLEAVED)] * 2


def named(rank: int, num_ranks: int, folder: str) -> list[str]:
    """Both ranks wait for a message that the other one holds back."""
    _init(rank, num_ranks, folder, op_timeout=1.0)
    x = torch.full((4, 2), rank + 1.0)
    got, sent = dist.irecv(x[:, 0], 1 - rank), dist.isend(x, 1 - rank)
    told = []
    for work, timeout in ((sent, cases.timedelta(seconds=0.1)), (got, None), (sent, None)):
        with pytest.raises(CommTimeoutError) as caught:
            work.wait(*([timeout] if timeout else []))
        told.append(str(caught.value))
    if rank == 0:
        behind = [dist.irecv(x, 1, tag=5), dist.irecv(x[1:2], 1, tag=6)]
        stages.reach(folder, "posted")
        behind[0].wait()
        with pytest.raises(CommTimeoutError) as caught:
            behind[1].wait()
        told.append(str(caught.value))
    else:
        stages.wait_for(folder, "posted")  # a message that had come before would hold nothing back
        dist.send(x, 0, tag=5)
    stages.meet(folder, "over", rank, range(num_ranks))
    dist.destroy_process_group()
    return told


def test_the_error_of_a_call_says_what_overlap_held_back(tmp_path: Path) -> None:
    for rank, told in enumerate(run_ranks(named, 2, str(tmp_path), backend=None)):
        assert f"held_back_by=recv from rank {1 - rank}" in told[0]
        assert f"holds_back=send to rank {1 - rank}" in told[1]
        assert "not run: it reads what an earlier call was to write" in told[2]
        assert len(told) < 4 or "was_held_back_by=recv from rank 1" in told[3]


def crossed(rank: int, num_ranks: int, folder: str, is_blocking: bool) -> None:
    """Each rank's first call waits for the other's second one: on NCCL for ever."""
    engine = _init(rank, num_ranks, folder, op_timeout=0.5)
    x = torch.full((4,), rank + 1.0)
    if rank == 0:
        got = dist.irecv(x, 1)
        with pytest.raises((CommTimeoutError, MismatchError)):
            _wait(dist.all_reduce(x, async_op=not is_blocking))
        with pytest.raises(CommTimeoutError, match="recv"):
            got.wait()
    else:
        with pytest.raises((CommTimeoutError, MismatchError)):
            dist.all_reduce(x)
    assert x.tolist() == [rank + 1.0] * 4
    stages.meet(folder, "over", rank, range(num_ranks))
    dist.group.WORLD.set_timeout(cases.timedelta(seconds=20))  # type: ignore[union-attr]
    dist.all_reduce(x)
    assert x.tolist() == [3.0] * 4
    assert not engine.mail.held
    dist.destroy_process_group()


@pytest.mark.parametrize("is_blocking", [True, False])
def test_calls_that_wait_for_each_other_across_ranks_time_out(tmp_path: Path, is_blocking: bool) -> None:
    run_ranks(crossed, 2, str(tmp_path), is_blocking, backend=None)


def interrupted(rank: int, num_ranks: int, folder: str) -> int:
    """Before any line of a wait for a message that is held back: the message goes once, and in order."""
    engine = _init(rank, num_ranks, folder, timeout_s=20)
    at = 1
    num_missed = 0  # in turn; one wait may be short because the other rank or the background thread was fast
    more = True
    while more:
        x, y = torch.full((4,), rank + 1.0), torch.full((4,), float(at))
        works: list[Any] = []
        if rank == 1:
            works.append(dist.isend(y, 0))
        works.append(dist.all_reduce(x, async_op=True))
        if rank == 0:
            works += [dist.isend(x, 1), dist.irecv(x, 1)]
            num_missed = 0 if Interrupt(at).run(works[-1].wait) else num_missed + 1
            more = num_missed < 8
        else:
            works.append(dist.irecv(y, 0))
        for work in works:
            work.wait()
        if rank == 0:
            assert x.tolist() == [float(at)] * 4, f"interrupted before line {at}"
        else:
            assert y.tolist() == [3.0] * 4, f"interrupted before line {at}"
        assert not engine.mail.held
        flag = torch.tensor([int(more)])
        dist.broadcast(flag, 0)
        more = bool(flag)
        at += 1
    dist.destroy_process_group()
    return at


def test_an_interrupted_wait_neither_loses_nor_doubles_what_was_held_back(tmp_path: Path) -> None:
    assert run_ranks(interrupted, 2, str(tmp_path), backend=None)[0] > 50


# ---- a change of the view


def one_dies(rank: int, num_ranks: int, folder: str, is_strided: bool) -> Any:
    warnings.simplefilter("ignore", FutureWarning)
    _init(rank, num_ranks, folder, fault_mode="mask", op_timeout=20.0)
    x = (torch.zeros(4, 2)[:, 0] if is_strided else torch.zeros(4)).fill_(rank + 1.0)
    out = torch.zeros(4 * num_ranks)
    dist.barrier()
    if rank == 2:
        stages.meet(folder, "alive", rank, range(num_ranks))
        stages.wait_for(folder, "issued")
        os.kill(os.getpid(), signal.SIGKILL)
    works = []
    stages.meet(folder, "alive", rank, range(num_ranks))
    works.append(dist.broadcast(x, 0, async_op=True))  # without rank 2
    works.append(dist.all_reduce(x, async_op=True))
    if rank == 0:
        works.append(dist.isend(x, 1))
    else:
        works.append(dist.irecv(x, 0))
    works.append(cases.all_gather_single(out, x, async_op=True))
    works.append(dist.all_reduce(out, async_op=True))
    stages.reach(folder, "issued")
    for work in reversed(works):
        work.wait()
    return x.tolist(), out.tolist()


@pytest.mark.parametrize("is_strided", [False, True])
def test_calls_made_again_for_those_who_remain_read_the_right_values(is_strided: bool) -> None:
    for told in run_mortal(one_dies, 3, is_strided, dead={2}, timeout_s=50)[:2]:
        x, out = told
        assert x == [2.0] * 4
        assert out == [4.0] * 8 + [0.0] * 4


# ---- random programs

NUM_UNITS = 16
VIEWS = [slice(0, 8), slice(4, 12), slice(7, 15), slice(0, 16, 2), slice(1, 16, 2)]  # of units; 8 of them each
KINDS = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "message", "swap")

step = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(KINDS),
        "view": st.integers(0, len(VIEWS) - 1),
        "other": st.integers(0, len(VIEWS) - 1),
        "root": st.integers(0, 1),
        "tag": st.integers(0, 1),
        "async_op": st.booleans() | st.just(True),
    }
)
program = st.fixed_dictionaries({"unit": st.sampled_from([1, 3_000]), "steps": st.lists(step, min_size=2, max_size=10)})


def _view(buffer: torch.Tensor, which: int) -> torch.Tensor:
    return buffer[VIEWS[which]]


def issue(buffer: torch.Tensor, spec: dict[str, Any], rank: int) -> list[Any]:
    """Make one step's calls on this rank."""
    kind, root, tag = spec["kind"], spec["root"], spec["tag"]
    x, y, options = _view(buffer, spec["view"]), _view(buffer, spec["other"]), {"async_op": spec["async_op"]}
    if kind == "all_reduce":
        return [dist.all_reduce(x, **options)]
    if kind == "broadcast":
        return [dist.broadcast(x, root, **options)]
    if kind == "all_gather":
        return [cases.all_gather_single(y, x[:4], **options)]
    if kind == "reduce_scatter":
        return [cases.reduce_scatter_single(y[:4], x, **options)]
    if kind == "swap":  # halves of one view: they do not meet
        ours, theirs = (x[:4], x[4:]) if rank == 0 else (x[4:], x[:4])
        return dist.batch_isend_irecv(
            [dist.P2POp(dist.irecv, theirs, 1 - rank, tag=tag), dist.P2POp(dist.isend, ours, 1 - rank, tag=tag)]
        )
    work = dist.isend(x, 1 - rank, tag=tag) if rank == root else dist.irecv(y, 1 - rank, tag=tag)
    if not spec["async_op"] and work is not None:
        work.wait()
    return [work]


def model(buffers: list[torch.Tensor], spec: dict[str, Any]) -> None:
    """Make the same step on the buffers of both ranks at once."""
    kind, root = spec["kind"], spec["root"]
    xs = [_view(buffer, spec["view"]) for buffer in buffers]
    ys = [_view(buffer, spec["other"]) for buffer in buffers]
    values = [x.clone() for x in xs]
    for rank in range(2):
        if kind == "all_reduce":
            xs[rank].copy_(values[0] + values[1])
        elif kind == "broadcast":
            xs[rank].copy_(values[root])
        elif kind == "all_gather":
            ys[rank].copy_(torch.cat([value[:4] for value in values]))
        elif kind == "reduce_scatter":
            ys[rank][:4].copy_((values[0] + values[1])[4 * rank : 4 * rank + 4])
        elif kind == "swap":
            xs[rank].copy_(torch.cat([values[0][:4], values[1][4:]]))
        elif rank != root:
            ys[rank].copy_(values[root])


def play(rank: int, num_ranks: int, folder: str) -> int:
    cases.init(rank, num_ranks, folder, staging_bytes=64 << 10)
    programs = json.loads(Path(f"{folder}/programs").read_text())
    for number, case in enumerate(programs):
        shape = (NUM_UNITS, case["unit"])
        start = torch.arange(NUM_UNITS * case["unit"], dtype=torch.int64).view(shape)
        buffers = [start * 3 + 1, start * 5 + 2]
        buffer = buffers[rank].clone()
        works = []
        for spec in case["steps"]:
            works += issue(buffer, spec, rank)
            model(buffers, spec)
        for work in reversed(works):
            if work is not None:
                work.wait()
        assert torch.equal(buffer, buffers[rank]), (number, case)
    dist.destroy_process_group()
    return len(programs)


def test_random_programs_on_one_buffer_give_what_they_give_in_order(tmp_path: Path) -> None:
    programs: list[Any] = []

    @settings(max_examples=150, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(program)
    def draw(case: Any) -> None:
        programs.append(case)

    draw()
    (tmp_path / "programs").write_text(json.dumps(programs))
    assert run_ranks(play, 2, str(tmp_path), backend=None, timeout_s=55) == [len(programs)] * 2


# ---- ranges


pieces = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 5)), max_size=6)


@settings(max_examples=300, database=None, derandomize=True)
@given(pieces, pieces)
def test_two_lists_of_ranges_meet_when_they_share_a_byte(first: Any, second: Any) -> None:
    memory = torch.zeros(40, dtype=torch.uint8)
    lists = [[memory[start : start + length] for start, length in some] for some in (first, second)]
    spans = [spans_of(some) for some in lists]
    covered = [{start + i for start, length in some for i in range(length)} for some in (first, second)]
    assert meet(*spans) == meet(*reversed(spans)) == bool(covered[0] & covered[1])
    assert all(a[1] < b[0] for some in spans for a, b in itertools.pairwise(some))


views = st.lists(
    st.tuples(st.integers(0, 12), st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9)), max_size=3)), max_size=3
)


@settings(max_examples=300, database=None, derandomize=True)
@given(views, views)
def test_strided_views_meet_when_they_share_an_element(first: Any, second: Any) -> None:
    memory = torch.zeros(120, dtype=torch.int16)
    places = torch.arange(120)

    def view_of(tensor: torch.Tensor, spec: Any) -> torch.Tensor:
        start, steps = spec
        return tensor.as_strided([extent for extent, _ in steps], [step for _, step in steps], start)

    lists = [[view_of(memory, spec) for spec in some] for some in (first, second)]
    spans = [spans_of(some) for some in lists]
    used = [{int(i) for spec in some for i in view_of(places, spec).reshape(-1)} for some in (first, second)]
    assert meet(*spans) == meet(*reversed(spans)) == bool(used[0] & used[1])


def test_views_that_are_too_many_to_compare_meet() -> None:
    matrix = torch.zeros(3, 600)
    evens, odds = ([matrix[:, i] for i in range(first, 600, 2)] for first in (0, 1))
    assert not meet(spans_of(evens[:50]), spans_of(odds[:50]))
    assert meet(spans_of(evens), spans_of(odds))


def test_the_memory_of_a_call_is_measured_without_its_holes() -> None:
    matrix = torch.zeros(4, 6)
    start = matrix.data_ptr()
    assert spans_of(matrix.t()) == spans_of(matrix) == ((start, start + 96, None),)
    assert spans_of([[], matrix[:0], [matrix[1:2], matrix[2:3]]]) == ((start + 24, start + 72, None),)
    assert not meet(spans_of(matrix[:, 2]), spans_of([matrix[:, 1], matrix[0, 3:], matrix[3, 3:]]))
