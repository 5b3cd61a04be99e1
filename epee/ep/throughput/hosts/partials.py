"""The data call of a combine: ranks lend their rows to their host, each host sums them, the sources add up the hosts.

Data path, for each round of tokens: the gateway of a source on a host (the source itself on its own) sums the rows of
its host's ranks for the source's tokens, one row per record, and lays the sums into its outbox; the engine carries them
to the source's host alone. The source adds the hosts' sums, then its biases. Rows for a source that another rank serves
are first copied into the rank's own outbox, where only its host reads them; rows for a source that it serves itself are
read in place. One row per token: in the rank layout the caller's, in the expert layout the sum of the rank's weighted
rows.

Order of additions, the same whatever the placement of other ranks (`reference/two_level.py`): expert layout: products
`weight * row` of a rank by k ascending, each rounded first; then the ranks of a host ascending; the sum is rounded to
the dtype of `y` unless `wide_partials`; then hosts ascending, biases, one rounding. All in float32 (float64 for
float64), from -0.0. A token without rows gets +0.0.

Writers, readers and order as in every two-phase call of the engine: FILLED after the rows, MERGED after the sums,
DRAINED before either is written again. A crash leaves a round that no rank counts; the call ends in the same way on
all, and the caller's `out` is written at the very end.

Only values are received, no sizes and no offsets: all of these follow from the handle, and from the members. Ranks that
were lost after the dispatch have no part: their rows are in no sum, for no token, and their own tokens are not summed;
the gateways are those of the remaining ranks (`link/topology.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ....arrays import array_of, plain_tensors, writing
from ....engine.outbox import PeerRegions
from ....engine.plan import Plan, Range
from ....engine.signature import OP_CODE
from ....engine.signature import pack as pack_signature
from ....memory.layout import align_up
from ...checks import CombineCall
from ...handle import CpuHandle
from ..reduce import accumulator_dtype, put
from .layout import Chunks, Parts, combine_length, lent_dtype

_BYTE = np.dtype(np.uint8)


class RowBlock:
    """The layout of a token's rows in a section, and of their weights after all rows.

    Args:
        length: tokens of a section.
        hidden, dtype: of a row.
        weights: `[num_topk, dtype]` of the weights that go back, None without.
    """

    def __init__(self, length: int, hidden: int, dtype: torch.dtype, weights: tuple[int, torch.dtype] | None) -> None:
        self.hidden, self.dtype, self._weights = hidden, dtype, weights
        self.row_bytes = hidden * dtype.itemsize
        self.weight_bytes = 0 if weights is None else weights[0] * weights[1].itemsize
        self._weights_at = align_up(length * self.row_bytes, 8)
        self.nbytes = align_up(self._weights_at + length * self.weight_bytes, 64)

    def rows(self, peer_regions: PeerRegions, rank: int, base: int, count: int) -> torch.Tensor:
        """Return `[count, hidden]` of the section at byte `base` of a rank's outbox."""
        return _tensor(peer_regions, rank, base, count * self.row_bytes, self.dtype).view(count, self.hidden)

    def weights(self, peer_regions: PeerRegions, rank: int, base: int, count: int) -> torch.Tensor:
        """Return `[count, num_topk]` of it."""
        assert self._weights is not None
        num_topk, dtype = self._weights
        return _tensor(peer_regions, rank, base + self._weights_at, count * self.weight_bytes, dtype).view(
            count, num_topk
        )

    def ranges(self, base: int, count: int) -> list[Range]:
        """Return the bytes that are used of the section at byte `base`."""
        used = [(base, count * self.row_bytes)]
        if self.weight_bytes:
            used.append((base + self._weights_at, count * self.weight_bytes))
        return used if count else []


def _tensor(peer_regions: PeerRegions, rank: int, first: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
    part = peer_regions.views[_BYTE][rank][first : first + nbytes]
    part.flags.writeable = True  # torch warns of read-only memory; a peer's memory is never written
    return torch.from_numpy(part).view(dtype)


class PartialsPlan(Plan):
    """Moves and sums the rows of one combine.

    Args:
        parts: the assignment of sums to ranks; of those in the dispatch, some may be lost.
        call: the combine.
        handle: its own.
        num_tokens: of each rank.
        wide: sums travel in the dtype in which they are made.
        scratch: memory for the result, if the caller has given an `out` that must not be written before the end.

    Attributes:
        out: `[num_tokens, hidden]`, the result.
        weights: `[num_tokens, num_topk]`, the weights that came back, or None.
    """

    def __init__(
        self,
        parts: Parts,
        call: CombineCall,
        handle: CpuHandle,
        num_tokens: Sequence[int],
        wide: bool,
        scratch: torch.Tensor | None = None,
    ) -> None:
        super().__init__("combine", pack_signature(OP_CODE["combine"]))
        self._parts, self._roles, self._topology, self._handle = parts, parts.roles, parts.roles.topology, handle
        self._at = {rank: place for place, rank in enumerate(parts.members)}  # among the outboxes
        self._y, self._y_weights, self._bias = call.y, call.topk_weights, call.bias
        self._target = call.out
        hidden, dtype = call.y.shape[1], call.y.dtype
        self._wide = accumulator_dtype(dtype)
        kind = None if call.topk_weights is None else (handle.num_topk, call.topk_weights.dtype)
        self._length = length = combine_length(hidden, lent_dtype(handle.layout, dtype), parts)
        self._lent = RowBlock(length, hidden, lent_dtype(handle.layout, dtype), kind)
        self._summed = RowBlock(length, hidden, self._wide if wide else dtype, kind)
        self.rounds = Chunks.of(length, num_tokens).count
        self.num_halves = min(2, self.rounds)
        self.round_bytes = self._lent.nbytes * self._parts.most_lent
        self.merge_bytes = self._summed.nbytes * self._parts.most_served
        self.put_bytes = self.read_bytes = self.num_halves * (self.round_bytes + self.merge_bytes)
        self.weights: torch.Tensor | None = None
        with plain_tensors():
            self.out = torch.empty(handle.num_tokens, hidden, dtype=dtype, device="cpu") if scratch is None else scratch
            if kind is not None:
                self.weights = torch.zeros(handle.num_tokens, kind[0], dtype=kind[1], device="cpu")

    # ---- a rank's rows

    def put(self, peer_regions: PeerRegions, k: int, offset: int) -> None:
        """Lend this rank's rows of round `k` for sources that others serve, a section for each."""
        for index, source in enumerate(self._parts.lent[self._topology.rank]):
            rows, weights = self._mine(source, k)
            if len(rows):
                base = offset + index * self._lent.nbytes
                self._lent.rows(peer_regions, peer_regions.rank, base, len(rows)).copy_(rows)
                if weights is not None:
                    self._lent.weights(peer_regions, peer_regions.rank, base, len(rows)).copy_(weights)

    def _mine(self, source: int, k: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return this rank's rows for a source's tokens of round `k`, a row for each of its records, and weights."""
        low, high = self._handle.by_host.received[source].chunk(k, self._length)
        taken = self._handle.by_host.taken[source]
        if self._handle.layout == "expert":
            return self._weighted(source, low, high)
        first, end = np.searchsorted(taken.records, (low, high)).tolist()
        if first == end:
            return self._y[:0], None
        part = slice(int(taken.rows[first]), int(taken.rows[end - 1]) + 1)  # contiguous, in their order of arrival
        return self._y[part], None if self._y_weights is None else self._y_weights[part]

    def _weighted(self, source: int, low: int, high: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the sums of the weighted rows of each record, k ascending."""
        handle = self._handle
        taken = handle.by_host.taken[source]
        which = taken.among(low, high)
        mine = handle.by_host.received[source].of(handle.by_host.position)
        mine = mine[(mine >= low) & (mine < high)]
        index = torch.from_numpy(np.searchsorted(mine, taken.records[which]))
        rows, k_of = torch.from_numpy(taken.rows[which]), torch.from_numpy(handle.by_host.slots[source][1][which])
        sums = torch.full((len(mine), self._y.shape[1]), -0.0, dtype=self._wide, device="cpu")
        for k in range(handle.num_topk):
            chosen = (k_of == k).nonzero()[:, 0]
            if len(chosen):
                values = self._y.index_select(0, rows[chosen]).to(sums.dtype)
                if handle.recv_weights is not None:
                    values.mul_(handle.recv_weights[rows[chosen]].to(sums.dtype)[:, None])
                sums.index_add_(0, index[chosen], values)
        if self._y_weights is None:
            return sums, None
        back = torch.zeros(len(mine), handle.num_topk, dtype=self._y_weights.dtype, device="cpu")
        back[index, k_of] = self._y_weights[rows]
        return sums, back

    def exports(self, peer_regions: PeerRegions, k: int, readers: Sequence[int]) -> Sequence[Range]:
        """Return nothing: rows are lent to one's own host alone."""
        return ()

    # ---- a host's sums

    def merge(self, peer_regions: PeerRegions, k: int, offsets: list[int], offset: int) -> None:
        """Sum the rows of this host for the sources that this rank serves."""
        for index, source in enumerate(self._parts.served[self._topology.rank]):
            low, high = self._handle.by_host.received[source].chunk(k, self._length)
            if low < high:
                self._sum(peer_regions, k, source, offsets, offset + index * self._summed.nbytes)

    def _sum(self, peer_regions: PeerRegions, k: int, source: int, offsets: list[int], base: int) -> None:
        records = self._handle.by_host.received[source]
        low, high = records.chunk(k, self._length)
        rows, tokens, backs = [], [], []
        for position, rank in enumerate(self._topology.here):
            if rank not in self._at:
                continue  # lost after the dispatch; its rows are in no sum
            who = np.flatnonzero(records.bits[low:high] >> position & 1)
            tokens.append(torch.from_numpy(who))
            if rank == self._topology.rank:
                mine, weights = self._mine(source, k)
                rows.append(mine)
            else:
                place = self._at[rank]
                first = offsets[place] + self._parts.lent[rank].index(source) * self._lent.nbytes
                rows.append(self._lent.rows(peer_regions, place, first, len(who)))
                weights = self._lent.weights(peer_regions, place, first, len(who)) if self._lent.weight_bytes else None
            backs.append(weights)
        add_up(rows, tokens, self._summed.rows(peer_regions, peer_regions.rank, base, high - low))
        if self._y_weights is not None:
            total = self._summed.weights(peer_regions, peer_regions.rank, base, high - low).zero_()
            for index, part in zip(tokens, backs, strict=True):
                if part is not None:
                    total.index_add_(0, index, part)

    def exports_merged(self, peer_regions: PeerRegions, k: int, readers: Sequence[int]) -> Sequence[Range]:
        """Return the sums for the readers' own tokens."""
        found: list[Range] = []
        for index, source in enumerate(self._parts.served[self._topology.rank]):
            if self._at[source] in readers:
                low, high = self._handle.by_host.received[source].chunk(k, self._length)
                found += self._summed.ranges(index * self._summed.nbytes, high - low)
        return found

    # ---- a source's tokens

    def take(self, peer_regions: PeerRegions, k: int, offsets: list[int]) -> None:
        """Add up the hosts' sums of this rank's tokens of round `k`."""
        first = k * self._length
        out = self.out[first : first + self._length]
        parts, tokens = [], []
        if self.weights is not None:
            self.weights[first : first + self._length] = 0  # run again after an interrupt
        for host in range(self._topology.num_hosts):
            rank = self._server_on(host)
            if rank is None:
                continue
            low, high, which = self._answered(host, k)
            base = offsets[self._at[rank]] + self._parts.served[rank].index(self._topology.rank) * self._summed.nbytes
            rows = self._summed.rows(peer_regions, self._at[rank], base, high - low)
            parts.append(rows if which is None else rows[which])
            mine = torch.from_numpy(self._handle.by_host.sent[host].tokens[low:high] - first)
            tokens.append(mine if which is None else mine[which])
            if self.weights is not None:
                back = self._summed.weights(peer_regions, self._at[rank], base, high - low)
                self.weights[first : first + self._length].index_add_(0, mine, back)
        add_up(parts, tokens, out, [item[first : first + len(out)] for item in self._bias])

    def _server_on(self, host: int) -> int | None:
        """Return the rank that sums for this one on a host."""
        if host == self._topology.host:
            return self._topology.rank
        return self._roles.gateway(self._topology.rank, host)

    def _answered(self, host: int, k: int) -> tuple[int, int, torch.Tensor | None]:
        """Return this rank's records of round `k` on a host: first, end, and those that have rows; None: all have.

        If all ranks that had a token were lost after the dispatch, the memory contains no sum.
        """
        sent = self._handle.by_host.sent[host]
        low, high = sent.chunk(k, self._length)
        ranks = self._topology.hosts[host]
        there = sum(1 << position for position, rank in enumerate(ranks) if rank in self._at)
        if there + 1 == 1 << len(ranks):
            return low, high, None
        return low, high, torch.from_numpy(np.flatnonzero(sent.bits[low:high] & there))

    def commit(self) -> None:
        """Write the caller's `out`."""
        if self._target is not None:
            with writing(self._target):
                self._target.copy_(self.out)

    # ---- the end

    def is_like(self, other: Plan) -> bool:
        """Return False: a combine that was broken off is not resumed, the step is made again."""
        return False

    def detach(self) -> None:
        """Read private copies, and write nothing of the caller's."""
        self._y, self._target = self._y.clone(), None
        self._y_weights = None if self._y_weights is None else self._y_weights.clone()
        self._bias = tuple(item.clone() for item in self._bias)


def add_up(
    parts: Sequence[torch.Tensor], tokens: Sequence[torch.Tensor], out: torch.Tensor, bias: Sequence[torch.Tensor] = ()
) -> None:
    """Add rows to their tokens, part after part, then biases, and round once to `out`; +0.0 where there is nothing.

    Args:
        parts: `[n, hidden]` each.
        tokens: `[n]` int64, where each row belongs; distinct within a part, ascending.
        out: `[num_tokens, hidden]`, contiguous.
        bias: `[num_tokens, hidden]` each.
    """
    wide = accumulator_dtype(out.dtype)
    is_narrow = len(parts) <= 2 and not bias and all(part.dtype == out.dtype for part in parts)
    # a sum of two is rounded once anyway, so it may be made in place
    acc = out if out.dtype == wide or is_narrow else torch.empty(out.shape, dtype=wide, device="cpu")
    is_empty = np.ones(len(out), dtype=np.bool_)
    for number, (part, mine) in enumerate(zip(parts, tokens, strict=True)):
        rows = part if part.dtype == acc.dtype else part.to(acc.dtype)
        if number == 0:
            put(acc, rows, None if len(mine) == len(acc) else mine)
        elif len(mine) == len(acc):
            acc.add_(rows)
        elif len(mine):
            acc.index_add_(0, mine, rows)
        is_empty[array_of(mine)] = False
    if is_empty.any():
        acc.index_fill_(0, torch.from_numpy(is_empty.nonzero()[0]), 0.0)
    for item in bias:
        acc.add_(item.to(acc.dtype))
    if acc is not out:
        out.copy_(acc)
