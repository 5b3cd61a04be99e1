"""The handle of a dispatch over several hosts: a host handle, and the records that its rows came in. Local; no memory
of others."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ...arrays import array_of
from ...link.topology import Topology, one_host
from ..handle import CpuHandle
from ..throughput.placement import Ints
from .layout import Records


class TakenRows(NamedTuple):
    """The rows that this rank has of one source, in the order of the source's plan.

    Attributes:
        records: `[n]` int64, the record that each row came in.
        rows: `[n]` int64, its offset in the result.
    """

    records: Ints
    rows: Ints

    def among(self, low: int, high: int) -> slice | Ints:
        """Return which of them came in records `low ... high - 1`."""
        return np.flatnonzero((self.records >= low) & (self.records < high))


@dataclass(eq=False)
class TwoLevelHandle(CpuHandle):
    """The handle of CPU tensors over several hosts.

    Attributes:
        sent: per host, the records of this rank's tokens.
        received: per source, the records that it sent to this host.
        num_source_tokens: of each rank, in the dispatch.
        topology: the placement of the ranks.
        members: ranks with a part in the dispatch, ascending.
        topk_ids: expert layout: per source `[records, num_topk]` int64, the ids that came with them.
    """

    sent: list[Records] = field(default_factory=list)
    received: list[Records] = field(default_factory=list)
    topk_ids: list[Ints] = field(default_factory=list)
    num_source_tokens: list[int] = field(default_factory=list)
    position: int = 0  # of this rank on its host
    first_expert: int = 0  # of this rank
    members: tuple[int, ...] = ()
    topology: Topology = one_host(0, 1)  # noqa: RUF009 - it never changes; another one is set at once

    @cached_property
    def taken(self) -> list[TakenRows]:
        """Per source, the rows of this rank."""
        found, first = [], 0
        places = None if self.placement.recv_rows is None else array_of(self.placement.recv_rows)
        for source, count in enumerate(self.num_received):
            if places is None:
                rows = np.arange(first, first + count)
                records = self.received[source].of(self.position)
            else:
                rows = places[first : first + count]
                records = self.slots[source][0]
            found.append(TakenRows(records, rows))
            first += count
        return found

    @property
    def num_sent_to_hosts(self) -> list[int]:
        """Tokens of this rank that go to each host, its own one too, once each."""
        return [len(records.tokens) for records in self.sent]

    @cached_property
    def slots(self) -> list[tuple[Ints, Ints]]:
        """Expert layout: per source, record and k of each slot of this rank's experts, by (expert, token, k)."""
        num_local = len(self.placement.num_tokens_per_expert)
        return [local_slots(ids, self.first_expert, num_local)[:2] for ids in self.topk_ids]


def local_slots(topk_ids: Ints, first_expert: int, num_local: int) -> tuple[Ints, Ints, Ints]:
    """Return record, k and local expert of each slot of a rank's experts, by (expert, record, k).

    Args:
        topk_ids: `[records, num_topk]`.
        first_expert: of the rank, which has `num_local`.
    """
    local = topk_ids - first_expert
    record, k = ((local >= 0) & (local < num_local)).nonzero()
    expert = local[record, k]
    order = np.argsort(expert, kind="stable")
    return record[order], k[order], expert[order]
