"""Experts that the table in device memory has at other places than in the order of their numbers."""

from __future__ import annotations

import pytest

from tests.csrc.emulated import has_compiler
from tests.csrc.latency_cases import Plan, random_rounds, run_plan
from tests.csrc.throughput_cases import Case, check_case
from tests.harness import run_ranks

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.timeout(240),  # the first case builds the kernels
    pytest.mark.skipif(not has_compiler(), reason="no g++ here to build the kernels with"),
]
CASES = {
    "few tokens": Case((9, 4, 7), num_sms=3, is_shuffled=True),
    "many tokens": Case((530, 3), hidden=8, num_topk=2, num_sms=3, is_shuffled=True),
    "repeats": Case((9, 4, 7), routing="repeats", num_sms=3, is_shuffled=True),
    "expert layout": Case((9, 4, 7), layout="expert", expert_alignment=4, num_sms=3, is_shuffled=True),
}


@pytest.mark.parametrize("name", CASES)
def test_rows_go_where_the_table_has_their_experts(name: str) -> None:
    check_case(CASES[name], "emulated", timeout_s=200)


def test_latency_calls_go_where_the_table_has_their_experts() -> None:
    plan = Plan(random_rounds(3, 6, 3, 8, 128), hidden=128, max_tokens=8, is_shuffled=True)
    run_ranks(run_plan, 3, plan, "emulated", timeout_s=200)
