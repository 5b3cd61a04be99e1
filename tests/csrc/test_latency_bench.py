"""The checks of `benchmarks/latency_gpu.py` in emulation."""

from __future__ import annotations

import pytest
import torch

import benchmarks.latency_gpu as bench
from benchmarks import gpu
from tests.csrc.emulated import EmulatedPlatform
from tests.harness import run_ranks


def _check(rank: int, num_ranks: int) -> None:
    bench.NUM_EXPERTS, bench.NUM_TOPK, bench.HIDDEN, bench.MAX_TOKENS = 24, 3, 256, 12
    bench.DEVICE = "cpu"
    gpu.platform_of = lambda rank: EmulatedPlatform(3, shared_bytes=128 << 10)
    torch.cuda.synchronize = lambda: None  # type: ignore[assignment, misc]
    core = bench.make_core(rank, num_ranks, 4)
    bench.check_all(core, [0, 3, 12])
    core.close()


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_results_are_checked(num_ranks: int) -> None:
    run_ranks(_check, num_ranks)
