"""The layer that every client's dispatcher must equal: an MoE layer computed densely, by one process, from seeds.

Expert e maps a row x to `tanh(x @ W_e)`. All numbers are float32, so a row in a wrong place or a lost gradient shows as
an error of the order of one, and what remains are the roundings of sums of a few terms.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch

TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


@dataclass(frozen=True)
class Sizes:
    """Of a layer: tokens of each rank, experts of a rank, and so on."""

    num_tokens: tuple[int, ...]
    num_local: int = 3
    hidden: int = 32
    num_topk: int = 2
    drops: bool = False  # some of a token's experts are -1

    @property
    def num_experts(self) -> int:
        """Over all ranks."""
        return self.num_local * len(self.num_tokens)


class Batch(NamedTuple):
    """What a rank sends, and the gradient of what it gets back."""

    x: torch.Tensor
    idx: torch.Tensor
    probs: torch.Tensor
    grad: torch.Tensor


# from x, idx, probs and this rank's expert weights `[num_local, hidden, hidden]` to `[num_tokens, hidden]`
Layer: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def batch(sizes: Sizes, rank: int, seed: int) -> Batch:
    """Return the batch of a rank."""
    gen = torch.Generator().manual_seed(1000 * seed + rank)
    count = sizes.num_tokens[rank]
    scores = torch.rand(count, sizes.num_experts, generator=gen)
    probs, idx = scores.topk(sizes.num_topk, dim=1)
    if sizes.drops:
        gone = torch.rand(idx.shape, generator=gen) < 0.3
        idx, probs = idx.masked_fill(gone, -1), probs.masked_fill(gone, 0)
    x, grad = (torch.randn(count, sizes.hidden, generator=gen) for _ in range(2))
    return Batch(x, idx, probs, grad)


def weights(sizes: Sizes) -> torch.Tensor:
    """Return the weights of all experts, `[num_experts, hidden, hidden]`."""
    gen = torch.Generator().manual_seed(7)
    return torch.randn(sizes.num_experts, sizes.hidden, sizes.hidden, generator=gen) / sizes.hidden**0.5


def expert(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return what an expert makes of rows."""
    return torch.tanh(rows @ weight)


def dense(x: torch.Tensor, idx: torch.Tensor, probs: torch.Tensor, all_weights: torch.Tensor) -> torch.Tensor:
    """Return the layer's output."""
    total = torch.zeros_like(x)
    for which, weight in enumerate(all_weights):
        total = total + (probs * (idx == which)).sum(1, keepdim=True) * expert(x, weight)
    return total


def check(sizes: Sizes, rank: int, seed: int, layer: Layer, device: str = "cpu") -> None:
    """Compare a client's layer on this rank with the dense one: output, gradients of x, probs and expert weights.

    The client's tensors are on `device`, the dense layer's on the CPU.
    """
    mine = batch(sizes, rank, seed)
    first = rank * sizes.num_local
    ours = mine.x, mine.probs, weights(sizes)[first : first + sizes.num_local]
    x, probs, local = (part.to(device, copy=True).requires_grad_() for part in ours)
    out = layer(x, mine.idx.to(device), probs, local)
    out.backward(mine.grad.to(device))
    all_weights = weights(sizes).requires_grad_()
    for other in range(len(sizes.num_tokens)):
        theirs = batch(sizes, other, seed)
        dense_x, dense_probs = theirs.x.clone().requires_grad_(), theirs.probs.clone().requires_grad_()
        wanted = dense(dense_x, theirs.idx, dense_probs, all_weights)
        wanted.backward(theirs.grad)
        if other == rank:
            wanted_probs = dense_probs.grad.masked_fill(theirs.idx < 0, 0)  # type: ignore[union-attr]
            for got, want in ((out, wanted), (x.grad, dense_x.grad), (probs.grad, wanted_probs)):
                torch.testing.assert_close(got.cpu(), want, **TOLERANCE)  # type: ignore[union-attr]
    wanted_local = all_weights.grad[first : first + sizes.num_local]  # type: ignore[index]
    torch.testing.assert_close(local.grad.cpu(), wanted_local, **TOLERANCE)  # type: ignore[union-attr]


def by_expert(rows: torch.Tensor, counts: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return the experts' outputs for rows that are grouped by expert; what stands behind them becomes zeros."""
    ends = counts.cumsum(0).tolist()
    parts = [expert(rows[first:end], weight) for first, end, weight in zip([0, *ends[:-1]], ends, local, strict=True)]
    return torch.cat([*parts, torch.zeros_like(rows[ends[-1] :])])
