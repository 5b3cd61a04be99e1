"""The latency kernels' own sources on the CPU: the same bits as the reference, from real rank processes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.csrc.emulated import has_compiler
from tests.csrc.latency_cases import Plan, Round, random_rounds, run_plan
from tests.harness import run_ranks

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.timeout(240),  # the first case for a number of ranks builds the kernels
    pytest.mark.skipif(not has_compiler(), reason="no g++ here to build the kernels with"),
]
STALL_ONE_IN = 24
FP8 = {"use_fp8": True}

PLANS = {
    "one rank": Plan(random_rounds(1, 6, 1, 9, 128), num_local_experts=6, hidden=128, max_tokens=9, num_topk=2),
    "two ranks": Plan(
        (
            Round((16, 11), **FP8),
            Round((3, 9), **FP8, round_scale=True),
            Round((1, 0), **FP8, round_scale=True, use_ue8m0=True),
            Round((5, 16), is_wide=True, weights="combine"),
            Round((5, 4), **FP8, weights="combine", is_split=True),
            Round((2, 2), weights="none"),
            Round((0, 0), **FP8),
            Round((16, 16), is_split=True),
        ),
        hidden=512,
    ),
    "three ranks, wide rows": Plan(
        random_rounds(3, 5, 3, 5, 1032), hidden=1032, max_tokens=5, num_topk=11, packet_tokens=2
    ),
    "four ranks": Plan(random_rounds(4, 5, 4, 40, 256), num_local_experts=3, num_topk=8, max_tokens=40, num_sms=4),
    "eight ranks": Plan(
        random_rounds(8, 3, 8, 6, 128), num_local_experts=2, hidden=128, max_tokens=6, num_topk=6, num_sms=2
    ),
    "one expert for all": Plan(
        (Round((16, 16), routing="one expert", **FP8), Round((4, 3), routing="one expert")), num_local_experts=1
    ),
    "a model's row": Plan(
        (Round((6, 5), **FP8), Round((2, 3), **FP8, is_split=True)), hidden=7168, num_topk=8, num_local_experts=16,
        max_tokens=6,
    ),
    "all in packets": Plan(random_rounds(5, 4, 2, 16, 256), packet_tokens=16),
    "no packets": Plan(random_rounds(6, 4, 2, 16, 256), packet_tokens=0),
    "experts anywhere": Plan(random_rounds(7, 5, 3, 16, 256), num_topk=5, is_permuted=True),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANS)
def test_same_bits_as_reference(name: str) -> None:
    run_ranks(run_plan, PLANS[name].num_ranks, PLANS[name], "emulated", timeout_s=200)


def test_random_rounds_survive_warps_that_stand_still() -> None:
    plan = Plan(random_rounds(73, 10, 3, 16, 256), stall_one_in=STALL_ONE_IN)
    run_ranks(run_plan, 3, plan, "emulated", timeout_s=200)


def test_many_calls_reuse_every_slot() -> None:
    rounds = tuple(replace(this, num_tokens=(2, 1)) for this in random_rounds(9, 30, 2, 2, 256))
    run_ranks(run_plan, 2, Plan(rounds, max_tokens=2, packet_tokens=1), "emulated", timeout_s=200)
