"""Calls as ranges of `torch.profiler`, and of NVTX where torch emits it (`torch.autograd.profiler.emit_nvtx`).

A range tells what was called on what (a buffer, a process group), the shape and dtype of its first tensor, and the
bytes of its first argument. That of an asynchronous call ends when the call has been issued. While no profiler runs a
call pays for one question to torch: to open a range that nobody sees takes longer than a launch.

Such calls are also those that torch.compile stays out of (`untraced.py`). One function stands before each of them and
asks both questions: each further one would cost a call of few bytes 0.2 us, as it passes on arguments of any kind.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch

from .untraced import as_entry, is_compiling, untraced

_P = ParamSpec("_P")
_R = TypeVar("_R")
is_profiling: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]  # as torch asks itself


def ranged(call: Callable[_P, _R]) -> Callable[_P, _R]:
    """Make a method a range while a profiler runs; rows are its first argument, if it has any."""
    return entry(call, lambda args, kwargs: call(*args, **kwargs), call.__name__.lstrip("_"))


def entry(function: Callable[_P, _R], run: Callable[[Any, Any], Any], op: str) -> Callable[_P, _R]:
    """Return what is called in place of `function`: it is not traced into, and a range named `op` for a profiler.

    Args:
        function: a method.
        run: makes the call, of its arguments in order and by name.
        op: the operation.
    """

    @untraced
    def seen(args: Any, kwargs: Any) -> Any:
        """Make the call where a compiler or a profiler looks on."""
        if not is_profiling():
            return run(args, kwargs)
        with range_of(op, args):
            return run(args, kwargs)

    def call(*args: Any, **kwargs: Any) -> Any:
        """Make the call."""
        if ("torch._dynamo" in sys.modules and is_compiling()) or is_profiling():
            return seen(args, kwargs)
        return run(args, kwargs)

    return as_entry(function, call)


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
        words.append(f"{list(first.shape)} {dtype}, {sum(tensor.nbytes for tensor in tensors)} bytes")
    return " ".join(words)


def _tensors(given: object) -> Iterator[torch.Tensor]:
    if isinstance(given, torch.Tensor):
        yield given
    elif isinstance(given, (tuple, list)):
        for part in given:
            yield from _tensors(part)
