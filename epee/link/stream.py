"""The two ends of one direction of a connection, as state machines without a socket: frames to bytes, bytes to frames.

Data path: `Outstream.put` queues a frame, `send` gives the socket headers and the caller's own memory (no copy).
`Instream.receive` lets the socket fill the receiver's memory for the middle of a long payload, else a buffer; every
complete frame is applied to the `FrameSink`, in order.

An exception from a signal handler can come between any two lines. The number of bytes that have passed the socket is
therefore not kept in a field that a line updates: the socket's method is called, and its result appended to a list, by
one call in C (`counts.extend(map(move, ...))`). Everything else follows from the sum of that list and from fields that
are each set by one assignment. `send` and `receive` thus continue where they were interrupted; applying a frame twice
stores the same bytes at the same offsets.

Ownership: an `Outstream` refers to a payload until the socket has taken it; the caller must not change it before
(`engine/replication/exports.py` says why no caller does). A crash leaves a part of a frame at the receiver: its word is
not stored, so no rank reads what arrived of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from .frames import HEADER_BYTES, TRAILER_BYTES, WRITE, Frame, FrameOpener, FrameSealer

# of it a long payload's first part is copied; the rest is received directly in its target memory
BUFFER_BYTES = 8 << 10
DIRECT_BYTES = 2 << 10  # least remainder of a payload that is received so
MAX_VIEWS = 32  # given to one call of the socket
SEND_BYTES = 1 << 20  # likewise: what it takes at once should still be in the cache when the receiver reads it


Move = Callable[[Any], int]  # moves bytes and returns how many: a method of a socket


class Outstream:
    """Frames on their way out.

    Args:
        sealer: makes their headers.
        more: what `send` gives its `move` behind the buffers.
    """

    def __init__(self, sealer: FrameSealer, more: Sequence[Any] = ()) -> None:
        self._sealer = sealer
        self._more = tuple((each,) for each in more)
        self._counts = [0]  # what the socket has taken
        self._queue: deque[tuple[int, int, int, Sequence[Any]]] = deque()  # number, first byte, end, buffers
        self._past = (-1, 0)  # number of the last frame that is out, and its end position

    def __len__(self) -> int:
        """Return the number of frames that are not sent yet."""
        return len(self._queue)

    @property
    def position(self) -> int:
        """The number of bytes that the socket has taken."""
        return sum(self._counts)

    @property
    def num_sent(self) -> int:
        """Number of the last frame that is recorded as sent."""
        return self._past[0]

    @property
    def newest(self) -> int:
        """Number of the frame that was put last."""
        return self._queue[-1][0] if self._queue else self._past[0]

    def is_out(self, number: int) -> bool:
        """Return whether the socket has taken the frame with this number, and all before it."""
        return not self._queue or self._queue[0][0] > number

    def put(self, frame: Sequence[int], payload: Any = b"") -> int:
        """Queue a frame (the fields of a `Frame`) and return its number.

        `payload`, a flat buffer of as many bytes as the frame says, must stay as it is until it is sent.
        """
        queue = self._queue
        number, start = queue[-1][0:3:2] if queue else self._past
        parts = self._sealer.seal(frame, number + 1, payload)
        end = start + HEADER_BYTES + frame[1] + (TRAILER_BYTES if len(parts) > 2 else 0)
        queue.append((number + 1, start, end, parts))
        return number + 1

    def send(self, move: Move, most: int = 1 << 62) -> None:
        """Give `move` lists of buffers until everything, or between `most` and twice that many bytes, are sent.

        Raises:
            the exceptions of `move` (`BlockingIOError`: full).
        """
        queue, counts, more = self._queue, self._counts, self._more
        until = sum(counts) + most
        while queue:
            if len(counts) > 1:
                counts[:] = (sum(counts),)
            sent = counts[0]
            number, start, end, parts = queue[0]
            if end <= sent:
                self._past = number, end
                queue.popleft()
            elif sent >= until:
                return
            else:
                is_one = sent == start and len(queue) == 1 and end - start <= SEND_BYTES
                views = parts if is_one else self._views(sent)
                counts.extend(map(move, (views,), *more))

    def _views(self, sent: int) -> list[Any]:
        """Return the next buffers to send."""
        found: list[Any] = []
        last = sent + SEND_BYTES
        for _, at, _, parts in self._queue:
            for part in parts:
                length = len(part)
                if sent < at + length and at < last:
                    is_whole = sent <= at and at + length <= last
                    found.append(part if is_whole else memoryview(part)[max(0, sent - at) : last - at])
                at += length
            if at >= last or len(found) >= MAX_VIEWS:
                break
        return found


class FrameSink(Protocol):
    """The target of the frames of a peer."""

    def place(self, frame: Frame) -> memoryview:
        """Return the memory for the payload of a WRITE, `frame.nbytes` bytes.

        Raises:
            ProtocolError: the frame names an offset or a word that this peer must not write.
        """

    def apply(self, frame: Frame, payload: memoryview) -> None:
        """Apply a complete frame; the payload of a WRITE has been stored. May be repeated."""


class Instream:
    """Frames on their way in."""

    def __init__(self, opener: FrameOpener, sink: FrameSink) -> None:
        self._opener = opener
        self._sink = sink
        self._counts = [0]  # numbers of bytes that the socket has given
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._base = 0  # stream position of the buffer's first byte
        # start and number of the next frame; its parsed header and the target of its payload, once it is known
        self._at: tuple[int, int, Frame | None, memoryview | None] = (0, 0, None, None)
        self._scratch = bytearray()  # payloads that are not stored before they are checked

    @property
    def position(self) -> int:
        """The number of bytes that the socket has given."""
        return sum(self._counts)

    def receive(self, move: Move) -> int:
        """Let `move` fill a buffer, and apply every frame that is complete then; raises what it raises.

        Returns:
            1 when there may be more, 0 when the socket is empty, -1 when it has ended.
        """
        counts = self._counts
        end = sum(counts)
        if end == self._at[0]:  # the buffer is empty
            self._base, room = end, self._buffer
        else:
            self._settle(end)  # work that an exception has left undone
            room = self._room(end)
        counts.extend(map(move, (room,)))
        count = counts[-1]
        if not count:
            return -1
        counts[:] = (sum(counts),)
        self._settle(counts[0])
        return int(count == len(room))

    def _room(self, end: int) -> memoryview:
        """Return the memory for the next bytes; never empty."""
        start, _, frame, memory = self._at
        kept = start  # the part of the buffer that is still needed; the payload's bytes have been stored
        if frame is not None and memory is not None:
            last = start + HEADER_BYTES + frame.nbytes
            if last - end >= DIRECT_BYTES:
                self._base = last
                return memory[end - last :]
            kept = min(end, last)
        if kept == end:
            self._base = end
            return self._buffer
        if kept - self._base > BUFFER_BYTES // 2:
            self._shift(kept, end)
        return self._buffer[end - self._base :]

    def _settle(self, end: int) -> None:
        """Apply every complete frame, now that `end` bytes have come."""
        opener, sink, buffer, base = self._opener, self._sink, self._buffer, self._base
        covers = opener.covers_payloads
        while True:
            start, number, frame, memory = self._at
            first = start + HEADER_BYTES
            if end < first:
                return
            if frame is None or memory is None:
                frame = opener.open(bytes(buffer[start - base : first - base]), number)
                memory = sink.place(frame) if frame[0] == WRITE and not covers else self._collected(frame)
                self._at = (start, number, frame, memory)
            last = first + frame[1]
            low = first if first > base else base
            high = last if last < end else end
            if low < high:  # else it was received directly in its target memory
                memory[low - first : high - first] = buffer[low - base : high - base]
            if frame[1] and (covers or frame[0] != WRITE):
                if end < last + TRAILER_BYTES:
                    return
                opener.check(memory, buffer[last - base : last - base + TRAILER_BYTES], number)
                memory, last = self._stored(frame, memory), last + TRAILER_BYTES
            if end < last:
                return
            sink.apply(frame, memory)
            self._at = (last, number + 1, None, None)

    def _collected(self, frame: Frame) -> memoryview:
        """Return the memory that collects a payload which must be checked before it is stored, or is no WRITE's."""
        if frame.kind == WRITE:
            self._sink.place(frame)
        if len(self._scratch) < frame.nbytes:
            self._scratch = bytearray(frame.nbytes)
        return memoryview(self._scratch)[: frame.nbytes]

    def _stored(self, frame: Frame, payload: memoryview) -> memoryview:
        """Move a checked payload to its target memory."""
        if frame.kind != WRITE:
            return payload
        memory = self._sink.place(frame)
        memory[:] = payload
        return memory

    def _shift(self, start: int, end: int) -> None:
        """Move the unused bytes to the beginning of a new buffer."""
        fresh = memoryview(bytearray(BUFFER_BYTES))
        fresh[: end - start] = self._buffer[start - self._base : end - self._base]
        self._buffer, self._base = fresh, start
