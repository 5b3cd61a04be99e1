"""Mutual authentication of two processes of a job, and authentication of each frame between them.

The job's token is 32 random bytes that only its processes can read. A connection opens with three messages of fixed
size, so nothing that an unknown peer sends decides how much is read:

    initiator -> responder   hello: version, job, who I am, whom I want, 32 random bytes
    responder -> initiator   challenge: version, who I am, 32 random bytes, proof over both messages
    initiator -> responder   proof over both messages

A proof is HMAC-SHA256 under the token, with a label that names the prover, so neither can be reflected; both sides
contribute random bytes, so neither can be replayed; job, slots, incarnations and nonces of the processes are part of
what is proved, so an answer for one process or job is worth nothing for another. Frames then flow from the initiator to
the responder only: length, payload, MAC (keyed BLAKE2b under a key of this connection and direction) over a counter,
the length and the payload. A frame that is changed, repeated, left out or moved does not fit its counter.

The proof shows that the peer is a process of the job. It does not show which one: all share one token, and slots and
nonces are no secret, so any holder of the token could act as any slot. All holders are processes of one user, and could
do worse.

Anything else raises `AuthError` or `ProtocolError`; the connection is closed then, and nothing received on it was used.
Payloads are not encrypted: those of the control plane are not secret. A crash leaves nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from typing import NamedTuple, NoReturn

from ...errors import AuthError, InvalidArgument, ProtocolError
from .wire import MAX_FRAME_BYTES, NONCE_BYTES

PROTOCOL = 3  # version of the control plane: handshake, frames and messages
TOKEN_BYTES = 32
JOB_ID_BYTES = 16
_CHALLENGE_BYTES = _PROOF_BYTES = 32
_MAC_BYTES = 16
_MAGIC = b"epeectl\0"
_HEAD = struct.Struct("<8sQ")  # magic, version: the same in all future versions
_HELLO = struct.Struct(f"<{JOB_ID_BYTES}siq{NONCE_BYTES}si{NONCE_BYTES}s{_CHALLENGE_BYTES}s")
_ANSWER = struct.Struct(f"<iq{NONCE_BYTES}s{_CHALLENGE_BYTES}s")
_LENGTH = struct.Struct("<I")
_COUNTER = struct.Struct("<Q")

HELLO_BYTES = _HEAD.size + _HELLO.size
CHALLENGE_BYTES = _HEAD.size + _ANSWER.size + _PROOF_BYTES
PROOF_BYTES = _PROOF_BYTES


class Token:
    """The secret of a job. It is never shown: not in `repr`, and it cannot be sent."""

    __slots__ = ("_secret",)

    def __init__(self, secret: bytes) -> None:
        """Keep `secret`, `TOKEN_BYTES` bytes; raises `InvalidArgument` for another length."""
        if len(secret) != TOKEN_BYTES:
            raise InvalidArgument(f"a job's token has {TOKEN_BYTES} bytes, got {len(secret)}; let rank 0 make it")
        self._secret = secret

    def __repr__(self) -> str:
        return "Token(secret)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a job's token must not leave its process")

    def reveal(self) -> bytes:
        """Return the secret itself, for a store through which the processes of other hosts get it."""
        return self._secret

    def derive(self, label: bytes, data: bytes) -> bytes:
        """Return 32 bytes that only holders of the token can know: HMAC-SHA256 of the label and the data."""
        return hmac.digest(self._secret, label + b"\0" + data, "sha256")


class Identity(NamedTuple):
    """The identity of a process.

    Attributes:
        slot: its rank number in the job.
        incarnation: of that slot, 0 as long as it waits to join.
        nonce: `NONCE_BYTES` random bytes that distinguish this process from any other.
    """

    slot: int
    incarnation: int
    nonce: bytes


class Sealer:
    """Makes the frames of one connection."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._counter = 0

    def seal(self, payload: bytes) -> bytes:
        """Return the frame of `payload`, which has at most `MAX_FRAME_BYTES` bytes."""
        assert 0 < len(payload) <= MAX_FRAME_BYTES
        frame = _LENGTH.pack(len(payload)) + payload
        mac = _mac(self._key, self._counter, frame)
        self._counter += 1
        return frame + mac


class Opener:
    """Reads the frames of one connection. After an error it must not be used again."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._counter = 0
        self._pending = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Take bytes from the connection; return the payloads that are complete now.

        Raises:
            AuthError: a MAC does not fit: the bytes were changed, repeated or come from another sender.
            ProtocolError: a length is invalid.
        """
        self._pending += data
        payloads = []
        while len(self._pending) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._pending)
            if not 0 < length <= MAX_FRAME_BYTES:
                raise ProtocolError(f"a frame has 1 ... {MAX_FRAME_BYTES} bytes, got {length}; the connection ends")
            end = _LENGTH.size + length
            if len(self._pending) < end + _MAC_BYTES:
                break
            frame, mac = bytes(self._pending[:end]), self._pending[end : end + _MAC_BYTES]
            if not hmac.compare_digest(_mac(self._key, self._counter, frame), mac):
                raise AuthError(f"frame {self._counter} of a connection has a wrong MAC; the connection ends")
            self._counter += 1
            del self._pending[: end + _MAC_BYTES]
            payloads.append(frame[_LENGTH.size :])
        return payloads


def _mac(key: bytes, counter: int, frame: bytes) -> bytes:
    return hashlib.blake2b(_COUNTER.pack(counter) + frame, key=key, digest_size=_MAC_BYTES).digest()


class Initiator:
    """The side that connects and will send: send `hello()`, pass the response to `answer`, send what that returns."""

    def __init__(self, token: Token, job_id: bytes, me: Identity, peer: Identity) -> None:
        self._token = token
        self._peer = peer
        self._transcript = b""
        self._hello = _HEAD.pack(_MAGIC, PROTOCOL) + _HELLO.pack(
            job_id, *me, peer.slot, peer.nonce, secrets.token_bytes(_CHALLENGE_BYTES)
        )

    def hello(self) -> bytes:
        """Return the first message, `HELLO_BYTES` long."""
        return self._hello

    def answer(self, challenge: bytes) -> tuple[bytes, Sealer]:
        """Check the responder's `CHALLENGE_BYTES` bytes; return the last message and the maker of frames.

        Raises:
            AuthError: the responder does not hold the token, or is another process than the one wanted.
            ProtocolError: it runs another version, or this is no challenge.
        """
        body = _body(challenge, CHALLENGE_BYTES)[: _ANSWER.size]
        transcript = self._hello + challenge[:-_PROOF_BYTES]
        expected = self._token.derive(b"responder", transcript)
        if not hmac.compare_digest(expected, challenge[-_PROOF_BYTES:]):
            raise AuthError(f"the process that answers for slot {self._peer.slot} does not hold the job's token")
        slot, _, nonce, _ = _ANSWER.unpack(body)
        if (slot, nonce) != (self._peer.slot, self._peer.nonce):
            raise AuthError(f"slot {slot} answers for slot {self._peer.slot}, or its process is another one")
        self._transcript = transcript
        return self._token.derive(b"initiator", transcript), Sealer(self._token.derive(b"frames", transcript))

    def key(self, purpose: bytes) -> bytes:
        """Return 32 bytes that only the two ends know, others for each purpose; after `answer`."""
        assert self._transcript
        return self._token.derive(b"key for " + purpose, self._transcript)


class Responder:
    """The accepting side, which will receive. Pass it the hello, send what it returns, pass it the proof."""

    def __init__(self, token: Token, job_id: bytes, me: Identity) -> None:
        self._token, self._job_id, self._me = token, job_id, me
        self._transcript = b""
        self.peer: Identity | None = None  # as claimed; true once `finish` has returned

    def challenge(self, hello: bytes) -> bytes:
        """Check the initiator's `HELLO_BYTES` bytes; return the second message, `CHALLENGE_BYTES` long.

        Raises:
            ProtocolError: another version, another job, another addressee, or no hello; `refusal` is what to send.
        """
        fields = _HELLO.unpack(_body(hello, HELLO_BYTES))
        job_id, slot, incarnation, nonce, to_slot, to_nonce, _ = fields
        if not hmac.compare_digest(job_id, self._job_id):
            raise ProtocolError(f"a process of another job ({job_id.hex()}) has called; do two jobs share a store?")
        if to_slot != self._me.slot or not hmac.compare_digest(to_nonce, self._me.nonce):
            raise ProtocolError(f"a process wants another than slot {self._me.slot}, or an earlier one of this slot")
        if hmac.compare_digest(nonce, self._me.nonce):
            raise ProtocolError("a process calls with this process's own nonce; the hello was reflected")
        self.peer = Identity(slot, incarnation, nonce)
        ours = _HEAD.pack(_MAGIC, PROTOCOL) + _ANSWER.pack(*self._me, secrets.token_bytes(_CHALLENGE_BYTES))
        self._transcript = hello + ours
        return ours + self._token.derive(b"responder", self._transcript)

    def finish(self, proof: bytes) -> Opener:
        """Check the initiator's `PROOF_BYTES` bytes; return the reader of its frames.

        Raises:
            AuthError: the initiator does not hold the token.
        """
        assert self._transcript
        if not hmac.compare_digest(self._token.derive(b"initiator", self._transcript), proof):
            raise AuthError("a process that connected does not hold the job's token")
        return Opener(self._token.derive(b"frames", self._transcript))

    def key(self, purpose: bytes) -> bytes:
        """Return what the initiator's `key` returns; after `finish`."""
        assert self._transcript
        return self._token.derive(b"key for " + purpose, self._transcript)


def refusal() -> bytes:
    """Return the message of a responder before it closes: its version, and no proof of anything."""
    return _HEAD.pack(_MAGIC, PROTOCOL).ljust(CHALLENGE_BYTES, b"\0")


def _body(data: bytes, num_bytes: int) -> bytes:
    """Check magic and version; return what follows."""
    if len(data) != num_bytes:
        raise ProtocolError(f"a message of a handshake has {num_bytes} bytes, got {len(data)}")
    magic, version = _HEAD.unpack_from(data)
    if magic != _MAGIC:
        raise ProtocolError("the other side of a connection does not speak epee's protocol")
    if version != PROTOCOL:
        raise ProtocolError(
            f"the other side speaks version {version} of the control plane, this process {PROTOCOL}; "
            "install one version of epee everywhere"
        )
    return data[_HEAD.size :]
