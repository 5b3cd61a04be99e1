"""Memory that DeepEP's and Mooncake's constructors make: a death before the first call, sizes that change, growth."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import epee.compat.deep_ep as deep_ep
from epee.compat.mooncake import ep, pg
from epee.errors import InvalidArgument
from epee.reference import latency as oracle
from tests.compat.test_deep_ep_low_latency import check_rows
from tests.compat.test_mooncake_ep import LONG_US, SHAPE, a_round, start_pair, take_back
from tests.ep.latency_cases import Shape, bits, expert_outputs, inputs
from tests.harness import DEAD, run_mortal, run_ranks
from tests.survive import stages

BIG = Shape(num_experts=8, hidden=1024, num_topk=6, max_tokens=48)
ALIVE = [True, False, True, True]


def hint(shape: Shape, num_ranks: int) -> int:
    """Return the bytes that a script asks for."""
    return deep_ep.Buffer.get_low_latency_rdma_size_hint(shape.max_tokens, shape.hidden, num_ranks, shape.num_experts)


def make(num_bytes: int, **options: Any) -> Any:
    """Make DeepEP's buffer from bytes."""
    os.environ["EPEE_POISON"] = "1"
    return deep_ep.Buffer(
        dist.group.WORLD, num_rdma_bytes=num_bytes, low_latency_mode=True, explicitly_destroy=True, **options
    )


def call(buffer: Any, shape: Shape, seed: int, got: list[bool], num_tokens: int | None = None) -> None:
    """One dispatch and combine through DeepEP's names, compared with the oracle."""
    count = shape.max_tokens if num_tokens is None else num_tokens
    given = inputs(shape, [count] * len(got), seed)
    mask = [got] * len(got)
    packed = oracle.dispatch(given, shape.num_experts, shape.max_tokens, use_fp8=False, got=mask)
    mine = given[buffer.rank]
    recv_x, counts, handle, _, _ = buffer.low_latency_dispatch(
        mine.x, mine.topk_idx, shape.max_tokens, shape.num_experts, use_fp8=False
    )
    check_rows(recv_x, counts, packed[buffer.rank])
    outputs = expert_outputs(packed, seed)
    combined, _, _ = buffer.low_latency_combine(outputs[buffer.rank], mine.topk_idx, mine.topk_weights, handle)
    wanted = oracle.combine(given, packed, outputs, got=mask)[buffer.rank]
    assert torch.equal(bits(combined), bits(wanted))


def _dies_first(rank: int, num_ranks: int) -> Any:
    """Rank 1 is killed when the buffer is made: calls of sizes that are new go on without it, growth is refused."""
    buffer = make(hint(BIG, num_ranks), enable_shrink=True)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for seed, shape in enumerate((BIG, SHAPE, replace(BIG, max_tokens=5))):
        call(buffer, shape, seed, ALIVE)
    status = torch.empty(num_ranks, dtype=torch.int32)
    buffer.low_latency_query_mask_buffer(status)
    large = Shape(num_experts=8, hidden=2048, num_topk=6, max_tokens=300)
    with pytest.raises(InvalidArgument, match=r"need \d+ bytes of memory.*cannot be made when a rank is lost"):
        call(buffer, large, 9, ALIVE)
    call(buffer, SHAPE, 5, ALIVE)
    return status.tolist()


def test_a_rank_that_dies_before_the_first_call_is_masked() -> None:
    masked = [0, 1, 0, 0]
    assert run_ranks(_dies_first, 4, dead={1}, timeout_s=60) == [masked, DEAD, masked, masked]


def _sizes_change(rank: int, num_ranks: int) -> None:
    buffer = make(hint(BIG, num_ranks))
    everybody, before = [True] * num_ranks, buffer.runtime.nbytes
    if num_ranks > 1:  # the only rank of a group lends nothing
        assert before > hint(BIG, num_ranks) // 2
    for seed in range(60):
        shape = Shape(8, 8 * (1 + seed % 7), 1 + seed % 6, 1 + seed % 48)
        call(buffer, shape, seed, everybody, num_tokens=seed % (shape.max_tokens + 1))
    assert buffer.runtime.nbytes == before
    call(buffer, Shape(8, 4096, 6, 400), 3, everybody, num_tokens=9)  # does not fit: more is made, once
    grown = buffer.runtime.nbytes
    assert grown > before or num_ranks == 1
    assert len(buffer.runtime._latency.wholes) == 1
    for seed in range(5):
        call(buffer, Shape(8, 4096, 2, 1 + seed), seed, everybody)
        call(buffer, BIG, seed, everybody)
    assert buffer.runtime.nbytes == grown
    buffer.destroy()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_sizes_change_in_the_memory_that_was_given(num_ranks: int) -> None:
    run_ranks(_sizes_change, num_ranks, timeout_s=60)


def _mooncake_dies_first(rank: int, num_ranks: int) -> list[int]:
    buffer = ep.Buffer(dist.group.WORLD, ep.Buffer.get_ep_buffer_size_hint(4, 512, num_ranks, 8))
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    active = torch.ones(num_ranks, dtype=torch.int32)
    for seed in range(3):
        a_round(buffer, active, seed, ALIVE, timeout_us=LONG_US)
    return active.tolist()


@pytest.mark.parametrize("backend", ["gloo", "mooncake-cpu"])
def test_mooncakes_fail_rank_before_the_first_call(backend: str) -> None:
    assert pg.get_active_ranks  # importing it registers the backend
    active = [1, 0, 1, 1]
    results = run_ranks(_mooncake_dies_first, 4, dead={1}, backend=backend, timeout_s=90)
    assert results == [active, DEAD, active, active]


TINY, MANY = replace(SHAPE, max_tokens=16), replace(SHAPE, max_tokens=1000)
# for what the constructor is given memory, what calls there were before a rank is lost, and the first one behind it
RETURNS = {
    "memory of the constructor": (SHAPE, [SHAPE], SHAPE),
    "a death before all calls": (SHAPE, [], SHAPE),
    "memory of a first call": (None, [TINY, SHAPE], SHAPE),
    "memory that has grown": (SHAPE, [MANY, SHAPE], SHAPE),
    "memory that grows behind it": (SHAPE, [SHAPE], MANY),
    "memory of a first call, that grows": (None, [SHAPE], MANY),
}


def _replaced(slot: int, num_processes: int, folder: str, made_for: Any, before: list[Shape], after: Shape) -> Any:
    """Processes 0 and 1 are the ranks; process 2 takes rank 1's place, and waits for nobody in its constructor."""
    group = start_pair(slot, folder)
    num_bytes = 0 if made_for is None else hint(made_for, 2)
    buffer = ep.Buffer(group, num_bytes)
    active = torch.ones(2, dtype=torch.int32)
    if slot < 2:
        for seed, shape in enumerate(before):
            a_round(buffer, active, seed, [True, True], timeout_us=LONG_US, shape=shape)
    if slot == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if slot == 0:
        for shape in before[-1:]:
            a_round(buffer, active, 7, [True, False], timeout_us=LONG_US, shape=shape)
        take_back(group, buffer, folder)
        active.fill_(1)
    stages.reach(folder, f"made-{slot}")
    stages.wait_for(folder, f"made-{2 - slot}")  # the newcomer's constructor has returned before anybody's call
    for seed in range(4):
        a_round(buffer, active, seed, [True, True], timeout_us=LONG_US, shape=after if seed % 2 == 0 else SHAPE)
    assert len(buffer._pool._latency.wholes) == 1
    return active.tolist()


@pytest.mark.parametrize("case", RETURNS)
def test_a_replacement_finds_the_memory_of_the_others(case: str) -> None:
    assert run_mortal(_replaced, 3, *RETURNS[case], dead={1}, timeout_s=60) == [[1, 1], DEAD, [1, 1]]


def test_hints_grow_with_every_size() -> None:
    base = hint(BIG, 4)
    for more in (Shape(8, 1024, 6, 96), Shape(8, 2048, 6, 48)):
        assert hint(more, 4) > base
    assert hint(BIG, 8) > base
