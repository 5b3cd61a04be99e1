"""A Mixture-of-Experts layer whose experts may lie anywhere: `MoELayer` for a `Placement`.

Data path as in `nn/layer.py`, expert layout. The router knows experts by their numbers; `place_of` turns a number into
a place of the buffer. Parameter names and shapes on a rank with its own experts are those of `MoELayer`, so weights
fit both.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..ep.buffer import Buffer
from ..nn.experts import Experts, router_weight
from ..nn.functional import combine, dispatch
from ..nn.router import route
from .placement import Placement
from .settings import ModelSize


class MovableMoELayer(nn.Module):
    """A layer over `buffer`, whose ranks are the members of `placement`; this is rank `rank` of the job.

    Attributes:
        aux_loss, expert_load: as in `MoELayer`.
        num_sent: rows sent to each rank of the job in the last forward.
    """

    def __init__(self, size: ModelSize, buffer: Buffer, placement: Placement, rank: int, *, seed: int) -> None:
        super().__init__()
        mine = placement.experts[rank]
        self._size, self._buffer, self._placement = size, buffer, placement
        self._place_of = placement.place_of()
        self.router = router_weight(size.hidden, size.num_experts, seed=seed, dtype=torch.float32)
        # Where a rank serves another's experts, the values come from a copy; the initial ones only fill the room.
        self.experts = Experts(size.hidden, size.ffn_hidden, mine[0], len(mine), seed=seed, dtype=torch.float32)
        self.aux_loss = torch.zeros((), dtype=torch.float32, device="cpu")
        self.expert_load = torch.zeros(size.num_experts, dtype=torch.int64, device="cpu")
        self.num_sent = [0] * len(placement.experts)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output for `x` `[.., hidden]`, in the same shape. Collective of the members."""
        tokens = x.reshape(-1, self._size.hidden)
        routing = route(functional.linear(tokens, self.router), self._size.num_topk)
        self.aux_loss, self.expert_load = routing.aux_loss, routing.expert_load
        dispatched = dispatch(self._buffer, tokens, self._place_of[routing.topk_idx], routing.topk_weights)
        assert isinstance(dispatched.x, Tensor)  # a tensor went in
        blocks = dispatched.x.split(dispatched.num_tokens_per_expert)[: self.experts.num_experts]
        y = torch.cat([self.experts.run(position, block) for position, block in enumerate(blocks)])
        for rank, count in zip(self._placement.members, dispatched.handle.num_sent, strict=True):
            self.num_sent[rank] = count
        return combine(self._buffer, y, dispatched).view(x.shape)
