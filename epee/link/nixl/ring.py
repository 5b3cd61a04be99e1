"""The two ends of a ring: bytes of a stream on their way through a fixed piece of memory.

Byte p of the stream lies at p modulo the ring's size, in the sender's staging memory and in the receiver's ring alike.
The sender writes its staging, NIXL the ring. Both know each other's progress by counts that are sent separately
(`control.py`):

    freed <= consumed <= done <= posted <= filled <= freed + size

The methods are called as those of a socket would be (`stream.Move`), and may be interrupted by an exception at any
line: their position follows from the stream alone, which records the result of a call by the same call. An interrupted
call is thus repeated and moves the same bytes to the same offsets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..stream import Instream, Outstream


class OutRing:
    """Bytes that wait here until they are in the peer's memory.

    Args:
        memory: the staging.
        stream: the stream of the bytes.

    Attributes:
        freed: the peer's read position: the memory up to there may be filled again.
    """

    def __init__(self, memory: memoryview, stream: Outstream) -> None:
        self._memory, self._stream = memory, stream
        self.freed = 0

    def sendmsg(self, buffers: Sequence[Any], *_: Any) -> int:
        """Copy the bytes for which there is room and return their number; `BlockingIOError`: none."""
        size, first = len(self._memory), self._stream.position
        end = self.freed + size
        if first >= end:
            raise BlockingIOError
        at = first
        for buffer in buffers:
            view = memoryview(buffer)[: end - at]
            start = at % size
            head = min(len(view), size - start)
            self._memory[start : start + head] = view[:head]
            if head < len(view):
                self._memory[: len(view) - head] = view[head:]
            at += len(view)
        return at - first

    def piece(self, start: int, most: int) -> tuple[int, int]:
        """Return the address of the bytes from `start` on, at most `most` of them in one piece, and their end."""
        at = start % len(self._memory)
        return at, min(self._stream.position, start + most, start + len(self._memory) - at)


class InRing:
    """Bytes that the peer has written.

    Attributes:
        done: the position up to which they are complete.
    """

    def __init__(self, memory: memoryview, stream: Instream) -> None:
        self._memory, self._stream = memory, stream
        self.done = 0

    def recv_into(self, place: memoryview) -> int:
        """Copy the next bytes and return their number; `BlockingIOError`: there are none."""
        size, first = len(self._memory), self._stream.position
        start = first % size
        count = min(len(place), self.done - first, size - start)
        if count <= 0:
            raise BlockingIOError
        place[:count] = self._memory[start : start + count]
        return count
