"""The records of a dispatch: which hosts the tokens of each rank went to, and which of their rows are this rank's.

A **record** is a token on its way to one host: its row and scales, and beside them the ranks of that host that get it
(bits of their positions there), its index at the source, expert ids and weights. A source has one record of a token for
each host that has one of its destinations, its own host too. Records of a host are in order of the tokens.

A handle of a buffer over several hosts has them beside plan and offsets (`CpuHandle.by_host`). Local; no memory of
others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ....arrays import array_of
from ....link.topology import Topology, one_host
from ..placement import Ints, Placement, SendPlan


class Records(NamedTuple):
    """The records of one source for one host.

    Attributes:
        tokens: `[n]` int64, ascending.
        bits: `[n]` int64: bit j is set when the rank at position j of the host gets the token.
    """

    tokens: Ints
    bits: Ints

    def chunk(self, k: int, length: int) -> tuple[int, int]:
        """Return the first record of round k and the first one after the round."""
        low, high = np.searchsorted(self.tokens, (k * length, (k + 1) * length)).tolist()
        return low, high

    def of(self, position: int) -> Ints:
        """Return the indices of the records that the rank at a position gets."""
        return np.flatnonzero(self.bits >> position & 1)


def sent_records(plan: SendPlan, placement: Placement, num_tokens: int, topology: Topology) -> list[Records]:
    """Return what this rank sends to each host, by the plan and the offsets of its rows."""
    member = np.zeros((len(topology.host_of), num_tokens), dtype=np.int64)
    tokens = array_of(plan.tokens)
    for segment in placement.meta_segments:
        member[segment.dst_rank, tokens[segment.first : segment.first + segment.num_rows]] = 1
    sent = []
    for ranks in topology.hosts:
        bits = (member[list(ranks)] << np.arange(len(ranks), dtype=np.int64)[:, None]).sum(0)
        chosen = np.flatnonzero(bits)
        sent.append(Records(chosen, bits[chosen]))
    return sent


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


@dataclass(frozen=True, eq=False)
class HostRecords:
    """The records of one dispatch, as one rank has them.

    Attributes:
        topology: the placement of the ranks.
        placement: the offsets of this rank's rows.
        first_expert: of this rank.
        members: ranks with a part in the dispatch, ascending.
        num_source_tokens: of each rank, in the dispatch.
        sent: per host, the records of this rank's tokens.
        received: per source, the records that it sent to this host; empty until they have arrived.
        topk_ids: expert layout: per source `[records, num_topk]` int64, the ids that came with them.
    """

    topology: Topology
    placement: Placement
    first_expert: int = 0
    members: tuple[int, ...] = ()
    num_source_tokens: Sequence[int] = ()
    sent: Sequence[Records] = ()
    received: Sequence[Records] = ()
    topk_ids: Sequence[Ints] = ()

    @cached_property
    def position(self) -> int:
        """The index of this rank among those of its host."""
        return self.topology.here.index(self.topology.rank)

    @cached_property
    def taken(self) -> list[TakenRows]:
        """Per source, the rows of this rank."""
        found, first = [], 0
        places = None if self.placement.recv_rows is None else array_of(self.placement.recv_rows)
        for source, count in enumerate(self.placement.num_received):
            if places is None:
                rows = np.arange(first, first + count)
                records = self.received[source].of(self.position)
            else:
                rows = places[first : first + count]
                records = self.slots[source][0]
            found.append(TakenRows(records, rows))
            first += count
        return found

    @cached_property
    def slots(self) -> list[tuple[Ints, Ints]]:
        """Expert layout: per source, record and k of each slot of this rank's experts, by (expert, token, k)."""
        num_local = len(self.placement.num_tokens_per_expert)
        return [local_slots(ids, self.first_expert, num_local)[:2] for ids in self.topk_ids]


NO_RECORDS = HostRecords(one_host(0, 1), Placement([], [], [0], 0, [], None, []))  # of a dispatch on one host


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
