"""The demo's proof on GPUs, where rows of float64 are not served: a step in float32, how far off it may be measured."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from epee.demo import check, rank, run
from epee.demo.settings import Settings
from epee.errors import InvalidArgument, UnsupportedError
from epee.nn import DenseMoELayer
from tests.csrc.emulated import has_compiler
from tests.demo import rounded
from tests.demo.test_demo import run_here, small


def proved(out: Path, run_rank: Callable[..., None], **changes: Any) -> tuple[int, dict[str, Any], str]:
    """Run the demo as if there were two GPUs; return exit code, verdict and output."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "num_gpus", lambda: 2)
        patch.setattr(rank, "run_rank", run_rank)
        code, output = run_here(small(device="cuda", out=str(out), **changes))
    return code, json.loads((out / "demo.json").read_text())["check"], output


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_a_step_in_float32_passes(num_ranks: int, tmp_path: Path) -> None:
    code, verdict, output = proved(tmp_path, rounded.on_cpus, num_ranks=num_ranks)
    assert code == 0, output
    assert f"on {min(2, num_ranks)} GPU(s)" in output
    assert "PASS" in output
    assert verdict["dtype"] == "float32"
    assert 0 < verdict["max_deviation"] <= verdict["tolerance"] < 1e-4


@pytest.mark.compiler
@pytest.mark.timeout(240)  # the kernels are built first
@pytest.mark.skipif(not has_compiler(), reason="no g++ here to build the kernels with")
def test_it_passes_over_the_gpus_kernels(tmp_path: Path) -> None:
    code, verdict, output = proved(tmp_path, rounded.on_emulated_gpus, num_steps=2)
    assert code == 0, output
    assert verdict["passed"]


@pytest.mark.parametrize("wrong", [rounded.losing_a_row, rounded.choosing_badly])
def test_a_lost_row_and_a_bad_choice_fail(wrong: Callable[..., None], tmp_path: Path) -> None:
    code, verdict, output = proved(tmp_path, wrong, num_steps=1)
    assert code == 1
    assert "FAIL" in output
    assert verdict["max_deviation"] > 10 * verdict["tolerance"]


def step(by: float) -> check.Step:
    return {"loss": torch.tensor([1.0 + by], dtype=torch.float64), "gradients of x": torch.ones(3)}


def test_the_tolerance_is_what_the_dense_step_is_off_by_and_has_a_limit() -> None:
    exact = step(0.0)
    for off, ours, missed, passed in (
        (1e-6, 1e-6 * check.MARGIN * 0.9, 0.0, True),
        (1e-6, 1e-6 * check.MARGIN * 1.1, 0.0, False),
        (1e-6, 0.0, 1e-6 * check.MARGIN * 1.1, False),
        (0.5, check.MOST * 1.1, 0.0, False),
        (float("nan"), 0.0, 0.0, False),
        (1e-6, float("nan"), 0.0, False),
        (1e-6, 0.0, float("nan"), False),
    ):
        assert check.compare_rounded(step(ours), step(off), exact, missed)["passed"] is passed, (off, ours, missed)


def test_shortfall_is_the_probability_that_was_missed() -> None:
    layer = DenseMoELayer(4, 8, num_experts=3, num_topk=2, dtype=torch.float64)
    layer.router.data = torch.eye(3, 4, dtype=torch.float64)
    x = torch.tensor([[2.0, 1.0, 0.0, 5.0]], dtype=torch.float64)
    probabilities = x[0, :3].softmax(-1)
    for given, missed in (([0, 1], 0.0), ([1, 0], 0.0), ([0, 2], probabilities[1] - probabilities[2])):
        layer.given_idx = torch.tensor([given])
        assert float(check.shortfall(layer, x)) == pytest.approx(float(missed))
        assert layer(x).shape == x.shape
        assert layer.topk_idx.tolist() == [given]


def test_settings_for_gpus_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "num_gpus", lambda: 0)
    with pytest.raises(UnsupportedError, match="--device cuda needs a GPU"):
        run.run(Settings(device="cuda"))
    with pytest.raises(InvalidArgument, match='must be "cpu" or "cuda"'):
        Settings(device="gpu").check()
    with pytest.raises(InvalidArgument, match="--hosts needs --device cpu"):
        Settings(device="cuda", num_ranks=4, num_hosts=2).check()
    with pytest.raises(InvalidArgument, match="--kill needs --device cpu"):
        Settings(device="cuda", victim=1).check()
    assert [Settings().most_ranks(count) for count in (0, 1, 2, 3, 4, 7, 8, 16)] == [1, 1, 2, 2, 4, 4, 8, 8]
