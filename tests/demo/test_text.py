"""The demo's text: deterministic, split without overlap, refused when too short."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from epee.demo import text
from epee.errors import InvalidArgument


def test_the_standard_library_is_the_default_and_the_same_each_time() -> None:
    data = text.read_text(None)
    assert len(data) > 1_000_000
    assert data == text.read_text(None)
    assert b"class OrderedDict(dict)" in data
    assert b"site-packages" not in data[:1000]


def test_split_uses_each_byte_once_and_keeps_the_end_for_validation() -> None:
    train, valid = text.split_text(b"a" * 95_000 + b"b" * 5_000)
    assert train.tolist() == [ord("a")] * 95_000
    assert valid.tolist() == [ord("b")] * 5_000


def test_too_little_text_is_refused_with_a_remedy(tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("too short")
    with pytest.raises(InvalidArgument, match=r"at least 81920 bytes, --text .*short.txt has 9; name a longer file"):
        text.read_text(str(short))


def test_targets_are_the_next_bytes_and_windows_stay_inside() -> None:
    source = torch.arange(200, dtype=torch.uint8)
    almost_one = 1 - torch.finfo(torch.float64).eps / 2
    inputs, targets = text.windows(source, torch.tensor([0.0, 0.5, almost_one], dtype=torch.float64), 16)
    assert torch.equal(inputs + 1, targets)
    assert inputs[0, 0] == 0
    assert targets[-1, -1] == 199
    places = torch.rand(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    inputs, targets = text.windows(source, places, 16)
    assert torch.equal(inputs + 1, targets)
    assert targets.max() == 199
