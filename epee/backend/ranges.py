"""The memory that calls touch, as ranges of addresses, and the edges between calls that touch the same.

A view of a tensor counts from its first byte to its last. `engine/overlap.py` finds which earlier calls are in the way
of a later one and notes an `Edge` for each; a call that is about to begin asks here whether it may (`is_free`).

Plain values and this process's own state; nothing is locked here.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from ..errors import EpeeError
from .outbox import Outboxes
from .tensors import span

MIN_RANGES = 64
Spans = tuple[tuple[int, int], ...]  # ranges of addresses, ascending and disjoint


def spans_of(tensors: Any) -> Spans:
    """Return the memory of a tensor, or of lists of tensors of any depth."""
    if isinstance(tensors, (list, tuple)):  # asked first: torch's answer about what is no tensor takes a microsecond
        if not tensors:
            return ()
        if len(tensors) == 1:
            tensors = tensors[0]
    if not isinstance(tensors, (list, tuple)) and tensors.is_contiguous():  # the usual case in one go
        start, nbytes = tensors.data_ptr(), tensors.nbytes
        return ((start, start + nbytes),) if nbytes else ()
    found: list[tuple[int, int]] = []
    _collect(tensors, found)
    if len(found) < 2:
        return tuple(found)
    found.sort()
    merged = [found[0]]
    for start, end in found[1:]:
        if start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return tuple(merged)


def _collect(tensors: Any, found: list[tuple[int, int]]) -> None:
    if isinstance(tensors, (list, tuple)):
        for item in tensors:
            _collect(item, found)
        return
    place = span(tensors)
    if place[0] < place[1]:
        found.append(place)


def meet(first: Spans, second: Spans) -> bool:
    """Return whether two lists of ranges have a byte in common."""
    if not first or not second or first[-1][1] <= second[0][0] or second[-1][1] <= first[0][0]:
        return False
    i = j = 0
    while i < len(first) and j < len(second):
        if first[i][1] <= second[j][0]:
            i += 1
        elif second[j][1] <= first[i][0]:
            j += 1
        else:
            return True
    return False


class Written:
    """The ranges that open collectives write, sorted: tells at once that nobody writes somewhere, as nearly always."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int, int]] = []  # start, end, number of the call
        self._longest = 0
        self._limit = MIN_RANGES

    def add(self, spans: Spans, seq: int, num_retired: int) -> None:
        """Note what call `seq` writes; forgets calls up to `num_retired` now and then."""
        if len(self._ranges) > self._limit:
            self._ranges = [entry for entry in self._ranges if entry[2] > num_retired]
            self._limit = MIN_RANGES + 2 * len(self._ranges)
            self._longest = max((end - start for start, end, _ in self._ranges), default=0)
        for start, end in spans:
            insort(self._ranges, (start, end, seq))
            if end - start > self._longest:
                self._longest = end - start

    def may_meet(self, spans: Spans, num_retired: int) -> bool:
        """Return whether a call after `num_retired` writes there."""
        ranges = self._ranges
        for start, end in spans:
            first, last = bisect_left(ranges, (start - self._longest,)), bisect_left(ranges, (end,))
            for entry in ranges[first:last]:
                if entry[1] > start and entry[2] > num_retired:
                    return True
        return False


# ---- edges


class Edge(NamedTuple):
    """An earlier call (an operation or a message) that is in the way of a later one until `is_over(call)`."""

    call: Any
    is_over: Callable[[Any], bool]
    is_read: bool  # the later one reads what this one writes


class Held(Protocol):
    """A call that others may be in the way of."""

    before: Sequence[Edge]

    def describe(self, box: Outboxes, **facts: object) -> str:
        """Name the call and its place for a message."""


def is_free(call: Held, box: Outboxes) -> bool:
    """Return whether nothing is in the way of `call` any more.

    Raises:
        EpeeError: a call has failed whose results this one reads.
    """
    if not all(edge.is_over(edge.call) for edge in call.before):
        return False
    for edge in call.before:
        if edge.is_read and edge.call.error is not None:
            raise not_run(call.describe(box), edge.call.error)
    return True


def not_run(told: str, error: BaseException) -> EpeeError:
    """Return the error of a call that needs the results of one that failed with `error`, of the same kind."""
    kind = type(error) if isinstance(error, EpeeError) else EpeeError
    lost = kind(f"{told}: not run: it reads what an earlier call was to write, which has failed; repeat both: {error}")
    lost.__dict__.update(error.__dict__)  # its ranks, its number
    return lost
