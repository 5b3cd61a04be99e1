"""An arena: the memory of one layout, cut into equal slots, that a rank lends to its peers for payloads.

Writers and readers: a slot is either a landing slot (peers write rows into it, the owner reads) or a staging slot (the
owner writes, peers read). The owner decides which slot a peer may access: it is part of every call's exchange row. A
slot is used by at most one call at a time.

States of a slot, seen by its owner:

    free -> taken (a call uses it) -> leased (its rows were returned to the user as a view)
                                   -> cooling (peers may still access it until they have passed the call)
    leased -> free when the last tensor that views it has died; cooling -> free when all peers have passed the call
    leased -> cooling, when a leased staging slot was passed to a combine: free when both have happened

`num_slots` results and as many combine inputs may be leased; beyond them the caller gets ordinary memory. Two more
slots always serve the call in progress and the one before it: a call takes one slot, and when it starts, all peers have
passed every call but the last. `take` thus never fails.

A crash between two steps leaves nothing to repair: the pool is private to its process, and a peer's late store can only
hit a slot that is still cooling.

Releases come from weak-reference callbacks, at any moment and from any thread, so a callback only records the slot in a
dict; the owner's thread drains it.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy.typing as npt
import torch

from ..arrays import array_of, plain_tensors
from ..errors import ProtocolError
from .layout import Field, Layout
from .shared import SharedRegion, mapped_size

SPARE_SLOTS = 2  # for the call in progress and for the one that peers may not have passed yet


class SlotPool:
    """The states of slots. Pure bookkeeping: no memory, no clock; the caller reports progress by `between_calls`.

    Args:
        num_slots: how many results, and how many combine inputs, may be leased at once.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.total = num_pool_slots(num_slots)
        self._free = set(range(self.total))
        self._taken: set[int] = set()
        self._cooling: dict[int, int] = {}  # slot -> call that all peers must have passed
        self._leased: dict[int, str] = {}  # slot -> "result" | "input"
        self._released: dict[int, object] = {}  # slots whose tensors have died since the last drain

    def take(self) -> int:
        """Take a free slot for the call in progress; the lowest one, so that few pages are ever touched."""
        self._drain()
        slot = min(self._free)
        self._taken.add(slot)
        self._free.discard(slot)
        return slot

    def between_calls(self, seq: int, settled: int) -> bool:
        """Free the slots that nobody may access any more; return whether one is free.

        Args:
            seq: the last call. A slot that a call took and lost track of (after an interrupt) cools from there on.
            settled: every peer has finished all calls before this one.
        """
        for slot in list(self._taken):
            self.cool(slot, seq)
        self._drain()
        for slot, used in list(self._cooling.items()):
            if used < settled:
                del self._cooling[slot]
                if slot not in self._leased:
                    self._free.add(slot)
        return bool(self._free)

    def can_lease(self, purpose: str) -> bool:
        """Return whether one more slot may be leased for "result" or "input"."""
        self._drain()
        return list(self._leased.values()).count(purpose) < self.num_slots

    def lease(self, slot: int, purpose: str) -> Callable[[object], None]:
        """Lease a taken slot; returns the weak-reference callback that releases it.

        That is no Python function: an interrupt (Ctrl-C) in one would be printed, and the slot lost.
        """
        self._leased[slot] = purpose
        self._taken.discard(slot)
        return partial(self._released.__setitem__, slot)

    def leased(self, purpose: str) -> list[int]:
        """Return the slots that tensors of the user hold for `purpose`."""
        self._drain()
        return [slot for slot, used in self._leased.items() if used == purpose]

    def is_cooling(self, slot: int) -> bool:
        """Return whether peers may still access the slot because of an earlier call."""
        return slot in self._cooling

    def cool(self, slot: int, seq: int) -> None:
        """Release a taken or leased slot that peers may access until all have passed call `seq`."""
        self._cooling[slot] = seq
        self._taken.discard(slot)
        self._free.discard(slot)

    def give_back(self, slot: int) -> None:
        """Release a slot that no peer can access; one that is leased stays so until its tensors have died."""
        self._taken.discard(slot)
        if slot not in self._leased:
            self._free.add(slot)

    def _drain(self) -> None:
        for slot in list(self._released):  # after an interrupt in between it is repeated
            self._leased.pop(slot, None)
            if slot not in self._cooling:
                self._free.add(slot)
            del self._released[slot]


def num_pool_slots(num_slots: int) -> int:
    """Return the slots of an arena: `num_slots` results, as many combine inputs, and the spare ones."""
    return 2 * num_slots + SPARE_SLOTS


class Slots:
    """Typed views of the slots in one region, made once and kept.

    Args:
        region: of this rank or, attached, of a peer.
        slot_layout: the fields of one slot.
        total: number of slots.
    """

    def __init__(self, region: SharedRegion, slot_layout: Layout, total: int) -> None:
        self.region = region
        self.slot_layout = slot_layout
        self.total = total
        self._views: dict[str, list[torch.Tensor]] = {}
        self._arrays: dict[tuple[int, str], npt.NDArray[Any]] = {}

    @classmethod
    def attach(cls, blob: bytes, slot_layout: Layout, total: int) -> Slots:
        """Map a peer's arena.

        Raises:
            ProtocolError, ResourceError: as `SharedRegion.attach`, or the arena's size is not what the layout needs.
        """
        region = SharedRegion.attach(blob)
        want = mapped_size(slot_layout.nbytes * total)
        if region.mapped_bytes != want:
            got = region.mapped_bytes
            region.close()
            raise ProtocolError(f"the arena of process {region.owner_pid} maps {got} bytes, its layout needs {want}")
        return cls(region, slot_layout, total)

    def field(self, slot: int, name: str) -> torch.Tensor:
        """Return a field of a slot as a flat tensor."""
        views = self._views.get(name)
        if views is None:
            base = self.slot_layout.nbytes
            with plain_tensors():
                views = [self.slot_layout.tensor(self.region, name, base=base * index) for index in range(self.total)]
            self._views[name] = views
        return views[slot]

    def array(self, slot: int, name: str) -> npt.NDArray[Any]:
        """Return a field of a slot as a flat numpy array (cheaper per call than a tensor)."""
        found = self._arrays.get((slot, name))
        if found is None:
            found = self._arrays[slot, name] = array_of(self.field(slot, name))
        return found

    def close(self) -> None:
        """Drop the mapping; tensors of the user keep theirs. Idempotent."""
        self._views.clear()
        self._arrays.clear()
        self.region.close()


class Arena(Slots):
    """This rank's slots of one layout.

    Args:
        slot_layout: the fields of one slot; the first is "payload".
        num_slots: see `SlotPool`.
        name: shows in /proc/PID/maps.

    Raises:
        ResourceError: no memory or descriptor left.
    """

    def __init__(self, slot_layout: Layout, num_slots: int, name: str) -> None:
        self.pool = SlotPool(num_slots)
        super().__init__(SharedRegion.create(slot_layout.nbytes * self.pool.total, name), slot_layout, self.pool.total)
        self._watched: dict[int, weakref.ref[Any]] = {}

    def lease(self, slot: int, fields: Sequence[Field], purpose: str) -> list[torch.Tensor]:
        """Return tensors over a taken slot; it stays leased until the last of them, and of their views, has died.

        Args:
            slot: of this rank.
            fields: name of a slot field, dtype and shape of each tensor wanted; none may be empty.
            purpose: "result" or "input".
        """
        nbytes = self.slot_layout.nbytes
        memory = self.region.lease(slot * nbytes, nbytes)
        tensors = []
        for field in fields:
            start = self.slot_layout.offset(field.name)
            count = math.prod(field.shape)
            tensors.append(torch.frombuffer(memory, dtype=field.dtype, count=count, offset=start).view(field.shape))
        # a weak reference fires only while it lives itself, so it is kept until the slot is leased again
        self._watched[slot] = weakref.ref(memory, self.pool.lease(slot, purpose))
        return tensors

    def leased_input(self, tensor: torch.Tensor) -> int | None:
        """Return the slot that was leased as combine input and starts where `tensor` starts, else None.

        A slot that peers may still read because of an earlier combine does not count: its rows are to be copied.
        """
        for slot in self.pool.leased("input"):
            if not self.pool.is_cooling(slot) and self.field(slot, "payload").data_ptr() == tensor.data_ptr():
                return slot
        return None

    def poison(self, slot: int) -> None:
        """Fill a slot with 0xFF, so that rows which were never written read as NaN."""
        nbytes = self.slot_layout.nbytes
        self.region.tensor(torch.uint8, slot * nbytes, (nbytes,)).fill_(0xFF)
