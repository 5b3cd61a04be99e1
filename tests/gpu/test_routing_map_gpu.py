"""The kernels of routing maps on a GPU: as plain torch on the CPU, by the public functions, and in a graph."""

from __future__ import annotations

import pytest
import torch

from epee.ep import dense_weights, topk_of_map
from epee.gpu.routing_map import map_kernels
from tests.csrc.test_routing_map import SIZES, check, given

pytestmark = pytest.mark.gpu(1)


@pytest.mark.parametrize("sizes", [*SIZES, (4096, 256, 8), (8192, 1024, 16)])
def test_results_are_those_of_plain_torch(sizes: tuple[int, int, int]) -> None:
    check(map_kernels(torch.cuda.current_device()), *sizes, device="cuda")


def test_a_graph_reads_the_map_of_its_replay() -> None:
    chosen, probs = given(64, 128, 6)
    on_gpu, probs_on_gpu = torch.zeros_like(chosen).cuda(), probs.cuda()
    topk_of_map(on_gpu, probs_on_gpu, 6)  # loads the kernel
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        idx, weights, counts = topk_of_map(on_gpu, probs_on_gpu, 6)
        assert weights is not None
        dense = dense_weights(idx, weights, 128)
    on_gpu.copy_(chosen)
    graph.replay()
    want = topk_of_map(chosen, probs, 6)
    assert torch.equal(idx.cpu(), want[0])
    assert want[1] is not None
    assert torch.equal(dense.cpu(), dense_weights(want[0], want[1], 128))
    assert counts[:, 1].sum().item() == want[2][:, 1].sum().item()
