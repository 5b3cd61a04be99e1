"""Kernels of calls between hosts compile for every architecture and size of island, without spilling a register."""

from __future__ import annotations

import pytest

from epee.gpu.hosts import HOST_KERNELS, MAX_WORKERS, hosts_head

pytest.importorskip("cuda.bindings.nvrtc", reason="no cuda-bindings and NVRTC here to compile kernels with")

from epee.jit.params import kernel_symbol
from epee.jit.source import flatten
from tests.csrc.compiled import compile_once, resources


@pytest.mark.timeout(180)
@pytest.mark.parametrize("path", HOST_KERNELS)
@pytest.mark.parametrize(("architecture", "num_local"), [("sm_90a", 1), ("sm_90a", 8), ("sm_100a", 2), ("sm_100a", 16)])
def test_kernels_compile_without_spills(path: str, architecture: str, num_local: int) -> None:
    compiled = compile_once(flatten(path, hosts_head(num_local)), architecture, path)
    found = resources(compiled.log)
    assert set(found) == {kernel_symbol(name, params) for name, params in HOST_KERNELS[path].items()}
    for name, needs in found.items():
        assert needs.spill_bytes == 0, name
        assert needs.stack_bytes == 0, name
        most = 512 if "layout" in name else 32 * (MAX_WORKERS + 2)
        assert needs.registers * most <= 65536, f"{name}: a block of {most} threads must fit"
    assert "warning" not in compiled.log
