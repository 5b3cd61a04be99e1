"""Make the buffer and the model of a rank from the settings."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ..ep.buffer import Buffer
from ..nn import MoELayer
from .group import TIMEOUT_S
from .model import Transformer
from .settings import Settings


def make_buffer(
    settings: Settings, group: dist.ProcessGroup, dtype: torch.dtype, num_experts: int | None = None
) -> Buffer:
    """Make this rank's buffer (collective), with places for `num_experts`. One buffer serves all layers."""
    size = settings.size
    return Buffer(
        group,
        num_experts=num_experts or size.num_experts,
        hidden=size.hidden,
        num_topk=size.num_topk,
        max_tokens_per_rank=settings.tokens_per_rank,
        dtype=dtype,
        # A young router may send everything to one rank; a demo should not stop for that.
        timeout=TIMEOUT_S if settings.victim is None else settings.patience_s,
        num_slots=size.num_layers + 1,  # autograd keeps what each layer received until the backward
        max_recv_rows=settings.num_ranks * settings.tokens_per_rank * size.num_topk,
    )


def make_model(settings: Settings, buffer: Buffer, dtype: torch.dtype) -> Transformer:
    """Make this rank's model; weights depend on the seed only, an expert's on its number and layer too."""
    size = settings.size

    def make_moe(layer: int) -> MoELayer:
        return MoELayer(
            size.hidden,
            size.ffn_hidden,
            size.num_experts,
            size.num_topk,
            buffer,
            seed=settings.seed * 1009 + layer,
            dtype=dtype,
        )

    return Transformer(size, make_moe, seed=settings.seed).to(dtype)
