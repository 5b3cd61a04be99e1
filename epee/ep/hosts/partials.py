"""The data call of a combine: ranks lend their rows to their host, each host sums them, the sources add up the hosts.

Data path, for each round of tokens: a rank copies what it has for the tokens of every source into its outbox, one row
per token and source: in the rank layout the caller's row, in the expert layout the sum of its weighted rows. Only its
host reads them. The gateway of a source on a host (the source itself on its own) sums the rows of its host's ranks, one
row per record of the source, and lays the sums into its outbox; the engine carries them to the source's host alone. The
source adds the hosts' sums, then its biases.

Order of additions, the same whatever the placement of other ranks (`reference/two_level.py`): expert layout: products
`weight * row` of a rank by k ascending, each rounded first; then the ranks of a host ascending; the sum is rounded to
the dtype of `y` unless `wide_partials`; then hosts ascending, biases, one rounding. All in float32 (float64 for
float64), from -0.0. A token without rows gets +0.0.

Who writes, who reads, what orders them: as in every two-phase call of the engine: FILLED behind the rows, MERGED behind
the sums, DRAINED before either is written again. A crash leaves a round that nobody counts; the call ends alike on all,
and the caller's `out` is written at the very end.

What comes are values, no sizes and no places: all of these follow from the handle.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ...backend.collectives.plan import Plan, Range
from ...backend.collectives.signature import OP_CODE
from ...backend.collectives.signature import pack as pack_signature
from ...backend.outbox import Outboxes
from ...link.topology import Topology
from ...memory.layout import align_up
from ..checks import CombineCall
from ..throughput.reduce import accumulator_dtype
from .handle import TwoLevelHandle
from .layout import Rounds

_BYTE = np.dtype(np.uint8)


class Block:
    """How the rows of a token lie in a section, and their weights behind all rows.

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

    def rows(self, box: Outboxes, rank: int, base: int, count: int) -> torch.Tensor:
        """Return `[count, hidden]` of the section at byte `base` of a rank's outbox."""
        return _tensor(box, rank, base, count * self.row_bytes, self.dtype).view(count, self.hidden)

    def weights(self, box: Outboxes, rank: int, base: int, count: int) -> torch.Tensor:
        """Return `[count, num_topk]` of it."""
        assert self._weights is not None
        num_topk, dtype = self._weights
        return _tensor(box, rank, base + self._weights_at, count * self.weight_bytes, dtype).view(count, num_topk)

    def ranges(self, base: int, count: int) -> list[Range]:
        """Return the bytes that are used of the section at byte `base`."""
        used = [(base, count * self.row_bytes)]
        if self.weight_bytes:
            used.append((base + self._weights_at, count * self.weight_bytes))
        return used if count else []


def _tensor(box: Outboxes, rank: int, first: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
    part = box.views[_BYTE][rank][first : first + nbytes]
    part.flags.writeable = True  # torch warns of memory that it must not write; nobody writes a peer's
    return torch.from_numpy(part).view(dtype)


class PartialsPlan(Plan):
    """Moves and sums the rows of one combine.

    Args:
        topology: who is where.
        call: the combine.
        rounds: how the tokens are cut.
        wide: sums travel in the dtype in which they are made.

    Attributes:
        out: `[num_tokens, hidden]`, the result.
        weights: `[num_tokens, num_topk]`, the weights that came back, or None.
    """

    def __init__(self, topology: Topology, call: CombineCall, handle: TwoLevelHandle, rounds: Rounds, wide: bool):
        super().__init__("combine", pack_signature(OP_CODE["combine"]))
        self._topology, self._call, self._handle = topology, call, handle
        self._y, self._y_weights, self._bias = call.y, call.topk_weights, call.bias
        self._target = call.out
        hidden, dtype = call.y.shape[1], call.y.dtype
        self._wide = accumulator_dtype(dtype)
        kind = None if call.topk_weights is None else (handle.num_topk, call.topk_weights.dtype)
        self._length = rounds.length
        self._lent = Block(rounds.length, hidden, dtype if handle.layout == "rank" else self._wide, kind)
        self._summed = Block(rounds.length, hidden, self._wide if wide else dtype, kind)
        self._served = {host: self._sources_of(host) for host in range(topology.num_hosts)}
        self.rounds, self.num_halves = rounds.count, min(2, rounds.count)
        self.round_bytes = self._lent.nbytes * len(topology.host_of)
        most = max(len(sources) for served in self._served.values() for sources in served.values())
        self.merge_bytes = self._summed.nbytes * most
        self.put_bytes = self.read_bytes = self.num_halves * (self.round_bytes + self.merge_bytes)
        self.out = torch.empty(handle.num_tokens, hidden, dtype=dtype, device="cpu")
        self.weights: torch.Tensor | None = None
        if kind is not None:
            self.weights = torch.zeros(handle.num_tokens, kind[0], dtype=kind[1], device="cpu")

    def _sources_of(self, host: int) -> dict[int, list[int]]:
        """Return for each rank of a host the sources whose sums it makes, ascending."""
        topology = self._topology
        served: dict[int, list[int]] = {rank: [] for rank in topology.hosts[host]}
        for source, home in enumerate(topology.host_of):
            served[source if home == host else topology.gateway(source, host)].append(source)
        return served

    # ---- a rank's rows

    def put(self, box: Outboxes, k: int, offset: int) -> None:
        """Lend this rank's rows of round `k`, a section per source."""
        for source in range(len(self._topology.host_of)):
            base = offset + source * self._lent.nbytes
            low, high = self._handle.received[source].chunk(k, self._length)
            if low < high:
                if self._handle.layout == "rank":
                    self._lend_rows(box, base, source, low, high)
                else:
                    self._lend_sums(box, base, source, low, high)

    def _lend_rows(self, box: Outboxes, base: int, source: int, low: int, high: int) -> None:
        taken = self._handle.taken[source]
        first, end = np.searchsorted(taken.records, (low, high)).tolist()
        if first < end:
            part = slice(int(taken.rows[first]), int(taken.rows[end - 1]) + 1)  # in one piece, as they came
            self._lent.rows(box, box.rank, base, end - first).copy_(self._y[part])
            if self._y_weights is not None:
                self._lent.weights(box, box.rank, base, end - first).copy_(self._y_weights[part])

    def _lend_sums(self, box: Outboxes, base: int, source: int, low: int, high: int) -> None:
        handle = self._handle
        taken, slots_k = handle.taken[source], handle.slots[source][1]
        which = taken.among(low, high)
        mine = handle.received[source].of(handle.position)
        mine = mine[(mine >= low) & (mine < high)]
        index = torch.from_numpy(np.searchsorted(mine, taken.records[which]))
        rows, k_of = torch.from_numpy(taken.rows[which]), torch.from_numpy(slots_k[which])
        sums = self._lent.rows(box, box.rank, base, len(mine)).fill_(-0.0)
        for k in range(handle.num_topk):
            chosen = (k_of == k).nonzero()[:, 0]
            if len(chosen):
                values = self._y.index_select(0, rows[chosen]).to(sums.dtype)
                if handle.recv_weights is not None:
                    values.mul_(handle.recv_weights[rows[chosen]].to(sums.dtype)[:, None])
                sums.index_add_(0, index[chosen], values)
        if self._y_weights is not None:
            back = self._lent.weights(box, box.rank, base, len(mine)).zero_()
            back[index, k_of] = self._y_weights[rows]

    def exports(self, box: Outboxes, k: int, readers: Sequence[int]) -> Sequence[Range]:
        """Return nothing: rows are lent to one's own host alone."""
        return ()

    # ---- a host's sums

    def merge(self, box: Outboxes, k: int, offsets: list[int], offset: int) -> None:
        """Sum the rows of this host for the sources that this rank serves."""
        for index, source in enumerate(self._served[self._topology.host][box.rank]):
            records = self._handle.received[source]
            low, high = records.chunk(k, self._length)
            if low < high:
                base = offset + index * self._summed.nbytes
                self._sum(box, [each + source * self._lent.nbytes for each in offsets], base, records.bits[low:high])

    def _sum(self, box: Outboxes, places: list[int], base: int, bits: np.ndarray) -> None:
        ranks, count = self._topology.here, len(bits)
        members = [np.flatnonzero(bits >> position & 1) for position in range(len(ranks))]
        lent = [self._lent.rows(box, rank, places[rank], len(who)) for rank, who in zip(ranks, members, strict=True)]
        add_up(lent, [torch.from_numpy(who) for who in members], self._summed.rows(box, box.rank, base, count))
        if self._y_weights is not None:
            total = self._summed.weights(box, box.rank, base, count).zero_()
            for rank, who in zip(ranks, members, strict=True):
                part = self._lent.weights(box, rank, places[rank], len(who))
                total.index_add_(0, torch.from_numpy(who), part)

    def exports_merged(self, box: Outboxes, k: int, readers: Sequence[int]) -> Sequence[Range]:
        """Return the sums for the readers' own tokens."""
        found: list[Range] = []
        for index, source in enumerate(self._served[self._topology.host][box.rank]):
            if source in readers:
                low, high = self._handle.received[source].chunk(k, self._length)
                found += self._summed.ranges(index * self._summed.nbytes, high - low)
        return found

    # ---- a source's tokens

    def take(self, box: Outboxes, k: int, offsets: list[int]) -> None:
        """Add up the hosts' sums of this rank's tokens of round `k`."""
        first = k * self._length
        out = self.out[first : first + self._length]
        parts, tokens = [], []
        for host, sent in enumerate(self._handle.sent):
            rank = box.rank if host == self._topology.host else self._topology.gateway(box.rank, host)
            low, high = sent.chunk(k, self._length)
            base = offsets[rank] + self._served[host][rank].index(box.rank) * self._summed.nbytes
            parts.append(self._summed.rows(box, rank, base, high - low))
            tokens.append(torch.from_numpy(sent.tokens[low:high] - first))
            if self.weights is not None:
                back = self._summed.weights(box, rank, base, high - low)
                if host == 0:
                    self.weights[first : first + self._length] = 0  # run again after an interrupt
                self.weights[first : first + self._length].index_add_(0, tokens[-1], back)
        add_up(parts, tokens, out, [item[first : first + len(out)] for item in self._bias])

    def commit(self) -> None:
        """Write the caller's `out`."""
        if self._target is not None:
            self._target.copy_(self.out)

    # ---- the end

    def is_like(self, other: Plan) -> bool:
        """Return False: a combine that was broken off is not gone on with, the step is made again."""
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
        tokens: `[n]` int64, where each row belongs; distinct within a part.
        out: `[num_tokens, hidden]`.
        bias: `[num_tokens, hidden]` each.
    """
    wide = accumulator_dtype(out.dtype)
    is_narrow = len(parts) <= 2 and not bias and all(part.dtype == out.dtype for part in parts)
    # a sum of two is rounded once anyway, so it may be made in place
    acc = out if out.dtype == wide or is_narrow else torch.empty(out.shape, dtype=wide, device="cpu")
    is_empty = torch.ones(len(out), dtype=torch.bool, device="cpu")
    acc.fill_(-0.0)
    for part, mine in zip(parts, tokens, strict=True):
        if len(mine) == len(acc):
            acc.add_(part)
        else:
            acc.index_add_(0, mine, part.to(acc.dtype))
        is_empty[mine] = False
    acc.masked_fill_(is_empty[:, None], 0.0)
    for item in bias:
        acc.add_(item.to(acc.dtype))
    if acc is not out:
        out.copy_(acc)
