"""The ranks in the result of a call of mode "mask" on the GPUs, reported by its kernel to the work of that call.

A rank that dies after its part counts in the result, and is excluded from the calls after it; so the ranks that the cpu
later sees as excluded do not determine the ranks in a result. Each asynchronous call gives its kernels a word of pinned
memory, which they write when all is decided (`tell_counted` in `csrc/kernels/collective/mask/settle.cuh`): a stamp that
no other call has, and a bit for each rank. A word is lent to one work and reused by another when that work is deleted;
a kernel that is still unfinished then writes its own stamp there, before the next one does, as calls end in order.
"""

from __future__ import annotations

import itertools
from collections import deque

from ....gpu.platform import MappedWords, Platform
from ....gpu.ranks import MAX_LOCAL

NOBODY_ASKS = (0, 0)
STAMP_BITS = MAX_LOCAL  # the ranks' bits lie below the stamp
_NUM_WORDS = 256


class Count:
    """The word of one call.

    Args:
        words: the pinned memory.
        at: index of the word.
        stamp: of the call, above the ranks.
        free: receives the index of the word when this object is deleted.

    Attributes:
        address: of the word.
        stamp: as above.
    """

    __slots__ = ("_at", "_free", "_words", "address", "stamp")

    def __init__(self, words: MappedWords, at: int, stamp: int, free: deque[tuple[MappedWords, int]]) -> None:
        self._words, self._at, self._free = words, at, free
        self.address, self.stamp = words.address + 8 * at, stamp

    def __del__(self) -> None:
        self._free.append((self._words, self._at))

    def ranks(self) -> int:
        """Return a bit for each rank in the result; 0: the call has not ended, or was lost."""
        word = int(self._words.words[self._at])
        return word - self.stamp if word >> STAMP_BITS == self.stamp >> STAMP_BITS else 0


class CountWords:
    """The words of a group.

    Args:
        platform: the GPU.
    """

    def __init__(self, platform: Platform) -> None:
        self._platform = platform
        self._free: deque[tuple[MappedWords, int]] = deque()
        self._stamps = itertools.count(1 << STAMP_BITS, 1 << STAMP_BITS)

    def take(self) -> Count | None:
        """Return a word for a call; None while a graph is recorded, as it stands for many calls."""
        if self._platform.is_capturing():
            return None
        if not self._free:
            words = self._platform.mapped_words(_NUM_WORDS)
            self._free.extend((words, at) for at in range(_NUM_WORDS))
        words, at = self._free.popleft()
        return Count(words, at, next(self._stamps), self._free)
