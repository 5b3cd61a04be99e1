"""all_reduce and reduce of more data over several hosts: a sum inside each host first, which then crosses the network.

Two steps, as on one host, but each host makes a sum of its own: of its n ranks the i-th reduces the i-th of n shares of
a round, over the values of this host alone (nothing of them leaves it), and tells its share to the other hosts
(MERGED). Whoever takes the result reduces, piece by piece, the shares of all hosts. So a host sends to every other one
as many bytes as the tensor has, where n / R of everybody's values and then the sums would be (n + 1) / H times that; it
is done where it is less (`is_less`), as between few hosts with many ranks.

Order: inside a host ranks ascending, rounded to the tensor's dtype; then hosts ascending (by their lowest rank),
rounded once more. All ranks do the same on the same values, so results are equal everywhere, bit for bit; with another
placement of the ranks they may be rounded otherwise. The oracle is in `tests/hosts/test_sums.py`. A mean is not made
so: it is the exact sum, divided.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...memory.layout import align_up
from ..outbox import ALIGN_BYTES, Outboxes
from ..tensors import Array
from .plan import Range
from .reduce import AVG, Reducer
from .reducing import AllReduce
from .rounds import cut, lay_out

SMALL_BYTES = 64 << 10  # of all values of a host: less is told to everybody at once

Hosts = Sequence[tuple[int, ...]]


def plan_reduction(
    name: str, signature: int, sink: Any, reducer: Reducer, op: int, box: Outboxes, root: int = -1
) -> AllReduce:
    """Return the plan of an all_reduce in place on `sink.array`, or of a reduce to position `root`."""
    if box.exports is not None and op != AVG:
        hosts: Hosts = box.exports.topology.hosts
        if is_less(hosts, sink.array.nbytes):
            return HostsAllReduce(name, signature, sink, reducer, box, hosts, root)
    return AllReduce(name, signature, sink, reducer, box, root)


def is_less(hosts: Hosts, nbytes: int) -> bool:
    """Return whether sums inside the hosts first are fewer bytes on the network than shares of everybody."""
    num_ranks = sum(len(host) for host in hosts)
    return num_ranks * nbytes > SMALL_BYTES * len(hosts) and num_ranks >= len(hosts) ** 2


class HostsAllReduce(AllReduce):
    """all_reduce, or reduce, with a sum per host; see above."""

    one_step_bytes = 0

    def __init__(
        self, name: str, signature: int, sink: Any, reducer: Reducer, box: Outboxes, hosts: Hosts, root: int
    ) -> None:
        self._hosts = hosts
        self._place_of = {rank: (host, at) for host, ranks in enumerate(hosts) for at, rank in enumerate(ranks)}
        super().__init__(name, signature, sink, reducer, box, root)
        self._summed = hosts[self._place_of[self._rank][0]]

    def _plan_two_steps(self, box: Outboxes, count: int, itemsize: int) -> None:
        rounds = cut(count, itemsize, box.staging_bytes)
        self._length = length = min(rounds.length, count)
        self._shares = [align_up(-(-length // len(ranks)), ALIGN_BYTES) for ranks in self._hosts]
        self._share = max(self._shares)
        lay_out(self, rounds, length * itemsize, self._share * itemsize, puts=True)
        if rounds.private and self._takes:
            self._private = np.empty(count, self._array.dtype)
        self._scratch = self._reducer.scratch(self._share)

    def _part(self, k: int, rank: int) -> tuple[int, int]:
        host, at = self._place_of[rank]
        length, share = min(self._length, self._count - k * self._length), self._shares[host]
        low = min(length, at * share)
        return low, min(length, low + share)

    def exports(self, box: Outboxes, k: int, readers: Sequence[int]) -> Sequence[Range]:
        """Return nothing: only this host reads the values."""
        return ()

    def _fetch(self, box: Outboxes, k: int, offsets: list[int], out: Array) -> None:
        """Reduce the shares of all hosts, between the places where a host's share ends."""
        views = box.views[self._array.dtype]
        ends = sorted({end for rank in self._place_of for end in self._part(k, rank)})
        for low, high in itertools.pairwise(ends):
            parts = []
            for host, ranks in enumerate(self._hosts):
                at = low // self._shares[host]
                place = offsets[ranks[at]] // self._itemsize + low - at * self._shares[host]
                parts.append(views[ranks[at]][place : place + high - low])
            self._reducer.reduce(parts, out[low:high], self._scratch)
