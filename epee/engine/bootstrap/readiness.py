"""The last step of a creation, which needs no store: each rank publishes that it has mapped all outboxes."""

from __future__ import annotations

import time
from collections.abc import Callable

from ...errors import CommTimeoutError
from ...view.process.detector import DeathWatch
from ..outbox import LIFE, LIFE_BORN, LIFE_FAILED, LIFE_READY, Outboxes
from .attempt import BootstrapAttempt, died


def await_all(
    this: BootstrapAttempt, box: Outboxes, watch: DeathWatch, deadline: float, check: Callable[[], None]
) -> None:
    """Publish that this rank has mapped all outboxes; wait until all have. `check` raises errors reported meanwhile."""
    box.exports.publish(box, LIFE, LIFE_READY)
    pause = 0.0001
    for peer in box.peers:
        while box.words[peer][LIFE] == LIFE_BORN:
            dead = watch.dead()
            if dead:
                raise this.heard(watch) or died(this.rank, dead)
            _raise_if_failed(this, box, watch)
            check()
            if time.monotonic() > deadline:
                raise CommTimeoutError(f"init (rank={box.rank}): rank {peer} did not get ready in time", [peer])
            time.sleep(pause)
            pause = min(2 * pause, 0.005)
    _raise_if_failed(this, box, watch)


def _raise_if_failed(this: BootstrapAttempt, box: Outboxes, watch: DeathWatch) -> None:
    for peer in box.peers:
        if box.words[peer][LIFE] == LIFE_FAILED:
            raise this.failure_of(peer, watch)
