"""More than eight ranks of one NVLink domain: the kernels' own sources on the CPU, with the bits of the reference."""

from __future__ import annotations

import pytest

from epee.gpu.ranks import MAX_LOCAL
from tests.csrc import message_cases
from tests.csrc.collective_cases import ALL, OPS, Call, run_calls
from tests.csrc.emulated import has_compiler
from tests.csrc.latency_cases import Plan, random_rounds, run_plan
from tests.csrc.throughput_cases import Case, check_case
from tests.harness import run_ranks

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.timeout(300),  # the first case builds the kernels for as many ranks
    pytest.mark.skipif(not has_compiler(), reason="no g++ here to build the kernels with"),
]
TWELVE = (3, 0, 7, 1, 5, 2, 9, 4, 6, 0, 1, 8)
SIXTEEN = (2, 1, 0, 3, 1, 4, 2, 0, 5, 1, 2, 1, 3, 0, 1, 6)
CASES = {
    "twelve": Case(TWELVE, num_topk=6, hidden=136, num_local_experts=2, num_sms=2),
    "twelve, mask": Case(TWELVE, routing="mask", with_weights=False, num_sms=2),
    "twelve, expert, fp8": Case(
        TWELVE, layout="expert", expert_alignment=4, payload="fp8", hidden=256, num_topk=5, num_sms=2
    ),
    "sixteen": Case(SIXTEEN, num_topk=8, num_local_experts=2, num_bias=1, num_sms=2),
    "sixteen, last expert": Case(SIXTEEN, routing="one expert", num_local_experts=1, num_sms=2),
    "sixteen, many tokens": Case((513, *SIXTEEN[1:]), hidden=8, num_topk=2, num_local_experts=1, num_sms=2),
    "sixteen, expert": Case(SIXTEEN, layout="expert", num_topk=4, num_local_experts=2, num_sms=2),
}


@pytest.mark.parametrize("name", CASES)
def test_dispatch_and_combine(name: str) -> None:
    check_case(CASES[name], "emulated", timeout_s=250)


@pytest.mark.parametrize("num_ranks", [12, MAX_LOCAL])
def test_latency_calls(num_ranks: int) -> None:
    rounds = random_rounds(num_ranks, 3, num_ranks, 4, 128)
    plan = Plan(rounds, num_local_experts=2, hidden=128, max_tokens=4, num_topk=6, num_sms=2)
    run_ranks(run_plan, num_ranks, plan, "emulated", timeout_s=250)


@pytest.mark.parametrize("num_ranks", [12, MAX_LOCAL])
def test_collectives(num_ranks: int) -> None:
    calls = [Call(op, count, root=num_ranks - 1, seed=count) for op in OPS for count in (1, 1025, 4099)]
    calls += [Call(op, 4099, root=9, seed=9, in_pool=ALL) for op in OPS]
    run_ranks(run_calls, num_ranks, calls, 0, False, 1 << 11 | 1 << 3, timeout_s=250)


def test_batches_of_messages() -> None:
    run_ranks(message_cases.random_batches, MAX_LOCAL, 16, 12, 0, 1, timeout_s=250)
