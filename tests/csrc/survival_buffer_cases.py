"""`epee.Buffer` on GPUs when ranks die, are late or come back, run on any platform.

Every function runs on one rank, with `epee.Buffer` on the emulated GPU or a real one.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import epee
from epee import errors, reference
from epee.ep.throughput.order import CombineOrder
from tests.csrc.throughput_cases import Case, biases_of, expect_equal, expert_output, inputs_of, seen_by
from tests.harness.meeting import meet

CASE = Case((9, 16, 5, 12), num_local_experts=4, num_topk=3, hidden=256, num_bias=1)
FP8 = replace(CASE, payload="fp8", num_bias=0)
LONG_S = 60.0


def make(num_ranks: int, **changes: Any) -> epee.Buffer:
    """A poisoned buffer for these cases."""
    os.environ["EPEE_POISON"] = "1"
    options: dict[str, Any] = {
        "num_experts": CASE.num_local_experts * num_ranks, "hidden": CASE.hidden, "num_topk": CASE.num_topk,
        "max_tokens_per_rank": 16, "timeout": LONG_S, "max_recv_rows": 16 * num_ranks * CASE.num_topk,
    }  # fmt: skip
    return epee.Buffer(dist.group.WORLD, **{**options, **changes})


def case_for(num_ranks: int, base: Case, layout: str, seed: int) -> Case:
    """A case of as many ranks."""
    alignment = 4 if layout == "expert" else 1
    return replace(base, num_tokens=base.num_tokens[:num_ranks], layout=layout, expert_alignment=alignment, seed=seed)


def send(buffer: epee.Buffer, case: Case, **options: Any) -> Any:
    """Dispatch this rank's tokens."""
    given, device = inputs_of(case, buffer.rank), buffer.config.device
    assert given.topk_idx is not None
    x = tuple(part.to(device) for part in given.x) if isinstance(given.x, tuple) else given.x.to(device)
    weights = None if given.topk_weights is None else given.topk_weights.to(device)
    return buffer.dispatch(
        x, given.topk_idx.to(device), weights, layout=case.layout, expert_alignment=case.expert_alignment, **options
    )


def check_round(buffer: epee.Buffer, case: Case, members: Collection[int]) -> Any:
    """A dispatch and combines among `members`, bit for bit; returns the handle."""
    rank, num_ranks = buffer.rank, buffer.num_ranks
    seen, inputs = seen_by(case, members)
    want = reference.dispatch(inputs, case.num_experts, layout=case.layout, expert_alignment=case.expert_alignment)
    mask = [int(src in members) for src in range(num_ranks)]
    d = send(buffer, case)
    assert d.got.tolist() == mask
    assert d.epoch == buffer.epoch == d.handle.epoch
    rows = d.x[0] if isinstance(d.x, tuple) else d.x
    expect_equal(rows.cpu(), _values(want[rank].x), "x")
    for name in ("topk_idx", "topk_weights"):
        if (expected := getattr(want[rank], name)) is not None:
            expect_equal(getattr(d, name).cpu(), expected, name)
    ys = [expert_output(_values(there.x), src, case) for src, there in enumerate(want)]
    biases = [biases_of(seen, src) for src in range(num_ranks)]
    device = buffer.config.device
    bias = tuple(one.to(device) for one in biases[rank]) or None
    for order in (None, CombineOrder(bias_first=True)) if bias else (None,):
        y = expert_output(rows, rank, case).to(device)
        c = buffer.combine(y, d.handle.in_order(order), bias=bias)
        if order is None:
            expect_equal(c.x.cpu(), reference.combine(inputs, want, ys, bias=biases)[rank], "combine")
        assert c.got.tolist() == mask
        given = inputs_of(case, rank)
        assert given.topk_idx is not None
        assert given.topk_weights is not None
        owner = given.topk_idx.div(case.num_local_experts, rounding_mode="floor")
        is_lost = torch.tensor([*(0.0 if src in members else 1.0 for src in range(num_ranks)), 0.0])[owner]
        lost = torch.where(is_lost > 0, given.topk_weights, 0.0).sum(1)
        torch.testing.assert_close(c.lost_weight.cpu(), lost, rtol=1e-6, atol=1e-6)  # a GPU sums in another order
    _wait(buffer)
    buffer.check()
    return d.handle


def _values(x: Any) -> torch.Tensor:
    return x[0] if isinstance(x, tuple) else x


def _wait(buffer: epee.Buffer) -> None:
    if buffer.config.device.type == "cuda":
        torch.cuda.synchronize()


def until_lost(work: Callable[[], Any]) -> errors.RankFailedError:
    """Repeat `work` until a rank is dead."""
    deadline = time.monotonic() + LONG_S / 2
    while time.monotonic() < deadline:
        try:
            work()
        except errors.RankFailedError as error:
            return error
    raise AssertionError("nobody died")


def lost(rank: int, num_ranks: int, layout: str, is_known: bool) -> None:
    """The last rank is killed; the others get its name, agree, and go on, whether or not layouts have met before."""
    buffer = make(num_ranks, timeout=300.0)  # who waits so long fails the test by its own time-out
    last, survivors = num_ranks - 1, range(num_ranks - 1)
    first = check_round(buffer, case_for(num_ranks, CASE, layout if is_known else "rank", 1), range(num_ranks))
    case = case_for(num_ranks, CASE, layout, 2)
    meet("the first round is over", rank, num_ranks)
    if rank == last:
        os.kill(os.getpid(), signal.SIGKILL)
    error = until_lost(lambda: send(buffer, case))
    assert error.ranks == (last,), error
    assert "buffer.sync()" in str(error)
    y = torch.zeros(first.num_recv, CASE.hidden, dtype=torch.bfloat16, device=buffer.config.device)
    until_lost(lambda: buffer.combine(y, first))
    before = buffer.epoch
    assert buffer.sync().tolist() == [1] * last + [0]
    assert buffer.epoch > before
    with pytest.raises(errors.StaleHandleError, match=f"epoch {before}"):
        send_again(buffer, case_for(num_ranks, CASE, layout, 1), first)
    for seed in range(4):
        for base in (CASE, FP8):
            for either in (layout, "rank", "expert"):
                check_round(buffer, case_for(num_ranks, base, either, 10 + seed), survivors)
    assert buffer.all_gather_bytes(bytes([rank])) == [*(bytes([src]) for src in survivors), b""]
    assert buffer.sync().tolist() == [1] * last + [0]
    check_round(buffer, case_for(num_ranks, CASE, layout, 30), survivors)
    meet("all survivors are through", rank, len(survivors))  # who ends first is dead to those who still look
    buffer.close()


def unnoticed(rank: int, num_ranks: int) -> None:
    """The last rank is killed, and the thread that watches notices nothing: a call that others have left looks too."""
    buffer = make(num_ranks)
    last = num_ranks - 1
    check_round(buffer, case_for(num_ranks, CASE, "rank", 1), range(num_ranks))
    path: Any = buffer._path
    path._notifier._round = lambda: time.sleep(0.005)
    meet("the round is over", rank, num_ranks)
    if rank == last:
        os.kill(os.getpid(), signal.SIGKILL)
    deadline = time.monotonic() + LONG_S / 2
    while not (dead := path.machine._await_news()):
        assert time.monotonic() < deadline, "nobody has looked for the dead rank"
    assert dead == [last]
    meet("both know", rank, last)
    buffer.close()


def send_again(buffer: epee.Buffer, case: Case, handle: Any) -> Any:
    """The same way once more."""
    x = inputs_of(case, buffer.rank).x
    assert isinstance(x, torch.Tensor)
    return buffer.dispatch(x.to(buffer.config.device), handle=handle)


def late(rank: int, num_ranks: int, layout: str) -> str:
    """The last rank does not come in time: it is left out, and comes back with the next `sync` of all."""
    buffer = make(num_ranks)
    last, members = num_ranks - 1, range(num_ranks - 1)
    case = case_for(num_ranks, CASE, layout, 1)
    check_round(buffer, case, range(num_ranks))
    dist.barrier()
    said = ""
    if rank == last:
        dist.barrier()
        try:
            send(buffer, case, timeout=0.5)
            _wait(buffer)
            buffer.check()
        except errors.EpeeError as error:
            said = type(error).__name__
        try:
            buffer.sync(timeout=0.2)
        except errors.NoQuorumError:
            said += " NoQuorumError"
        dist.barrier()
    else:
        with pytest.raises(errors.CommTimeoutError) as caught:
            send(buffer, case, timeout=1.0)  # the other one may be late, too, on a busy machine
        assert caught.value.ranks == (last,)
        mask = torch.ones(num_ranks, dtype=torch.int32, device=buffer.config.device)
        mask[last] = 0
        agreed = buffer.sync(mask)
        assert agreed.tolist() == mask.tolist() == [1] * last + [0]
        dist.barrier()
        for seed in range(6):  # while the late one makes calls in vain
            check_round(buffer, case_for(num_ranks, CASE, layout, seed), members)
        dist.barrier()
    for _ in range(1000):  # nobody waits for one who is no member: it may come to a sync that the others have ended
        if buffer.sync().tolist() == [1] * num_ranks:
            break
        time.sleep(0.01)
    else:
        raise AssertionError("it did not come back")
    for seed in range(4):
        for either in ("rank", "expert"):
            check_round(buffer, case_for(num_ranks, CASE, either, seed), range(num_ranks))
    meet("all are through", rank, num_ranks)  # who ends first is dead to those who still look
    buffer.close()
    return said
