"""The process group beside the buffer: it sums the gradients of everything that is not an expert.

`SharedGradients` is the one place where gradients meet a collective. The gradients of all shared parameters lie in one
flat tensor (each `.grad` is a view of it), with a few words behind them that ride along: each rank adds its word, the
sum is the same everywhere, so ranks agree on when to stop without a call of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

TIMEOUT_S = 60.0


@contextmanager
def process_group(
    backend: str, store_path: str, rank: int, num_ranks: int, options: object = None
) -> Iterator[dist.ProcessGroup]:
    """Open the default process group over a file store and yield it; closed on a normal end only.

    `options` are the backend's `pg_options`.

    After a failure it is left to the end of the process: closing would wait for peers that may be gone.
    """
    dist.init_process_group(
        backend,
        init_method=f"file://{store_path}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=TIMEOUT_S),
        pg_options=options,
    )
    group = dist.group.WORLD
    assert group is not None
    yield group
    dist.destroy_process_group()


class SharedGradients:
    """One flat tensor for the gradients of `parameters` (same on all ranks, one dtype) and `num_words` words."""

    def __init__(self, parameters: list[nn.Parameter], num_words: int = 0) -> None:
        sizes = [parameter.numel() for parameter in parameters]
        self.flat = torch.zeros(sum(sizes) + num_words, dtype=parameters[0].dtype, device="cpu")
        *views, self.words = self.flat.split([*sizes, num_words])
        for parameter, view in zip(parameters, views, strict=True):
            parameter.grad = view.view_as(parameter)  # backward adds into it in place

    def zero(self) -> None:
        """Forget all gradients and words; call before each backward."""
        self.flat.zero_()

    def sum_over_ranks(self) -> None:
        """Replace gradients and words by their sums over all ranks (collective)."""
        dist.all_reduce(self.flat)


def gather(tensor: Tensor) -> Tensor:
    """Return `[num_ranks, *shape]`: the tensor of every rank, on every rank (collective)."""
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return torch.stack(parts)
