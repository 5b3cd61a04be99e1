"""Numbers of ranks along each kind of link: hosts (DeepEP's RDMA ranks), and ranks of a host (NVLink ranks).

DeepEP's two numbers also imply the location of each rank: rank r is NVLink rank r modulo n of host r // n, for n ranks
per host. So they exist only if all hosts have equally many ranks, numbered consecutively; torchrun starts them so.
"""

from __future__ import annotations

import torch.distributed as dist

from epee.backend import placement
from epee.ep import group_of, hosts_of

from ...errors import UnsupportedError


def get_physical_domain_size(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Return (RDMA ranks, NVLink ranks): the number of hosts, and the number of ranks on each.

    Local for groups of the backend "epee"; ranks of other groups exchange their hosts, as those groups do not know
    them.

    Raises:
        UnsupportedError: hosts have different numbers of ranks, or ranks of a host are not consecutive.
    """
    hosts = hosts_of(group_of(group))
    num_local = len(hosts[0])
    for host, ranks in enumerate(hosts):
        if ranks != tuple(range(host * num_local, (host + 1) * num_local)):
            raise UnsupportedError(
                "DeepEP's domain sizes need equally many ranks on all hosts, numbered in a row on each, got "
                f"{placement(hosts)}; start them so (torchrun with one --nproc-per-node does), or look at group.hosts"
            )
    return len(hosts), num_local


def get_logical_domain_size(group: dist.ProcessGroup | None, allow_hybrid_mode: bool = True) -> tuple[int, int]:
    """Return (scale-out ranks, scale-up ranks): the physical sizes; without the hybrid mode 1 and all ranks.

    Raises:
        As `get_physical_domain_size`, which it calls.
    """
    return logical_domain_size(get_physical_domain_size(group), allow_hybrid_mode)


def logical_domain_size(physical: tuple[int, int], allow_hybrid_mode: bool) -> tuple[int, int]:
    """Return the logical sizes that follow from the physical ones."""
    num_hosts, num_local = physical
    return physical if allow_hybrid_mode else (1, num_hosts * num_local)
