"""What goes wrong in dispatch and combine over hosts ends alike on all ranks, in time; what comes is whole."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import epee
from tests.ep.buffer_cases import until_all_succeed
from tests.harness import Worker, collect, take_until, tell

from . import Hosts, run_on_hosts, run_on_loopbacks, started_on_hosts

TIMEOUT_S = 12.0
MAX_ERRORS = 4
PLACEMENT = (0, 0, 1, 1)
BOUND_S = 60.0
HIDDEN, EXPERTS, TOPK = 256, 8, 2


def make(num_tokens: int, timeout: float = TIMEOUT_S) -> epee.Buffer:
    return epee.Buffer(
        num_experts=EXPERTS,
        hidden=HIDDEN,
        num_topk=TOPK,
        max_tokens_per_rank=num_tokens,
        dtype=torch.float32,
        max_recv_rows=4 * TOPK * num_tokens,
        timeout=timeout,
    )


def tokens(num_tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-9, 9, (num_tokens, HIDDEN), generator=generator).float()
    return x, torch.rand(num_tokens, EXPERTS, generator=generator).topk(TOPK, 1).indices


def step(buffer: epee.Buffer, num_tokens: int, number: int, layout: str = "rank", timeout: float | None = None) -> None:
    """Dispatch and combine, and see that what comes is whole: the tokens of all ranks, and exact sums of our own."""
    num_ranks, rank = buffer.num_ranks, buffer.rank
    x, idx = tokens(num_tokens, 1000 * number + rank)
    got = buffer.dispatch(x, idx, layout=layout, timeout=timeout)
    rows = []
    for source in range(num_ranks):
        theirs, chosen = tokens(num_tokens, 1000 * number + source)
        rows.append(theirs[(chosen // (EXPERTS // num_ranks) == rank).any(1)])
    if layout == "rank":
        assert torch.equal(got.x, torch.cat(rows))
    combined = buffer.combine(got.x, got.handle, timeout=timeout)
    owners = idx // (EXPERTS // num_ranks)
    times = TOPK if layout == "expert" else 1 + (owners[:, 0] != owners[:, 1]).float()[:, None]
    assert torch.equal(combined.x, x * times)


def until_it_fails(rank: int, num_ranks: int, num_tokens: int) -> tuple[str, str, int]:
    """Make steps until a call fails; return what failed, what came next, and a bit for each who is left."""
    buffer, number = make(num_tokens), 0
    until = time.monotonic() + BOUND_S
    while time.monotonic() < until:
        try:
            step(buffer, num_tokens, number, "rank" if number % 2 else "expert")
        except epee.EpeeError as error:
            again = _tried(lambda: buffer.barrier(timeout=TIMEOUT_S))
            x = torch.tensor([-1])
            count = partial(_count, rank, x)
            return type(error).__name__, again, int(x.item()) if _tried(count) == "well" else 0
        number += 1
        if number == 10:
            tell("going")
    raise AssertionError("no call has failed")


def _count(rank: int, x: torch.Tensor) -> None:
    dist.all_reduce(x.fill_(1 << rank))


def _tried(call: Callable[[], object]) -> str:
    """Call again until no loss comes out of it."""
    return next((end for _ in range(MAX_ERRORS) if (end := _ends(call)) != "RankFailedError"), "RankFailedError")


def after_a_fault(fault: Callable[[Hosts, list[Worker]], None], num_tokens: int, dead: tuple[int, ...]) -> list[Any]:
    """Let four ranks on two hosts go, do `fault`, and return what each has to say."""
    env = {"EPEE_HOST_TIMEOUT_S": "3"}
    with (
        Hosts(2) as hosts,
        started_on_hosts(hosts, until_it_fails, PLACEMENT, num_tokens, timeout_s=BOUND_S, env=env) as ranks,
    ):
        assert take_until(ranks, lambda: all("going" in worker.told for worker in ranks), BOUND_S)
        fault(hosts, ranks)
        return collect(ranks, dead, BOUND_S)


def check(told: list[Any], lost: set[int]) -> None:
    """See that the step of those who are left has failed once, alike, and that they can go on."""
    left = sorted(set(range(4)) - lost)
    everybody = sum(1 << rank for rank in left)
    assert [told[rank] for rank in left] == [("RankFailedError", "well", everybody)] * len(left), told


@pytest.mark.hosts
@pytest.mark.parametrize("victim", range(4))
@pytest.mark.parametrize("num_tokens", [3, 900])
def test_a_killed_rank_fails_one_step_on_all(victim: int, num_tokens: int) -> None:
    check(after_a_fault(lambda _, ranks: ranks[victim].process.kill(), num_tokens, (victim,)), {victim})


@pytest.mark.hosts
def test_a_killed_host_fails_one_step_on_the_other() -> None:
    check(after_a_fault(lambda hosts, _: hosts.kill(1), 900, (2, 3)), {2, 3})


@pytest.mark.hosts
def test_a_host_that_is_cut_off_goes() -> None:
    told = after_a_fault(lambda hosts, _: hosts.cut(1), 900, ())
    check(told, {2, 3})
    assert [again for _, again, _ in told[2:]] == ["NoQuorumError"] * 2, told


def late(rank: int, num_ranks: int) -> list[str]:
    """Rank 3 comes to a dispatch, and later to a combine, when the others have given it up."""
    told = []
    with make(300) as buffer:
        for number in range(3):
            if rank == 3 and number == 1:
                time.sleep(3.0)
            told.append(_ends(lambda number=number: step_within(buffer, number, 1.5)))
            dist.barrier()
        x, idx = tokens(300, rank)
        got = buffer.dispatch(x, idx)
        if rank == 3:
            time.sleep(3.0)
        told.append(_ends(lambda: buffer.combine(got.x, got.handle, timeout=1.5)))
        dist.barrier()
        told.append(_ends(lambda: step(buffer, 300, 9)))
    return told


def step_within(buffer: epee.Buffer, number: int, timeout: float) -> None:
    x, idx = tokens(300, 1000 * number + buffer.rank)
    got = buffer.dispatch(x, idx, timeout=timeout)
    buffer.combine(got.x, got.handle, timeout=timeout)


def _ends(call: Callable[[], object]) -> str:
    try:
        call()
    except epee.EpeeError as error:
        return type(error).__name__
    return "well"


def test_a_late_rank_fails_a_call_on_all_alike_and_the_next_ones_work() -> None:
    told = run_on_loopbacks(late, PLACEMENT, timeout_s=60)
    assert told == [["well", "CommTimeoutError", "well", "CommTimeoutError", "well"]] * 4


def failing_between(rank: int, num_ranks: int) -> list[list[str]]:
    """Rank 1 has no memory between the rows of a call and its data; the others hear of it, and all go on."""
    told = []
    with make(50, timeout=20.0) as buffer:
        x, idx = tokens(50, rank)
        got = buffer.dispatch(x, idx)
        path: Any = buffer._rows
        for owner, name, is_combine in (
            (path, "_new_handle", False),
            (path._arenas, "take", False),
            (path, "_plan_records", False),
            (path, "_scratch", True),
        ):
            if rank == 1:
                setattr(owner, name, _no_memory)
            begun = time.monotonic()
            if is_combine:
                told.append(_fails(lambda: buffer.combine(got.x, got.handle, out=torch.empty(50, HIDDEN))))
            else:
                told.append(_fails(lambda: buffer.dispatch(x, idx)))
            assert time.monotonic() - begun < 15.0
            if rank == 1:
                delattr(owner, name)
            step(buffer, 50, 3)
    return told


def _no_memory(*_: object) -> None:
    raise MemoryError("none left")


def _fails(call: Callable[[], object]) -> list[str]:
    try:
        call()
    except (epee.EpeeError, MemoryError) as error:
        return [type(error).__name__, "none left" if "none left" in str(error) else str(error)]
    return ["well"]


def test_a_failure_between_the_two_calls_of_a_step_is_told_to_all() -> None:
    told = run_on_loopbacks(failing_between, (0, 0, 1, 1), timeout_s=60)
    for rank, kinds in enumerate(told):
        assert kinds == [["MemoryError" if rank == 1 else "MismatchError", "none left"]] * 4, rank


class Stop(Exception):
    pass


def _raise_stop(*_: object) -> None:
    raise Stop


def interrupted(rank: int, num_ranks: int, num_rounds: int) -> int:
    """A signal handler raises in calls of rank 1, now here, now there; all ranks make the step again together."""
    num_stopped = 0
    with make(400, timeout=30.0) as buffer:
        step(buffer, 400, 0)
        signal.signal(signal.SIGALRM, _raise_stop)
        for number in range(num_rounds):
            dist.barrier()
            failed = 0
            try:  # the timer ends once, also between the step and the end of the timer
                try:
                    if rank == 1:
                        signal.setitimer(signal.ITIMER_REAL, 0.001 + 0.03 * number / num_rounds)
                    step(buffer, 400, number, timeout=1.5)
                finally:
                    if rank == 1:
                        signal.setitimer(signal.ITIMER_REAL, 0)
            except (Stop, epee.EpeeError):
                failed = 1
            num_stopped += failed
            until_all_succeed(buffer, partial(buffer.barrier, timeout=10.0))
            step(buffer, 400, number)
    return num_stopped


def test_an_interrupt_anywhere_in_a_step_leaves_a_buffer_that_works() -> None:
    told = run_on_loopbacks(interrupted, PLACEMENT, 12, timeout_s=120)
    assert told[1] > 0


def sixteen(rank: int, num_ranks: int) -> None:
    with epee.Buffer(
        num_experts=32, hidden=64, num_topk=4, max_tokens_per_rank=40, dtype=torch.float32, max_recv_rows=3000
    ) as buffer:
        generator = torch.Generator().manual_seed(rank)
        x = torch.randint(-9, 9, (40 - rank, 64), generator=generator).float()
        idx = torch.rand(40 - rank, 32, generator=generator).topk(4, 1).indices
        for layout in ("rank", "expert"):
            got = buffer.dispatch(x, idx, layout=layout)
            owners = idx // 2
            times = torch.tensor([[len(set(row)) if layout == "rank" else 4] for row in owners.tolist()])
            assert torch.equal(buffer.combine(got.x, got.handle).x, x * times)


@pytest.mark.hosts
@pytest.mark.parametrize("num_hosts", [2, 8])
def test_sixteen_ranks_on_two_and_on_eight_hosts(num_hosts: int) -> None:
    run_on_hosts(sixteen, tuple(rank * num_hosts // 16 for rank in range(16)), timeout_s=100)
