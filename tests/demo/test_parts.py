"""Small parts of the demo: verdict, pictures, model."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from epee.demo import check, run
from epee.demo.model import Transformer, is_expert
from epee.demo.settings import Settings
from epee.errors import UnsupportedError


def deviating(part: str, by: float) -> dict[str, torch.Tensor]:
    """A step whose tensors are 1, but for one part."""
    step = {name: torch.ones(3, dtype=torch.float64) for name in ("loss", "gradients of x", "weights of x")}
    return {name: value + by * torch.tensor([0, 1, 0]) * name.startswith(part) for name, value in step.items()}


def test_a_deviation_passes_below_the_tolerance_only() -> None:
    exact = deviating("loss", 0.0)
    assert check.compare(exact, exact)["max_deviation"] == 0
    for part in ("loss", "gradients", "weights"):
        assert check.compare(deviating(part, check.TOLERANCE / 2), exact)["passed"]
        for bad in (2 * check.TOLERANCE, float("nan"), float("inf")):
            verdict = check.compare(deviating(part, bad), exact)
            assert not verdict["passed"]
            assert not verdict["max_deviation"] <= check.TOLERANCE


def test_missing_matplotlib_is_reported_before_the_training(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)
    with pytest.raises(UnsupportedError, match=r"need matplotlib, which is not installed; pip install matplotlib"):
        run.run(Settings(out=str(tmp_path / "out")))
    assert not (tmp_path / "out").exists()


def make_model(seed: int) -> Transformer:
    small = Settings(seed=seed, hidden=16, num_heads=2, num_layers=2, ffn_hidden=8, num_experts=4, context=12)
    return Transformer(small, None)


def test_the_model_does_not_look_ahead() -> None:
    model = make_model(0).double()
    tokens = torch.randint(256, (1, 12), generator=torch.Generator().manual_seed(1))
    changed = tokens.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 256
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7], after[:, 7])
    assert not torch.allclose(before[:, 8], after[:, 8])


def test_the_seed_decides_the_weights_and_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    one, same, other = make_model(5), make_model(5), make_model(6)
    assert torch.equal(torch.rand(4), expected)
    for name, value in one.state_dict().items():
        assert torch.equal(value, same.state_dict()[name]), name
        if "norm" not in name:
            assert not torch.equal(value, other.state_dict()[name]), name


def test_only_experts_differ_between_ranks() -> None:
    experts = [name for name in make_model(0).state_dict() if is_expert(name)]
    assert experts == [f"blocks.{layer}.moe.experts.{part}" for layer in range(2) for part in ("gate_up", "down")]
