"""The data call of a dispatch: every rank lays out its records, every rank takes the rows that are its own.

Data path, for each round of tokens: a source copies its records into its own outbox, a section per host (`layout.py`);
rows that it sends to itself it copies to their offsets at once. The engine carries each section once to its host, into
the mirror of the source; the ranks of the source's own host read the outbox itself. Every rank scans the records of its
host and copies its own rows straight to their final offsets. So no rank forwards anything and none waits for a
forwarder: the gateway of a source only holds the memory that all ranks of its host read.

Writers, readers and order as in every call of the engine (`engine/operation.py`): the count of filled rounds is stored
after the records, a round's memory is written again when all have drained it. Offsets follow from the counts that all
ranks have exchanged before: rows of one source never overlap those of another.

A crash leaves a round that no rank counts. The call ends in the same way on all ranks; what was copied is dropped with
it. A rank whose part was whole before it died is in it, everywhere: so a source is in a result as a whole, or not at
all.

Everything in a section comes from a peer: bits, tokens and ids are copied out before they are checked, and no more rows
are taken of a source than the exchanged counts allow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ....arrays import array_of
from ....engine.outbox import PeerRegions
from ....engine.plan import Plan, Range
from ....engine.signature import OP_CODE
from ....engine.signature import pack as pack_signature
from ....errors import ProtocolError
from ....link.topology import Roles
from ....memory.arena import Arena
from ...checks import PayloadRows
from ...handle import CpuHandle
from ..placement import Ints
from ..rows import rows_of
from .host_records import Records, local_slots
from .layout import Chunks, SectionLayout

_WORD, _HALF = np.dtype(np.int64), np.dtype(np.int32)


class LocalTokens:
    """The tokens that one rank dispatches.

    Attributes:
        rows: `[num_tokens, row_words]` int64.
        scales: `[num_tokens, scale_words]` int32, or None.
        meta: `[num_tokens, words]` int64, what travels beside a token, or None.
    """

    def __init__(self, payload: PayloadRows, meta: Ints | None) -> None:
        self.rows = array_of(payload.rows)
        self.scales = None if payload.scales is None else array_of(payload.scales)
        self.meta = meta

    def layout(self) -> SectionLayout:
        """Return the layout of its records in a section; all ranks have agreed on what it follows from."""
        meta_words = 0 if self.meta is None else 1 + self.meta.shape[1]
        return SectionLayout(meta_words, self.rows.shape[1], 0 if self.scales is None else self.scales.shape[1])

    def copy(self) -> LocalTokens:
        """Return a copy, apart from the caller's tensors."""
        other = object.__new__(LocalTokens)
        other.rows, other.meta = self.rows.copy(), self.meta
        other.scales = None if self.scales is None else self.scales.copy()
        return other


class Destination:
    """The destination of a rank's rows: a slot of its arena.

    Attributes:
        rows: `[num_recv, row_words]` int64.
        scales: `[num_recv, scale_words]` int32, or None.
    """

    def __init__(self, payload: PayloadRows, arena: Arena, slot: int, num_recv: int) -> None:
        self.rows = rows_of(arena, slot, "payload", 0, num_recv, payload.rows.shape[1])
        self.scales = None
        if payload.scales is not None:
            self.scales = rows_of(arena, slot, "scales", 0, num_recv, payload.scales.shape[1])


class RecordsPlan(Plan):
    """Moves the rows of one dispatch.

    Args:
        roles: placement and membership of the ranks.
        handle: of the dispatch: what this rank sends, and the offsets of what it gets. In a fresh dispatch, received
            records and ids are put into it.
        is_fresh: the records to be received are not known yet.
        payload: of this rank.
        result: of this rank.
        starts: expert layout, fresh: two of `[num_ranks, num_local_experts]` int64: the first row of each (source,
            expert), and how many there are.
        rounds: how the tokens are cut.
    """

    def __init__(
        self,
        roles: Roles,
        handle: CpuHandle,
        is_fresh: bool,
        payload: LocalTokens,
        result: Destination,
        starts: tuple[Ints, Ints] | None,
        rounds: Chunks,
    ) -> None:
        super().__init__("dispatch", pack_signature(OP_CODE["dispatch"]))
        self._topology, self._handle, self._is_fresh = roles.topology, handle, is_fresh
        self._payload, self._result = payload, result
        self._starts: Ints | None = None if starts is None else starts[0]
        self._told: Ints | None = None if starts is None else starts[1]
        self._layout = payload.layout()
        self._length, self._room = rounds.length, self._layout.room(rounds.length)
        self.rounds = rounds.count
        self.num_halves = min(2, rounds.count)
        self.round_bytes = self._room * roles.topology.num_hosts
        self.put_bytes = self.read_bytes = self.num_halves * self.round_bytes
        self._members = sorted(roles.present)
        own = handle.by_host.sent[roles.topology.host]  # what only this rank itself gets is not laid out
        others = (own.bits & ~(1 << handle.by_host.position)) != 0
        self._laid = [*handle.by_host.sent]
        self._laid[roles.topology.host] = Records(own.tokens[others], own.bits[others])
        self.meta: list[list[Ints]] = [[] for _ in roles.topology.host_of]  # per source and round
        firsts = np.array(handle.num_received, dtype=np.int64)
        self._first_rows = firsts.cumsum() - firsts  # rank layout: of each source
        self._before: dict[tuple[int, int], Any] = {}  # per source and round: rows taken in earlier rounds

    # ---- send

    def put(self, peer_regions: PeerRegions, k: int, offset: int) -> None:
        """Lay out this rank's records of round `k`."""
        for host, sent in enumerate(self._laid):
            low, high = sent.chunk(k, self._length)
            self._lay(peer_regions, offset + host * self._room, sent, low, high)

    def _lay(self, peer_regions: PeerRegions, base: int, sent: Records, low: int, high: int) -> None:
        layout, payload, count = self._layout, self._payload, high - low
        words = peer_regions.views[_WORD][peer_regions.rank]
        tokens = sent.tokens[low:high]
        if payload.meta is not None:
            at, width = layout.meta_at(base), layout.meta_words
            meta = words[at : at + count * width].reshape(count, width)
            meta[:, 0] = sent.bits[low:high]
            meta[:, 1:] = payload.meta[tokens]
        at, width = layout.rows_at(base, count), layout.row_words
        # "clip" cannot clip here, tokens are in range; the default mode would go through a temporary copy
        np.take(payload.rows, tokens, axis=0, out=words[at : at + count * width].reshape(count, width), mode="clip")
        if payload.scales is not None:
            at, width = layout.scales_at(base, count), layout.scale_words
            place = peer_regions.views[_HALF][peer_regions.rank][at : at + count * width].reshape(count, width)
            np.take(payload.scales, tokens, axis=0, out=place, mode="clip")
        words[base // 8] = count

    def exports(self, peer_regions: PeerRegions, k: int, readers: Sequence[int]) -> Sequence[Range]:
        """Return the section of the readers' host, as far as it is filled."""
        host = self._topology.host_of[peer_regions.members[readers[0]]]
        low, high = self._laid[host].chunk(k, self._length)
        return ((host * self._room, self._layout.nbytes(high - low)),)

    # ---- receive

    def take(self, peer_regions: PeerRegions, k: int, offsets: list[int]) -> None:
        """Copy this rank's rows of round `k` out of the records of all ranks, and its own out of the payload."""
        for place, source in enumerate(self._members):
            if source == self._topology.rank:
                self._take_own(k, source)
                continue
            base = offsets[place] + self._topology.host * self._room
            count = int(peer_regions.views[_WORD][place][base // 8])
            if not 0 <= count <= self._length:
                raise self._damaged(source, k, f"{count} records, at most {self._length} can be")
            if self._layout.meta_words:
                at, width = self._layout.meta_at(base), self._layout.meta_words
                meta = peer_regions.views[_WORD][place][at : at + count * width].reshape(count, width).copy()
                self.meta[source][k:] = [meta]  # repeated after an interrupt: the same
            if self._is_fresh:
                self._check_tokens(source, k, meta[:, 1])
                records, rows = self._places(source, k, meta)
            else:
                records, rows = self._known_places(source, k, count)
            self._copy(peer_regions, place, base, count, records, rows)

    def _take_own(self, k: int, source: int) -> None:
        sent, payload = self._handle.by_host.sent[self._topology.host], self._payload
        low, high = sent.chunk(k, self._length)
        tokens = sent.tokens[low:high]
        if payload.meta is not None:
            meta = np.concatenate([sent.bits[low:high, None], payload.meta[tokens]], axis=1)
            self.meta[source][k:] = [meta]
        records, rows = self._places(source, k, meta) if self._is_fresh else self._known_places(source, k, high - low)
        _place(payload.rows, tokens[records], self._result.rows, rows)
        if payload.scales is not None:
            assert self._result.scales is not None
            _place(payload.scales, tokens[records], self._result.scales, rows)

    def _places(self, source: int, k: int, meta: Ints) -> tuple[Ints, slice | Ints]:
        """Return which records of a round have rows for this rank, and their offsets; for a fresh dispatch."""
        handle, told = self._handle, self._handle.num_received[source]
        if handle.layout == "rank":
            records = np.flatnonzero(meta[:, 0] >> handle.by_host.position & 1)
            before = self._before.get((source, k), 0)
            first = int(self._first_rows[source]) + before
            self._before[source, k + 1] = before + len(records)
            self._check_taken(source, k, before + len(records), told)
            return records, slice(first, first + len(records))
        assert self._starts is not None
        num_local = self._starts.shape[1]
        records, _, experts = local_slots(meta[:, 2 : 2 + handle.num_topk], handle.by_host.first_expert, num_local)
        before = self._before.get((source, k), np.zeros(num_local, dtype=np.int64))
        counts = np.bincount(experts, minlength=num_local)
        self._before[source, k + 1] = before + counts
        self._check_taken(source, k, int((before + counts).sum()), told)
        if self._told is not None and bool((before + counts > self._told[source]).any()):
            raise self._damaged(source, k, "more rows for an expert than it has told")
        within = np.arange(len(experts)) - (counts.cumsum() - counts)[experts]
        rows = (self._starts[source] + before)[experts] + within
        return records, rows

    def _known_places(self, source: int, k: int, count: int) -> tuple[Ints, slice | Ints]:
        """Return the same by the handle."""
        low, high = self._handle.by_host.received[source].chunk(k, self._length)
        if count != high - low:
            raise self._damaged(source, k, f"{count} records, {high - low} by the handle")
        taken = self._handle.by_host.taken[source]
        which = taken.among(low, high)
        return taken.records[which] - low, taken.rows[which]

    def _copy(
        self, peer_regions: PeerRegions, place: int, base: int, count: int, records: Ints, rows: slice | Ints
    ) -> None:
        """Copy the rows of some records of a section, in the outbox with index `place`, to their final offsets."""
        layout = self._layout
        at, width = layout.rows_at(base, count), layout.row_words
        found = peer_regions.views[_WORD][place][at : at + count * width].reshape(count, width)
        _place(found, records, self._result.rows, rows)
        if self._result.scales is not None:
            at, width = layout.scales_at(base, count), layout.scale_words
            found = peer_regions.views[_HALF][place][at : at + count * width].reshape(count, width)
            _place(found, records, self._result.scales, rows)

    # ---- checks

    def _check_tokens(self, source: int, k: int, tokens: Ints) -> None:
        first, end = k * self._length, (k + 1) * self._length
        if len(tokens) and not (first <= tokens[0] and tokens[-1] < end and bool((np.diff(tokens) > 0).all())):
            raise self._damaged(source, k, "tokens that do not ascend in their chunk")

    def _check_taken(self, source: int, k: int, count: int, told: int) -> None:
        if count > told or (k == self.rounds - 1 and count != told):
            raise self._damaged(source, k, f"{count} rows for this rank, it has told {told}")

    def _damaged(self, source: int, k: int, what: str) -> ProtocolError:
        return ProtocolError(f"dispatch: rank {source} sends in round {k} {what}; its memory is damaged")

    # ---- the end

    def is_like(self, other: Plan) -> bool:
        """Return False: a dispatch that was broken off is not resumed, the step is made again."""
        return False

    def detach(self) -> None:
        """Read a private copy of the payload; the slot is written to until the call retires (`HostsPath._begin`)."""
        self._payload = self._payload.copy()


def _place(found: np.ndarray, records: Ints, out: np.ndarray, rows: slice | Ints) -> None:
    """Copy rows `records` of `found` to `rows` of `out`."""
    if isinstance(rows, slice):
        np.take(found, records, axis=0, out=out[rows], mode="clip")
    else:
        out[rows] = found[records]
