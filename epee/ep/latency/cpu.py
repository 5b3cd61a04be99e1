"""`LatencyBuffer` for CPU tensors, for every transport of rows: results, handles, and the send and receive phases.

A dispatch's receive phase copies each row to its experts' blocks and stores the offsets. A combine's send phase weights
and sums a rank's experts' rows of each token it got; its receive phase adds up what has come back. The transport of
rows and sums is described in `one_host/path.py`, and over several hosts in `../hosts/latency/path.py`.

A rank whose message does not arrive (dead, silent until the timeout, or itself excluding this one) is excluded as a
whole. With `active_ranks` it is marked there and cut off until it is marked active again; without, the call raises,
after the slot has been freed: the buffer stays usable. The results are ordinary memory of this rank, so nothing of an
earlier call can appear in them and no slot outlives its call.

For the state after a crash see `wire.py`. Every failure between two steps of the send phase is sent to the peers as a
refusal, so that they raise instead of waiting.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import numpy as np
import torch

from ...arrays import array_of, plain_tensors
from ...errors import AbortedError, CommTimeoutError, PeerError
from ...gpu.event import DONE
from ..config import BufferConfig
from ..members.header import OPS_OF_CPUS
from ..members.rows import RowExchange
from ..paths import Path
from ..streams import CallStream
from ..throughput.placement import Ints
from .call import PendingCall
from .pending_call import NoFreeSlot, PendingCalls
from .region import SectionCut
from .rows import FP8, Floats, Placed, Source, WireRows, expand, lost_weight, num_scales, place_rows
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
class CpuLatencyHandle(LatencyHandle):
    """The handle of CPU tensors.

    Attributes:
        topk_idx: `[num_tokens, num_topk]` of this rank, a copy.
        topk_weights: of this rank, a copy.
        sent: for each rank the tokens that went there, ascending.
        sources: the tokens from each rank; None if nothing arrived.
        cut: how sections are cut for calls of its sizes.
    """

    topk_idx: Ints = field(default_factory=lambda: np.empty((0, 0), dtype=np.int64))
    topk_weights: Floats = field(default_factory=lambda: np.empty((0, 0), dtype=np.float32))
    sent: list[Ints] = field(default_factory=list)
    sources: list[Source | None] = field(default_factory=list)
    cut: SectionCut = field(kw_only=True)


class LatencyCalls(Path, ABC):
    """Takes the calls of one `LatencyBuffer` through their send and receive phases.

    Args:
        exchange: of the buffer's rows.
        wire: of the buffer.
        pending_calls: over it.
        poison: fill memory with 0xFF before each use.
    """

    _handle_type = CpuLatencyHandle

    def __init__(self, exchange: RowExchange, wire: Wire, pending_calls: PendingCalls, poison: bool) -> None:
        self.config, self.rank = exchange.config, exchange.rank
        self.exchange = exchange
        self._wire, self._pending_calls = wire, pending_calls
        self._poison = poison

    # -- what every path has

    def num_announced(self, op: int) -> int:
        """Return how many calls have been begun, or made through the control plane."""
        return self._wire.seq + self.exchange.seq

    def is_told(self, error: Exception) -> bool:
        """Return whether the peers know about `error`, or cannot be notified."""
        return isinstance(error, (CommTimeoutError, PeerError, AbortedError, NoFreeSlot))

    def refuse(self, op: int, error: Exception, deadline: float) -> None:
        """Take part in the peers' call as the rank that cannot make it."""
        if op in OPS_OF_CPUS:
            self.exchange.refuse(op, error, deadline)
            return
        self._pending_calls.require_slot()
        options = LatencyOptions(None, max(0.0, deadline - time.monotonic()), False)
        last_seq = self._wire.seq
        try:
            self._pending_calls.abort(self._pending_calls.begin(SectionHeader(op, 0, 0, 0), options), error)
        except BaseException as raised:
            self._pending_calls.abandon(last_seq, raised)
            raise

    # -- dispatch

    def dispatch(self, call: LatencyDispatchCall, call_stream: CallStream) -> LatencyDispatched:
        """Run one dispatch, or its send phase; raises as `Buffer.dispatch`."""
        options = LatencyOptions(call.active_ranks, call.timeout_s, call.checked.return_hook)
        self._require_place(options)
        self._pending_calls.check()
        self._pending_calls.require_slot()
        with plain_tensors():  # a hook may write them in another mode
            handle = self._new_handle(call)
            got = self._empty_result(call.checked.quantisation, handle)
        how = call.checked.quantisation
        kind = 3 if how.use_ue8m0 else how.use_fp8 + (how.use_fp8 and how.round_scale)
        last_seq = self._wire.seq
        try:
            pending_call = self._pending_calls.begin(
                SectionHeader(LATENCY_DISPATCH, int(kind), 0, 0, handle.cut.code), options
            )
            handle.seq = pending_call.seq
            with self._pending_calls.sending(pending_call):
                self._send_tokens(pending_call, call, handle)
            return self._pending_calls.finish(
                pending_call, got, lambda: self._receive_tokens(pending_call, call.checked.quantisation, got, handle)
            )
        except BaseException as error:
            self._pending_calls.abandon(last_seq, error)
            raise

    def _new_handle(self, call: LatencyDispatchCall) -> CpuLatencyHandle:
        buffer_id, config, cut = call.checked.sizes
        num_local = config.num_local_experts
        idx = array_of(call.topk_idx).copy()
        weights = np.ones(idx.shape, dtype=np.float32)
        if call.topk_weights is not None:
            weights[:] = array_of(call.topk_weights)
        owners = np.where(idx < 0, -1, idx // num_local)
        sent = [(owners == dst).any(1).nonzero()[0] for dst in range(config.num_ranks)]
        return self._handle_type(
            buffer_id=buffer_id,
            seq=0,
            epoch=self.exchange.epoch,
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

    def _empty_result(self, how: Quantisation, handle: CpuLatencyHandle) -> LatencyDispatched:
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

    def _place(
        self,
        given: list[tuple[Ints, Ints, Floats] | None],
        result: LatencyDispatched,
        handle: CpuLatencyHandle,
        read: Callable[[int, int, tuple[int, torch.dtype] | None], WireRows],
    ) -> Placed:
        """Copy the received rows to their offsets.

        Args:
            given: as of `place_rows`.
            result: of the dispatch, whose memory is written.
            handle: of the dispatch.
            read: returns the rows of a source: which one, how many, and number and dtype of their scales.
        """
        config = handle.cut.config
        placed = place_rows(given, config.num_local_experts, _capacity(config))
        x, scales = result.x if isinstance(result.x, tuple) else (result.x, None)
        flat = x.view(-1, config.hidden)
        columns = None if scales is None else scales.transpose(1, 2)
        kind = None if columns is None else (columns.shape[1], columns.dtype)
        for src, source in enumerate(placed.sources):
            if source is not None:
                expand(source, read(src, len(source.tokens), kind), flat, columns)
        return placed

    def _finish_dispatch(
        self, placed: Placed, heads: Collection[int], result: LatencyDispatched, handle: CpuLatencyHandle
    ) -> None:
        """Write the results of a dispatch's receive phase; `heads` are the ranks whose message has arrived."""
        handle.layout_range.copy_(torch.from_numpy(placed.layout_range))
        handle.src_token.copy_(torch.from_numpy(placed.src_token))
        result.num_tokens_per_expert.copy_(torch.from_numpy(placed.num_tokens_per_expert))
        for src in heads:
            handle.got[src] = result.got[src] = True
        handle.is_received = True

    def _memory(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        memory = torch.empty(shape, dtype=dtype, device="cpu")
        if self._poison:
            memory.view(torch.uint8).fill_(0xFF)
        return memory

    # -- combine

    def combine_input(self, config: BufferConfig) -> torch.Tensor:
        """Return `[num_local_experts, num_ranks * max_tokens, hidden]`: the partial sums read y in place."""
        return self._memory((config.num_local_experts, _capacity(config), config.hidden), torch.bfloat16)

    def combine(self, call: LatencyCombineCall, call_stream: CallStream) -> LatencyCombined:
        """Run one combine, or its send phase; raises as `Buffer.combine`."""
        options = LatencyOptions(call.active_ranks, call.timeout_s, call.checked.return_hook)
        handle = call.handle
        assert isinstance(handle, CpuLatencyHandle)
        self._require_place(options)
        self._pending_calls.check()
        self._pending_calls.require_slot()
        out = call.out
        with plain_tensors():  # a hook may write them in another mode
            if out is None:
                out = self._memory((handle.num_tokens, handle.cut.config.hidden), torch.bfloat16)
            got = torch.zeros(self.config.num_ranks, dtype=torch.bool, device="cpu")
        weights = handle.topk_weights if call.topk_weights is None else array_of(call.topk_weights).copy()
        result = LatencyCombined(x=out, got=got)
        result.lost = lambda: lost_weight(self._owners(handle), weights, array_of(got))
        kind = _KIND_OF_PARTIAL[call.checked.partial_dtype]
        head = SectionHeader(LATENCY_COMBINE, kind, handle.seq, call.topk_weights is not None, handle.cut.code)
        last_seq = self._wire.seq
        try:
            pending_call = self._pending_calls.begin(head, options)
            with self._pending_calls.sending(pending_call):
                self._send_partials(pending_call, call, handle)
            return self._pending_calls.finish(
                pending_call,
                result,
                lambda: self._receive_partials(pending_call, call.checked.partial_dtype, result, handle),
            )
        except BaseException as error:
            self._pending_calls.abandon(last_seq, error)
            raise

    def _owners(self, handle: CpuLatencyHandle) -> Ints:
        return np.where(handle.topk_idx < 0, -1, handle.topk_idx // handle.cut.config.num_local_experts)

    @abstractmethod
    def take_sizes(self, config: BufferConfig) -> SectionCut:
        """Return how sections are cut for calls of these sizes; raises `InvalidArgument` if they do not fit."""

    @abstractmethod
    def sync(self, active_ranks: torch.Tensor | None, deadline: float) -> torch.Tensor:
        """Agree on the members and begin an epoch with them; raises as `Buffer.sync`."""

    # -- how rows move

    @abstractmethod
    def _send_tokens(self, pending_call: PendingCall, call: LatencyDispatchCall, handle: CpuLatencyHandle) -> None:
        """Send the rows of a dispatch to all reachable ranks."""

    @abstractmethod
    def _receive_tokens(
        self, pending_call: PendingCall, how: Quantisation, result: LatencyDispatched, handle: CpuLatencyHandle
    ) -> None:
        """Read the received messages: rows to their offsets, and `handle.sources`."""

    @abstractmethod
    def _send_partials(self, pending_call: PendingCall, call: LatencyCombineCall, handle: CpuLatencyHandle) -> None:
        """Send the sums of a combine to all reachable ranks."""

    @abstractmethod
    def _receive_partials(
        self, pending_call: PendingCall, partial_dtype: torch.dtype, result: LatencyCombined, handle: CpuLatencyHandle
    ) -> None:
        """Add up the received sums."""

    def _require_place(self, options: LatencyOptions) -> None:
        """Raise if the job, or without a mask the buffer, has continued without this process."""
