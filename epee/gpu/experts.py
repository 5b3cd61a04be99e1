"""The table in device memory that says where experts are (`csrc/common/experts.cuh`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def write_table(table: torch.Tensor, positions: Sequence[int]) -> None:
    """Write positions of experts; no kernel may run on any rank that reads such a table.

    Args:
        table: int16 `[1 + MAX_EXPERTS]`, on the device.
        positions: of each expert `rank * num_local_experts + index`, the same on all ranks.
    """
    is_in_order = [*positions] == [*range(len(positions))]
    words = torch.tensor([int(is_in_order), *positions], dtype=torch.int16, device="cpu")
    table[: len(words)].copy_(words)
