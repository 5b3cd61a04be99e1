"""Frames of a link: the messages from one rank to a rank of another host, each authenticated and numbered.

    header    64 bytes: kind, flags, bytes of the payload, where it belongs, a word to store behind it and its value,
              a note that is always up to date, number of the frame, MAC of all that
    payload   at most MAX_PAYLOAD bytes
    trailer   16 bytes, MAC of the payload: of PIECES, ASK and TELL always, of a WRITE only where both ranks run with
              EPEE_LINK_MAC=1

    WRITE     store the payload at byte `offset` of the receiver's copy of the sender, then `value` in word `word`
    PIECES    the same with `offset` small payloads: first a table of their offsets and lengths
    ASK       request for these words of ranks of the receiver's host, read after all frames before this were applied
    TELL      the answer to the ASK of the same number (`value`)
    FETCH     request for all data of rank `offset`, after epoch `value` has become known to the receiver
    BEGIN     the following frames are of rank `offset`; the answer to a FETCH of epoch `value` begins
    END       it is complete; the frames after it are the sender's own. Without a FETCH: the last frame of the rank

A MAC is keyed BLAKE2b under a key of this connection and direction (`view/transport/auth.py`), over the number of the
frame among others: a header that is changed, repeated, left out or moved is detected, and nothing of it is used. The
same holds for a payload that says where bytes belong or how a call ends (PIECES, ASK, TELL), which is small. The
payload of a WRITE, the content of tensors, is protected by TCP's checksum alone unless EPEE_LINK_MAC=1; its MAC costs
0.6 GB/s of a core's speed (measured: decision 61), any other 1.3 us.

Pure: bytes in, values or `ProtocolError`/`AuthError` out.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..errors import AuthError, ProtocolError

HEADER_BYTES = 64
TRAILER_BYTES = _MAC_BYTES = 16
MAX_PAYLOAD = 1 << 20
WRITE, ASK, TELL, PIECES, FETCH, BEGIN, END = range(1, 8)
NO_WORD = (1 << 64) - 1
MAX_ASKED = 512  # words of one ASK
MAX_PIECES = 64  # of one PIECES
_HEADER = struct.Struct("<BBHIQQQQQ")
_pack, _unpack = _HEADER.pack, _HEADER.unpack
_blake2b, _is_equal, _new = hashlib.blake2b, hmac.compare_digest, tuple.__new__
_NUMBER = struct.Struct("<Q")
_HAS_TRAILER = 1
_PERSON = b"payload"
ASKED = struct.Struct("<QQ")  # a rank, and the index of a word of its own
PIECE = struct.Struct("<QQ")  # an offset, and how many bytes


class Frame(NamedTuple):
    """A parsed header.

    Attributes:
        kind: WRITE, ASK, TELL, PIECES, FETCH, BEGIN or END.
        nbytes: of the payload.
        offset: byte offset of a WRITE; number of PIECES; the rank that a FETCH, BEGIN or END is about.
        word: index of the word that a WRITE, or PIECES, store behind it, NO_WORD: none.
        value: of that word; number of an ASK or TELL; epoch of a FETCH, BEGIN or END.
        note: of both: a number of the sender's that only grows; its meaning is defined by the user of the link.
    """

    kind: int
    nbytes: int
    offset: int
    word: int
    value: int
    note: int = 0


class _Direction:
    """The MACs of one direction of a connection.

    Args:
        key: of the direction, 32 bytes.
        covers_payloads: the payload of a WRITE gets a trailer as well.
    """

    def __init__(self, key: bytes, covers_payloads: bool) -> None:
        self._mac = _blake2b(key=key, digest_size=_MAC_BYTES)  # a copy is cheaper than a new one
        self._payload_mac = _blake2b(key=key, digest_size=_MAC_BYTES, person=_PERSON)
        self.covers_payloads = covers_payloads

    def payload_mac(self, number: int, payload: Any) -> bytes:
        """Return the MAC of the payload of a frame.

        It never equals that of a header, whose hash has no personalization.
        """
        mac = self._payload_mac.copy()
        mac.update(_NUMBER.pack(number))
        mac.update(payload)
        return mac.digest()


class FrameSealer(_Direction):
    """Makes the frames of one direction of a connection."""

    def seal(self, frame: Sequence[int], number: int, payload: Any = b"") -> Sequence[Any]:
        """Return what to send, in order, for the frame with this number: header, payload, trailer.

        Args:
            frame: the fields of a `Frame`.
        """
        kind, nbytes, offset, word, value, note = frame
        flags = _HAS_TRAILER if nbytes and (kind != WRITE or self.covers_payloads) else 0
        head = _pack(kind, flags, 0, nbytes, offset, word, value, note, number)
        mac = self._mac.copy()
        mac.update(head)
        head += mac.digest()
        if not nbytes:
            return (head,)
        return (head, payload, self.payload_mac(number, payload)) if flags else (head, payload)


class FrameOpener(_Direction):
    """Checks the frames of one direction of a connection."""

    def open(self, header: bytes, number: int) -> Frame:
        """Return the header of the frame with this number.

        Raises:
            AuthError: the MAC does not fit: it was changed, repeated, moved, or comes from another sender.
            ProtocolError: it is no valid header; the peer runs another version, or is damaged.
        """
        body, mac = header[:-_MAC_BYTES], self._mac.copy()
        mac.update(body)
        if not _is_equal(mac.digest(), header[-_MAC_BYTES:]):
            raise AuthError(f"frame {number} of a link has a wrong MAC; the connection ends")
        kind, flags, reserved, nbytes, offset, word, value, note, told = _unpack(body)
        if told != number or reserved or not WRITE <= kind <= END or nbytes > MAX_PAYLOAD:
            raise ProtocolError(f"frame {number} of a link says what it cannot ({kind}, {nbytes} bytes, no {told})")
        if kind >= FETCH and nbytes:
            raise ProtocolError(f"frame {number} of a link says what it cannot ({kind}, {nbytes} bytes)")
        if flags != (_HAS_TRAILER if nbytes and (kind != WRITE or self.covers_payloads) else 0):
            raise ProtocolError("EPEE_LINK_MAC must be equal on all ranks; the connection ends")
        return _new(Frame, (kind, nbytes, offset, word, value, note))

    def check(self, payload: Any, trailer: Any, number: int) -> None:
        """Check a payload against its trailer; raises `AuthError`."""
        if not _is_equal(self.payload_mac(number, payload), bytes(trailer)):
            raise AuthError(f"the payload of frame {number} of a link has a wrong MAC; the connection ends")


def pack_asked(words: Sequence[tuple[int, int]]) -> bytes:
    """Return the payload of an ASK for words (rank, index)."""
    return b"".join(ASKED.pack(*each) for each in words)


def parse_asked(payload: bytes) -> list[tuple[int, int]]:
    """Return the words that an ASK requests, (rank, index) each; `ProtocolError` if it is invalid."""
    if len(payload) % ASKED.size or not 0 < len(payload) <= MAX_ASKED * ASKED.size:
        raise ProtocolError(f"an ASK has 1 ... {MAX_ASKED} words of {ASKED.size} bytes, got {len(payload)} bytes")
    return list(ASKED.iter_unpack(payload))


def pack_told(values: Sequence[int]) -> bytes:
    """Return the payload of a TELL."""
    return struct.pack(f"<{len(values)}Q", *values)


def parse_told(payload: bytes) -> tuple[int, ...]:
    """Return the values of a TELL; `ProtocolError` if it is invalid."""
    if len(payload) % 8 or not 0 < len(payload) <= MAX_ASKED * 8:
        raise ProtocolError(f"a TELL has 1 ... {MAX_ASKED} words, got {len(payload)} bytes")
    return struct.unpack(f"<{len(payload) // 8}Q", payload)


def pack_pieces(pieces: Sequence[tuple[int, bytes]]) -> bytes:
    """Return the payload of a PIECES frame: (offset, bytes) each."""
    return b"".join([*(PIECE.pack(offset, len(data)) for offset, data in pieces), *(data for _, data in pieces)])


def parse_pieces(payload: memoryview, num_pieces: int) -> list[tuple[int, memoryview]]:
    """Return the content of a PIECES frame, (offset, bytes) each; `ProtocolError` if it is invalid."""
    start = num_pieces * PIECE.size
    if not 0 < num_pieces <= MAX_PIECES or start > len(payload):
        raise ProtocolError(f"PIECES has 1 ... {MAX_PIECES} of them, got {num_pieces} in {len(payload)} bytes")
    pieces = []
    for offset, nbytes in PIECE.iter_unpack(payload[:start]):
        pieces.append((offset, payload[start : start + nbytes]))
        start += nbytes
    if start != len(payload):
        raise ProtocolError(f"the lengths of PIECES add up to {start} bytes, the payload has {len(payload)}")
    return pieces
