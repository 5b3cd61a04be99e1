"""`LatencyBuffer` for CPU tensors: padded output per expert, a send and a receive half, lost ranks left out.

Dispatch, send half: a row goes once to each rank that has one of its experts, quantised once if FP8 is wanted, with its
expert ids and weights, into this rank's section there (`wire.py` has the memory and its order). Receive half:
the rank waits for the sections of all ranks it counts on, copies each row to its experts' blocks and keeps the places.

Combine, send half: a rank weighs and sums its experts' rows of each token it got, and pushes one row per token to the
token's rank; weights given to combine are pushed to the expert ranks before, which wait for them. Receive half: the
rows of all ranks are summed, ranks ascending.

A rank that does not come (dead, silent until the time-out, or itself counting this one out) is left out as a whole.
With `active_ranks` it is marked there and cut off until it is marked active again; without, the call raises, after the
slot has been freed: the buffer works on. The results are ordinary memory of this rank, so nothing of an earlier call
can show in them and no slot outlives its call.

Who takes part changes in `sync` alone (`membership/synced.py`); each epoch has memory of its own. The only rank of a
group has no peers, no epochs and no lane, and moves its rows through memory of its own.

What a crash leaves: see `wire.py`. Everything that goes wrong between two steps of the send half is told to the
peers as a refusal, so that they raise instead of waiting.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from ...errors import (
    AbortedError,
    CommTimeoutError,
    InvalidState,
    PeerError,
    ProtocolError,
)
from ...memory.host import HostRegion
from ..config import BufferConfig, DoesNotFit
from ..control.inbox import OP_GATHER
from ..control.words import inbox_layout
from ..event import DONE
from ..membership import path_lane
from ..membership.memory import Memory
from ..paths import Making
from ..streams import Lane
from ..throughput.placement import Ints
from .flight import Flight, Flights, NoFreeSlot
from .region import RegionFields, SectionCut, region_layout, room_bytes
from .rows import (
    FP8,
    Floats,
    Source,
    WireRows,
    as_sent,
    expand,
    lost_weight,
    num_scales,
    partial_sums,
    place_rows,
    sum_over_ranks,
)
from .types import (
    LatencyCombineCall,
    LatencyCombined,
    LatencyDispatchCall,
    LatencyDispatched,
    LatencyHandle,
    LatencyOptions,
    Quantisation,
)
from .wire import LATENCY_COMBINE, LATENCY_DISPATCH, SectionHeader, Wire

_KIND_OF_PARTIAL = {torch.bfloat16: 4, torch.float32: 5}


def _capacity(config: BufferConfig) -> int:
    """Return the rows of an expert's block."""
    return config.num_ranks * config.max_tokens_per_rank


@dataclass(eq=False)
class HostLatencyHandle(LatencyHandle):
    """The handle of CPU tensors.

    Attributes:
        topk_idx: `[num_tokens, num_topk]` of this rank, a copy.
        topk_weights: of this rank, a copy.
        sent: for each rank the tokens that went there, ascending.
        sources: what came from each rank; None where nothing did.
        cut: how sections are cut for calls of its sizes.
    """

    topk_idx: Ints = field(default_factory=lambda: np.empty((0, 0), dtype=np.int64))
    topk_weights: Floats = field(default_factory=lambda: np.empty((0, 0), dtype=np.float32))
    sent: list[Ints] = field(default_factory=list)
    sources: list[Source | None] = field(default_factory=list)
    cut: SectionCut = field(kw_only=True)


class LatencyCpuPath(Memory):
    """Moves the rows of one `LatencyBuffer` through the regions of its epoch.

    Args:
        making: what it is made of.
        poison: fill memory with 0xFF before each use.
        deadline: `time.monotonic()` value by which a replacement must have been taken in.

    Raises:
        ResourceError: no memory or descriptors.
        CommTimeoutError: a replacement was not taken in.
    """

    barrier_op = OP_GATHER
    is_recorded = False
    max_num_sms = 0
    num_copied = 0
    nbytes = 0  # the memory of an epoch is the lane's, and counted there

    def __init__(self, making: Making, poison: bool, deadline: float) -> None:
        self.config, self.rank, self._control, _, watch, closing = making
        config, rank, control = self.config, self.rank, self._control
        self._poison = poison
        exchange = control.exchange
        self._lane = path_lane.lane_of(control)
        self._layout = region_layout(config)
        self._blank = HostRegion.create(self._layout.nbytes, f"latency-blank-{rank}-{os.getpid()}")
        blank = RegionFields(self._blank, self._layout)
        lane = self._lane
        self.wire = Wire(config, rank, blank, lane.gone, closing.check, lane.show, lambda: exchange.epoch, poison)
        self._flights = Flights(self.wire, lambda: exchange.epoch, watch.dead, lane.why_gone, lane.hide)
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

    # -- what every path has

    @property
    def takes_replacements(self) -> bool:
        """Whether `sync` takes in processes that took the places of lost ranks."""
        return self._lane.takes_replacements

    def num_announced(self, op: int) -> int:
        """Return how many calls have been begun, or made through the control plane."""
        return self.wire.seq + self._control.exchange.seq

    def is_told(self, error: Exception) -> bool:
        """Tell whether the peers know about `error`, or cannot be told."""
        return isinstance(error, (CommTimeoutError, PeerError, AbortedError, NoFreeSlot))

    def refuse(self, op: int, error: Exception, deadline: float) -> None:
        """Take part in the peers' call as the rank that cannot make it."""
        if op == OP_GATHER:
            self._control.refuse(op, error, deadline)
            return
        self._flights.require_slot()
        options = LatencyOptions(None, max(0.0, deadline - time.monotonic()), False)
        self._flights.give_up(self._flights.begin(SectionHeader(op, 0, 0, 0), options), error)

    def take_sizes(self, config: BufferConfig) -> SectionCut:
        """Return how sections are cut for calls of these sizes; raises `InvalidArgument` where they do not fit."""
        cut = SectionCut(config)
        length = self._layout["payload"].shape[-1]
        if cut.layout.nbytes > length:
            raise DoesNotFit(
                f"calls of {config.max_tokens_per_rank} tokens of hidden {config.hidden} with top-{config.num_topk} "
                f"need {room_bytes(config)} bytes of memory, the buffer has {self._layout.nbytes}; make it with more"
            )
        return cut

    def check(self) -> None:
        """Nothing fails behind the host's back here."""

    def join(self) -> None:
        """There are no streams here."""

    def abort(self) -> None:
        """Calls look by themselves whether the buffer is to be closed."""

    def close(self) -> None:
        """Drop all views of memory; results of the user are their own. Idempotent."""
        self.wire.close()
        self._blank.close()
        self._lane.memory = Memory()  # no circle keeps a closed path

    # -- dispatch

    def dispatch(self, call: LatencyDispatchCall, lane: Lane) -> LatencyDispatched:
        """Run one dispatch, or its send half; raises as `Buffer.dispatch`."""
        options = LatencyOptions(call.active_ranks, call.timeout_s, call.facts.return_hook)
        self._require_place(options)
        self._flights.check()
        self._flights.require_slot()
        handle = self._new_handle(call)
        got = self._empty_result(call.facts.quantisation, handle)
        how = call.facts.quantisation
        kind = 3 if how.use_ue8m0 else how.use_fp8 + (how.use_fp8 and how.round_scale)
        flight = self._flights.begin(SectionHeader(LATENCY_DISPATCH, int(kind), 0, 0, handle.cut.code), options)
        handle.seq = flight.seq
        with self._flights.sending(flight):
            self._send_tokens(flight, call, handle)
        return self._flights.finish(
            flight, got, lambda: self._receive_tokens(flight, call.facts.quantisation, got, handle)
        )

    def _new_handle(self, call: LatencyDispatchCall) -> HostLatencyHandle:
        buffer_id, config, cut = call.facts.sizes
        num_local = config.num_local_experts
        idx = call.topk_idx.numpy().copy()
        weights = np.ones(idx.shape, dtype=np.float32)
        if call.topk_weights is not None:
            weights[:] = call.topk_weights.numpy()
        owners = np.where(idx < 0, -1, idx // num_local)
        sent = [(owners == dst).any(1).nonzero()[0] for dst in range(config.num_ranks)]
        return HostLatencyHandle(
            buffer_id=buffer_id,
            seq=0,
            epoch=self._control.exchange.epoch,
            num_tokens=len(idx),
            num_topk=config.num_topk,
            got=torch.zeros(config.num_ranks, dtype=torch.bool, device="cpu"),
            layout_range=torch.zeros(num_local, config.num_ranks, dtype=torch.int64, device="cpu"),
            src_token=torch.full((num_local, _capacity(config)), -1, dtype=torch.int32, device="cpu"),
            cut=cut,
            topk_idx=idx,
            topk_weights=weights,
            sent=sent,
            sources=[None] * config.num_ranks,
        )

    def _empty_result(self, how: Quantisation, handle: HostLatencyHandle) -> LatencyDispatched:
        config = handle.cut.config
        num_local, hidden = config.num_local_experts, config.hidden
        x = self._memory((num_local, _capacity(config), hidden), FP8 if how.use_fp8 else torch.bfloat16)
        payload: torch.Tensor | tuple[torch.Tensor, torch.Tensor] = x
        if how.use_fp8:
            shape = (num_local, num_scales(hidden, how), _capacity(config))
            scales = self._memory(shape, torch.int32 if how.use_ue8m0 else torch.float32)
            payload = x, scales.transpose(1, 2)
        return LatencyDispatched(
            x=payload,
            num_tokens_per_expert=torch.zeros(num_local, dtype=torch.int32, device="cpu"),
            handle=handle,
            event=DONE,
            got=torch.zeros(self.config.num_ranks, dtype=torch.bool, device="cpu"),
        )

    def _memory(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        memory = torch.empty(shape, dtype=dtype, device="cpu")
        if self._poison:
            memory.view(torch.uint8).fill_(0xFF)
        return memory

    def _send_tokens(self, flight: Flight, call: LatencyDispatchCall, handle: HostLatencyHandle) -> None:
        rows, cut = as_sent(call.x, call.facts.quantisation), handle.cut
        for dst in self._flights.reachable(flight):
            tokens = handle.sent[dst]
            self.wire.write_meta(dst, flight.seq, tokens, handle.topk_idx[tokens], handle.topk_weights[tokens], cut)
            self.wire.write_rows(dst, flight.seq, rows, torch.from_numpy(tokens), cut)
            self.wire.post(dst, flight.seq, flight.head._replace(num_rows=len(tokens)))

    def _receive_tokens(
        self, flight: Flight, how: Quantisation, result: LatencyDispatched, handle: HostLatencyHandle
    ) -> None:
        heads, cut = self._flights.heads(flight), handle.cut
        given: list[tuple[Ints, Ints, Floats] | None] = [None] * self.config.num_ranks
        for src, head in heads.items():
            given[src] = self.wire.read_meta(src, flight.seq, head.num_rows, cut)
        placed = place_rows(given, cut.config.num_local_experts, _capacity(cut.config))
        x, scales = result.x if isinstance(result.x, tuple) else (result.x, None)
        flat = x.view(-1, cut.config.hidden)
        columns = None if scales is None else scales.transpose(1, 2)
        kind = None if columns is None else (columns.shape[1], columns.dtype)
        for src, source in enumerate(placed.sources):
            if source is not None:
                rows = self.wire.read_rows(src, flight.seq, len(source.tokens), x.dtype, cut, kind)
                expand(source, rows, flat, columns)
        self._flights.require_all(flight)
        handle.sources = placed.sources
        handle.layout_range.copy_(torch.from_numpy(placed.layout_range))
        handle.src_token.copy_(torch.from_numpy(placed.src_token))
        result.num_tokens_per_expert.copy_(torch.from_numpy(placed.num_tokens_per_expert))
        for src in heads:
            handle.got[src] = result.got[src] = True
        handle.is_received = True

    # -- combine

    def combine_input(self, config: BufferConfig) -> torch.Tensor:
        """Return `[num_local_experts, num_ranks * max_tokens, hidden]`: the partial sums read y where it lies."""
        return self._memory((config.num_local_experts, _capacity(config), config.hidden), torch.bfloat16)

    def combine(self, call: LatencyCombineCall, lane: Lane) -> LatencyCombined:
        """Run one combine, or its send half; raises as `Buffer.combine`."""
        options = LatencyOptions(call.active_ranks, call.timeout_s, call.facts.return_hook)
        handle = call.handle
        assert isinstance(handle, HostLatencyHandle)
        self._require_place(options)
        self._flights.check()
        self._flights.require_slot()
        out = call.out
        if out is None:
            out = self._memory((handle.num_tokens, handle.cut.config.hidden), torch.bfloat16)
        got = torch.zeros(self.config.num_ranks, dtype=torch.bool, device="cpu")
        weights = handle.topk_weights if call.topk_weights is None else call.topk_weights.numpy().copy()
        result = LatencyCombined(x=out, got=got)
        result.lost = lambda: lost_weight(self._owners(handle), weights, got.numpy())
        kind = _KIND_OF_PARTIAL[call.facts.partial_dtype]
        flight = self._flights.begin(
            SectionHeader(LATENCY_COMBINE, kind, handle.seq, call.topk_weights is not None, handle.cut.code), options
        )
        with self._flights.sending(flight):
            self._send_partials(flight, call, handle)
        return self._flights.finish(
            flight, result, lambda: self._receive_partials(flight, call.facts.partial_dtype, result, handle)
        )

    def _owners(self, handle: HostLatencyHandle) -> Ints:
        return np.where(handle.topk_idx < 0, -1, handle.topk_idx // handle.cut.config.num_local_experts)

    def _send_partials(self, flight: Flight, call: LatencyCombineCall, handle: HostLatencyHandle) -> None:
        reachable, cut = self._flights.reachable(flight), handle.cut
        if call.topk_weights is not None:
            weights = call.topk_weights.numpy()
            for dst in reachable:
                self.wire.write_weights(dst, flight.seq, weights[handle.sent[dst]], cut)
                self.wire.post_early(dst, flight.seq)
        y = call.y.view(-1, cut.config.hidden)
        for src in reachable:
            source = handle.sources[src]
            if source is None:  # its tokens were not here
                self.wire.post(src, flight.seq, flight.head)
                continue
            factors = source.weights
            if call.topk_weights is not None:
                if not self._flights.has_come(flight, src, "early"):
                    self._flights.require_all(flight)
                    continue
                factors = self.wire.read_weights(src, flight.seq, len(source.tokens), cut)
            partial = partial_sums(source, factors, y).to(call.facts.partial_dtype)
            self.wire.write_rows(src, flight.seq, WireRows(partial, None), None, cut)
            self.wire.post(src, flight.seq, flight.head._replace(num_rows=len(partial), had=1))

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
        result.x.copy_(summed)
        result.got[counted] = True

    def _require_place(self, options: LatencyOptions) -> None:
        """Raise `EvictedError` when the job, or without a mask the buffer, has gone on without this process."""
        self._lane.require_place(options.active_ranks is not None)

    # -- agreement

    def barrier_again(self, timeout_s: float) -> bool:
        """Return False: hosts that meet look around."""
        return False

    def barrier(self, deadline: float) -> None:
        """Let the ranks' host threads meet; raises as `LatencyBuffer.barrier`."""
        self._control.all_gather_bytes(b"", deadline)

    def sync(self, active_ranks: torch.Tensor | None, deadline: float) -> torch.Tensor:
        """Agree on who takes part and begin an epoch with them; raises as `Buffer.sync`."""
        if self.wire.num_open:
            raise InvalidState(f"{self.wire.num_open} calls have been sent and not received; call their hooks first")
        marks = [1] * self.config.num_ranks if active_ranks is None else active_ranks.tolist()
        return path_lane.sync(self._control, self._lane, marks, active_ranks, 0, deadline)
