"""The matrices of DeepEP's layouts and handles, each by its closed form.

N tokens of a rank are cut into C channels of `ceil(N / C)` consecutive tokens. Everything else is counting. All
results are int32 (or bool) on the device of the input, and nothing here communicates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class DispatchLayout(NamedTuple):
    """What `get_dispatch_layout` counts.

    Attributes:
        num_tokens_per_rank: `[num_ranks]` int32, each token once per rank.
        num_tokens_per_expert: `[num_experts]` int32, (token, k) pairs.
        is_token_in_rank: `[num_tokens, num_ranks]` bool.
    """

    num_tokens_per_rank: torch.Tensor
    num_tokens_per_expert: torch.Tensor
    is_token_in_rank: torch.Tensor


def dispatch_layout(topk_idx: torch.Tensor, num_ranks: int, num_experts: int) -> DispatchLayout:
    """Count where tokens go; `topk_idx` is `[num_tokens, num_topk]` int64, -1 for none.

    Ids that do not exist count as none (on GPUs nobody has looked at them yet). The host does not wait for the GPU.
    """
    topk_idx = topk_idx.masked_fill((topk_idx < 0) | (topk_idx >= num_experts), -1)
    column = topk_idx.div(num_experts // num_ranks, rounding_mode="floor").add_(1)  # -1 becomes column 0
    member = torch.zeros(len(topk_idx), num_ranks + 1, dtype=torch.bool, device=topk_idx.device)
    is_token_in_rank = member.scatter_(1, column, True)[:, 1:].contiguous()
    per_expert = torch.zeros(num_experts + 1, dtype=torch.int32, device=topk_idx.device)
    flat = topk_idx.reshape(-1) + 1
    per_expert.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
    return DispatchLayout(is_token_in_rank.sum(0, dtype=torch.int32), per_expert[1:].clone(), is_token_in_rank)


def align_up(count: int, multiple: int) -> int:
    """Return `count` rounded up to a multiple of `multiple`."""
    return -(-count // multiple) * multiple


def channel_size(num_tokens: int, num_channels: int) -> int:
    """Return the tokens of a channel; the last ones may have fewer."""
    return max(1, -(-num_tokens // num_channels))


def rank_prefix_matrix(num_sent: Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
    """Return `[num_ranks, num_ranks]`: rows that rank r gets from ranks 0 ... i.

    Args:
        num_sent: `num_sent[s][d]` rows go from s to d.
        device: of the result.
    """
    return torch.tensor(num_sent, dtype=torch.int64, device="cpu").cumsum(0).to(device, torch.int32)


def channel_prefix_matrix(is_token_in_rank: torch.Tensor, num_channels: int) -> torch.Tensor:
    """Return `[num_ranks, num_channels]`: tokens that this rank sends to rank r in channels 0 ... c."""
    per_channel = _by_channel(is_token_in_rank, num_channels).sum(1)
    return per_channel.cumsum(0).t().contiguous().to(torch.int32)


def send_head(is_token_in_rank: torch.Tensor, num_channels: int) -> torch.Tensor:
    """Return `[num_tokens, num_ranks]`: a token's place among those of its channel for rank r, -1 if it has none."""
    before = _by_channel(is_token_in_rank, num_channels).cumsum(1) - 1
    place = before.reshape(-1, is_token_in_rank.shape[1])[: len(is_token_in_rank)]
    return torch.where(is_token_in_rank, place, -1).to(torch.int32)


def recv_channel_prefix_matrix_on_device(
    src_token: torch.Tensor, received: torch.Tensor, num_tokens: int, num_channels: int
) -> torch.Tensor:
    """The same without a word from the host, for ranks that all have as many tokens as this one.

    Args:
        src_token: `[num_rows]` int64, rows in (source rank, token) order, -1 behind those that came.
        received: `[num_ranks]`, rows from ranks 0 ... s.
        num_tokens: of every rank.
        num_channels: C.
    """
    num_ranks, stride = len(received), num_tokens + 1
    rows = torch.arange(len(src_token), dtype=torch.int64, device=src_token.device)
    src_rank = torch.searchsorted(received.to(torch.int64), rows, right=True)
    keys = torch.where(src_token < 0, num_ranks * stride, src_rank * stride + src_token)
    ranks = torch.arange(num_ranks, dtype=torch.int64, device=src_token.device)[:, None] * stride
    channels = torch.arange(num_channels, dtype=torch.int64, device=src_token.device)[None]
    channels = channels * channel_size(num_tokens, num_channels)
    first = torch.searchsorted(keys, (ranks + channels.clamp(max=num_tokens)).contiguous())
    before = torch.searchsorted(keys, ranks.contiguous())
    return (first - before).to(torch.int32)


def recv_channel_prefix_matrix(
    src_token: torch.Tensor, num_received: Sequence[int], num_tokens: Sequence[int], num_channels: int
) -> torch.Tensor:
    """Return `[num_ranks, num_channels]`: rows from rank s that lie before its channel c.

    Args:
        src_token: `[num_recv]` int64, rows in (source rank, token) order.
        num_received: rows from each rank.
        num_tokens: tokens of each rank.
        num_channels: C.
    """
    rows = []
    for part, count in zip(src_token.split(list(num_received)), num_tokens, strict=True):
        channels = torch.arange(num_channels, dtype=torch.int64, device=part.device)
        rows.append(torch.searchsorted(part, channels * channel_size(count, num_channels)))
    return torch.stack(rows).to(torch.int32)


def _by_channel(is_token_in_rank: torch.Tensor, num_channels: int) -> torch.Tensor:
    """Return `[num_channels, channel_size, num_ranks]` int64, filled up with zeros."""
    num_tokens, num_ranks = is_token_in_rank.shape
    size = channel_size(num_tokens, num_channels)
    full = torch.zeros(num_channels * size, num_ranks, dtype=torch.int64, device=is_token_in_rank.device)
    full[:num_tokens] = is_token_in_rank
    return full.view(num_channels, size, num_ranks)
