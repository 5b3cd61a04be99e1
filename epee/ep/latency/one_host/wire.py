"""The shared memory of `LatencyBuffer` on one host: its words and their writers. For their order see `../wire.py`.

Each rank lends one region. In a slot every source has a **section** of its own that no other rank writes:

    region of a rank:  freed   [num_slots]          written by the owner: the last call whose section may be overwritten
                       cut     [num_ranks]          written by the source: up to which call it sends nothing here
                       waiting [1]                  written by the owner: its last wait: which call, until when
                       ends    [num_slots]          written by the owner: tag of the last call that it has begun; how
                                                    it ended (`control/withdrawal.py`)
                       head    [num_slots][source]  word 0 = tag of the call, stored last; header and a refusal's reason
                       early   [num_slots][source]  tag of a combine whose weights have arrived
                       payload [num_slots][source]  cut by the call's sizes (`region.SectionCut`): token,
                                                    expert ids and weights of each row; weights of a combine; rows,
                                                    then scales

A source whose call was aborted may still be writing when its slot is freed: into its own section, which the owner reads
again only under a later tag, and the source stores that one after it has finished with the earlier call.

A `sync` begins an epoch (`membership/synced.py`) in which all regions are new. So stores of a rank in an older epoch
are never visible. A rank that is not in the epoch is represented by a region of this rank's own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
import torch

from ....memory.signals import futex_wake, tag
from ...config import BufferConfig
from ...throughput.placement import Ints
from ..region import HEAD_WORDS, RegionFields, RegionWords, SectionCut
from ..rows import Floats, WireRows
from ..wire import SectionHeader, Wire, checked_tokens, pack_head


class PushWire(Wire):
    """Writes messages into the memory of their readers.

    Args:
        blank: stands for the ranks that are not in the epoch; memory that no other rank has.
        poison: fill slots with 0xFF when they are freed.
        Others as `Wire`.
    """

    def __init__(
        self,
        config: BufferConfig,
        rank: int,
        blank: RegionFields,
        ended: Callable[[], Collection[int]],
        interrupt: Callable[[], None],
        show: Callable[[str, int, list[int]], None],
        epoch: Callable[[], int],
        poison: bool,
    ) -> None:
        super().__init__(config, rank, ended, interrupt, show, epoch)
        self._regions = [blank] * config.num_ranks
        self._blank = blank
        self._poison = poison
        self._cut: set[int] = set()  # peers that were notified of their exclusion

    @property
    def regions(self) -> Sequence[RegionFields]:
        """One region per rank, the own one included."""
        return self._regions

    def begin_epoch(self, regions: Mapping[int, RegionFields]) -> None:
        """Continue in other memory, from call 1; ranks without an entry in `regions` are lost. No call is under way."""
        old = self._regions
        self._regions = [regions.get(rank, self._blank) for rank in range(self.config.num_ranks)]
        self.restart()
        self._cut.clear()
        for region in old:
            if region is not self._blank:
                region.close()

    def free(self, seq: int) -> None:
        """As `Wire.free`."""
        if self._poison:
            self._regions[self.rank].poison(self.slot(seq))
        super().free(seq)

    # -- exclusion of ranks

    def set_cut(self, active: Sequence[bool], seq: int) -> None:
        """As `Wire.set_cut`."""
        for peer, is_active in enumerate(active):
            if peer == self.rank or (is_active and peer not in self._cut):
                continue
            region = self._regions[peer]
            region.words[region.at("cut", self.rank)] = 0 if is_active else seq
            (self._cut.discard if is_active else self._cut.add)(peer)
            for slot in range(self.config.num_slots):  # the peer sleeps on the word it waits for
                futex_wake(region.address + 8 * region.at("head", slot, self.rank))
                futex_wake(region.address + 8 * region.at("early", slot, self.rank))

    def is_cut_by(self, peer: int, seq: int) -> bool:
        """As `Wire.is_cut_by`."""
        own = self._regions[self.rank]
        return own.words[own.at("cut", peer)] >= seq

    def _at(self, field: str, src: int, seq: int) -> tuple[RegionWords, int]:
        own = self._regions[self.rank]
        return own, own.at(field, self.slot(seq), src)

    # -- what is written and read

    def post(self, dst: int, seq: int, head: SectionHeader, reason: bytes = b"") -> None:
        """Store a header and, last, the tag: the rest of the section has been written."""
        region = self._regions[dst]
        index = region.at("head", self.slot(seq), self.rank)
        region.words[index + 1 : index + HEAD_WORDS] = pack_head(head, reason)
        region.words[index] = tag(self._epoch(), seq)
        futex_wake(region.address + 8 * index)
        futex_wake(region.address + 8 * region.at("early", self.slot(seq), self.rank))

    def post_early(self, dst: int, seq: int) -> None:
        """Publish that the weights of a combine have been written."""
        region = self._regions[dst]
        index = region.at("early", self.slot(seq), self.rank)
        region.words[index] = tag(self._epoch(), seq)
        futex_wake(region.address + 8 * index)

    def is_posted(self, dst: int, seq: int) -> bool:
        """Whether this rank's message of call `seq` has been posted at `dst`."""
        region = self._regions[dst]
        return region.words[region.at("head", self.slot(seq), self.rank)] == tag(self._epoch(), seq)

    def write_rows(self, dst: int, seq: int, rows: WireRows, index: torch.Tensor | None, cut: SectionCut) -> None:
        """Write rows (those of `index`, or all) into the section at `dst`."""
        region, slot = self._regions[dst], self.slot(seq)
        count = len(rows.data) if index is None else len(index)
        first = cut.rows_at
        for part in rows:
            if part is not None:
                target = region.rows(slot, self.rank, count, part.shape[1], part.dtype, first)
                if index is None:
                    target.copy_(part)
                else:
                    torch.index_select(part, 0, index, out=target)
                first = cut.scales_at

    def read_rows(
        self,
        src: int,
        seq: int,
        num_rows: int,
        dtype: torch.dtype,
        cut: SectionCut,
        scales: tuple[int, torch.dtype] | None = None,
    ) -> WireRows:
        """Return views of the rows (and scales: their number and dtype) that `src` wrote here."""
        region, slot = self._regions[self.rank], self.slot(seq)
        data = region.rows(slot, src, num_rows, cut.config.hidden, dtype, cut.rows_at)
        if scales is None:
            return WireRows(data, None)
        return WireRows(data, region.rows(slot, src, num_rows, *scales, first=cut.scales_at))

    def write_meta(self, dst: int, seq: int, tokens: Ints, ids: Ints, weights: Floats, cut: SectionCut) -> None:
        """Write tokens, their expert ids and weights beside the rows."""
        place = self._regions[dst].cut(cut).meta[self.slot(seq), self.rank, : len(tokens)]
        num_topk = cut.config.num_topk
        place[:, 0] = tokens
        place[:, 1 : 1 + num_topk] = ids
        place[:, 1 + num_topk :] = weights.view(np.int32)

    def read_meta(self, src: int, seq: int, num_rows: int, cut: SectionCut) -> tuple[Ints, Ints, Floats]:
        """Return tokens, ids among this rank's experts (-1 elsewhere) and weights that `src` wrote, copied and checked.

        Raises:
            ProtocolError: the tokens are not ascending, or too many, or out of range.
        """
        meta = self._regions[self.rank].cut(cut).meta[self.slot(seq), src, :num_rows].astype(np.int64)
        num_topk, num_local = cut.config.num_topk, cut.config.num_local_experts
        tokens = checked_tokens(meta[:, 0], num_rows, src, cut.config.max_tokens_per_rank)
        local = meta[:, 1 : 1 + num_topk] - self.rank * num_local
        local[(local < 0) | (local >= num_local)] = -1
        weights = meta[:, 1 + num_topk :].astype(np.int32).view(np.float32)
        return tokens, local, weights

    def write_weights(self, dst: int, seq: int, weights: Floats, cut: SectionCut) -> None:
        """Write the weights of a combine, a row for each token that was sent to `dst`."""
        self._regions[dst].cut(cut).weights[self.slot(seq), self.rank, : len(weights)] = weights

    def read_weights(self, src: int, seq: int, num_rows: int, cut: SectionCut) -> Floats:
        """Return a copy of the weights that `src` pushed."""
        return self._regions[self.rank].cut(cut).weights[self.slot(seq), src, :num_rows].copy()

    def close(self) -> None:
        """Drop all views."""
        for region in {id(region): region for region in (*self._regions, self._blank)}.values():
            region.close()
        self._regions.clear()
