"""Every latency kernel compiles for every architecture and number of ranks, without spilling a register."""

from __future__ import annotations

import pytest

from epee.ep.latency.gpu.params import KERNELS, kernel_head

pytest.importorskip("cuda.bindings.nvrtc", reason="no cuda-bindings and NVRTC here to compile kernels with")

from epee.jit.params import kernel_symbol
from epee.jit.source import flatten
from tests.csrc.compiled import compile_once, resources

THREADS_PER_SM = 512  # one block of a dispatch, two of a combine


@pytest.mark.timeout(180)
@pytest.mark.parametrize("path", KERNELS)
@pytest.mark.parametrize(("architecture", "num_ranks"), [("sm_90a", 4), ("sm_100a", 8), ("sm_90a", 16)])
def test_kernels_compile_without_spills(path: str, architecture: str, num_ranks: int) -> None:
    compiled = compile_once(flatten(path, kernel_head(num_ranks)), architecture, path)
    found = resources(compiled.log)
    assert set(found) == {kernel_symbol(name, params) for name, params in KERNELS[path].items()}
    for name, needs in found.items():
        assert needs.spill_bytes == 0, name
        assert needs.stack_bytes == 0, name
        assert needs.registers * THREADS_PER_SM <= 65536, name
    assert "warning" not in compiled.log
