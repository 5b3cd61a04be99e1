"""The demo's text: deterministic, split without overlap, refused when too short."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from epee.demo import run
from epee.demo.settings import Settings
from epee.demo.train import draw, split_text
from epee.errors import UnsupportedError

CPU = torch.device("cpu")


def test_the_standard_library_is_the_default_and_the_same_each_time() -> None:
    data = run.read_text()
    assert len(data) > 1_000_000
    assert data == run.read_text()
    assert b"class Fraction(" in data


def test_split_uses_each_byte_once_and_keeps_the_end_for_validation() -> None:
    train, valid = split_text(b"a" * 95_000 + b"b" * 5_000)
    assert train.tolist() == [ord("a")] * 95_000
    assert valid.tolist() == [ord("b")] * 5_000


def test_a_python_without_sources_is_refused_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "short.py").write_text("too short")
    monkeypatch.setattr(run.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(UnsupportedError, match=r"learns from Python's own modules, and .* has none; use another"):
        run.read_text()


def test_targets_are_the_next_bytes_and_windows_stay_inside() -> None:
    source = torch.arange(200, dtype=torch.uint8)
    settings = Settings(batch=5000, context=16)
    inputs, targets = draw(source, settings, torch.Generator().manual_seed(0), CPU)
    assert inputs.shape == targets.shape == (5000, 16)
    assert torch.equal(inputs[:, :1] + torch.arange(17), torch.cat([inputs, targets[:, -1:]], 1))
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert inputs[:, 0].unique().tolist() == list(range(184)), "each byte is in a window, the first and the last, too"
    assert targets.max() == 199


def test_windows_depend_on_the_generator_only() -> None:
    source = torch.arange(200, dtype=torch.uint8)
    one, same, other = (
        draw(source, Settings(context=16), torch.Generator().manual_seed(seed), CPU) for seed in (5, 5, 6)
    )
    assert torch.equal(one[0], same[0])
    assert not torch.equal(one[0], other[0])
