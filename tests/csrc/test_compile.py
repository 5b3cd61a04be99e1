"""Every kernel compiles for every architecture and number of ranks, without spilling a register."""

from __future__ import annotations

import pytest

from epee.gpu.params import KERNELS, kernel_head

pytest.importorskip("cuda.bindings.nvrtc", reason="no cuda-bindings and NVRTC here to compile kernels with")

from epee.jit.params import kernel_symbol
from epee.jit.source import flatten
from tests.csrc.compiled import compile_once, resources

CUDA_WARPS = 16


@pytest.mark.timeout(180)
@pytest.mark.parametrize("path", KERNELS)
@pytest.mark.parametrize(
    ("architecture", "num_ranks"),
    [("sm_90a", 2), ("sm_90a", 4), ("sm_90a", 8), ("sm_90a", 16), ("sm_100a", 2), ("sm_100a", 16)],
)
def test_kernels_compile_without_spills(path: str, architecture: str, num_ranks: int) -> None:
    compiled = compile_once(flatten(path, kernel_head(num_ranks, CUDA_WARPS)), architecture, path)
    found = resources(compiled.log)
    assert set(found) == {kernel_symbol(name, params) for name, params in KERNELS[path].items()}
    for name, needs in found.items():
        assert needs.spill_bytes == 0, name
        assert needs.stack_bytes == 0, name
        assert needs.registers * 512 <= 65536, f"{name}: a block of 512 threads must fit"
    assert "warning" not in compiled.log
