"""`deep_ep.utils.gate`: router scores that send one rank a multiple of the others' tokens; for benchmarks."""

from __future__ import annotations

import torch

from epee.errors import InvalidArgument

_STEPS = 20  # of the bisection
_LOW = 0.9  # scores of experts that are not chosen lie below


def get_unbalanced_scores(
    num_tokens: int, num_experts: int, num_ranks: int, num_topk: int, ratio: float, precise: bool
) -> torch.Tensor:
    """Return scores `[num_tokens, num_experts]` float32 whose top-k gives one rank `ratio` times the others' tokens.

    Tokens are counted once per rank. With `precise` False, that rank is rank 0, and the ratio an expected one, at least
    1; `precise` gives it as exactly as whole tokens can.

    Raises:
        InvalidArgument: `precise`, and the ratio is below 1, or the sizes do not allow it.
    """
    if precise and ratio < 1:
        raise InvalidArgument(f"ratio must be at least 1 with precise=True, got {ratio}")
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
    factor = map_unbalanced_ratio_to_factor(num_tokens, num_experts, num_ranks, num_topk, ratio)
    return get_scores_by_factor(num_tokens, num_experts, num_ranks, factor)


def map_unbalanced_ratio_to_factor(
    num_tokens: int, num_experts: int, num_ranks: int, num_topk: int, ratio: float
) -> float:
    """Return the factor by which `get_scores_by_factor` gives the ratio, found by bisection; 1 for one up to 1."""
    if ratio <= 1:
        return 1.0
    low, high = 1.0, 100.0
    for _ in range(_STEPS):
        middle = (low + high) / 2
        scores = get_scores_by_factor(num_tokens, num_experts, num_ranks, middle)
        ranks = scores.topk(num_topk, dim=1, sorted=False)[1].div(num_experts // num_ranks, rounding_mode="floor")
        counts = torch.nn.functional.one_hot(ranks, num_ranks).amax(1).sum(0).tolist()
        is_above = counts[0] * (num_ranks - 1) > sum(counts[1:]) * ratio
        low, high = (low, middle) if is_above else (middle, high)
    return (low + high) / 2


def get_precise_unbalanced_scores(
    num_tokens: int, num_experts: int, num_ranks: int, num_topk: int, ratio: float
) -> torch.Tensor:
    """Return scores by which rank 0 gets `ratio` times as many tokens as each other rank, up to rounding.

    Each token is sent to as many ranks as the ratio allows; the others are chosen round-robin.
    """
    num_local, others = num_experts // num_ranks, num_ranks - 1
    spread = min(num_topk, int(others / ratio) + 1)  # ranks of a token, such that rank 0 need not take all tokens twice
    per_other = int(num_tokens * spread / (others + ratio))
    num_special = min(num_tokens, round(per_other * ratio)) if others else num_tokens
    ranks_of_special, ranks_of_rest = 1 + min(others, spread - 1), min(others, spread)
    least = ranks_of_special if num_special == num_tokens else min(ranks_of_rest, ranks_of_special)
    if num_topk > num_local * max(1, least):
        raise InvalidArgument(f"{num_topk} experts of a token do not fit into {least} ranks of {num_local}")
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
