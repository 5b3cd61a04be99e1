"""The common part of scatter and reduce_scatter: a block holds one segment per destination, read by that rank only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from ...engine.outbox import ALIGN_BYTES, PeerRegions
from ...engine.plan import Plan, Range, Sink
from ...engine.tensors import Array
from ...memory.layout import align_up
from .rounds import cut, lay_out

# name, signature, this rank's segments, the sink of its own, the memory, the length of the longest segment
SegmentsOfCall: TypeAlias = tuple[str, int, Sequence[Array], Any, PeerRegions, int]


class Segmented(Plan):
    """Puts the other ranks' `segments`, `_length` elements apart; results of this rank's own go to `sink.array`.

    Segments may be of different lengths, which every rank knows: rounds and room are those of the `longest`.
    """

    def __init__(self, call: SegmentsOfCall, puts: bool) -> None:
        name, signature, segments, sink, peer_regions, longest = call
        super().__init__(name, signature)
        self._segments = segments
        self._sink = sink
        self._rank = peer_regions.rank
        out: Array = sink.array
        rounds = cut(longest, out.itemsize * peer_regions.num_ranks, peer_regions.staging_bytes)
        self._length = rounds.length
        if rounds.num_rounds == 1:
            self._length = align_up(rounds.length * out.itemsize, ALIGN_BYTES) // out.itemsize
        self._private = np.empty(len(out), out.dtype) if rounds.private else None
        lay_out(self, rounds, self._length * out.itemsize * peer_regions.num_ranks, 0, puts)

    def put(self, peer_regions: PeerRegions, k: int, offset: int) -> None:
        """Write round `k` of every other rank's segment."""
        dtype = self._sink.array.dtype
        view = peer_regions.views[dtype][self._rank]
        place = offset // dtype.itemsize
        for rank, segment in enumerate(self._segments):
            part = segment[k * self._length : (k + 1) * self._length]
            if rank != self._rank and len(part):
                start = place + rank * self._length
                view[start : start + len(part)] = part

    def exports(self, peer_regions: PeerRegions, k: int, readers: Sequence[int]) -> Sequence[Range]:
        """Return the segments of the readers."""
        itemsize = self._sink.array.itemsize
        found = []
        for rank in readers:
            count = len(self._segments[rank]) if self._segments else 0
            length = max(0, min(self._length, count - k * self._length))
            found.append((rank * self._length * itemsize, length * itemsize))
        return found

    def take(self, peer_regions: PeerRegions, k: int, offsets: list[int]) -> None:
        """Make round `k` of this rank's result."""
        out: Array = self._sink.array if self._private is None else self._private
        first, last = k * self._length, min((k + 1) * self._length, len(out))
        if first < last:
            self._make(peer_regions, offsets, out[first:last], first)

    def _make(self, peer_regions: PeerRegions, offsets: list[int], out: Array, first: int) -> None:
        """Fill `out`, the elements from `first` on of this rank's result; subclasses implement it."""

    def _part(self, peer_regions: PeerRegions, rank: int, offsets: list[int], out: Array, first: int) -> Array:
        """Return the contribution of `rank` to `out`."""
        if rank == self._rank:
            return self._segments[rank][first : first + len(out)]
        place = offsets[rank] // out.itemsize + self._rank * self._length
        return peer_regions.views[out.dtype][rank][place : place + len(out)]

    def commit(self) -> None:
        """Move private results into the tensor."""
        if self._private is not None:
            self._sink.array[...] = self._private
            self._private = None
        self._sink.finish()

    def sinks(self) -> Sequence[Sink]:
        """Return the destination of this rank's result."""
        return (self._sink,)

    def detach(self) -> None:
        """Read and write private copies."""
        self._segments = [segment.copy() for segment in self._segments]
        self._sink = Sink(self._sink.array.copy())
