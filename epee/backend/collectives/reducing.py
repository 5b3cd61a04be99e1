"""all_reduce, reduce and reduce_scatter.

all_reduce of little data is one step: every rank puts its values and every rank reduces all of them. Of more data it is
two: rank r reduces the r-th share of each round (MERGED) and everybody fetches the shares. A rank does not put its own
share, it reads it from the tensor. reduce is the same call in which only the root fetches. reduce_scatter is one step:
a rank puts the segments of the others and reduces its own.

All sums run in rank order (`reduce.py`), whatever the split into rounds and shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...engine.outbox import ALIGN_BYTES, Outboxes
from ...engine.plan import Plan, Range, Sink
from ...engine.tensors import Array
from ...memory.layout import align_up
from .reduce import Reducer
from .rounds import cut, lay_out
from .segments import Segmented


class AllReduce(Plan):
    """all_reduce in place on `sink.array`; with `root` >= 0 only that rank gets the result."""

    one_step_bytes = 256 << 10
    _private: Array | None = None
    _share = 0  # elements of a rank's share of a round; 0 in one step

    def __init__(self, name: str, signature: int, sink: Any, reducer: Reducer, box: Outboxes, root: int = -1) -> None:
        super().__init__(name, signature)
        array = sink.array
        self._sink = sink
        self._array = array
        self._reducer = reducer
        self._rank = box.rank
        self._takes = root in (-1, box.rank)
        self._root = root
        self._count = count = len(array)
        self._itemsize = itemsize = array.itemsize
        nbytes = count * itemsize
        self._summed: Sequence[int] = range(box.num_ranks)  # positions of those whose values a share is made of
        if nbytes <= self.one_step_bytes and nbytes <= box.staging_bytes:
            self.put_bytes = self.read_bytes = nbytes
            self._scratch = reducer.scratch(count) if reducer.is_wide else None
        else:
            self._plan_two_steps(box, count, itemsize)

    def _plan_two_steps(self, box: Outboxes, count: int, itemsize: int) -> None:
        rounds = cut(count, itemsize, box.staging_bytes)
        self._length = length = min(rounds.length, count)
        self._share = align_up(-(-length // box.num_ranks), ALIGN_BYTES)
        lay_out(self, rounds, length * itemsize, self._share * itemsize, puts=True)
        if rounds.private and self._takes:
            self._private = np.empty(count, self._array.dtype)
        self._scratch = self._reducer.scratch(self._share)

    def put(self, box: Outboxes, k: int, offset: int) -> None:
        """Write the values of round `k`; in two steps without this rank's own share."""
        view = box.views[self._array.dtype][self._rank]
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

    def exports(self, box: Outboxes, k: int, readers: Sequence[int]) -> Sequence[Range]:
        """Return everything in one step, if a reader takes the result; in two the shares of the readers."""
        if not self._share:
            return ((0, self.put_bytes),) if self._root == -1 or self._root in readers else ()
        parts = [self._part(k, rank) for rank in readers]
        return [(low * self._itemsize, (high - low) * self._itemsize) for low, high in parts]

    def exports_merged(self, box: Outboxes, k: int, readers: Sequence[int]) -> Sequence[Range]:
        """Return the share, if a reader takes the result."""
        low, high = self._part(k, self._rank)
        return ((0, (high - low) * self._itemsize),) if self._root == -1 or self._root in readers else ()

    def _part(self, k: int, rank: int) -> tuple[int, int]:
        """Return the elements of round `k`, from its first one on, that are a rank's share."""
        length = min(self._length, self._count - k * self._length)
        low = min(length, rank * self._share)
        return low, min(length, low + self._share)

    def merge(self, box: Outboxes, k: int, offsets: list[int], offset: int) -> None:
        """Reduce this rank's share of round `k`."""
        first = k * self._length
        low, high = self._part(k, self._rank)
        if low == high:
            return
        views = box.views[self._array.dtype]
        parts = []
        for rank in self._summed:
            if rank == self._rank:
                parts.append(self._array[first + low : first + high])
            else:
                place = offsets[rank] // self._itemsize
                parts.append(views[rank][place + low : place + high])
        place = offset // self._itemsize
        self._reducer.reduce(parts, views[self._rank][place : place + high - low], self._scratch)

    def take(self, box: Outboxes, k: int, offsets: list[int]) -> None:
        """Reduce everything (one step) or fetch the shares (two)."""
        views = box.views[self._array.dtype]
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
        self._fetch(box, k, offsets, out[first : min(first + self._length, self._count)])

    def _fetch(self, box: Outboxes, k: int, offsets: list[int], out: Array) -> None:
        """Fill `out`, the elements of round `k`, from everybody's shares."""
        for rank, view in enumerate(box.views[self._array.dtype]):
            low, high = self._part(k, rank)
            if low < high:
                place = offsets[rank] // self._itemsize
                out[low:high] = view[place : place + high - low]

    def commit(self) -> None:
        """Move private results into the tensor."""
        if self._private is not None:
            self._array[...] = self._private
            self._private = None
        if self._takes:
            self._sink.finish()

    def sinks(self) -> Sequence[Sink]:
        """Return the place of the result, where this rank gets it."""
        return (self._sink,) if self._takes else ()

    def detach(self) -> None:
        """Work in a private copy of the tensor, which is input and output."""
        self._array = self._array.copy()
        self._sink = Sink(self._array)


class ReduceScatter(Segmented):
    """Reduce segment r of all ranks into `sink.array` of rank r. `segments` are this rank's, one per rank."""

    def __init__(
        self,
        name: str,
        signature: int,
        segments: Sequence[Array],
        sink: Any,
        reducer: Reducer,
        box: Outboxes,
        longest: int,
    ) -> None:
        super().__init__(name, signature, segments, sink, box, box.num_ranks > 1, longest)
        self._reducer = reducer
        self._scratch = reducer.scratch(self._length)

    def _make(self, box: Outboxes, offsets: list[int], out: Array, first: int) -> None:
        parts = [self._part(box, rank, offsets, out, first) for rank in range(box.num_ranks)]
        self._reducer.reduce(parts, out, self._scratch)
