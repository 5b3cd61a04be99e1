"""Where peers pull expert-layout rows: memory that is lent at the first combine of that layout, by the members of then.

A buffer that is made with room for such rows lends it at construction (`ThroughputConfig.room_expert_slot_bytes`).
Its slots are containers: one serves calls of every shape and alignment whose rows fit. What does not fit makes all lend
larger ones, together.

When the view changes, the members tell each other which place they have (`Told`) before they use one again:

    all have the same, lent together    it serves on
    some have the same, others none     who has none lends memory of that size, and all map what is new to them at the
    (replacements), or older memory     addresses that there are (`gpu/lent.py`): graphs serve on
    anything else                       all lend anew

All of them tell all the same, so they decide alike. A graph names the place that it was recorded with; `number`, of
which every combine sends some bits along, tells ranks with different places that they do not fit together.
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
    """Where peers pull expert-layout rows: a slot for rows that users write in place, one for rows that are copied.

    Attributes:
        regions: of all ranks.
        slot_bytes: of each of the two slots.
        origin: digest of the regions that it began with: the same on all ranks that have this place.
        number: how many places its ranks have had then.
        members: ranks that have met over it last.
        digest: of the regions of then: the same on all of them, and on no other place.
        is_leased: whether a tensor of the user's lies in the first slot; for ever once a graph owns it.
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
        """The user's tensor has died."""
        self.is_leased = False


class Told(NamedTuple):
    """What a rank tells of its place; zeros where it has none.

    Attributes:
        digest: as `ExpertPlace`, zeros where members of the view have not met over it.
        origin, slot_bytes, number: as there.
        newest: how many places this rank knows of.
    """

    digest: bytes
    origin: bytes
    slot_bytes: int
    number: int
    newest: int

    @classmethod
    def of(cls, place: ExpertPlace | None, newest: int, members: Collection[int]) -> Told:
        """Return what is to be told of a place to the members of a view."""
        if place is None:
            return cls(_NONE, _NONE, 0, 0, newest)
        digest = place.digest if place.members.issuperset(members) else _NONE
        return cls(digest, place.origin, place.slot_bytes, place.number, newest)

    def pack(self) -> bytes:
        """Return the bytes that `parse` reads."""
        return _TOLD.pack(*self)

    @classmethod
    def parse(cls, data: bytes) -> Told:
        """Return what a member has told; raises `ProtocolError` where that cannot be."""
        if len(data) != _TOLD.size:
            raise ProtocolError(f"combine: a rank tells {len(data)} bytes of its memory; {_TOLD.size} are right")
        told = cls(*_TOLD.unpack(data))
        if not int(any(told.origin)) <= told.slot_bytes <= _MOST_BYTES:
            raise ProtocolError(f"combine: a rank tells of a place with slots of {told.slot_bytes} bytes")
        return told


class Places:
    """The place of one rank, and how it comes to it.

    Args:
        lending: of this rank.
        keeps_addresses: whether memory can be mapped where other memory was.
    """

    def __init__(self, lending: Lending, keeps_addresses: bool) -> None:
        self._lending = lending
        self._keeps_addresses = keeps_addresses
        self._place: ExpertPlace | None = None
        self._newest = 0
        self._most_bytes = 0  # of a slot, that any member has told of
        self._is_open = False

    def open(self) -> None:
        """The view has changed: the members have to meet before a place is used."""
        self._is_open = True

    def ready(self, slot_bytes: int) -> ExpertPlace | None:
        """Return the place, where it serves as it is, for so many bytes a slot."""
        place = self._place
        return None if self._is_open or place is None or place.slot_bytes < slot_bytes else place

    def meet(self, slot_bytes: int, members: Collection[int], all_gather: AllGather) -> ExpertPlace:
        """Come to a place together with all members of the view, while no kernel runs. Collective.

        One that has become too small lives on: kernels in flight, and graphs, may still use it.
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
        """Find the place that all have or can have; None when they need a new one. All hear the same, decide alike."""
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
    """Whether all members have the same place, and have met over it."""
    return any(told[0].digest) and all(one.digest == told[0].digest for one in told)


def _only_place(told: Sequence[Told]) -> Told | None:
    """Return the one place that members have, where the others have none."""
    places = {one.origin: one for one in told if any(one.origin)}
    return next(iter(places.values())) if len(places) == 1 else None
