"""DeepEP 2.5's `EPBuffer`: `ElasticBuffer` with 2.5's arguments, in its order, and results returned by the wait."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
import torch.distributed as dist

from epee.compat.deep_ep.elastic import Bias, ElasticBuffer
from epee.compat.deep_ep.ep_handle import EPHandle
from epee.compat.deep_ep.event import Event
from epee.compat.deep_ep.low_latency import unsupported
from epee.ep import Payload
from epee.errors import InvalidArgument

_BALANCE = "epee moves no expert weights between ranks; place redundant experts yourself"


class EPBuffer(ElasticBuffer):
    """DeepEP 2.5's buffer, on GPUs of one host or CPU tensors of several; programs look for a class of its own.

    Args:
        lb_allocation_plan_or_num_bytes: must be 0: experts are not copied to balance the load.
        group, num_bytes, num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch, deterministic, allow_hybrid_mode,
            allow_multiple_reduction, prefer_overlap_with_compute, sl_idx, num_allocated_qps, num_cpu_timeout_secs,
            num_gpu_timeout_secs, explicitly_destroy: as of `ElasticBuffer`.

    Raises:
        UnsupportedError: `lb_allocation_plan_or_num_bytes` is not 0.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        num_bytes: int | None = None,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        lb_allocation_plan_or_num_bytes: Any = 0,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int | None = None,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
    ) -> None:
        if lb_allocation_plan_or_num_bytes:
            unsupported("lb_allocation_plan_or_num_bytes", _BALANCE)
        super().__init__(
            group,
            num_bytes,
            num_max_tokens_per_rank=num_max_tokens_per_rank,
            hidden=hidden,
            num_topk=num_topk,
            use_fp8_dispatch=use_fp8_dispatch,
            deterministic=deterministic,
            allow_hybrid_mode=allow_hybrid_mode,
            allow_multiple_reduction=allow_multiple_reduction,
            prefer_overlap_with_compute=prefer_overlap_with_compute,
            num_allocated_qps=num_allocated_qps,
            num_cpu_timeout_secs=num_cpu_timeout_secs,
            num_gpu_timeout_secs=num_gpu_timeout_secs,
            explicitly_destroy=explicitly_destroy,
        )

    def dispatch(  # type: ignore[override]
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
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = False,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
        defer_epilogue: bool = False,
    ) -> Any:
        """Send each token to the ranks of its experts. Collective.

        Args:
            defer_epilogue: return the event alone, whose `current_stream_wait()` returns the four results; needs
                `async_with_compute_stream`. The call waits for its counts all the same.
            x, topk_idx, topk_weights, cumulative_local_expert_recv_stats, num_experts, num_max_tokens_per_rank,
                expert_alignment, num_sms, num_qps, previous_event, async_with_compute_stream, allocate_on_comm_stream,
                handle, do_handle_copy, do_cpu_sync, do_expand, do_zero_padding, use_tma_aligned_col_major_sf: as of
                `ElasticBuffer.dispatch`; but `do_handle_copy` is False unless it is given.

        Returns:
            As `ElasticBuffer.dispatch`, or the event.
        """
        _check_deferred(defer_epilogue, async_with_compute_stream)
        *results, event = super().dispatch(
            x,
            topk_idx,
            topk_weights,
            cumulative_local_expert_recv_stats,
            num_experts,
            num_max_tokens_per_rank,
            expert_alignment,
            num_sms,
            num_qps,
            previous_event,
            None,
            async_with_compute_stream,
            allocate_on_comm_stream,
            handle,
            do_handle_copy,
            do_cpu_sync,
            do_expand,
            do_zero_padding,
            use_tma_aligned_col_major_sf,
        )
        if not defer_epilogue:
            return *results, event
        event.register_hook_after_wait(lambda: tuple(results))
        return event

    def combine(  # type: ignore[override]
        self,
        x: torch.Tensor,
        handle: EPHandle,
        topk_weights: torch.Tensor | None = None,
        bias: Bias = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Event | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        defer_epilogue: bool = False,
    ) -> Any:
        """Send rows back to their tokens and sum them, unweighted, in V2's order. Collective.

        Args:
            defer_epilogue: return the event alone, whose `current_stream_wait()` returns the two results; needs
                `async_with_compute_stream`.
            x, handle, topk_weights, bias, num_sms, num_qps, previous_event, async_with_compute_stream,
                allocate_on_comm_stream: as of `ElasticBuffer.combine`.

        Returns:
            As `ElasticBuffer.combine`, or the event.
        """
        _check_deferred(defer_epilogue, async_with_compute_stream)
        *results, event = super().combine(
            x,
            handle,
            topk_weights,
            bias,
            num_sms,
            num_qps,
            previous_event,
            None,
            async_with_compute_stream,
            allocate_on_comm_stream,
        )
        if not defer_epilogue:
            return *results, event
        event.register_hook_after_wait(lambda: tuple(results))
        return event

    def lb_get_theoretical_num_sms(self) -> NoReturn:
        """Raise `UnsupportedError`: experts are not copied to balance the load."""
        unsupported("lb_get_theoretical_num_sms", _BALANCE)

    def lb_prefetch_weights(
        self,
        redundant_expert_weights: Any,
        expert_weights: Any,
        redundancy_mapping: torch.Tensor,
        num_sms: int = 0,
        previous_event: Event | None = None,
    ) -> NoReturn:
        """Raise `UnsupportedError`: experts are not copied to balance the load."""
        unsupported("lb_prefetch_weights", _BALANCE)

    def lb_reduce_grads(
        self,
        redundant_expert_grads: torch.Tensor,
        expert_grads: torch.Tensor,
        redundancy_mapping: torch.Tensor,
        num_sms: int = 0,
        previous_event: Event | None = None,
    ) -> NoReturn:
        """Raise `UnsupportedError`: experts are not copied to balance the load."""
        unsupported("lb_reduce_grads", _BALANCE)


def _check_deferred(defer_epilogue: bool, async_with_compute_stream: bool) -> None:
    if defer_epilogue and not async_with_compute_stream:
        raise InvalidArgument("defer_epilogue=True needs async_with_compute_stream=True; give both")
