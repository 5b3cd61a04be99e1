"""The kernel that counts a layout, on a GPU: as plain torch counts, from several streams, in a graph."""

from __future__ import annotations

import pytest
import torch

from epee.gpu.layout import DispatchLayout, count_layout, count_with_torch
from tests.csrc.test_layout_count import routing

pytestmark = pytest.mark.gpu(1)


def same(found: DispatchLayout, idx: torch.Tensor, num_ranks: int, num_experts: int) -> None:
    """Compare with plain torch on the CPU."""
    for got, want in zip(found, count_with_torch(idx.cpu(), num_ranks, num_experts), strict=True):
        assert torch.equal(got.cpu().view(torch.uint8), want.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize(
    ("num_tokens", "num_topk", "num_ranks", "num_experts"),
    [(0, 8, 8, 64), (1, 8, 8, 64), (4096, 8, 8, 256), (65536, 9, 4, 1024), (333, 32, 8, 64), (129, 1, 1, 8192)],
)
def test_counts_are_those_of_plain_torch(
    num_tokens: int, num_topk: int, num_ranks: int, num_experts: int, dtype: torch.dtype
) -> None:
    idx = routing(num_tokens, num_topk, num_experts)
    if dtype == torch.int32:
        idx = idx.clamp(-(1 << 31), (1 << 31) - 1).to(dtype)
    same(count_layout(idx.cuda(), num_ranks, num_experts), idx, num_ranks, num_experts)


def test_streams_count_at_the_same_time() -> None:
    batches = [routing(4096, 8, 256, seed).cuda() for seed in range(4)]
    streams = [torch.cuda.Stream() for _ in batches]
    torch.cuda.synchronize()
    found: list[list[DispatchLayout]] = [[] for _ in batches]
    for _ in range(50):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found[i].append(count_layout(batches[i], 8, 256))
    torch.cuda.synchronize()
    for batch, results in zip(batches, found, strict=True):
        for result in results:
            same(result, batch, 8, 256)


def test_a_graph_counts_what_is_there_at_its_replay() -> None:
    idx = routing(512, 8, 64).cuda()
    count_layout(idx, 8, 64)  # loads the kernel
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = count_layout(idx, 8, 64)
    for seed in range(3):
        idx.copy_(routing(512, 8, 64, seed))
        graph.replay()
        same(found, idx, 8, 64)
