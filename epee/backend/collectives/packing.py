"""Several tensors as one: the coalesced calls copy them into one private array, run one call and unpack at commit.

So a coalesced call costs one exchange and is atomic: all its tensors change or none. The price is a private copy.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from ...engine.tensors import Array, Carrier, Target, source, target


def shapes_word(counts: Sequence[int]) -> int:
    """Return a word that stands for the element counts of a list, for the header's DETAIL."""
    return zlib.crc32(np.asarray(counts, np.int64).tobytes()) | len(counts) << 32


class PackedTensors:
    """A private array for the concatenation of `tensors`, unpacked into them by `finish`."""

    def __init__(self, tensors: Sequence[torch.Tensor], carrier: Carrier, name: str, fill: bool) -> None:
        self.ends = list(accumulate(tensor.numel() for tensor in tensors))
        self.array: Array = np.empty(self.ends[-1] if self.ends else 0, carrier.dtype)
        self._targets: list[Target] = [target(tensor, carrier, name) for tensor in tensors]
        if fill:
            pack([source(tensor, carrier) for tensor in tensors], self.array)

    def finish(self) -> None:
        """Copy the parts to their tensors."""
        first = 0
        for end, part in zip(self.ends, self._targets, strict=True):
            part.array[...] = self.array[first:end]
            part.finish()
            first = end


def pack(arrays: Sequence[Array], out: Array) -> None:
    """Copy `arrays` one behind the other into `out`."""
    first = 0
    for array in arrays:
        out[first : first + len(array)] = array
        first += len(array)


class GatheredPart:
    """Rank `rank`'s part of a coalesced all_gather: unpacked into the rank-th piece of every output."""

    def __init__(self, targets: Sequence[Target], counts: Sequence[int], rank: int, carrier: Carrier) -> None:
        self.array: Array = np.empty(sum(counts), carrier.dtype)
        self._targets = targets
        self._counts = counts
        self._rank = rank

    def finish(self) -> None:
        """Copy the pieces; the write-backs are the caller's."""
        first = 0
        for count, part in zip(self._counts, self._targets, strict=True):
            part.array[self._rank * count : (self._rank + 1) * count] = self.array[first : first + count]
            first += count


class FinishAfter:
    """The last sink of a list: runs its own `finish`, then the write-backs of `targets`."""

    def __init__(self, sink: GatheredPart, targets: Sequence[Target]) -> None:
        self.array = sink.array
        self._sink = sink
        self._targets = targets

    def finish(self) -> None:
        """Finish the part, then the outputs."""
        self._sink.finish()
        for part in self._targets:
            part.finish()


class ZeroAfter:
    """The last sink of a list, or an output that is one tensor: also fills the entries of excluded ranks with zeros.

    Args:
        sink: finishes the results of the present ranks.
        places: to be filled.
        targets: whose write-backs follow.
        first: fill before `sink` finishes: the filled entries are part of its output.
    """

    def __init__(self, sink: Any, places: Sequence[Array], targets: Sequence[Target], first: bool = False) -> None:
        self.array: Array = sink.array
        self._sink = sink
        self._places = places
        self._targets = targets
        self._is_first = first

    def finish(self) -> None:
        """Fill, finish and write back."""
        if not self._is_first:
            self._sink.finish()
        for place in self._places:
            place[...] = 0
        if self._is_first:
            self._sink.finish()
        for part in self._targets:
            part.finish()
