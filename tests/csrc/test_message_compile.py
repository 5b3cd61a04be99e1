"""The message kernels compile for every architecture without spills, and fit as often as is counted on."""

from __future__ import annotations

import pytest

from epee.backend.cuda.messages.machine import plan_of
from epee.backend.cuda.messages.params import (
    BLOCKS_PER_SM,
    KERNELS,
    THREADS,
    config_of,
    kernel_head,
)
from epee.gpu.ranks import MAX_LOCAL

pytest.importorskip("cuda.bindings.nvrtc", reason="no cuda-bindings and NVRTC here to compile kernels with")

from epee.jit.params import kernel_symbol
from epee.jit.source import flatten
from tests.csrc.compiled import compile_once, resources

H100_SMS = 132


@pytest.mark.timeout(180)
@pytest.mark.parametrize("path", KERNELS)
@pytest.mark.parametrize("architecture", ["sm_90a", "sm_100a"])
def test_kernels_compile_without_spills(path: str, architecture: str) -> None:
    compiled = compile_once(flatten(path, kernel_head()), architecture, path)
    found = resources(compiled.log)
    assert set(found) == {kernel_symbol(name, params) for name, params in KERNELS[path].items()}
    for name, needs in found.items():
        assert needs.spill_bytes == 0, name
        assert needs.stack_bytes == 0, name
        assert needs.registers * THREADS * BLOCKS_PER_SM <= 65536, name
    assert "warning" not in compiled.log


@pytest.mark.parametrize("num_sharing", [1, 2, 4])
@pytest.mark.parametrize("num_ranks", range(1, MAX_LOCAL + 1))
def test_all_that_may_wait_at_once_has_its_place(num_ranks: int, num_sharing: int) -> None:
    plan = plan_of(num_ranks, num_sharing)
    beside = 2 * max(1, num_ranks - 1) * plan.beside
    assert plan.alone + beside + max(plan.batch, 2 * num_ranks) <= H100_SMS * BLOCKS_PER_SM
    assert min(plan.alone, plan.beside, plan.batch) >= 1


def test_blocks_deal_out_all_lanes_evenly() -> None:
    for num_ranks in range(1, MAX_LOCAL + 1):
        lanes = config_of(0, num_ranks, 16 << 20).num_lanes
        assert lanes == 64
        plan = plan_of(num_ranks, 1)
        assert lanes % plan.alone == lanes % plan.beside == 0
