"""Methods of V2's `ElasticBuffer` that epee does not support: remote key-value storage, pipelines, all-gather sessions.

The signatures are DeepEP's; `ElasticBuffer` inherits them. Every one raises `UnsupportedError` with its own name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from epee.compat.deep_ep.low_latency import unsupported

_ENGRAM = "epee has no remote storage"
_PIPELINE = "epee's buffers do not pass tensors between pipeline stages; use torch.distributed.send and recv"
_SESSION = "epee's buffers do not gather tensors; use torch.distributed.all_gather"


class Experimental:
    """Those methods, for `ElasticBuffer`."""

    @staticmethod
    def get_engram_storage_size_hint(
        num_entries: int, hidden: int, num_max_tokens_per_rank: int, dtype: torch.dtype = torch.bfloat16
    ) -> tuple[int, int]:
        """Raise `UnsupportedError`: there is no remote storage."""
        unsupported("get_engram_storage_size_hint", _ENGRAM)

    def engram_write(self, storage: torch.Tensor, sf: torch.Tensor | None = None) -> None:
        """Raise `UnsupportedError`: there is no remote storage."""
        unsupported("engram_write", _ENGRAM)

    def engram_fetch(
        self, indices: torch.Tensor, num_qps: int = 0, use_tma_aligned_col_major_sf: bool = False
    ) -> Callable[[], Any]:
        """Raise `UnsupportedError`: there is no remote storage."""
        unsupported("engram_fetch", _ENGRAM)

    @staticmethod
    def get_pp_buffer_size_hint(num_max_tensor_bytes: int, num_max_inflight_tensors: int) -> int:
        """Raise `UnsupportedError`: tensors do not pass between pipeline stages."""
        unsupported("get_pp_buffer_size_hint", _PIPELINE)

    def pp_set_config(self, num_max_tensor_bytes: int, num_max_inflight_tensors: int) -> None:
        """Raise `UnsupportedError`: tensors do not pass between pipeline stages."""
        unsupported("pp_set_config", _PIPELINE)

    def pp_send(self, t: torch.Tensor, dst_rank_idx: int, num_sms: int = 0) -> None:
        """Raise `UnsupportedError`: tensors do not pass between pipeline stages."""
        unsupported("pp_send", _PIPELINE)

    def pp_recv(self, t: torch.Tensor, src_rank_idx: int, num_sms: int = 0) -> None:
        """Raise `UnsupportedError`: tensors do not pass between pipeline stages."""
        unsupported("pp_recv", _PIPELINE)

    @staticmethod
    def get_agrs_num_max_session_bytes(
        group: dist.ProcessGroup, shapes: Sequence[Sequence[int]], dtype: torch.dtype
    ) -> int:
        """Raise `UnsupportedError`: tensors are not gathered."""
        unsupported("get_agrs_num_max_session_bytes", _SESSION)

    @staticmethod
    def get_agrs_buffer_size_hint(group: dist.ProcessGroup, num_max_session_bytes: int) -> int:
        """Raise `UnsupportedError`: tensors are not gathered."""
        unsupported("get_agrs_buffer_size_hint", _SESSION)

    def create_agrs_session(self) -> None:
        """Raise `UnsupportedError`: tensors are not gathered."""
        unsupported("create_agrs_session", _SESSION)

    def destroy_agrs_session(self) -> None:
        """Raise `UnsupportedError`: tensors are not gathered."""
        unsupported("destroy_agrs_session", _SESSION)

    def agrs_new_session(self, enabled: bool = True) -> Any:
        """Raise `UnsupportedError`: tensors are not gathered."""
        unsupported("agrs_new_session", _SESSION)

    def agrs_set_config(self, num_max_session_bytes: int, num_max_all_gathers_per_session: int) -> None:
        """Raise `UnsupportedError`: tensors are not gathered."""
        unsupported("agrs_set_config", _SESSION)

    def agrs_get_inplace_tensor(self, shapes: Sequence[Sequence[int]], dtype: torch.dtype) -> Any:
        """Raise `UnsupportedError`: tensors are not gathered."""
        unsupported("agrs_get_inplace_tensor", _SESSION)

    def all_gather(self, t: torch.Tensor) -> Any:
        """Raise `UnsupportedError`: tensors are not gathered."""
        unsupported("all_gather", _SESSION)
