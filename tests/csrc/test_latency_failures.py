"""Failures of the latency kernels, run on the CPU."""

from __future__ import annotations

import pytest

from tests.csrc.emulated import has_compiler
from tests.csrc.latency_cases import Round
from tests.csrc.latency_failures import CHECKS, FEW, slow_rows
from tests.harness import run_ranks

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.timeout(240),  # the first one builds the kernels
    pytest.mark.skipif(not has_compiler(), reason="no g++ here to build the kernels with"),
]


SOME = Round((6, 5, 7), use_fp8=True, seed=5)  # more than cross in packets


@pytest.mark.parametrize("name", CHECKS)
def test_failure_is_told_and_survived(name: str) -> None:
    CHECKS[name]("emulated")


@pytest.mark.parametrize(("op", "this"), [("dispatch", SOME), ("combine", FEW)], ids=["rows", "packets"])
def test_source_that_is_late_with_rows_is_left_out_though_others_have_laid_out(op: str, this: Round) -> None:
    results = run_ranks(slow_rows, 3, "emulated", this, op, timeout_s=80)
    assert results[0] == results[2] == ([1, 0, 1], (1,))
    assert results[1] == ([1, 1, 1], ())
