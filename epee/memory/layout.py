"""One description of a region: named fields in order, from which sizes, offsets and typed views follow.

No code adds byte offsets by hand. The same `Layout` gives the total size, every offset and typed torch views on the
cpu; kernels will get their struct from it as well, so both sides always agree.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch

from ..errors import InvalidArgument

CACHE_LINE_BYTES = 64


class Region(Protocol):
    """Memory that a layout describes, on a cpu or a GPU."""

    def tensor(self, dtype: torch.dtype, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a tensor over the memory at byte `offset`."""


def align_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class Field:
    """A named array inside a region.

    Attributes:
        name: unique in its layout.
        dtype: element type.
        shape: extents, may be empty for a scalar.
        align_bytes: the field starts at a multiple of this.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    align_bytes: int = CACHE_LINE_BYTES

    @property
    def nbytes(self) -> int:
        """Size of the field itself, without padding."""
        return math.prod(self.shape) * self.dtype.itemsize


class Layout:
    """Fields in order; knows each offset and the total size (both in bytes)."""

    def __init__(self, *fields: Field) -> None:
        self._fields: dict[str, Field] = {}
        self._offsets: dict[str, int] = {}
        cursor = 0
        for field in fields:
            if field.name in self._fields:
                raise InvalidArgument(f"layout field names must differ, got {field.name!r} twice")
            if any(extent < 0 for extent in field.shape):
                raise InvalidArgument(f"layout field {field.name!r} has a negative extent: {field.shape}")
            cursor = align_up(cursor, field.align_bytes)
            self._fields[field.name] = field
            self._offsets[field.name] = cursor
            cursor += field.nbytes
        self.nbytes = align_up(cursor, CACHE_LINE_BYTES)

    def __getitem__(self, name: str) -> Field:
        return self._fields[name]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the fields in their order."""
        return tuple(self._fields)

    def offset(self, name: str) -> int:
        """Return the byte offset of a field from the start of the layout."""
        return self._offsets[name]

    def tensor(self, region: Region, name: str, base: int = 0) -> torch.Tensor:
        """Return the field as a tensor view of `region`, the layout starting at byte `base`."""
        field = self._fields[name]
        return region.tensor(field.dtype, base + self._offsets[name], field.shape)
