"""Creation of tensors by a call: uninitialised ones, others over the memory of an existing one, and lazy ones.

torch's public functions cost the cpu a few microseconds each, as they check modes, defaults and gradients. The
functions that torch's compiler calls in its generated code do only what is needed, for a fraction of that; they are
private, so where a torch lacks such a function the public one is used, and gives the same tensor.

Caller: a call of a buffer. It has made the buffer's GPU the current one then, as the private function makes a tensor
there. In inference mode private functions would make inference tensors of memory that belongs to no such tensor: there
the public ones are used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import torch

from ..torch_private import EMPTY_STRIDED, reinterpret_tensor

_cut = reinterpret_tensor
_is_inference: Callable[[], bool] = torch.is_inference_mode_enabled
Allocate = Callable[[], torch.Tensor]
_Made = TypeVar("_Made")


def allocator(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, strides: Sequence[int] | None = None
) -> Allocate:
    """Return a function that makes uninitialised tensors of a shape; to be made once for many.

    Args:
        shape, dtype: of the tensors.
        device: of the tensors, and the current one whenever one is made.
        strides: in elements; None for contiguous tensors.
    """
    size = tuple(shape)
    steps = _strides(size) if strides is None else tuple(strides)
    private = EMPTY_STRIDED.get(device.type)
    if private is not None:
        return partial(private, size, steps, dtype)
    return lambda: torch.empty_strided(size, steps, dtype=dtype, device=device)


def first_rows(matrix: torch.Tensor, shape: tuple[int, int], num_rows: int) -> torch.Tensor:
    """Return a tensor over the first rows of a contiguous matrix: a separate one, without a gradient path to the
    matrix.

    Operations on it do not count as a change of the matrix, or of other such tensors, for autograd. `shape`: of the
    matrix, as reading it from torch takes longer.
    """
    rows, columns = shape
    if rows == num_rows:
        return matrix.detach()
    if _cut is None or _is_inference():
        return matrix.detach().narrow(0, 0, num_rows)
    return _cut(matrix, (num_rows, columns), (columns, 1), 0)


def part_of(vector: torch.Tensor, start: int, length: int) -> torch.Tensor:
    """Return a tensor over a part of a contiguous vector, as `first_rows`."""
    if _cut is None or _is_inference():
        return vector.detach().narrow(0, start, length)
    return _cut(vector, (length,), (1,), start)


class Late(Generic[_Made]):
    """An attribute that is made when it is first read, and can be set: as `functools.cached_property`, without its
    lock. Of two threads that make one, both get the first."""

    def __init__(self, make: Callable[[Any], _Made]) -> None:
        self._make, self._name = make, make.__name__
        self.__doc__ = make.__doc__

    def __get__(self, holder: Any, kind: type | None = None) -> _Made:
        if holder is None:
            return self  # type: ignore[return-value]  # of the class
        made: _Made = holder.__dict__.setdefault(self._name, self._make(holder))
        return made


def _strides(size: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor, as torch computes them."""
    return torch.empty(size, dtype=torch.int8, device="meta").stride()
