"""The softmax top-k router: the experts of each token, their weights, and the balance of the load.

Local: no communication. Logits, softmax and weights are float32 (float64 for float64 tokens) for tokens of any dtype,
also under `torch.autocast`, because the choice of a router in bfloat16 would depend on rounding.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class Routing(NamedTuple):
    """The routing of a batch of tokens.

    Attributes:
        topk_idx: `[num_tokens, num_topk]` int64, global expert ids, the most probable first.
        topk_weights: `[num_tokens, num_topk]` float32 (or float64), the chosen probabilities scaled to a sum of one.
        aux_loss: scalar, 1.0 for an even load and `num_experts / num_topk` at worst; 0 for a batch of no tokens.
        expert_load: `[num_experts]` int64, number of (token, k) slots of each expert.
    """

    topk_idx: Tensor
    topk_weights: Tensor
    aux_loss: Tensor
    expert_load: Tensor


def logits_of(tokens: Tensor, router: Tensor) -> Tensor:
    """Return `tokens` `[num_tokens, hidden]` times `router` `[num_experts, hidden]`, transposed; float32 or float64."""
    wide = torch.promote_types(router.dtype, torch.float32)  # also if the parameters were made narrower
    with torch.autocast(tokens.device.type, enabled=False):  # it would make the product, and then the choice, narrow
        return functional.linear(tokens.to(wide), router.to(wide))


def route(logits: Tensor, num_topk: int, topk_idx: Tensor | None = None) -> Routing:
    """Choose `num_topk` experts per token from `logits` `[num_tokens, num_experts]`, float32 or float64.

    Narrower logits, as a linear layer returns them under `torch.autocast`, are read as float32: the weights are what
    dispatch takes, but experts of equal rounded logits are chosen arbitrarily.

    With `topk_idx` `[num_tokens, num_topk]` int64 these are used, independently of the logits: another router, which
    rounds differently, has decided already.

    The auxiliary loss is `num_experts * sum over experts of (share of the slots) * (mean probability)`, after Switch
    Transformer; its gradient flows through the probabilities.
    """
    num_tokens, num_experts = logits.shape
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    probabilities = logits.softmax(-1)
    if topk_idx is None:
        topk_idx = probabilities.topk(num_topk, dim=-1).indices
    chosen = probabilities.gather(-1, topk_idx)
    expert_load = torch.bincount(topk_idx.flatten(), minlength=num_experts)
    share = expert_load.to(logits.dtype) / max(1, num_tokens * num_topk)
    aux_loss = num_experts * (share * (probabilities.sum(0) / max(1, num_tokens))).sum()
    return Routing(topk_idx, chosen / chosen.sum(-1, keepdim=True), aux_loss, expert_load)
