"""The text to learn: bytes of one file, or the sources of the running Python's standard library.

Files are taken in sorted order, so one Python gives one text. The text is cut into blocks of 8 KiB; every 20th block
is kept for validation, wherever the text came from.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..errors import InvalidArgument

BLOCK_BYTES = 8192
VALID_EVERY = 20
_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
_SMALLEST_BYTES = 4 * VALID_EVERY * 1024


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


def split_text(data: bytes | bytearray) -> Text:
    """Split the text into training and validation bytes, block by block."""
    values = np.frombuffer(data, dtype=np.uint8)
    is_valid = (np.arange(len(values)) // BLOCK_BYTES) % VALID_EVERY == VALID_EVERY - 1
    if not is_valid.any():  # a text shorter than one round of blocks: its last part
        is_valid = np.arange(len(values)) >= len(values) - len(values) // VALID_EVERY
    return Text(torch.from_numpy(values[~is_valid]), torch.from_numpy(values[is_valid]))


def windows(source: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets, both `[num_windows, context]` int64, of the windows that begin at `starts`."""
    positions = starts[:, None] + torch.arange(context + 1, dtype=torch.int64, device="cpu")
    window = source[positions].long()
    return window[:, :-1], window[:, 1:]


def random_starts(source: Tensor, num_windows: int, context: int, generator: torch.Generator) -> Tensor:
    """Draw where windows begin, int64 `[num_windows]`."""
    highest = len(source) - context
    return torch.randint(highest, (num_windows,), generator=generator, dtype=torch.int64, device="cpu")


def spread_starts(source: Tensor, num_windows: int, context: int) -> Tensor:
    """Return evenly spread places where windows begin, int64 `[num_windows]`; always the same ones."""
    return torch.linspace(0, len(source) - context - 1, num_windows, dtype=torch.float64, device="cpu").long()


def _standard_library() -> bytes:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in root.rglob("*.py") if not _SKIPPED & set(path.relative_to(root).parts))
    return b"\n".join(path.read_bytes() for path in files)
