"""The demo's model: a byte-level transformer whose feed-forward layers are Mixture-of-Experts layers.

The layer is handed in as a factory, so the same model is built over epee (`MoELayer`) and, for the check, dense in
one process (`DenseMoELayer`). Attention, norms and embeddings are plain and the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..nn import DenseMoELayer, MoELayer
from .movable import MovableMoELayer
from .settings import ModelSize

NUM_BYTES = 256
MoE = MoELayer | DenseMoELayer | MovableMoELayer


class Attention(nn.Module):
    """Causal self-attention with several heads."""

    def __init__(self, hidden: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False, device="cpu", dtype=torch.float32)
        self.out = nn.Linear(hidden, hidden, bias=False, device="cpu", dtype=torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        """`[batch, length, hidden]` to the same shape."""
        batch, length, hidden = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.num_heads, hidden // self.num_heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        out = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return cast(Tensor, self.out(out.transpose(1, 2).reshape(batch, length, hidden)))


class Block(nn.Module):
    """Attention and a Mixture-of-Experts layer, each with a norm before and the input added after."""

    def __init__(self, size: ModelSize, moe: MoE) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(size.hidden, device="cpu", dtype=torch.float32)
        self.attention = Attention(size.hidden, size.num_heads)
        self.moe_norm = nn.RMSNorm(size.hidden, device="cpu", dtype=torch.float32)
        self.moe = moe

    def forward(self, x: Tensor) -> Tensor:
        """`[batch, length, hidden]` to the same shape."""
        x = x + self.attention(self.attention_norm(x))
        return x + cast(Tensor, self.moe(self.moe_norm(x)))


class Transformer(nn.Module):
    """Bytes in, logits of the next byte out. `make_moe(layer)` makes the Mixture-of-Experts layer of a block."""

    def __init__(self, size: ModelSize, make_moe: Callable[[int], MoE], *, seed: int) -> None:
        super().__init__()
        # The layers' experts draw from generators of their own: what follows is the same on all ranks.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embedding = nn.Embedding(NUM_BYTES, size.hidden, device="cpu", dtype=torch.float32)
            self.previous = nn.Embedding(NUM_BYTES, size.hidden, device="cpu", dtype=torch.float32)
            self.position = nn.Embedding(size.context, size.hidden, device="cpu", dtype=torch.float32)
            self.blocks = nn.ModuleList(Block(size, make_moe(layer)) for layer in range(size.num_layers))
            self.norm = nn.RMSNorm(size.hidden, device="cpu", dtype=torch.float32)
            self.head = nn.Linear(size.hidden, NUM_BYTES, bias=False, device="cpu", dtype=torch.float32)
            nn.init.normal_(self.embedding.weight, std=0.5)
            nn.init.normal_(self.previous.weight, std=0.5)
            nn.init.normal_(self.position.weight, std=0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        """`[batch, length]` int64 bytes to `[batch, length, 256]` logits."""
        # Pairs of bytes from the first layer on: attention would need the first half minute to find its neighbour.
        previous = functional.pad(tokens, (1, 0))[:, :-1]
        x = self.embedding(tokens) + self.previous(previous) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return cast(Tensor, self.head(self.norm(x)))

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy in nats per byte."""
        return functional.cross_entropy(self(inputs).flatten(0, 1), targets.flatten())

    def layers(self) -> list[MoE]:
        """Return the Mixture-of-Experts layers, first to last."""
        return [cast(Block, block).moe for block in self.blocks]

    def aux_loss(self) -> Tensor:
        """Return the sum of the layers' load-balance losses of the last forward."""
        return torch.stack([layer.aux_loss for layer in self.layers()]).sum()


def is_expert(name: str) -> bool:
    """True for parameters that live on one rank only; the others are the same everywhere."""
    return ".experts." in name


def named(model: nn.Module, *, experts: bool) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters that are (or are not) an expert's, in order."""
    return ((name, parameter) for name, parameter in model.named_parameters() if is_expert(name) == experts)
