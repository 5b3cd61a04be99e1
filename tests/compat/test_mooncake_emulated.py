"""Mooncake's `ep.Buffer` over GPU buffers, without a GPU: kernels built by g++, real rank processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from epee.ep.pool import pool
from tests.compat import test_mooncake_ep as on_cpu
from tests.csrc.emulated import has_compiler
from tests.csrc.test_latency_buffer_emulated import EmulatedLatencyBuffer
from tests.harness import run_ranks

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.timeout(240),  # the first case for a number of ranks builds the kernels
    pytest.mark.skipif(not has_compiler(), reason="no g++ here to build the kernels with"),
]


def _emulated(rank: int, num_ranks: int, function: Callable[..., Any], *args: Any) -> Any:
    """Run a rank's function with rooms on the emulated GPU."""
    pool.LatencyBuffer = EmulatedLatencyBuffer  # type: ignore[misc]
    return function(rank, num_ranks, *args)


def test_who_does_not_meet_the_others_again_is_left_out(tmp_path: Path) -> None:
    told = run_ranks(_emulated, 4, on_cpu._away, str(tmp_path), backend="mooncake-cpu", timeout_s=200)
    assert told == [[1, 1, 1, 0]] * 3 + [[]]
