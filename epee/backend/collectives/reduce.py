"""Element-wise reductions over the contributions of all ranks, in ascending rank order.

The order is fixed, so float results are bit-identical on all ranks and between runs. bfloat16 and float16 are summed
in float32 and rounded once. Work goes block by block, so the running sum stays in the cache.

Results are written when the peers already rely on it (COMPLETES), so a reduction allocates nothing: a call takes its
scratch (`Reducer.scratch`, two blocks at most) when it is planned.

    SUM, AVG, PRODUCT, MIN, MAX   integers and floats
    BAND, BOR, BXOR               integers and bool
    SUM, AVG                      complex
    PREMUL_SUM                    floats and complex
    MIN, MAX, BAND, BOR, BXOR     bool (SUM of bool has no agreed meaning and is refused)

SUM and PRODUCT of integers wrap, as in torch. AVG of integers is the exact sum, in 64 bits, divided towards zero as C
does; only the sum of 64-bit integers can wrap.

PREMUL_SUM is a SUM of private copies that each rank multiplies by its own factor before it contributes them
(`premultiply`). Products of float16 and bfloat16 are computed in float32 and rounded to the dtype, then summed so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import Context
from typing import Any

import numpy as np
import torch

from ...arrays import without_modes
from ...engine.signature import REDUCE_OPS
from ...engine.tensors import Array, Carrier
from ...errors import InvalidArgument
from ...torch_private import num_dispatch_modes, num_function_modes

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
    PREMUL_SUM: np.add,
}
_TORCH: dict[int, Any] = {
    SUM: torch.add,
    AVG: torch.add,
    PRODUCT: torch.mul,
    MIN: torch.minimum,
    MAX: torch.maximum,
    PREMUL_SUM: torch.add,
}
Scratch = tuple[Array, Array] | None
_HALVES = (torch.float16, torch.bfloat16)


def supported(dtype: torch.dtype) -> tuple[int, ...]:
    """Return the reduce operations that `dtype` has."""
    if dtype is torch.bool:
        return (MIN, MAX, BAND, BOR, BXOR)
    if dtype.is_complex:
        return (SUM, AVG, PREMUL_SUM) if dtype is not torch.complex32 else ()
    if dtype.is_floating_point:
        return (SUM, AVG, PRODUCT, MIN, MAX, PREMUL_SUM) if dtype.itemsize > 1 else ()
    return (SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR)


def check(op: int, dtype: torch.dtype, name: str) -> None:
    """Raise `InvalidArgument` when `dtype` has no such reduction; the message lists what it has."""
    allowed = supported(dtype)
    if op not in allowed:
        wanted = REDUCE_OPS[op] if 0 <= op < len(REDUCE_OPS) else str(op)
        have = ", ".join(REDUCE_OPS[code] for code in allowed) or "none"
        raise InvalidArgument(f"{name}: reduce op {wanted} does not exist for {dtype}; it has: {have}")


def _quietly(function: Callable[..., Any], *args: Any) -> None:
    """Call `function` so that a user's `np.seterr` does not decide how a collective ends: inf - inf is NaN."""
    with np.errstate(all="ignore"):
        function(*args)


def _quietly_in_context(function: Callable[..., Any], *args: Any) -> None:
    """Call as `_quietly` where numpy keeps its error state in a context variable; takes 0.1 us instead of 1.1.

    It runs in a copy of the context, as threads and signal handlers cannot be in one context at once.
    """
    _context.copy().run(function, *args)


_context = Context()
if int(np.__version__.split(".", 1)[0]) < 2:
    quietly = _quietly
else:
    _context.run(np.seterr, all="ignore")
    quietly = _quietly_in_context


def premultiply(array: Array, dtype: torch.dtype, factor: float) -> Array:
    """Multiply the elements of a private flat array by `factor`, in place, and return it."""
    if dtype in _HALVES:
        torch.from_numpy(array).view(dtype).mul_(factor)  # computed in float32
    else:
        quietly(_multiply, array, factor)
    return array


def _multiply(array: Array, factor: float) -> None:
    flat = array.view(array.real.dtype)  # complex numbers by their parts
    np.multiply(flat, flat.dtype.type(factor), flat)


class Reducer:
    """One reduce operation on one dtype: `reduce(parts, out, scratch)`.

    `parts` are flat arrays of the carrier dtype in rank order, `out` one of the same length; `out` may be `parts[0]`
    itself but must not share memory with a later part. `scratch` comes from `scratch(len(out))` or of a larger number.

    Attributes:
        is_wide: it works in another dtype than the tensors', and needs scratch.
    """

    __slots__ = ("_divide", "_dtype", "_op", "_ufunc", "_wide", "is_wide", "reduce")

    def __init__(self, op: int, dtype: torch.dtype, carrier: Carrier) -> None:
        self._op = op
        self._dtype = dtype
        self._ufunc = _NUMPY[op]
        self._divide = op == AVG
        kernel = self._plain
        self._wide: np.dtype[Any] | None = None  # in which sums run when it is not the tensors' own
        if dtype in _HALVES:
            kernel, self._wide = self._halves, np.dtype(np.float32)
        elif self._divide and carrier.dtype.kind in "iu":
            kernel, self._wide = self._integer_mean, np.dtype(np.uint64 if carrier.dtype == np.uint64 else np.int64)
        self.is_wide = self._wide is not None
        ufunc, is_one_ufunc = self._ufunc, not self.is_wide and not self._divide

        def reduce(parts: Sequence[Array], out: Array, scratch: Scratch) -> None:
            if is_one_ufunc and len(parts) == 2 and out.nbytes <= BLOCK_BYTES:
                quietly(ufunc, parts[0], parts[1], out)  # two ranks and little data: one Python call less
            else:
                quietly(kernel, parts, out, scratch)

        self.reduce = reduce

    def scratch(self, count: int) -> Scratch:
        """Return working memory for up to `count` elements: the running sum and the next summand of a
        block.
        """
        if self._wide is None:
            return None
        length = min(count, BLOCK_BYTES // self._wide.itemsize)
        return np.empty(length, self._wide), np.empty(length, self._wide)

    def _plain(self, parts: Sequence[Array], out: Array, scratch: Scratch) -> None:
        count = len(out)
        block = BLOCK_BYTES // out.itemsize
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

    def _integer_mean(self, parts: Sequence[Array], out: Array, scratch: Scratch) -> None:
        assert scratch is not None
        sums, others = scratch
        block = len(sums)
        for first in range(0, len(out), block):
            last = min(len(out), first + block)
            total, other = sums[: last - first], others[: last - first]
            np.copyto(total, parts[0][first:last])
            for part in parts[1:]:
                np.copyto(other, part[first:last])  # a sum of two dtypes would be cast in buffers of numpy's own
                np.add(total, other, total)
            np.fmod(total, len(parts), other)  # has the sign of the sum, so the quotient truncates towards zero
            np.subtract(total, other, total)
            np.floor_divide(total, len(parts), total)
            np.copyto(out[first:last], total, casting="unsafe")

    def _halves(self, parts: Sequence[Array], out: Array, scratch: Scratch) -> None:
        """Reduce in float32, with torch: it converts many times faster than numpy.

        Any thread may do it. Its inference mode does not matter, as all tensors here are made here; dispatch modes do.
        """
        if num_dispatch_modes() or num_function_modes():
            with without_modes():
                self._halves_of(parts, out, scratch)
        else:
            self._halves_of(parts, out, scratch)

    def _halves_of(self, parts: Sequence[Array], out: Array, scratch: Scratch) -> None:
        assert scratch is not None
        total, other = torch.from_numpy(scratch[0]), torch.from_numpy(scratch[1])
        count, block = len(out), len(total)
        combine = _TORCH[self._op]
        for first in range(0, count, block):
            last = min(count, first + block)
            if last - first < len(total):
                total, other = total[: last - first], other[: last - first]
            total.copy_(self._half(parts[0], first, last))
            for part in parts[1:]:
                other.copy_(self._half(part, first, last))
                combine(total, other, out=total)
            if self._divide:
                total.div_(len(parts))
            self._half(out, first, last).copy_(total)

    def _half(self, array: Array, first: int, last: int) -> torch.Tensor:
        return _tensor(array[first:last]).view(self._dtype)


def _tensor(part: Array) -> torch.Tensor:
    """Return a tensor over a slice that is only read; torch would warn of a peer's memory, which cannot be written."""
    if not part.flags.writeable:
        part.flags.writeable = True
    return torch.from_numpy(part)
