"""The GPU kernels' own sources on the CPU: the same bits as the reference, from real rank processes."""

from __future__ import annotations

import pytest

from tests.csrc.emulated import has_compiler
from tests.csrc.throughput_cases import Case, check_case

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.timeout(240),  # the first case for a number of ranks builds the kernels
    pytest.mark.skipif(not has_compiler(), reason="no g++ here to build the kernels with"),
]

CASES = {
    "one rank": Case((19,), dtype="float16", payload="float16", num_topk=2),
    "two ranks": Case((17, 11), num_bias=1),
    "three ranks": Case((5, 0, 13), num_local_experts=2, num_topk=4, hidden=1032, num_bias=2, is_bias_wide=True),
    "four ranks": Case((37, 8, 1, 20), num_topk=9, hidden=136, num_local_experts=3),
    "eight ranks": Case((3, 0, 7, 1, 5, 2, 9, 4), num_topk=6, hidden=136, num_local_experts=2, num_sms=2),
    "wide rows": Case((6, 5), hidden=7176, num_sms=1),
    "float32": Case((9, 14), dtype="float32", payload="float32", hidden=264, num_bias=1),
    "fp8": Case((12, 21), hidden=512, payload="fp8"),
    "no weights": Case((10, 12), with_weights=False),
    "mask": Case((10, 12), routing="mask", with_weights=False),
    "repeats": Case((16, 3), routing="repeats", num_local_experts=1, num_topk=5),
    # only the last rank receives rows, so it alone copies while the others pull
    "one expert": Case((30, 30, 30), routing="one expert", num_local_experts=2, hidden=512),
    "nowhere": Case((4, 6), routing="nowhere"),
    "no tokens": Case((0, 0)),
    "many tokens": Case((600, 590), hidden=8, num_topk=2),
    "expert": Case((17, 11), layout="expert", num_bias=1),
    "expert, one rank": Case((13,), layout="expert", expert_alignment=4, num_topk=2),
    "expert, four ranks": Case((21, 9, 0, 12), layout="expert", expert_alignment=8, num_topk=4, hidden=1032),
    "expert, eight ranks": Case(
        (4, 1, 0, 6, 2, 3, 5, 1), layout="expert", expert_alignment=4, payload="fp8", hidden=256, num_topk=5, num_sms=2
    ),
    "expert, repeats": Case((12, 9), layout="expert", routing="repeats", num_local_experts=1, num_topk=5),
    "expert, fp8": Case((12, 9), layout="expert", payload="fp8", hidden=256, expert_alignment=16),
    "expert, float32, no weights": Case(
        (7, 9), layout="expert", dtype="float32", payload="float32", with_weights=False, expert_alignment=3
    ),
    "expert, one expert": Case((7, 9), layout="expert", routing="one expert"),
    # one sender of three multiprocessors: several expanding warps share each stream
    "expert, shared streams": Case((40, 33), layout="expert", expert_alignment=4, num_sms=1),
    "expert, shared streams, fp8": Case((35, 50, 21), layout="expert", payload="fp8", hidden=1024, num_sms=1),
    "expert, many scales": Case((5, 8), layout="expert", payload="fp8", hidden=8320, num_sms=1, expert_alignment=2),
    "expert, shared streams, rows in pieces": Case(
        (5, 8), layout="expert", hidden=7176, num_sms=1, num_topk=8, num_local_experts=8, expert_alignment=2
    ),
    "expert, a rank without tokens": Case((0, 9), layout="expert", expert_alignment=4, num_sms=1),
    "expert, no tokens": Case((0, 0), layout="expert", expert_alignment=4),
    "expert, all to one expert of another rank": Case(
        (33, 1, 0), layout="expert", routing="one expert", expert_alignment=128, num_sms=1
    ),
    "expert, many tokens": Case((600, 590), layout="expert", hidden=8, num_topk=2, expert_alignment=16),
    "expert, nowhere": Case((3, 4), layout="expert", routing="nowhere", expert_alignment=8),
    "anywhere": Case((17, 11, 9), num_bias=1, num_sms=3, is_permuted=True),  # by the one kernel for few tokens
    "anywhere, many tokens": Case((600, 590), hidden=8, num_topk=2, is_permuted=True),
    "anywhere, expert": Case((21, 9, 0, 12), layout="expert", expert_alignment=4, num_topk=4, is_permuted=True),
    "anywhere, expert, many tokens": Case((600, 590), layout="expert", hidden=8, num_topk=2, is_permuted=True),
}


@pytest.mark.parametrize("name", CASES)
def test_same_bits_as_reference(name: str) -> None:
    check_case(CASES[name], "emulated", timeout_s=200)
