"""Numpy arrays over the memory of CPU tensors, made without a change of the tensor and independent of torch's modes.

`Tensor.numpy()` is different: it clears the flag that lets the tensor's storage be resized (FSDP frees parameters so),
and it goes through the dispatch modes of the calling thread, where `FakeTensorMode` gives it other memory. An array
made here is an address, a dtype, a shape and strides. It can therefore be read and written by any thread, in and
outside inference mode, under any dispatch mode. Calls on CPU tensors access users' memory only by such arrays.

An array keeps its tensor alive. Arrays are writable even where the tensor requires grad or is only to be read.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from .errors import InvalidArgument, expected
from .torch_private import MODE_GUARDS, is_fake, num_dispatch_modes

Array = np.ndarray[Any, Any]


class _Addresses(ctypes.c_char * (1 << 47)):  # type: ignore[misc]
    """All addresses of a process from one on; `np.ndarray` takes the array from it."""

    __slots__ = ("tensor",)  # lives as long as the arrays


_memory_at: Callable[[int], Any] = _Addresses.from_address
_new = np.ndarray
NUMPY_DTYPES = {
    torch.bool: np.dtype(np.bool_),
    torch.uint8: np.dtype(np.uint8),
    torch.int8: np.dtype(np.int8),
    torch.int16: np.dtype(np.int16),
    torch.int32: np.dtype(np.int32),
    torch.int64: np.dtype(np.int64),
    torch.float16: np.dtype(np.float16),
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
    torch.complex64: np.dtype(np.complex64),
    torch.complex128: np.dtype(np.complex128),
}
NUMPY_DTYPES |= {
    dtype: np.dtype(name)
    for name in ("uint16", "uint32", "uint64")
    if isinstance(dtype := getattr(torch, name, None), torch.dtype)
}
MIN_TRANSPOSED = 1 << 14  # elements; below that a copy in pieces gains nothing
TILE = 256


def flat_array(tensor: torch.Tensor, dtype: np.dtype[Any]) -> Array:
    """Return the memory of a contiguous CPU tensor as a flat array of a dtype of the same size.

    Raises:
        InvalidArgument: the tensor has no memory of its own (a fake tensor, a wrapper, a storage that was freed).
    """
    address = tensor.data_ptr()
    count = tensor.numel()
    if not count:
        return _new((0,), dtype)
    if not address:
        found = _behind_wrapper(tensor, dtype)
        if not found.flags.c_contiguous:
            raise _no_memory(tensor)
        return found.reshape(-1)
    if tensor.untyped_storage().nbytes() < count * dtype.itemsize:
        raise _no_memory(tensor)
    memory = _memory_at(address)
    memory.tensor = tensor
    return _new((count,), dtype, memory)


def array_of(tensor: torch.Tensor, dtype: np.dtype[Any] | None = None) -> Array:
    """Return the memory of a CPU tensor as an array with its shape and strides.

    A lazy conjugation or negation of the tensor is not applied.

    Args:
        tensor: to be read or written.
        dtype: of the array, of the same size as the tensor's; None: the tensor's, which numpy must have.

    Raises:
        InvalidArgument: as `flat_array`.
    """
    dtype = NUMPY_DTYPES[tensor.dtype] if dtype is None else dtype
    shape = tuple(tensor.shape)
    address = tensor.data_ptr()
    if not tensor.numel():
        return _new(shape, dtype)
    if not address:
        return _behind_wrapper(tensor, dtype)
    if not tensor.untyped_storage().nbytes():
        raise _no_memory(tensor)
    memory = _memory_at(address)
    memory.tensor = tensor
    return _new(shape, dtype, memory, 0, tuple(map(dtype.itemsize.__mul__, tensor.stride())))


def _behind_wrapper(tensor: torch.Tensor, dtype: np.dtype[Any]) -> Array:
    """Return the memory of the tensor inside a wrapper subclass with `__torch_dispatch__`, where numpy can access it.

    Raises:
        InvalidArgument: numpy cannot, or there is none.
    """
    if type(tensor) in (torch.Tensor, torch.nn.Parameter) or num_dispatch_modes():
        raise _no_memory(tensor)
    try:
        found: Array = tensor.detach().numpy()
    except expected(RuntimeError, TypeError, NotImplementedError):  # for example a fake tensor
        raise _no_memory(tensor) from None
    # numpy allocates where the address is 0
    if found.flags.owndata or found.shape != tuple(tensor.shape) or found.dtype.itemsize != dtype.itemsize:
        raise _no_memory(tensor)
    return found.view(dtype)


def require_memory(tensor: torch.Tensor, name: str) -> None:
    """Raise `InvalidArgument` where a tensor has elements and no memory for them."""
    if not tensor.data_ptr() and tensor.numel():
        raise InvalidArgument(f"{name}: {_no_memory(tensor)}")


def refuse_fake(tensor: torch.Tensor, name: str) -> None:
    """Raise `InvalidArgument` where a tensor is one of `FakeTensorMode`; wrappers around real ones are none."""
    if is_fake(tensor):
        raise InvalidArgument(f"{name}: {_no_memory(tensor)}")


def _no_memory(tensor: torch.Tensor) -> InvalidArgument:
    return InvalidArgument(
        f"a tensor of shape {tuple(tensor.shape)} ({type(tensor).__name__}) has no memory for its elements (a fake "
        "tensor, a wrapper around others, or one whose storage was freed); pass a tensor that has"
    )


def copy_array(destination: Array, source: Array) -> None:
    """Copy between arrays of one shape and dtype, of any strides, and allocate nothing.

    Numpy iterates along the destination. Where that means a cache line for each element of a transposed source, the
    matrix is copied tile by tile.
    """
    if destination.ndim == 2 and source.size > MIN_TRANSPOSED:
        (dst_row, dst_column), (src_row, src_column) = destination.strides, source.strides
        if (dst_row < dst_column) != (src_row < src_column):
            rows, columns = source.shape
            for row in range(0, rows, TILE):
                for column in range(0, columns, TILE):
                    part = slice(row, row + TILE), slice(column, column + TILE)
                    np.copyto(destination[part], source[part])
            return
    np.copyto(destination, source)


_AS_IS = contextlib.nullcontext()


def plain_tensors() -> Any:
    """Return a context for tensors that are written later: independent of inference mode and dispatch modes.

    A tensor made in inference mode could not be written outside of it, even if only the first caller is in that mode.
    """
    if torch.is_inference_mode_enabled() or num_dispatch_modes():
        return _plain_tensors()
    return _AS_IS


@contextlib.contextmanager
def _plain_tensors() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad(), without_modes():
        yield


def real_tensors() -> Any:
    """Return a context for calls on GPU tensors: torch's operators copy their memory, under all modes of the thread."""
    return without_modes() if num_dispatch_modes() else _AS_IS


def writing(tensor: torch.Tensor) -> Any:
    """Return a context in which `tensor` may be written, whether or not it is a tensor of inference mode."""
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        return torch.inference_mode()
    return _AS_IS


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Let torch's operators access memory, under all dispatch and function modes of the thread.

    For a thread that has some (`num_dispatch_modes`, `num_function_modes`). Torch has no public function to leave other
    code's modes; where it lacks the private one, they stay in force.
    """
    with contextlib.ExitStack() as guards:
        for guard in MODE_GUARDS:
            guards.enter_context(guard())
        yield
