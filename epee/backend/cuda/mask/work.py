"""The work of a call of mode "mask" on the GPUs; it also reports the ranks that the call has lost."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from ....engine import Engine
from ....errors import PeerError, expected
from ....untraced import untraced_methods
from ...work import is_loss
from ..work import DeviceWork
from .counts import Count
from .losses import ranks_of


@untraced_methods
class MaskedWork(DeviceWork):
    """The work of a masked call, see the module.

    Args:
        engine: of the group.
        before: the ranks that took part when the call was made, as far as the cpu knew.
        count: word with the ranks in the result; None of a call that was recorded in a graph.
        present: returns the ranks that take part now.
        rest: of `DeviceWork`.

    Attributes:
        engine: of the group.
    """

    def __init__(
        self, engine: Engine, before: set[int], count: Count | None, present: Callable[[], set[int]], *rest: Any
    ) -> None:
        super().__init__(*rest)
        self.engine = engine
        self._before, self._count, self._present = before, count, present

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait as `DeviceWork.wait`; if the group reports losses, one that ends the call raises nothing."""
        try:
            return super().wait(timeout)
        except expected(PeerError) as exc:
            if self.engine.reports_losses and is_loss(exc):
                self.engine.membership.await_shown(exc.ranks)
                self._join()
                return True
            raise

    def lost_ranks(self) -> set[int]:
        """Return the ranks lost by this call, or by an earlier one without the cpu's knowledge; waits for the GPU.

        A rank that has died after its part is in the result, and is none of them. Of a call that was lost itself, or
        recorded in a graph: also the ranks that later calls have lost so far.

        Raises:
            CommTimeoutError: the GPU has not passed the call within twice the group's timeout.
        """
        return (self._before - self._ranks_in()).union(self._failed())

    def contributors(self) -> set[int]:
        """Return the ranks that are in the result, as `last_contributors` of the group; waits for the GPU."""
        return self._ranks_in()

    def _ranks_in(self) -> set[int]:
        self._await_passed("call")
        told = 0 if self._count is None or self._error is not None else self._count.ranks()
        if told:
            return {*ranks_of(told)}
        return (self._before & self._present()).difference(self._failed())

    def _failed(self) -> tuple[int, ...]:
        """Return the ranks that the error of `wait` names."""
        return tuple(getattr(self._error, "ranks", ()))
