"""Dispatch and combine of a `LatencyBuffer` on CPUs, the ranks sharing memory; the calls are those of `../cpu.py`.

Dispatch, send phase: a row goes once to each rank that has one of its experts, quantised once if FP8 is wanted, with
its expert ids and weights, into this rank's section there (`wire.py` has the memory and its order). Receive phase: the
rank waits for the sections of all ranks it counts on.

Combine, send phase: a rank pushes one row per token, the weighted sum of its experts' rows, to the token's rank;
weights given to combine are pushed to the expert ranks before, which wait for them. Receive phase: the rows of all
ranks are summed, ranks ascending.

Every step of a send phase that can fail or wait is done before its first section is posted: so if it fails, every rank
is refused, and a call without a mask fails on all. Between posting to one rank and to the next only an interrupt can
come.

The members change in `sync` alone (`membership/synced.py`); each epoch has memory of its own. The only rank of a group
has no peers, no epochs and no group membership, and moves its rows through memory of its own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from ....arrays import array_of, writing
from ....errors import InvalidState, ProtocolError
from ....memory.host import HostRegion
from ...config import BufferConfig
from ...control.words import inbox_layout
from ...membership import path_lane
from ...membership.memory import Memory
from ...paths import Making
from ...throughput.placement import Ints
from ..cpu import HostLatencyHandle, LatencyCalls
from ..flight import Flight, Flights
from ..region import RegionFields, SectionCut, checked_cut, region_layout
from ..rows import FP8, Floats, WireRows, as_sent, partial_sums, sum_over_ranks
from ..types import (
    LatencyCombineCall,
    LatencyCombined,
    LatencyDispatchCall,
    LatencyDispatched,
    LatencyOptions,
    Quantisation,
)
from .wire import PushWire


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
        config, rank, control, _, watch, closing = making
        exchange = control.exchange
        self._lane = lane = path_lane.lane_of(control)
        self._layout = region_layout(config)
        self._blank = HostRegion.create(self._layout.nbytes, f"latency-blank-{rank}-{os.getpid()}")
        blank = RegionFields(self._blank, self._layout)
        self.wire = wire = PushWire(
            config, rank, blank, lane.gone, closing.check, lane.show, lambda: exchange.epoch, poison
        )
        flights = Flights(wire, lambda: exchange.epoch, watch.dead, lane.why_gone, lane.hide)
        super().__init__(control, wire, flights, poison)
        self._lane.memory = self
        try:
            if self._lane.is_in:
                self.move(self._lane.regions)
            else:
                self._lane.join(deadline)
        except BaseException:
            self.close()
            raise

    def move(self, regions: Mapping[int, HostRegion]) -> None:
        """Let calls use the memory of another epoch."""
        base = inbox_layout(self.config).nbytes
        self.wire.begin_epoch({rank: RegionFields(region, self._layout, base) for rank, region in regions.items()})
        self._flights.restart()

    def take_sizes(self, config: BufferConfig) -> SectionCut:
        """Return how sections are cut for calls of these sizes; raises `InvalidArgument` if they do not fit."""
        return checked_cut(config, self._layout["payload"].shape[-1], self._layout.nbytes)

    def close(self) -> None:
        """Drop all views of memory; results of the user are their own. Idempotent."""
        self.wire.close()
        self._blank.close()
        self._lane.memory = Memory()  # no reference cycle keeps a closed path

    def _send_tokens(self, flight: Flight, call: LatencyDispatchCall, handle: HostLatencyHandle) -> None:
        rows, cut = as_sent(call.x, call.facts.quantisation), handle.cut
        reachable = self._flights.reachable(flight)
        for dst in reachable:
            tokens = handle.sent[dst]
            self.wire.write_meta(dst, flight.seq, tokens, handle.topk_idx[tokens], handle.topk_weights[tokens], cut)
            self.wire.write_rows(dst, flight.seq, rows, torch.from_numpy(tokens), cut)
        for dst in reachable:
            self.wire.post(dst, flight.seq, flight.head._replace(num_rows=len(handle.sent[dst])))

    def _receive_tokens(
        self, flight: Flight, how: Quantisation, result: LatencyDispatched, handle: HostLatencyHandle
    ) -> None:
        heads, cut = self._flights.heads(flight), handle.cut
        given: list[tuple[Ints, Ints, Floats] | None] = [None] * self.config.num_ranks
        for src, head in heads.items():
            given[src] = self.wire.read_meta(src, flight.seq, head.num_rows, cut)
        dtype = FP8 if how.use_fp8 else torch.bfloat16

        def read(src: int, num_rows: int, scales: tuple[int, torch.dtype] | None) -> WireRows:
            """Return the rows of a section."""
            return self.wire.read_rows(src, flight.seq, num_rows, dtype, cut, scales)

        placed = self._place(given, result, handle, read)
        self._flights.require_all(flight)
        handle.sources = placed.sources
        self._finish_dispatch(placed, heads, result, handle)

    def _send_partials(self, flight: Flight, call: LatencyCombineCall, handle: HostLatencyHandle) -> None:
        reachable, cut = self._flights.reachable(flight), handle.cut
        if call.topk_weights is not None:
            weights = array_of(call.topk_weights)
            for dst in reachable:
                self.wire.write_weights(dst, flight.seq, weights[handle.sent[dst]], cut)
                self.wire.post_early(dst, flight.seq)
        y = call.y.view(-1, cut.config.hidden)
        heads = {}
        for src in reachable:
            source = handle.sources[src]
            if source is None:  # its tokens were not here
                heads[src] = flight.head
                continue
            factors = source.weights
            if call.topk_weights is not None:
                if not self._flights.has_come(flight, src, "early"):
                    self._flights.require_all(flight)
                    continue
                factors = self.wire.read_weights(src, flight.seq, len(source.tokens), cut)
            partial = partial_sums(source, factors, y).to(call.facts.partial_dtype)
            self.wire.write_rows(src, flight.seq, WireRows(partial, None), None, cut)
            heads[src] = flight.head._replace(num_rows=len(partial), had=1)
        for src, head in heads.items():
            self.wire.post(src, flight.seq, head)

    def _receive_partials(
        self, flight: Flight, partial_dtype: torch.dtype, result: LatencyCombined, handle: HostLatencyHandle
    ) -> None:
        parts, counted, cut = [], [], handle.cut
        for src, head in self._flights.heads(flight).items():
            tokens = handle.sent[src]
            if not head.had:
                continue
            if head.num_rows != len(tokens):
                raise ProtocolError(f"combine: rank {src} sends {head.num_rows} rows for {len(tokens)} tokens")
            counted.append(src)
            parts.append((tokens, self.wire.read_rows(src, flight.seq, len(tokens), partial_dtype, cut).data))
        summed = sum_over_ranks(parts, handle.num_tokens, cut.config.hidden)
        self._flights.require_all(flight)  # an error leaves `out` as it was
        with writing(result.x):
            result.x.copy_(summed)
        result.got[counted] = True

    def _require_place(self, options: LatencyOptions) -> None:
        """Raise `EvictedError` if the job, or without a mask the buffer, has continued without this process."""
        self._lane.require_place(options.active_ranks is not None)

    def sync(self, active_ranks: torch.Tensor | None, deadline: float) -> torch.Tensor:
        """Agree on the members and begin an epoch with them; raises as `Buffer.sync`."""
        self._flights.reclaim(is_thorough=True)
        if self.wire.num_open:
            raise InvalidState(f"{self.wire.num_open} calls have been sent and not received; call their hooks first")
        marks = [1] * self.config.num_ranks if active_ranks is None else active_ranks.tolist()
        return path_lane.sync(self.control, self._lane, marks, active_ranks, 0, deadline)
