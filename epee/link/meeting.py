"""The meeting of the processes of a group that are partners over the network: one connection per pair.

Data path: each process listens at an address of its own, which its record in the store contains. In a pair the lower
rank connects, repeatedly until the deadline (the higher one where it alone knows of the need: `want`); then the mutual
handshake of `view/transport/auth.py`, under the group's token: hello, challenge, proof; then a welcome, without which
the connecting side could not know that the other has not aborted it meanwhile. The result is a socket and two keys, one
for each direction.

Influence of an unauthenticated peer on the port: it can lose its own connection. It has `HANDSHAKE_S` seconds, at most
the bytes of one handshake message in memory here, and there are `MAX_STRANGERS` at most; the oldest is dropped for a
new one, one that has sent nothing before one that has sent a valid hello. Once all partners are connected the process
stops listening, unless the meeting stays: then its owner steps it (`step`), sets the ranks to call from now on (`want`,
`forget`), and takes the resulting connections (`take`). A partner that calls again, because it has lost its end, gets a
new connection.

The caller has to notice a partner that dies meanwhile (`check`); connection attempts to it continue in vain.
"""

from __future__ import annotations

import errno
import hmac
import logging
import os
import selectors
import socket
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from ..errors import CommTimeoutError, EpeeError, expected
from ..view.transport.auth import (
    CHALLENGE_BYTES,
    HELLO_BYTES,
    PROOF_BYTES,
    Identity,
    Initiator,
    Responder,
    Token,
    refusal,
)

logger = logging.getLogger("epee")

HANDSHAKE_S = 5.0
MAX_STRANGERS = 64
_AGAIN_S = 0.05
_SLICE_S = 0.1
_FORTH, _BACK = b"link forth", b"link back"  # from the connecting side, and to it
_WELCOME, _WELCOME_BYTES = b"link welcome", 32  # a key that serves as a message: only the two ends know it


class Partner(NamedTuple):
    """The address at which a partner listens, and its identity."""

    address: str
    port: int
    who: Identity


class Connected(NamedTuple):
    """A connection that is past its handshake, with the keys for sending and receiving."""

    connection: socket.socket
    out_key: bytes
    in_key: bytes


class _Talk:
    """One handshake under way: the bytes still to be read, and their handler.

    Attributes:
        deadline: `time.monotonic()` value at which it is aborted.
    """

    def __init__(self, connection: socket.socket, wanted: int, now: float) -> None:
        self.connection = connection
        self.wanted = wanted
        self.got = bytearray()
        self.deadline = now + HANDSHAKE_S

    def read(self) -> bytes:
        """Return the next message when it is complete, else b"".

        Raises:
            OSError: the other side has closed.
        """
        data = self.connection.recv(self.wanted - len(self.got))
        if not data:
            raise ConnectionResetError("the other side has closed the connection")
        self.got += data
        if len(self.got) < self.wanted:
            return b""
        message, self.got = bytes(self.got), bytearray()
        return message

    def say(self, message: bytes) -> None:
        """Send a message of the handshake: the empty buffer of a new socket takes far more."""
        if self.connection.send(message) != len(message):
            raise ConnectionResetError("the other side does not read")


class _Dial(_Talk):
    """The side that connects."""

    def __init__(self, rank: int, connection: socket.socket, initiator: Initiator, now: float) -> None:
        super().__init__(connection, CHALLENGE_BYTES, now)
        self.rank = rank
        self.initiator = initiator
        self.has_greeted = False


class _Answer(_Talk):
    """The side that is connected to."""

    def __init__(self, connection: socket.socket, responder: Responder, now: float) -> None:
        super().__init__(connection, HELLO_BYTES, now)
        self.responder = responder


class Meeting:
    """The connections of one process that are being made.

    Args:
        token, job_id: of the group.
        me: this process.
        partners: by rank.
        listener: the socket to which the lower ranks of pairs connect; closed by `run`, or by `close` if the meeting
        stays.
        stays: the meeting goes on when `run` has returned.
    """

    def __init__(
        self,
        token: Token,
        job_id: bytes,
        me: Identity,
        partners: Mapping[int, Partner],
        listener: socket.socket,
        stays: bool = False,
    ) -> None:
        self._token, self._job_id, self._me = token, job_id, me
        self._partners = dict(partners)
        self._stays = stays
        self._why: dict[int, str] = {}  # result of the last call of a partner
        self._listener = listener
        self._met: dict[int, Connected] = {}
        self._select = selectors.DefaultSelector()
        self._talks: set[_Talk] = set()
        self._again = {rank: 0.0 for rank in partners if rank > me.slot}  # rank to call -> time of the call
        self._short: OSError | None = None  # reason for which a partner could not be called

    def run(self, deadline: float, check: Callable[[], None]) -> dict[int, Connected]:
        """Return the connections with all partners.

        Args:
            deadline: `time.monotonic()` value.
            check: called now and then; raises to end the wait.

        Raises:
            CommTimeoutError: a partner did not come in time. OSError: this process has no descriptor left to call with.
        """
        try:
            self.listen()
            while len(self._met) < len(self._partners):
                if time.monotonic() > deadline:
                    raise self._late()
                check()
                self.step(_SLICE_S)
                if self._short is not None:
                    raise self._short
            met = self.take()
        except BaseException:
            self.close()
            raise
        if not self._stays:
            self.close()
        return met

    def listen(self) -> None:
        """Begin to poll for connecting processes."""
        self._select.register(self._listener, selectors.EVENT_READ)

    @property
    def port(self) -> int:
        """The port to which others connect."""
        return int(self._listener.getsockname()[1])

    def fileno(self) -> int:
        """Return a descriptor that is readable when a step has something to do, besides calling."""
        return self._select.fileno()  # Linux has an epoll there

    def step(self, timeout_s: float = 0.0) -> None:
        """Call the partners that are due, and handle what is ready; wait for that for `timeout_s` at most."""
        self._call(time.monotonic())
        events = self._select.select(timeout_s)
        for key, _ in events:
            if key.data in self._talks:
                self._go_on(key.data)
        # last: peers that have sent something are handled before
        if any(key.fileobj is self._listener for key, _ in events):
            self._accept()
        self._expire(time.monotonic())  # partners that answered while this process was stopped have been handled

    @property
    def is_busy(self) -> bool:
        """True while partners are to be called, or a handshake is under way."""
        return bool(self._again or self._talks)

    def take(self) -> dict[int, Connected]:
        """Return the connections made since the last call; the caller owns them."""
        met, self._met = self._met, {}
        return met

    def admit(self, rank: int, partner: Partner) -> None:
        """Accept calls of a partner from now on."""
        self._partners[rank] = partner

    def want(self, rank: int, alone: bool = False) -> None:
        """Call a partner until it is connected, if calling is this process's part.

        Args:
            alone: the partner does not know that it is needed, so this process calls whichever is the lower. Should a
            lower one call at the same time, its call counts: it refuses ours meanwhile.
        """
        if rank in self._partners and (alone or rank > self._me.slot) and rank not in self._again:
            self._again[rank] = 0.0

    def forget(self, rank: int) -> None:
        """Neither call a partner any more nor accept its calls."""
        self._partners.pop(rank, None)
        self._again.pop(rank, None)
        for talk in [talk for talk in self._talks if isinstance(talk, _Dial) and talk.rank == rank]:
            self._drop(talk)
        old = self._met.pop(rank, None)
        if old is not None:
            old.connection.close()

    def _late(self) -> CommTimeoutError:
        missing = sorted(set(self._partners) - set(self._met))
        where = ", ".join(map(self._missed, missing))
        return CommTimeoutError(
            f"init (rank={self._me.slot}): no connection with rank(s) {where}; can the hosts reach each other there? "
            "EPEE_HOST_IP names another address, `epee doctor --peer HOST:PORT` tries one",
            missing,
            has_job=False,
        )

    def _missed(self, rank: int) -> str:
        partner, why = self._partners[rank], self._why.get(rank, "")
        if rank < self._me.slot:
            why = why or "it has not called"
        return f"{rank} ({partner.address}:{partner.port}){f': {why}' if why else ''}"

    # ---- connecting side

    def _call(self, now: float) -> None:
        for rank, when in list(self._again.items()):
            if now < when:
                continue
            partner = self._partners[rank]
            self._again[rank] = now + HANDSHAKE_S + _AGAIN_S
            family = socket.AF_INET6 if ":" in partner.address else socket.AF_INET
            try:
                connection = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
            except expected(OSError) as exc:  # no descriptor is left here: other handshakes go on, and this again
                if self._short is None:
                    logger.warning("rank %d cannot call rank %d now, and tries again: %s", self._me.slot, rank, exc)
                self._again[rank], self._why[rank], self._short = now + _AGAIN_S, _reason(exc), exc
                continue
            self._short = None
            try:
                connection.connect((partner.address, partner.port))
            except BlockingIOError:
                pass
            except expected(OSError) as exc:
                connection.close()
                self._why[rank] = _reason(exc)
                self._again[rank] = now + _AGAIN_S
                continue
            talk = _Dial(rank, connection, Initiator(self._token, self._job_id, self._me, partner.who), now)
            self._talks.add(talk)
            self._select.register(connection, selectors.EVENT_WRITE, talk)

    def _dialled(self, talk: _Dial) -> None:
        if not talk.has_greeted:
            code = talk.connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise OSError(code, "cannot connect")
            talk.say(talk.initiator.hello())
            talk.has_greeted = True
            self._select.modify(talk.connection, selectors.EVENT_READ, talk)
            return
        message = talk.read()
        if not message:
            return
        if talk.wanted == CHALLENGE_BYTES:
            proof, _ = talk.initiator.answer(message)
            talk.say(proof)
            talk.wanted = _WELCOME_BYTES
            return
        if not hmac.compare_digest(message, talk.initiator.key(_WELCOME)):
            raise ConnectionResetError("no welcome")
        self._keep(talk, talk.rank, talk.initiator.key(_FORTH), talk.initiator.key(_BACK))

    # ---- accepting side

    def _accept(self) -> None:
        for _ in range(MAX_STRANGERS):
            try:
                connection, _ = self._listener.accept()
            except expected(OSError) as exc:  # the queue is empty, or no descriptor is left here: the others stay in it
                if exc.errno in (errno.EMFILE, errno.ENFILE):
                    time.sleep(_AGAIN_S)  # else the queue would wake this process all the time
                return
            answers = [talk for talk in self._talks if isinstance(talk, _Answer)]
            if len(answers) >= MAX_STRANGERS:
                self._drop(min(answers, key=lambda talk: (talk.wanted != HELLO_BYTES, talk.deadline)))
            connection.setblocking(False)
            talk = _Answer(connection, Responder(self._token, self._job_id, self._me), time.monotonic())
            self._talks.add(talk)
            self._select.register(connection, selectors.EVENT_READ, talk)

    def _answered(self, talk: _Answer) -> None:
        message = talk.read()
        if not message:
            return
        if talk.wanted == HELLO_BYTES:
            try:
                challenge = talk.responder.challenge(message)
            except EpeeError:
                talk.say(refusal())
                raise
            talk.say(challenge)
            talk.wanted = PROOF_BYTES
            return
        talk.responder.finish(message)
        who = talk.responder.peer
        expected = None if who is None else self._partners.get(who.slot)
        if who is None or expected is None or expected.who != who:
            raise ConnectionResetError("a process called that is not waited for")
        if who.slot > self._me.slot and who.slot in self._again:
            raise ConnectionResetError("a process called that is being called")
        talk.say(talk.responder.key(_WELCOME))
        self._keep(talk, who.slot, talk.responder.key(_BACK), talk.responder.key(_FORTH))

    # ---- both sides

    def _go_on(self, talk: _Talk) -> None:
        try:
            if isinstance(talk, _Dial):
                self._dialled(talk)
            elif isinstance(talk, _Answer):
                self._answered(talk)
        except BlockingIOError:
            return
        except expected(OSError, EpeeError) as exc:  # none of its data was used; a partner's connection is made again
            if isinstance(talk, _Dial):
                self._why[talk.rank] = _reason(exc)
            self._drop(talk)

    def _keep(self, talk: _Talk, rank: int, out_key: bytes, in_key: bytes) -> None:
        self._select.unregister(talk.connection)
        self._talks.discard(talk)
        self._again.pop(rank, None)
        old = self._met.pop(rank, None)
        if old is not None:  # a partner that lost its end of the first one has called again
            old.connection.close()
        self._met[rank] = Connected(talk.connection, out_key, in_key)

    def _drop(self, talk: _Talk) -> None:
        self._select.unregister(talk.connection)
        self._talks.discard(talk)
        talk.connection.close()
        if isinstance(talk, _Dial) and talk.rank in self._again:
            self._again[talk.rank] = time.monotonic() + _AGAIN_S

    def _expire(self, now: float) -> None:
        for talk in [talk for talk in self._talks if now > talk.deadline]:
            if isinstance(talk, _Dial):
                self._why[talk.rank] = "no answer to the handshake" if talk.has_greeted else "no answer"
            self._drop(talk)

    def close(self) -> None:
        """End every handshake under way, and stop listening; idempotent."""
        for talk in self._talks:
            talk.connection.close()
        for met in self._met.values():
            met.connection.close()
        self._talks.clear()
        self._met.clear()
        self._select.close()
        self._listener.close()


def _reason(exc: Exception) -> str:
    return os.strerror(exc.errno).lower() if isinstance(exc, OSError) and exc.errno else str(exc)
