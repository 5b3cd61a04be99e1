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


def test_split_uses_each_byte_once_and_keeps_whole_blocks_for_validation() -> None:
    num_blocks = 3 * text.VALID_EVERY
    data = b"".join(bytes([block]) * text.BLOCK_BYTES for block in range(num_blocks))
    train, valid = text.split_text(bytearray(data))
    assert len(train) + len(valid) == len(data)
    assert valid.unique().tolist() == [19, 39, 59]
    assert not set(train.unique().tolist()) & {19, 39, 59}


def test_a_short_text_keeps_its_end_for_validation() -> None:
    data = bytearray(b"a" * 95_000 + b"b" * 5_000)
    train, valid = text.split_text(data)
    assert train.unique().tolist() == [ord("a")]
    assert valid.tolist() == [ord("b")] * 5_000


def test_too_little_text_is_refused_with_a_remedy(tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("too short")
    with pytest.raises(InvalidArgument, match=r"at least 81920 bytes, --text .*short.txt has 9; name a longer file"):
        text.read_text(str(short))


def test_targets_are_the_next_bytes_and_windows_stay_inside() -> None:
    source = torch.arange(200, dtype=torch.uint8)
    inputs, targets = text.windows(source, text.spread_starts(source, 7, 16), 16)
    assert torch.equal(inputs + 1, targets)
    assert inputs[0, 0] == 0
    assert targets[-1, -1] == 199
    generator = torch.Generator().manual_seed(0)
    inputs, targets = text.windows(source, text.random_starts(source, 1000, 16, generator), 16)
    assert torch.equal(inputs + 1, targets)
    assert targets.max() == 199
