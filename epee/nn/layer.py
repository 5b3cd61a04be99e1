"""`MoELayer`: router, dispatch to the experts' ranks, SwiGLU experts, combine.

Data path: tokens `[.., hidden]` -> router (local) -> dispatch -> each local expert runs its rows -> combine -> tokens.
Each rank holds the router and its own experts only (`num_experts / num_ranks`, in order). The router is the same on all
ranks and its gradient has to be averaged over them; an expert's gradient is complete on its rank, because every rank's
tokens reach it, and has to be divided by the number of ranks. `sync_gradients` (`parallel.py`) does both; DDP and FSDP
do not touch the experts.

Protocol: forward and backward are collective calls on the buffer's group; every rank makes them in the same order, also
a rank without tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import InvalidArgument
from ..values import is_whole, shown
from .experts import ExpertLayer, Experts, router_dtype, router_weight
from .functional import combine, dispatch
from .parallel import spread_experts
from .router import Routing, logits_of, route

if TYPE_CHECKING:
    from ..ep.buffer import Buffer
    from ..ep.handle import Dispatched

MAX_FFN_HIDDEN = 1 << 20


class MoELayer(ExpertLayer):
    """A Mixture-of-Experts feed-forward layer whose experts are distributed over the ranks of a buffer.

    Args:
        hidden: elements per token; the buffer's.
        ffn_hidden: inner width of each expert.
        num_experts: over all ranks; the buffer's.
        num_topk: experts per token; the buffer's.
        buffer: this rank's buffer. It is not owned: close it yourself.
        layout: "expert" or "rank"; the results agree up to rounding. None: "expert" if the buffer has room for any
            routing in it (`max_recv_rows` of at least `num_ranks * max_tokens_per_rank * num_topk`), else "rank", in
            which a buffer without `max_recv_rows` has room for any routing. With "expert" given and less room, a
            forward whose routing is too uneven raises `InvalidArgument` on all ranks.
        capacity: rank layout only, equal on all ranks: the most rows that this rank receives in a forward, from all
            ranks together; one row is a token with all its experts on this rank. Rows beyond it, in the order of source
            rank and token, are dropped: the token's sum lacks the experts of this rank, and no gradient flows through
            them. `num_dropped` counts them. None drops nothing.
        seed: expert e of two layers with one seed starts with the same weights, on any rank.
        dtype: of experts and tokens; the router computes in float32 (float64 for float64).

    Attributes:
        aux_loss: load-balance loss of the last forward (scalar, differentiable), over this rank's tokens.
        expert_load: `[num_experts]` int64, (token, k) slots that this rank's tokens gave each expert, last forward.
        topk_idx: `[num_tokens, num_topk]` int64, the experts of the last forward's tokens.
        num_sent: rows that this rank sent to each rank in the last forward, one int per rank.
        num_dropped: `[1]` int32, rows that this rank dropped in the last forward; None without `capacity`.
        num_sent_to_hosts: tokens sent to each host, once each; None if all ranks share a host, and on GPUs.

    Parameters are created on the CPU in `dtype`, independently of torch's defaults; `.to(device)` moves them.

    A model that trains over several ranks calls `sync_gradients` before each step of the optimiser, with DDP, with FSDP
    and without either.

    Raises:
        InvalidArgument: a size differs from the buffer's, the layout has no such name, or `capacity` is given with the
            expert layout.
    """

    def __init__(
        self,
        hidden: int,
        ffn_hidden: int,
        num_experts: int,
        num_topk: int,
        buffer: Buffer,
        *,
        layout: str | None = None,
        capacity: int | None = None,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        _check_sizes(buffer, hidden=hidden, num_experts=num_experts, num_topk=num_topk)
        if layout not in ("expert", "rank", None):
            raise InvalidArgument(f'layout must be "expert", "rank" or None, got {shown(layout)}')
        if capacity is not None and (layout == "expert" or isinstance(capacity, bool) or not isinstance(capacity, int)):
            raise InvalidArgument(
                f'capacity must be an int, with layout="rank", got {shown(capacity)} and layout={layout!r}'
            )
        if not is_whole(ffn_hidden, 1, MAX_FFN_HIDDEN):
            raise InvalidArgument(f"ffn_hidden must be an int 1 ... {MAX_FFN_HIDDEN}, got {shown(ffn_hidden)}")
        if not isinstance(seed, int) or isinstance(seed, bool):
            raise InvalidArgument(f"seed must be an int, got {shown(seed)}")
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise InvalidArgument(f"dtype must be a floating-point dtype of torch, got {shown(dtype)}")
        self.hidden, self.num_experts, self.num_topk = hidden, num_experts, num_topk
        self.layout = layout or ("rank" if capacity is not None else _layout_with_room(buffer))
        self.capacity = capacity
        self._buffer = buffer
        num_local_experts = num_experts // buffer.num_ranks
        spread_experts(self, buffer.num_ranks)
        self.router = router_weight(hidden, num_experts, seed=seed, dtype=router_dtype(dtype))
        self.experts = Experts(
            hidden, ffn_hidden, buffer.rank * num_local_experts, num_local_experts, seed=seed, dtype=dtype
        )
        self.aux_loss = torch.zeros((), dtype=torch.float32, device="cpu")
        self.expert_load = torch.zeros(num_experts, dtype=torch.int64, device="cpu")
        self.topk_idx = torch.zeros(0, num_topk, dtype=torch.int64, device="cpu")
        self.num_sent: list[int] = [0] * buffer.num_ranks
        self.num_dropped: Tensor | None = None
        self.num_sent_to_hosts: list[int] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output for `x` `[.., hidden]`, in the same shape and dtype.

        Raises:
            InvalidArgument: the last dimension is not `hidden`.
            EpeeError: the errors of the buffer's dispatch and combine.
        """
        if x.shape[-1:] != (self.hidden,):
            raise InvalidArgument(f"x must be [.., {self.hidden}], got {list(x.shape)}; its rows are the tokens")
        tokens = x.reshape(-1, self.hidden)
        routing = self._route(tokens)
        dispatched = dispatch(
            self._buffer,
            tokens,
            routing.topk_idx,
            routing.topk_weights,
            layout=self.layout,
            capacity=self.capacity,
        )
        y = self._run_blocks(dispatched) if self.layout == "expert" else self._run_rows(dispatched)
        self.num_sent = list(dispatched.handle.num_sent)
        self.num_dropped = dispatched.num_dropped
        self.num_sent_to_hosts = dispatched.handle.num_sent_to_hosts
        return combine(self._buffer, y, dispatched).view(x.shape)

    def _route(self, tokens: Tensor) -> Routing:
        routing = route(logits_of(tokens, self.router), self.num_topk)
        self.topk_idx, self.aux_loss, self.expert_load = routing.topk_idx, routing.aux_loss, routing.expert_load
        return routing

    def _run_blocks(self, dispatched: Dispatched) -> Tensor:
        """Run the experts in the expert layout: block e of the rows belongs to local expert e."""
        assert isinstance(dispatched.x, Tensor)  # a tensor went in
        blocks = dispatched.x.split(dispatched.num_tokens_per_expert)
        # Experts without rows run too, on zero rows: then all parameters have gradients on every rank.
        return torch.cat([self.experts.run(position, block) for position, block in enumerate(blocks)])

    def _run_rows(self, dispatched: Dispatched) -> Tensor:
        """Run the experts in the rank layout: a row belongs to local experts, weighted and summed here for combine."""
        topk_idx, topk_weights = dispatched.topk_idx, dispatched.topk_weights
        assert topk_idx is not None  # the rank layout always has them
        assert topk_weights is not None
        x = dispatched.x
        assert isinstance(x, Tensor)  # a tensor went in
        y = torch.zeros_like(x, dtype=topk_weights.dtype)
        for position in range(self.experts.num_experts):
            row, k = (topk_idx == position).nonzero(as_tuple=True)
            out = self.experts.run(position, x[row])
            y = y.index_add(0, row, out.to(y.dtype) * topk_weights[row, k, None])
        return y.to(x.dtype)


def _layout_with_room(buffer: Buffer) -> str:
    """Return the expert layout if any routing has room in it, else the rank layout, which needs the fewest rows."""
    config = buffer.config
    most = config.num_ranks * config.max_tokens_per_rank * min(config.num_topk, config.num_local_experts)
    return "expert" if config.capacity("expert") >= most else "rank"


def _check_sizes(buffer: Buffer, **sizes: int) -> None:
    for name, value in sizes.items():
        wanted = getattr(buffer.config, name)
        if isinstance(value, bool) or value != wanted:
            raise InvalidArgument(
                f"{name} must be the buffer's, {wanted}, got {shown(value)}; make the buffer with another {name}"
            )
