"""The last step of a creation, which needs no store: each rank publishes that it has mapped all outboxes."""

from __future__ import annotations

import time
from collections.abc import Callable

from ...errors import CommTimeoutError
from ...view.process.detector import DeathWatch
from ..outbox import LIFE, LIFE_BORN, LIFE_FAILED, LIFE_READY, PeerRegions
from .attempt import BootstrapAttempt, died


def await_all(
    this: BootstrapAttempt, peer_regions: PeerRegions, watch: DeathWatch, deadline: float, check: Callable[[], None]
) -> None:
    """Publish that this rank has mapped all outboxes; wait until all have. `check` raises errors reported meanwhile."""
    peer_regions.exports.publish(peer_regions, LIFE, LIFE_READY)
    pause = 0.0001
    for peer in peer_regions.peers:
        while peer_regions.words[peer][LIFE] == LIFE_BORN:
            dead = watch.dead()
            if dead:
                raise this.heard(watch) or died(this.rank, dead)
            _raise_if_failed(this, peer_regions, watch)
            check()
            if time.monotonic() > deadline:
                raise CommTimeoutError(
                    f"init (rank={peer_regions.rank}): rank {peer} did not get ready in time", [peer]
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.005)
    _raise_if_failed(this, peer_regions, watch)


def _raise_if_failed(this: BootstrapAttempt, peer_regions: PeerRegions, watch: DeathWatch) -> None:
    for peer in peer_regions.peers:
        if peer_regions.words[peer][LIFE] == LIFE_FAILED:
            raise this.failure_of(peer, watch)
