"""DeepEP V1's `Buffer` on an epee `Buffer`: same calls, same tuples, same order of rows.

Data path: the pool (`epee.ep.BufferPool`) sends the sizes of the call to all ranks and finds or creates an epee buffer
for them, that buffer moves the rows; this module converts arguments and results. The handle is DeepEP's tuple of six
tensors, over hosts of ten, made when they are read (`v1/handle.py`); it refers to the epee handle (`KnownHandles`).
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from epee.compat.deep_ep import low_latency
from epee.compat.deep_ep.config import Config, check_config, combine_config, dispatch_config
from epee.compat.deep_ep.event import Event, EventHandle, EventOverlap, after, cuda_event_of, no_event
from epee.compat.deep_ep.low_latency import LowLatency, unsupported
from epee.compat.deep_ep.shared import internode
from epee.compat.deep_ep.shared.host_layout import num_tokens_per_host
from epee.compat.deep_ep.shared.known import KnownHandles
from epee.compat.deep_ep.shared.owner import GPU_AT_ONCE, PoolOwner, advise
from epee.compat.deep_ep.shared.rows import (
    as_bias,
    cut,
    device_of,
    filled_up,
    parts_of,
    payload_filled_up,
)
from epee.compat.deep_ep.v1.dispatch import FreshDispatches
from epee.compat.deep_ep.v1.handle import V1Handle, num_entries
from epee.ep import (
    BufferPool,
    CombineOrder,
    Dispatched,
    MemoryBytes,
    NoRoomError,
    Payload,
    Room,
    check_topk_idx,
    count_layout,
    group_of,
    load_counter,
)
from epee.errors import InvalidArgument, expected
from epee.untraced import untraced_methods
from epee.values import is_whole, shown

_ORDER = CombineOrder(by="rank", bias_first=True)  # DeepEP V1: the biases, then the ranks ascending, one rounding
V1Tuple: TypeAlias = tuple[torch.Tensor, ...]
# Rows, local ids, weights, tokens per local expert, handle, event.
V1Dispatched: TypeAlias = (
    "tuple[Payload, torch.Tensor | None, torch.Tensor | None, list[int] | None, V1Tuple | None, EventOverlap]"
)
Bias: TypeAlias = "torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None"


_log = logging.getLogger(__name__)
_default_config = cache(dispatch_config)


@cache  # once
def _say_one_host(name: str) -> None:
    _log.warning("%s=True changes nothing: GPUs lend each other memory within one host, by NVLink or PCIe", name)


def _to_length(
    rows: Payload, recv_idx: torch.Tensor | None, recv_weights: torch.Tensor | None, num_rows: int
) -> tuple[Payload, torch.Tensor | None, torch.Tensor | None]:
    """Return results of a dispatch with this many rows."""
    return payload_filled_up(rows, num_rows), filled_up(recv_idx, num_rows, -1), filled_up(recv_weights, num_rows, 0)


@untraced_methods
class Buffer(LowLatency, PoolOwner):
    """DeepEP V1's buffer, normal and low-latency calls; with CPU tensors over several hosts as well.

    Args:
        group: of the ranks, any backend (gloo is enough).
        num_nvl_bytes: of memory for normal calls, which all ranks allocate now on the current GPU; calls of all sizes
            that fit are made there. Nothing without a GPU, where memory is address space.
        num_rdma_bytes: the same for low-latency calls, with `low_latency_mode`, on CPUs as well.
        low_latency_mode: allocate `num_rdma_bytes` now; low-latency calls work either way.
        num_qps_per_rank, allow_nvlink_for_low_latency_mode: accepted and ignored.
        allow_mnnvl, use_fabric: accepted; True logs, once, that memory is lent within one host.
        explicitly_destroy: `destroy` may be called; else the memory is freed with the object.
        enable_shrink: low-latency calls mask a rank that does not arrive, instead of raising.
        comm: must be None.

    Raises:
        UnsupportedError: `comm` is given, or memory is to be allocated on GPUs of several hosts.
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
        use_fabric: bool | None = None,
    ) -> None:
        if comm is not None:
            unsupported("comm", "an MPI communicator cannot make an epee buffer; give a torch process group")
        if allow_mnnvl or use_fabric:
            _say_one_host("allow_mnnvl" if allow_mnnvl else "use_fabric")
        self.group = group_of(group)
        self.rank = self.group.rank()
        self.group_size = self.group.size()
        self.num_nvl_bytes = num_nvl_bytes
        self.num_rdma_bytes = num_rdma_bytes
        self.low_latency_mode = low_latency_mode
        self.explicitly_destroy = explicitly_destroy
        self.enable_shrink = enable_shrink
        latency_bytes = num_rdma_bytes if low_latency_mode else 0
        pool = BufferPool(self.group, memory=MemoryBytes(num_nvl_bytes), latency_bytes=latency_bytes)
        self.runtime: BufferPool | None = pool
        self.hosts = pool.hosts  # the ranks of each host
        self._handles: KnownHandles[V1Handle] = KnownHandles(num_entries(len(pool.hosts)))
        self._fresh = FreshDispatches(pool, self.rank, self.group_size)
        self._init_low_latency(pool)
        load_counter()

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Return True: kernels are compiled for the present GPU."""
        return True

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Set the SMs of default configs, an even number, for all V1 buffers."""
        if not is_whole(new_num_sms, 2, 1 << 16) or new_num_sms % 2:
            raise InvalidArgument(f"new_num_sms must be even and at least 2, got {shown(new_num_sms)}")
        Buffer.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """Return an event after the work on the current stream."""
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
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, EventOverlap]:
        """Count this rank's tokens by destination. Local.

        Args:
            topk_idx: `[num_tokens, num_topk]` int64, -1 for none.
            num_experts: over all ranks.
            previous_event: waited for first.
            async_finish: return an event.
            allocate_on_comm_stream: ignored: with an event, everything is on the communication stream anyway.

        Returns:
            `num_tokens_per_rank [num_ranks]` int32, `num_tokens_per_rdma_rank [num_hosts]` int32 (None on one host),
            `num_tokens_per_expert [num_experts]` int32, `is_token_in_rank [num_tokens, num_ranks]` bool, the event.
        """
        pool = self.runtime or self._pool()
        if not isinstance(topk_idx, torch.Tensor):
            raise InvalidArgument(
                f"topk_idx must be int64 (or int32) [num_tokens, num_topk], got {type(topk_idx).__name__}"
            )
        waits_for = None if previous_event is None else cuda_event_of(previous_event)
        if topk_idx.is_cuda and waits_for is None and not async_finish and len(self.hosts) == 1:
            found = count_layout(topk_idx, self.group_size, num_experts)
            return found.num_tokens_per_rank, None, found.num_tokens_per_expert, found.is_token_in_rank, no_event()
        with pool.call_stream(topk_idx.device, async_finish, waits_for) as call_stream:
            found = count_layout(topk_idx, self.group_size, num_experts)
            if not topk_idx.is_cuda:  # on GPUs the dispatch checks this, without making the cpu wait
                check_topk_idx(topk_idx, num_experts)
            per_host = None if len(self.hosts) == 1 else num_tokens_per_host(found.is_token_in_rank, self.hosts)
            call_stream.keep((topk_idx,), found)
            event = after(async_finish)
        return found.num_tokens_per_rank, per_host, found.num_tokens_per_expert, found.is_token_in_rank, event

    def dispatch(
        self,
        x: Payload,
        handle: V1Tuple | None = None,
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
    ) -> V1Dispatched:
        """Send each token to the ranks of its experts. Collective.

        Args:
            x: `[num_tokens, hidden]`, or an FP8 pair (values, scales).
            handle: of an earlier dispatch, whose routing is used; no routing may be given.
            num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert: of `get_dispatch_layout`.
            num_tokens_per_rdma_rank: ignored, `is_token_in_rank` implies it.
            topk_idx, topk_weights: `[num_tokens, num_topk]` int64 and float32, both or neither.
            expert_alignment: the counts of the list are rounded up to it.
            num_worst_tokens: rows of every result, so that shapes do not depend on routing; 0 for the received number.
                On GPUs the cpu then waits for no rank, so the call can be recorded in a graph.
            config: its `num_sms` gives the channels of the handle's matrices, and is used on GPUs.
            previous_event: waited for first.
            async_finish: return an event.
            allocate_on_comm_stream: ignored, see `get_dispatch_layout`.

        Returns:
            `recv_x`, `recv_topk_idx` (local ids, -1 elsewhere), `recv_topk_weights` (0 elsewhere), tokens per local
            expert (empty with `num_worst_tokens`), handle, event. With `handle`: `recv_x`, four times None, event.
        """
        used = config or _default_config(self.group_size, Buffer.num_sms)
        given = x, (num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert), topk_idx, topk_weights
        options = expert_alignment, num_worst_tokens, used
        may_stand, fresh = True, None
        if not async_finish and (previous_event is None or cuda_event_of(previous_event) is None):
            try:
                if handle is not None:
                    found = self._cached_lately(x, handle, topk_idx, topk_weights, used)
                    if found is not None:
                        return found
                else:
                    if self.runtime is None:
                        self._pool()  # raises
                    fresh = self._fresh.latest(given, options, GPU_AT_ONCE)
            except Exception as error:
                if handle is not None or num_worst_tokens or not isinstance(error, NoRoomError):
                    advise(error)
                    raise
                may_stand = False  # a peer's call does not fit, and all were notified in this call
            if fresh is not None:
                return *self._results(*fresh, topk_idx, num_worst_tokens), no_event()
        with self._run(device_of(x), async_finish, previous_event) as run:
            if handle is not None:
                known = self._known(handle)
                again = self._dispatch_again(x, known, topk_idx, topk_weights, used)
                rows = payload_filled_up(again.x, known.num_rows)
                if run is GPU_AT_ONCE:
                    return rows, None, None, None, None, no_event()
                event = run.event((*parts_of(x), *known.handle.tensors), (*parts_of(again.x), *parts_of(rows)), again)
                return rows, None, None, None, None, event
            fresh = self._fresh.run(given, options, run, may_stand)
            got = fresh[0]
            results = self._results(*fresh, topk_idx, num_worst_tokens)
            if run is GPU_AT_ONCE:
                return *results, no_event()
            inputs = (*parts_of(x), is_token_in_rank, topk_idx, topk_weights)
            filled = () if results[0] is got.x else parts_of(results[0])
            event = run.event(inputs, (*parts_of(got.x), *filled, *results[1:3], *got.handle.tensors), got)
        return *results, event

    def _results(
        self, got: Dispatched, known: V1Handle, listed: list[int], topk_idx: torch.Tensor | None, num_worst_tokens: int
    ) -> tuple[Payload, torch.Tensor | None, torch.Tensor | None, list[int], V1Tuple]:
        """Return the results of a dispatch with routing, without the event."""
        rows, recv_idx, recv_weights = got.x, got.topk_idx, got.topk_weights
        if num_worst_tokens:
            rows, recv_idx, recv_weights = _to_length(rows, recv_idx, recv_weights, num_worst_tokens)
        if topk_idx is None:
            recv_idx = recv_weights = None
        elif topk_idx.dtype is not torch.int64 and recv_idx is not None:
            recv_idx = recv_idx.to(topk_idx.dtype)
        return rows, recv_idx, recv_weights, listed, self._handles.handle(known)

    def _cached_lately(
        self, x: Payload, handle: V1Tuple, topk_idx: object, topk_weights: object, config: Config
    ) -> V1Dispatched | None:
        """Run a dispatch by a handle as an earlier one; None, without any effect, if that is not possible."""
        known = self._known(handle)
        room, again = known.room, known.room.core.again
        if again is None or topk_idx is not None or topk_weights is not None or not isinstance(config, Config):
            return None
        others = None, known.handle, None
        got = again.dispatch(x, None, None, others, "rank", 1, room.num_sms(config.num_sms), True)
        if got is None:
            return None
        rows = got.x
        if known.num_worst_tokens:
            rows = payload_filled_up(rows, known.num_worst_tokens)
        return rows, None, None, None, None, no_event()

    def _dispatch_again(
        self, x: Payload, known: V1Handle, topk_idx: object, topk_weights: object, config: Config
    ) -> Dispatched:
        try:
            check_config(config)
            if topk_idx is not None or topk_weights is not None:
                raise InvalidArgument("topk_idx and topk_weights must be None beside a handle, which has the routing")
        except expected(InvalidArgument) as error:
            known.room.refuse(error)
            raise
        known.room.enter()
        return known.room.core.dispatch(x, handle=known.handle, num_sms=known.room.num_sms(config.num_sms))

    def combine(
        self,
        x: torch.Tensor,
        handle: V1Tuple,
        topk_weights: torch.Tensor | None = None,
        bias: Bias = None,
        config: Config | None = None,
        previous_event: Event | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Send rows back to their tokens and sum them, unweighted. Collective.

        Args:
            x: `[num_recv, hidden]`, a row for each row of the dispatch.
            handle: of the dispatch.
            topk_weights: `[num_recv, num_topk]` float32, summed over the ranks as well.
            bias: one or two `[num_tokens, hidden]`; the sum starts from them (over several hosts they are added last).
            config: its `num_sms` is used on GPUs.
            previous_event: waited for first.
            async_finish: return an event.
            allocate_on_comm_stream: ignored, see `get_dispatch_layout`.

        Returns:
            `combined_x [num_tokens, hidden]`, `combined_topk_weights [num_tokens, num_topk]` or None, event.
        """
        known = self._known(handle)
        is_own_order = bias is None or len(self.hosts) > 1  # over hosts it is the only order
        rows: Any = x
        weights: Any = topk_weights
        if known.num_worst_tokens:
            num_recv = known.handle.num_recv
            rows, weights = cut(x, num_recv, known.num_rows), cut(topk_weights, num_recv, known.num_rows)
        again = known.room.core.again
        num_sms = None if config is None else self._sms_of(config, known.room)
        is_at_once = not async_finish and (previous_event is None or cuda_event_of(previous_event) is None)
        if again is not None and bias is None and is_at_once:
            try:
                found = again.combine(rows, known.handle, weights, num_sms)
            except Exception as error:
                advise(error)
                raise
            if found is not None:
                return found.x, found.topk_weights, no_event()
        with self._run(device_of(x), async_finish, previous_event) as run:
            known.room.enter()
            got = known.room.core.combine(
                rows,
                known.handle if is_own_order else known.handle.in_order(_ORDER),
                topk_weights=weights,
                bias=None if bias is None else as_bias(bias),
                num_sms=num_sms,
            )
            if run is GPU_AT_ONCE:
                return got.x, got.topk_weights, no_event()
            given = (x, topk_weights, *parts_of(bias), *known.handle.tensors)
            return got.x, got.topk_weights, run.event(given, (got.x, got.topk_weights))

    def _sms_of(self, config: Config, room: Room) -> int | None:
        """Return the multiprocessors of a combine; a refusal is sent to the peers."""
        try:
            check_config(config)
        except expected(InvalidArgument) as error:
            room.refuse(error)
            raise
        return room.num_sms(config.num_sms)

    def _known(self, handle: object) -> V1Handle:
        """Return the checked of a handle; a refusal is sent to the peers through the newest room."""
        pool = self.runtime or self._pool()
        try:
            return self._handles.checked(handle)
        except expected(InvalidArgument) as error:
            pool.refuse(error)
            raise

    internode_dispatch = internode.internode_dispatch
    internode_combine = internode.internode_combine

    def get_local_buffer_tensor(
        self, dtype: torch.dtype, size: torch.Size | None = None, offset: int = 0, use_rdma_buffer: bool = False
    ) -> torch.Tensor:
        """Return memory of the buffer's size that no call uses, on the current GPU if there is one. Local.

        Programs clear a buffer through it when a rank was lost. Nothing here needs that, as no call leaves data that a
        later one reads; so it is separate memory, not initialised, and freed with the tensor.

        Args:
            dtype: of the elements.
            size: shape; by default one dimension, from `offset` to the end.
            offset: of the first element.
            use_rdma_buffer: as large as `num_rdma_bytes` instead of `num_nvl_bytes`.

        Raises:
            InvalidArgument: `offset` and `size` reach beyond the buffer.
        """
        self._pool()
        return low_latency.scratch(dtype, self.num_rdma_bytes if use_rdma_buffer else self.num_nvl_bytes, size, offset)
