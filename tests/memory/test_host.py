"""`memory.host`: regions are shared by blob, and no claim in a blob is believed unchecked."""

from __future__ import annotations

import fcntl
import os
import platform
import struct
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from epee.errors import InvalidState, ProtocolError, ResourceError, UnsupportedError
from epee.memory import host
from epee.memory.host import BLOB_BYTES, HostRegion
from tests.harness import run_ranks

PID, START, FD, SIZE = 8, 16, 24, 32  # offsets in a blob


def changed(blob: bytes, offset: int, value: int) -> bytes:
    return blob[:offset] + struct.pack("<q", value) + blob[offset + 8 :]


@pytest.fixture
def region() -> HostRegion:
    made = HostRegion.create(10_000, "test")
    yield made
    made.close()


def test_an_attached_region_is_the_same_memory(region: HostRegion) -> None:
    other = HostRegion.attach(region.blob)
    region.tensor(torch.int64, 8, (4,)).copy_(torch.arange(4))
    assert other.tensor(torch.int64, 8, (4,)).tolist() == [0, 1, 2, 3]
    other.words(0, 1)[0] = 77
    assert region.words(0, 1)[0] == 77
    other.close()


def write_and_die(rank: int, num_ranks: int, blob: bytes) -> None:
    other = HostRegion.attach(blob)
    other.tensor(torch.float32, 0, (3,)).fill_(rank + 1.5)
    os.kill(os.getpid(), 9)


def test_memory_outlives_a_killed_peer(region: HostRegion) -> None:
    with pytest.raises(AssertionError, match="died without a word"):
        run_ranks(write_and_die, 1, region.blob, backend=None)
    assert region.tensor(torch.float32, 0, (3,)).tolist() == [1.5] * 3


def test_a_tensor_keeps_the_mapping_alive(region: HostRegion) -> None:
    view = region.tensor(torch.int32, 0, (5,))
    view.fill_(9)
    region.close()
    assert view.tolist() == [9] * 5


def test_no_name_is_left_in_dev_shm(region: HostRegion) -> None:
    assert not [name for name in os.listdir("/dev/shm") if "epee" in name]


def test_a_peer_cannot_resize_the_region(region: HostRegion) -> None:
    fd = os.open(f"/proc/self/fd/{region._fd}", os.O_RDWR)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 4096)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 1 << 20)
    os.close(fd)


@pytest.mark.parametrize(
    ("offset", "value", "error", "text"),
    [
        (0, 0, ProtocolError, "starts with"),
        (PID, -1, ProtocolError, "out of range"),
        (PID, 2**22 - 1, ResourceError, "has ended"),
        (START, 1, ResourceError, "has ended"),
        (FD, -5, ProtocolError, "out of range"),
        (FD, 900, ProtocolError, "no descriptor 900"),
        (SIZE, 64, ProtocolError, "out of range"),
        (SIZE, 1 << 20, ProtocolError, "promised"),
        (40, 1234, ProtocolError, "cookie differs"),
    ],
)
def test_a_false_claim_is_refused(
    region: HostRegion, offset: int, value: int, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        HostRegion.attach(changed(region.blob, offset, value))


def test_an_unsealed_file_is_refused(region: HostRegion) -> None:
    fd = os.memfd_create("plain", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, region.mapped_bytes)
    with pytest.raises(ProtocolError, match="not sealed"):
        HostRegion.attach(changed(region.blob, FD, fd))
    os.close(fd)


def test_a_descriptor_that_is_no_memfd_is_refused(region: HostRegion, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(region.mapped_bytes))
    fd = os.open(path, os.O_RDWR)
    with pytest.raises(ProtocolError, match=r"no memfd|not sealed"):
        HostRegion.attach(changed(region.blob, FD, fd))
    os.close(fd)


@given(st.binary(max_size=2 * BLOB_BYTES))
def test_any_bytes_give_an_error_of_ours(data: bytes) -> None:
    with pytest.raises((ProtocolError, ResourceError)):
        HostRegion.attach(data)


def test_a_refused_blob_leaves_no_descriptor(region: HostRegion) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for offset, value in [(SIZE, 1 << 20), (40, 1234), (FD, 900)]:
        with pytest.raises(ProtocolError):
            HostRegion.attach(changed(region.blob, offset, value))
    assert len(os.listdir("/proc/self/fd")) == before


def test_memory_that_the_system_refuses_is_a_resource_error() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ResourceError, match="make the buffer smaller"):
        HostRegion.create(1 << 60, "huge")
    assert len(os.listdir("/proc/self/fd")) == before


def test_use_after_close_is_an_error(region: HostRegion) -> None:
    region.close()
    region.close()
    with pytest.raises(InvalidState, match="closed"):
        region.tensor(torch.int64, 0, (1,))


@pytest.mark.parametrize(("system", "machine"), [("linux", "aarch64"), ("darwin", "arm64")])
def test_machines_without_fences_are_refused(monkeypatch: pytest.MonkeyPatch, system: str, machine: str) -> None:
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    with pytest.raises(UnsupportedError, match=f"{machine if system == 'linux' else system}.*use a"):
        HostRegion.create(100, "test")


def test_seals_are_the_ones_of_the_kernel() -> None:
    for name in ("F_ADD_SEALS", "F_GET_SEALS"):
        if hasattr(fcntl, name):
            assert getattr(fcntl, name) == getattr(host, f"_{name}")
