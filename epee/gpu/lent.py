"""Memory that each rank lends to all others, and the replacement of a process's memory by its successor's.

Kernels get addresses as arguments, and graphs have recorded them. So a rank's memory keeps one address here for the
buffer's life: the memory of a joiner is mapped at the address of its predecessor's (`LentRegion.replace`). A rank that
has lent nothing yet is represented by this rank's own memory mapped once more; no kernel uses it, because the view
excludes that rank. Where the machine cannot map memory at a given address (`Platform.keeps_addresses`), such a rank has
address 0, which kernels refuse, and no process is replaced.

Called by the thread of a call, while no kernel of this buffer runs on this GPU. A call interrupted between two regions
is repeated: regions mapped already are recognised by their blobs. A crash leaves nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ..errors import InvalidArgument, InvalidState
from .platform import LentRegion, Platform

AllGather = Callable[[bytes], Sequence[bytes]]
DIGEST_BYTES = 32


class _Nowhere:
    """Placeholder for the region of a rank that did not take part when it was lent."""

    address = nbytes = 0
    blob = b""

    def lease(self, offset: int, nbytes: int, released: Callable[[], None] | None) -> torch.Tensor:
        """Raise: there is no memory."""
        raise InvalidState("a rank that was not in the view lends nothing")

    def replace(self, blob: bytes) -> None:
        """Raise: it has no address."""
        raise InvalidState("a rank that was not in the view has no address here; make a new buffer")

    def close(self) -> None:
        """Nothing to close."""


NOWHERE: LentRegion = _Nowhere()


class Lent(NamedTuple):
    """A region of each rank; `members` have lent theirs together, with the same `digest`."""

    regions: list[LentRegion]
    members: frozenset[int]
    digest: bytes


class Lending:
    """Memory that one rank lends and maps.

    Args:
        platform: the GPU.
        rank: this rank.

    Attributes:
        nbytes: memory of this rank.
    """

    def __init__(self, platform: Platform, rank: int) -> None:
        self.nbytes = 0
        self._platform = platform
        self._rank = rank
        self._regions: list[LentRegion] = []

    def meet(self, known: list[LentRegion] | None, nbytes: int, all_gather: AllGather) -> Lent:
        """Lend a region to all members and map theirs, at the addresses of `known` or else at new ones. Collective.

        Args:
            known: regions of all ranks; changed in place.
            nbytes: of a new region.
            all_gather: returns the bytes of all ranks in rank order, b"" for ranks that do not take part.
        """
        own = known[self._rank] if known else self._platform.create(nbytes)
        blobs = all_gather(own.blob)
        regions = known if known is not None else []
        for rank, blob in enumerate(blobs):
            if known is not None:
                if blob:
                    self.put(known, rank, blob)
            else:
                regions.append(own if rank == self._rank else self._map(rank, blob, own))
        if known is None:
            self.nbytes += own.nbytes
            self._regions += regions
        all_gather(b"attached")  # no rank may leave before every rank has copied its descriptors
        return Lent(regions, frozenset(rank for rank, blob in enumerate(blobs) if blob), digest_of(blobs))

    def put(self, regions: list[LentRegion], rank: int, blob: bytes) -> None:
        """Map the memory of `blob` at a rank's address; nothing to do if it is mapped there already.

        Raises:
            ResourceError: it cannot be mapped; the previous mapping stays, and another attempt may succeed.
            Else as `LentRegion.replace`.
        """
        if regions[rank].blob != blob and rank != self._rank:
            self._platform.synchronize()  # waits for the kernels' last loads and stores
            regions[rank].replace(blob)

    def _map(self, rank: int, blob: bytes, own: LentRegion) -> LentRegion:
        if not blob:
            return self._platform.attach(own.blob) if self._platform.keeps_addresses else NOWHERE
        region = self._platform.attach(blob)
        if region.nbytes != own.nbytes:
            raise InvalidArgument(
                f"rank {rank} lends {region.nbytes} bytes, this rank {own.nbytes}; "
                "all ranks must make the buffer with the same sizes"
            )
        return region

    def close(self) -> None:
        """Release all memory; tensors over it keep what they use. Idempotent."""
        for region in self._regions:
            region.close()


def digest_of(blobs: Sequence[bytes]) -> bytes:
    """Return the digest that distinguishes regions lent together from others; it has no zero word."""
    return hashlib.sha256(b"".join(blobs)).digest()
