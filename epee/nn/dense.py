"""`DenseMoELayer`: the oracle of `MoELayer`, all experts in one process, no communication and no epee code path.

It shares the router, the experts and their seeds with `MoELayer`, and nothing of dispatch and combine: tokens are
gathered and summed by plain torch indexing, and torch derives the gradients. Given all ranks' tokens, one after the
other, it must compute the same as the ranks together, up to rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .experts import ExpertLayer, Experts, router_dtype, router_weight
from .router import logits_of, route


class DenseMoELayer(ExpertLayer):
    """A Mixture-of-Experts layer with all its experts in this process; arguments and attributes as of `MoELayer`.

    `num_sent` is empty: nothing is sent. `aux_loss` is over the tokens of one forward, so a comparison with several
    ranks calls it once per rank's batch. `given_idx`, if it is set, has the experts of the next forward's tokens: the
    choice of another layer's router, which may have rounded differently (`MoELayer.topk_idx`).
    """

    def __init__(
        self,
        hidden: int,
        ffn_hidden: int,
        num_experts: int,
        num_topk: int,
        *,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.hidden, self.num_experts, self.num_topk = hidden, num_experts, num_topk
        self.router = router_weight(hidden, num_experts, seed=seed, dtype=router_dtype(dtype))
        self.experts = Experts(hidden, ffn_hidden, 0, num_experts, seed=seed, dtype=dtype)
        self.aux_loss = torch.zeros((), dtype=torch.float32, device="cpu")
        self.expert_load = torch.zeros(num_experts, dtype=torch.int64, device="cpu")
        self.topk_idx = torch.zeros(0, num_topk, dtype=torch.int64, device="cpu")
        self.given_idx: Tensor | None = None
        self.num_sent: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output for `x` `[.., hidden]`, in the same shape and dtype."""
        tokens = x.reshape(-1, self.hidden)
        routing = route(logits_of(tokens, self.router), self.num_topk, self.given_idx)
        self.topk_idx, self.aux_loss, self.expert_load = routing.topk_idx, routing.aux_loss, routing.expert_load
        y = torch.zeros_like(tokens, dtype=routing.topk_weights.dtype)
        for expert in range(self.num_experts):
            token, k = (routing.topk_idx == expert).nonzero(as_tuple=True)
            out = self.experts.run(expert, tokens[token])
            y = y.index_add(0, token, out.to(y.dtype) * routing.topk_weights[token, k, None])
        return y.to(x.dtype).view(x.shape)
