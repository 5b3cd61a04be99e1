"""The slots of a receive region: who holds which, and when one may be written again.

A slot is taken for a result or a combine input and goes back when the last tensor over it has died. It may be taken
again at once: the stream that reuses it first waits for whatever is queued on the other streams of its readers, and a
remote writer learns of the slot only through the exchange of the call that reuses it.

A slot granted in a call that failed may still be written by a peer that has not given up. It stays in quarantine until
a later call's exchange has succeeded: by then every peer has left the failed call.
"""

from __future__ import annotations

import threading

from .throughput_platform import Platform


class SlotPool:
    """Hands out slot numbers; thread-safe, as tensors die in any thread.

    Attributes:
        num_slots: slots that results may hold; slot number `num_slots` is the landing place and is never handed out.
        num_copies: calls whose result had to be copied out, for want of a slot.
    """

    def __init__(self, platform: Platform, num_slots: int) -> None:
        self.num_slots = num_slots
        self.num_copies = 0
        self._platform = platform
        self._lock = threading.Lock()
        self._free = list(range(num_slots))
        self._readers: dict[int, list[int]] = {}
        self._quarantine: list[int] = []

    @property
    def landing(self) -> int:
        """The slot for calls whose result is copied out."""
        return self.num_slots

    def take(self, stream: int, for_graph: bool = False) -> int | None:
        """Return a free slot that work on `stream` may write from now on, or None when there is none.

        A graph's slot needs no wait: recording begins with a synchronisation of the device.
        """
        with self._lock:
            if not self._free:
                self.num_copies += 1
                return None
            slot = self._free.pop(0)
            readers = self._readers.pop(slot, [])
        for reader in readers:
            if reader != stream and not for_graph:
                self._platform.wait(self._platform.mark(reader))
        return slot

    def give_back(self, slot: int, streams: list[int]) -> None:
        """Free a slot that work queued on `streams` may still read."""
        with self._lock:
            self._readers[slot] = streams
            self._free.append(slot)

    def quarantine(self, slot: int) -> None:
        """Set aside a slot that a peer may still write."""
        with self._lock:
            self._quarantine.append(slot)

    def settle(self) -> None:
        """Free what is in quarantine: an exchange has succeeded since."""
        if not self._quarantine:
            return
        with self._lock:
            self._free += self._quarantine
            self._quarantine = []

    @property
    def num_free(self) -> int:
        """Slots that can be taken now."""
        return len(self._free)
