"""`epee.nn.MoELayer` on real GPUs: against the dense layer, in bfloat16, checkpointed, compiled."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch

from epee.nn import DenseMoELayer
from tests.harness import run_ranks
from tests.nn.cases import Case, tokens_of
from tests.nn.training import FFN_HIDDEN, WAYS, Block, steps

from .test_buffer_gpu import num_gpus, on_gpu

pytestmark = [pytest.mark.gpu(2), pytest.mark.timeout(200)]

NUM_TOKENS = (96, 61, 0, 33)


def _names() -> tuple[str, ...]:
    """The ways that this machine has; inductor needs triton, and a compiler for its launchers."""
    has_inductor = importlib.util.find_spec("triton") and shutil.which("gcc")
    return tuple(name for name in WAYS if "inductor" not in name or has_inductor)


def _run(case: Case) -> list[dict[str, list[dict[str, torch.Tensor]]]]:
    return run_ranks(on_gpu, case.num_ranks, _exactly, case, _names(), timeout_s=180)


def _exactly(rank: int, num_ranks: int, case: Case, names: tuple[str, ...]) -> Any:
    """`steps`, with products that do not depend on what TF32 rounds."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    return steps(rank, num_ranks, case, names)


def _dense(case: Case, rank: int) -> torch.Tensor:
    """The second step's output of a rank in one process, on the CPU, in float64 on the rounded weights."""
    moe: Any = DenseMoELayer(case.hidden, FFN_HIDDEN, case.num_experts, case.num_topk, dtype=case.dtype)
    block = Block(case, moe).double()
    return block(tokens_of(case, rank).double() * 2).detach()


@pytest.mark.parametrize("layout", ["expert", "rank"])
def test_a_float32_layer_is_the_dense_one_however_it_is_called(layout: str) -> None:
    case = Case(
        NUM_TOKENS[: num_gpus()], hidden=64, layout=layout, num_local_experts=4, num_topk=3, dtype=torch.float32
    )
    found = _run(case)
    for rank, ways in enumerate(found):
        torch.testing.assert_close(ways["plain"][1]["out"].double(), _dense(case, rank), rtol=1e-4, atol=1e-4)
    _check_ways(found, lambda name: {"rtol": 1e-4, "atol": 1e-4})


@pytest.mark.parametrize("layout", ["expert", "rank"])
def test_a_bfloat16_layer_is_near_the_dense_one_however_it_is_called(layout: str) -> None:
    case = Case(
        NUM_TOKENS[: num_gpus()], hidden=64, layout=layout, num_local_experts=4, num_topk=3, dtype=torch.bfloat16
    )
    found = _run(case)
    for rank, ways in enumerate(found):
        got, want = ways["plain"][1]["out"].double(), _dense(case, rank)
        # A token whose logits nearly tie may choose another expert, as rounding of the projection decides: few rows.
        is_far = (got - want).abs().amax(1) > 0.05 * want.abs().max() if len(want) else torch.zeros(0)
        assert is_far.sum() <= max(1, len(want) // 20), (rank, is_far.sum())
    # The same kernels in the same order: bit for bit, but where inductor fuses and keeps float32 between.
    _check_ways(found, lambda name: None if "inductor" in name else {"rtol": 0.0, "atol": 0.0})


def _check_ways(
    found: list[dict[str, list[dict[str, torch.Tensor]]]], tolerance: Callable[[str], dict[str, float] | None]
) -> None:
    for rank, ways in enumerate(found):
        for name, results in ways.items():
            within = tolerance(name)
            for want, got in zip(ways["plain"], results, strict=True):
                for key, value in want.items():
                    assert torch.isfinite(got[key]).all(), (rank, name, key)
                    if within is not None:
                        torch.testing.assert_close(got[key], value, **within, msg=f"rank {rank} {name} {key}")
