"""Who is lost, of this host and of others: pidfds here, ended links and dead gateways there.

A rank of this host is dead when its pidfd says so. Of other hosts nothing is proved here; a rank counts as lost when
its gateway on this host has lost the link to it (LIFE_LOST in the mirror), when that gateway is dead, or when this rank
has lost its own link to it: in all three cases nothing more is heard of it, or it hears nothing of this host any more.
"""

from __future__ import annotations

from ...view.process.detector import DeathWatch
from ..outbox import LIFE, LIFE_LOST, Outboxes, has_left
from .exports import Exports


class HostsWatch(DeathWatch):
    """Watches the ranks of a group over several hosts."""

    _exports: Exports | None = None

    def attach(self, box: Outboxes, exports: Exports) -> None:
        """Take what says how remote ranks are."""
        self._box, self._exports = box, exports

    def dead(self, wait_s: float = 0.0) -> tuple[int, ...]:
        """Return the ranks that are proved dead, or lost, ascending."""
        here = super().dead(wait_s)
        exports = self._exports
        if exports is None:
            return here
        topology, words = exports.topology, self._box.words
        lost = [
            rank
            for rank in topology.elsewhere
            if words[rank][LIFE] == LIFE_LOST
            or (topology.gateway(rank, topology.host) in here and not has_left(words[rank]))
        ]
        return tuple(sorted({*here, *lost, *(rank for rank in exports.lost if not has_left(words[rank]))}))
