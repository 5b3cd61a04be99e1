"""Failures of the throughput kernels, run on the CPU."""

from __future__ import annotations

import pytest

from tests.csrc.emulated import has_compiler
from tests.csrc.throughput_failures import CHECKS

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.timeout(240),  # the first one builds the kernels
    pytest.mark.skipif(not has_compiler(), reason="no g++ here to build the kernels with"),
]


@pytest.mark.parametrize("name", CHECKS)
def test_failure_is_told_and_survived(name: str) -> None:
    CHECKS[name]("emulated")
