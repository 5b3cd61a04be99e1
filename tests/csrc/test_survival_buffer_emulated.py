"""`epee.Buffer` over the emulated GPU goes on without ranks that die or are late, and with those that come back."""

from __future__ import annotations

import pytest

from tests.csrc import survival_buffer_cases
from tests.csrc.emulated import has_compiler
from tests.csrc.emulated_buffer import emulated
from tests.csrc.throughput_survival import expect_only_dead
from tests.harness import run_ranks

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.timeout(240),  # the first one builds the kernels
    pytest.mark.skipif(not has_compiler(), reason="no g++ here to build the kernels with"),
]


@pytest.mark.parametrize("layout", ["rank", "expert"])
@pytest.mark.parametrize("is_known", [True, False])
def test_survivors_of_a_kill_agree_and_go_on(layout: str, is_known: bool) -> None:
    expect_only_dead(emulated, 3, survival_buffer_cases.lost, layout, is_known)


def test_a_rank_whose_call_others_have_left_looks_for_the_dead_itself() -> None:
    expect_only_dead(emulated, 3, survival_buffer_cases.unnoticed)


@pytest.mark.parametrize("layout", ["rank", "expert"])
def test_late_rank_is_left_out_and_comes_back(layout: str) -> None:
    *others, last = run_ranks(emulated, 3, survival_buffer_cases.late, layout, timeout_s=200)
    assert others == ["", ""]
    told = ("EvictedError", "CommTimeoutError", "MismatchError")  # the latter before its agent has heard of it
    assert last in [f"{error} NoQuorumError" for error in told]
