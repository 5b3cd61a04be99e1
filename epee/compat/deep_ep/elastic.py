"""DeepEP V2's `ElasticBuffer` on epee `Buffer`s: same calls, same tuples, V2's order of additions.

Data path: the pool (`epee.ep.BufferPool`) finds or creates an epee buffer of the call's shape (one for plain, one for
expanded dispatches), that buffer moves and sums the rows. All ranks must give the same `num_max_tokens_per_rank`, as in
DeepEP, so no exchange is needed to agree on the room.

Without CPU sync results have the worst-case number of rows: zeros, and ids of -1, after those that arrived.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from epee.compat.deep_ep import sizing
from epee.compat.deep_ep.domain import get_physical_domain_size, logical_domain_size
from epee.compat.deep_ep.ep_handle import EPHandle, HandleForm
from epee.compat.deep_ep.event import Event, EventHandle, EventOverlap, no_event
from epee.compat.deep_ep.experimental import Experimental
from epee.compat.deep_ep.shared.owner import GPU_AT_ONCE, Running
from epee.compat.deep_ep.shared.rows import (
    as_bias,
    check_counters,
    column_major,
    cut,
    device_of,
    filled_up,
    has_memory,
    int64_routing,
    padded,
    parts_of,
    payload_filled_up,
    values_of,
)
from epee.ep import (
    NO_FACTS,
    BufferPool,
    Combined,
    CombineOrder,
    Dispatched,
    Need,
    Payload,
    Room,
    checked_topk,
    group_of,
    is_capturing,
)
from epee.errors import InvalidArgument, InvalidState, expected
from epee.untraced import untraced_methods
from epee.values import is_whole, shown

MAX_EXPERTS, MAX_TOKENS = 1 << 20, 1 << 24  # far above use, so that sizes made of them cannot overflow
_DEFAULT_SMS = 24
_SIZES = {int, type(None)}  # their types
_EXPANDED_ORDER = CombineOrder(by="last_k", bias_first=True, round_partials=True)
_SINGLE_ORDER = CombineOrder(by="k", bias_first=True)
_LANE_ORDERS = CombineOrder(by="last_k"), CombineOrder(by="last_k", bias_first=True)  # without bias, and with one
_Given: TypeAlias = tuple[Payload, "torch.Tensor | None", "torch.Tensor | None"]  # rows, topk_idx, topk_weights
Bias: TypeAlias = "torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None"


@dataclass  # not frozen: one is made in each call, and setting the fields of a frozen one is slow
class _Options:
    """The options of a fresh dispatch, besides its tensors."""

    num_experts: int | None
    num_max_tokens_per_rank: int | None
    expert_alignment: int | None
    num_sms: int
    do_handle_copy: bool
    do_cpu_sync: bool | None
    do_expand: bool


@untraced_methods
class ElasticBuffer(Experimental):
    """DeepEP V2's buffer; with CPU tensors over several hosts as well, of equally many ranks numbered consecutively.

    Args:
        group: of the ranks, any backend.
        num_bytes: of memory on the current GPU, which the constructor allocates on all ranks together; nothing on CPUs.
            Calls that need more allocate more. None: the need of calls of the sizes below, if those are given.
        num_max_tokens_per_rank, hidden, num_topk: of later calls; a call may use others.
        deterministic: True or not, rows and sums always are.
        allow_hybrid_mode: over several hosts: scale-out ranks are the hosts, scale-up ranks those of a host; else all
            ranks are scale-up ranks. A token crosses the network once per host either way.
        allow_multiple_reduction: whether an expanded combine rounds each rank's partial sum to the payload's dtype;
            over several hosts whether any combine rounds each host's.
        prefer_overlap_with_compute: only changes `get_theoretical_num_sms`.
        num_cpu_timeout_secs: how long a call waits for a silent peer.
        explicitly_destroy: `destroy` may be called; else the memory is freed with the object.
        num_cpu_bytes, use_fp8_dispatch, sl_idx, num_allocated_qps, num_gpu_timeout_secs: accepted and ignored.

    Raises:
        UnsupportedError: hosts have different numbers of ranks, or ranks of a host are not consecutive.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
    ) -> None:
        self.group = group_of(group)
        self.rank_idx = self.group.rank()
        self.num_ranks = self.group.size()
        self.allow_hybrid_mode = allow_hybrid_mode
        self.allow_multiple_reduction = allow_multiple_reduction
        self.prefer_overlap_with_compute = prefer_overlap_with_compute
        self.deterministic = deterministic
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.num_allocated_qps = num_allocated_qps
        self.num_rdma_ranks, self.num_nvlink_ranks = get_physical_domain_size(self.group)
        physical = self.num_rdma_ranks, self.num_nvlink_ranks
        self.num_scaleout_ranks, self.num_scaleup_ranks = logical_domain_size(physical, allow_hybrid_mode)
        self.scaleout_rank_idx, self.scaleup_rank_idx = divmod(self.rank_idx, self.num_scaleup_ranks)
        self.explicitly_destroy = explicitly_destroy
        self.nccl_comm_handle = None
        if num_bytes is None:
            num_bytes = 0
            if num_max_tokens_per_rank and hidden:
                num_bytes = sizing.buffer_bytes(self.num_ranks, num_max_tokens_per_rank, hidden, num_topk)
        self.num_bytes = num_bytes
        sizes = self.num_ranks, num_max_tokens_per_rank, hidden, num_topk
        memory = sizing.memory_of(num_bytes, *sizes)
        self.runtime: BufferPool | None = BufferPool(
            self.group, float(num_cpu_timeout_secs), memory, wide_partials=not allow_multiple_reduction
        )

    @staticmethod
    def get_buffer_size_hint(
        group: dist.ProcessGroup | None,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        """Return the bytes of GPU memory for such calls, expanded ones if `num_topk` is given."""
        return sizing.buffer_bytes(group_of(group).size(), num_max_tokens_per_rank, hidden, num_topk)

    def barrier(self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True) -> None:
        """Synchronise all ranks' streams: work after it begins when all ranks' work before it is done. Collective.

        On GPUs one kernel on the current stream, after all calls of this buffer; it can be recorded in a graph. Before
        the first call on CUDA tensors, and on CPUs, the ranks synchronise on the cpu, after the work of their current
        streams.

        Args:
            use_comm_stream, sequential: ignored.
            with_cpu_sync: make the cpu wait for it as well, and raise its failures.
        """
        pool = self._pool()
        if with_cpu_sync:
            _refuse_in_graph()
        if not pool.barrier():
            _refuse_in_graph()
            EventHandle().synchronize()
            pool.cpu_barrier()
        elif with_cpu_sync:
            EventHandle().synchronize()
            pool.check()

    @staticmethod
    def capture() -> EventHandle:
        """Return an event after the work on the current stream."""
        return EventHandle()

    def get_physical_domain_size(self) -> tuple[int, int]:
        """Return (RDMA ranks, NVLink ranks)."""
        return self.num_rdma_ranks, self.num_nvlink_ranks

    def get_logical_domain_size(self) -> tuple[int, int]:
        """Return (scale-out ranks, scale-up ranks)."""
        return self.num_scaleout_ranks, self.num_scaleup_ranks

    def get_theoretical_num_sms(
        self,
        num_experts: int,
        num_topk: int,
        num_scaleout_topk: int = 0,
        rdma_gbs: float = 0,
        nvlink_gbs: float = 0,
        sm_read_gbs: float = 200,
        sm_write_gbs: float = 50,
    ) -> int:
        """Return the SMs for such a dispatch by DeepEP's model; `num_scaleout_topk` and `rdma_gbs` are ignored."""
        return sizing.theoretical_num_sms(
            self.num_ranks,
            num_experts,
            num_topk,
            nvlink_gbs,
            (sm_read_gbs, sm_write_gbs),
            self.prefer_overlap_with_compute,
        )

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """Return 0: there are no queue pairs."""
        return 0

    def dispatch(
        self,
        x: Payload,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Event | None = None,
        previous_event_before_epilogue: Event | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> tuple[Payload, torch.Tensor | None, torch.Tensor | None, EPHandle, EventOverlap]:
        """Send each token to the ranks of its experts. Collective.

        Args:
            x: `[num_tokens, hidden]`, or a pair (values, scales).
            topk_idx: `[num_tokens, num_topk]` int64, -1 for none; not given with `handle`.
            topk_weights: `[num_tokens, num_topk]` float32.
            cumulative_local_expert_recv_stats: `[num_local_experts]` int32; the received counts are added to it.
            num_experts: over all ranks; needed unless `handle` has it.
            num_max_tokens_per_rank: equal on all ranks; the constructor's by default.
            expert_alignment: counts (and, expanded, blocks of rows) are rounded up to it; 1 by default.
            previous_event, previous_event_before_epilogue: waited for first.
            async_with_compute_stream: run on the communication stream and return an event.
            handle: of an earlier dispatch, whose routing is used.
            do_handle_copy: keep a copy of `topk_idx`; else the tensor itself, which must then not change.
            do_cpu_sync: False gives results of the worst-case size; on GPUs (where None means False while a graph is
                recorded) the cpu then waits for no rank.
            do_expand: a row for each (local expert, token), grouped by expert.
            use_tma_aligned_col_major_sf: scales with strides `(1, rows rounded up to 4)`.
            num_sms: kept in the handle; used on GPUs, 0 for the default.
            num_qps, allocate_on_comm_stream, do_zero_padding: ignored; padding is always zero.

        Returns:
            `recv_x`, `recv_topk_idx` (None when expanded), `recv_topk_weights`, handle, event.
        """
        options = _Options(
            num_experts, num_max_tokens_per_rank, expert_alignment, num_sms, do_handle_copy, do_cpu_sync, do_expand
        )
        stats = cumulative_local_expert_recv_stats
        waits = (previous_event, previous_event_before_epilogue)
        with self._run(device_of(x), async_with_compute_stream, *waits) as run:
            if handle is not None:
                got = self._dispatch_again((x, topk_idx, topk_weights), handle, stats is not None, options)
            else:
                if stats is not None:
                    self._check_stats(stats, num_experts, device_of(x))
                got, handle = self._dispatch_fresh((x, topk_idx, topk_weights), options, run)
                if stats is not None:
                    stats += handle.num_unaligned_recv_tokens_per_expert
            num_rows = handle.num_rows
            recv_x = payload_filled_up(got.x, num_rows)
            if use_tma_aligned_col_major_sf and isinstance(recv_x, tuple):
                recv_x = recv_x[0], column_major(recv_x[1])
            recv_idx = None if options.do_expand else filled_up(got.topk_idx, num_rows, -1)
            recv_weights = None if topk_weights is None else filled_up(got.topk_weights, num_rows, 0)
            if run is GPU_AT_ONCE:
                return recv_x, recv_idx, recv_weights, handle, no_event()
            kept = handle.core.tensors
            filled = () if recv_x is got.x else parts_of(recv_x)
            results = (*parts_of(got.x), *filled, recv_idx, recv_weights, handle.given_idx, *kept)
            event = run.event((*parts_of(x), topk_idx, topk_weights, stats, *kept), results, got)
        return recv_x, recv_idx, recv_weights, handle, event

    def combine(
        self,
        x: torch.Tensor,
        handle: EPHandle,
        topk_weights: torch.Tensor | None = None,
        bias: Bias = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Event | None = None,
        previous_event_before_epilogue: Event | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Send rows back to their tokens and sum them, unweighted, in V2's order (over hosts, by host). Collective.

        Args:
            x: a row for each row of the dispatch; of one without CPU sync at least the received rows, so a program may
                cut its results to their number (on GPUs the cpu then waits for the dispatch).
            handle: of the dispatch.
            topk_weights: `[num_recv, num_topk]` float32 (only those of local experts count) or, expanded, `[rows]`; as
                many rows as `x`.
            bias: one or two `[num_tokens, hidden]`; the sum starts from them (over several hosts they are added last).
            previous_event, previous_event_before_epilogue: waited for first.
            async_with_compute_stream: run on the communication stream and return an event.
            num_sms: used on GPUs, 0 for the default.
            num_qps, allocate_on_comm_stream: ignored.

        Returns:
            `combined_x [num_tokens, hidden]`, `combined_topk_weights [num_tokens, num_topk]` or None, event.
        """
        known = self._check_handle(handle)
        waits = (previous_event, previous_event_before_epilogue)
        with self._run(device_of(x), async_with_compute_stream, *waits) as run:
            got = self._combine(x, known, topk_weights, bias, num_sms)
            if run is GPU_AT_ONCE:
                return got.x, got.topk_weights, no_event()
            given = (x, topk_weights, *parts_of(bias), known.given_idx, *known.core.tensors)
            return got.x, got.topk_weights, run.event(given, (got.x, got.topk_weights))

    def _combine(
        self, x: torch.Tensor, known: EPHandle, topk_weights: torch.Tensor | None, bias: Bias, num_sms: int
    ) -> Combined:
        core = known.core
        num_recv, num_rows = core.num_recv, known.num_rows
        rows: Any = cut(x, num_recv, num_rows)
        weights: Any = None if topk_weights is None else cut(topk_weights, num_recv, num_rows)
        if known.do_expand and core.is_exact and not known.do_cpu_sync:  # the program may have cut off the padding
            rows, weights = (padded(given, core.num_read_rows, num_recv) for given in (rows, weights))
        if known.do_expand and self.num_rdma_ranks == 1:
            core = known.in_order(_EXPANDED_ORDER if self.allow_multiple_reduction else _SINGLE_ORDER)
        elif not known.do_expand:
            if self.num_rdma_ranks == 1:
                core = known.in_order(_LANE_ORDERS[bias is not None])
            if weights is not None and has_memory(weights) and weights.device == device_of(x):
                local = known.core.peek_topk_idx()
                if local is not None and weights.shape[1:] == local.shape[1:] and weights.shape[0] <= len(local):
                    weights = weights.masked_fill(local[: len(weights)] < 0, 0)
        known.room.enter()
        return known.room.core.combine(
            rows,
            core,
            topk_weights=weights,
            bias=None if bias is None else as_bias(bias),
            num_sms=known.room.num_sms(num_sms),
        )

    def _check_handle(self, handle: object) -> EPHandle:
        pool = self._pool()
        if isinstance(handle, EPHandle):
            return handle
        error = InvalidArgument(f"handle must be the EPHandle of a dispatch, got {type(handle).__name__}")
        pool.refuse(error)
        raise error

    def _check_stats(self, stats: object, num_experts: object, device: torch.device) -> None:
        """Check that counts can be added to `stats`; a refusal is sent to the peers."""
        num_local = num_experts // self.num_ranks if isinstance(num_experts, int) else None
        try:
            check_counters("cumulative_local_expert_recv_stats", stats, num_local, device)
        except expected(InvalidArgument) as error:
            self._pool().refuse_first(error)
            raise

    def _dispatch_fresh(self, given: _Given, options: _Options, run: Running) -> tuple[Dispatched, EPHandle]:
        """Dispatch with routing, in a room found by the call's cache key, or else by its sizes."""
        x, topk_idx, topk_weights = given
        key = like = None
        if run.is_gpu:
            asked, pool = self._asked(options), self._pool()
            like = None if asked is None else pool.latest(asked, x, topk_idx, topk_weights)
            if like is None:
                key = None if asked is None else _key(x, topk_idx, topk_weights, asked)
                like = None if key is None else pool.recall(key)
        if like is not None:
            assert topk_idx is not None
            assert topk_weights is not None
            got = like.dispatch(x, topk_idx, topk_weights)
            if got is not None:
                kept = None if options.do_handle_copy else topk_idx  # the kernels have a copy
                return got, self._handle(like.room, got, kept, like.extra)
        return self._dispatch_sized(given, options, key)

    def _dispatch_sized(self, given: _Given, options: _Options, key: object) -> tuple[Dispatched, EPHandle]:
        """Dispatch in the room for the call's sizes; cache it under `key`, if there is one."""
        x, topk_idx, topk_weights = given
        pool = self._pool()
        try:
            values, routing = values_of(x), int64_routing(topk_idx)
            num_max, num_experts = self._sizes(options)
            alignment = 1 if options.expert_alignment is None else options.expert_alignment
            num_tokens = len(values)
            if num_tokens > num_max:
                raise InvalidArgument(
                    f"x must have at most num_max_tokens_per_rank={num_max} rows, got {num_tokens}; "
                    "raise it on all ranks"
                )
        except expected(Exception) as error:
            pool.refuse_first(error)
            raise
        how = "expert" if options.do_expand else "rank", alignment
        do_cpu_sync = options.do_cpu_sync is not False
        is_gpu = pool.is_gpu(values.device)
        if is_gpu and options.do_cpu_sync is None and is_capturing():
            do_cpu_sync, key = False, None  # calls outside of graphs differ
        room = pool.room(need_of(pool, values, routing.shape[1], num_experts, num_max, how[0]))
        num_sms, is_exact = room.num_sms(options.num_sms), do_cpu_sync or not is_gpu
        got = room.core.dispatch(
            x, routing, topk_weights, layout=how[0], expert_alignment=alignment, num_sms=num_sms, sync=is_exact
        )
        sms, num_scaleup = options.num_sms or _DEFAULT_SMS, self.num_scaleup_ranks
        form = HandleForm(options.do_expand, num_experts, alignment, num_max, sms, do_cpu_sync, num_scaleup)
        if key is not None and topk_weights is not None:
            looks = self._asked(options), (x, routing, topk_weights)
            pool.remember(key, room, (x, routing, topk_weights), (how, num_sms, is_exact), form, looks)
        kept = routing.clone() if options.do_handle_copy and routing is topk_idx else routing
        return got, self._handle(room, got, kept, form)

    def _handle(self, room: Room, got: Dispatched, topk_idx: torch.Tensor | None, form: HandleForm) -> EPHandle:
        """Return the handle of a dispatch of a form; `topk_idx` None: it is copied from the kernels' copy on demand."""
        listed = got.num_tokens_per_expert if form.do_cpu_sync else []
        return EPHandle(*form, room, got.handle.unweighted(), listed, topk_idx)

    def _asked(self, options: _Options) -> object:
        """Return the cache key of options; None if only the checks can determine it."""
        num_experts, num_max = options.num_experts, options.num_max_tokens_per_rank
        sizes = num_experts, num_max, self.num_max_tokens_per_rank, options.expert_alignment, options.num_sms
        if not _SIZES.issuperset(map(type, sizes)):
            return None
        return sizes, bool(options.do_expand), options.do_cpu_sync is not False

    def _sizes(self, options: _Options) -> tuple[int, int]:
        """Return num_max_tokens_per_rank and num_experts."""
        num_max, num_experts = options.num_max_tokens_per_rank or self.num_max_tokens_per_rank, options.num_experts
        if not is_whole(num_max, 1, MAX_TOKENS):
            raise InvalidArgument(
                f"num_max_tokens_per_rank must be given, to the buffer or to dispatch, as a number up to {MAX_TOKENS}, "
                f"got {shown(num_max)}"
            )
        if num_experts is None or not is_whole(num_experts, 1, MAX_EXPERTS) or num_experts % self.num_ranks:
            raise InvalidArgument(
                f"num_experts must be given and a multiple of {self.num_ranks} ranks, got {shown(num_experts)}"
            )
        return num_max, num_experts

    def _dispatch_again(self, given: _Given, handle: EPHandle, has_stats: bool, options: _Options) -> Dispatched:
        x, topk_idx, topk_weights = given
        known = self._check_handle(handle)
        wrong = [
            f"{name} must be left out or {getattr(known, name)} as in the handle's dispatch"
            for name in ("num_experts", "num_max_tokens_per_rank", "expert_alignment")
            if getattr(options, name) not in (None, getattr(known, name))
        ]
        if topk_idx is not None or has_stats:
            wrong.append("topk_idx and cumulative_local_expert_recv_stats must be None, the handle has the routing")
        if options.do_cpu_sync:
            wrong.append("do_cpu_sync must not be True, there are no counts to wait for")
        if options.do_expand and not known.do_expand:
            wrong.append("do_expand must be that of the handle's dispatch")
        if wrong:
            error = InvalidArgument("dispatch with a handle: " + "; ".join(wrong))
            known.room.refuse(error)
            raise error
        known.room.enter()
        sms = known.room.num_sms(options.num_sms)
        return known.room.core.dispatch(x, topk_weights=topk_weights, handle=known.core, num_sms=sms)


def need_of(pool: BufferPool, values: torch.Tensor, num_topk: int, num_experts: int, num_max: int, layout: str) -> Need:
    """Return the needs of a dispatch of `values`, rows of whatever layout, when a rank has `num_max` tokens at most."""
    is_gpu = pool.is_gpu(values.device)
    num_rows = pool.group.size() * num_max if is_gpu else 0
    kind = "both" if is_gpu else layout  # separate rooms for the layouts would take memory on GPUs
    return Need(kind, num_experts, values.shape[1], num_topk, num_max, values.dtype, values.device, num_rows)


def _key(x: Payload, topk_idx: torch.Tensor | None, topk_weights: torch.Tensor | None, asked: object) -> object:
    """Return the cache key of a dispatch; None if only the checks can determine it."""
    try:
        checked = checked_topk(x, topk_idx, topk_weights)
    except expected(*NO_FACTS):
        return None
    return (checked, asked) if topk_idx is not None and topk_idx.dtype is torch.int64 else None


def _refuse_in_graph() -> None:
    if is_capturing():
        raise InvalidState(
            "while a CUDA graph is recorded the CPU cannot wait: leave with_cpu_sync out, and make one call on CUDA "
            "tensors before the first barrier"
        )
