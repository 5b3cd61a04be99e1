"""Test whether a process of another host is reached: `epee doctor --listen` there, `epee doctor --peer HOST:PORT` here.

    listener    sends GREETING and the peer's address
    peer        sends BULK_BYTES
    listener    sends DONE

The bulk finds a failure that a handshake does not: full packets lost in the network, because an interface assumes
larger ones than the whole path supports. One try proves one direction; ranks connect in either.

Connections may come from any program: no received data is kept, and each connection gets `VISIT_S`. The address that
the listener sends is shown to people, once it looks like an address.
"""

from __future__ import annotations

import errno
import ipaddress
import select
import socket
import time
from collections.abc import Iterator
from typing import NamedTuple

from ...errors import InvalidArgument
from ..finding import Finding, Verdict, examine

REACH_S = 5.0
VISIT_S = 2.0
BULK_BYTES = 256 << 10
GREETING = b"epee doctor sees "
DONE = b"done\n"
_GREETING_S = 1.0  # another service may send nothing
_PIECE_BYTES = 64 << 10
_MAX_LINE = len(GREETING) + 64
_PAUSE_S = 0.05


class Visit(NamedTuple):
    """A connection: its source, and whether all of a doctor's bytes were received."""

    address: str
    is_doctor: bool


def parse_peer(text: str) -> tuple[str, int]:
    """Return host and port of "HOST:PORT", "[ADDRESS]:PORT" for IPv6.

    Raises:
        InvalidArgument: it is something else.
    """
    host, _, digits = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") if host.startswith("[") else host
    if not host or not digits.isascii() or not digits.isdigit() or not 0 < int(digits[:6]) < 1 << 16:
        raise InvalidArgument(f"--peer must be HOST:PORT ([ADDRESS]:PORT for IPv6), port 1 ... 65535, got {text!r}")
    return host, int(digits)


def shown(address: str, port: int) -> str:
    """Return address and port in the form of `parse_peer`."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


# ---- connecting side


def reach(host: str, port: int, timeout_s: float = REACH_S) -> Finding:
    """Try to connect, bounded by `timeout_s` seconds, names included; return the outcome and a remedy."""
    name = shown(host, port)
    (found,) = examine("peer", name, lambda: [_reach(host, port, timeout_s)], timeout_s + 0.5)
    return found


def _reach(host: str, port: int, timeout_s: float) -> Finding:
    deadline = time.monotonic() + timeout_s
    name = shown(host, port)
    try:
        places = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as exc:
        remedy = "give the address that `epee doctor --listen` prints on the other host"
        return Finding("peer", name, Verdict.NO, f"unknown: {host} is no address and no known name ({exc})", remedy)
    error: OSError = TimeoutError()
    for family, kind, _, _, where in places:
        began = time.monotonic()
        with socket.socket(family, kind) as connection:
            try:
                connection.settimeout(max(0.01, deadline - began))
                connection.connect(where)
            except OSError as exc:
                error = exc
                continue
            return _talk(connection, name, time.monotonic() - began, deadline)
    return Finding("peer", name, Verdict.NO, *_why(error, port, timeout_s))


def _why(error: OSError, port: int, timeout_s: float) -> tuple[str, str]:
    """Return why there is no connection, and what to do."""
    if isinstance(error, TimeoutError):
        return (
            f"timed out: nothing came back within {timeout_s:g} s",
            "a firewall drops it, or nobody has that address: let TCP through between the hosts (ports of "
            "/proc/sys/net/ipv4/ip_local_port_range), or set EPEE_HOST_IP there to an address that this host reaches",
        )
    if isinstance(error, ConnectionRefusedError):
        return (
            "refused: the host answers, but nobody listens there",
            f"run `epee doctor --listen {port}` there, and connect while it runs, to the address that it prints",
        )
    if error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH):
        return (
            f"no route: {error.strerror}",
            "`ip route get ADDRESS` shows the way; set EPEE_HOST_IP there to an address of a network that both hosts "
            "have, or let the firewall pass it",
        )
    return str(error), "look at the network of both hosts"


def _talk(connection: socket.socket, name: str, took_s: float, deadline: float) -> Finding:
    """Test a connection by the exchange described in the module docstring."""
    own = connection.getsockname()[0]
    value = f"reachable from {own}, connected in {took_s * 1e3:.1f} ms"
    try:
        greeting = _line(connection, min(deadline, time.monotonic() + _GREETING_S))
    except OSError:
        greeting = b""
    seen = _address_in(greeting)
    if not seen:
        return Finding(
            "peer",
            name,
            Verdict.WARN,
            f"{value}; what answers there is no `epee doctor --listen`",
            "fine if another program listens there; else a proxy answers in its place: try with `epee doctor --listen`",
        )
    try:
        connection.settimeout(max(0.01, deadline - time.monotonic()))
        connection.sendall(bytes(BULK_BYTES))
        is_done = _line(connection, deadline) == DONE
    except OSError:
        is_done = False
    if not is_done:
        return Finding(
            "peer",
            name,
            Verdict.NO,
            f"{value}, but {BULK_BYTES >> 10} KiB do not get through",
            "large packets vanish on the way: lower the MTU of both interfaces, or let ICMP (packet too big) pass",
        )
    if ipaddress.ip_address(seen) != ipaddress.ip_address(own.partition("%")[0]):
        value += f"; there it comes from {seen}: addresses are translated, try the other direction, too"
    return Finding("peer", name, Verdict.OK, f"{value}; {BULK_BYTES >> 10} KiB got through")


def _line(connection: socket.socket, deadline: float) -> bytes:
    """Read up to a line's end; returns the received part when the other side closes, or the line is too long.

    Raises:
        OSError: nothing was received by the deadline, or the connection broke.
    """
    got = b""
    while not got.endswith(b"\n") and len(got) < _MAX_LINE:
        connection.settimeout(max(0.01, deadline - time.monotonic()))
        piece = connection.recv(1)
        if not piece:
            break
        got += piece
    return got


def _address_in(greeting: bytes) -> str:
    """Return the address that a listener sends, "" if it is no listener of ours."""
    if not greeting.startswith(GREETING):
        return ""
    try:
        return str(ipaddress.ip_address(greeting.removeprefix(GREETING).decode("ascii", "replace").strip()))
    except ValueError:
        return ""


# ---- listening side


def visits(listener: socket.socket, seconds: float) -> Iterator[Visit]:
    """Yield the connections to a non-blocking listener, for this many seconds; one after the other."""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        if not select.select([listener], [], [], left)[0]:
            continue
        try:
            connection, place = listener.accept()
        except OSError:  # it has been closed already, or no descriptor is left
            time.sleep(_PAUSE_S)
            continue
        with connection:
            address = str(place[0]).partition("%")[0]
            yield Visit(address, _serve(connection, address))


def _serve(connection: socket.socket, address: str) -> bool:
    """Run the listener's part; return whether all of it succeeded."""
    deadline = time.monotonic() + VISIT_S
    missing = BULK_BYTES
    try:
        connection.settimeout(VISIT_S)
        connection.sendall(GREETING + address.encode() + b"\n")
        while missing > 0:
            connection.settimeout(max(0.01, deadline - time.monotonic()))
            piece = connection.recv(min(missing, _PIECE_BYTES))
            if not piece:
                return False
            missing -= len(piece)
        connection.sendall(DONE)
    except OSError:
        return False
    return True
