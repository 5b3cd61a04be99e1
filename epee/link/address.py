"""The address under which ranks of other hosts reach this process, and the socket that listens there.

In this order: the value set by the program (`set_host_ip`, else EPEE_HOST_IP); the first address of the interfaces that
it allows (`set_device_filter`: names of interfaces, or of RDMA devices, whose interfaces are meant); the address from
which this process reaches the rendezvous. A socket is bound to that address alone, never to all.
"""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from .. import env
from ..errors import InvalidArgument, ResourceError, expected, ignored
from .nixl.devices import nearest_device, rdma_devices

BACKLOG = 256
_SIOCGIFADDR, _SIOCGIFMTU = 0x8915, 0x8921  # linux/sockios.h
_NOWHERE = "192.0.2.1"  # of RFC 5737: a route there is the default route; nothing is sent


class AddressChoice(NamedTuple):
    """An address for links, and the source of the choice, for people."""

    address: str
    reason: str


@dataclass
class _Settings:
    host_ip: str = ""
    device_filter: tuple[str, ...] = ()


_settings = _Settings()


def set_host_ip(address: str) -> None:
    """Set the address under which peers on other hosts reach this process, for groups that are made from now on.

    Raises:
        InvalidArgument: not an IPv4 or IPv6 address, or the one that stands for all of a machine.
    """
    _settings.host_ip = _checked(address, "host ip")


def set_device_filter(names: Sequence[str]) -> None:
    """Allow only these interfaces or RDMA devices for groups over several hosts; an empty list allows all.

    Raises:
        InvalidArgument: not a list of names.
    """
    is_list = isinstance(names, Sequence) and not isinstance(names, (str, bytes))
    if not is_list or not all(isinstance(name, str) and name for name in names):
        raise InvalidArgument(f"device filter must be a list of device names, got {names!r}")
    _settings.device_filter = tuple(names)


def preferred_device(location: str = "") -> str:
    """Return the RDMA device nearest to a location, of those that pass the filter; "" when there is none.

    Args:
        location: "cpu:N", a NUMA node, or "cuda:N" (also "gpu:N"), a GPU. Of equally near devices, and for every other
            location, the first by name.
    """
    allowed = _settings.device_filter
    names = [device.name for device in rdma_devices() if not allowed or device.name in allowed]
    return nearest_device(location, names)


def allowed_devices() -> list[str]:
    """Return the devices that the filter allows, in UCX's notation: interfaces, or device:port of RDMA; empty: all."""
    ports = {device.name: device.ports for device in rdma_devices()}
    names = _settings.device_filter
    return [found for name in names for found in [f"{name}:{port}" for port in ports.get(name, ())] or [name]]


def own_address(store: Any = None) -> str:
    """Return the address for links of this process; see `choose_address`."""
    return choose_address(store).address


def choose_address(store: Any = None) -> AddressChoice:
    """Return the address for links of this process, and the source of the choice.

    Args:
        store: of the group; a `TCPStore` (or one behind prefixes) gives the address of the rendezvous.

    Raises:
        InvalidArgument: EPEE_HOST_IP is no address, or no allowed interface has one.
        ResourceError: no address was found.
    """
    if _settings.host_ip:
        return AddressChoice(_settings.host_ip, "set_host_ip")
    named = str(env.get("EPEE_HOST_IP"))
    if named:
        return AddressChoice(_checked(named, "EPEE_HOST_IP"), "EPEE_HOST_IP")
    if _settings.device_filter:
        return AddressChoice(_address_of_devices(_settings.device_filter), "set_device_filter")
    store_host, master = _rendezvous_of(store), str(env.get("MASTER_ADDR"))
    loopback: AddressChoice | None = None
    for place, reason in (
        (store_host, f"the route to the store at {store_host}"),
        (master, f"the route to MASTER_ADDR, {master}"),
        (_NOWHERE, "the default route"),
    ):
        address = _address_towards(place) if place else ""
        if address and (not _is_loopback(address) or place == "localhost" or _is_loopback(place)):
            return AddressChoice(address, reason)
        if address and loopback is None:  # a machine may resolve its own name to 127.0.1.1, where no other reaches it
            loopback = AddressChoice(address, reason)
    if loopback is not None:
        return loopback
    raise ResourceError(
        "no address was found under which ranks of other hosts could reach this process; set EPEE_HOST_IP"
    )


def interface_of(address: str) -> str:
    """Return the name of the interface that has an address of this machine, "" if none is known."""
    for _, name in socket.if_nameindex():
        if address in _addresses_of(name):
            return name
    return ""


def mtu_of(interface: str) -> int:
    """Return the largest packet of an interface, in bytes; 0 if it is unknown."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            found = fcntl.ioctl(probe, _SIOCGIFMTU, struct.pack("256s", interface.encode()[:15]))
        except expected(OSError):
            return 0
    return int(struct.unpack_from("i", found, 16)[0])


def listen(address: str, port: int = 0) -> socket.socket:
    """Return a non-blocking socket that listens at a port of this address alone; 0: one that is free.

    Raises:
        ResourceError: the address is none of this machine's, the port is taken, or no descriptor is left.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    except expected(OSError) as exc:
        raise ResourceError(f"cannot listen at {address}: {exc}; free descriptors") from exc
    try:
        if port:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of an earlier run linger
        listener.bind((address, port))
        listener.listen(BACKLOG)
    except expected(OSError) as exc:
        listener.close()
        raise ResourceError(
            f"cannot listen at {address}{f', port {port}' if port else ''}: {exc}; is it an address of this machine"
            f"{', and the port free' if port else ''}? EPEE_HOST_IP or set_host_ip names another address"
        ) from exc
    return listener


def _checked(address: str, what: str) -> str:
    try:
        if not isinstance(address, str):  # `ip_address` takes numbers and bytes
            raise ValueError("no text")
        found = ipaddress.ip_address(address)
    except expected(ValueError) as exc:
        raise InvalidArgument(f"{what} must be an IPv4 or IPv6 address, got {address!r}") from exc
    if found.is_unspecified or found == ipaddress.ip_address("::ffff:0.0.0.0"):
        raise InvalidArgument(
            f"{what} must be one address, got {address!r}, which stands for all: a socket would listen to every "
            "network; name the interface's own"
        )
    return str(found)


def _is_loopback(place: str) -> bool:
    try:
        return ipaddress.ip_address(place).is_loopback
    except expected(ValueError):  # a name
        return False


def _rendezvous_of(store: Any) -> str:
    """Return the host of a store that has one."""
    for _ in range(8):  # prefixes may be nested
        host = getattr(store, "host", "")
        if isinstance(host, str) and host:
            return host
        store = getattr(store, "underlying_store", None)
        if store is None:
            break
    return ""


def _address_towards(place: str) -> str:
    """Return the own address of the route to a host, "" if there is none."""
    try:
        family, kind, _, _, where = socket.getaddrinfo(place, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(where)  # of a datagram socket: looks up the route, sends nothing
            return str(probe.getsockname()[0])
    except expected(OSError):
        return ""


def _address_of_devices(names: Sequence[str]) -> str:
    for name in names:
        for interface in _interfaces_of(name):
            for address in _addresses_of(interface):
                return address
    raise InvalidArgument(
        f"none of the devices {', '.join(names)} has an address for links between hosts; name an interface of "
        "/sys/class/net, or set the address itself (set_host_ip)"
    )


def _interfaces_of(name: str) -> list[str]:
    net = Path(f"/sys/class/infiniband/{name}/device/net")
    return sorted(path.name for path in net.iterdir()) if net.is_dir() else [name]


def _addresses_of(interface: str) -> Iterator[str]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, ignored(OSError):  # it has none of this kind
        found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        yield socket.inet_ntoa(found[20:24])
    table = Path("/proc/net/if_inet6")
    for line in table.read_text().splitlines() if table.is_file() else ():
        digits, _, _, scope, _, name = line.split()
        if name == interface and scope == "00":
            yield str(ipaddress.ip_address(bytes.fromhex(digits)))
