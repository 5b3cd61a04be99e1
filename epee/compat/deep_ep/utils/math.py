"""Casts between bfloat16 rows and FP8 rows with a scale for each 128 channels; small arithmetic of test scripts.

For the 128 values v of a block: `amax = max(|v|, 1e-4)`, `scale = amax / 448`, `stored = v * (448 / amax)`; each
operation is rounded once in float32, with true divisions. With `round_scale` the scale is the next power of two at or
above `amax / 448`, and `stored = v * (1 / scale)`.
"""

from __future__ import annotations

from typing import Any

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
    stored = (blocks * factor).view(num_tokens, num_blocks * BLOCK)[:, :hidden].to(torch.float8_e4m3fn).contiguous()
    scales = scale.view(num_tokens, num_blocks)
    return stored, _pack(scales) if use_ue8m0 else scales


def per_token_cast_back(x_fp8: torch.Tensor, x_scales: torch.Tensor) -> torch.Tensor:
    """Return the values of quantised rows in bfloat16, in the shape of `x_fp8`.

    Args:
        x_fp8: `[num_tokens, hidden]`, or more dimensions, the last of which is `hidden`; any strides.
        x_scales: one scale for each 128 channels of a row, in any shape and strides that hold them in this order; or
            one for each row, or for each index of the first dimension. Floating point, or packed exponents (int32, four
            in a word; those after the last block of a row are not read).

    Raises:
        InvalidArgument: `x_fp8` has less than two dimensions, or the number of scales fits no such layout.
    """
    if x_fp8.numel() == 0:
        return x_fp8.to(torch.bfloat16)
    if x_fp8.dim() < 2:
        raise InvalidArgument(f"x_fp8 must be [num_tokens, hidden], got {list(x_fp8.shape)}; call .view(1, -1)")
    hidden = x_fp8.shape[-1]
    values = x_fp8.reshape(-1, hidden).to(torch.float32)
    num_blocks = ceil_div(hidden, BLOCK)
    scales = _scales_of_blocks(x_scales, len(values), num_blocks, x_fp8.shape)
    blocks = pad(values, (0, num_blocks * BLOCK - hidden)).view(len(values), num_blocks, BLOCK)
    product = (blocks * scales[:, :, None]).view(len(values), -1)[:, :hidden]
    return product.to(torch.bfloat16).reshape(x_fp8.shape).contiguous()


def _scales_of_blocks(scales: torch.Tensor, num_rows: int, num_blocks: int, shape: torch.Size) -> torch.Tensor:
    """Return the scales as `[num_rows, num_blocks]`, or `[num_rows, 1]`.

    Raises:
        InvalidArgument: there are too few or too many for `x_fp8` of this shape.
    """
    is_packed = scales.dtype in (torch.int32, torch.uint32)
    flat = _unpack(scales) if is_packed else scales.reshape(-1)
    if flat.numel() in (num_rows * num_blocks, num_rows):
        return flat.view(num_rows, -1)
    if flat.numel() == shape[0]:
        return flat.repeat_interleave(num_rows // shape[0]).view(num_rows, 1)
    if is_packed and flat.numel() == num_rows * align(num_blocks, 4):
        return flat.view(num_rows, -1)[:, :num_blocks]
    raise InvalidArgument(
        f"x_scales must hold {num_blocks} scales for each of {num_rows} rows, or one, for x_fp8 {list(shape)}; got "
        f"{list(scales.shape)} {scales.dtype}, which are {flat.numel()}"
    )


def _pack(scales: torch.Tensor) -> torch.Tensor:
    exponents = scales.contiguous().view(torch.int32) >> 23
    return exponents.to(torch.uint8).view(torch.int32)


def _unpack(packed: torch.Tensor) -> torch.Tensor:
    """Return the scales of packed exponents, in one dimension."""
    exponents = packed.reshape(-1).view(torch.uint8).to(torch.int32)
    return (exponents << 23).view(torch.float32)


def calc_diff(x: torch.Tensor, y: torch.Tensor) -> float:
    """Return `1 - 2 xy / (xx + yy)` over all elements plus one: 0 where they are equal, or where there are none."""
    if x.numel() == 0 and y.numel() == 0:
        return 0.0
    first, second = x.double() + 1, y.double() + 1
    return float(1 - 2 * (first * second).sum() / (first * first + second * second).sum())


def safe_div(a: Any, b: Any) -> Any:
    """Return a / b, and 0 for 0 / 0; of tensors their quotient."""
    try:
        return a / b
    except ZeroDivisionError:
        if a == 0:
            return 0
        raise


def ceil_div(x: int, y: int) -> int:
    """Return x / y rounded up."""
    return (x + y - 1) // y


def align(x: int, y: int) -> int:
    """Return x rounded up to a multiple of y."""
    return ceil_div(x, y) * y


def inplace_unique(x: torch.Tensor, num_slots: int) -> None:
    """Let each row of `x` hold its distinct entries in 0 ... `num_slots` - 1 once, the most frequent first, then -1.

    With fewer columns than entries the most frequent stay.
    """
    counts = torch.zeros(len(x), num_slots + 1, dtype=x.dtype, device=x.device)
    counts.scatter_add_(1, x.masked_fill(x < 0, num_slots).to(torch.int64), torch.ones_like(x))
    ordered, slots = counts[:, :num_slots].sort(dim=1, descending=True)
    kept = min(num_slots, x.shape[1])
    best = slots.masked_fill(ordered == 0, -1).sort(dim=1, descending=True)[0]
    x.fill_(-1)
    x[:, :kept] = best[:, :kept]


def create_grouped_scores(scores: torch.Tensor, group_idx: torch.Tensor, num_groups: int) -> torch.Tensor:
    """Return scores `[num_tokens, num_experts]` with zeros outside of each token's groups `[num_tokens, n]`."""
    num_tokens, num_experts = scores.shape
    mask = torch.zeros(num_tokens, num_groups, dtype=torch.bool, device=scores.device).scatter_(1, group_idx, True)
    return scores * mask.repeat_interleave(num_experts // num_groups, 1)


def hash_tensor(t: torch.Tensor) -> int:
    """Return the sum of the 4-byte words of the tensor's elements, of any dtype; the last word is filled with zeros."""
    raw = t.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)  # begins at its storage
    octets = raw.view(-1).view(torch.uint8)
    return int(pad(octets, (0, -len(octets) % 4)).view(torch.int32).sum())


def hash_tensors(*tensors: object) -> int:
    """Return the exclusive or of the tensors' sums, in lists and tuples as well."""
    value = 0
    for each in tensors:
        if isinstance(each, torch.Tensor):
            value ^= hash_tensor(each)
        elif isinstance(each, (tuple, list)):
            value ^= hash_tensors(*each)
    return value


def count_bytes(*tensors: object) -> int:
    """Return the bytes of tensors, in lists and tuples as well; None counts as nothing."""
    total = 0
    for each in tensors:
        if isinstance(each, torch.Tensor):
            total += each.numel() * each.itemsize
        elif isinstance(each, (tuple, list)):
            total += count_bytes(*each)
    return total
