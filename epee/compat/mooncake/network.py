"""Settings of the network side, which groups on one host do not use: S1's names with a defined meaning.

They hold for the process and are meant to be set before a group is made.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...errors import InvalidArgument


@dataclass
class _Settings:
    device_filter: tuple[str, ...] = ()


_settings = _Settings()


def set_host_ip(address: str) -> None:
    """Check the address under which peers on other hosts would reach this process; groups on one host need none.

    Raises:
        InvalidArgument: not an IPv4 or IPv6 address.
    """
    try:
        ipaddress.ip_address(address)
    except ValueError as exc:
        raise InvalidArgument(f"host ip must be an IPv4 or IPv6 address, got {address!r}") from exc


def set_device_filter(names: Sequence[str]) -> None:
    """Allow only these RDMA devices; an empty list allows all. Groups on one host ignore it.

    Raises:
        InvalidArgument: not a list of names.
    """
    if isinstance(names, str) or not all(isinstance(name, str) and name for name in names):
        raise InvalidArgument(f"device filter must be a list of device names, got {names!r}")
    _settings.device_filter = tuple(names)


def get_preferred_hca(location: str = "") -> str:
    """Return the RDMA device to use (the first that exists and passes the filter), "" when there is none.

    `location` (such as "cpu:0" or "cuda:1") is accepted for compatibility; topology is not looked at.
    """
    folder = Path("/sys/class/infiniband")
    found = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    allowed = [name for name in found if not _settings.device_filter or name in _settings.device_filter]
    return allowed[0] if allowed else ""
