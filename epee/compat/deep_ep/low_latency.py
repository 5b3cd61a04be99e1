"""What a V1 `Buffer` has in DeepEP and not here: low-latency mode, traffic between hosts, the raw buffer.

The signatures are DeepEP's, so that code which inspects them or calls by keyword gets this module's answer and no
TypeError. Every method raises `UnsupportedError` with one sentence that names it and says what to use.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from epee.errors import UnsupportedError

_LATENCY = "low-latency mode does not exist in epee yet; use dispatch and combine (normal mode) instead"
_HOSTS = "nothing travels between hosts (RDMA) in epee yet; use dispatch and combine on the ranks of one host"


def unsupported(name: str, why: str) -> NoReturn:
    """Raise `UnsupportedError` for `name`."""
    raise UnsupportedError(f"{name} is not supported: {why}")


class NotHere:
    """Methods of DeepEP's `Buffer` that raise `UnsupportedError`."""

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Unsupported."""
        unsupported("get_low_latency_rdma_size_hint", _LATENCY)

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Unsupported."""
        unsupported("clean_low_latency_buffer", _LATENCY)

    def low_latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        dispatch_wait_recv_cost_stats: torch.Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> Any:
        """Unsupported."""
        unsupported("low_latency_dispatch", _LATENCY)

    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: tuple[Any, ...],
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: torch.Tensor | None = None,
        combine_wait_recv_cost_stats: torch.Tensor | None = None,
    ) -> Any:
        """Unsupported."""
        unsupported("low_latency_combine", _LATENCY)

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Unsupported."""
        unsupported("low_latency_update_mask_buffer", _LATENCY)

    def low_latency_query_mask_buffer(self, mask_status: torch.Tensor) -> None:
        """Unsupported."""
        unsupported("low_latency_query_mask_buffer", _LATENCY)

    def low_latency_clean_mask_buffer(self) -> None:
        """Unsupported."""
        unsupported("low_latency_clean_mask_buffer", _LATENCY)

    def get_next_low_latency_combine_buffer(self, handle: object) -> torch.Tensor:
        """Unsupported."""
        unsupported("get_next_low_latency_combine_buffer", _LATENCY)

    def internode_dispatch(
        self,
        x: Any,
        handle: Any = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        config: Any = None,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Any:
        """Unsupported."""
        unsupported("internode_dispatch", _HOSTS)

    def internode_combine(
        self,
        x: torch.Tensor,
        handle: Any,
        topk_weights: torch.Tensor | None = None,
        bias: Any = None,
        config: Any = None,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Any:
        """Unsupported."""
        unsupported("internode_combine", _HOSTS)

    def get_local_buffer_tensor(
        self, dtype: torch.dtype, size: torch.Size | None = None, offset: int = 0, use_rdma_buffer: bool = False
    ) -> torch.Tensor:
        """Unsupported."""
        unsupported(
            "get_local_buffer_tensor",
            "there is no flat buffer; results are tensors of their own and live as long as you hold them",
        )
