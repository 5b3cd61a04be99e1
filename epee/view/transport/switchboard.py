"""All connections of one agent: it listens, connects when there is something to send, and never waits for a peer.

A process whose endpoint is known is reached through it, even if the job's folder was removed (`directory.py`); one that
was only found in the folder is reached by its name there. A process of another host is reached by TCP, at the address
of its endpoint; the results of the attempts are recorded in `Reach`, which decides when to connect again.

Data path: `send` puts a message on the connection to a process, which is opened at first use. `handle` is called for a
ready descriptor and returns the received messages with the nonce of the process that has proved to be their sender. The
agent thread alone calls all of it.

Influence of a peer: it can lose its own connection, nothing else. A peer of another user, one that proves nothing in
time, sends invalid data or does not read is dropped and counted (`dropped`), and no message of it reaches the agent.
The number of connections is limited; when unauthenticated peers use up the limit, the one that has been silent longest
is dropped.

Messages may be lost (a full queue, a connection that breaks); the agents repeat what matters. A crash closes the
sockets, which the peers see.

Reachability of hosts (`Reach`): a state derived from the control connections to the agents of other hosts. It has no
sockets.

Each agent keeps a connection to each agent of another host, from the time that this becomes a member. The kernel's
reports about it are recorded by process:

    established    the other kernel answers. Its process may be stopped, or hold its GIL: that is no loss of a host
    proved         and it is the process that is meant
    ended          a reset, or the end of the stream; it is called again, every `AGAIN_S`
    refused        no process listens there, or another one: the process has ended, or is about to
    no answer      to a call, in time
    silent         the kernel closed a connection on which nothing arrived any more (keepalive, TCP_USER_TIMEOUT); it
                   may also report that there is no route

In addition a small message is sent every `ping_s`: the sending side notices a cut in one direction, as its kernel
closes the connection when nothing confirms what it has sent.

Silence lasts `timeout_s` at most, from the last message that arrived: the first message that nothing confirms is sent
within `ping_s` of that, the kernel closes the connection `given_up_s` after it, then the process is called for
`recall_s`, and the three are `timeout_s` together. Half of that time is thus over before a connection is closed, and a
new call succeeds where the old connection had doubled its retransmission pauses too often.

A host is *lost* when none of its agents can be reached: each has been refused for `REFUSED_S`, silent and then not
reached for `recall_s`, has ended a connection and answered no call for `UNANSWERED_S`, or has never answered within
`timeout_s`. That is a suspicion (`protocol/events.HostLost`): a host behind a cut cable may live. An interruption that
is over before is none. Errors on this side, such as no descriptor being left, say nothing.

Callers: the agent thread. Nothing is shared, a crash leaves nothing.

One connection between two agents (`Outgoing`, `Incoming`): a state machine over a non-blocking stream socket;
handshake, then frames in one direction.

It is a Unix socket inside a host, whose kernel names the process and the user at the other end, and TCP between hosts,
where only the handshake identifies the peer. The handshake, the frames and their MACs are the same.

Data path: `Outgoing` takes payloads, sends the hello, then the proof, then sealed frames as the socket takes them.
`Incoming` reads the hello, then the proof, then frames, and returns payloads. Neither ever waits for the other: what
the socket does not take stays in a queue with a limit, and data is read when it is there.

Cost of a peer: before its proof a peer uses at most the bytes of one handshake message in memory here, and
`HANDSHAKE_S` seconds; after it one frame. A violated rule raises; the owner closes the connection then. A peer that
dies, stops or stays silent leaves a queue that its owner drops.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import struct
from collections import Counter
from collections.abc import Callable, Iterable

from ... import env
from ...errors import AuthError, EpeeError, ProtocolError, expected
from ...memory.shared import process_start_time
from ..protocol.messages import Commit, Member, Message
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
from .directory import Door, JobDirectory, connect_door, socket_name
from .wire import MAX_FRAME_BYTES, MAX_MEMBERS, GroupReport, decode, encode, parse_endpoint

HANDSHAKE_S = 5.0
CALL_S = 0.5  # how long a call to another host may go unanswered before it is made again
MAX_QUEUED_BYTES = 2 * MAX_FRAME_BYTES
_READ_BYTES = 1 << 16
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return (pid, uid) of the process that made the other end, from the kernel; over TCP (0, our own uid)."""
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
    except BaseException:
        connection.close()
        raise
    return connection


def watch_silence(connection: socket.socket, timeout_s: float) -> None:
    """Let the kernel close a TCP connection when the other kernel has been silent for `timeout_s`, used or not."""
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
        connection must exist by then; its process has no deadline, as it may be stopped.
        is_up: the other kernel has accepted the connection.
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
        """True once the other side has proved its identity."""
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
        """Give the socket the bytes that it takes now.

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
        """Read the responder's challenge, nothing else.

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
        peer: its identity; None until it has proved it.
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
        """True when any data has arrived."""
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
            except expected(ProtocolError):
                self._say(refusal())
                raise
            self._say(answer)
            self._wanted = PROOF_BYTES
        else:
            self._opener = self._responder.finish(message)
            self.peer = self._responder.peer
            self.deadline = float("inf")

    def _say(self, data: bytes) -> None:
        if self._socket.send(data, socket.MSG_NOSIGNAL) != len(data):  # the empty buffer of a new socket takes far more
            raise ConnectionResetError("the peer does not read")

    def close(self) -> None:
        """Close the socket; idempotent."""
        self._socket.close()


AGAIN_S = 0.1  # between two calls of one process
REFUSED_S = 0.5
UNANSWERED_S = 1.0  # two calls
ESTABLISHED, PROVED, ENDED, REFUSED, NO_ANSWER, SILENT, UNKNOWN = range(7)
NEVER = float("inf")


def ping_s(timeout_s: float) -> float:
    """Return how often a small message goes out."""
    return min(0.5, timeout_s / 8)


def recall_s(timeout_s: float) -> float:
    """Return how long a process is called whose connection the kernel has closed."""
    return timeout_s / 4


def given_up_s(timeout_s: float) -> float:
    """Return the time after which the kernel is to close a connection when nothing confirms what it has sent."""
    return timeout_s - ping_s(timeout_s) - recall_s(timeout_s)


class _Line:
    """The state of the connection to one process.

    Attributes:
        born: creation time of the line; infinite once the other kernel has answered.
        ended, refused, silent: since when it has been so; infinite where it has not.
        call_at: when it is to be called; infinite while a connection exists or is being made.
    """

    def __init__(self, member: Member, now: float) -> None:
        self.member = member
        self.is_up = False
        self.born = now
        self.ended = self.refused = self.silent = NEVER
        self.call_at = now

    def lost_at(self, timeout_s: float) -> float:
        """Return the time at which it counts as unreachable if nothing changes."""
        if self.is_up:
            return NEVER
        ends = (self.refused + REFUSED_S, self.silent + recall_s(timeout_s), self.ended + UNANSWERED_S)
        return min(*ends, self.born + timeout_s)


class Reach:
    """The reachability of other hosts (see the module).

    Args:
        host: key of the own host.
        timeout_s: EPEE_HOST_TIMEOUT_S.

    Attributes:
        ping_s: how often a small message is to be sent on each connection.
    """

    def __init__(self, host: str, timeout_s: float) -> None:
        self._host, self._timeout_s = host, timeout_s
        self.ping_s = ping_s(timeout_s)
        self._lines: dict[bytes, _Line] = {}

    def follow(self, members: Iterable[Member], now: float) -> None:
        """Keep a connection to each of these members that runs on another host, and to no other."""
        theirs = {member.nonce: member for member in members if member.host != self._host}
        self._lines = {nonce: line for nonce, line in self._lines.items() if nonce in theirs}
        for nonce, member in theirs.items():
            self._lines.setdefault(nonce, _Line(member, now)).member = member

    def forget(self, nonce: bytes) -> None:
        """Keep no connection to a process that has ended."""
        self._lines.pop(nonce, None)

    def is_up(self, nonce: bytes) -> bool:
        """Return whether there is a connection to a process."""
        return nonce in self._lines and self._lines[nonce].is_up

    def up(self) -> list[Member]:
        """Return the members to which there is a connection."""
        return [line.member for line in self._lines.values() if line.is_up]

    def called(self, nonce: bytes) -> None:
        """Record that a connection to a process is being made."""
        if nonce in self._lines:
            self._lines[nonce].call_at = NEVER

    def note(self, nonce: bytes, what: int, now: float) -> None:
        """Record the kernel's report about the connection to a process."""
        line = self._lines.get(nonce)
        if line is None:
            return
        was_up, line.is_up = line.is_up, what in (ESTABLISHED, PROVED)
        line.call_at = NEVER if line.is_up else now + AGAIN_S
        if line.is_up:
            line.ended = line.silent = line.born = NEVER
        if what == PROVED:
            line.refused = NEVER
        elif what == ENDED:
            line.ended = min(line.ended, now)
        elif what == REFUSED:
            line.refused = min(line.refused, now)
        elif what == SILENT or (what == NO_ANSWER and was_up):
            line.silent = min(line.silent, now)
        elif what == UNKNOWN:
            line.born = now if was_up or line.born < NEVER else NEVER
            line.ended, line.refused, line.silent = (
                at if at == NEVER else now for at in (line.ended, line.refused, line.silent)
            )

    def skip(self, seconds: float) -> None:
        """Exclude a time in which this process did not run: it called no peer, and heard no answer."""
        for line in self._lines.values():
            line.born, line.ended = line.born + seconds, line.ended + seconds  # infinite values stay infinite
            line.refused, line.silent = line.refused + seconds, line.silent + seconds

    def due(self, now: float) -> list[Member]:
        """Return the members to call now."""
        return [line.member for line in self._lines.values() if line.call_at <= now]

    def lost(self, now: float) -> list[str]:
        """Return the hosts of which no member can be reached."""
        return [host for host, at in self._lost_at().items() if at <= now]

    def next(self, now: float) -> float:
        """Return the time at which `due` or `lost` may change."""
        calls = [line.call_at for line in self._lines.values()]
        return min([*calls, *(at for at in self._lost_at().values() if at > now)], default=NEVER)

    def _lost_at(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for line in self._lines.values():
            host = line.member.host
            found[host] = max(found.get(host, 0.0), line.lost_at(self._timeout_s))
        return found


MAX_CONNECTIONS = 4 * MAX_MEMBERS  # to this process
MAX_STRANGERS = MAX_MEMBERS  # of them, before they have proved anything
BACKLOG = 256
_AWAY = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN)
_PAUSE_S = 0.1  # pause of accepting connections when descriptors have run out


class Switchboard:
    """The connections of one agent (see the module).

    Attributes:
        dropped: how often a connection or message was dropped, by reason.
    """

    def __init__(
        self,
        job: JobDirectory,
        me: Identity,
        door: Door,
        poll: select.epoll,
        listener: socket.socket | None = None,
        greet: Callable[[Member], list[Message | GroupReport]] = lambda to: [],
    ) -> None:
        """Take over `door`, to which others connect, and `listener`, for processes on other hosts.

        `greet` returns the messages to send first on each new connection to a process of another host.
        """
        self._job, self._me, self._poll, self._greet = job, me, poll, greet
        self._door = door
        self._listeners = [door.listener] if listener is None else [door.listener, listener]
        timeout_s = env.get_float("EPEE_HOST_TIMEOUT_S")
        self._given_up_s = given_up_s(timeout_s)
        self.abroad = Reach(job.host, timeout_s)
        self._outgoing: dict[bytes, Outgoing] = {}
        self._nonce_of: dict[int, bytes] = {}  # of outgoing descriptors
        self._incoming: dict[int, Incoming] = {}
        self._listen_again = float("inf")
        self.dropped: Counter[str] = Counter()
        self._listen()

    @property
    def is_idle(self) -> bool:
        """True when everything that was sent has left this process, or was dropped."""
        return all(connection.is_idle for connection in self._outgoing.values())

    def send(self, to: Member, message: Message | GroupReport, now: float) -> None:
        """Send a message, or drop it if it cannot be sent."""
        for part in _parts(message):
            connection = self._outgoing.get(to.nonce) or self._connect(to, now)
            if connection is None or not self._put(connection, part, now):
                return
            self._watch(connection, now)

    def greet(self, to: Member, now: float) -> None:
        """Send the first messages on an existing connection to another host: they were not known before."""
        connection = self._outgoing.get(to.nonce)
        if connection is None or not connection.is_remote:
            return
        if all(self._put(connection, message, now) for message in self._greet(to)):
            self._watch(connection, now)

    def _put(self, connection: Outgoing, message: Message | GroupReport, now: float) -> bool:
        """Queue a message on a connection; False when that has ended."""
        try:
            if not connection.send(encode(message)):
                self.dropped["queue full"] += 1
        except expected(OSError) as exc:
            self._note(connection, exc, now)
            self._close_outgoing(connection.fd, "broken")
            return False
        return True

    def keep_up(self, now: float) -> None:
        """Connect to the processes of other hosts to which there should be a connection and is none."""
        for member in self.abroad.due(now):
            if member.nonce in self._outgoing:
                self.abroad.called(member.nonce)
            elif (connection := self._connect(member, now)) is not None:
                self._watch(connection, now)

    def reach(self, to: Member, now: float) -> int:
        """Connect to a process if there is no connection yet; return its pid from the kernel, 0 if it has ended."""
        connection = self._outgoing.get(to.nonce) or self._connect(to, now)
        if connection is None:
            return 0
        self._watch(connection, now)
        return connection.pid

    def owns(self, fd: int) -> bool:
        """Return whether `handle` is to be called for this descriptor."""
        return fd in self._incoming or fd in self._nonce_of or self._listener(fd) is not None

    def _listener(self, fd: int) -> socket.socket | None:
        return next((listener for listener in self._listeners if listener.fileno() == fd), None)

    def _listen(self) -> None:
        for listener in self._listeners:
            self._poll.register(listener, select.EPOLLIN)

    def handle(self, fd: int, now: float) -> list[tuple[bytes, Message | GroupReport]]:
        """Handle a ready descriptor; return (sender's nonce, message) pairs."""
        if fd in self._incoming:
            return self._receive(self._incoming[fd])
        if fd in self._nonce_of:
            self._progress(self._outgoing[self._nonce_of[fd]], now)
        elif (listener := self._listener(fd)) is not None:
            self._accept(listener, now)
        return []

    def expire(self, now: float) -> float:
        """Drop connections past their deadlines; return the next deadline."""
        for fd, connection in list(self._incoming.items()):
            if now >= connection.deadline:
                self._close_incoming(fd, "late")
        for nonce, outgoing in list(self._outgoing.items()):
            if now >= outgoing.deadline:
                self.abroad.note(nonce, NO_ANSWER, now)
                self._close_outgoing(self._outgoing[nonce].fd, "late")
        if now >= self._listen_again:
            self._listen_again = float("inf")
            self._listen()
        deadlines = [incoming.deadline for incoming in self._incoming.values()]
        deadlines += [outgoing.deadline for outgoing in self._outgoing.values()]
        return min([self._listen_again, *deadlines])

    def pid_of(self, nonce: bytes) -> int:
        """Return the pid, from the kernel, of the process that has proved to be `nonce`; 0 if none has."""
        known = [c.pid for c in self._incoming.values() if c.peer is not None and c.peer.nonce == nonce]
        return known[0] if known else 0

    def forget(self, nonce: bytes) -> None:
        """Drop the connections with a process that is dead."""
        self.abroad.forget(nonce)
        if nonce in self._outgoing:
            self._close_outgoing(self._outgoing[nonce].fd, "")
        for fd, connection in list(self._incoming.items()):
            if connection.peer is not None and connection.peer.nonce == nonce:
                self._close_incoming(fd, "")

    def close(self) -> None:
        """Close everything, without effect on what a forked child shares with its parent; idempotent."""
        for incoming in self._incoming.values():
            incoming.close()
        for outgoing in self._outgoing.values():
            outgoing.close()
        self._incoming.clear()
        self._outgoing.clear()
        self._nonce_of.clear()
        self._door.close()
        for listener in self._listeners:
            listener.close()

    # ---- outgoing

    def _connect(self, to: Member, now: float) -> Outgoing | None:
        initiator = Initiator(self._job.token, self._job.job_id, self._me, Identity(*to[:3]))
        try:
            connection = self._call(to)
        except expected(OSError, EpeeError) as exc:  # it has ended, or its queue is full; the message is lost
            self.abroad.note(to.nonce, _seen(exc), now)
            self.dropped["unreachable"] += 1
            return None
        try:
            outgoing = Outgoing(connection, initiator, now)
        except expected(OSError, AuthError) as exc:
            connection.close()
            self.abroad.note(to.nonce, _seen(exc), now)
            self.dropped["unreachable"] += 1
            return None
        self._outgoing[to.nonce] = outgoing
        self._nonce_of[outgoing.fd] = to.nonce
        self._poll.register(outgoing.fd, select.EPOLLIN | select.EPOLLOUT)
        self.abroad.called(to.nonce)
        for message in self._greet(to) if outgoing.is_remote else ():
            if not self._put(outgoing, message, now):
                return None
        return outgoing

    def _call(self, to: Member) -> socket.socket:
        if not to.endpoint:
            return self._job.connect(socket_name(to.slot, to.nonce))
        endpoint = parse_endpoint(to.endpoint)
        if to.host != self._job.host:
            if not endpoint.address:
                raise ProtocolError(f"slot {to.slot} of another host says no address; was its job made for one host?")
            return call(endpoint.address, endpoint.port, self._given_up_s)
        if process_start_time(endpoint.pid) != endpoint.start_time:
            raise ProcessLookupError(errno.ESRCH, "it has ended")
        return connect_door(endpoint.pid, endpoint.door)

    def _progress(self, connection: Outgoing, now: float) -> None:
        try:
            connection.flush()
            connection.readable()
        except expected(OSError, EpeeError) as exc:
            self._note(connection, exc, now)
            self._close_outgoing(connection.fd, _reason(exc))
            return
        self._watch(connection, now)

    def _note(self, connection: Outgoing, exc: Exception, now: float) -> None:
        """Record how a connection has ended, or failed."""
        what = _seen(exc)
        if what == ENDED and not connection.is_up:
            what = REFUSED
        self.abroad.note(self._nonce_of[connection.fd], what, now)

    def _watch(self, connection: Outgoing, now: float) -> None:
        # on a fast network it is up at once, and a stopped process sends nothing that would be an event
        if connection.is_up:
            self.abroad.note(self._nonce_of[connection.fd], PROVED if connection.is_proved else ESTABLISHED, now)
        mask = select.EPOLLIN | (select.EPOLLOUT if connection.wants_to_write else 0)
        self._poll.modify(connection.fd, mask)

    def _close_outgoing(self, fd: int, reason: str) -> None:
        connection = self._outgoing.pop(self._nonce_of.pop(fd))
        self._poll.unregister(fd)  # closing alone would not remove it while a forked child holds a copy
        connection.close()
        if reason:
            self.dropped[reason] += 1

    # ---- incoming

    def _accept(self, listener: socket.socket, now: float) -> None:
        for _ in range(BACKLOG):
            if self._listen_again < float("inf"):
                return  # the other listener has noticed the shortage, in the same batch of events
            try:
                connection, _ = listener.accept()
            except BlockingIOError:
                return
            except expected(OSError) as exc:
                if exc.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS):
                    for waiting in self._listeners:
                        self._poll.unregister(waiting)  # it would stay ready, and the loop would spin
                    self._listen_again = now + _PAUSE_S
                self.dropped["no descriptor"] += 1
                return
            self._admit(connection, now, listener is not self._door.listener)

    def _admit(self, connection: socket.socket, now: float, is_tcp: bool) -> None:
        try:
            if is_tcp:
                watch_silence(connection, self._given_up_s)
            incoming = Incoming(connection, self._job.token, self._job.job_id, self._me, now)
        except expected(OSError, EpeeError) as exc:
            connection.close()
            self.dropped[_reason(exc)] += 1
            return
        strangers = [c for c in self._incoming.values() if c.peer is None]
        if len(strangers) >= MAX_STRANGERS or len(self._incoming) >= MAX_CONNECTIONS:
            oldest = min(strangers, key=lambda c: (c.has_spoken, c.deadline), default=None)
            if oldest is None:
                connection.close()
                self.dropped["too many"] += 1
                return
            self._close_incoming(oldest.fd, "too many")
        self._incoming[incoming.fd] = incoming
        self._poll.register(incoming.fd, select.EPOLLIN)

    def _receive(self, connection: Incoming) -> list[tuple[bytes, Message | GroupReport]]:
        was_known = connection.peer is not None
        try:
            payloads = connection.readable()
            peer = connection.peer
            if peer is None:
                return []
            if not was_known:
                self._replace(connection, peer.nonce)
            return [(peer.nonce, decode(payload)) for payload in payloads]
        except expected(OSError, EpeeError) as exc:
            self._close_incoming(connection.fd, _reason(exc))
            return []

    def _replace(self, connection: Incoming, nonce: bytes) -> None:
        """Close the earlier connection of a process that has connected again."""
        for fd, other in list(self._incoming.items()):
            if other is not connection and other.peer is not None and other.peer.nonce == nonce:
                self._close_incoming(fd, "")

    def _close_incoming(self, fd: int, reason: str) -> None:
        self._poll.unregister(fd)
        self._incoming.pop(fd).close()
        if reason:
            self.dropped[reason] += 1


def _reason(exc: Exception) -> str:
    if isinstance(exc, AuthError):
        return "not proved"
    if isinstance(exc, ProtocolError):
        return "malformed"
    return "" if isinstance(exc, OSError) else "broken"  # a peer that closes its connection is no error


def _seen(exc: Exception) -> int:
    """Return the reachability state that an error of a connection to another host implies (`Reach.note`)."""
    if isinstance(exc, AuthError | ProtocolError):
        return REFUSED
    if isinstance(exc, ConnectionRefusedError):
        return REFUSED
    if isinstance(exc, TimeoutError):
        return SILENT
    if isinstance(exc, ConnectionError):
        return ENDED
    is_away = isinstance(exc, OSError) and exc.errno in _AWAY
    return NO_ANSWER if is_away else UNKNOWN


def _parts(message: Message | GroupReport) -> list[Message | GroupReport]:
    """Split a Commit that could be longer than a frame; its receiver takes decisions one by one anyway.

    The last part alone is the answer to a question: the parts before it have come by then.
    """
    if not isinstance(message, Commit) or len(message.decisions) < 2:
        return [message]
    if _size(message) <= MAX_FRAME_BYTES // 2:
        return [message]
    *first, last = ((decision,) for decision in message.decisions)
    return [*map(Commit, first), Commit(last, message.answers)]


def _size(message: Commit) -> int:
    """Return an upper bound of the bytes of a Commit's frame."""
    total = 64
    for decision in message.decisions:
        total += 64 + sum(88 + len(member.endpoint) for member in decision.members)
        total += 64 * len(decision.removed) + 24 * (len(decision.cuts) + len(decision.starts)) + 8 * len(decision.met)
        total += sum(40 + len(part.locator) for part in decision.parts)
    return total
