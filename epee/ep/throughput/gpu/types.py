"""Arguments and results of `Buffer`'s GPU core: handles, results, options. No behaviour."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from ..order import CombineOrder
from ..shapes import HandleSpace
from .kept import KeptRows

_ADDRESSES = struct.Struct("=7Q")


@dataclass(eq=False)
class ThroughputHandle:
    """Where the rows of one dispatch went: metadata in one int32 device tensor, parts at `space`.

    Attributes:
        call_idx: number of the dispatch, equal on all ranks.
        layout, expert_alignment, num_tokens: of the dispatch.
        has_topk, has_weights: whether it was routed by experts, and had weights.
        num_recv: rows of the result, None while only the device knows.
        num_tokens_per_expert: slots per local expert, padded; None likewise.
    """

    call_idx: int
    layout: str
    expert_alignment: int
    num_tokens: int
    space: HandleSpace
    words: torch.Tensor
    has_topk: bool
    has_weights: bool
    num_recv: int | None = None
    num_tokens_per_expert: list[int] | None = None
    _addresses: bytes = field(default=b"", init=False, repr=False)

    @property
    def addresses(self) -> bytes:
        """Addresses of its parts for the kernels: `gpu/params._HANDLE_NAMES`, 0 for what it does not have."""
        if not self._addresses:
            self._addresses = self._find_parts()
        return self._addresses

    def _find_parts(self) -> bytes:
        base, space = self.words.data_ptr(), self.space
        return _ADDRESSES.pack(
            base + 4 * space.send_prefix,
            base + 4 * space.expert_of,
            base + 4 * space.weights_of if self.has_weights else 0,
            base + 4 * space.ordinals if self.is_expert else 0,
            base + 4 * space.count_matrix,
            base + 4 * space.row_base,
            base + 4 * space.recv_info,
        )

    @property
    def is_expert(self) -> bool:
        """Whether the layout is "expert"."""
        return self.layout == "expert"

    def with_weights(self, topk_weights: torch.Tensor) -> ThroughputHandle:
        """Return a handle of the same rows with other weights, `[num_tokens, num_topk]` float32."""
        words = self.words.clone()
        flat = topk_weights.reshape(-1).view(torch.int32)
        words[self.space.weights_of : self.space.weights_of + len(flat)].copy_(flat)
        return replace(self, words=words, has_weights=True)

    @property
    def recv_info(self) -> torch.Tensor:
        """int32 device words; see `RECV_INFO_*` in `gpu/params.py`."""
        return self.words[self.space.recv_info :]

    def part(self, name: str, length: int) -> torch.Tensor:
        """Return the first `length` words of a part of the handle, as `HandleSpace` names it."""
        at: int = getattr(self.space, name)
        return self.words[at : at + length]


@dataclass(eq=False, slots=True)
class DispatchResult:
    """The result of a dispatch, for the `Buffer`. Without CPU sync the tensors have full capacity.

    Attributes:
        x: `[num_recv, hidden]`.
        scales: `[num_recv, num_scales]` 4-byte elements, or None.
        topk_idx: rank layout `[num_recv, num_topk]` int64, else None.
        topk_weights: `[num_recv, num_topk]` or, expert layout, `[num_recv]` float32; None when none were sent.
        src_rank: expert layout `[num_recv]` int64, -1 in padding; None in the rank layout.
        row_src_token: expert layout `[num_recv]` int64, -1 in padding; None in the rank layout.
        src_k: expert layout `[num_recv]` int64, which k of its token a row stands for; None in the rank layout.
        readers: raw handles of the streams that may read the slot behind the result: the call's own. More may be added.
        kept: what the handle may be asked for later; None from a cached dispatch and in the expert layout.
    """

    x: torch.Tensor
    scales: torch.Tensor | None
    topk_idx: torch.Tensor | None
    topk_weights: torch.Tensor | None
    src_rank: torch.Tensor | None
    row_src_token: torch.Tensor | None
    src_k: torch.Tensor | None
    handle: ThroughputHandle
    readers: list[int]
    kept: KeptRows | None = None

    @property
    def src_token(self) -> torch.Tensor | None:
        """`[num_recv]` int64, -1 in padding; None from a cached dispatch in the rank layout."""
        return self.row_src_token if self.kept is None else self.kept.src_token


class DispatchOptions(NamedTuple):
    """How a dispatch runs.

    Attributes:
        sync: the CPU waits for the counts, so that results have their exact size; else they have full capacity.
        num_sms: multiprocessors that send rows, None for the default.
        timeout_s: how long the GPU waits for a peer.
    """

    layout: str = "rank"
    expert_alignment: int = 1
    sync: bool = True
    num_sms: int | None = None
    timeout_s: float = 30.0


class CombineOptions(NamedTuple):
    """How a combine runs.

    Attributes:
        num_sms: multiprocessors that pull rows, None for the default.
        timeout_s: how long the GPU waits for a peer.
        order: of the additions, None for epee's own. All ranks give one or none.
    """

    num_sms: int | None = None
    timeout_s: float = 30.0
    order: CombineOrder | None = None
