"""broadcast, all_gather, gather, scatter and barrier: copies of bytes without arithmetic.

A rank that sends puts its block (scatter: one segment per destination), the others copy out of it. A rank that has
nothing to send puts only its header; every rank still waits for all headers, which detects mismatches and makes each of
these calls a barrier.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...engine.outbox import PeerRegions
from ...engine.plan import Plan, Range, Sink
from ...engine.tensors import Array
from .rounds import cut, lay_out
from .segments import Segmented


class Barrier(Plan):
    """A plan of headers only."""


class Spread(Plan):
    """Every rank in `roots` puts `source`; this rank copies the block of each root into `sinks[root]`.

    broadcast: one root, and only the others have a sink. all_gather: all are roots. gather: all are roots, and only the
    destination has sinks. The ranks without sinks give `sinks={}`.
    """

    def __init__(
        self,
        name: str,
        signature: int,
        source: Array,
        puts: bool,
        sinks: dict[int, Any],
        peer_regions: PeerRegions,
        reader: int | None = None,
        longest: int | None = None,
    ) -> None:
        super().__init__(name, signature)
        self._source = source
        self._sinks = sinks
        self._reader = reader  # the only position that reads the blocks; None: all do
        self._rank = peer_regions.rank
        self._dtype = source.dtype
        self._count = count = len(source) if longest is None else longest
        rounds = cut(count, source.itemsize, peer_regions.staging_bytes)
        self._length = rounds.length
        self._privates: dict[int, Array] = {}
        if rounds.private:
            self._privates = {rank: np.empty(len(sink.array), source.dtype) for rank, sink in sinks.items()}
        if rounds.num_rounds == 1:
            self.read_bytes = count * source.itemsize
            self.put_bytes = self.read_bytes if puts else 0
        else:
            lay_out(self, rounds, rounds.length * source.itemsize, 0, puts)

    def put(self, peer_regions: PeerRegions, k: int, offset: int) -> None:
        """Write round `k` of the block."""
        place = offset // self._dtype.itemsize
        part = self._source if self.rounds == 1 else self._source[k * self._length : (k + 1) * self._length]
        peer_regions.views[self._dtype][self._rank][place : place + len(part)] = part

    def exports(self, peer_regions: PeerRegions, k: int, readers: Sequence[int]) -> Sequence[Range]:
        """Return the part of the block that is used; nothing for a host without the destination of a gather."""
        if self._reader is not None and self._reader not in readers:
            return ()
        return ((0, min(self._length, self._count - k * self._length) * self._dtype.itemsize),)

    def take(self, peer_regions: PeerRegions, k: int, offsets: list[int]) -> None:
        """Copy round `k` of every wanted block."""
        if not self._count:
            return
        first = k * self._length
        length = min(self._length, self._count - first)
        views = peer_regions.views[self._dtype]
        for rank, sink in self._sinks.items():
            place = offsets[rank] // self._dtype.itemsize
            out: Array = self._privates[rank] if self._privates else sink.array
            out[first : first + length] = views[rank][place : place + length]

    def commit(self) -> None:
        """Move private results into the tensors."""
        for rank, private in self._privates.items():
            self._sinks[rank].array[...] = private
        self._privates = {}
        for sink in self._sinks.values():
            sink.finish()

    def sinks(self) -> Sequence[Sink]:
        """Return the destinations of the blocks that this rank gets."""
        return list(self._sinks.values())

    def detach(self) -> None:
        """Read and write private copies."""
        self._source = self._source.copy()
        self._sinks = {rank: Sink(sink.array.copy()) for rank, sink in self._sinks.items()}


class UnevenGather(Spread):
    """all_gather of blocks of different lengths. Rounds and room are those of the longest one, alike on all ranks."""

    def __init__(
        self, name: str, signature: int, source: Array, sinks: dict[int, Any], peer_regions: PeerRegions, longest: int
    ) -> None:
        super().__init__(name, signature, source, True, sinks, peer_regions, longest=longest)

    def exports(self, peer_regions: PeerRegions, k: int, readers: Sequence[int]) -> Sequence[Range]:
        """Return the part of the block that this rank's own values fill."""
        return ((0, max(0, min(self._length, len(self._source) - k * self._length)) * self._dtype.itemsize),)

    def take(self, peer_regions: PeerRegions, k: int, offsets: list[int]) -> None:
        """Copy round `k` of every block that is as long."""
        first, itemsize = k * self._length, self._dtype.itemsize
        views = peer_regions.views[self._dtype]
        for rank, sink in self._sinks.items():
            out: Array = self._privates[rank] if self._privates else sink.array
            part = out[first : first + self._length]
            place = offsets[rank] // itemsize
            part[...] = views[rank][place : place + len(part)]


class Scatter(Segmented):
    """`root` puts one segment per rank; rank r copies segment r into `sink.array`."""

    def __init__(
        self, name: str, signature: int, segments: Sequence[Array], root: int, sink: Any, peer_regions: PeerRegions
    ) -> None:
        super().__init__((name, signature, segments, sink, peer_regions, len(sink.array)), root == peer_regions.rank)
        self._root = root

    def _make(self, peer_regions: PeerRegions, offsets: list[int], out: Array, first: int) -> None:
        out[...] = self._part(peer_regions, self._root, offsets, out, first)
