"""Small parts of the demo: display, verdict, pictures, model."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from rich.console import Console

from epee.demo import check, display, plots, run
from epee.demo.model import Transformer, is_expert
from epee.demo.settings import ModelSize, Settings
from epee.errors import UnsupportedError
from epee.nn import DenseMoELayer

SIZE = ModelSize(hidden=16, num_heads=2, num_layers=2, ffn_hidden=8, num_experts=4, context=12)


def message(step: int) -> dict[str, object]:
    return {
        "progress": step / 10,
        "step": step,
        "seconds": 1.5,
        "loss": 3.25,
        "valid": None if step < 2 else 2.75,
        "tokens_per_s": 12345.6,
        "bytes_per_link": [[9e9, 1.5e6], [2.5e6, 9e9]],
    }


def test_without_a_terminal_lines_are_printed_now_and_then() -> None:
    output = io.StringIO()
    with display.Display(Console(file=output, width=60)) as shown:
        shown.phase("training")
        for step in range(1, 6):
            shown.progress(message(step))
    lines = output.getvalue().splitlines()
    assert lines[:2] == ["starting the ranks ...", "training ..."]
    # The first at once, the others too soon after it, the last at the end; no line is broken at 60 columns.
    assert lines[2:] == [display.progress_line(message(1)), display.progress_line(message(5))]
    assert lines[3] == ("step    5    1.5 s  loss 3.250  valid 2.750  12,346 tokens/s  sent 0→1 1.5 MB  1→0 2.5 MB")


def test_a_terminal_shows_everything_live() -> None:
    output = io.StringIO()
    with display.Display(Console(file=output, force_terminal=True, width=100)) as shown:
        shown.phase("training")
        shown.progress(message(1))
        shown.progress(message(7))
    text = output.getvalue()
    for expected in ("training", "3.250 nats per byte", "2.750 nats per byte", "12,346 tokens/s", "0→1 1.5 MB"):
        assert expected in text


def test_a_deviation_passes_below_the_tolerance_only() -> None:
    assert check.Deviation(0.0, 1e-13, check.TOLERANCE).passed
    for place in range(3):
        for bad in (2 * check.TOLERANCE, float("nan"), float("inf")):
            values = [0.0, 0.0, 0.0]
            values[place] = bad
            assert not check.Deviation(*values).passed


def test_missing_matplotlib_is_reported_before_the_training(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(plots.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match=r"need matplotlib, which is not installed; pip install 'epee\[demo\]'"):
        run.run(Settings(out=str(tmp_path / "out")), Console(file=io.StringIO()))
    assert not (tmp_path / "out").exists()


def test_smoothing_keeps_the_level_and_the_start() -> None:
    assert plots._smooth([2.0] * 50) == [2.0] * 50
    falling = [100.0 - step for step in range(60)]
    smoothed = plots._smooth(falling)
    assert smoothed[:3] == falling[:3]
    assert smoothed[30] == pytest.approx(falling[30])


def make_model(seed: int) -> Transformer:
    def make_moe(layer: int) -> DenseMoELayer:
        return DenseMoELayer(SIZE.hidden, SIZE.ffn_hidden, SIZE.num_experts, SIZE.num_topk, seed=layer)

    return Transformer(SIZE, make_moe, seed=seed)


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
        if "norm" not in name and ".moe." not in name:
            assert not torch.equal(value, other.state_dict()[name]), name


def test_only_experts_differ_between_ranks() -> None:
    experts = [name for name in make_model(0).state_dict() if is_expert(name)]
    assert experts == [f"blocks.{layer}.moe.experts.{part}" for layer in range(2) for part in ("gate_up", "down")]
