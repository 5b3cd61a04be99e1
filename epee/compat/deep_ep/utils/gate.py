"""`deep_ep.utils.gate`: router scores that send one rank a multiple of what the others get; for benchmarks."""

from __future__ import annotations

import torch

from epee.errors import InvalidArgument

_STEPS = 20  # of the bisection
_LOW = 0.9  # scores of what is not chosen lie below


def get_unbalanced_scores(
    num_tokens: int, num_experts: int, num_ranks: int, num_topk: int, ratio: float, precise: bool
) -> torch.Tensor:
    """Return scores `[num_tokens, num_experts]` float32 whose top-k gives one rank `ratio` times what others get.

    Tokens are counted once per rank. Rank 0 is the one where `precise` is False, and the ratio an expected one;
    `precise` gives it as exactly as whole tokens can.

    Raises:
        InvalidArgument: the ratio is below 1, or the sizes do not allow it.
    """
    if ratio < 1:
        raise InvalidArgument(f"ratio must be at least 1, got {ratio}")
    make = get_precise_unbalanced_scores if precise else get_random_unbalanced_scores
    return make(num_tokens, num_experts, num_ranks, num_topk, ratio)


def get_scores_by_factor(num_tokens: int, num_experts: int, num_ranks: int, factor: float) -> torch.Tensor:
    """Return uniform scores, those of rank 0's experts below `factor`, others below 1."""
    scores = torch.rand(num_tokens, num_experts, dtype=torch.float32, device=torch.get_default_device())
    scores[:, : num_experts // num_ranks] *= factor
    return scores


def get_random_unbalanced_scores(
    num_tokens: int, num_experts: int, num_ranks: int, num_topk: int, ratio: float
) -> torch.Tensor:
    """Return scores as `get_scores_by_factor`, with a factor found by bisection."""
    low, high = 1.0, 1.0 if ratio == 1 else 100.0
    for _ in range(_STEPS if ratio > 1 else 0):
        middle = (low + high) / 2
        scores = get_scores_by_factor(num_tokens, num_experts, num_ranks, middle)
        ranks = scores.topk(num_topk, dim=1, sorted=False)[1].div(num_experts // num_ranks, rounding_mode="floor")
        counts = torch.nn.functional.one_hot(ranks, num_ranks).amax(1).sum(0).tolist()
        is_above = counts[0] * (num_ranks - 1) > sum(counts[1:]) * ratio
        low, high = (low, middle) if is_above else (middle, high)
    return get_scores_by_factor(num_tokens, num_experts, num_ranks, (low + high) / 2)


def get_precise_unbalanced_scores(
    num_tokens: int, num_experts: int, num_ranks: int, num_topk: int, ratio: float
) -> torch.Tensor:
    """Return scores by which rank 0 gets `ratio` times as many tokens as each other rank, up to rounding.

    Each token goes to as many ranks as the ratio allows; the others' turns go round.
    """
    num_local, others = num_experts // num_ranks, num_ranks - 1
    spread = min(num_topk, int(others / ratio) + 1)  # ranks of a token, such that rank 0 need not take all tokens twice
    per_other = int(num_tokens * spread / (others + ratio))
    num_special = min(num_tokens, round(per_other * ratio)) if others else num_tokens
    if num_topk > num_local * max(1, min(spread, others or 1)):
        raise InvalidArgument(f"{num_topk} experts of a token do not fit into {spread} ranks of {num_local}")
    scores = torch.rand(num_tokens, num_experts, dtype=torch.float32, device=torch.get_default_device()) * _LOW
    turn = 0
    for place, token in enumerate(torch.randperm(num_tokens, dtype=torch.int64, device="cpu").tolist()):
        num_others = min(others, spread - 1 if place < num_special else spread)
        ranks = [0] * (place < num_special) + [1 + (turn + step) % others for step in range(num_others)]
        turn += num_others
        for at in range(num_topk):
            rank, nth = ranks[at % len(ranks)], at // len(ranks)
            scores[token, rank * num_local + (token + nth) % num_local] = 1.0
    return scores
