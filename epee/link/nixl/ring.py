"""The two ends of a ring: bytes of a stream on their way through a fixed piece of memory.

Byte p of the stream lies at p modulo the ring's size, in the sender's staging memory and in the receiver's ring alike.
Who writes: the sender its staging, NIXL the ring. Both know how far each is by counts that travel beside
(`control.py`):

    freed <= consumed <= done <= posted <= filled <= freed + size

The methods are called as those of a socket would be (`stream.Move`), and may be broken off by an exception at any line:
where they are follows from the stream alone, which notes what a call has returned by the same call. So one that was
broken off is called again and moves the same bytes to the same places.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..stream import Instream, Outstream


class OutRing:
    """Bytes that wait here until they are in the peer's memory.

    Args:
        memory: the staging.
        stream: whose bytes they are.

    Attributes:
        freed: how far the peer has read: the memory up to there may be filled again.
    """

    def __init__(self, memory: memoryview, stream: Outstream) -> None:
        self._memory, self._stream = memory, stream
        self.freed = 0

    def sendmsg(self, buffers: Sequence[Any], *_: Any) -> int:
        """Copy what there is room for and return how many bytes; `BlockingIOError`: none."""
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
        """Return where the bytes from `start` on lie, at most `most` of them in one piece, and where they end."""
        at = start % len(self._memory)
        return at, min(self._stream.position, start + most, start + len(self._memory) - at)


class InRing:
    """Bytes that the peer has written.

    Attributes:
        done: how far what it has written is complete.
    """

    def __init__(self, memory: memoryview, stream: Instream) -> None:
        self._memory, self._stream = memory, stream
        self.done = 0

    def recv_into(self, place: memoryview) -> int:
        """Copy the next bytes and return how many; `BlockingIOError`: there are none."""
        size, first = len(self._memory), self._stream.position
        start = first % size
        count = min(len(place), self.done - first, size - start)
        if count <= 0:
            raise BlockingIOError
        place[:count] = self._memory[start : start + count]
        return count
