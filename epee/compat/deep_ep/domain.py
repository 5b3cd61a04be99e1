"""How many ranks there are along each kind of link: one host, so all of them along NVLink (or shared memory)."""

from __future__ import annotations

import torch.distributed as dist

from epee.ep import group_of


def get_physical_domain_size(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Return (RDMA ranks, NVLink ranks): 1 and the size of the group."""
    return 1, group_of(group).size()


def get_logical_domain_size(group: dist.ProcessGroup | None, allow_hybrid_mode: bool = True) -> tuple[int, int]:
    """Return (scale-out ranks, scale-up ranks): 1 and the size of the group."""
    return get_physical_domain_size(group)
