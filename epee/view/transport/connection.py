"""One connection between two agents, as a machine over a non-blocking stream socket: handshake, then frames one way.

It is a Unix socket inside a host, whose kernel says which process of which user is at the other end, and TCP between
hosts, where the handshake alone says who it is. The handshake, the frames and their MACs are the same.

Data path: `Outgoing` takes payloads, sends the hello, then the proof, then sealed frames as the socket takes them.
`Incoming` reads the hello, then the proof, then frames, and hands out payloads. Neither waits for the other, ever: what
the socket does not take stays in a queue with a limit, and what comes is read when it is there.

Who may cost what: before its proof a peer has at most the bytes of one handshake message in memory here, and
`HANDSHAKE_S` seconds; after it one frame. Whoever breaks a rule raises; the owner closes the connection then. A peer
that dies, stops or stays silent leaves a queue that its owner drops.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct

from ...errors import AuthError, ProtocolError
from .auth import (
    CHALLENGE_BYTES,
    HELLO_BYTES,
    PROOF_BYTES,
    Identity,
    Initiator,
    Opener,
    Responder,
    Sealer,
    Token,
    refusal,
)
from .wire import MAX_FRAME_BYTES

HANDSHAKE_S = 5.0
CALL_S = 0.5  # how long a call to another host may go unanswered before it is made again
MAX_QUEUED_BYTES = 2 * MAX_FRAME_BYTES
_READ_BYTES = 1 << 16
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return (pid, uid) of the process that made the other end, as the kernel knows it; over TCP (0, our own uid)."""
    if connection.family != socket.AF_UNIX:
        return 0, os.geteuid()
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, uid


def call(address: str, port: int, timeout_s: float) -> socket.socket:
    """Return a non-blocking socket that connects to an agent of another host; raises `OSError`."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    connection = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        watch_silence(connection, timeout_s)
        with contextlib.suppress(BlockingIOError):  # it is under way
            connection.connect((address, port))
    except OSError:
        connection.close()
        raise
    return connection


def watch_silence(connection: socket.socket, timeout_s: float) -> None:
    """Let the kernel give up a TCP connection when the other kernel has been silent for so long, used or not."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, round(timeout_s * 1e3)))


class Outgoing:
    """The side that connected and sends.

    Attributes:
        fd: of the socket.
        pid: of the process that listens there.
        deadline: `time.monotonic()` value by which the handshake must be over; infinite afterwards. Over TCP the
            connection must be there by then, its process may take its time: it may be stopped.
        is_up: the other kernel has taken the connection.
    """

    def __init__(self, connection: socket.socket, initiator: Initiator, now: float) -> None:
        self._socket = connection
        self._initiator = initiator
        self._sealer: Sealer | None = None
        self._waiting: list[bytes] = []  # payloads that wait for the handshake
        self._num_waiting_bytes = 0
        self._out = bytearray(initiator.hello())
        self._in = bytearray()
        self.fd = connection.fileno()
        self.pid, uid = peer_of(connection)
        if uid != os.geteuid():
            raise AuthError(f"process {self.pid} of user {uid} listens there; only user {os.geteuid()} may")
        self.is_remote = connection.family != socket.AF_UNIX
        self.is_up = False
        self.deadline = now + (CALL_S if self.is_remote else HANDSHAKE_S)
        self.flush()

    @property
    def is_proved(self) -> bool:
        """True once the other side has proved who it is."""
        return self._sealer is not None

    @property
    def wants_to_write(self) -> bool:
        """True while the socket has not taken everything."""
        return bool(self._out)

    @property
    def is_idle(self) -> bool:
        """True when everything that was given has left this process."""
        return not self._out and not self._waiting

    def send(self, payload: bytes) -> bool:
        """Queue a payload; False when the queue is full and it was dropped. Raises `OSError` as `flush`."""
        if self._num_waiting_bytes + len(self._out) + len(payload) > MAX_QUEUED_BYTES:
            return False
        if self._sealer is None:
            self._waiting.append(payload)
            self._num_waiting_bytes += len(payload)
        else:
            self._out += self._sealer.seal(payload)
            self.flush()
        return True

    def flush(self) -> None:
        """Give the socket what it takes now.

        Raises:
            OSError: the connection has ended.
        """
        while self._out:
            try:
                count = self._socket.send(self._out, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            if not self.is_up:
                self.is_up = True
                self.deadline = float("inf") if self.is_remote else self.deadline
            del self._out[:count]

    def readable(self) -> None:
        """Read what the responder says: its challenge, nothing else.

        Raises:
            OSError, AuthError, ProtocolError: the connection must end.
        """
        try:
            data = self._socket.recv(CHALLENGE_BYTES - len(self._in) if self._sealer is None else 1)
        except BlockingIOError:
            return
        if not data:
            raise ConnectionResetError("the peer has closed the connection")
        if self._sealer is not None:
            raise ProtocolError("the receiving side of a connection has sent something after the handshake")
        self._in += data
        if len(self._in) < CHALLENGE_BYTES:
            return
        proof, self._sealer = self._initiator.answer(bytes(self._in))
        self._out += proof
        for payload in self._waiting:
            self._out += self._sealer.seal(payload)
        self._waiting.clear()
        self._num_waiting_bytes = 0
        self.deadline = float("inf")
        self.flush()

    def close(self) -> None:
        """Close the socket; idempotent."""
        self._socket.close()


class Incoming:
    """The side that was connected to and receives.

    Attributes:
        fd: of the socket.
        pid: of the process that connected.
        deadline: as for `Outgoing`.
        peer: who it is; None until it has proved it.
    """

    def __init__(self, connection: socket.socket, token: Token, job_id: bytes, me: Identity, now: float) -> None:
        """Take over an accepted socket.

        Raises:
            AuthError: it belongs to a process of another user.
        """
        self.pid, uid = peer_of(connection)
        if uid != os.geteuid():
            raise AuthError(f"process {self.pid} of user {uid} has connected; only user {os.geteuid()} may")
        connection.setblocking(False)
        self._socket = connection
        self._responder = Responder(token, job_id, me)
        self._opener: Opener | None = None
        self._in = bytearray()
        self._wanted = HELLO_BYTES
        self.fd = connection.fileno()
        self.deadline = now + HANDSHAKE_S
        self.peer: Identity | None = None

    @property
    def has_spoken(self) -> bool:
        """True when anything has come."""
        return self.peer is not None or bool(self._in) or self._wanted != HELLO_BYTES

    def readable(self) -> list[bytes]:
        """Read what is there; return the payloads that are complete.

        Raises:
            OSError, AuthError, ProtocolError: the connection must end.
        """
        try:
            data = self._socket.recv(_READ_BYTES if self._opener else self._wanted - len(self._in))
        except BlockingIOError:
            return []
        if not data:
            raise ConnectionResetError("the peer has closed the connection")
        if self._opener is not None:
            return self._opener.feed(data)
        self._in += data
        if len(self._in) == self._wanted:
            self._advance(bytes(self._in))
            self._in.clear()
        return []

    def _advance(self, message: bytes) -> None:
        if self._wanted == HELLO_BYTES:
            try:
                answer = self._responder.challenge(message)
            except ProtocolError:
                self._say(refusal())
                raise
            self._say(answer)
            self._wanted = PROOF_BYTES
        else:
            self._opener = self._responder.finish(message)
            self.peer = self._responder.peer
            self.deadline = float("inf")

    def _say(self, data: bytes) -> None:
        if self._socket.send(data, socket.MSG_NOSIGNAL) != len(data):  # a fresh socket takes far more
            raise ConnectionResetError("the peer does not read")

    def close(self) -> None:
        """Close the socket; idempotent."""
        self._socket.close()
