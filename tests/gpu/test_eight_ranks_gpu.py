"""Eight ranks on real GPUs, two or four to a GPU where there are fewer: the parts of `make smoke`, with the same bits.

Processes that share a GPU take turns there, some milliseconds each, so times say nothing.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.backend.test_staging import CALLS, _call
from tests.collectives import cases
from tests.csrc.latency_cases import Plan, random_rounds, run_plan
from tests.csrc.throughput_cases import Case, check_case
from tests.csrc.throughput_stress import stress
from tests.harness import run_ranks

pytestmark = [pytest.mark.gpu(2), pytest.mark.timeout(300)]
NUM_RANKS = 8
UNEVEN = (700, 40, 0, 17, 256, 1, 512, 33)  # rank 0 has too many tokens for the one kernel that others use
CASES = {
    "rank": Case(UNEVEN, hidden=2048, num_topk=8, num_local_experts=4, num_bias=1, num_sms=8),
    "rank, fp8": Case(UNEVEN, hidden=7168, num_topk=8, num_local_experts=32, payload="fp8", num_sms=8),
    "expert, fp8": Case(
        UNEVEN, layout="expert", expert_alignment=16, hidden=2048, num_topk=4, payload="fp8", num_sms=8
    ),
    "a model's row": Case((128,) * NUM_RANKS, hidden=7168, num_topk=8, num_local_experts=32, num_sms=8),
}
PLANS = {
    "rounds": Plan(
        random_rounds(8, 10, NUM_RANKS, 32, 512), num_local_experts=4, hidden=512, max_tokens=32, num_topk=6
    ),
    "a model's row": Plan(
        random_rounds(9, 2, NUM_RANKS, 16, 7168), num_local_experts=8, hidden=7168, max_tokens=16, num_topk=8
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_dispatch_and_combine(name: str) -> None:
    check_case(CASES[name], "cuda", timeout_s=280)


def test_random_rounds() -> None:
    run_ranks(stress, NUM_RANKS, "cuda", 60, 21, 0, timeout_s=280)


@pytest.mark.parametrize("name", PLANS)
def test_latency_calls(name: str) -> None:
    run_ranks(run_plan, NUM_RANKS, PLANS[name], "cuda", timeout_s=280)


def collectives(rank: int, num_ranks: int, has_reductions: bool = True) -> None:
    """Every call has the bits of CPU tensors, and none goes through CPU memory; all reductions need many kernels."""
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    group: Any = dist.group.WORLD
    for name in CALLS:
        _, wanted = _call(name, rank, num_ranks, torch.clone, False)
        _, got = _call(name, rank, num_ranks, lambda x: x.to(device), False)
        for one, other in zip(got, wanted, strict=True):
            assert torch.equal(one.cpu(), other), name
    if has_reductions:
        cases.reductions(rank, num_ranks, lambda x: x.to(device), cases.SOME)
    cases.uneven(rank, num_ranks, lambda x: x.to(device), 300)
    assert group._on_device is not None
    assert not group._on_device._off, group._on_device._off
    group._on_device.check()
    dist.barrier()


def test_collectives() -> None:
    run_ranks(collectives, NUM_RANKS, backend="epee", timeout_s=280)
