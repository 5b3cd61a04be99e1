"""The assignment of ranks to hosts, and the receivers between hosts: pure functions of the published host keys.

A *host* is a set of ranks that share memory and see each other's processes (`view/process/machine.py`). Hosts are
numbered by their lowest rank; the *position* of a rank is its index among the ranks of its host, ascending.

The data of rank s for the ranks of another host goes to one of them, its *gateway* there: the rank at position
(position of s) modulo (ranks of that host). With equally many ranks on each host every rank is the gateway of one rank
per host and has it as its own gateway; together they are a *rail*. All of it is the same on all ranks, as they hold the
same keys.

A view that adds ranks begins a new placement, of its members (`moved`): a joiner knows no other ranks. The numbers of
the hosts then differ between ranks; what ranks must agree on depends on ranks alone.

While some ranks are lost the roles of the others follow from placement and view (`Roles`). A rank of a view that shares
a host with a lost one has seen everything that this one published: it maps the same memory.

    gateway   of a source on another host: the rank at the source's original position there, else the
              next living rank of that host, cyclically. It maintains the mirror of the source for its host.
    `keeper`  the gateway of a lost source: it answers for the source's mirror on a host.
    `teller`  the rank that sends a source's words to its gateways: the source itself while it is a member, else its
              successor, the lowest living rank of its host that has not joined after it. Where none of them is left
              the source is *unwitnessed*, and the decision says what counts of it (`view/protocol/outcome.py`, cuts).

All ranks that know the same view derive the same roles. A rank plays its roles from the moment that it learns of a
view, whether or not it is in a call.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property


def placement(hosts: Sequence[Sequence[int]]) -> str:
    """Return the hosts of all ranks, for messages: "host 0: ranks 0-3; host 1: ranks 4, 6"; ranks are ascending."""
    return "; ".join(f"host {host}: {_named(ranks)}" for host, ranks in enumerate(hosts))


def _named(ranks: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"


def one_host(rank: int, num_ranks: int) -> Topology:
    """Return the placement of ranks that all run on one host."""
    return Topology(rank, ["0"] * num_ranks)


class Topology:
    """The hosts of a group's ranks, as one of the ranks sees them.

    Attributes:
        rank: this one.
        hosts: per host its ranks, ascending; initially hosts by their lowest rank. A host may have no rank left.
        host_of: per rank the index of its host; -1 of ranks without a host.
        host: the index of this rank's own.
        num_hosts: number of hosts.
    """

    def __init__(self, rank: int, keys: Sequence[str], known: Sequence[str] = ()) -> None:
        """Take the host key of every rank, in rank order, "" for none; `known`: of hosts that have numbers already."""
        ranks_of: dict[str, list[int]] = {key: [] for key in known}
        for peer, key in enumerate(keys):
            if key:
                ranks_of.setdefault(key, []).append(peer)
        self.rank = rank
        self._keys = tuple(ranks_of)
        self.hosts = tuple(tuple(ranks) for ranks in ranks_of.values())
        number = {key: host for host, key in enumerate(ranks_of)}
        self.host_of = tuple(number.get(key, -1) for key in keys)
        self.host = self.host_of[rank]
        self.num_hosts = len(self.hosts)

    def moved(self, key_of: Mapping[int, str]) -> Topology:
        """Return the placement of other ranks, by their host keys; hosts that have numbers here keep them."""
        keys = [key_of.get(rank, "") for rank in range(max([len(self.host_of), *(1 + rank for rank in key_of)]))]
        return Topology(self.rank, keys, self._keys)

    def key_of(self, rank: int) -> str:
        """Return the key of a rank's host."""
        return self._keys[self.host_of[rank]]

    @property
    def placement(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each host that has any, ascending; hosts by their lowest rank."""
        return tuple(sorted(ranks for ranks in self.hosts if ranks))

    @property
    def elsewhere(self) -> tuple[int, ...]:
        """The ranks of other hosts, ascending."""
        return tuple(peer for peer, host in enumerate(self.host_of) if host not in (self.host, -1))

    @cached_property
    def here(self) -> tuple[int, ...]:
        """The ranks of this host, including this one, ascending."""
        return self.hosts[self.host]

    def is_here(self, peer: int) -> bool:
        """Return whether a rank shares this rank's host."""
        return self.host_of[peer] == self.host

    def gateway(self, source: int, host: int) -> int:
        """Return the rank of `host` that receives the data of `source`, a rank of another host, for the ranks there."""
        there = self.hosts[host]
        return there[self.hosts[self.host_of[source]].index(source) % len(there)]

    def gateways(self) -> dict[int, int]:
        """Return per other host the gateway of this rank there."""
        return {host: self.gateway(self.rank, host) for host in range(self.num_hosts) if host != self.host}

    def sources(self) -> tuple[int, ...]:
        """Return the ranks of other hosts whose gateway this rank is, ascending."""
        return tuple(peer for peer in self.elsewhere if self.gateway(peer, self.host) == self.rank)

    def relayed(self) -> tuple[int, ...]:
        """Return the ranks whose records reach this host through this rank, ascending: itself, and `sources`."""
        return tuple(sorted((self.rank, *self.sources())))

    def partners(self) -> tuple[int, ...]:
        """Return the ranks that this one has a connection with: its gateways, and the ranks whose gateway it is."""
        return tuple(sorted({*self.gateways().values(), *self.sources()}))


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
