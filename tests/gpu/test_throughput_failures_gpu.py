"""Failures of `Buffer` on real GPUs: errors, time-outs, a healthy context afterwards."""

from __future__ import annotations

import pytest

from tests.csrc.throughput_failures import CHECKS

pytestmark = [pytest.mark.gpu(2), pytest.mark.timeout(120)]


@pytest.mark.parametrize("name", CHECKS)
def test_failure_is_told_and_survived(name: str) -> None:
    CHECKS[name]("cuda")
