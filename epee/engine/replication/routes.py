"""The other hosts of a group, as one of its ranks reaches them: where the ranks are, and who receives there."""

from __future__ import annotations

from ...link.topology import Topology


class Routes:
    """The gateways that receive a rank's stores.

    Attributes:
        topology: the host of each rank.
        gateways: per host the gateway that receives there; replaced as a whole when it changes.
    """

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.gateways: dict[int, int] = {}

    def add(self, host: int, gateway: int) -> None:
        """Reach a host from now on through this gateway."""
        self.gateways = {**self.gateways, host: gateway}

    def remove(self, gateway: int) -> None:
        """Reach no host through this gateway any more."""
        self.gateways = {host: other for host, other in self.gateways.items() if other != gateway}

    def gateway_of(self, rank: int) -> int | None:
        """Return the gateway on the host of a rank; None where that is this host."""
        return self.gateways.get(self.topology.host_of[rank])
