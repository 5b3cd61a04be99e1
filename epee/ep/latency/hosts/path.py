"""Dispatch and combine of a `LatencyBuffer` on CPUs between several hosts; the calls are those of `latency/cpu.py`.

Dispatch, send phase: a token's record (row, quantised once if FP8 is wanted, token, expert ids, weights) goes once to
each host that has one of its experts, all records of a host in one write. Receive phase: every rank scans what has
arrived on its host and copies its own rows to their offsets.

Combine, send phase: a rank lays the weighted sums of its experts' rows out for its host, one row per token, and sends
what its host has for the sources that it serves (see below). Receive phase: a rank adds up the ranks of its own host,
rounds as the others do, and adds the hosts' sums, hosts ascending. Weights given to combine go to each host as records
did, ahead of it.

`sync` lets the living ranks meet, admits processes that replace lost ranks (`members/assembly.py`), and begins an epoch
with them: calls are numbered from 1, excluded ranks are members again, hosts and gateways are those of the ranks
present, and the memory that they lend now is read. It ends with a call of the engine, so all ranks find the same
members (`members/exchange.py`). Until then a death changes nothing for the others' calls except that its rank, and on a
host those ranks whose gateway it was there, send nothing.

After a crash see `wire.py`; the rows of a rank that dies between its rows and its gateway's sums are in them or not,
for all tokens of a source alike.

**Sums of a combine** are made on the experts' host, one row per token, and sent to the token's (`HostSums`).

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

from ....arrays import array_of, writing
from ....engine.outbox import STATE_WORDS, has_exited, has_left
from ....errors import EpeeError, InvalidState, PeerError, ProtocolError, RankFailedError
from ....gpu.turns import Closing
from ....link.topology import Roles, Topology
from ....view.group import GroupInView
from ....view.protocol.messages import LEFT
from ...config import BufferConfig
from ...handle import mask_of
from ...members.assembly import Assembly, CallPlacement
from ...members.exchange import HostsExchange
from ...members.header import OP_SYNC
from ...paths import PathOverHosts
from ...throughput.placement import Ints
from ..call import PendingCall
from ..cpu import CpuLatencyHandle, LatencyCalls
from ..region import SectionCut, checked_cut, section_bytes
from ..rows import FP8, Floats, Source, WireRows, as_sent, num_scales, partial_sums, sum_over_ranks
from ..types import (
    LatencyCombineCall,
    LatencyCombined,
    LatencyDispatchCall,
    LatencyDispatched,
    Quantisation,
)
from ..wire import SectionHeader, checked_tokens
from .handle import ArrivedIds, HostsLatencyHandle
from .pending_call import HostsPendingCalls
from .region import RecordFields, Sums, latency_layout
from .wire import HostsWire, TakenBack


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
        pending_calls: over it.
    """

    def __init__(self, topology: Topology, wire: HostsWire, pending_calls: HostsPendingCalls) -> None:
        self._topology, self._wire, self._pending_calls = topology, wire, pending_calls

    def begin_epoch(self, topology: Topology) -> None:
        """Apply a new placement of the ranks; no call is under way."""
        self._topology = topology

    # ---- sent

    def send(
        self,
        pending_call: PendingCall,
        readers: Mapping[int, list[int]],
        head: SectionHeader,
        dtype: torch.dtype,
        handle: HostsLatencyHandle,
    ) -> None:
        """Post this rank's message of a combine for all hosts, with the sums for the sources that it serves.

        Args:
            pending_call: the combine; this rank's rows are laid out.
            readers: by host the ranks that the message is for.
            head: of the message.
            dtype: of the rows.
            handle: of the dispatch.
        """
        topology, wire, seq = self._topology, self._wire, pending_call.seq
        wire.lay(seq, head)
        served = [
            rank
            for host, ranks in readers.items()
            for rank in ranks
            if host != topology.host and head.had >> rank & 1 and self._server_of(pending_call, rank) == topology.rank
        ]
        heads = self._laid(pending_call) if served else {}
        sums = {rank: self._sum_for(pending_call, rank, heads, handle, dtype) for rank in served}
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

    def _server_of(self, pending_call: PendingCall, src: int) -> int:
        """Return the rank of this host that adds up for a source, as far as this rank knows."""
        return next(rank for rank in self._servers(src, self._topology.host) if rank in pending_call.peers())

    def _laid(self, pending_call: PendingCall) -> dict[int, SectionHeader]:
        """Wait for the ranks of this host; return the headers of those that have laid out their rows."""
        heads = {}
        for rank in self._topology.here:
            if rank in pending_call.peers():
                head = self._pending_calls.laid(pending_call, rank)
                self._pending_calls.require_all(pending_call)
                if head is not None:
                    heads[rank] = head
        return heads

    def _sum_for(
        self,
        pending_call: PendingCall,
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
                if head.had >> src & 1 and (pending_call.is_alike or not self._wire.has_cut(src, rank, handle.seq))
            }
            total = self._sum_of_host(pending_call, src, records, came.num_records, handle, dtype)
            if not take_back(self._wire, pending_call, heads, "laid"):
                return sum(1 << rank for rank in records), total
            self._pending_calls.require_all(pending_call)

    def _sum_of_host(
        self,
        pending_call: PendingCall,
        src: int,
        records: dict[int, Ints],
        count: int,
        handle: HostsLatencyHandle,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Return `[count, hidden]`: the rows of ranks of this host for `src` added up, ranks ascending, and rounded.

        Args:
            pending_call: the combine.
            src: the rank of the tokens.
            records: for each rank that is in the sum its records of `count` ones.
            count: of records.
            handle: of the dispatch.
            dtype: of the rows.
        """
        hidden = handle.cut.config.hidden
        total = torch.full((count, hidden), -0.0, dtype=torch.float32, device="cpu")
        for rank, index in records.items():
            part = self._wire.part_of(rank, src, pending_call.seq, len(index), hidden * dtype.itemsize)
            rows = torch.from_numpy(part).view(dtype).view(len(index), hidden)
            total.index_add_(0, torch.from_numpy(index), rows.to(torch.float32))
        return total.to(dtype)

    # ---- received

    def counted(self, pending_call: PendingCall, heads: Mapping[int, SectionHeader]) -> int:
        """Return the ranks whose rows are in the sums that this rank has got, a bit per rank."""
        bits = sum(1 << rank for rank in self._topology.here)
        for host in self._topology.gateways():
            bits |= self._sums_at(pending_call, host, heads).bits
        return bits

    def _sums_at(self, pending_call: PendingCall, host: int, heads: Mapping[int, SectionHeader]) -> SumsFound:
        """Return the sums of another host that this rank takes."""
        topology, me = self._topology, self._topology.rank
        position, place = topology.here.index(me), Sums(len(topology.here), 0)
        for server in self._servers(me, host):
            if server in heads and heads[server].had >> me & 1:
                entries = place.entries(self._wire.half_of(server, pending_call.seq, place.nbytes(0)))
                found = SumsFound(server, *entries[position].tolist())
                ranks = [rank for rank in range(found.bits.bit_length()) if found.bits >> rank & 1]
                is_for_me = all(rank in topology.hosts[host] and pending_call.active[rank] for rank in ranks)
                if ranks and is_for_me and self._wire.is_here(server, pending_call.seq):
                    return found
        return SumsFound(me, 0, 0, 0)

    def received(
        self,
        pending_call: PendingCall,
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
            return ranks, self._sum_of_host(pending_call, me, index, len(records), handle, dtype)
        found = self._sums_at(pending_call, host, heads)
        if not found.bits:
            return None
        ranks = [rank for rank in topology.hosts[host] if found.bits >> rank & 1]
        place = Sums(len(topology.here), handle.cut.config.hidden * dtype.itemsize)
        end = found.first + found.num_rows
        if found.num_rows != len(records) or end > len(topology.here) * handle.cut.config.max_tokens_per_rank:
            raise ProtocolError(
                f"combine: rank {found.server} sends rows {found.first} ... {end - 1} for {len(records)} tokens"
            )
        half = self._wire.half_of(found.server, pending_call.seq, place.nbytes(end))
        return ranks, place.rows(half, found.first, found.num_rows, dtype)


def take_back(wire: HostsWire, pending_call: PendingCall, heads: dict[int, SectionHeader], field: str = "head") -> bool:
    """Remove the ranks whose messages were overwritten while they were read; return whether there were any."""
    gone = [src for src in heads if not wire.is_there(field, src, pending_call.seq)]
    for src in gone:
        pending_call.lost[src] = "cut"
        del heads[src]
    return bool(gone)


class LatencyHostsPath(LatencyCalls, PathOverHosts):
    """Moves the rows of one `LatencyBuffer` between several hosts.

    Args:
        exchange: of the buffer's rows.
        topology: the placement of the ranks, as far as the outboxes do not name it.
        job_handle: job handle of the group.
        poison: fill memory with 0xFF before each use.
        closing: whether another thread wants to close the buffer.
    """

    _handle_type = HostsLatencyHandle

    def __init__(
        self,
        exchange: HostsExchange,
        topology: Topology,
        job_handle: GroupInView,
        poison: bool,
        closing: Closing,
    ) -> None:
        self._places = CallPlacement(topology, exchange.config.num_ranks)
        self._assembly = Assembly(exchange, job_handle)
        self.takes_replacements = job_handle.is_open
        self._topology = topology = self._places.of(exchange.peer_regions)  # of the epoch, as all that follows from it
        self._engine = engine = exchange.engine
        self._life = self._life_words()
        self._met = exchange.peer_regions.members, exchange.peer_regions.epoch  # in the call with which the epoch began
        self._roles = Roles(topology, range(exchange.config.num_ranks))  # of the epoch
        self._layout = latency_layout(exchange.config)
        self._nbytes = self._count()
        self.wire = wire = HostsWire(
            exchange.config, topology, engine, self._ended, closing.check, lambda: exchange.epoch, poison
        )
        pending_calls = HostsPendingCalls(
            wire, lambda: exchange.epoch, self._dead, self._why_gone, self._counted, self._cut_off_by
        )
        self._sums = HostSums(topology, wire, pending_calls)
        super().__init__(exchange, wire, pending_calls, poison)

    def _count(self) -> int:
        """Return how much memory this rank lends to others, or keeps for them."""
        ranks, regions = (self._topology.rank, *self._topology.sources()), self._engine.peer_regions.regions
        return sum(regions[rank].mapped_bytes for rank in ranks)

    # ---- lost ranks

    def _dead(self) -> list[int]:
        """Return the ranks of this host that are dead."""
        return [rank for rank in self._engine.watch.dead() if self._topology.is_here(rank)]

    def _life_words(self) -> list[memoryview]:
        return [region.words(0, STATE_WORDS) for region in self._engine.peer_regions.regions]

    def _ended(self) -> set[int]:
        """Return the ranks from which nothing more will arrive, or which nothing reaches any more.

        A rank that joined after the epoch began has no part in it, even if it has the rank of a member.
        """
        ended, removed = self._lost_ranks()
        return ended | {rank for rank in self._topology.elsewhere if self._gateways_to(rank) & {None, *removed}}

    def _lost_ranks(self) -> tuple[set[int], set[int]]:
        """Return the ranks that have ended or left, and of them those that the epoch has lost."""
        since, (members, epoch) = self._engine.membership.admission.since(), self._met
        there = {rank for rank in members if rank in since and since[rank] <= epoch}
        removed = set(range(self.config.num_ranks)).difference(there)
        left = {rank for rank, words in enumerate(self._life) if has_left(words)}
        return removed.union(left, self._engine.watch.dead()), removed

    def _gateways_to(self, rank: int) -> set[int | None]:
        """Return the ranks through which a rank of another host is heard here, and hears this rank; None: nobody."""
        return {self._roles.keeper(rank), self.wire.gateways.get(self._topology.host_of[rank])}

    def _cut_off_by(self, rank: int) -> set[int]:
        """Return the lost ranks that cut a living rank of another host off; none where it is lost itself."""
        ended, removed = self._lost_ranks()
        if rank in ended or self._topology.is_here(rank):
            return set()
        return removed.intersection(gateway for gateway in self._gateways_to(rank) if gateway is not None)

    def _why_gone(self, rank: int) -> tuple[type[PeerError], str]:
        if has_exited(self._life[rank]):
            return RankFailedError, "its process has ended"
        if has_left(self._life[rank]):
            return PeerError, "it has closed the buffer"
        losses = self._engine.membership.admission.losses(self._met[1])
        if (rank, LEFT) in {(lost, cause) for lost, _, cause in losses}:  # the words that say so cannot arrive any more
            return PeerError, "its process has left the job"
        return RankFailedError, "it is dead, or the way between its host and this one has ended"

    def _counted(self, pending_call: PendingCall, heads: Mapping[int, SectionHeader]) -> int:
        return self._sums.counted(pending_call, heads)

    # ---- what every path has

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's outbox and of the mirrors that it keeps; pages never touched cost nothing."""
        return self._nbytes

    def take_sizes(self, config: BufferConfig) -> SectionCut:
        """Return how sections are cut for calls of these sizes; raises `InvalidArgument` if they do not fit."""
        return checked_cut(config, section_bytes(self.config), self.config.room_bytes or self._layout.nbytes)

    def abort(self) -> None:
        """End a CPU-side call in progress in another thread; others check by themselves."""
        self._engine.close()

    def close(self) -> None:
        """Drop all views of memory; results of the user are their own. Idempotent."""
        self.wire.close()
        for words in self._life:
            words.release()
        self._life = []

    def sync(self, active_ranks: torch.Tensor | None, deadline: float) -> torch.Tensor:
        """Meet, admit joiners, and begin an epoch with all, whatever the masks say; the mask receives the members.

        Raises:
            As `LatencyBuffer.all_gather_bytes`.
        """
        num_ranks = self.config.num_ranks
        error: EpeeError | None = None
        self._pending_calls.reclaim(is_thorough=True)
        if self.wire.num_open:
            error = InvalidState(f"{self.wire.num_open} calls have been sent and not received; call their hooks first")
        if error is not None:
            self.exchange.refuse(OP_SYNC, error, deadline)  # the others are in it
            raise error
        # on the same links as what follows: a rank that has passed the meeting has it
        self.wire.set_cut([True] * num_ranks, 0)
        epoch = self.exchange.epoch.to_bytes(8, "little")
        told = self._assembly.meet(epoch, deadline, lambda _: False)
        self.exchange.epoch = 1 + max(int.from_bytes(epoch, "little") for epoch in told)
        self._met = self.exchange.peer_regions.members, self.exchange.peer_regions.epoch
        self._topology = self._places.of(self.exchange.peer_regions)
        self._roles = roles = Roles(self._topology, self.exchange.members)
        old, self._life = self._life, self._life_words()
        for words in old:
            words.release()
        self.wire.begin_epoch(roles)
        self._sums.begin_epoch(self._topology)
        self._pending_calls.restart()
        self._nbytes = self._count()
        mask = mask_of(self.exchange.members, num_ranks)
        if active_ranks is not None:
            with writing(active_ranks):
                active_ranks[:num_ranks].copy_(mask)
        return mask

    def come_in(self, deadline: float) -> None:
        """Begin with the others' epoch, as a process that has been admitted; raises as `sync`."""
        self.sync(None, deadline)

    # ---- dispatch

    def _send_tokens(self, pending_call: PendingCall, call: LatencyDispatchCall, handle: CpuLatencyHandle) -> None:
        assert isinstance(handle, HostsLatencyHandle)
        rows = as_sent(call.x, call.checked.quantisation)
        readers = self._readers(pending_call)
        none = np.empty(0, dtype=np.int64)
        handle.records = [none] * self._topology.num_hosts
        for host, ranks in readers.items():
            goes = np.zeros(handle.num_tokens, dtype=np.bool_)
            for rank in ranks:
                goes[handle.sent[rank]] = True
            handle.records[host] = np.flatnonzero(goes)
            self._send_records(pending_call, host, ranks, rows, handle)

    def _readers(self, pending_call: PendingCall) -> dict[int, list[int]]:
        """Return by host the ranks that this message is for, this host last; waits until they have room."""
        reachable = set(self._pending_calls.reachable(pending_call))
        order = sorted(range(self._topology.num_hosts), key=lambda host: host == self._topology.host)
        found = {host: [rank for rank in self._topology.hosts[host] if rank in reachable] for host in order}
        return {host: ranks for host, ranks in found.items() if ranks}

    def _send_records(
        self, pending_call: PendingCall, host: int, ranks: list[int], rows: WireRows, handle: HostsLatencyHandle
    ) -> None:
        tokens = handle.records[host]
        scale_columns = 0 if rows.scales is None else rows.scales.shape[1]
        row_bytes = rows.data.shape[1] * rows.data.dtype.itemsize
        records = RecordFields(len(tokens), handle.num_topk, row_bytes, scale_columns)
        half = self.wire.half_for(host, pending_call.seq, records.nbytes)
        meta, num_topk = records.meta(half), handle.num_topk
        meta[:, 0] = tokens
        meta[:, 1 : 1 + num_topk] = handle.topk_idx[tokens]
        meta[:, 1 + num_topk :] = handle.topk_weights[tokens].view(np.int32)
        target = records.rows(half, rows.data.dtype, None if rows.scales is None else rows.scales.dtype)
        index = torch.from_numpy(tokens)
        torch.index_select(rows.data, 0, index, out=target.data)
        if rows.scales is not None:
            torch.index_select(rows.scales, 0, index, out=target.scales)
        had = sum(1 << rank for rank in ranks)
        self.wire.publish(host, pending_call.seq, pending_call.head._replace(num_rows=len(tokens), had=had), half)

    def _receive_tokens(
        self, pending_call: PendingCall, how: Quantisation, result: LatencyDispatched, handle: CpuLatencyHandle
    ) -> None:
        assert isinstance(handle, HostsLatencyHandle)
        heads = self._pending_calls.heads(pending_call)
        config, dtype = handle.cut.config, FP8 if how.use_fp8 else torch.bfloat16
        for src, head in heads.items():
            if head.num_rows > config.max_tokens_per_rank:
                raise ProtocolError(f"rank {src} sends {head.num_rows} records, which cannot be; memory is corrupt")
        laid = {
            src: RecordFields(
                head.num_rows, config.num_topk, config.hidden * dtype.itemsize, num_scales(config.hidden, how)
            )
            for src, head in heads.items()
        }

        def read(src: int, num_rows: int, scales: tuple[int, torch.dtype] | None) -> WireRows:
            """Return the rows of a message."""
            half = self.wire.half_of(src, pending_call.seq, laid[src].nbytes)
            return laid[src].rows(half, dtype, None if scales is None else scales[1])

        while True:  # repeat without those whose messages were overwritten meanwhile
            given: list[tuple[Ints, Ints, Floats] | None] = [None] * config.num_ranks
            ids: dict[int, Ints] = {}
            for src in list(heads):
                found = self._read_meta(pending_call, src, laid[src], config)
                if found is not None:
                    tokens, ids[src], weights = found
                    local = ids[src] - self.rank * config.num_local_experts
                    local[(local < 0) | (local >= config.num_local_experts)] = -1
                    given[src] = tokens, local, weights
            placed = self._place(given, result, handle, read)
            if not take_back(self.wire, pending_call, heads):
                break
        self._pending_calls.require_all(pending_call)
        handle.came = [None if src not in ids else self._came(ids[src], handle) for src in range(config.num_ranks)]
        handle.sources = [
            None if source is None or came is None else _those(source, came.mine)
            for source, came in zip(placed.sources, handle.came, strict=True)
        ]
        self._finish_dispatch(placed, heads, result, handle)

    def _read_meta(
        self, pending_call: PendingCall, src: int, records: RecordFields, config: BufferConfig
    ) -> tuple[Ints, Ints, Floats] | None:
        """Return tokens, expert ids and weights of a rank's message, copied and checked.

        Returns None if it was overwritten.
        """
        meta = records.meta(self.wire.half_of(src, pending_call.seq, records.nbytes)).astype(np.int64)
        if not self.wire.is_here(src, pending_call.seq):
            return None
        num_topk = config.num_topk
        tokens = checked_tokens(meta[:, 0], records.num_records, src, config.max_tokens_per_rank)
        return tokens, meta[:, 1 : 1 + num_topk], meta[:, 1 + num_topk :].astype(np.int32).view(np.float32)

    def _came(self, ids: Ints, handle: HostsLatencyHandle) -> ArrivedIds:
        owners = np.where(ids < 0, -1, ids // handle.cut.config.num_local_experts)
        return ArrivedIds(owners, np.flatnonzero((owners == self.rank).any(1)))

    # ---- combine

    def _send_partials(self, pending_call: PendingCall, call: LatencyCombineCall, handle: CpuLatencyHandle) -> None:
        assert isinstance(handle, HostsLatencyHandle)
        readers, seq = self._readers(pending_call), pending_call.seq
        if call.topk_weights is not None:
            weights = array_of(call.topk_weights)
            for host in readers:
                self.wire.send_weights(host, seq, weights[handle.records[host]], handle.cut)
        dtype, had = call.checked.partial_dtype, 0
        for src in (rank for ranks in readers.values() for rank in ranks):
            rows = self._partials_for(pending_call, src, call, handle)
            if rows is not None:
                part = self.wire.part_for(src, seq, len(rows), rows.shape[1] * dtype.itemsize)
                torch.from_numpy(part).view(dtype).view(rows.shape).copy_(rows)
                had |= 1 << src
        self._sums.send(pending_call, readers, pending_call.head._replace(had=had), dtype, handle)

    def _partials_for(
        self, pending_call: PendingCall, src: int, call: LatencyCombineCall, handle: HostsLatencyHandle
    ) -> torch.Tensor | None:
        """Return this rank's sums for the tokens that it has of `src`; None if it has none of its dispatch."""
        source, came = handle.sources[src], handle.came[src]
        if source is None or came is None:
            return None
        factors = source.weights
        if call.topk_weights is not None:
            if not self._pending_calls.has_come(pending_call, src, "early"):
                self._pending_calls.require_all(pending_call)
                return None
            try:
                factors = self.wire.read_weights(src, pending_call.seq, came.num_records, handle.cut)[came.mine]
            except TakenBack:
                pending_call.lost[src] = "cut"
                self._pending_calls.require_all(pending_call)
                return None
        y = call.y.view(-1, handle.cut.config.hidden)
        return partial_sums(source, factors, y).to(call.checked.partial_dtype)

    def _receive_partials(
        self, pending_call: PendingCall, partial_dtype: torch.dtype, result: LatencyCombined, handle: CpuLatencyHandle
    ) -> None:
        assert isinstance(handle, HostsLatencyHandle)
        heads = self._pending_calls.heads(pending_call)
        while True:  # repeat without those whose messages were overwritten meanwhile
            counted: list[int] = []
            parts = []
            for host in range(self._topology.num_hosts):
                found = self._sums.received(pending_call, host, heads, partial_dtype, handle)
                if found is not None:
                    ranks, rows = found
                    counted += ranks
                    goes = np.zeros(handle.num_tokens, dtype=np.bool_)
                    for rank in ranks:
                        goes[handle.sent[rank]] = True
                    tokens = np.flatnonzero(goes)
                    index = np.searchsorted(handle.records[host], tokens)
                    parts.append((tokens, rows.index_select(0, torch.from_numpy(index))))
            summed = sum_over_ranks(parts, handle.num_tokens, handle.cut.config.hidden)
            if not take_back(self.wire, pending_call, heads):
                break
        self._pending_calls.require_all(pending_call)  # an error leaves `out` as it was
        with writing(result.x):
            result.x.copy_(summed)
        result.got[counted] = True


def _those(source: Source, mine: Ints) -> Source:
    """Return some records of a source."""
    return Source(source.tokens[mine], source.local[mine], source.weights[mine], source.place[mine])
