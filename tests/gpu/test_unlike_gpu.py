"""PREMUL_SUM, lists of unlike sizes and sparse sums of CUDA tensors, on real GPUs.

Ranks share a GPU where there are fewer GPUs than ranks.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.collectives import unlike_cases
from tests.harness import run_ranks

from .test_collectives_gpu import _begin

pytestmark = [pytest.mark.gpu(1), pytest.mark.timeout(240)]


def _products(rank: int, num_ranks: int) -> None:
    device, half = _begin(rank)
    unlike_cases.products(rank, num_ranks, lambda x: x.to(device), counts=(5, 30_001, 700_001))
    x = torch.full((3,), 4.0, device=device)
    factor = torch.zeros(1, device=device)
    factor.fill_(0.5 + rank)  # in the order of the stream
    dist.all_reduce(x, op=unlike_cases.premul(factor))
    factor.fill_(100.0)
    assert x.tolist() == [4 * sum(0.5 + r for r in range(num_ranks))] * 3
    half.check()
    dist.barrier()


def test_premul_sum_has_the_bits_of_cpu_tensors() -> None:
    run_ranks(_products, 2, backend="epee", timeout_s=220)


def _unlike(rank: int, num_ranks: int) -> None:
    device, half = _begin(rank)
    for scale in (1, 50):
        unlike_cases.unlike(rank, num_ranks, lambda x: x.to(device), scale)
    half.check()
    dist.barrier()


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_lists_of_unlike_sizes_are_gathered_and_reduced(num_ranks: int) -> None:
    run_ranks(_unlike, num_ranks, backend="epee", timeout_s=220)


def _sparse(rank: int, num_ranks: int) -> None:
    device, _ = _begin(rank)
    for is_async in (False, True):
        x = torch.sparse_coo_tensor([[rank, 5]], [1.0, 2.0], (8,), device=device, check_invariants=True)
        work = dist.all_reduce(x, async_op=is_async)
        if work is not None:
            work.wait()
        wanted = [1.0] * num_ranks + [0.0] * (5 - num_ranks) + [2.0 * num_ranks, 0.0, 0.0]
        assert x.is_coalesced()
        assert x.to_dense().tolist() == wanted
    torch.manual_seed(0)
    net = nn.parallel.DistributedDataParallel(nn.EmbeddingBag(50, 8, sparse=True).to(device))
    net(torch.tensor([[rank, 7]], device=device)).sum().backward()
    grad = net.module.weight.grad
    assert grad.is_sparse
    assert grad.to_dense()[7].tolist() == [0.5] * 8  # the mean of two
    dist.barrier()


def test_sparse_sums_and_ddp_over_sparse_embeddings() -> None:
    run_ranks(_sparse, 2, backend="epee", timeout_s=220)
