"""The demo's model: a byte-level transformer whose feed-forward layers are Mixture-of-Experts layers.

The layer is handed in as a factory, so the same model is built over epee (`MoELayer`) and, for the check, dense in
one process (`DenseMoELayer`). Attention, norms and embeddings are plain and the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..nn import DenseMoELayer, MoELayer
from .settings import ModelSize

NUM_BYTES = 256
PROMPT = b"def "
_TEMPERATURE = 0.7
MoE = MoELayer | DenseMoELayer


class Block(nn.Module):
    """Attention and a Mixture-of-Experts layer, each with a norm before and the input added after."""

    def __init__(self, size: ModelSize, moe: MoE) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(size.hidden, device="cpu", dtype=torch.float32)
        self.attention = nn.MultiheadAttention(
            size.hidden, size.num_heads, bias=False, batch_first=True, device="cpu", dtype=torch.float32
        )
        self.moe_norm = nn.RMSNorm(size.hidden, device="cpu", dtype=torch.float32)
        self.moe = moe

    def forward(self, x: Tensor) -> Tensor:
        """`[batch, length, hidden]` to the same shape."""
        normed = self.attention_norm(x)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device, dtype=x.dtype)
        x = x + self.attention(normed, normed, normed, attn_mask=mask, is_causal=True, need_weights=False)[0]
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
            for table, std in ((self.embedding, 0.5), (self.previous, 0.5), (self.position, 0.1)):
                nn.init.normal_(table.weight, std=std)

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

    @torch.no_grad()
    def write(self, num_bytes: int, *, seed: int) -> str:
        """Return `PROMPT` and what the model adds to it, as text. Collective, as every forward is."""
        generator = torch.Generator(device="cpu").manual_seed(seed)
        tokens = list(PROMPT)
        for _ in range(num_bytes):
            window = torch.tensor([tokens[-len(self.position.weight) :]], dtype=torch.int64, device="cpu")
            probabilities = (self(window)[0, -1] / _TEMPERATURE).softmax(-1)
            tokens.append(int(torch.multinomial(probabilities, 1, generator=generator)))
        return bytes(tokens).decode("utf-8", errors="replace")


def is_expert(name: str) -> bool:
    """True for parameters that live on one rank only; the others are the same everywhere."""
    return ".experts." in name
