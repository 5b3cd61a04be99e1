"""Payloads of a dispatch as kernels and headers name them: dtypes, layouts, and the error of sizes that do not fit.

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
