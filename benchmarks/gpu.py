"""Parts that all benchmarks on GPUs share: a rank's GPU, CUDA graphs of a call, and one process for each rank.

The benchmarks use them through this module (`gpu.graph_of`), so that tests can run the benchmarks on machines without a
GPU with other implementations in their place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.multiprocessing as mp

from epee.gpu.platform import CudaPlatform, Platform


class Graph(Protocol):
    """Recorded calls."""

    def replay(self) -> None:
        """Make the calls again, on the same memory."""


def platform_of(rank: int) -> Platform:
    """Return the GPU of a rank."""
    return CudaPlatform(torch.device("cuda", rank))


def graph_of(call: Callable[[], Any], count: int) -> Graph:
    """Record `count` calls in one CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            call()
    return graph


def spawn(function: Callable[..., None], args: tuple[Any, ...], num_ranks: int) -> None:
    """Call `function(rank, *args)` in `num_ranks` processes; raises if one of them fails."""
    mp.spawn(function, args=args, nprocs=num_ranks)
