"""`deep_ep.comm` of DeepEP 2.5: properties of a buffer or a group, as functions."""

from __future__ import annotations

from typing import Any, NoReturn

from epee.compat.deep_ep import domain
from epee.compat.deep_ep.low_latency import unsupported

__all__ = [
    "barrier",
    "destroy_all_managed_nccl_comm",
    "get_comm_stream",
    "get_logical_domain_size",
    "get_nccl_comm_handle",
    "get_physical_domain_size",
]


def _group_of(group_or_buffer: Any) -> Any:
    return getattr(group_or_buffer, "group", group_or_buffer)


def get_physical_domain_size(group_or_buffer: Any) -> tuple[int, int]:
    """Return (RDMA ranks, NVLink ranks) of a group or a buffer; see `deep_ep.get_physical_domain_size`."""
    return domain.get_physical_domain_size(_group_of(group_or_buffer))


def get_logical_domain_size(group_or_buffer: Any, allow_hybrid_mode: bool = True) -> tuple[int, int]:
    """Return (scale-out ranks, scale-up ranks) of a group or a buffer; see `deep_ep.get_logical_domain_size`."""
    return domain.get_logical_domain_size(_group_of(group_or_buffer), allow_hybrid_mode)


def get_comm_stream(buffer: Any) -> Any:
    """Return the stream of the buffer's calls that return an event."""
    return buffer.get_comm_stream()


def barrier(
    buffer: Any, wait_comm_stream: bool = True, with_cpu_sync: bool = False, *args: object, **kwargs: object
) -> None:
    """Synchronise all ranks' streams; see `ElasticBuffer.barrier`. Collective. Other arguments are ignored."""
    buffer.barrier(with_cpu_sync=with_cpu_sync)


def destroy_all_managed_nccl_comm() -> None:
    """Do nothing: there are no NCCL communicators."""


def get_nccl_comm_handle(group: Any, force_new_comm: bool = False) -> NoReturn:
    """Raise `UnsupportedError`: there are no NCCL communicators."""
    unsupported("get_nccl_comm_handle", "epee has no NCCL communicators; give the process group itself")
