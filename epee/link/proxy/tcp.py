"""Chunks over a link of TCP: the frames of `link/frames.py`, out of staging memory and straight into it.

    a chunk        WRITE at the byte offset of its slot in the receiver's area, `word` its kind, `value` its chunk word;
                   a long one as several frames, the word behind the last (`TcpLink.write`)
    credit         WRITE without bytes, `word` the kind + `CREDIT`, `value` the number
    introduction   PIECES, first and once: the numbers on which both ends must agree; with NIXL also what it needs
                   (`nixl.py`), and a chunk is a WRITE without bytes then
    END            nothing more comes; the end of the connection is no loss

Headers and introduction are always authenticated, the bytes of chunks with EPEE_LINK_MAC=1, as on every link. The sink
asks the machines (`peer.py`) before it names memory: a peer can write only the slot that is next, from its beginning,
while no kernel reads it, and only behind a valid introduction. Anything else ends the connection.

The sender's slot is read by the kernel of the system when the socket takes the bytes; `num_read` counts it then. A
crash of the sender leaves a part of a chunk in a slot, without a word, so nobody reads it.
"""

from __future__ import annotations

import struct
from collections import deque
from typing import NamedTuple

from ...errors import ProtocolError
from ..frames import END, NO_WORD, PIECES, WRITE, Frame, parse_pieces
from ..tcp import TcpLink
from .chunks import ChunkRun
from .peer import ProxyPeer
from .words import CHUNKS, KINDS, ROWS, SIZE_BITS, ProxyShape, parse_chunk_word

CREDIT = len(KINDS)  # added to a kind: the index of its word for credit
INTRODUCTION = 2 * len(KINDS)
_NUMBERS = struct.Struct("<8s8Q")
_MARK = b"epeeprx1"
ENGINES = ("tcp", "nixl")


class ChunkIntroduction(NamedTuple):
    """The numbers on which the two ends of a connection agree; `engine` is an index of `ENGINES`."""

    engine: int
    epoch: int
    first: int
    process: int
    num_processes: int
    num_slots: int
    slot_bytes: int
    row_bytes: int

    def pack(self) -> bytes:
        """Return the bytes that `require_equal` reads."""
        return _NUMBERS.pack(_MARK, *self)

    def require_equal(self, data: bytes) -> None:
        """Raise `ProtocolError` unless a peer's introduction says the same."""
        if len(data) != _NUMBERS.size or not data.startswith(_MARK):
            raise ProtocolError("a peer's introduction is that of another version; install one version of epee")
        theirs = ChunkIntroduction(*_NUMBERS.unpack(data)[1:])
        for name, mine, other in zip(self._fields, self, theirs, strict=True):
            if mine != other:
                raise ProtocolError(f"{name} must be equal on all ranks, got {other} from a peer and {mine} here")


class ChunkSink:
    """The target of the frames of a partner; a `stream.FrameSink`.

    Args:
        peer: the machines of the partner.
        memory: the area in which its chunks arrive.
        shape: of the rank.
        introduction: of this end.

    Attributes:
        is_met: the peer's introduction has come, and fits.
        has_ended: the peer has announced that nothing more comes.
        details: what the peer's engine needs, as received; not checked.
    """

    def __init__(self, peer: ProxyPeer, memory: memoryview, shape: ProxyShape, introduction: ChunkIntroduction) -> None:
        self._peer, self._memory, self._shape, self._introduction = peer, memory, shape, introduction
        self._stored = dict.fromkeys(KINDS, 0)  # bytes of the chunk that is arriving
        self._has_bytes = ENGINES[introduction.engine] == "tcp"  # frames carry them
        self.is_met = self.has_ended = False
        self.details = b""

    def place(self, frame: Frame) -> memoryview:
        """As `FrameSink.place`."""
        if frame.kind != WRITE or not self.is_met or self.has_ended:
            raise ProtocolError(f"a frame of kind {frame.kind} from a peer that has not begun, or has ended")
        if CREDIT <= frame.word < 2 * CREDIT and not frame.nbytes:
            return self._memory[:0]
        if frame.nbytes and not self._has_bytes:
            raise ProtocolError(f"a peer sends {frame.nbytes} bytes over a connection that carries words alone")
        kind = self._kind_at(frame)
        slot, start = divmod(frame.offset - self._shape.base(kind), self._shape.size(kind))
        if frame.word not in (kind, NO_WORD) or start != self._stored[kind]:
            raise ProtocolError(
                f"a peer writes {frame.nbytes} bytes at {start} of a slot with word {frame.word}; it has written "
                f"{self._stored[kind]} of a chunk of kind {kind}"
            )
        self._peer.receiver(kind).admit(slot, start + frame.nbytes)
        return self._memory[frame.offset : frame.offset + frame.nbytes]

    def apply(self, frame: Frame, payload: memoryview) -> None:
        """As `FrameSink.apply`."""
        if frame.kind == WRITE and frame.word == NO_WORD:
            self._stored[self._kind_at(frame)] += frame.nbytes
        elif frame.kind == WRITE and frame.word >= CREDIT:
            self._peer.hear_credit(frame.word - CREDIT, frame.value)
        elif frame.kind == WRITE:
            nbytes, self._stored[frame.word] = self._stored[frame.word] + frame.nbytes, 0
            if not self._has_bytes:  # the engine has stored them, in a slot that was granted
                nbytes = parse_chunk_word(frame.value, self._shape.size(frame.word)).nbytes
            self._peer.receiver(frame.word).arrive(frame.value, nbytes)
        elif frame.kind == PIECES and frame.word == INTRODUCTION and not self.is_met:
            (_, numbers), *more = parse_pieces(payload, frame.offset)
            self._introduction.require_equal(bytes(numbers))
            self.details = b"".join(bytes(data) for _, data in more)
            self.is_met = True
        elif frame.kind == END and self.is_met:
            self.has_ended = True
        else:
            raise ProtocolError(f"a frame of kind {frame.kind} with word {frame.word} says nothing to a proxy")

    def _kind_at(self, frame: Frame) -> int:
        return CHUNKS if frame.offset < self._shape.base(ROWS) else ROWS


class TcpTransport:
    """A `ChunkTransport` over a link.

    Args:
        link: to the partner; driven by the caller.
        memory: the area from which it is sent to.
        shape: of the rank.

    Attributes:
        is_refused: something was to be sent over a link that has ended, or could not be.
    """

    def __init__(self, link: TcpLink, memory: memoryview, shape: ProxyShape) -> None:
        self._link, self._memory, self._shape = link, memory, shape
        self._frames: dict[int, deque[int]] = {kind: deque() for kind in KINDS}  # last frames of chunks not yet read
        self.is_refused = False

    def introduce(self, introduction: ChunkIntroduction) -> None:
        """Send the introduction of this end."""
        self._link.write_pieces([(0, introduction.pack())], INTRODUCTION, 0, 0)

    def meet(self, details: bytes) -> None:
        """Use what the peer's engine needs; nothing, here."""

    @property
    def is_flushed(self) -> bool:
        """True when everything that was given has left, and was announced."""
        return self._link.is_flushed

    def close(self) -> None:
        """Give up what is under way; the link is the caller's."""

    def send(self, kind: int, run: ChunkRun) -> None:
        """As `ChunkTransport.send`."""
        self.is_refused |= self._link.lost is not None
        size = self._shape.size(kind)
        offset = self._shape.base(kind) + run.slot * size
        for i in range(run.num_chunks):
            data = self._memory[offset : offset + run.nbytes]
            self._link.write(offset, data, kind, run.word + (i << SIZE_BITS), 0)
            self._frames[kind].append(self._link.newest)
            offset += size

    def num_read(self, kind: int) -> int:
        """As `ChunkTransport.num_read`."""
        frames, count = self._frames[kind], 0
        while frames and self._link.is_out(frames[0]):
            frames.popleft()
            count += 1
        return count

    def credit(self, kind: int, taken: int) -> None:
        """As `ChunkTransport.credit`."""
        self._link.write(0, b"", CREDIT + kind, taken, 0)
