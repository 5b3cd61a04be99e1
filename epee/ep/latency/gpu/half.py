"""The receive phase of a `LatencyBuffer` call on GPUs: its hook, and its position among the open calls.

Protocol: a call's send phase takes the next tag; its receive phase may be launched later, in any order with those of
other calls of its kind. Each launch passes to the kernel how many calls sent before are still open, and by how many the
count of received calls advances. A crash leaves open calls to their timeouts; `close` and a new view drop them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from ....errors import InvalidState
from .params import OP_COMBINE, OP_DISPATCH

OPS = {OP_DISPATCH: "dispatch", OP_COMBINE: "combine"}


class Half:
    """The receive phase of a call, to be run once.

    Args:
        op: of the call.
        calls: of this kind that are open, in the order in which they were sent.
        launch: starts the kernel, given the call's position (calls sent before it and not received, calls received with
            it) and the argument of the call. None if it has run already, with the send phase.

    Attributes:
        is_done: whether it has run.
    """

    __slots__ = ("_calls", "_launch", "_op", "is_done")

    def __init__(self, op: int, calls: deque[Half], launch: Callable[[int, int, int | None], None] | None) -> None:
        self._op, self._calls, self._launch = op, calls, launch
        self.is_done = launch is None

    def __call__(self, quiet: int | None = None) -> None:
        """Receive, on the current stream; the kernels' count of received calls advances when all calls before this one
        are received.

        Args:
            quiet: what `GpuDevice.quiet_stream` has just returned.

        Raises:
            InvalidState: it has run, the buffer is closed, or the ranks have agreed on a view since.
        """
        if self._launch is None:
            raise InvalidState(f"{OPS[self._op]}: the hook has been called already")
        calls = self._calls
        ahead = advance = 0
        if calls and calls[0] is self:
            advance = 1
            while advance < len(calls) and calls[advance].is_done:
                advance += 1
        elif self in calls:
            ahead = calls.index(self)
        else:
            raise InvalidState(f"{OPS[self._op]}: the buffer was closed, or entered another epoch, before this hook")
        self._launch(ahead, advance, quiet)
        self.is_done, self._launch = True, None  # lets go of the tensors
        for _ in range(advance):
            calls.popleft()
