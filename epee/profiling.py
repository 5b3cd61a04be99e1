"""Calls as ranges of `torch.profiler`, and of NVTX where torch emits it (`torch.autograd.profiler.emit_nvtx`).

A range names the operation and its object (a buffer, a process group), the shape and dtype of its first tensor, and the
bytes of its first argument. That of an asynchronous call ends when the call has been issued. While no profiler runs a
call costs one query to torch: opening a range that is not recorded takes longer than a launch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch

from .torch_private import is_profiling as is_profiling

_P = ParamSpec("_P")
_R = TypeVar("_R")


def ranged(call: Callable[_P, _R]) -> Callable[_P, _R]:
    """Make a method a range while a profiler runs; rows are its first argument, if it has any."""

    @functools.wraps(call)
    def inner(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not is_profiling():
            return call(*args, **kwargs)
        with range_of(call.__name__.lstrip("_"), args):
            return call(*args, **kwargs)

    return inner


def range_of(op: str, args: tuple[Any, ...]) -> torch.profiler.record_function:
    """Return the range of a call, to be entered; see `label`."""
    return torch.profiler.record_function(label(op, args))


def label(op: str, args: tuple[Any, ...]) -> str:
    """Return the name of a range: `epee.Buffer.dispatch [128, 7168] bfloat16, 1835008 bytes`.

    Args:
        op: the method.
        args: its arguments in order: the object, then perhaps a tensor, or tensors in tuples and lists.
    """
    words = [f"epee.{type(args[0]).__name__}.{op}"]
    tensors = list(_tensors(args[1])) if len(args) > 1 else []
    if tensors:
        first = tensors[0]
        dtype = str(first.dtype).removeprefix("torch.")
        words.append(f"{list(first.shape)} {dtype}, {sum(map(_nbytes, tensors))} bytes")
    return " ".join(words)


def _nbytes(tensor: torch.Tensor) -> int:
    if tensor.layout is torch.sparse_coo:
        return tensor._indices().nbytes + tensor._values().nbytes
    return tensor.nbytes


def _tensors(given: object) -> Iterator[torch.Tensor]:
    if isinstance(given, torch.Tensor):
        yield given
    elif isinstance(given, (tuple, list)):
        for part in given:
            yield from _tensors(part)
