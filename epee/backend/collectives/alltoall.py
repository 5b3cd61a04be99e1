"""all_to_all with even and uneven splits.

Every rank puts, before its data, the number of elements that it sends to and expects from each rank. All ranks read all
of these lists, so a pair that disagrees is a `MismatchError` everywhere, and all ranks derive the same number of
rounds.

A rank whose data fits into two staging buffers lays its segments one behind the other. Otherwise each segment gets an
equal part of each half and rounds follow (a rank that has sent everything has empty rounds).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...engine.call import EngineCall
from ...engine.outbox import PREAMBLE, PeerRegions
from ...engine.plan import Plan, Range, Sink
from ...engine.tensors import Array
from ...errors import MismatchError, ProtocolError
from .rounds import CHUNK_BYTES


class AllToAll(Plan):
    """Segment j of `segments` goes to rank j; the data that rank i sends here goes to `sinks[i].array`."""

    def __init__(
        self, signature: int, segments: Sequence[Array], sinks: Sequence[Any], peer_regions: PeerRegions
    ) -> None:
        super().__init__("all_to_all", signature)
        num_ranks = peer_regions.num_ranks
        self._segments = segments
        self._sinks = sinks
        self._rank = peer_regions.rank
        self._dtype = dtype = sinks[0].array.dtype
        self._chunk_bytes = min(CHUNK_BYTES, peer_regions.staging_bytes)
        self._compact_bytes = 2 * peer_regions.staging_bytes
        self._length = self._chunk_bytes // (dtype.itemsize * num_ranks)  # elements of a segment per round
        self._sent = [len(segment) for segment in segments]
        self.preamble = array("Q", self._sent + [len(sink.array) for sink in sinks])
        self._is_even = len(set(self.preamble)) == 1
        self._agreed = False
        self._places = [-1] * num_ranks
        self._privates: list[Array] = []
        self.num_halves = 2
        self._total = total = sum(self._sent) * dtype.itemsize
        if num_ranks > 1:
            self.put_bytes = total if total <= self._compact_bytes else 2 * self._chunk_bytes

    def put(self, peer_regions: PeerRegions, k: int, offset: int) -> None:
        """Write round `k` of every segment."""
        itemsize, sent = self._dtype.itemsize, self._sent
        view = peer_regions.views[self._dtype][self._rank]
        start = offset // itemsize
        if self._total <= self._compact_bytes:
            if k == 0:
                for rank, segment in enumerate(self._segments):
                    if rank != self._rank and sent[rank]:
                        view[start : start + sent[rank]] = segment
                    start += sent[rank]
            return
        start += k % 2 * (self._chunk_bytes // itemsize)
        for rank, segment in enumerate(self._segments):
            part = segment[k * self._length : (k + 1) * self._length]
            if rank != self._rank and len(part):
                place = start + rank * self._length
                view[place : place + len(part)] = part

    def exports(self, peer_regions: PeerRegions, k: int, readers: Sequence[int]) -> Sequence[Range]:
        """Return the segments of the readers."""
        itemsize, sent = self._dtype.itemsize, self._sent
        if self._total <= self._compact_bytes:
            if k:
                return ()
            return [(sum(sent[:rank]) * itemsize, sent[rank] * itemsize) for rank in readers]
        lengths = [max(0, min(self._length, sent[rank] - k * self._length)) for rank in readers]
        half = k % 2 * self._chunk_bytes
        places = [half + rank * self._length * itemsize for rank in readers]
        return [(place, length * itemsize) for place, length in zip(places, lengths, strict=True)]

    def agree(self, peer_regions: PeerRegions, offsets: list[int], cell: int, call: EngineCall) -> None:
        """Compare all ranks' lists and derive the rounds and the offsets."""
        if self._agreed:
            return
        num_ranks, itemsize, me = peer_regions.num_ranks, self._dtype.itemsize, self._rank
        first = cell + PREAMBLE
        if self._is_even and self._total <= self._compact_bytes and self._all_like_us(peer_regions, first):
            shift = me * self._sent[0] * itemsize
            for rank in peer_regions.peers:
                self._check_place(peer_regions, call, rank, offsets[rank], self._total)
                self._places[rank] = offsets[rank] + shift
            self.num_halves = 1
            self._agreed = True
            return
        lists = [words[first : first + 2 * num_ranks].tolist() for words in peer_regions.words]
        sent = [counts[:num_ranks] for counts in lists]
        expected = [tuple(counts[num_ranks:]) for counts in lists]
        if list(zip(*sent, strict=True)) != expected:
            raise MismatchError(self._tell(peer_regions, call, sent, expected))
        for rank in peer_regions.peers:
            counts = sent[rank]
            total = sum(counts) * itemsize
            compact = total <= self._compact_bytes
            self._check_place(peer_regions, call, rank, offsets[rank], total if compact else 2 * self._chunk_bytes)
            self._places[rank] = offsets[rank] + sum(counts[:me]) * itemsize if compact else -1
            if not compact:
                self.rounds = max(self.rounds, -(-max(counts) // self._length))
        if self._total > self._compact_bytes:
            self.rounds = max(self.rounds, -(-max(self._sent) // self._length))
        if self.rounds > 2:
            self._privates = [np.empty(len(sink.array), self._dtype) for sink in self._sinks]
        self.num_halves = min(2, self.rounds)
        self._agreed = True

    def _all_like_us(self, peer_regions: PeerRegions, first: int) -> bool:
        """True when every rank sends and expects the counts of this one: with even ones the lists fit together."""
        assert self.preamble is not None
        last = first + len(self.preamble)
        mine = self.preamble.tobytes()
        return all([words[first:last].tobytes() == mine for words in peer_regions.peer_words])  # noqa: C419 - half the time

    def _check_place(self, peer_regions: PeerRegions, call: EngineCall, rank: int, offset: int, nbytes: int) -> None:
        if nbytes and offset + nbytes > peer_regions.payload_bytes:
            raise ProtocolError(f"{call.describe(peer_regions)}: the block of rank {rank} passes the end of its outbox")

    def take(self, peer_regions: PeerRegions, k: int, offsets: list[int]) -> None:
        """Copy round `k` of the data that every rank sends here."""
        itemsize, length = self._dtype.itemsize, self._length
        views = peer_regions.views[self._dtype]
        for rank, sink in enumerate(self._sinks):
            out: Array = self._privates[rank] if self._privates else sink.array
            if rank == self._rank:
                if k == 0:
                    out[...] = self._segments[rank]
                continue
            if self._places[rank] >= 0:
                if k == 0 and len(out):
                    place = self._places[rank] // itemsize
                    out[...] = views[rank][place : place + len(out)]
                continue
            first, last = k * length, min((k + 1) * length, len(out))
            if first < last:
                place = (offsets[rank] + k % 2 * self._chunk_bytes) // itemsize + self._rank * length
                out[first:last] = views[rank][place : place + last - first]

    def commit(self) -> None:
        """Move private results into the tensors."""
        for sink, private in zip(self._sinks, self._privates, strict=False):
            sink.array[...] = private
        self._privates = []
        for sink in self._sinks:
            sink.finish()

    def sinks(self) -> Sequence[Sink]:
        """Return the destinations of the data that each rank sends here."""
        return self._sinks

    def detach(self) -> None:
        """Read and write private copies."""
        self._segments = [segment.copy() for segment in self._segments]
        self._sinks = [Sink(sink.array.copy()) for sink in self._sinks]

    def _tell(
        self, peer_regions: PeerRegions, call: EngineCall, sent: list[list[int]], expected: list[tuple[int, ...]]
    ) -> str:
        pairs = (
            (i, j)
            for i in range(peer_regions.num_ranks)
            for j in range(peer_regions.num_ranks)
            if sent[i][j] != expected[j][i]
        )
        src_rank, dst_rank = next(pairs)
        return (
            f"{call.describe(peer_regions)}: the ranks disagree: rank {src_rank} sends "
            f"{sent[src_rank][dst_rank]} elements to "
            f"rank {dst_rank}, which expects {expected[dst_rank][src_rank]}; no result was written, the group can be "
            "used; make the split sizes agree"
        )
