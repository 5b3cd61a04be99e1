"""What a call of mode "mask" on the GPUs returns: it also tells whom it has lost."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from ...backend.engine.engine import Engine
from ...backend.work import is_loss
from ...errors import CommTimeoutError, PeerError
from ...untraced import untraced_methods
from ..work import NAP_S, DeviceWork


@untraced_methods
class MaskedWork(DeviceWork):
    """See there.

    Args:
        engine: of the group.
        before: the ranks that took part when the call was made, as far as the host knew.
        present: returns those that take part now.
        rest: of `DeviceWork`.

    Attributes:
        engine: of the group.
    """

    def __init__(self, engine: Engine, before: set[int], present: Callable[[], set[int]], *rest: Any) -> None:
        super().__init__(*rest)
        self.engine = engine
        self._before, self._present = before, present

    @property
    def num_ranks(self) -> int:
        """Return the size of the group."""
        return self.engine.box.group_size

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait as `DeviceWork.wait`; where the group reports losses, one that ends the call raises nothing."""
        try:
            return super().wait(timeout)
        except PeerError as exc:
            if self.engine.reports_losses and is_loss(exc):
                self._join()
                return True
            raise

    def lost_ranks(self) -> set[int]:
        """Return the ranks that this call has lost, or one behind it has so far; waits for the GPU.

        Raises:
            CommTimeoutError: the GPU has not come past the call within twice the group's time-out.
        """
        deadline = time.monotonic() + 2 * self.engine.timeout_s
        while not self.is_completed():
            if time.monotonic() > deadline:
                raise CommTimeoutError("the GPU has not ended the call within twice the group's time-out")
            time.sleep(NAP_S)
        failed = set(getattr(self._error, "ranks", ()))
        return failed | (self._before - self._present())

    def contributors(self) -> set[int]:
        """Return the ranks that take part in the call; waits for the GPU."""
        return self._before - self.lost_ranks()
