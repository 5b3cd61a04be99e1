"""The slots of a receive region: who holds which, and when one may be written again.

A slot is taken for a result or a combine input and goes back when the last tensor over it has died. It may be taken
again at once: the stream that reuses it first waits for whatever is queued on the other streams of its readers, and a
remote writer learns of the slot only through the exchange of the call that reuses it.

A slot that was granted in a call that failed may still be written by a peer that has not given up. Another dispatch may
grant it again: nobody stores a row of that call before all ranks have joined it, and by then they have left the failed
one. But what is put into a slot for peers to pull must not be overwritten. So a slot is handed out for that only when a
call behind the last one that granted it was joined by all: kernels count such calls in pinned memory (`exchanged`).
No failure need be known for this, so it holds without CPU sync as well.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from .throughput_platform import Platform


class SlotPool:
    """Hands out slot numbers; thread-safe, as tensors die in any thread.

    Attributes:
        num_slots: slots that results may hold; slot number `num_slots` is the landing place and is never handed out.
        num_copies: calls whose result had to be copied out, for want of a slot.

    Args:
        exchanged: a word in pinned memory: number of the last call that all ranks were seen to join.
    """

    def __init__(self, platform: Platform, num_slots: int, exchanged: Sequence[int]) -> None:
        self.num_slots = num_slots
        self.num_copies = 0
        self._platform = platform
        self._lock = threading.Lock()
        self._free = list(range(num_slots))
        self._readers: dict[int, list[int]] = {}
        self._granted = [0] * num_slots  # number of the last call that granted a slot
        self._exchanged = exchanged

    @property
    def landing(self) -> int:
        """The slot for calls whose result is copied out."""
        return self.num_slots

    def take(self, stream: int, call: int | None, for_graph: bool = False) -> int | None:
        """Return a free slot that work on `stream` may write from now on, or None when there is none.

        Args:
            stream: on which it will be written first.
            call: number of the call that grants it to peers; None when this rank fills it, for peers to pull.
            for_graph: a graph's slot needs no wait: recording begins with a synchronisation of the device.
        """
        with self._lock:
            slot = self._pick(call is not None)
            if slot is None:
                self.num_copies += 1
                return None
            self._free.remove(slot)
            readers = self._readers.pop(slot, [])
            if call is not None:
                self._granted[slot] = call
        for reader in readers:
            if reader != stream and not for_graph:
                self._platform.wait(self._platform.mark(reader))
        return slot

    def give_back(self, slot: int, streams: list[int]) -> None:
        """Free a slot that work queued on `streams` may still read."""
        with self._lock:
            self._readers[slot] = streams
            self._free.append(slot)

    def _pick(self, is_granted: bool) -> int | None:
        """Choose a free slot: the one granted last for another grant, so that the others are soon safe to fill."""
        if not self._free:
            return None
        if is_granted:
            return max(self._free, key=self._granted.__getitem__)
        slot = min(self._free, key=self._granted.__getitem__)
        granted = self._granted[slot]
        return slot if granted == 0 or granted < self._exchanged[0] else None

    @property
    def num_free(self) -> int:
        """Slots that can be taken now."""
        return len(self._free)
