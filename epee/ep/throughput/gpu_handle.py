"""The handle of CUDA tensors: device metadata of one dispatch, and the properties of `Handle` computed from it.

The data that a dispatch leaves on the GPU (`gpu.types.ThroughputHandle`) is enough for cached dispatches and
combines. Everything else is computed when it is first read, by closed form from the matrix of counts; only
`num_received` and `num_sent`, which are lists, make the CPU wait.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from ...gpu.event import DONE, Event
from ...gpu.params import RECV_INFO_COUNTS, RECV_INFO_EXPANDED, RECV_INFO_ROWS
from ...memory.fresh import Late
from ..checks import DispatchCall
from ..config import BufferConfig
from ..handle import Combined, Dispatched, DispatchRouting, Handle
from ..members.rows import RowExchange
from .gpu.dispatch import DispatchPlan
from .gpu.types import DispatchResult, ThroughputHandle, without_weights
from .gpu.views import KeptRows
from .order import CombineOrder


@dataclass(eq=False)
class CudaHandle(Handle):
    """The handle of one GPU dispatch.

    Attributes:
        core: metadata for the kernels.
        rank, num_ranks, num_local_experts: of the buffer.
        num_rows: rows of the results: the received ones, or the maximum without CPU sync.
        row_src_rank, row_src_token, row_src_k: expert layout: `[num_rows]` int64; None in the rank layout.
        kept: rank layout: source tokens and experts of the rows; None in the expert layout.
        routing: a copy of the dispatch's, if the view excludes ranks.
    """

    core: ThroughputHandle
    rank: int
    num_ranks: int
    num_local_experts: int
    num_rows: int
    row_src_rank: torch.Tensor | None
    row_src_token: torch.Tensor | None
    row_src_k: torch.Tensor | None
    kept: KeptRows | None
    routing: DispatchRouting | None = None

    @Late
    def form(self) -> tuple[object, ...]:
        """The part of a handle that the rules of a combine read, as `plans.checked_combine`."""
        order = self.order
        sums = None if order is None else (order.by, order.bias_first, order.round_partials)
        return self.layout, self.expert_alignment, self.num_tokens, self.with_topk, self.capacity, sums

    def in_order(self, order: CombineOrder | None) -> CudaHandle:
        """As `Handle.in_order`."""
        other = super().in_order(order)
        other.__dict__.pop("form", None)
        return other

    @property
    def num_recv(self) -> int:
        """Rows of the results."""
        return self.num_rows

    @property
    def num_tokens_per_expert(self) -> list[int]:
        """(token, k) slots per local expert, rounded up; empty without top-k routing or CPU sync.

        With a capacity the CPU waits for the rows: the exchange has counted those that are dropped as well.
        """
        counts = self.core.num_tokens_per_expert
        if not self.with_topk or counts is None:
            return []
        return list(counts) if self.capacity is None else self._padded_slots.tolist()

    @cached_property
    def num_received(self) -> list[int]:
        """Rows (rank layout: tokens) that came from each rank; the CPU waits for the GPU.

        In the expert layout a row stands for a (token, k).
        """
        return self._received.tolist()

    @cached_property
    def num_sent(self) -> list[int]:
        """Rows that this rank sends to each rank; the CPU waits for the GPU."""
        if self.layout == "rank":
            return self._tokens[self.rank].tolist()
        return self._count_matrix[self.rank, : self._num_experts].view(self.num_ranks, -1).sum(1).tolist()

    @property
    def recv_counts(self) -> torch.Tensor:
        """`[1 + num_local_experts]` int32 on the GPU: rows that are there, then slots per local expert, rounded up."""
        info = self.core.recv_info
        at = RECV_INFO_ROWS if self.layout == "rank" else RECV_INFO_EXPANDED
        counts = info[RECV_INFO_COUNTS : RECV_INFO_COUNTS + self.num_local_experts]
        return torch.cat([info[at : at + 1], counts if self.capacity is None else self._padded_slots])

    @cached_property
    def src_rank(self) -> torch.Tensor:
        """`[num_recv]` int64: the rank that each row came from, -1 in padding."""
        if self.row_src_rank is not None:
            return self.row_src_rank
        rows = torch.arange(self.num_rows, dtype=torch.int64, device=self.core.words.device)
        src_rank = torch.searchsorted(self._received.cumsum(0), rows, right=True)
        return src_rank if self.is_exact else src_rank.masked_fill_(src_rank >= self.num_ranks, -1)

    @cached_property
    def src_token(self) -> torch.Tensor:
        """`[num_recv]` int64: the token's index on the rank that it came from, -1 in padding."""
        if self.row_src_token is not None:
            return self.row_src_token
        assert self.kept is not None
        src_token = self.kept.src_token
        return src_token if self.is_exact else src_token.masked_fill(self.src_rank < 0, -1)

    @property
    def src_k(self) -> torch.Tensor | None:
        """`[num_recv]` int64: which of its token's k a row stands for, -1 in padding; None in the rank layout."""
        return self.row_src_k

    @property
    def recv_topk_idx(self) -> torch.Tensor | None:
        """`[num_recv, num_topk]` int64, local ids or -1; rank layout with top-k routing only."""
        return None if self.kept is None else self.kept.topk_idx

    def peek_topk_idx(self) -> torch.Tensor | None:
        """As `Handle.peek_topk_idx`."""
        return None if self.kept is None else self.kept.peek_topk_idx()

    @property
    def recv_slots(self) -> torch.Tensor:
        """`[num_local_experts]` int32 on the GPU: (token, k) slots of each local expert, not rounded up."""
        if self.capacity is not None:
            return self._count_slots()
        return self.core.part("recv_slots", self.num_local_experts)

    @property
    def slot_ends(self) -> torch.Tensor:
        """`[num_local_experts]` int32 on the GPU, as the kernel wrote it: where the slots of each local expert end.

        Rank layout: the sum of the counts of local experts 0 ... i, each rounded up. Expert layout: the first row of
        expert i plus its rows that are no padding.
        """
        if self.capacity is not None:
            return self._padded_slots.cumsum(0, dtype=torch.int32)
        return self.core.part("slot_ends", self.num_local_experts)

    @property
    def token_ends(self) -> torch.Tensor:
        """`[num_ranks]` int32 on the GPU, as the kernel wrote it: tokens from ranks 0 ... r, each counted once."""
        return self.core.part("token_ends", self.num_ranks)

    @property
    def source_tokens(self) -> torch.Tensor:
        """`[num_ranks]` int32 on the GPU, as the kernel wrote it: tokens that each rank had in the dispatch."""
        return self.core.part("source_tokens", self.num_ranks)

    @property
    def received_up_to(self) -> torch.Tensor:
        """`[num_ranks, num_ranks]` int32 on the GPU: tokens that rank d (column) gets from ranks 0 ... s (row)."""
        return self._tokens.cumsum(0).to(torch.int32)

    @property
    def num_dropped(self) -> torch.Tensor | None:
        """`[1]` int32 on the GPU, as the kernel wrote it: rows that this rank would have received beyond `capacity`."""
        return None if self.capacity is None else self.core.part("num_dropped", 1)

    @property
    def dropped(self) -> torch.Tensor | None:
        """`[num_tokens, num_ranks]` bool on the GPU: rows that were not sent, for the capacity; None without one."""
        if self.capacity is None:
            return None
        first_row = self.core.part("row_base", self._num_experts + self.num_ranks)[self._num_experts :]
        return (self._places >= 0) & (self._places + first_row >= self.capacity)

    @property
    def kept_routing(self) -> DispatchRouting:
        """The routing of the dispatch in the kernels' own copy, without ranks that the view excludes. Rank layout."""
        if not self.with_topk:
            return DispatchRouting(None, None, self._places >= 0)
        shape = self.num_tokens, self.num_topk
        length = self.num_tokens * self.num_topk
        weights = self.core.part("weights_of", length).view(torch.float32) if self.core.has_weights else None
        return DispatchRouting(
            self.core.part("expert_of", length).view(shape), None if weights is None else weights.view(shape), None
        )

    @property
    def sent_topk_idx(self) -> torch.Tensor | None:
        """As `Handle.sent_topk_idx`; -1 for experts of ranks that the view excludes."""
        if not self.with_topk:
            return None
        shape = self.num_tokens, self.num_topk
        return self.core.part("expert_of", self.num_tokens * self.num_topk).view(shape).to(torch.int64)

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """The tensors on the GPU read by later calls. (The slot of the rows has `readers` of its own.)"""
        return self.core.words, self.row_src_rank, self.row_src_token, self.row_src_k

    def unweighted(self) -> CudaHandle:
        """Return a handle of the same rows whose weights are all one."""
        if not self.core.has_weights:
            return self
        other = self._twin()
        other.core = object.__new__(ThroughputHandle)  # `replace` takes ten times as long
        addresses = self.core.addresses
        other.core.__dict__.update(self.core.__dict__, has_weights=False, addresses=without_weights(addresses))
        return other

    @property
    def is_exact(self) -> bool:
        """Whether `num_recv` is exact; else only the GPU knows the count, and it is the maximum."""
        return self.core.num_recv is not None

    @property
    def _num_experts(self) -> int:
        return self.num_ranks * self.num_local_experts

    @property
    def _count_matrix(self) -> torch.Tensor:
        """`[num_ranks, num_experts + num_ranks]` int32: slots for each expert, then tokens for each rank, by source."""
        space, width = self.core.space, self._num_experts + self.num_ranks
        return self.core.words[space.count_matrix : space.count_matrix + self.num_ranks * width].view(-1, width)

    @property
    def _tokens(self) -> torch.Tensor:
        """`[num_ranks, num_ranks]`: tokens that each rank (row) has for each one, without those that are dropped."""
        tokens = self._count_matrix[:, self._num_experts :]
        if self.capacity is None:
            return tokens
        ends = tokens.cumsum(0)
        return ends.clamp(max=self.capacity) - (ends - tokens).clamp(max=self.capacity)

    @property
    def _places(self) -> torch.Tensor:
        """`[num_tokens, num_ranks]` int32: each row counted from this rank's first one there, -1 for none."""
        return self.core.part("send_prefix", self.num_tokens * self.num_ranks).view(-1, self.num_ranks)

    def _count_slots(self) -> torch.Tensor:
        """`[num_local_experts]` int32: slots of the rows that have come; of a failed call none."""
        counts = torch.zeros(self.num_local_experts + 1, dtype=torch.int32, device=self.core.words.device)
        ids = self.recv_topk_idx
        if ids is not None:
            row = torch.arange(len(ids), dtype=torch.int32, device=ids.device)
            is_there = row < self.core.recv_info[RECV_INFO_ROWS]
            at = ids.clamp(-1, self.num_local_experts - 1).masked_fill(~is_there[:, None], -1).add_(1).view(-1)
            counts.scatter_add_(0, at, torch.ones_like(at, dtype=torch.int32))
        return counts[1:]

    @property
    def _padded_slots(self) -> torch.Tensor:
        """`[num_local_experts]` int32: `_count_slots`, each rounded up."""
        slots, alignment = self._count_slots(), self.expert_alignment
        return slots if alignment == 1 else (slots + (alignment - 1)) // alignment * alignment

    @property
    def _received(self) -> torch.Tensor:
        """`[num_ranks]` int64: rows from each rank."""
        if self.layout == "rank":
            return self._tokens[:, self.rank].to(torch.int64)
        first = self.rank * self.num_local_experts
        return self._count_matrix[:, first : first + self.num_local_experts].sum(1)


class HandleMaker:
    """Makes the handles of one buffer's dispatches.

    Args:
        config, rank, buffer_id, exchange: of the buffer.
        kind: of the handles.
    """

    def __init__(
        self,
        config: BufferConfig,
        rank: int,
        buffer_id: int,
        exchange: RowExchange,
        kind: type[CudaHandle] = CudaHandle,
    ) -> None:
        self._config, self._rank, self._id, self._exchange = config, rank, buffer_id, exchange
        self._kind = kind

    def made(self, call: DispatchCall, got: DispatchResult, known: CudaHandle | None) -> CudaHandle:
        """Return the handle of a dispatch; `known` is the handle that it was made with, if there is one."""
        if known is not None:
            return known if got.handle is known.core else replace(known, core=got.handle)
        handle = self._new(got.handle, got.x.shape[0])
        handle.row_src_rank, handle.row_src_token, handle.row_src_k = got.src_rank, got.row_src_token, got.src_k
        handle.kept, handle.routing = got.kept, self._routing(call)
        return handle

    def _checked(self, plan: DispatchPlan) -> dict[str, Any]:
        """Return the common fields of the handles of a plan's dispatches."""
        made = self._new(plan.new_handle(0), 0)
        form = made.form  # computed once for all of them
        return {"form": form, **{name: value for name, value in made.__dict__.items() if name not in {"core", "kept"}}}

    def like(self, plan: DispatchPlan, got: DispatchResult, epoch: int) -> CudaHandle:
        """Return the handle of a cached dispatch."""
        if not plan.checked_handle:
            plan.checked_handle = self._checked(plan)
        core = got.handle
        handle = object.__new__(CudaHandle)  # and the fields at once, as one by one takes longer
        handle.__dict__.update(
            plan.checked_handle,
            seq=core.call_idx,
            epoch=epoch,
            core=core,
            num_rows=plan.most_rows if core.num_recv is None else core.num_recv,
            kept=got.kept,
        )
        if got.sources is not None:
            handle.row_src_rank, handle.row_src_token, handle.row_src_k = got.sources
        return handle

    def _new(self, core: ThroughputHandle, num_rows: int) -> CudaHandle:
        """Return the handle of the current dispatch, without its sources."""
        config = self._config
        return self._kind(
            self._id,
            core.call_idx,
            self._exchange.epoch,
            core.layout,
            core.expert_alignment,
            core.num_tokens,
            config.num_topk,
            core.has_topk,
            core,
            self._rank,
            config.num_ranks,
            config.num_local_experts,
            num_rows,
            row_src_rank=None,
            row_src_token=None,
            row_src_k=None,
            kept=None,
            capacity=core.capacity,
        )

    def _routing(self, call: DispatchCall) -> DispatchRouting | None:
        """Return a copy of the routing if the view excludes ranks, for `lost_weight`."""
        if self._exchange.reduced_members is None:
            return None
        return DispatchRouting(
            *(None if given is None else given.clone() for given in (call.topk_idx, call.topk_weights, call.mask))
        )


class CudaDispatched(Dispatched):
    """The rows that a rank received by a GPU dispatch: `Dispatched` whose parts are made when they are first read.

    Args:
        got: of the core.
        scale_dtype: of FP8 scales, None without.
        handle: of the dispatch.
        epoch, lost_ranks: as in `Dispatched`.
    """

    def __init__(
        self,
        got: DispatchResult,
        scale_dtype: torch.dtype | None,
        handle: CudaHandle,
        epoch: int,
        lost_ranks: tuple[int, ...],
    ) -> None:
        self._got = got  # holds `x`, and with it the slot, as long as this result lives
        self.x = got.x
        if got.scales is not None:
            assert scale_dtype is not None
            self.x = got.x, got.scales.view(scale_dtype)
        self.handle, self.num_ranks, self.readers = handle, handle.num_ranks, got.readers
        self.epoch, self.lost_ranks = epoch, lost_ranks

    @Late
    def topk_idx(self) -> torch.Tensor | None:
        """As `Dispatched.topk_idx`."""
        return self._got.topk_idx

    @Late
    def topk_weights(self) -> torch.Tensor | None:
        """As `Dispatched.topk_weights`."""
        return self._got.topk_weights

    @Late
    def num_tokens_per_expert(self) -> list[int]:
        """As `Dispatched.num_tokens_per_expert`."""
        if self.handle.capacity is not None:
            self.event.wait()
        return self.handle.num_tokens_per_expert

    @Late
    def num_dropped(self) -> torch.Tensor | None:
        """As `Dispatched.num_dropped`."""
        return self.handle.num_dropped

    @Late
    def event(self) -> Event:
        """As `Dispatched.event`; that of a call on the buffer's own stream is set, as it has been recorded."""
        device = self._got.handle.words.device
        return DONE if device.type == "cpu" else Event(device, self.readers[0])

    @property
    def values(self) -> tuple[torch.Tensor, ...]:
        """The tensors of `x`."""
        return self.x if isinstance(self.x, tuple) else (self.x,)


class CudaCombined(Combined):
    """The sums of a combine on a GPU without losses or a stream of its own: `Combined` whose event is made late.

    Args:
        x, topk_weights: as the attributes.
        config: of the buffer.
        stream: raw, that the call's work is on.
        epoch, lost: as the attributes.
    """

    def __init__(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor | None,
        config: BufferConfig,
        stream: int,
        epoch: int,
        lost: Callable[[], torch.Tensor] | None,
    ) -> None:
        self.x, self.topk_weights, self.epoch, self.lost = x, topk_weights, epoch, lost
        self.num_ranks, self.lost_ranks = config.num_ranks, ()
        self._where = config.device, stream

    @Late
    def event(self) -> Event:
        """As `Combined.event`."""
        device, stream = self._where
        return Event(device, stream)
