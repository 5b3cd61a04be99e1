"""`mooncake.mooncake_elastic_buffer`: Mooncake's `ElasticBuffer`, which is DeepEP V2's with arguments of its own.

The combine is DeepEP's, unweighted. There is one transport, so `transport` chooses nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from epee.compat.deep_ep import elastic
from epee.compat.deep_ep.ep_handle import EPHandle
from epee.compat.deep_ep.event import EventOverlap
from epee.ep import Payload

from ...errors import InvalidArgument

__all__ = ["EPHandle", "ElasticBuffer", "EventOverlap"]

_TRANSPORTS = ("auto", "ibgda", "nccl")


class ElasticBuffer(elastic.ElasticBuffer):
    """Mooncake's elastic buffer, on GPUs of one host or CPU tensors of several; programs look for a class of its own.

    Args:
        group, num_bytes, num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch, deterministic, allow_hybrid_mode,
            allow_multiple_reduction, prefer_overlap_with_compute, sl_idx, num_allocated_qps, num_cpu_timeout_secs,
            num_gpu_timeout_secs, explicitly_destroy: as of DeepEP's.
        transport: "auto", "ibgda" or "nccl"; rows go over shared memory and NVLink whichever it is.

    Raises:
        InvalidArgument: another `transport`.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        num_bytes: int | None = None,
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
        transport: str = "auto",
    ) -> None:
        if transport not in _TRANSPORTS:
            raise InvalidArgument(f"transport must be one of {', '.join(_TRANSPORTS)}, got {transport!r}")
        self.transport = transport
        self._arguments: dict[str, Any] = {
            "num_bytes": num_bytes,
            "num_max_tokens_per_rank": num_max_tokens_per_rank,
            "hidden": hidden,
            "num_topk": num_topk,
            "use_fp8_dispatch": use_fp8_dispatch,
            "deterministic": deterministic,
            "allow_hybrid_mode": allow_hybrid_mode,
            "allow_multiple_reduction": allow_multiple_reduction,
            "prefer_overlap_with_compute": prefer_overlap_with_compute,
            "num_cpu_timeout_secs": num_cpu_timeout_secs,
            "explicitly_destroy": explicitly_destroy,
        }
        super().__init__(group, **self._arguments)

    def dispatch(  # type: ignore[override]
        self,
        x: Payload,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        handle: EPHandle | None = None,
        do_expand: bool = False,
        do_cpu_sync: bool | None = None,
        num_sms: int | None = None,
        async_with_compute_stream: bool = False,
    ) -> tuple[Payload, torch.Tensor | None, torch.Tensor | None, EPHandle, EventOverlap]:
        """Send each token to the ranks of its experts; as DeepEP's. Collective."""
        return super().dispatch(
            x,
            topk_idx,
            topk_weights,
            num_experts=num_experts,
            num_max_tokens_per_rank=num_max_tokens_per_rank,
            expert_alignment=expert_alignment,
            num_sms=num_sms or 0,
            async_with_compute_stream=async_with_compute_stream,
            handle=handle,
            do_cpu_sync=do_cpu_sync,
            do_expand=do_expand,
        )

    def combine(  # type: ignore[override]
        self,
        x: torch.Tensor,
        handle: EPHandle,
        topk_weights: torch.Tensor | None = None,
        num_sms: int | None = None,
        async_with_compute_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Send rows back to their tokens and sum them, unweighted; as DeepEP's. Collective."""
        return super().combine(
            x, handle, topk_weights, num_sms=num_sms or 0, async_with_compute_stream=async_with_compute_stream
        )

    def update_ep_member(self) -> None:
        """Restart with the group's present members; handles end. All ranks call it, joiners create a buffer instead."""
        self._pool().close()
        super().__init__(self.group, **self._arguments)
