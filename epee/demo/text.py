"""The text to learn: bytes of one file, or the sources of the running Python's standard library, in sorted order.

The last twentieth is kept for validation.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import InvalidArgument

_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
_SMALLEST_BYTES = 81920


class Text(NamedTuple):
    """Bytes to learn and bytes to validate on, uint8 tensors of one dimension."""

    train: Tensor
    valid: Tensor


def read_text(path: str | None) -> bytes:
    """Return the bytes of `path`, or of the standard library's sources when it is None.

    Raises:
        InvalidArgument: there is not enough text; the message says what to do.
    """
    data = Path(path).read_bytes() if path is not None else _standard_library()
    if len(data) < _SMALLEST_BYTES:
        where = f"--text {path}" if path is not None else "this Python's standard library"
        raise InvalidArgument(
            f"the text must have at least {_SMALLEST_BYTES} bytes, {where} has {len(data)}; "
            "name a longer file with --text"
        )
    return data


def split_text(data: bytes) -> Text:
    """Split the text into training and validation bytes."""
    values = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return Text(*values.tensor_split([len(values) - len(values) // 20]))


def windows(source: Tensor, places: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets, both `[num_windows, context]` int64, of windows at `places` from 0 to below 1."""
    starts = (places * (len(source) - context)).long()
    window = source[starts[:, None] + torch.arange(context + 1, dtype=torch.int64, device="cpu")].long()
    return window[:, :-1], window[:, 1:]


def _standard_library() -> bytes:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in root.rglob("*.py") if not _SKIPPED & set(path.relative_to(root).parts))
    return b"\n".join(path.read_bytes() for path in files)
