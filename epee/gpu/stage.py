"""One kernel of a prepared call: its arguments, of which a call writes only those of its own.

Data path: a plan (`throughput/gpu/dispatch.py`, `combine.py`) makes its stages once for calls with the same cache key,
with all arguments that follow from the key; a call writes its own addresses and numbers (`call_words`), then launches.
The driver, or a graph that is being recorded, copies the arguments at the launch, so the next call may overwrite them
at once.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import partial
from typing import Any

from .params import HANDLE_BYTES
from .platform import Launcher
from .shapes import LaunchShape

_FIRST_OF_HANDLE = "send_prefix"


class Stage:
    """A kernel and its launch parameters.

    Args:
        kernel: for which this makes a launcher with its own arguments.
        grid: blocks.
        shape: of a block.
        mode: as in `Launcher`, when the GPU has room for it.

    Attributes:
        args: its arguments.
        call: the `Call` in them.
        sizes: grid, block and shared bytes.
        beside: what the launch was fitted to last, for whoever launches it.
        mode_beside: the mode that this gave.
    """

    __slots__ = ("args", "beside", "call", "kernel", "mode", "mode_beside", "sizes")

    def __init__(self, kernel: Launcher, grid: int, shape: LaunchShape, mode: str = "plain") -> None:
        self.kernel = kernel.bind()
        self.sizes, self.mode = (grid, shape.block, shape.shared_bytes), mode
        self.beside: object = None
        self.mode_beside = "plain"
        self.args: Any = self.kernel.args
        self.call: Any = first_part(self.args).call


def call_words(args: Any, fields: str) -> Callable[..., None]:
    """Return the function that writes a call's own words in one copy: its number, its timeout, then `fields`.

    Args:
        args: the struct of a kernel, which has all of them adjacent, after the constants of its `Call`.
        fields: names in the order of the struct; "handle" is the addresses of a handle's parts, as bytes.
    """
    kind, start = type(args), type(args).call.offset + type(args.call).ordinal.offset
    at, form = start + 16, "=QQ"
    for name in fields.split():
        first = _FIRST_OF_HANDLE if name == "handle" else name
        size = HANDLE_BYTES if name == "handle" else getattr(kind, name).size
        assert getattr(kind, first).offset == at, f"{kind.__name__}.{first} does not follow"
        form += f"{size}s" if name == "handle" else {4: "i", 8: "Q"}[size]
        at += size
    return partial(struct.Struct(form).pack_into, memoryview(args).cast("B"), start)


def first_part(args: Any) -> Any:
    """Return the arguments that begin with the `Call`: of a kernel that replaces two, those of the first; of a kernel
    between hosts, those that all of these have."""
    if hasattr(args, "call"):
        return args
    return args.layout if hasattr(args, "layout") else args.host
