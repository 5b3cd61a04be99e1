"""The table in device memory by which kernels map an expert id to its rank; `csrc/common/experts.cuh` describes it.

A buffer makes its table once, before its first call. It stays where it is, also when the epoch changes, so graphs keep
its address. An entry is the physical expert of an id, rank * num_local_experts + index at that rank, so one table of
contiguous blocks serves calls with any number of experts.
"""

from __future__ import annotations

import torch

from ..arrays import plain_tensors


def expert_table(device: torch.device, num_experts: int) -> torch.Tensor:
    """Return a table `[num_experts]` int16, a multiple of 8, in which each rank has a contiguous block of the ids.

    Its entries are there on return, for kernels on any stream: a copy from ordinary memory is waited for.
    """
    with plain_tensors():
        return torch.arange(num_experts, dtype=torch.int16, device="cpu").to(device)
