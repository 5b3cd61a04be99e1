"""Lent memory from which peers pull expert-layout rows, lent by the current members at the first such combine.

A buffer that is made with room for such rows lends it at construction (`ThroughputConfig.room_expert_slot_bytes`). Its
slots are containers: one serves calls of every shape and alignment whose rows fit. If the rows do not fit, all ranks
lend larger ones together.

When the view changes, the members exchange which memory they have (`Told`) before they use it again:

    all have the same, lent together    it stays in use
    some have the same, others none     a rank without it lends memory of that size, and all map what is new to them at
    (replacements), or older memory     the existing addresses (`gpu/lent.py`): graphs stay usable
    anything else                       all lend anew

All of them send the same to all, so they decide alike. A graph names the memory that it was recorded with; `number`, of
which every combine sends some bits along, reports a mismatch between ranks with different memory.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ....errors import ProtocolError
from ....gpu.lent import DIGEST_BYTES, AllGather, Lending
from ....gpu.platform import LentRegion

_TOLD = struct.Struct(f"<{DIGEST_BYTES}s{DIGEST_BYTES}sQQQ")
_NONE = bytes(DIGEST_BYTES)
_MOST_BYTES = 1 << 48


@dataclass(eq=False)
class ExpertPlace:
    """The memory for expert-layout rows: a slot for rows that users write in place, one for rows that are copied.

    Attributes:
        regions: of all ranks.
        slot_bytes: of each of the two slots.
        origin: digest of the regions that it began with: the same on all ranks that have this memory.
        number: how many such memories its ranks have had then.
        members: ranks that have last agreed on it.
        digest: of the regions of then: the same on all of them, and different for every other memory.
        is_leased: whether a tensor of the user's lies in the first slot; forever once a graph owns it.
    """

    regions: list[LentRegion]
    slot_bytes: int
    origin: bytes
    number: int
    members: frozenset[int]
    digest: bytes
    is_leased: bool = False

    num_slots = 2

    def free(self) -> None:
        """Mark the first slot as free: the user's tensor has died."""
        self.is_leased = False


class Told(NamedTuple):
    """A rank's report of its memory; zeros if it has none.

    Attributes:
        digest: as `ExpertPlace`, zeros if members of the view have not agreed on it.
        origin, slot_bytes, number: as there.
        newest: how many such memories this rank knows of.
    """

    digest: bytes
    origin: bytes
    slot_bytes: int
    number: int
    newest: int

    @classmethod
    def of(cls, place: ExpertPlace | None, newest: int, members: Collection[int]) -> Told:
        """Return the report on `place` for the members of a view."""
        if place is None:
            return cls(_NONE, _NONE, 0, 0, newest)
        digest = place.digest if place.members.issuperset(members) else _NONE
        return cls(digest, place.origin, place.slot_bytes, place.number, newest)

    def pack(self) -> bytes:
        """Return the bytes that `parse` reads."""
        return _TOLD.pack(*self)

    @classmethod
    def parse(cls, data: bytes) -> Told:
        """Return the report of a member; raises `ProtocolError` if it cannot be right."""
        if len(data) != _TOLD.size:
            raise ProtocolError(f"combine: a rank tells {len(data)} bytes of its memory; {_TOLD.size} are right")
        told = cls(*_TOLD.unpack(data))
        if not int(any(told.origin)) <= told.slot_bytes <= _MOST_BYTES:
            raise ProtocolError(f"combine: a rank tells of a place with slots of {told.slot_bytes} bytes")
        return told


class Places:
    """The expert-layout memory of one rank, and how the ranks agree on it.

    Args:
        lending: of this rank.
        keeps_addresses: whether memory can be mapped where other memory was.
    """

    def __init__(self, lending: Lending, keeps_addresses: bool) -> None:
        self._lending = lending
        self._keeps_addresses = keeps_addresses
        self._place: ExpertPlace | None = None
        self._newest = 0
        self._most_bytes = 0  # of a slot, the largest that any member has reported
        self._is_open = False

    def open(self) -> None:
        """Mark a change of the view: the members have to agree before the memory is used."""
        self._is_open = True

    def ready(self, slot_bytes: int) -> ExpertPlace | None:
        """Return the memory, if it can be used as it is, for so many bytes a slot."""
        place = self._place
        return None if self._is_open or place is None or place.slot_bytes < slot_bytes else place

    def meet(self, slot_bytes: int, members: Collection[int], all_gather: AllGather) -> ExpertPlace:
        """Agree on the memory with all members of the view, while no kernel runs. Collective.

        Memory that has become too small stays allocated: kernels in flight, and graphs, may still use it.
        """
        place = self._agree(slot_bytes, members, all_gather) if self._is_open else None
        self._place = self._lend(max(slot_bytes, self._most_bytes), all_gather) if place is None else place
        self._is_open = False
        return self._place

    def _lend(self, slot_bytes: int, all_gather: AllGather) -> ExpertPlace:
        regions, members, digest = self._lending.meet(None, ExpertPlace.num_slots * slot_bytes, all_gather)
        self._newest += 1
        return ExpertPlace(regions, slot_bytes, digest, self._newest, members, digest)

    def _agree(self, slot_bytes: int, members: Collection[int], all_gather: AllGather) -> ExpertPlace | None:
        """Return the memory that all have or can have, or None if they need new memory; alike on all members."""
        heard = all_gather(Told.of(self._place, self._newest, members).pack())
        told = [Told.parse(heard[rank]) for rank in sorted(members)]
        self._newest = max(one.newest for one in told)
        self._most_bytes = max(one.slot_bytes for one in told)
        one = _only_place(told)
        if one is None or one.slot_bytes < slot_bytes:
            return None
        if _is_common(told):
            return self._place
        return self._complete(one, all_gather) if self._keeps_addresses else None

    def _complete(self, one: Told, all_gather: AllGather) -> ExpertPlace:
        place, slot_bytes = self._place, one.slot_bytes
        known = None if place is None else place.regions
        regions, members, digest = self._lending.meet(known, ExpertPlace.num_slots * slot_bytes, all_gather)
        if place is None:
            return ExpertPlace(regions, slot_bytes, one.origin, one.number, members, digest)
        place.members, place.digest = members, digest
        return place


def _is_common(told: Sequence[Told]) -> bool:
    """Whether all members have the same memory, and have agreed on it."""
    return any(told[0].digest) and all(one.digest == told[0].digest for one in told)


def _only_place(told: Sequence[Told]) -> Told | None:
    """Return the only memory that members have, if the others have none."""
    places = {one.origin: one for one in told if any(one.origin)}
    return next(iter(places.values())) if len(places) == 1 else None
