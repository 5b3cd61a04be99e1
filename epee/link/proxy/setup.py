"""The messages between a rank and the processes of its proxy, over a socket that each process inherits: JSON.

    rank -> process   the setup, first and once; then requests
    process -> rank   one answer to each; `failed` without a request, before a process ends by an error

Requests are `offer` (listen for partners; the answer says where), `meet` (connect with all partners and serve them) and
`end`. The rank has started the process, so neither doubts the other; types are checked so that a mistake is an error
here. The token travels by this socket, never by arguments or the environment, which other users may see.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from ...errors import ProtocolError, expected
from ...view.transport.auth import Identity
from ...view.transport.wire import NONCE_BYTES
from ..meeting import Partner
from .words import ProxyShape

MAX_MESSAGE = 128 << 10  # below what a unix socket takes at once


@dataclass(frozen=True)
class ProxySetup:
    """The constants of one process of a proxy.

    Attributes:
        rank: of the job.
        process: index of this process.
        own: position of the rank in its island.
        island: (pid, start time) of the ranks of its island, by position.
        partners: ranks, ascending.
        address: to listen at.
        engine: one of `tcp.ENGINES`.
        covers_payloads: EPEE_LINK_MAC of the rank.
        cpus: to run on; empty: as the rank.
        page, staging: descriptor, bytes of the file, offset of the first usable byte.
        wake: descriptor of an eventfd that wakes it.
        shape: the fields of the `ProxyShape`.
    """

    rank: int
    process: int
    own: int
    island: tuple[tuple[int, int], ...]
    partners: tuple[int, ...]
    address: str
    engine: str
    covers_payloads: bool
    cpus: tuple[int, ...]
    page: tuple[int, int, int]
    staging: tuple[int, int, int]
    wake: int
    shape: dict[str, int]

    def message(self) -> dict[str, Any]:
        """Return the message that `parse_setup` reads."""
        return asdict(self)

    @property
    def sizes(self) -> ProxyShape:
        """The shape itself."""
        return ProxyShape(**self.shape)


def parse_setup(message: Mapping[str, Any]) -> ProxySetup:
    """Return the setup in a message; `ProtocolError` if it is none."""
    try:
        fields = dict(message)
        for name in ("partners", "cpus", "page", "staging"):
            fields[name] = tuple(map(int, fields[name]))
        fields["island"] = tuple((int(pid), int(start)) for pid, start in fields["island"])
        return ProxySetup(**fields)
    except expected(KeyError, TypeError, ValueError) as exc:
        raise ProtocolError(f"the setup of a proxy is damaged: {exc!r}") from exc


class ProxyEndpoint(NamedTuple):
    """The address at which a process of a proxy waits for its partners, and the random bytes that identify it."""

    address: str
    port: int
    nonce: bytes

    def fields(self) -> list[Any]:
        """Return what `parse_endpoint` reads, for JSON."""
        return [self.address, self.port, self.nonce.hex()]

    def partner(self, rank: int) -> Partner:
        """Return it as a partner of a meeting."""
        return Partner(self.address, self.port, Identity(rank, 0, self.nonce))


def parse_endpoint(fields: Any) -> ProxyEndpoint:
    """Return an endpoint that a process, or a peer, names; `ProtocolError` if it cannot be one."""
    try:
        address, port, nonce = fields
        endpoint = ProxyEndpoint(str(address), port, bytes.fromhex(nonce))
        socket.getaddrinfo(endpoint.address, None, flags=socket.AI_NUMERICHOST)
        if type(port) is not int or not 0 < port < 1 << 16 or len(endpoint.nonce) != NONCE_BYTES:
            raise ValueError("port or nonce out of range")
    except expected(TypeError, ValueError, OSError) as exc:
        raise ProtocolError(f"{fields!r:.200} is no endpoint of a proxy: {exc}") from exc
    return endpoint


def send_message(connection: socket.socket, message: Mapping[str, Any]) -> None:
    """Send a message; raises `OSError` where the other side has ended."""
    connection.send(json.dumps(message).encode(), socket.MSG_NOSIGNAL)


def receive_message(connection: socket.socket) -> dict[str, Any]:
    """Return the next message.

    Raises:
        EOFError: the other side has ended. ProtocolError: it is no message. OSError: as `socket.recv`.
    """
    data = connection.recv(MAX_MESSAGE)
    if not data:
        raise EOFError
    try:
        message = json.loads(data)
    except expected(ValueError) as exc:
        raise ProtocolError(f"a message of {len(data)} bytes between a rank and its proxy is damaged: {exc}") from exc
    if not isinstance(message, dict):
        raise ProtocolError("a message between a rank and its proxy must be an object")
    return message
