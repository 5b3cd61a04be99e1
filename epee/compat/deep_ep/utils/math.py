"""Casts between bfloat16 rows and FP8 rows with a scale for each 128 channels.

For the 128 values v of a block: `amax = max(|v|, 1e-4)`, `scale = amax / 448`, `stored = v * (448 / amax)`; each
operation is rounded once in float32, with true divisions. With `round_scale` the scale is the next power of two at or
above `amax / 448`, and `stored = v * (1 / scale)`.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from epee.errors import InvalidArgument

BLOCK = 128
FP8_MAX = 448.0  # largest finite float8_e4m3fn
LEAST_AMAX = 1e-4


def per_token_cast_to_fp8(
    x: torch.Tensor, round_scale: bool = False, use_ue8m0: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise rows.

    Args:
        x: `[num_tokens, hidden]`, floating point.
        round_scale: powers of two as scales.
        use_ue8m0: return them as exponents, four bytes to an int32; needs `round_scale` and whole groups of four.

    Returns:
        float8_e4m3fn `[num_tokens, hidden]` and scales: float32 `[num_tokens, ceil(hidden / 128)]`, or int32
        `[num_tokens, hidden / 512]`.

    Raises:
        InvalidArgument: x is no matrix, or the exponents cannot be packed.
    """
    if x.dim() != 2:
        raise InvalidArgument(f"x must be [num_tokens, hidden], got {list(x.shape)}")
    num_tokens, hidden = x.shape
    num_blocks = -(-hidden // BLOCK)
    if use_ue8m0 and (not round_scale or num_blocks % 4):
        raise InvalidArgument(f"use_ue8m0 needs round_scale and hidden to be a multiple of 512, got {hidden}")
    blocks = pad(x.float(), (0, num_blocks * BLOCK - hidden)).view(num_tokens, num_blocks, BLOCK)
    amax = blocks.abs().amax(2, keepdim=True).clamp_(min=LEAST_AMAX)
    scale = amax / FP8_MAX
    if round_scale:
        mantissa, exponent = torch.frexp(scale)  # scale = mantissa * 2^exponent, 0.5 <= mantissa < 1
        scale = torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).to(exponent.dtype))
        factor = torch.ones_like(scale) / scale
    else:
        factor = torch.full_like(amax, FP8_MAX) / amax  # not 448.0 / amax: torch makes that a reciprocal and a product
    stored = (blocks * factor).view(num_tokens, -1)[:, :hidden].to(torch.float8_e4m3fn).contiguous()
    scales = scale.view(num_tokens, num_blocks)
    return stored, _pack(scales) if use_ue8m0 else scales


def per_token_cast_back(x_fp8: torch.Tensor, x_scales: torch.Tensor) -> torch.Tensor:
    """Return bfloat16 `[num_tokens, hidden]` from values and scales (float32, or packed exponents as int32)."""
    if x_fp8.numel() == 0:
        return x_fp8.to(torch.bfloat16)
    num_tokens, hidden = x_fp8.shape
    scales = _unpack(x_scales) if x_scales.dtype == torch.int32 else x_scales
    blocks = pad(x_fp8.float(), (0, scales.shape[1] * BLOCK - hidden)).view(num_tokens, -1, BLOCK)
    return (blocks * scales[:, :, None]).view(num_tokens, -1)[:, :hidden].to(torch.bfloat16).contiguous()


def _pack(scales: torch.Tensor) -> torch.Tensor:
    exponents = scales.contiguous().view(torch.int32) >> 23
    return exponents.to(torch.uint8).view(torch.int32)


def _unpack(packed: torch.Tensor) -> torch.Tensor:
    exponents = packed.contiguous().view(torch.uint8).to(torch.int32)
    return (exponents << 23).view(torch.float32)
