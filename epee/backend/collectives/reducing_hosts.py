"""all_reduce, reduce and reduce_scatter.

all_reduce of little data is one step: every rank puts its values and every rank reduces all of them. Of more data it is
two: the ranks form sets, and each set makes a sum of its own. Of its n ranks the i-th reduces the i-th of n shares of a
round, over the values of its set (MERGED); then a rank that takes the result fetches the shares, and reduces those of
several sets, piece by piece. A rank does not put its own share, it reads it from the tensor. reduce is the same call in
which only the root fetches.

Mostly all ranks are one set. Where it sends fewer bytes over the network (`is_less`), as between few hosts with many
ranks, each host is one: nothing of its ranks' values leaves it, and it sends to every other host as many bytes as the
tensor has, where n / R of all ranks' values and then the sums would be (n + 1) / H times that.

reduce_scatter is one step: a rank puts the segments of the others and reduces its own. Of more data over several hosts
it is two: a rank of another host gets one row from each host, the sum over the ranks of that host, made by the one of
them that is at its own position (modulo their number).

Order: inside a set ranks ascending, whatever the split into rounds and shares (`reduce.py`), rounded to the tensor's
dtype; then sets ascending (by their lowest rank at creation), rounded once more. All ranks do the same on the same
values, so results are equal everywhere, bit for bit; with another placement of the ranks they may be rounded otherwise.
The oracle is in `tests/hosts/test_sums.py`. A mean is not made by several sets: it is the exact sum, divided.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...engine.outbox import ALIGN_BYTES, PeerRegions
from ...engine.plan import Plan, Range, Sink
from ...engine.tensors import Array
from ...memory.layout import align_up
from .reduce import AVG, Reducer
from .rounds import cut, lay_out
from .segments import Segmented, SegmentsOfCall

SMALL_BYTES = 64 << 10  # of all values of a host: less is sent to all ranks at once

Hosts = Sequence[tuple[int, ...]]


class AllReduce(Plan):
    """all_reduce in place on `sink.array`; with `root` >= 0 only that rank gets the result.

    `sets`: positions of the ranks that make a sum of their own, if there are several: it is two steps then.
    """

    one_step_bytes = 256 << 10
    _private: Array | None = None
    _share = 0  # elements of the longest share of a round; 0 in one step

    def __init__(
        self,
        name: str,
        signature: int,
        sink: Any,
        reducer: Reducer,
        peer_regions: PeerRegions,
        root: int = -1,
        sets: Hosts = (),
    ) -> None:
        super().__init__(name, signature)
        array = sink.array
        self._sink = sink
        self._array = array
        self._reducer = reducer
        self._rank = peer_regions.rank
        self._takes = root in (-1, peer_regions.rank)
        self._root = root
        self._count = count = len(array)
        self._itemsize = itemsize = array.itemsize
        nbytes = count * itemsize
        if not sets and nbytes <= self.one_step_bytes and nbytes <= peer_regions.staging_bytes:
            self.put_bytes = self.read_bytes = nbytes
            self._scratch = reducer.scratch(count) if reducer.is_wide else None
        else:
            self._plan_two_steps(peer_regions, count, itemsize, sets)

    def _plan_two_steps(self, peer_regions: PeerRegions, count: int, itemsize: int, sets: Hosts) -> None:
        self._sets = sets = sets or (tuple(range(peer_regions.num_ranks)),)
        self._place_of = {rank: (number, at) for number, ranks in enumerate(sets) for at, rank in enumerate(ranks)}
        self._summed = sets[self._place_of[self._rank][0]]
        rounds = cut(count, itemsize, peer_regions.staging_bytes)
        self._length = length = min(rounds.length, count)
        self._shares = [align_up(-(-length // len(ranks)), ALIGN_BYTES) for ranks in sets]
        self._share = max(self._shares)
        lay_out(self, rounds, length * itemsize, self._share * itemsize, puts=True)
        if rounds.private and self._takes:
            self._private = np.empty(count, self._array.dtype)
        self._scratch = self._reducer.scratch(self._share)

    def put(self, peer_regions: PeerRegions, k: int, offset: int) -> None:
        """Write the values of round `k`; in two steps without this rank's own share."""
        view = peer_regions.views[self._array.dtype][self._rank]
        place = offset // self._itemsize
        if not self._share:
            view[place : place + self._count] = self._array
            return
        first, last = k * self._length, min((k + 1) * self._length, self._count)
        length = last - first
        low, high = self._part(k, self._rank)
        if low:
            view[place : place + low] = self._array[first : first + low]
        if high < length:
            view[place + high : place + length] = self._array[first + high : last]

    def exports(self, peer_regions: PeerRegions, k: int, readers: Sequence[int]) -> Sequence[Range]:
        """Return everything in one step, if a reader takes the result; in two the shares of the readers of its set."""
        if not self._share:
            return ((0, self.put_bytes),) if self._root == -1 or self._root in readers else ()
        parts = [self._part(k, rank) for rank in readers if rank in self._summed]
        return [(low * self._itemsize, (high - low) * self._itemsize) for low, high in parts]

    def exports_merged(self, peer_regions: PeerRegions, k: int, readers: Sequence[int]) -> Sequence[Range]:
        """Return the share, if a reader takes the result."""
        low, high = self._part(k, self._rank)
        return ((0, (high - low) * self._itemsize),) if self._root == -1 or self._root in readers else ()

    def _part(self, k: int, rank: int) -> tuple[int, int]:
        """Return the elements of round `k`, from its first one on, that are a rank's share."""
        number, at = self._place_of[rank]
        length, share = min(self._length, self._count - k * self._length), self._shares[number]
        low = min(length, at * share)
        return low, min(length, low + share)

    def merge(self, peer_regions: PeerRegions, k: int, offsets: list[int], offset: int) -> None:
        """Reduce this rank's share of round `k`."""
        first = k * self._length
        low, high = self._part(k, self._rank)
        if low == high:
            return
        views = peer_regions.views[self._array.dtype]
        parts = []
        for rank in self._summed:
            if rank == self._rank:
                parts.append(self._array[first + low : first + high])
            else:
                place = offsets[rank] // self._itemsize
                parts.append(views[rank][place + low : place + high])
        place = offset // self._itemsize
        self._reducer.reduce(parts, views[self._rank][place : place + high - low], self._scratch)

    def take(self, peer_regions: PeerRegions, k: int, offsets: list[int]) -> None:
        """Reduce everything (one step) or fetch the shares (two)."""
        views = peer_regions.views[self._array.dtype]
        itemsize = self._itemsize
        if not self._share:
            count = self._count
            if self._takes and count:
                parts = []  # a loop costs half of a comprehension here
                for rank, view in enumerate(views):
                    place = offsets[rank] // itemsize
                    parts.append(view[place : place + count])
                self._reducer.reduce(parts, self._array, self._scratch)
            return
        if not self._takes:
            return
        out = self._array if self._private is None else self._private
        first = k * self._length
        self._fetch(peer_regions, k, offsets, out[first : min(first + self._length, self._count)])

    def _fetch(self, peer_regions: PeerRegions, k: int, offsets: list[int], out: Array) -> None:
        """Fill `out`, the elements of round `k`: reduce the shares of all sets, between the offsets where one ends."""
        views = peer_regions.views[self._array.dtype]
        if len(self._sets) == 1:  # nothing to add up: saves 5 us of the loop below, 2 % of 1 MiB on two ranks
            for rank in self._summed:
                low, high = self._part(k, rank)
                place = offsets[rank] // self._itemsize
                out[low:high] = views[rank][place : place + high - low]
            return
        ends = sorted({end for rank in self._place_of for end in self._part(k, rank)})
        for low, high in itertools.pairwise(ends):
            parts = []
            for share, ranks in zip(self._shares, self._sets, strict=True):
                at = low // share
                place = offsets[ranks[at]] // self._itemsize + low - at * share
                parts.append(views[ranks[at]][place : place + high - low])
            if len(parts) == 1:
                out[low:high] = parts[0]
            else:
                self._reducer.reduce(parts, out[low:high], self._scratch)

    def commit(self) -> None:
        """Move private results into the tensor."""
        if self._private is not None:
            self._array[...] = self._private
            self._private = None
        if self._takes:
            self._sink.finish()

    def sinks(self) -> Sequence[Sink]:
        """Return the destination of the result, if this rank gets it."""
        return (self._sink,) if self._takes else ()

    def detach(self) -> None:
        """Work in a private copy of the tensor, which is input and output."""
        self._array = self._array.copy()
        self._sink = Sink(self._array)


class ReduceScatter(Segmented):
    """Reduce segment r of all ranks into `sink.array` of rank r. `segments` are this rank's, one per rank."""

    def __init__(self, call: SegmentsOfCall, reducer: Reducer) -> None:
        super().__init__(call, call[4].num_ranks > 1)
        self._reducer = reducer
        self._scratch = reducer.scratch(self._length)

    def _make(self, peer_regions: PeerRegions, offsets: list[int], out: Array, first: int) -> None:
        parts = [self._part(peer_regions, rank, offsets, out, first) for rank in range(peer_regions.num_ranks)]
        self._reducer.reduce(parts, out, self._scratch)


def plan_reduction(
    name: str, signature: int, sink: Any, reducer: Reducer, op: int, peer_regions: PeerRegions, root: int = -1
) -> AllReduce:
    """Return the plan of an all_reduce in place on `sink.array`, or of a reduce to position `root`."""
    sets: Hosts = ()
    if len(peer_regions.sites) > 1 and op != AVG:
        hosts: Hosts = tuple(peer_regions.sites.values())
        if sink.array.nbytes * peer_regions.num_ranks > SMALL_BYTES and is_less(hosts, sink.array.nbytes):
            sets = hosts
    return AllReduce(name, signature, sink, reducer, peer_regions, root, sets)


def is_less(hosts: Hosts, nbytes: int) -> bool:
    """Return whether sums inside the hosts first send fewer bytes on the network than shares of all ranks."""
    num_ranks = sum(len(host) for host in hosts)
    return num_ranks * nbytes > SMALL_BYTES * len(hosts) and num_ranks >= len(hosts) ** 2


def plan_reduce_scatter(call: SegmentsOfCall, reducer: Reducer, op: int) -> Segmented:
    """Return the plan of a reduce_scatter of segments, one per rank, into the sink's array.

    The choice depends on the length of the longest segment, which is the same number on all ranks.
    """
    *_, sink, peer_regions, longest = call
    if len(peer_regions.sites) > 1 and op != AVG:
        hosts: Hosts = tuple(peer_regions.sites.values())
        is_large = longest * sink.array.itemsize * peer_regions.num_ranks > SMALL_BYTES
        if is_large and len(hosts) < peer_regions.num_ranks:
            return TwoStepReduceScatter(call, reducer, hosts)
    return ReduceScatter(call, reducer)


class TwoStepReduceScatter(Segmented):
    """The reduce_scatter with a sum per host."""

    def __init__(self, call: SegmentsOfCall, reducer: Reducer, hosts: Hosts) -> None:
        super().__init__(call, puts=True)
        self._reducer = reducer
        self._scratch = reducer.scratch(self._length)
        *_, sink, peer_regions, longest = call
        self._hosts = hosts
        self._here = next(ranks for ranks in hosts if peer_regions.rank in ranks)
        self._served = {rank: self._serves(rank) for rank in range(peer_regions.num_ranks)}
        self._itemsize = itemsize = sink.array.itemsize
        row_bytes = self._length * itemsize
        most = max(len(served) for served in self._served.values())
        rounds = cut(longest, itemsize * peer_regions.num_ranks, peer_regions.staging_bytes)
        lay_out(self, rounds, row_bytes * peer_regions.num_ranks, row_bytes * most, puts=True)
        self._partial = np.empty(min(self._length, len(sink.array)), sink.array.dtype)

    def _serves(self, rank: int) -> list[int]:
        """Return the ranks of other hosts for which a rank adds up the values of its host, ascending."""
        own = next(ranks for ranks in self._hosts if rank in ranks)
        others = [ranks for ranks in self._hosts if ranks is not own]
        at = own.index(rank)
        return sorted(peer for ranks in others for place, peer in enumerate(ranks) if place % len(own) == at)

    def _bounds(self, k: int, rank: int) -> tuple[int, int]:
        """Return the elements of round `k` of a rank's segment; none where that is shorter."""
        count = len(self._segments[rank])
        return min(k * self._length, count), min((k + 1) * self._length, count)

    def exports(self, peer_regions: PeerRegions, k: int, readers: Sequence[int]) -> Sequence[Range]:
        """Return nothing: only this host reads the values."""
        return ()

    def exports_merged(self, peer_regions: PeerRegions, k: int, readers: Sequence[int]) -> Sequence[Range]:
        """Return the rows of the readers."""
        row_bytes, found = self._length * self._itemsize, []
        for row, peer in enumerate(self._served[self._rank]):
            if peer in readers:
                first, last = self._bounds(k, peer)
                found.append((row * row_bytes, (last - first) * self._itemsize))
        return found

    def merge(self, peer_regions: PeerRegions, k: int, offsets: list[int], offset: int) -> None:
        """Add up the values of this host for each rank that this one serves."""
        views = peer_regions.views[self._partial.dtype]
        for row, peer in enumerate(self._served[self._rank]):
            first, last = self._bounds(k, peer)
            if first == last:
                continue
            place = offset // self._itemsize + row * self._length
            parts = [self._values(peer_regions, rank, offsets[rank], peer, first, last) for rank in self._here]
            self._reducer.reduce(parts, views[self._rank][place : place + last - first], self._scratch)

    def take(self, peer_regions: PeerRegions, k: int, offsets: list[int]) -> None:
        """Add up the rows of all hosts; `offsets` are those of the shares."""
        first, last = self._bounds(k, self._rank)
        if first >= last:
            return
        out: Array = self._sink.array if self._private is None else self._private
        half = k % self.num_halves
        back = self.num_halves * self.round_bytes + half * (self.merge_bytes - self.round_bytes)
        own = self._partial[: last - first]
        parts = [self._values(peer_regions, rank, offsets[rank] - back, self._rank, first, last) for rank in self._here]
        self._reducer.reduce(parts, own, self._scratch)
        rows = [
            own if ranks is self._here else self._row(peer_regions, ranks, offsets, last - first)
            for ranks in self._hosts
        ]
        self._reducer.reduce(rows, out[first:last], self._scratch)

    def _values(self, peer_regions: PeerRegions, rank: int, offset: int, peer: int, first: int, last: int) -> Array:
        """Return the values of a rank of this host for `peer` in the round whose block lies at `offset`."""
        if rank == self._rank:
            return self._segments[peer][first:last]
        place = offset // self._itemsize + peer * self._length
        return peer_regions.views[self._partial.dtype][rank][place : place + last - first]

    def _row(self, peer_regions: PeerRegions, ranks: Sequence[int], offsets: list[int], length: int) -> Array:
        """Return the sum of another host for this rank."""
        server = next(rank for rank in ranks if self._rank in self._served[rank])
        place = offsets[server] // self._itemsize + self._served[server].index(self._rank) * self._length
        return peer_regions.views[self._partial.dtype][server][place : place + length]
