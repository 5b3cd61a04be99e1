"""`deep_ep.utils.refs`: the expected results of V2's dispatch and combine, by torch alone, for test scripts."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from epee.compat.deep_ep.utils.envs import get_global_seed
from epee.ep import Payload

_PRIME = 131071


def _gathered(mine: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return `[num_ranks, num_rows, ...]`: all ranks' rows, each followed by zeros. Collective."""
    raw = mine.contiguous().view(len(mine), -1).view(torch.uint8) if mine.numel() else mine.new_zeros(0)
    width = math.prod(mine.shape[1:]) * mine.itemsize
    padded = torch.zeros(num_rows, width, dtype=torch.uint8, device=mine.device)
    padded[: len(mine)] = raw.view(torch.uint8).view(len(mine), width)
    parts = [torch.empty_like(padded) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, padded)
    return torch.stack(parts).view(mine.dtype).view(len(parts), num_rows, *mine.shape[1:])


def dispatch(
    x: Payload,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor | None,
    num_max_tokens_per_rank: int,
    num_experts: int,
) -> tuple[Payload, torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """Return what this rank receives, in (source rank, token) order. Collective, over the default group.

    Args:
        x: `[num_tokens, hidden]`, or a pair with scales.
        topk_idx, topk_weights: `[num_tokens, num_topk]`.
        num_max_tokens_per_rank: at least the tokens of any rank.
        num_experts: over all ranks.

    Returns:
        Rows, local expert ids (-1 elsewhere), weights as they were sent, `src_rank * num_max_tokens_per_rank + token`
        of each row int32, rows from each rank `[num_ranks]` int32 on the CPU.
    """
    num_local = num_experts // dist.get_world_size()
    first = dist.get_rank() * num_local
    idx = _gathered(topk_idx + 1, num_max_tokens_per_rank) - 1  # zeros after the tokens become -1
    is_local = (idx >= first) & (idx < first + num_local)
    here = is_local.any(2)
    src = here.flatten().nonzero()[:, 0].to(torch.int32)
    values = [_gathered(part, num_max_tokens_per_rank)[here] for part in (x if isinstance(x, tuple) else (x,))]
    weights = None if topk_weights is None else _gathered(topk_weights, num_max_tokens_per_rank)[here]
    local = torch.where(is_local, idx - first, -1)[here]
    rows: Payload = (values[0], values[1]) if isinstance(x, tuple) else values[0]
    return rows, local, weights, src, here.sum(1).to("cpu", torch.int32)


def generate_pre_combine_data(
    src_token_global_idx: torch.Tensor, num_max_tokens_per_rank: int, num_topk: int, hidden: int
) -> torch.Tensor:
    """Return `[num_tokens, num_topk, hidden]` bfloat16 that every rank can make for any token.

    With `m = num_ranks * num_max_tokens_per_rank * num_topk` and `seed = (src * num_topk + k) * 131071 % m + 1`,
    element h is `sin(seed / m * (h + 1) + sin(global seed))`.
    """
    most = dist.get_world_size() * num_max_tokens_per_rank * num_topk
    device = src_token_global_idx.device
    lanes = torch.arange(num_topk, dtype=src_token_global_idx.dtype, device=device)
    seeds = (src_token_global_idx[:, None].to(torch.int64) * num_topk + lanes) * _PRIME % most
    angle = ((seeds.to(torch.float32) + 1) / most)[:, :, None]
    columns = torch.arange(1, hidden + 1, dtype=torch.float32, device=device)
    return torch.sin(angle * columns + math.sin(float(get_global_seed()))).to(torch.bfloat16)


def ordered_accumulate(data: torch.Tensor, initial_value: torch.Tensor | None = None) -> torch.Tensor:
    """Return the sum over dimension 1 of `[num_tokens, num_topk, hidden]`, k ascending in float32, rounded once."""
    shape = data.shape[0], data.shape[2]
    total = torch.zeros(shape, dtype=torch.float32, device=data.device)
    total = total if initial_value is None else initial_value.clone()
    for part in data.unbind(1):
        total += part.to(torch.float32)
    return total.to(data.dtype)


def _sums_of_groups(data: torch.Tensor, group_of: torch.Tensor) -> torch.Tensor:
    """Return per token the sum of each group's entries, rounded, at the group's last k; zeros at the others."""
    found = torch.zeros_like(data)
    num_topk = data.shape[1]
    for k in range(num_topk):
        total = torch.zeros(data.shape[0], data.shape[2], dtype=torch.float32, device=data.device)
        is_last = torch.ones(data.shape[0], dtype=torch.bool, device=data.device)
        for other in range(num_topk):
            is_same = group_of[:, other] == group_of[:, k]
            if other <= k:
                total += torch.where(is_same[:, None], data[:, other].to(torch.float32), 0)
            else:
                is_last &= ~is_same
        found[:, k] = torch.where(is_last[:, None], total, 0).to(data.dtype)
    return found


def combine(
    y: torch.Tensor,
    topk_idx: torch.Tensor,
    num_scaleout_ranks: int,
    num_scaleup_ranks: int,
    num_experts: int,
    bias: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None,
    reduce_in_local: bool,
    reduce_in_scaleup: bool,
) -> torch.Tensor:
    """Return `[num_tokens, hidden]`: the biases, then each token's rows by k ascending. Local.

    Args:
        y: `[num_tokens, num_topk, hidden]`, a row for each k.
        topk_idx: `[num_tokens, num_topk]`.
        num_scaleout_ranks, num_scaleup_ranks, num_experts: sizes.
        bias: one or two `[num_tokens, hidden]`, or None.
        reduce_in_local, reduce_in_scaleup: a rank's rows, a host's rows are summed and rounded first.
    """
    num_local = num_experts // (num_scaleout_ranks * num_scaleup_ranks)
    for is_asked, size in ((reduce_in_local, num_local), (reduce_in_scaleup, num_local * num_scaleup_ranks)):
        if is_asked:
            y = _sums_of_groups(y, topk_idx.div(size, rounding_mode="floor"))
    if bias is None:
        return ordered_accumulate(y)
    parts = bias if isinstance(bias, tuple) else (bias,)
    return ordered_accumulate(y, sum((part.to(torch.float32) for part in parts[1:]), parts[0].to(torch.float32)))
