"""Every collective kernel compiles for every architecture, element and number of ranks, without spilling a register."""

from __future__ import annotations

import pytest
import torch

from epee.backend.cuda.params import (
    DIRECT_KERNELS,
    EXCHANGE_THREADS,
    KERNELS,
    MASKED_KERNELS,
    TWO_SHOT_THREADS,
    direct_threads,
    kernel_head,
    mend_threads,
)
from epee.backend.cuda.plan import CollectivePlan

pytest.importorskip("cuda.bindings.nvrtc", reason="no cuda-bindings and NVRTC here to compile kernels with")

from epee.jit.params import kernel_symbol
from epee.jit.source import flatten
from tests.csrc.compiled import compile_once, resources

THREADS, BLOCKS = CollectivePlan().pipeline
FILES = {**KERNELS, **DIRECT_KERNELS, **MASKED_KERNELS}
THREADS_PER_SM = {
    "exchange": EXCHANGE_THREADS,
    "masked": EXCHANGE_THREADS,
    "two_shot": TWO_SHOT_THREADS,
    "pipeline": THREADS * BLOCKS,
    "try": THREADS * BLOCKS,
    "mend": mend_threads((THREADS, BLOCKS)),
}


@pytest.mark.timeout(400)  # the longest takes 62 s of a processor, which others may use as well
@pytest.mark.parametrize("path", FILES)
@pytest.mark.parametrize(
    ("architecture", "num_ranks", "dtype", "reduction"),
    [
        ("sm_90a", 4, None, "sum"),
        ("sm_90a", 2, torch.bfloat16, "sum"),
        ("sm_90a", 8, torch.bfloat16, "sum"),
        ("sm_90a", 16, torch.bfloat16, "sum"),
        ("sm_90a", 4, torch.uint8, "product"),
        ("sm_100a", 8, torch.float32, "max"),
        ("sm_100a", 4, torch.bfloat16, "sum"),
        ("sm_100a", 2, torch.int64, "xor"),
    ],
)
def test_kernels_compile_without_spills(
    path: str, architecture: str, num_ranks: int, dtype: torch.dtype | None, reduction: str
) -> None:
    head = kernel_head(num_ranks, dtype, reduction, CollectivePlan().pipeline)
    compiled = compile_once(flatten(path, head), architecture, path)
    found = resources(compiled.log)
    assert set(found) == {kernel_symbol(name, params) for name, params in FILES[path].items()}
    for name, needs in found.items():
        assert needs.spill_bytes == 0, name
        assert needs.stack_bytes == 0, name
        per_sm = next((count for part, count in THREADS_PER_SM.items() if part in name), 32)
        if "direct" in name:
            per_sm = direct_threads((THREADS, BLOCKS), num_ranks) * BLOCKS
        assert needs.registers * per_sm <= 65536, name
    assert "warning" not in compiled.log
