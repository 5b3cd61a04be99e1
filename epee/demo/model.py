"""The demo's model: a byte-level transformer whose feed-forward layers are Mixture-of-Experts layers.

Given a buffer, its experts are distributed over the ranks (`MoELayer`); without one they are all in this process
(`DenseMoELayer`), for the check. Attention, norms and embeddings are plain and the same on all ranks.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..ep.buffer import Buffer
from ..nn import DenseMoELayer, MoELayer
from .settings import Settings

NUM_BYTES = 256
MoE = MoELayer | DenseMoELayer


class TransformerBlock(nn.Module):
    """Attention and a Mixture-of-Experts layer, each with a norm before and the input added after."""

    def __init__(self, settings: Settings, moe: MoE) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(settings.hidden, device="cpu", dtype=torch.float32)
        self.attention = nn.MultiheadAttention(
            settings.hidden, settings.num_heads, bias=False, batch_first=True, device="cpu", dtype=torch.float32
        )
        self.moe_norm = nn.RMSNorm(settings.hidden, device="cpu", dtype=torch.float32)
        self.moe = moe

    def forward(self, x: Tensor) -> Tensor:
        """Map `[batch, length, hidden]` to the same shape."""
        normed = self.attention_norm(x)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device, dtype=x.dtype)
        x = x + self.attention(normed, normed, normed, attn_mask=mask, is_causal=True, need_weights=False)[0]
        return x + cast(Tensor, self.moe(self.moe_norm(x)))


class Transformer(nn.Module):
    """A model from bytes to logits of the next byte. Weights depend on the seed, an expert's on its number, too."""

    def __init__(self, settings: Settings, buffer: Buffer | None) -> None:
        super().__init__()
        self.settings = settings
        # The layers' experts draw from generators of their own: the parameters below are the same on all ranks.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            self.embedding = nn.Embedding(NUM_BYTES, settings.hidden, device="cpu", dtype=torch.float32)
            self.previous = nn.Embedding(NUM_BYTES, settings.hidden, device="cpu", dtype=torch.float32)
            layers = (_make_moe(settings, buffer, layer) for layer in range(settings.num_layers))
            self.blocks = nn.ModuleList(TransformerBlock(settings, moe) for moe in layers)
            self.norm = nn.RMSNorm(settings.hidden, device="cpu", dtype=torch.float32)
            self.head = nn.Linear(settings.hidden, NUM_BYTES, bias=False, device="cpu", dtype=torch.float32)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map `[batch, length]` int64 bytes to `[batch, length, 256]` logits."""
        # Embeds pairs of bytes: attention would need the first half minute of training to learn the previous byte.
        # No embedding of positions: the causal mask gives enough information for one minute of training.
        x = self.embedding(tokens) + self.previous(functional.pad(tokens, (1, 0))[:, :-1])
        for block in self.blocks:
            x = block(x)
        return cast(Tensor, self.head(self.norm(x)))

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy in nats per byte."""
        return functional.cross_entropy(self(inputs).flatten(0, 1), targets.flatten())

    def layers(self) -> list[MoE]:
        """Return the Mixture-of-Experts layers, first to last."""
        return [cast(TransformerBlock, block).moe for block in self.blocks]


def _make_moe(settings: Settings, buffer: Buffer | None, layer: int) -> MoE:
    num_experts, num_topk, seed = settings.num_experts, settings.num_topk, settings.seed * 1009 + layer
    if buffer is None:
        return DenseMoELayer(settings.hidden, settings.ffn_hidden, num_experts, num_topk, seed=seed)
    places = buffer.config.num_experts
    moe = MoELayer(settings.hidden, settings.ffn_hidden, places, num_topk, buffer, seed=seed)
    moe.router = nn.Parameter(moe.router.detach()[:num_experts])  # no token for an unused place
    return moe


def is_expert(name: str) -> bool:
    """Whether a parameter is on one rank only; the others are the same everywhere."""
    return ".experts." in name
