"""The receive half of a call of the latency mode on GPUs: its hook, and its place among the calls that are open.

Protocol: a call's send half takes the next tag; its receive half may be launched later, in any order with those of
other calls of its kind. Each launch tells the kernel how many calls sent before are still open, and by how many the
count of received calls goes on. A crash leaves open calls to their time-outs; `close` and a new view forget them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from ....errors import InvalidState
from .params import OP_COMBINE, OP_DISPATCH, RECEIVE_HALF

if TYPE_CHECKING:
    from .core import LatencyCore

OPS = {OP_DISPATCH: "dispatch", OP_COMBINE: "combine"}


class Turn(NamedTuple):
    """Which halves a launch does, and its place: calls sent before it and not received, calls received with it."""

    halves: int
    ahead: int
    advance: int


class Half:
    """The receive half of a call, to be run once."""

    def __init__(self, core: LatencyCore, op: int, launch: Callable[[Turn], None]) -> None:
        self._core, self._op, self._launch = core, op, launch
        self._is_done = False

    def __call__(self) -> None:
        """Receive, on the current stream.

        Raises:
            InvalidState: it has run, the buffer is closed, or the ranks have agreed on a view since.
        """
        if self._is_done:
            raise InvalidState(f"{OPS[self._op]}: the hook has been called already")
        if self._core.is_closed or self not in self._core._open[self._op]:
            raise InvalidState(f"{OPS[self._op]}: the buffer was closed, or went on in another view, before this hook")
        self._core._join()
        self.receive(RECEIVE_HALF)

    def receive(self, halves: int) -> None:
        """Launch `halves`; the kernels' count of received calls goes on when all calls before this one are received."""
        calls = self._core._open[self._op]
        ahead = calls.index(self)
        advance = 0
        if ahead == 0:
            advance = 1 + sum(
                1 for _ in itertools.takewhile(lambda other: other._is_done, itertools.islice(calls, 1, None))
            )
        self._launch(Turn(halves, ahead, advance))
        self._is_done = True
        for _ in range(advance):
            calls.popleft()
