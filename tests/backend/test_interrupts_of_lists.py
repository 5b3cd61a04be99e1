"""Exceptions from signal handlers in PREMUL_SUM, in lists of unlike sizes and in sparse sums: a repetition is right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.harness import run_ranks

from . import test_interrupts

_premul: Any = torch._C._distributed_c10d._make_nccl_premul_sum


def _collective(kind: str, x: torch.Tensor) -> Callable[[], Any]:
    """Return a call that ends with the sum of all ranks' values in `x`."""

    def sparse() -> None:
        entries = x.to_sparse()
        dist.all_reduce(entries)
        x.copy_(entries.to_dense())

    def lists() -> None:
        sizes = [1, len(x) - 1]
        out = torch.zeros(sizes[dist.get_rank()])
        dist.reduce_scatter(out, list(x.clone().split(sizes)))
        x.fill_(out[0])

    if kind == "premul":
        return lambda: dist.all_reduce(x, op=_premul(1.0))
    return sparse if kind == "sparse" else lists


def repeat(rank: int, num_ranks: int, folder: str, kind: str, count: int, stride: int, pause_s: float) -> int:
    test_interrupts._collective = _collective
    return test_interrupts.repeat_at_every_line(rank, num_ranks, folder, kind, count, pause_s, stride)


@pytest.mark.parametrize(
    ("kind", "count", "stride", "pause_s"),
    [
        ("premul", 4, 3, 0.0), ("lists", 4, 3, 0.0), ("sparse", 4, 3, 0.0), ("sparse", 4, 17, 0.004),
        pytest.param("premul", 90_000, 17, 0.0, marks=pytest.mark.slow),
        pytest.param("lists", 90_000, 17, 0.0, marks=pytest.mark.slow),
        pytest.param("sparse", 30_000, 17, 0.0, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_a_repetition_after_an_interrupt_never_pairs_with_another_call(
    tmp_path: Path, kind: str, count: int, stride: int, pause_s: float
) -> None:
    lines = run_ranks(repeat, 2, str(tmp_path), kind, count, stride, pause_s, backend=None, timeout_s=90)
    assert min(lines) * stride > 40, "hardly a line was tried"
