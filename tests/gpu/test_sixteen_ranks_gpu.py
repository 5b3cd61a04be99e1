"""Sixteen ranks on real GPUs, several to a GPU: the same bits as the reference, as `test_eight_ranks_gpu.py`.

Processes that share a GPU take turns there, some milliseconds each, so times say nothing.
"""

from __future__ import annotations

import pytest

from epee.gpu.ranks import MAX_LOCAL
from tests.csrc.latency_cases import Plan, random_rounds, run_plan
from tests.csrc.throughput_cases import Case, check_case
from tests.gpu.test_eight_ranks_gpu import collectives
from tests.harness import run_ranks

pytestmark = [pytest.mark.gpu(2), pytest.mark.timeout(300)]
UNEVEN = (600, 40, 0, 17, 256, 1, 512, 33, 9, 0, 128, 64, 3, 77, 2, 100)
CASES = {
    "rank, fp8": Case(UNEVEN, hidden=7168, num_topk=8, num_local_experts=16, payload="fp8", num_sms=8),
    "expert": Case(UNEVEN, layout="expert", expert_alignment=16, hidden=1024, num_topk=4, num_sms=8),
    "twelve": Case(UNEVEN[:12], hidden=2048, num_topk=6, num_local_experts=4, num_bias=1, num_sms=8),
}


@pytest.mark.parametrize("name", CASES)
def test_dispatch_and_combine(name: str) -> None:
    check_case(CASES[name], "cuda", timeout_s=280)


@pytest.mark.parametrize("num_ranks", [12, MAX_LOCAL])
def test_latency_calls(num_ranks: int) -> None:
    plan = Plan(
        random_rounds(num_ranks, 4, num_ranks, 16, 512), num_local_experts=4, hidden=512, max_tokens=16, num_topk=6
    )
    run_ranks(run_plan, num_ranks, plan, "cuda", timeout_s=280)


def test_collectives() -> None:
    run_ranks(collectives, MAX_LOCAL, False, backend="epee", timeout_s=280)
