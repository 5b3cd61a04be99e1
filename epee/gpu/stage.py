"""One kernel of a prepared call: its arguments, of which a call writes only what is its own.

Data path: a plan (`throughput/gpu/dispatch.py`, `combine.py`) makes its stages once for calls that are alike, with all
arguments that follow from what makes them alike; a call writes addresses and numbers of its own (`call_words`), then
launches. The driver, and a graph that is recorded, copy the arguments at the launch, so the next call may write them at
once.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import partial
from typing import Any

from .params import HANDLE_BYTES, Call
from .platform import Launcher
from .shapes import LaunchShape

_FIRST_OF_HANDLE = "send_prefix"


class Stage:
    """A kernel and how it is launched.

    Args:
        kernel: of which this makes a launcher with arguments of its own.
        grid: blocks.
        shape: of a block.
        mode: as in `Launcher`.

    Attributes:
        args: its arguments.
        call: the `Call` in them.
    """

    __slots__ = ("args", "call", "grid", "kernel", "mode", "shape")

    def __init__(self, kernel: Launcher, grid: int, shape: LaunchShape, mode: str = "plain") -> None:
        self.kernel = kernel.bind()
        self.grid, self.shape, self.mode = grid, shape, mode
        self.args: Any = self.kernel.args
        self.call: Any = first_part(self.args).call


def call_words(args: Any, fields: str) -> Callable[..., None]:
    """Return what writes the words that are a call's own, all at once: its number, its time-out, then `fields`.

    Args:
        args: the struct of a kernel, which has all of them side by side, behind the constants of its `Call`.
        fields: names in the order in which they stand there; "handle" is the addresses of a handle's parts, as bytes.
    """
    kind, start = type(args), type(args).call.offset + Call.ordinal.offset
    at, form = start + 16, "=QQ"
    for name in fields.split():
        first = _FIRST_OF_HANDLE if name == "handle" else name
        size = HANDLE_BYTES if name == "handle" else getattr(kind, name).size
        assert getattr(kind, first).offset == at, f"{kind.__name__}.{first} does not follow"
        form += f"{size}s" if name == "handle" else {4: "i", 8: "Q"}[size]
        at += size
    return partial(struct.Struct(form).pack_into, memoryview(args).cast("B"), start)


def first_part(args: Any) -> Any:
    """Return the arguments that begin with the `Call`: of a kernel that stands for two, those of the first."""
    return args if hasattr(args, "call") else args.layout
