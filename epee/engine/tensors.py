"""Tensors on the data path: flat numpy arrays of a carrier dtype.

numpy is used for what moves bytes because one call costs a fifth of torch's, because a background thread that is
inside numpy when the interpreter exits does no harm (inside torch it ends the process with SIGABRT), and because it
ignores torch's thread-local modes (`arrays.py`). Dtypes that numpy lacks travel as integers of the same size; the
reductions know the original dtype (`reduce.py`).

Inputs may have any strides. Outputs may have any strides that do not overlap: they are filled through a contiguous
copy when the call commits. An invalid argument raises an error that names it, before anything is sent.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ..arrays import Array as Array  # the other modules of the backend import it from here
from ..arrays import array_of, copy_array, flat_array
from ..errors import EpeeError, InvalidArgument, UnsupportedError
from .signature import DTYPE_CODE


class NeedsStaging(EpeeError):
    """A tensor lies on a GPU: the call is to be run on copies of it (`staging.py`). Every caller catches this error."""


class Carrier(NamedTuple):
    """The code of a torch dtype in headers, and the numpy dtype of the same size that stands for it."""

    code: int
    dtype: np.dtype[Any]


_DIRECT = {
    "bool": np.bool_,
    "uint8": np.uint8,
    "int8": np.int8,
    "int16": np.int16,
    "int32": np.int32,
    "int64": np.int64,
    "float32": np.float32,
    "float64": np.float64,
    "complex64": np.complex64,
    "complex128": np.complex128,
    "uint16": np.uint16,
    "uint32": np.uint32,
    "uint64": np.uint64,
}
_BY_SIZE = {1: np.int8, 2: np.int16, 4: np.int32}

MAX_OVERLAP_SEARCH = 1 << 16  # elements; some milliseconds


def _carriers() -> dict[torch.dtype, Carrier]:
    table = {}
    for name, code in DTYPE_CODE.items():
        dtype = getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype):
            continue  # "none", and dtypes that this torch does not have
        carrier = _DIRECT.get(name) or _BY_SIZE[dtype.itemsize]
        table[dtype] = Carrier(code, np.dtype(carrier))
    return table


CARRIERS = _carriers()


def carrier_of(tensor: torch.Tensor, name: str) -> Carrier:
    """Check that `tensor` can be communicated at all and return its carrier.

    Raises:
        InvalidArgument: not a strided tensor of a supported dtype with storage.
        NeedsStaging: it lies on a GPU.
        UnsupportedError: a device that this build does not serve.
    """
    carrier = CARRIERS.get(tensor.dtype)
    if carrier is not None and tensor.is_cpu and tensor.layout is torch.strided:
        return carrier
    if tensor.layout is not torch.strided:
        raise InvalidArgument(f"{name} must be a strided tensor, got {tensor.layout}; call .to_dense()")
    if tensor.device.type == "meta":
        raise InvalidArgument(f"{name} must have data, got a meta tensor")
    if tensor.is_cuda:
        raise NeedsStaging(f"{name} lies on {tensor.device}; this call takes CPU tensors; move it with .cpu()")
    if not tensor.is_cpu:
        raise UnsupportedError(
            f"{name} lies on {tensor.device}; epee's backend serves CPU and CUDA tensors; move it with .cpu() "
            "or use another backend for that device"
        )
    raise InvalidArgument(f"{name} has dtype {tensor.dtype}, which cannot be communicated; convert it first")


def source(tensor: torch.Tensor, carrier: Carrier) -> Array:
    """Return the values of an input as a flat array: a view when it is contiguous, else a copy."""
    if tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
        return flat_array(tensor, carrier.dtype)
    lazy = _lazy(tensor)
    values = np.empty(tuple(tensor.shape), carrier.dtype)
    copy_array(values, array_of(tensor, carrier.dtype))
    flat = values.reshape(-1)
    if lazy is not None:
        lazy.apply(flat)
    return flat


class _Lazy(NamedTuple):
    """A lazy transformation that torch has not applied to a tensor's memory yet: conjugation, negation or both."""

    dtype: torch.dtype
    is_conj: bool
    is_neg: bool

    def apply(self, values: Array) -> None:
        """Convert a flat array of elements between memory order and visible values, in either direction."""
        size = self.dtype.itemsize // 2 if self.dtype.is_complex else self.dtype.itemsize
        if not self.dtype.is_complex and not self.dtype.is_floating_point:
            np.negative(values, out=values)
            return
        bits = values.view(f"i{size}")
        sign = np.iinfo(bits.dtype).min
        if self.is_neg:
            bits ^= sign
        if self.is_conj:
            bits[1::2] ^= sign


def _lazy(tensor: torch.Tensor) -> _Lazy | None:
    is_conj, is_neg = tensor.is_conj(), tensor.is_neg()
    return _Lazy(tensor.dtype, is_conj, is_neg) if is_conj or is_neg else None


class Target:
    """The destination of a result: a call writes `array` at commit, and `finish` copies it to a strided tensor.

    A result is written by whichever thread ends the call, and nothing may fail at that point: numpy writes it, which
    is affected neither by inference mode nor by a dispatch mode of that thread.
    """

    __slots__ = ("_lazy", "_seen", "_strided", "array")

    def __init__(self, array: Array, tensor: torch.Tensor | None = None, carrier: Carrier | None = None) -> None:
        """`tensor`: the tensor that `finish` writes if it is not `array` itself; its dtype is that of `carrier`."""
        self.array = array
        self._strided: Array | None = None
        self._lazy: _Lazy | None = None
        if tensor is not None and carrier is not None:
            self._strided, self._lazy = array_of(tensor, carrier.dtype), _lazy(tensor)
            self._seen = array if self._lazy is None else np.empty_like(array)

    def finish(self) -> None:
        """Copy a contiguous result into the tensor that the user gave; this allocates nothing, and may be repeated."""
        strided = self._strided
        if strided is None:
            return
        if self._lazy is not None:
            np.copyto(self._seen, self.array)
            self._lazy.apply(self._seen)
        copy_array(strided, self._seen.reshape(strided.shape))


def target(tensor: torch.Tensor, carrier: Carrier, name: str) -> Target:
    """Return the destination for results that belong into `tensor`.

    Raises:
        InvalidArgument: elements of `tensor` share memory (an expanded or overlapping view).
    """
    if tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
        return Target(flat_array(tensor, carrier.dtype))
    refuse_overlap(tensor, name)
    return Target(np.empty(tensor.numel(), carrier.dtype), tensor, carrier)


def in_place(tensor: torch.Tensor, carrier: Carrier, name: str) -> Target:
    """Return a destination as `target` does, for a tensor that is input and output: a copy has the present values."""
    if tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
        return Target(flat_array(tensor, carrier.dtype))
    return private(tensor, carrier, name)


def private(tensor: torch.Tensor, carrier: Carrier, name: str) -> Target:
    """Return a copy of the present values of `tensor` as a destination for results; `finish` copies it to `tensor`."""
    refuse_overlap(tensor, name)
    values = source(tensor, carrier)
    if tensor.is_contiguous():
        values = values.copy()
    return Target(values, tensor, carrier)


def refuse_overlap(tensor: torch.Tensor, name: str) -> None:
    """Raise `InvalidArgument` when two elements of `tensor` share memory, or may and are too many to check."""
    reach = 0
    steps = sorted((s, e) for s, e in zip(tensor.stride(), tensor.shape, strict=True) if e > 1)
    for stride, extent in steps:
        if stride <= reach:
            break
        reach += stride * (extent - 1)
    else:
        return  # each dimension steps over all that the smaller ones reach
    is_expanded = bool(steps) and steps[0][0] == 0  # dimensions of one element may have any stride
    if tensor.numel() == 0 or (not is_expanded and _is_distinct(tensor)):
        return
    sure = is_expanded or tensor.numel() <= MAX_OVERLAP_SEARCH
    raise InvalidArgument(
        f"{name} must not overlap itself, got shape {tuple(tensor.shape)} with strides {tensor.stride()}"
        f"{'' if sure else ', which may overlap'}; call .contiguous() and use the copy"
    )


def _is_distinct(tensor: torch.Tensor) -> bool:
    """Check the offset of every element; False when two are equal, or when there are too many to check."""
    if tensor.numel() > MAX_OVERLAP_SEARCH:
        return False
    places = np.zeros((), np.int64)
    for stride, extent in zip(tensor.stride(), tensor.shape, strict=True):
        places = places[..., None] + stride * np.arange(extent, dtype=np.int64)
    return len(np.unique(places)) == places.size


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first byte that `tensor` covers and the end; (0, 0) when it is empty."""
    if tensor.numel() == 0:
        return 0, 0
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return start, start + tensor.nbytes
    extent = 1 + sum((e - 1) * s for e, s in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + extent * tensor.itemsize


def overlap(first: torch.Tensor, second: torch.Tensor) -> bool:
    """True when the memory ranges of two tensors meet (strided ones may meet without sharing an element)."""
    if first.is_contiguous() and second.is_contiguous():
        start, other = first.data_ptr(), second.data_ptr()
        return start < other + second.nbytes and other < start + first.nbytes
    start_a, end_a = span(first)
    start_b, end_b = span(second)
    return start_a < end_b and start_b < end_a


def refuse_shared(outputs: Sequence[torch.Tensor], name: str) -> None:
    """Raise `InvalidArgument` when two of the outputs share an element."""
    spans = sorted((*span(tensor), position) for position, tensor in enumerate(outputs) if tensor.numel())
    for (_, end, position), (start, _, other) in itertools.pairwise(spans):
        if start >= end:
            continue
        if all(outputs[i].is_contiguous() for i in (position, other)) or _share_element(outputs, spans):
            raise InvalidArgument(f"{name}: entries {position} and {other} share memory; give each its own tensor")
        return  # interleaved views: the exact check covered all of them


def _share_element(outputs: Sequence[torch.Tensor], spans: list[tuple[int, int, int]]) -> bool:
    """Mark every byte that each output covers; exact, and only reached for interleaved strided outputs."""
    first, end = spans[0][0], max(span[1] for span in spans)
    seen = np.zeros(end - first, dtype=np.bool_)
    for tensor in outputs:
        if tensor.numel() == 0:
            continue
        size = tensor.itemsize
        window = np.lib.stride_tricks.as_strided(
            seen[tensor.data_ptr() - first :],
            shape=(*tensor.shape, size),
            strides=(*(stride * size for stride in tensor.stride()), 1),
        )
        if window.any():
            return True
        window[...] = True
    return False
