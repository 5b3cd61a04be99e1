"""The matrices of DeepEP's layouts and handles, each by its closed form.

N tokens of a rank are cut into C channels of `ceil(N / C)` consecutive tokens. Everything else is counting. All
results are int32 (or bool) on the device of the input, and nothing here communicates.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


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
    """Return `[num_tokens, num_ranks]`: a token's index among those of its channel for rank r, -1 if it has none."""
    before = _by_channel(is_token_in_rank, num_channels).cumsum(1) - 1
    place = before.reshape(-1, is_token_in_rank.shape[1])[: len(is_token_in_rank)]
    return torch.where(is_token_in_rank, place, -1).to(torch.int32)


def recv_channel_prefix_matrix(
    src_token: torch.Tensor, received: torch.Tensor, num_tokens: torch.Tensor, most: int, num_channels: int
) -> torch.Tensor:
    """Return `[num_ranks, num_channels]`: rows from rank s that lie before its channel c. The cpu does not wait.

    Args:
        src_token: `[num_rows]` int64, rows in (source rank, token) order, -1 after the received ones.
        received: `[num_ranks]`, rows from ranks 0 ... s.
        num_tokens: `[num_ranks]`, tokens of each rank.
        most: tokens that a rank may have.
        num_channels: C.
    """
    device, stride, counts = src_token.device, most + 1, num_tokens.to(torch.int64)[:, None]
    rows = torch.arange(len(src_token), dtype=torch.int64, device=device)
    src_rank = torch.searchsorted(received.to(torch.int64), rows, right=True)
    keys = torch.where(src_token < 0, len(num_tokens) * stride, src_rank * stride + src_token)
    channels = torch.arange(num_channels, dtype=torch.int64, device=device)
    sizes = ((counts + num_channels - 1) // num_channels).clamp_(min=1)  # as `channel_size`
    ranks = torch.arange(len(num_tokens), dtype=torch.int64, device=device)[:, None]
    found = torch.searchsorted(keys, torch.minimum(channels * sizes, counts) + ranks * stride)
    return (found - found[:, :1]).to(torch.int32)


def _by_channel(is_token_in_rank: torch.Tensor, num_channels: int) -> torch.Tensor:
    """Return `[num_channels, channel_size, num_ranks]` int64, filled up with zeros."""
    num_tokens, num_ranks = is_token_in_rank.shape
    size = channel_size(num_tokens, num_channels)
    full = torch.zeros(num_channels * size, num_ranks, dtype=torch.int64, device=is_token_in_rank.device)
    full[:num_tokens] = is_token_in_rank
    return full.view(num_channels, size, num_ranks)
