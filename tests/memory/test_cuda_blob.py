"""What a peer says about its GPU memory is checked before the driver is asked for anything."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epee.errors import ProtocolError, ResourceError
from epee.memory.cuda import BLOB_BYTES, CudaRegion

_BLOB = struct.Struct("<8sqqqq16sii16s64s")
GOOD = (b"epeegpu2", 1 << 30, 5, 3, 2 << 20, bytes(16), 1, 0, bytes(16), bytes(64))


@pytest.mark.parametrize(
    ("place", "value"),
    [(0, b"epeehst1"), (0, b"epeegpu1"), (1, 0), (1, -5), (1, 1 << 31), (2, -1), (3, -1), (3, 1 << 31), (4, 0),
     (4, 512), (4, 4097), (4, 1 << 60), (6, 0), (6, 8), (6, -1), (6, 5), (6, 6), (7, -1)],
)  # fmt: skip
def test_damaged_blob_is_refused(place: int, value: object) -> None:
    fields: list[object] = list(GOOD)
    fields[place] = value
    with pytest.raises(ProtocolError, match="GPU region blob"):
        CudaRegion.attach(_BLOB.pack(*fields), 0)


def test_an_owner_that_has_ended_is_named() -> None:
    with pytest.raises(ResourceError, match=f"process {1 << 30} has ended"):
        CudaRegion.attach(_BLOB.pack(*GOOD), 0)


@pytest.mark.parametrize("size", [0, BLOB_BYTES - 1, BLOB_BYTES + 1])
def test_blob_of_wrong_length_is_refused(size: int) -> None:
    with pytest.raises(ProtocolError, match=f"has {BLOB_BYTES} bytes, got {size}"):
        CudaRegion.attach(bytes(size), 0)


@given(st.binary(min_size=BLOB_BYTES - 8, max_size=BLOB_BYTES - 8))
def test_any_bytes_give_an_error_of_ours(data: bytes) -> None:
    with pytest.raises((ProtocolError, ResourceError)):
        CudaRegion.attach(GOOD[0] + data, 0)
