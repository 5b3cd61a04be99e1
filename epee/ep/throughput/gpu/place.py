"""Where peers pull expert-layout rows: memory that is lent at the first expert-layout combine, by the members of then.

A rank that was not in the view lends nothing and has nothing attached: it stands at address 0, which kernels refuse.
When the view changes the members compare digests, and lend anew unless all of them have the same place (`Machine`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ....errors import InvalidState
from ...gpu.platform import Region

DIGEST_BYTES = 32


def digest_of(blobs: Sequence[bytes]) -> bytes:
    """Return what tells regions that were lent together from others; no zero word."""
    return hashlib.sha256(b"".join(blobs)).digest()


class _Nowhere:
    """Stands for the region of a rank that did not take part when it was lent."""

    address = nbytes = 0
    blob = b""

    def lease(self, offset: int, nbytes: int, released: Callable[[], None] | None) -> torch.Tensor:
        """Raise: there is nothing."""
        raise InvalidState("a rank that was not in the view lends nothing")

    def close(self) -> None:
        """Nothing to close."""


NOWHERE: Region = _Nowhere()


@dataclass(eq=False)
class ExpertPlace:
    """Where peers pull expert-layout rows: a slot for rows that users write in place, one for rows that are copied.

    Attributes:
        regions: of all ranks.
        expert_alignment: that a slot has room for.
        slot_bytes: distance of the two slots.
        members: ranks that lend a region, with the others' in `regions` at address 0.
        digest: the same on all of them, and on no other place.
        is_leased: whether a tensor of the user's lies in the first slot; for ever once a graph owns it.
    """

    regions: list[Region]
    expert_alignment: int
    slot_bytes: int
    members: frozenset[int]
    digest: bytes
    is_leased: bool = False

    num_slots = 2

    def free(self) -> None:
        """The user's tensor has died."""
        self.is_leased = False
