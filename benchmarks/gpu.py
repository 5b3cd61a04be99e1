"""Parts that all benchmarks on GPUs share: a rank's GPU, CUDA graphs of a call, and one process for each rank.

The benchmarks use them through this module (`gpu.graph_of`), so that tests can run the benchmarks on machines without a
GPU with other implementations in their place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from epee.gpu.platform import CudaPlatform, Platform


class Graph(Protocol):
    """Recorded calls."""

    def replay(self) -> None:
        """Make the calls again, on the same memory."""


class Spread(NamedTuple):
    """Times of one call in microseconds: median, 10th and 90th percentile, each of the rank where it is largest."""

    median: float
    p10: float
    p90: float

    def columns(self, side: str) -> dict[str, float]:
        """Return the times as columns of a result's row: `SIDE_us`, `SIDE_p10_us`, `SIDE_p90_us`."""
        return {f"{side}_us": self.median, f"{side}_p10_us": self.p10, f"{side}_p90_us": self.p90}


def spread(times_us: list[float]) -> Spread:
    """Summarise the times that each rank measured; a collective call of the default group."""
    times = sorted(times_us)
    mine = torch.tensor(
        [times[len(times) // 2], times[len(times) // 10], times[len(times) * 9 // 10]],
        dtype=torch.float64,
        device="cpu",
    )
    dist.all_reduce(mine, op=dist.ReduceOp.MAX)
    return Spread(*mine.tolist())


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
