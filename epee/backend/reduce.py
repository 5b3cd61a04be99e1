"""Element-wise reductions over the contributions of all ranks, in ascending rank order.

The order is fixed, so float results are bit-identical on all ranks and between runs. bfloat16 and float16 are summed
in float32 and rounded once. Work goes block by block, so the running sum stays in the cache.

    SUM, AVG, PRODUCT, MIN, MAX   integers and floats
    BAND, BOR, BXOR               integers and bool
    SUM, AVG                      complex
    MIN, MAX, BAND, BOR, BXOR     bool (SUM of bool has no agreed meaning and is refused)

SUM and PRODUCT of integers wrap, as in torch. AVG of integers is the exact sum, in 64 bits, divided towards zero as C
does; only the sum of 64-bit integers can wrap.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..errors import InvalidArgument
from .signature import REDUCE_OPS
from .tensors import Array, Carrier

SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR, PREMUL_SUM = range(9)
BLOCK_BYTES = 256 << 10

_NUMPY: dict[int, np.ufunc] = {
    SUM: np.add,
    AVG: np.add,
    PRODUCT: np.multiply,
    MIN: np.minimum,
    MAX: np.maximum,
    BAND: np.bitwise_and,
    BOR: np.bitwise_or,
    BXOR: np.bitwise_xor,
}
_TORCH: dict[int, Any] = {
    SUM: torch.Tensor.add_,
    AVG: torch.Tensor.add_,
    PRODUCT: torch.Tensor.mul_,
    MIN: torch.Tensor.minimum,
    MAX: torch.Tensor.maximum,
}
_HALVES = (torch.float16, torch.bfloat16)
_BITWISE = (BAND, BOR, BXOR)


def supported(dtype: torch.dtype) -> tuple[int, ...]:
    """Return the reduce operations that `dtype` has."""
    if dtype is torch.bool:
        return (MIN, MAX, BAND, BOR, BXOR)
    if dtype.is_complex:
        return (SUM, AVG) if dtype is not torch.complex32 else ()
    if dtype.is_floating_point:
        return (SUM, AVG, PRODUCT, MIN, MAX) if dtype.itemsize > 1 else ()
    return (SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR)


def check(op: int, dtype: torch.dtype, name: str) -> None:
    """Raise `InvalidArgument` when `dtype` has no such reduction; the message lists what it has."""
    allowed = supported(dtype)
    if op not in allowed:
        wanted = REDUCE_OPS[op] if 0 <= op < len(REDUCE_OPS) else str(op)
        have = ", ".join(REDUCE_OPS[code] for code in allowed) or "none"
        raise InvalidArgument(f"{name}: reduce op {wanted} does not exist for {dtype}; it has: {have}")


class Reducer:
    """One reduce operation on one dtype: `reduce(parts, out)`.

    `parts` are flat arrays of the carrier dtype in rank order, `out` one of the same length; `out` may be `parts[0]`
    itself but must not share memory with a later part.
    """

    __slots__ = ("_divide", "_dtype", "_op", "_ufunc", "reduce")

    def __init__(self, op: int, dtype: torch.dtype, carrier: Carrier) -> None:
        self._op = op
        self._dtype = dtype
        self._ufunc = _NUMPY[op]
        self._divide = op == AVG
        kernel = self._plain
        if dtype in _HALVES:
            kernel = self._halves
        elif self._divide and carrier.dtype.kind in "iu":
            kernel = self._integer_mean

        def reduce(parts: Sequence[Array], out: Array) -> None:
            # a user's np.seterr must not decide how a collective ends: inf - inf is NaN, as everywhere
            with np.errstate(all="ignore"):
                kernel(parts, out)

        self.reduce = reduce

    def _plain(self, parts: Sequence[Array], out: Array) -> None:
        count = len(out)
        block = BLOCK_BYTES // out.itemsize
        if count <= block:
            if len(parts) == 2 and not self._divide:
                self._ufunc(parts[0], parts[1], out)
            else:
                self._block(parts, out)
            return
        for first in range(0, count, block):
            last = first + block
            self._block([part[first:last] for part in parts], out[first:last])

    def _block(self, parts: Sequence[Array], out: Array) -> None:
        ufunc = self._ufunc
        if len(parts) == 1:
            out[...] = parts[0]
        else:
            ufunc(parts[0], parts[1], out)
            for part in parts[2:]:
                ufunc(out, part, out)
        if self._divide:
            flat = out.view(out.real.dtype)  # complex numbers by their parts: exact, where complex division is not
            np.divide(flat, len(parts), flat)

    def _integer_mean(self, parts: Sequence[Array], out: Array) -> None:
        wide = np.dtype(np.uint64 if out.dtype == np.uint64 else np.int64)
        block = BLOCK_BYTES // wide.itemsize
        for first in range(0, len(out), block):
            last = first + block
            total = parts[0][first:last].astype(wide)
            for part in parts[1:]:
                np.add(total, part[first:last], total)
            remainder = np.fmod(total, len(parts))  # has the sign of the sum, so the quotient truncates towards zero
            np.subtract(total, remainder, total)
            np.floor_divide(total, len(parts), total)
            out[first:last] = total

    def _halves(self, parts: Sequence[Array], out: Array) -> None:
        count = len(out)
        block = BLOCK_BYTES // 4
        for first in range(0, count, block):
            last = min(count, first + block)
            tensors = [torch.from_numpy(part[first:last]).view(self._dtype) for part in parts]
            total = tensors[0].to(torch.float32)
            for tensor in tensors[1:]:
                if self._op in (MIN, MAX):
                    total = _TORCH[self._op](total, tensor.to(torch.float32))
                else:
                    _TORCH[self._op](total, tensor)
            if self._divide:
                total.div_(len(parts))
            torch.from_numpy(out[first:last]).view(self._dtype).copy_(total)
