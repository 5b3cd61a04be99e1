"""What goes into and comes out of throughput mode: handles, results, options. No behaviour."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .throughput_plan import HandleSpace


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

    @property
    def is_expert(self) -> bool:
        """Whether the layout is "expert"."""
        return self.layout == "expert"

    @property
    def recv_info(self) -> torch.Tensor:
        """int32 device words; see `throughput_params.RECV_INFO_*`."""
        return self.words[self.space.recv_info :]


@dataclass(eq=False)
class Received:
    """What a dispatch returns to the `Buffer`. Without CPU sync the tensors have full capacity.

    Attributes:
        x: `[num_recv, hidden]`.
        scales: `[num_recv, num_scales]` 4-byte elements, or None.
        topk_idx: rank layout `[num_recv, num_topk]` int64, else None.
        topk_weights: `[num_recv, num_topk]` or, expert layout, `[num_recv]` float32; None when none were sent.
        src_rank: expert layout `[num_recv]` int64, -1 in padding; None in the rank layout.
        src_token: `[num_recv]` int64, -1 in padding.
        src_k: expert layout `[num_recv]` int64, which k of its token a row stands for; None in the rank layout.
        stream: raw handle of the stream that the call ran on.
    """

    x: torch.Tensor
    scales: torch.Tensor | None
    topk_idx: torch.Tensor | None
    topk_weights: torch.Tensor | None
    src_rank: torch.Tensor | None
    src_token: torch.Tensor
    src_k: torch.Tensor | None
    handle: ThroughputHandle
    stream: int


@dataclass(frozen=True)
class DispatchOptions:
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


@dataclass(frozen=True)
class CombineOptions:
    """How a combine runs: `num_sms` multiprocessors pull rows (None for the default); `timeout_s` as in dispatch."""

    num_sms: int | None = None
    timeout_s: float = 30.0
