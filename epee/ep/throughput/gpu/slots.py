"""The slots of a receive region: their owners, and when one may be written again.

A slot is taken for a result or a combine input and is returned when the last tensor over it has died. It may be taken
again at once: the stream that reuses it first waits for the work queued on the other streams of its readers, and a
remote writer learns of the slot only through the exchange of the call that reuses it.

A slot that was granted in a failed call may still be written by a peer that has not aborted. Another dispatch may grant
it again: no rank stores a row of that call before all ranks have joined it, and by then they have left the failed one.
But what is put into a slot for peers to pull must not be overwritten. So a slot is used for that only when a call after
the last one that granted it was joined by all: kernels count such calls in pinned memory (`exchanged`). No failure need
be known for this, so it holds without CPU sync as well.

A rank that a view excludes while its process lives (it was stopped, or silent) is a stale writer: no rank waits for it,
but it may still store into what was granted in the last call that it joined, and in later ones. Such slots, the landing
slot among them, are blocked until the stale writer has died or is a member again; graphs own their slots forever, so
all of these count. Another slot replaces a blocked landing slot. A stale writer whose rank another process has got
continues under a number of its own, as an evicted process (`pass_on`).
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from ....errors import ResourceError
from ....gpu.platform import Platform

_NOTHING: frozenset[int] = frozenset()
FIRST_GHOST = 1 << 10  # no rank has such a number


class ReceiveSlotPool:
    """Hands out slot numbers; thread-safe, as tensors die in any thread.

    Attributes:
        num_slots: slots that results may hold. There is one more, the landing slot, at first number `num_slots`.
        num_copies: calls whose result had to be copied out, for want of a slot.
        haunters: stale writers that may write a slot, by slot; only read.

    Args:
        exchanged: a word in pinned memory: number of the last call that all ranks were seen to join.
    """

    def __init__(self, platform: Platform, num_slots: int, exchanged: Sequence[int]) -> None:
        self.num_slots = num_slots
        self.num_copies = 0
        self._platform = platform
        self._lock = threading.RLock()  # a garbage collection under it may give a slot back
        self._free = list(range(num_slots))
        self._readers: dict[int, list[int]] = {}
        self._granted = [0] * (num_slots + 1)  # number of the last call that granted a slot
        self._in_graphs: set[int] = set()
        self.haunters: dict[int, set[int]] = {}
        self._landing = num_slots
        self._exchanged = exchanged

    @property
    def landing(self) -> int:
        """The slot for calls whose result is copied out, and for rows that a combine copies in.

        Raises:
            ResourceError: stale writers may still write into every slot that is free.
        """
        with self._lock:
            if not self._has_clean_landing():
                zombies = sorted(set().union(*self.haunters.values()))
                raise ResourceError(
                    f"every free slot may still be written by {_names(zombies)}, which is excluded and whose "
                    "process still runs; end that process, drop results, or make a new buffer"
                )
            return self._landing

    def grant_landing(self, call: int, for_graph: bool) -> int:
        """Return the landing slot, which call number `call` grants to peers; raises as `landing`."""
        slot = self.landing
        with self._lock:
            self._granted[slot] = call
            if for_graph:
                self._in_graphs.add(slot)
        return slot

    def haunt(self, zombies: Collection[int]) -> None:
        """Block the slots that ranks may still write which are to be excluded from the view while they live.

        Called before `exchanged` is advanced to the new view.
        """
        with self._lock:
            for slot, granted in enumerate(self._granted):
                if slot in self._in_graphs or (granted and granted >= self._exchanged[0]):
                    self.haunters.setdefault(slot, set()).update(zombies)
            self.haunters = {slot: ranks for slot, ranks in self.haunters.items() if ranks}
            self._has_clean_landing()  # now, before results take the slots that are left

    def pass_on(self, rank: int, ghosts: Collection[int], is_member: bool) -> None:
        """Assign `rank` to another process: what the old ones might write, the living ones of `ghosts` may still write.

        Args:
            rank: the rank.
            ghosts: numbers of the evicted processes that had it and live.
            is_member: whether `rank` took part so far; otherwise `haunt` has been called for it.
        """
        if is_member:
            self.haunt(ghosts)
        with self._lock:
            for haunters in self.haunters.values():
                if rank in haunters:
                    haunters.remove(rank)
                    haunters.update(ghosts)
            self.haunters = {slot: haunters for slot, haunters in self.haunters.items() if haunters}

    def release(self, ranks: Iterable[int]) -> None:
        """Unblock for these ranks, which are dead or have left all earlier calls: they write only newly granted
        slots.
        """
        with self._lock:
            gone = set(ranks)
            left = {slot: haunters - gone for slot, haunters in self.haunters.items()}
            self.haunters = {slot: haunters for slot, haunters in left.items() if haunters}

    @property
    def haunted(self) -> frozenset[int]:
        """Slots that stale writers may still write."""
        return frozenset(self.haunters) if self.haunters else _NOTHING

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
            if for_graph:
                self._in_graphs.add(slot)
        for reader in readers:
            if reader != stream and not for_graph:
                self._platform.wait(self._platform.mark(reader))
        return slot

    def grant_again(self, slot: int, call: int) -> None:
        """Let call number `call` grant to peers a slot that was not returned, whose result has died."""
        self._granted[slot] = call

    def give_back(self, slot: int, streams: list[int]) -> None:
        """Free a slot that work queued on `streams` may still read."""
        with self._lock:
            self._readers[slot] = streams
            self._free.append(slot)

    def _has_clean_landing(self) -> bool:
        """Replace a blocked landing slot by a free slot; return False when there is none."""
        if self._landing in self.haunters:
            clean = [slot for slot in self._free if slot not in self.haunters]
            if not clean:
                return False
            self._free.remove(clean[0])
            self._free.append(self._landing)
            self._landing = clean[0]
        return True

    def _pick(self, is_granted: bool) -> int | None:
        """Choose a free slot: the one granted last for another grant, so that the others are soon safe to fill."""
        free = self._free
        if self.haunters:
            free = [slot for slot in free if slot not in self.haunters]
        if not free:
            return None
        if is_granted:
            return max(free, key=self._granted.__getitem__)
        slot = min(free, key=self._granted.__getitem__)
        granted = self._granted[slot]
        return slot if granted == 0 or granted < self._exchanged[0] else None


@dataclass(eq=False, slots=True)
class Taken:
    """A slot and the streams that may read it; returns the slot when its tensor dies. A graph keeps its slot."""

    pool: ReceiveSlotPool
    slot: int
    streams: list[int]
    is_graphs: bool
    is_back: bool = False

    def __call__(self) -> None:
        if not self.is_graphs and not self.is_back:
            self.is_back = True
            self.pool.give_back(self.slot, self.streams)


def _names(zombies: Sequence[int]) -> str:
    """Return the names of stale writers, for messages."""
    ranks = [str(zombie) for zombie in zombies if zombie < FIRST_GHOST]
    ghosts = ["the process that had the place of a replaced rank"] if len(ranks) < len(zombies) else []
    return " and ".join([*([f"rank {', '.join(ranks)}"] if ranks else []), *ghosts])
