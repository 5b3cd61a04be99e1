"""The roles of ranks between the hosts of a group while some ranks are lost: pure functions of placement and view.

A rank of a view that shares a host with a lost one has seen everything that this one published: it maps the same
memory.

    gateway   of a source on another host: the rank at the source's original position there (`topology.py`), else the
              next living rank of that host, cyclically. It maintains the mirror of the source for its host.
    `keeper`  the gateway of a lost source: it answers for the source's mirror on a host.
    `teller`  the rank that sends a source's words to its gateways: the source itself while it is a member, else its
              successor, the lowest living rank of its host that has not joined after it. Where none of them is left
              the source is *unwitnessed*, and the decision says what counts of it (`view/protocol/outcome.py`, cuts).

All ranks that know the same view derive the same roles. A rank plays its roles from the moment that it learns of a
view, whether or not it is in a call.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from .topology import Topology


class Roles:
    """The roles in one view.

    Args:
        topology: the hosts of all ranks, lost ranks included.
        present: the ranks of the view.
        since: rank -> the epoch since which it takes part; for lost ranks, the epoch in which they joined. None: all
        from the creation of the group.

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
        """Return the rank on `host` that receives the data of `source`, a rank of another host; None: `host` has no
        living rank."""
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
        """Return the rank that maintains the mirror of a rank of another host for this rank's host."""
        return self.gateway(source, self.topology.host)

    def is_kept_here(self, source: int) -> bool:
        """Return whether this rank maintains the mirror of `source` for its host."""
        return not self.topology.is_here(source) and self.keeper(source) == self.topology.rank

    def teller(self, source: int) -> int | None:
        """Return the rank that sends the data of `source`; None: it is unwitnessed."""
        if source in self.present:
            return source
        heirs = self.living(self.topology.host_of[source])
        return next((rank for rank in heirs if self.since.get(rank, 0) <= self.since.get(source, 0)), None)

    def is_witnessed(self, source: int) -> bool:
        """Return whether a living rank has seen everything that `source` had published."""
        return self.teller(source) is not None

    def living(self, host: int) -> tuple[int, ...]:
        """Return the ranks of a host that are in the view, ascending."""
        return tuple(rank for rank in self.topology.hosts[host] if rank in self.present)

    def partners(self) -> tuple[int, ...]:
        """Return the living ranks with which this one has links for the data of living ranks: wanted by both ends."""
        kept = {source for source in self.topology.elsewhere if source in self.present and self.is_kept_here(source)}
        return tuple(sorted({*self.gateways().values(), *kept}))
