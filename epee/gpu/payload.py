"""Payloads of a dispatch as kernels and headers name them: dtypes, layouts, and the errors of sizes that do not fit.

The positions in these tuples are part of the protocol: ranks exchange the index.
"""

from __future__ import annotations

import torch

from ..errors import InvalidArgument

LAYOUTS = ("rank", "expert")
FP8 = torch.float8_e4m3fn
PAYLOAD_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
DTYPE_CODES = (*PAYLOAD_DTYPES, FP8)


class DoesNotFit(InvalidArgument):
    """Calls of these sizes need more memory than the buffer has; the text says how much."""


def overflow(rank: int, num_rows: int, layout: str, capacity: int) -> str:
    """Return in words that a rank has no room for its rows, and what to do about it."""
    other = ', use layout="rank"' if layout == "expert" else ""
    return (
        f"rank {rank} would receive {num_rows} rows, its {layout} layout holds {capacity}; make the buffer with "
        f"max_recv_rows={num_rows} or more{other}, or dispatch fewer tokens"
    )
