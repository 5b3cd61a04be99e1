"""Inputs that every rank can compute for all ranks, so that oracles need no communication."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist

import epee


class Case(NamedTuple):
    """Sizes of a test; `num_tokens` has one entry per rank."""

    num_tokens: tuple[int, ...]
    hidden: int = 8
    num_local_experts: int = 2
    num_topk: int = 2
    layout: str = "expert"
    expert_alignment: int = 1
    dtype: torch.dtype = torch.float64

    @property
    def num_ranks(self) -> int:
        return len(self.num_tokens)

    @property
    def num_experts(self) -> int:
        return self.num_local_experts * self.num_ranks


def seeded(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Normal numbers that depend on the seed and the shape only."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def tokens_of(case: Case, rank: int) -> torch.Tensor:
    """The tokens of a rank, `[num_tokens, hidden]`."""
    return seeded(case.num_tokens[rank], case.hidden, seed=100 + rank, dtype=case.dtype)


def routing_of(case: Case, rank: int) -> torch.Tensor:
    """Distinct experts per token, one slot in five without any, `[num_tokens, num_topk]`."""
    generator = torch.Generator().manual_seed(200 + rank)
    scores = torch.rand(case.num_tokens[rank], case.num_experts, generator=generator)
    topk_idx = scores.topk(case.num_topk).indices
    return topk_idx.masked_fill(torch.rand(topk_idx.shape, generator=generator) < 0.2, -1)


def weights_of(case: Case, rank: int) -> torch.Tensor:
    """Weights of the routing, `[num_tokens, num_topk]`; float64 beside float64 tokens."""
    dtype = torch.float64 if case.dtype == torch.float64 else torch.float32
    return torch.rand(
        case.num_tokens[rank], case.num_topk, generator=torch.Generator().manual_seed(300 + rank), dtype=torch.float64
    ).to(dtype)


@contextmanager
def buffer_for(case: Case) -> Iterator[epee.Buffer]:
    """This rank's buffer, with room for any routing."""
    with epee.Buffer(
        dist.group.WORLD,
        num_experts=case.num_experts,
        hidden=case.hidden,
        num_topk=case.num_topk,
        max_tokens_per_rank=max(1, *case.num_tokens),
        dtype=case.dtype,
        max_recv_rows=max(1, sum(case.num_tokens)) * case.num_topk,
        timeout=20.0,
    ) as buffer:
        yield buffer
