"""The endpoint of a process: what others need to watch it and to read its board. Opaque bytes in `Member.endpoint`.

Its socket is reached through the process's own descriptor of the socket's file (`directory.Door`), which needs no name.

Writers and readers: the process itself writes it, when it is created; the runtime of each other member reads it, and
checks every number before it opens a pid or a file by it. Plain bytes: a crash leaves nothing.
"""

from __future__ import annotations

from typing import NamedTuple

from ...errors import InvalidArgument, ProtocolError
from ...memory.host import BLOB_BYTES
from ..transport.wire import MAX_ENDPOINT_BYTES, Bytes, Cursor, Number, Text, TupleCodec, Wrong

MAX_EXTRA_BYTES = 640
MAX_ADDRESS_BYTES = 64  # an IPv6 address with its zone


class Endpoint(NamedTuple):
    """The address and the resources of a process.

    Attributes:
        pid: its number in the PID namespace of the job.
        start_time: when it started, clock ticks since boot; with `pid` it names one process.
        door: its descriptor of its socket's file (`directory.Door.fd`).
        board: blob of its board (`board.py`).
        beat: blob of its heartbeat (`beat.py`).
        extra: data for the engines above, at most `MAX_EXTRA_BYTES`.
        address, port: TCP address for agents of other hosts; "" and 0 where the job keeps to one host.
    """

    pid: int
    start_time: int
    door: int
    board: bytes
    beat: bytes
    extra: bytes
    address: str = ""
    port: int = 0


_CODEC = TupleCodec(
    Endpoint,
    Number(1, (1 << 31) - 1),
    Number(0, (1 << 62)),
    Number(0, (1 << 31) - 1),
    Bytes(BLOB_BYTES, BLOB_BYTES),
    Bytes(BLOB_BYTES, BLOB_BYTES),
    Bytes(0, MAX_EXTRA_BYTES),
    Text(MAX_ADDRESS_BYTES),
    Number(0, (1 << 16) - 1),
)


def pack_endpoint(endpoint: Endpoint) -> bytes:
    """Return at most `MAX_ENDPOINT_BYTES` bytes; `InvalidArgument` if a field is out of range."""
    out = bytearray()
    try:
        _CODEC.put(out, endpoint, "Endpoint")
    except Wrong as exc:
        raise InvalidArgument(str(exc)) from exc
    assert len(out) <= MAX_ENDPOINT_BYTES
    return bytes(out)


def parse_endpoint(data: bytes) -> Endpoint:
    """Return the endpoint in a member's bytes; `ProtocolError` if it is invalid."""
    cursor = Cursor(data)
    try:
        endpoint: Endpoint = _CODEC.take(cursor, "Endpoint")
    except Wrong as exc:
        raise ProtocolError(f"an endpoint that cannot be right was not used: {exc}") from exc
    if cursor.at != len(data):
        raise ProtocolError(f"an endpoint has {len(data) - cursor.at} bytes too many")
    return endpoint
