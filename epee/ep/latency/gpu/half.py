"""The receive half of a `LatencyBuffer` call on GPUs: its hook, and its place among the calls that are open.

Protocol: a call's send half takes the next tag; its receive half may be launched later, in any order with those of
other calls of its kind. Each launch tells the kernel how many calls sent before are still open, and by how many the
count of received calls goes on. A crash leaves open calls to their time-outs; `close` and a new view forget them.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from ....errors import InvalidState
from .params import OP_COMBINE, OP_DISPATCH, RECEIVE_HALF

OPS = {OP_DISPATCH: "dispatch", OP_COMBINE: "combine"}


class HalfLaunch(NamedTuple):
    """The halves that a launch does, and its place: calls sent before it and not received, calls received with it."""

    halves: int
    ahead: int
    advance: int


class Half:
    """The receive half of a call, to be run once.

    Args:
        op: of the call.
        calls: of this kind that are open, in the order in which they were sent.
        join: lets the stream of the call follow that of the buffer.
        launch: starts the kernel.

    Attributes:
        is_done: whether it has run.
    """

    def __init__(
        self, op: int, calls: deque[Half], join: Callable[[], None], launch: Callable[[HalfLaunch], None]
    ) -> None:
        self._op, self._calls, self._join, self._launch = op, calls, join, launch
        self.is_done = False

    def __call__(self) -> None:
        """Receive, on the current stream.

        Raises:
            InvalidState: it has run, the buffer is closed, or the ranks have agreed on a view since.
        """
        if self.is_done:
            raise InvalidState(f"{OPS[self._op]}: the hook has been called already")
        if self not in self._calls:
            raise InvalidState(f"{OPS[self._op]}: the buffer was closed, or went on in another view, before this hook")
        self._join()
        self.receive(RECEIVE_HALF)

    def receive(self, halves: int) -> None:
        """Launch `halves`; the kernels' count of received calls goes on when all calls before this one are received."""
        calls = self._calls
        ahead = calls.index(self)
        advance = 0
        if ahead == 0:
            advance = 1 + sum(
                1 for _ in itertools.takewhile(lambda other: other.is_done, itertools.islice(calls, 1, None))
            )
        self._launch(HalfLaunch(halves, ahead, advance))
        self.is_done = True
        for _ in range(advance):
            calls.popleft()
