"""DeepEP V1's `Buffer` on an epee `Buffer`: same calls, same tuples, same order of rows.

Data path: the pool (`epee.ep.BufferPool`) tells all ranks what is coming and finds or makes an epee buffer that holds
it, that buffer moves the rows; what is left here is turning arguments and results around. The handle is DeepEP's tuple
of six tensors (`layout.py` has their closed forms), behind which the epee handle is remembered (`KnownHandles`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from epee.compat.deep_ep import low_latency
from epee.compat.deep_ep.config import Config, combine_config, dispatch_config
from epee.compat.deep_ep.event import Event, EventHandle, EventOverlap
from epee.compat.deep_ep.low_latency import LowLatency, unsupported
from epee.compat.deep_ep.shared.known import KnownHandles
from epee.compat.deep_ep.shared.layout import (
    align_up,
    channel_prefix_matrix,
    dispatch_layout,
    rank_prefix_matrix,
    recv_channel_prefix_matrix,
    recv_channel_prefix_matrix_on_device,
    send_head,
)
from epee.compat.deep_ep.shared.owner import PoolOwner
from epee.compat.deep_ep.shared.rows import (
    as_bias,
    cut,
    device_of,
    filled_up,
    int64_routing,
    payload_filled_up,
    values_of,
)
from epee.ep import (
    BufferPool,
    CombineOrder,
    Dispatched,
    Handle,
    Need,
    Payload,
    Room,
    Wish,
    check_topk_idx,
    group_of,
)
from epee.errors import InvalidArgument

_ORDER = CombineOrder(by="rank", bias_first=True)  # DeepEP V1: the biases, then the ranks ascending, one rounding
V1Handle: TypeAlias = tuple[torch.Tensor, ...]
# num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert
_Counts: TypeAlias = tuple["torch.Tensor | None", "torch.Tensor | None", "torch.Tensor | None"]
Bias: TypeAlias = "torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None"


@dataclass(frozen=True, eq=False)
class _KnownV1Handle:
    """The facts behind a handle's tuple: the epee handle, the room that made it, the rows its results have."""

    room: Room
    handle: Handle
    num_rows: int


class Buffer(LowLatency, PoolOwner):
    """DeepEP V1's buffer, normal and low-latency calls, on the ranks of one host.

    Args:
        group: of the ranks, any backend (gloo is enough).
        num_nvl_bytes, num_rdma_bytes: kept as attributes; they bound nothing, the buffer makes room as calls need it.
        low_latency_mode: kept as attribute; low-latency calls work either way.
        num_qps_per_rank, allow_nvlink_for_low_latency_mode, allow_mnnvl: accepted and ignored.
        explicitly_destroy: `destroy` may be called; else the memory goes with the object.
        enable_shrink: low-latency calls mask a rank that does not come, instead of raising.
        comm: must be None.

    Raises:
        UnsupportedError: `comm` is given.
    """

    num_sms: int = 20

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
    ) -> None:
        if comm is not None:
            unsupported("comm", "an MPI communicator cannot make an epee buffer; give a torch process group")
        self.group = group_of(group)
        self.rank = self.group.rank()
        self.group_size = self.group.size()
        self.num_nvl_bytes = num_nvl_bytes
        self.num_rdma_bytes = num_rdma_bytes
        self.low_latency_mode = low_latency_mode
        self.explicitly_destroy = explicitly_destroy
        self.enable_shrink = enable_shrink
        pool = BufferPool(self.group)
        self.runtime: BufferPool | None = pool
        self._handles: KnownHandles[_KnownV1Handle] = KnownHandles()
        self._init_low_latency(pool)

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Return True: kernels are compiled for the GPU at hand."""
        return True

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Set the SMs of default configs, an even number, for all V1 buffers."""
        if new_num_sms < 2 or new_num_sms % 2:
            raise InvalidArgument(f"new_num_sms must be even and at least 2, got {new_num_sms}")
        Buffer.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """Return an event of what is on the current stream now."""
        return EventOverlap(EventHandle())

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """Return the default config of dispatch, for any number of ranks."""
        return dispatch_config(num_ranks, Buffer.num_sms)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """Return the default config of combine, for any number of ranks."""
        return combine_config(num_ranks, Buffer.num_sms)

    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: Event | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, None, torch.Tensor, torch.Tensor, EventOverlap]:
        """Count where this rank's tokens go. Local.

        Args:
            topk_idx: `[num_tokens, num_topk]` int64, -1 for none.
            num_experts: over all ranks.
            previous_event: waited for first.
            async_finish: return an event.
            allocate_on_comm_stream: ignored: with an event, everything is on the communication stream anyway.

        Returns:
            `num_tokens_per_rank [num_ranks]` int32, None (no RDMA ranks), `num_tokens_per_expert [num_experts]`
            int32, `is_token_in_rank [num_tokens, num_ranks]` bool, the event.
        """
        if num_experts < 1 or num_experts % self.group_size:
            raise InvalidArgument(f"num_experts must be a multiple of {self.group_size} ranks, got {num_experts}")
        with self._run(topk_idx.device, async_finish, previous_event) as run:
            routing = int64_routing(topk_idx)
            if not self._pool().is_gpu(routing.device):  # there the dispatch will look, without making the host wait
                check_topk_idx(routing, num_experts)
            found = dispatch_layout(routing, self.group_size, num_experts)
            event = run.event((topk_idx, routing), tuple(found))
        return found.num_tokens_per_rank, None, found.num_tokens_per_expert, found.is_token_in_rank, event

    def dispatch(
        self,
        x: Payload,
        handle: V1Handle | None = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: Event | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Payload, torch.Tensor | None, torch.Tensor | None, list[int] | None, V1Handle | None, EventOverlap]:
        """Send each token to the ranks of its experts. Collective.

        Args:
            x: `[num_tokens, hidden]`, or an FP8 pair (values, scales).
            handle: go the same way again; routing must be left out.
            num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert: of `get_dispatch_layout`.
            num_tokens_per_rdma_rank: ignored.
            topk_idx, topk_weights: `[num_tokens, num_topk]` int64 and float32, both or neither.
            expert_alignment: the counts of the list are rounded up to it.
            num_worst_tokens: rows of every result, so that shapes do not depend on routing; 0 for as many as come. On
                GPUs the host then waits for nobody, so the call can be recorded in a graph.
            config: its `num_sms` gives the channels of the handle's matrices, and is used on GPUs.
            previous_event: waited for first.
            async_finish: return an event.
            allocate_on_comm_stream: ignored, see `get_dispatch_layout`.

        Returns:
            `recv_x`, `recv_topk_idx` (local ids, -1 elsewhere), `recv_topk_weights` (0 elsewhere), tokens per local
            expert (empty with `num_worst_tokens`), handle, event. With `handle`: `recv_x`, four times None, event.
        """
        used = config or self.get_dispatch_config(self.group_size)
        given = (x, is_token_in_rank, topk_idx, topk_weights)
        with self._run(device_of(x), async_finish, previous_event) as run:
            if handle is not None:
                again = self._dispatch_again(x, handle, topk_idx, topk_weights, used)
                rows = payload_filled_up(again.x, self._known(handle).num_rows)
                return rows, None, None, None, None, run.event(given, (again.x, rows), again)
            counts = (num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert)
            got, found = self._dispatch_fresh(
                x, counts, topk_idx, topk_weights, expert_alignment, num_worst_tokens, used
            )
            return (*found, run.event(given, (got.x, found), got))

    def _dispatch_again(
        self, x: Payload, handle: V1Handle, topk_idx: object, topk_weights: object, config: Config
    ) -> Dispatched:
        known = self._known(handle)
        if topk_idx is not None or topk_weights is not None:
            error = InvalidArgument("topk_idx and topk_weights must be None beside a handle, which has the routing")
            known.room.core.refuse(error)
            raise error
        return known.room.core.dispatch(x, handle=known.handle, num_sms=known.room.num_sms(config.num_sms))

    def _dispatch_fresh(
        self,
        x: Payload,
        counts: _Counts,
        topk_idx: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        expert_alignment: int,
        num_worst_tokens: int,
        config: Config,
    ) -> tuple[Dispatched, tuple[Payload, torch.Tensor | None, torch.Tensor | None, list[int], V1Handle]]:
        pool = self._pool()
        is_blind = num_worst_tokens > 0 and pool.is_gpu(device_of(x))  # then the host waits for nobody
        try:
            routing = None if topk_idx is None else int64_routing(topk_idx)
            wish = self._wish(x, counts, routing, topk_weights, num_worst_tokens)
        except Exception as error:
            if is_blind:
                pool.refuse(error)
            else:
                pool.refuse_wish(error)
            raise
        _, is_token_in_rank, per_expert = counts
        assert is_token_in_rank is not None
        assert per_expert is not None
        wishes = [wish] if is_blind else pool.agree(wish)
        device = values_of(x).device
        room = pool.room(Need.unasked(wish, device) if is_blind else Need.of(wishes, device))
        local_counts = None if routing is not None else self._local_counts(per_expert, expert_alignment)
        mask = is_token_in_rank if routing is None else None
        got = room.core.dispatch(
            x,
            routing,
            topk_weights,
            is_token_in_rank=mask,
            expert_alignment=expert_alignment,
            num_sms=room.num_sms(config.num_sms),
            sync=not is_blind,
        )
        num_rows = num_worst_tokens or got.handle.num_recv
        handle = self._tuple(got.handle, wishes, is_token_in_rank, num_rows, config)
        self._handles.remember(handle, _KnownV1Handle(room, got.handle, num_rows))
        recv_idx, recv_weights = got.topk_idx, got.topk_weights
        if recv_idx is not None and topk_idx is not None:
            recv_idx = filled_up(recv_idx, num_rows, -1).to(topk_idx.dtype)
        if recv_weights is not None:
            recv_weights = filled_up(recv_weights, num_rows, 0)
        listed = got.num_tokens_per_expert if local_counts is None else local_counts
        recv_x = payload_filled_up(got.x, num_rows)
        return got, (recv_x, recv_idx, recv_weights, [] if num_worst_tokens else listed, handle)

    def combine(
        self,
        x: torch.Tensor,
        handle: V1Handle,
        topk_weights: torch.Tensor | None = None,
        bias: Bias = None,
        config: Config | None = None,
        previous_event: Event | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Bring rows back to their tokens and sum them, unweighted. Collective.

        Args:
            x: `[num_recv, hidden]`, a row for each row of the dispatch.
            handle: of the dispatch.
            topk_weights: `[num_recv, num_topk]` float32, summed over the ranks as well.
            bias: one or two `[num_tokens, hidden]`; the sum starts from them.
            config: its `num_sms` is used on GPUs.
            previous_event: waited for first.
            async_finish: return an event.
            allocate_on_comm_stream: ignored, see `get_dispatch_layout`.

        Returns:
            `combined_x [num_tokens, hidden]`, `combined_topk_weights [num_tokens, num_topk]` or None, event.
        """
        known = self._known(handle)
        num_recv = known.handle.num_recv
        rows: Any = cut(x, num_recv, known.num_rows)
        weights: Any = cut(topk_weights, num_recv, known.num_rows)
        with self._run(device_of(x), async_finish, previous_event) as run:
            got = known.room.core.combine(
                rows,
                known.handle if bias is None else known.handle.in_order(_ORDER),
                topk_weights=weights,
                bias=as_bias(bias),
                num_sms=None if config is None else known.room.num_sms(config.num_sms),
            )
            return got.x, got.topk_weights, run.event((x, topk_weights, bias), (got.x, got.topk_weights))

    def _known(self, handle: object) -> _KnownV1Handle:
        """Return what stands behind a handle; a refusal reaches the peers through the newest room."""
        pool = self._pool()
        try:
            return self._handles.facts(handle)
        except InvalidArgument as error:
            pool.refuse(error)
            raise

    def _wish(
        self,
        x: Payload,
        counts: _Counts,
        routing: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        num_worst_tokens: int,
    ) -> Wish:
        """Check what the other ranks are about to hear."""
        values = values_of(x)
        per_rank, is_token_in_rank, per_expert = counts
        if per_rank is None or is_token_in_rank is None or per_expert is None:
            raise InvalidArgument(
                "dispatch needs num_tokens_per_rank, is_token_in_rank and num_tokens_per_expert: give those of "
                "get_dispatch_layout, or a handle"
            )
        if (routing is None) != (topk_weights is None):
            raise InvalidArgument("topk_idx and topk_weights must be given both or neither")
        if num_worst_tokens < 0 or (num_worst_tokens and routing is None):
            raise InvalidArgument(
                f"num_worst_tokens must be at least 0 and needs topk_idx and topk_weights, got {num_worst_tokens}"
            )
        num_experts = per_expert.numel()
        if num_experts < 1 or num_experts % self.group_size:
            raise InvalidArgument(
                f"num_tokens_per_expert must have a multiple of {self.group_size} entries, got {num_experts}"
            )
        if is_token_in_rank.shape != (len(values), self.group_size) or is_token_in_rank.dtype != torch.bool:
            raise InvalidArgument(
                f"is_token_in_rank must be bool [{len(values)}, {self.group_size}], "
                f"got {is_token_in_rank.dtype} {list(is_token_in_rank.shape)}"
            )
        is_gpu = self._pool().is_gpu(values.device)
        if routing is not None and not is_gpu:
            check_topk_idx(routing, num_experts)
            wanted = dispatch_layout(routing, self.group_size, num_experts).is_token_in_rank
            if not torch.equal(is_token_in_rank, wanted):
                raise InvalidArgument(
                    "is_token_in_rank must say where topk_idx goes; take it from get_dispatch_layout(topk_idx), or "
                    "leave topk_idx out to route by is_token_in_rank alone"
                )
        return Wish(
            hidden=values.shape[1],
            dtype=values.dtype,
            num_topk=0 if routing is None else routing.shape[1],
            num_experts=num_experts,
            num_worst_tokens=num_worst_tokens,
            num_tokens=len(values),
            num_sent=tuple([0] * self.group_size if is_gpu and num_worst_tokens else is_token_in_rank.sum(0).tolist()),
        )

    def _local_counts(self, num_tokens_per_expert: torch.Tensor, expert_alignment: int) -> list[int]:
        """Return the tokens of each local expert as all ranks counted them (routing without experts)."""
        total = self._pool().sum_counts(num_tokens_per_expert)
        local = total.view(self.group_size, -1)[self.rank].tolist()
        return [align_up(count, expert_alignment) for count in local]

    def _tuple(
        self, handle: Handle, wishes: list[Wish], is_token_in_rank: torch.Tensor, num_rows: int, config: Config
    ) -> V1Handle:
        """Return DeepEP's handle; without CPU sync as if all ranks had as many tokens as this one."""
        src_token = handle.src_token
        num_channels = config.num_channels
        rank_prefix = None if handle.is_exact else handle.received_up_to
        if rank_prefix is not None:
            channels = recv_channel_prefix_matrix_on_device(
                src_token, rank_prefix[:, self.rank].contiguous(), wishes[0].num_tokens, num_channels
            )
            return (
                rank_prefix,
                channel_prefix_matrix(is_token_in_rank, num_channels),
                channels,
                src_token.to(torch.int32),
                is_token_in_rank,
                send_head(is_token_in_rank, num_channels),
            )
        num_sent = [wish.num_sent for wish in wishes]
        num_tokens = [wish.num_tokens for wish in wishes]
        num_received = [row[self.rank] for row in num_sent]
        return (
            rank_prefix_matrix(num_sent, src_token.device),
            channel_prefix_matrix(is_token_in_rank, num_channels),
            recv_channel_prefix_matrix(src_token, num_received, num_tokens, num_channels),
            filled_up(src_token.to(torch.int32), num_rows, -1),
            is_token_in_rank,
            send_head(is_token_in_rank, num_channels),
        )

    # ---- what does not exist here

    internode_dispatch = low_latency.internode_dispatch
    internode_combine = low_latency.internode_combine
    get_local_buffer_tensor = low_latency.get_local_buffer_tensor
