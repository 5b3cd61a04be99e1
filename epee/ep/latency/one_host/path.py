"""Dispatch and combine of a `LatencyBuffer` on CPUs, the ranks sharing memory; the calls are those of `../cpu.py`.

Dispatch, send phase: a row goes once to each rank that has one of its experts, quantised once if FP8 is wanted, with
its expert ids and weights, into this rank's section there (`PushWire`; for the order see `../wire.py`). Receive phase:
the rank waits for the sections of all ranks it counts on.

Combine, send phase: a rank pushes one row per token, the weighted sum of its experts' rows, to the token's rank;
weights given to combine are pushed to the expert ranks before, which wait for them. Receive phase: the rows of all
ranks are summed, ranks ascending.

Every step of a send phase that can fail or wait is done before its first section is posted: so if it fails, every rank
is refused, and a call without a mask fails on all. Between posting to one rank and to the next only an interrupt can
come.

The members change in `sync` alone (`members.py`); each epoch has memory of its own.

Each rank lends one region. In a slot every source has a **section** of its own that no other rank writes:

    region of a rank:  freed   [num_slots]          written by the owner: the last call whose section may be overwritten
                       cut     [num_ranks]          written by the source: up to which call it sends nothing here
                       waiting [1]                  written by the owner: its last wait: which call, until when
                       ends    [num_slots]          written by the owner: tag of the last call that it has begun; how
                                                    it ended (`latency/aborts.py`)
                       head    [num_slots][source]  word 0 = tag of the call, stored last; header and a refusal's reason
                       early   [num_slots][source]  tag of a combine whose weights have arrived
                       payload [num_slots][source]  cut by the call's sizes (`region.SectionCut`): token,
                                                    expert ids and weights of each row; weights of a combine; rows,
                                                    then scales

A source whose call was aborted may still be writing when its slot is freed: into its own section, which the owner reads
again only under a later tag, and the source stores that one after it has finished with the earlier call.

A `sync` begins an epoch in which all regions are new. So stores of a rank in an older epoch
are never visible. A rank that is not in the epoch is represented by a region of this rank's own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
import torch

from ....arrays import array_of, writing
from ....errors import InvalidState, ProtocolError
from ....memory.shared import SharedRegion
from ....memory.signals import futex_wake, tag
from ...config import BufferConfig
from ...epoch_memory import Memory
from ...members.sync import sync
from ...paths import Making
from ...throughput.placement import Ints
from ..call import PendingCall
from ..cpu import CpuLatencyHandle, LatencyCalls
from ..pending_call import PendingCalls
from ..region import HEAD_WORDS, RegionFields, RegionWords, SectionCut, checked_cut, region_layout
from ..rows import FP8, Floats, WireRows, as_sent, partial_sums, sum_over_ranks
from ..types import (
    LatencyCombineCall,
    LatencyCombined,
    LatencyDispatchCall,
    LatencyDispatched,
    LatencyOptions,
    Quantisation,
)
from ..wire import SectionHeader, Wire, checked_tokens, pack_head
from .members import EpochMembers


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
        meta = self._regions[dst].cut(cut).meta[self.slot(seq), self.rank, : len(tokens)]
        num_topk = cut.config.num_topk
        meta[:, 0] = tokens
        meta[:, 1 : 1 + num_topk] = ids
        meta[:, 1 + num_topk :] = weights.view(np.int32)

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


class LatencyCpuPath(LatencyCalls, Memory):
    """Moves the rows of one `LatencyBuffer` through the regions of its epoch.

    Args:
        making: the parts that it is made of.
        poison: fill memory with 0xFF before each use.
        deadline: `time.monotonic()` value by which a replacement must have been admitted.

    Raises:
        ResourceError: no memory or descriptors.
        CommTimeoutError: a replacement was not admitted.
    """

    nbytes = 0  # the memory of an epoch belongs to the membership, and is counted there

    def __init__(self, making: Making, poison: bool, deadline: float) -> None:
        config, rank, exchange, _, _, closing, *_ = making
        members: EpochMembers = exchange.membership
        self._members = members
        self._layout = region_layout(config)
        self._blank = SharedRegion.create(self._layout.nbytes, f"latency-blank-{rank}-{os.getpid()}")
        blank = RegionFields(self._blank, self._layout)
        self.wire = wire = PushWire(
            config, rank, blank, members.gone, closing.check, members.show, lambda: exchange.epoch, poison
        )
        pending_calls = PendingCalls(wire, lambda: exchange.epoch, members.dead, members.why_gone, members.hide)
        super().__init__(exchange, wire, pending_calls, poison)
        self._members.memory = self
        try:
            if self._members.is_in:
                self.move(self._members.regions)
            else:
                self._members.join(deadline)
        except BaseException:
            self.close()
            raise

    def move(self, regions: Mapping[int, SharedRegion]) -> None:
        """Let calls use the memory of another epoch."""
        self.wire.begin_epoch({rank: RegionFields(region, self._layout) for rank, region in regions.items()})
        self._pending_calls.restart()

    def take_sizes(self, config: BufferConfig) -> SectionCut:
        """Return how sections are cut for calls of these sizes; raises `InvalidArgument` if they do not fit."""
        return checked_cut(config, self._layout["payload"].shape[-1], self._layout.nbytes)

    def abort(self) -> None:
        """End a CPU-side call in progress in another thread; others check by themselves."""
        self.exchange.abort()

    def close(self) -> None:
        """Drop all views of memory; results of the user are their own. Idempotent."""
        self.wire.close()
        self._blank.close()
        self._members.memory = Memory()  # no reference cycle keeps a closed path

    def _send_tokens(self, pending_call: PendingCall, call: LatencyDispatchCall, handle: CpuLatencyHandle) -> None:
        rows, cut = as_sent(call.x, call.checked.quantisation), handle.cut
        reachable = self._pending_calls.reachable(pending_call)
        for dst in reachable:
            tokens = handle.sent[dst]
            self.wire.write_meta(
                dst, pending_call.seq, tokens, handle.topk_idx[tokens], handle.topk_weights[tokens], cut
            )
            self.wire.write_rows(dst, pending_call.seq, rows, torch.from_numpy(tokens), cut)
        for dst in reachable:
            self.wire.post(dst, pending_call.seq, pending_call.head._replace(num_rows=len(handle.sent[dst])))

    def _receive_tokens(
        self, pending_call: PendingCall, how: Quantisation, result: LatencyDispatched, handle: CpuLatencyHandle
    ) -> None:
        heads, cut = self._pending_calls.heads(pending_call), handle.cut
        given: list[tuple[Ints, Ints, Floats] | None] = [None] * self.config.num_ranks
        for src, head in heads.items():
            given[src] = self.wire.read_meta(src, pending_call.seq, head.num_rows, cut)
        dtype = FP8 if how.use_fp8 else torch.bfloat16

        def read(src: int, num_rows: int, scales: tuple[int, torch.dtype] | None) -> WireRows:
            """Return the rows of a section."""
            return self.wire.read_rows(src, pending_call.seq, num_rows, dtype, cut, scales)

        placed = self._place(given, result, handle, read)
        self._pending_calls.require_all(pending_call)
        handle.sources = placed.sources
        self._finish_dispatch(placed, heads, result, handle)

    def _send_partials(self, pending_call: PendingCall, call: LatencyCombineCall, handle: CpuLatencyHandle) -> None:
        reachable, cut = self._pending_calls.reachable(pending_call), handle.cut
        if call.topk_weights is not None:
            weights = array_of(call.topk_weights)
            for dst in reachable:
                self.wire.write_weights(dst, pending_call.seq, weights[handle.sent[dst]], cut)
                self.wire.post_early(dst, pending_call.seq)
        y = call.y.view(-1, cut.config.hidden)
        heads = {}
        for src in reachable:
            source = handle.sources[src]
            if source is None:  # its tokens were not here
                heads[src] = pending_call.head
                continue
            factors = source.weights
            if call.topk_weights is not None:
                if not self._pending_calls.has_come(pending_call, src, "early"):
                    self._pending_calls.require_all(pending_call)
                    continue
                factors = self.wire.read_weights(src, pending_call.seq, len(source.tokens), cut)
            partial = partial_sums(source, factors, y).to(call.checked.partial_dtype)
            self.wire.write_rows(src, pending_call.seq, WireRows(partial, None), None, cut)
            heads[src] = pending_call.head._replace(num_rows=len(partial), had=1)
        for src, head in heads.items():
            self.wire.post(src, pending_call.seq, head)

    def _receive_partials(
        self, pending_call: PendingCall, partial_dtype: torch.dtype, result: LatencyCombined, handle: CpuLatencyHandle
    ) -> None:
        parts, counted, cut = [], [], handle.cut
        for src, head in self._pending_calls.heads(pending_call).items():
            tokens = handle.sent[src]
            if not head.had:
                continue
            if head.num_rows != len(tokens):
                raise ProtocolError(f"combine: rank {src} sends {head.num_rows} rows for {len(tokens)} tokens")
            counted.append(src)
            parts.append((tokens, self.wire.read_rows(src, pending_call.seq, len(tokens), partial_dtype, cut).data))
        summed = sum_over_ranks(parts, handle.num_tokens, cut.config.hidden)
        self._pending_calls.require_all(pending_call)  # an error leaves `out` as it was
        with writing(result.x):
            result.x.copy_(summed)
        result.got[counted] = True

    def _require_place(self, options: LatencyOptions) -> None:
        """Raise `EvictedError` if the job, or without a mask the buffer, has continued without this process."""
        self._members.require_place(options.active_ranks is not None)

    def sync(self, active_ranks: torch.Tensor | None, deadline: float) -> torch.Tensor:
        """Agree on the members and begin an epoch with them; raises as `Buffer.sync`."""
        self._pending_calls.reclaim(is_thorough=True)
        if self.wire.num_open:
            raise InvalidState(f"{self.wire.num_open} calls have been sent and not received; call their hooks first")
        num_ranks, members = self.config.num_ranks, self._members
        marks = [1] * num_ranks if active_ranks is None else active_ranks.tolist()
        return sync(self.exchange, members, marks, active_ranks, 0, deadline)
