"""What a peer says about its GPU memory is checked before the driver is asked for anything."""

from __future__ import annotations

import struct

import pytest

from epee.errors import ProtocolError
from epee.memory.cuda import BLOB_BYTES, CudaRegion

_BLOB = struct.Struct("<8sqqqq16s")
GOOD = (b"epeegpu1", 1, 1, 3, 2 << 20, bytes(16))


@pytest.mark.parametrize(
    ("place", "value"), [(0, b"epeehst1"), (1, 0), (1, -5), (3, -1), (4, 0), (4, 512), (4, 1 << 60)]
)
def test_damaged_blob_is_refused(place: int, value: object) -> None:
    fields: list[object] = list(GOOD)
    fields[place] = value
    with pytest.raises(ProtocolError, match="GPU region blob"):
        CudaRegion.attach(_BLOB.pack(*fields), 0)


@pytest.mark.parametrize("size", [0, BLOB_BYTES - 1, BLOB_BYTES + 1])
def test_blob_of_wrong_length_is_refused(size: int) -> None:
    with pytest.raises(ProtocolError, match=f"has {BLOB_BYTES} bytes, got {size}"):
        CudaRegion.attach(bytes(size), 0)
