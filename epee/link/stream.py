"""The two ends of one direction of a connection, as machines without a socket: frames to bytes, bytes to frames.

Data path: `Outstream.put` queues a frame; `views` are the bytes to send next, which refer to the caller's memory (no
copy), and `sent` says how many the socket took. `Instream.room` is where the next bytes belong: the receiver's own
memory for the middle of a long payload, else a buffer. `got` says how many came; every frame that is complete is
applied to the `Sink`, in order.

An exception from a signal handler can come between any two lines. So how many bytes have passed the socket is not kept
in a field that a line updates: the socket's calls write it into a log themselves (`counted`, one call in C). Everything
else follows from that number and from fields that are each set by one assignment; `settle` brings both in step again
and may run any number of times, since applying a frame twice stores the same bytes in the same places.

Who owns what: an `Outstream` refers to a payload until the socket has taken it; whoever put it there must not change it
before (`backend/hosts/exports.py` says why nobody does). A crash leaves a part of a frame at the receiver: its word is
not stored, so nobody reads what came of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from ..errors import ProtocolError
from .frames import HEADER_BYTES, TRAILER_BYTES, WRITE, Frame, FrameOpener, FrameSealer

BUFFER_BYTES = 64 << 10
DIRECT_BYTES = 16 << 10  # what is left of a payload that goes straight to its place
MAX_VIEWS = 32  # given to one call of the socket


class Log:
    """How many bytes have passed, as the socket's own calls note it."""

    def __init__(self) -> None:
        self._counts = [0]

    def note(self, move: Callable[[Any], int], what: Any) -> int:
        """Call `move(what)`, which moves bytes, and note how many; return that.

        Both in one call of C: no exception of a signal handler comes between.
        """
        before = len(self._counts)
        self._counts.extend(map(move, (what,)))
        return self._counts[before]

    def total(self) -> int:
        """Return how many bytes have passed so far."""
        total = sum(self._counts)
        self._counts[:] = (total,)
        return total


class _Queued(NamedTuple):
    number: int
    start: int
    end: int
    parts: Any


class Outstream:
    """Frames on their way out.

    Attributes:
        log: what the socket has taken.
    """

    def __init__(self, sealer: FrameSealer) -> None:
        self.log = Log()
        self._sealer = sealer
        self._queue: deque[_Queued] = deque()
        self._past = (-1, 0)  # number of the last frame that is out, and where it ended

    def put(self, frame: Frame, payload: Any = b"") -> None:
        """Queue a frame; `payload`, a flat buffer of `frame.nbytes` bytes, must stay as it is until it is sent."""
        number, start = self._queue[-1][0:3:2] if self._queue else self._past
        parts = self._sealer.seal(frame, number + 1, payload)
        end = start + HEADER_BYTES + frame.nbytes + (TRAILER_BYTES if len(parts) > 2 else 0)
        self._queue.append(_Queued(number + 1, start, end, parts))

    def __len__(self) -> int:
        """Return the number of frames that are not out yet."""
        return len(self._queue)

    def settle(self) -> int:
        """Drop the frames that are out; return how many bytes have been sent."""
        sent, queue = self.log.total(), self._queue
        while queue and queue[0].end <= sent:
            self._past = queue[0].number, queue[0].end
            queue.popleft()
        return sent

    def views(self) -> list[Any]:
        """Return what to send next, as buffers."""
        sent, found = self.settle(), []
        for queued in self._queue:
            at = queued.start
            for part in queued.parts:
                length = len(part)
                if at + length > sent:
                    found.append(memoryview(part)[sent - at :] if at < sent else part)
                at += length
            if len(found) >= MAX_VIEWS:
                break
        return found


class Sink(Protocol):
    """Where the frames of a peer go."""

    def place(self, frame: Frame) -> memoryview:
        """Return the memory for the payload of a WRITE, `frame.nbytes` bytes.

        Raises:
            ProtocolError: the frame names a place or a word that this peer must not write.
        """

    def apply(self, frame: Frame, payload: memoryview) -> None:
        """Do what a complete frame says; the payload of a WRITE is in its place. May be called again."""


class _At(NamedTuple):
    """Where the reader is: start of the frame that comes, its number, and what its header said, if it is there."""

    start: int
    number: int
    frame: Frame | None
    place: memoryview | None


class Instream:
    """Frames on their way in.

    Attributes:
        log: what the socket has given.
    """

    def __init__(self, opener: FrameOpener, sink: Sink) -> None:
        self.log = Log()
        self._opener = opener
        self._sink = sink
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._base = 0  # stream position of the buffer's first byte
        self._at = _At(0, 0, None, None)
        self._scratch = bytearray()  # payloads that are not stored before they are checked

    def room(self) -> memoryview:
        """Return where the next bytes belong; never empty."""
        end = self.settle()
        start, _, frame, place = self._at
        kept = start  # what of the buffer is still needed; the payload's part of it is in its place
        if frame is not None and place is not None:
            last = start + HEADER_BYTES + frame.nbytes
            if last - end >= DIRECT_BYTES:
                self._base = last
                return place[end - last :]
            kept = min(end, last)
        if kept == end:
            self._base = end
        elif kept - self._base > BUFFER_BYTES // 2:
            self._shift(kept, end)
        return self._buffer[end - self._base :]

    def settle(self) -> int:
        """Apply every frame that is complete; return how many bytes have come."""
        end = self.log.total()
        while self._advance(end):
            pass
        return end

    def _advance(self, end: int) -> bool:
        start, number, frame, place = self._at
        first = start + HEADER_BYTES
        if frame is None:
            if end < first:
                return False
            frame = self._opener.open(bytes(self._bytes(start, first)), number)
            place = self._place_of(frame)
            self._at = _At(start, number, frame, place)
        last = first + frame.nbytes
        assert place is not None
        low, high = max(first, self._base), min(last, end)
        if low < high:  # else it came straight to its place
            place[low - first : high - first] = self._bytes(low, high)
        trailer = TRAILER_BYTES if self._opener.covers_payloads and frame.nbytes else 0
        if end < last + trailer:
            return False
        if trailer:
            self._opener.check(place, self._bytes(last, last + trailer), number)
            place = self._stored(frame, place)
        self._sink.apply(frame, place)
        self._at = _At(last + trailer, number + 1, None, None)
        return True

    def _place_of(self, frame: Frame) -> memoryview:
        """Return where the payload is collected: in its place at once, unless it must be checked before."""
        place = self._sink.place(frame) if frame.kind == WRITE else None
        if place is not None and not self._opener.covers_payloads:
            return place
        if len(self._scratch) < frame.nbytes:
            self._scratch = bytearray(frame.nbytes)
        return memoryview(self._scratch)[: frame.nbytes]

    def _stored(self, frame: Frame, payload: memoryview) -> memoryview:
        if frame.kind != WRITE:
            return payload
        place = self._sink.place(frame)
        place[:] = payload
        return place

    def _bytes(self, start: int, end: int) -> memoryview:
        if start < self._base:
            raise ProtocolError(f"bytes {start} ... {end} of a link are gone; the connection ends")
        return self._buffer[start - self._base : end - self._base]

    def _shift(self, start: int, end: int) -> None:
        """Move what is not used up to the beginning of a new buffer."""
        fresh = memoryview(bytearray(BUFFER_BYTES))
        fresh[: end - start] = self._bytes(start, end)
        self._buffer, self._base = fresh, start
