"""Who does what between the hosts of a group while some of its ranks are lost: pure functions of placement and view.

A rank of a view that shares a host with a lost one has seen all that this one had said: it maps the very memory. So

    gateway   of a source on another host: the one at its original place there (`topology.py`), else the next living
              rank of that host, cyclically. It keeps the mirror of the source for its host.
    keeper    the same of a lost source: who answers for its mirror on a host.
    teller    who tells a source's words to gateways and keepers: the source itself while it is in, else its *heir*, the
              lowest living rank of its host that has not come after it. Where nobody of them is left it is
              *unwitnessed*, and what counts of it is said by the decision (`view/protocol/outcome.py`, cuts).

All ranks that know the same view come to the same roles. A rank plays its roles from the moment that it learns of a
view, whether or not it is in a call.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from .topology import Topology


class Roles:
    """The roles in one view.

    Args:
        topology: who is where, lost ranks included.
        present: the ranks of the view.
        since: rank -> the epoch since which it takes part; of the lost ones, when they came. None: all from the birth.

    Attributes:
        present: the same, as a set.
    """

    def __init__(self, topology: Topology, present: Collection[int], since: Mapping[int, int] | None = None) -> None:
        self.topology = topology
        self.present = frozenset(present)
        self.since = {} if since is None else since

    def without(self, lost: Collection[int]) -> Roles:
        """Return the roles when ranks have been lost."""
        return Roles(self.topology, self.present.difference(lost), self.since)

    def gateway(self, source: int, host: int) -> int | None:
        """Return who receives on `host` what is told of `source`, a rank of another host; None: nobody lives there."""
        there = self.topology.hosts[host]
        if not there:
            return None
        first = there.index(self.topology.gateway(source, host))
        turned = there[first:] + there[:first]
        return next((rank for rank in turned if rank in self.present), None)

    def gateways(self) -> dict[int, int]:
        """Return per other host with living ranks the gateway of this rank there."""
        found = {host: self.gateway(self.topology.rank, host) for host in range(self.topology.num_hosts)}
        return {host: rank for host, rank in found.items() if rank is not None and host != self.topology.host}

    def keeper(self, source: int) -> int | None:
        """Return who keeps the mirror of a rank of another host for this rank's host."""
        return self.gateway(source, self.topology.host)

    def is_kept_here(self, source: int) -> bool:
        """Return whether this rank keeps the mirror of `source` for its host."""
        return not self.topology.is_here(source) and self.keeper(source) == self.topology.rank

    def teller(self, source: int) -> int | None:
        """Return who tells what there is of `source`; None: it is unwitnessed."""
        if source in self.present:
            return source
        heirs = self.living(self.topology.host_of[source])
        return next((rank for rank in heirs if self.since.get(rank, 0) <= self.since.get(source, 0)), None)

    def is_witnessed(self, source: int) -> bool:
        """Return whether somebody lives who has seen all that `source` had said."""
        return self.teller(source) is not None

    def living(self, host: int) -> tuple[int, ...]:
        """Return the ranks of a host that are in the view, ascending."""
        return tuple(rank for rank in self.topology.hosts[host] if rank in self.present)

    def partners(self) -> tuple[int, ...]:
        """Return the living ranks that this one has links with for what living ranks tell: wanted by both ends."""
        kept = {source for source in self.topology.elsewhere if source in self.present and self.is_kept_here(source)}
        return tuple(sorted({*self.gateways().values(), *kept}))
