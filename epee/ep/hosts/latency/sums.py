"""Sums of a combine over several hosts: made on the experts' host, one row per token, and sent to the token's.

Each rank lays the weighted sums of its experts' rows out for its host (`HostsWire.part_for`) and announces that
(`laid`). The server of a source waits for all ranks of its host, adds up, ranks ascending, and sends one row per
record, rounded like a rank's sum. This happens in the send phase: hooks may be called in another order on each rank,
and a rank that added up in its hook could be awaited by one whose hook it waits for. All waiting is done before the
first message of the call is posted, and the own host's comes last: so if a call without a mask is aborted in between,
no rank has all messages.

The server of a source is its gateway; for a rank that excludes that one, the next rank of the host that it does not
exclude, so if the exclusion is known before the combine, there is a server. Sums name the ranks whose rows are in them,
and a source takes the first that it finds in this order. A rank that came too late for them is not in the result, for
all tokens alike, nor is a host whose server is silent in this very combine; `got` and `lost_weight` report that. If a
source has excluded a rank (`cut`) before the sum is made, or finds a rank in a sum that it excludes, it does not use
the sum.

A crash leaves rows that are in a sum or not, for all tokens of a source alike; or no message, so no rank reads the sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch

from ....errors import ProtocolError
from ....link.topology import Topology
from ...latency.flight import Flight
from ...latency.wire import SectionHeader
from ...throughput.placement import Ints
from .flight import HostsFlights
from .handle import HostsLatencyHandle
from .region import Sums
from .wire import HostsWire


class SumsFound(NamedTuple):
    """The sums of a host for this rank.

    Attributes:
        server: the rank whose message contains them.
        bits: the ranks whose rows they have, a bit per rank; 0: there are none.
        first, num_rows: of the rows.
    """

    server: int
    bits: int
    first: int
    num_rows: int


class HostSums:
    """Makes a host's sums, and reads those of others.

    Args:
        topology: the placement of the ranks.
        wire: of the buffer.
        flights: over it.
    """

    def __init__(self, topology: Topology, wire: HostsWire, flights: HostsFlights) -> None:
        self._topology, self._wire, self._flights = topology, wire, flights

    def begin_epoch(self, topology: Topology) -> None:
        """Apply a new placement of the ranks; no call is under way."""
        self._topology = topology

    # ---- sent

    def send(
        self,
        flight: Flight,
        readers: Mapping[int, list[int]],
        head: SectionHeader,
        dtype: torch.dtype,
        handle: HostsLatencyHandle,
    ) -> None:
        """Post this rank's message of a combine for all hosts, with the sums for the sources that it serves.

        Args:
            flight: the combine; this rank's rows are laid out.
            readers: by host the ranks that the message is for.
            head: of the message.
            dtype: of the rows.
            handle: of the dispatch.
        """
        topology, wire, seq = self._topology, self._wire, flight.seq
        wire.lay(seq, head)
        served = [
            rank
            for host, ranks in readers.items()
            for rank in ranks
            if host != topology.host and head.had >> rank & 1 and self._server_of(flight, rank) == topology.rank
        ]
        heads = self._laid(flight) if served else {}
        sums = {rank: self._sum_for(flight, rank, heads, handle, dtype) for rank in served}
        for host, ranks in readers.items():
            if host == topology.host:
                continue
            mine = [rank for rank in ranks if rank in sums]
            place = Sums(len(topology.hosts[host]), handle.cut.config.hidden * dtype.itemsize)
            half = wire.half_for(host, seq, place.nbytes(sum(len(sums[rank][1]) for rank in mine)))
            entries, first = place.entries(half), 0
            entries[:] = 0
            for rank in mine:
                bits, total = sums[rank]
                place.rows(half, first, len(total), dtype).copy_(total)
                entries[topology.hosts[host].index(rank)] = bits, first, len(total)
                first += len(total)
            wire.publish(host, seq, head, half)
        wire.complete(seq)

    def _servers(self, src: int, host: int) -> list[int]:
        """Return the ranks of a host in the order in which they serve a source on another one."""
        there = self._topology.hosts[host]
        first = there.index(self._topology.gateway(src, host))
        return [*there[first:], *there[:first]]

    def _server_of(self, flight: Flight, src: int) -> int:
        """Return the rank of this host that adds up for a source, as far as this rank knows."""
        return next(rank for rank in self._servers(src, self._topology.host) if rank in flight.peers())

    def _laid(self, flight: Flight) -> dict[int, SectionHeader]:
        """Wait for the ranks of this host; return the headers of those that have laid out their rows."""
        heads = {}
        for rank in self._topology.here:
            if rank in flight.peers():
                head = self._flights.laid(flight, rank)
                self._flights.require_all(flight)
                if head is not None:
                    heads[rank] = head
        return heads

    def _sum_for(
        self,
        flight: Flight,
        src: int,
        heads: dict[int, SectionHeader],
        handle: HostsLatencyHandle,
        dtype: torch.dtype,
    ) -> tuple[int, torch.Tensor]:
        """Return the ranks whose rows are in this host's sum for a rank of another one, a bit per rank, and the sum."""
        came = handle.came[src]
        assert came is not None
        while True:
            records = {
                rank: came.of(rank)
                for rank, head in heads.items()
                if head.had >> src & 1 and (flight.is_alike or not self._wire.has_cut(src, rank, handle.seq))
            }
            total = self._sum_of_host(flight, src, records, came.num_records, handle, dtype)
            if not take_back(self._wire, flight, heads, "laid"):
                return sum(1 << rank for rank in records), total
            self._flights.require_all(flight)

    def _sum_of_host(
        self,
        flight: Flight,
        src: int,
        records: dict[int, Ints],
        count: int,
        handle: HostsLatencyHandle,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Return `[count, hidden]`: the rows of ranks of this host for `src` added up, ranks ascending, and rounded.

        Args:
            flight: the combine.
            src: the rank of the tokens.
            records: for each rank that is in the sum its records of `count` ones.
            count: of records.
            handle: of the dispatch.
            dtype: of the rows.
        """
        hidden = handle.cut.config.hidden
        total = torch.full((count, hidden), -0.0, dtype=torch.float32, device="cpu")
        for rank, index in records.items():
            part = self._wire.part_of(rank, src, flight.seq, len(index), hidden * dtype.itemsize)
            rows = torch.from_numpy(part).view(dtype).view(len(index), hidden)
            total.index_add_(0, torch.from_numpy(index), rows.to(torch.float32))
        return total.to(dtype)

    # ---- received

    def counted(self, flight: Flight, heads: Mapping[int, SectionHeader]) -> int:
        """Return the ranks whose rows are in the sums that this rank has got, a bit per rank."""
        bits = sum(1 << rank for rank in self._topology.here)
        for host in self._topology.gateways():
            bits |= self._sums_at(flight, host, heads).bits
        return bits

    def _sums_at(self, flight: Flight, host: int, heads: Mapping[int, SectionHeader]) -> SumsFound:
        """Return the sums of another host that this rank takes."""
        topology, me = self._topology, self._topology.rank
        position, place = topology.here.index(me), Sums(len(topology.here), 0)
        for server in self._servers(me, host):
            if server in heads and heads[server].had >> me & 1:
                entries = place.entries(self._wire.half_of(server, flight.seq, place.nbytes(0)))
                found = SumsFound(server, *entries[position].tolist())
                ranks = [rank for rank in range(found.bits.bit_length()) if found.bits >> rank & 1]
                is_for_me = all(rank in topology.hosts[host] and flight.active[rank] for rank in ranks)
                if ranks and is_for_me and self._wire.is_here(server, flight.seq):
                    return found
        return SumsFound(me, 0, 0, 0)

    def received(
        self,
        flight: Flight,
        host: int,
        heads: Mapping[int, SectionHeader],
        dtype: torch.dtype,
        handle: HostsLatencyHandle,
    ) -> tuple[list[int], torch.Tensor] | None:
        """Return the ranks whose rows a host's sum has, and the sum, a row for each record; None if there is none.

        The tags of `heads` are checked afterwards (`take_back`).
        """
        topology, records, me = self._topology, handle.records[host], self._topology.rank
        if host == topology.host:
            ranks = [rank for rank in topology.here if rank in heads and heads[rank].had >> me & 1]
            index = {rank: np.searchsorted(records, handle.sent[rank]) for rank in ranks}
            return ranks, self._sum_of_host(flight, me, index, len(records), handle, dtype)
        found = self._sums_at(flight, host, heads)
        if not found.bits:
            return None
        ranks = [rank for rank in topology.hosts[host] if found.bits >> rank & 1]
        place = Sums(len(topology.here), handle.cut.config.hidden * dtype.itemsize)
        end = found.first + found.num_rows
        if found.num_rows != len(records) or end > len(topology.here) * handle.cut.config.max_tokens_per_rank:
            raise ProtocolError(
                f"combine: rank {found.server} sends rows {found.first} ... {end - 1} for {len(records)} tokens"
            )
        half = self._wire.half_of(found.server, flight.seq, place.nbytes(end))
        return ranks, place.rows(half, found.first, found.num_rows, dtype)


def take_back(wire: HostsWire, flight: Flight, heads: dict[int, SectionHeader], field: str = "head") -> bool:
    """Remove the ranks whose messages were overwritten while they were read; return whether there were any."""
    gone = [src for src in heads if not wire.is_there(field, src, flight.seq)]
    for src in gone:
        flight.lost[src] = "cut"
        del heads[src]
    return bool(gone)
