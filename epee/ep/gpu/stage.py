"""One kernel of a prepared call: its arguments, of which a call writes only what is its own.

Data path: a plan (`throughput/gpu/dispatch.py`, `combine.py`) makes its stages once for calls that are alike, with all
arguments that follow from what makes them alike; a call writes addresses and numbers of its own, then launches. The
driver, and a graph that is recorded, copy the arguments at the launch, so the next call may write at once.
"""

from __future__ import annotations

from typing import Any

from ..throughput.shapes import LaunchShape
from .params import HANDLE_BYTES
from .platform import Launcher


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


class HandlePlace:
    """Where a struct of arguments has the addresses of a handle's parts.

    Args:
        args: the struct.
    """

    __slots__ = ("_bytes", "_start")

    def __init__(self, args: Any) -> None:
        self._start = type(args).send_prefix.offset
        self._bytes = memoryview(args).cast("B")

    def write(self, addresses: bytes) -> None:
        """Write the addresses, all at once."""
        self._bytes[self._start : self._start + HANDLE_BYTES] = addresses


def first_part(args: Any) -> Any:
    """Return the arguments that begin with the `Call`: of a kernel that stands for two, those of the first."""
    return args if hasattr(args, "call") else args.layout
