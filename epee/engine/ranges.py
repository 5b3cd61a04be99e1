"""The memory that calls touch, compared: whether two calls touch the same elements.

Memory is compared by ranges of addresses first. Where two ranges meet and a strided view is among them, its elements
decide (`numpy.shares_memory`, which reads strides and no memory): two columns of a matrix are disjoint. A search that
would take long ends with "they meet".

Plain values and this process's own state; nothing is locked here.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Any

import numpy as np
import torch

from .tensors import Array, span

MIN_RANGES = 64
MAX_PAIRS = 1 << 16  # pairs of views that are compared by their elements for two calls; about 1 us each
MAX_WORK = 10_000  # steps of the search for an element that two views share

Parts = tuple[Array, ...] | None  # the views of a range, as arrays that are never read; None: it is used byte by byte
Spans = tuple[tuple[int, int, Parts], ...]  # start, end and parts of each range, ascending and disjoint


class _Layout:
    """Address, shape and strides of a view, for numpy. The memory is neither read nor kept alive."""

    __slots__ = ("__array_interface__",)

    def __init__(self, start: int, itemsize: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
        self.__array_interface__ = {
            "data": (start, False),
            "shape": shape,
            "strides": strides,
            "typestr": f"|V{itemsize}",
            "version": 3,
        }


def spans_of(tensors: Any) -> Spans:
    """Return the memory of a tensor, or of lists of tensors of any depth."""
    if isinstance(tensors, (list, tuple)):  # asked first: torch's answer about what is no tensor takes a microsecond
        if not tensors:
            return ()
        if len(tensors) == 1:
            tensors = tensors[0]
    if not isinstance(tensors, (list, tuple)) and tensors.is_contiguous():  # the usual case in one go
        start, nbytes = tensors.data_ptr(), tensors.nbytes
        return ((start, start + nbytes, None),) if nbytes else ()
    found: list[tuple[int, int, Parts]] = []
    _collect(tensors, found)
    if len(found) < 2:
        return tuple(found)
    found.sort(key=lambda entry: entry[:2])
    merged = [[found[0]]]
    end = found[0][1]
    for entry in found[1:]:
        if entry[0] <= end:
            merged[-1].append(entry)
        else:
            merged.append([entry])
        end = max(end, entry[1])
    return tuple(_joined(entries) for entries in merged)


def _collect(tensors: Any, found: list[tuple[int, int, Parts]]) -> None:
    if isinstance(tensors, (list, tuple)):
        for item in tensors:
            _collect(item, found)
        return
    if tensors.layout is torch.sparse_coo:  # results replace its parts: it is known by itself, and by what it has now
        found.append((id(tensors), id(tensors) + 1, None))
        _collect((tensors._indices(), tensors._values()), found)
        return
    start, end = span(tensors)
    if start < end:
        found.append((start, end, None if tensors.nbytes == end - start else (_layout(tensors, start),)))


def _layout(tensor: Any, start: int) -> Array:
    size = tensor.itemsize
    steps = [(e, s * size) for e, s in zip(tensor.shape, tensor.stride(), strict=True) if e > 1 and s]
    shape, strides = tuple(extent for extent, _ in steps), tuple(step for _, step in steps)
    return np.asarray(_Layout(start, size, shape, strides))


def _joined(entries: list[tuple[int, int, Parts]]) -> tuple[int, int, Parts]:
    """Return ranges that meet as one."""
    start, end = entries[0][0], max(entry[1] for entry in entries)
    if all(parts is None for _, _, parts in entries):
        return start, end, None
    return start, end, tuple(part for entry in entries for part in _parts_of(entry))


def _parts_of(entry: tuple[int, int, Parts]) -> tuple[Array, ...]:
    start, end, parts = entry
    return (np.asarray(_Layout(start, 1, (end - start,), (1,))),) if parts is None else parts


def meet(first: Spans, second: Spans) -> bool:
    """Return whether two lists of ranges have an element in common, or may have and are too many to compare."""
    if not first or not second or first[-1][1] <= second[0][0] or second[-1][1] <= first[0][0]:
        return False
    i = j = 0
    while i < len(first) and j < len(second):
        one, other = first[i], second[j]
        if one[1] > other[0] and other[1] > one[0] and _share_element(one, other):
            return True
        if one[1] <= other[1]:
            i += 1
        else:
            j += 1
    return False


def _share_element(first: tuple[int, int, Parts], second: tuple[int, int, Parts]) -> bool:
    """Return whether the views of two ranges that meet have an element in common."""
    if first[2] is None and second[2] is None:
        return True
    ones, others = _parts_of(first), _parts_of(second)
    if len(ones) * len(others) > MAX_PAIRS:
        return True
    search: Any = np.shares_memory  # numpy's stubs know two values of `max_work`
    try:
        return any(search(one, other, max_work=MAX_WORK) for one in ones for other in others)
    except (np.exceptions.TooHardError, OverflowError):
        return True


class Written:
    """The ranges that open collectives write, sorted: quick to show that a range is not written (the usual case)."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int, int]] = []  # start, end, number of the call
        self._longest = 0
        self._limit = MIN_RANGES

    def add(self, spans: Spans, seq: int, num_retired: int) -> None:
        """Note the memory that call `seq` writes; forgets calls up to `num_retired` now and then."""
        if len(self._ranges) > self._limit:
            self._ranges = [entry for entry in self._ranges if entry[2] > num_retired]
            self._limit = MIN_RANGES + 2 * len(self._ranges)
            self._longest = max((end - start for start, end, _ in self._ranges), default=0)
        for start, end, _ in spans:
            insort(self._ranges, (start, end, seq))
            if end - start > self._longest:
                self._longest = end - start

    def may_meet(self, spans: Spans, num_retired: int) -> bool:
        """Return whether a call after `num_retired` writes there, by ranges of addresses."""
        ranges = self._ranges
        for start, end, _ in spans:
            first, last = bisect_left(ranges, (start - self._longest,)), bisect_left(ranges, (end,))
            for entry in ranges[first:last]:
                if entry[1] > start and entry[2] > num_retired:
                    return True
        return False
