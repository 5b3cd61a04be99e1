"""`memory.shared`: regions are shared by blob, and no claim in a blob is believed unchecked."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import gc
import os
import platform
import struct
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from epee.errors import AuthError, InvalidState, ProtocolError, ResourceError, UnsupportedError
from epee.memory import shared, signals
from epee.memory.shared import BLOB_BYTES, SharedRegion
from tests.forked import Program
from tests.harness import run_ranks

PID, START, FD, SIZE = 8, 16, 24, 32  # offsets in a blob


def changed(blob: bytes, offset: int, value: int) -> bytes:
    return blob[:offset] + struct.pack("<q", value) + blob[offset + 8 :]


@pytest.fixture
def region() -> SharedRegion:
    made = SharedRegion.create(10_000, "test")
    yield made
    made.close()


def test_an_attached_region_is_the_same_memory(region: SharedRegion) -> None:
    other = SharedRegion.attach(region.blob)
    region.tensor(torch.int64, 8, (4,)).copy_(torch.arange(4))
    assert other.tensor(torch.int64, 8, (4,)).tolist() == [0, 1, 2, 3]
    other.words(0, 1)[0] = 77
    assert region.words(0, 1)[0] == 77
    other.close()


def write_and_die(rank: int, num_ranks: int, blob: bytes) -> None:
    other = SharedRegion.attach(blob)
    other.tensor(torch.float32, 0, (3,)).fill_(rank + 1.5)
    os.kill(os.getpid(), 9)


def test_memory_outlives_a_killed_peer(region: SharedRegion) -> None:
    with pytest.raises(AssertionError, match="died without a word"):
        run_ranks(write_and_die, 1, region.blob, backend=None)
    assert region.tensor(torch.float32, 0, (3,)).tolist() == [1.5] * 3


def test_a_tensor_keeps_the_mapping_alive(region: SharedRegion) -> None:
    view = region.tensor(torch.int32, 0, (5,))
    view.fill_(9)
    region.close()
    assert view.tolist() == [9] * 5


def test_no_name_is_left_in_dev_shm(region: SharedRegion) -> None:
    assert not [name for name in os.listdir("/dev/shm") if "epee" in name]


def test_a_peer_cannot_resize_the_region(region: SharedRegion) -> None:
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
    region: SharedRegion, offset: int, value: int, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        SharedRegion.attach(changed(region.blob, offset, value))


def test_an_unsealed_file_is_refused(region: SharedRegion) -> None:
    fd = os.memfd_create("plain", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, region.mapped_bytes)
    with pytest.raises(ProtocolError, match="not sealed"):
        SharedRegion.attach(changed(region.blob, FD, fd))
    os.close(fd)


def test_a_descriptor_that_is_no_memfd_is_refused(region: SharedRegion, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(region.mapped_bytes))
    fd = os.open(path, os.O_RDWR)
    with pytest.raises(ProtocolError, match=r"no memfd|not sealed"):
        SharedRegion.attach(changed(region.blob, FD, fd))
    os.close(fd)


@given(st.binary(max_size=2 * BLOB_BYTES))
def test_any_bytes_give_an_error_of_ours(data: bytes) -> None:
    with pytest.raises((ProtocolError, ResourceError)):
        SharedRegion.attach(data)


def test_a_refused_blob_leaves_no_descriptor(region: SharedRegion) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for offset, value in [(SIZE, 1 << 20), (40, 1234), (FD, 900)]:
        with pytest.raises(ProtocolError):
            SharedRegion.attach(changed(region.blob, offset, value))
    assert len(os.listdir("/proc/self/fd")) == before


def test_memory_that_the_system_refuses_is_a_resource_error() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ResourceError, match="make the buffer smaller"):
        SharedRegion.create(1 << 60, "huge")
    assert len(os.listdir("/proc/self/fd")) == before


def test_use_after_close_is_an_error(region: SharedRegion) -> None:
    region.close()
    region.close()
    with pytest.raises(InvalidState, match="closed"):
        region.tensor(torch.int64, 0, (1,))


@pytest.mark.parametrize(("system", "machine"), [("linux", "aarch64"), ("darwin", "arm64")])
def test_machines_without_fences_are_refused(monkeypatch: pytest.MonkeyPatch, system: str, machine: str) -> None:
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    with pytest.raises(UnsupportedError, match=f"{machine if system == 'linux' else system}.*use a"):
        SharedRegion.create(100, "test")


def test_seals_are_the_ones_of_the_kernel() -> None:
    for name in ("F_ADD_SEALS", "F_GET_SEALS"):
        if hasattr(fcntl, name):
            assert getattr(fcntl, name) == getattr(shared, f"_{name}")


# ---- whose memory it is, and who writes it (review A9)

FOREIGN = """
import os, sys
from epee.memory.shared import SharedRegion
if sys.argv[1] == "process":
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
os.seteuid(65534)
region = SharedRegion.create(4096, "foreign")
if sys.argv[1] == "memory":
    os.seteuid(0)
print(region.blob.hex(), flush=True)
sys.stdin.read()
print(bytes(region.words(0, 1)).hex(), flush=True)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
@pytest.mark.parametrize(
    ("what", "why"),
    [("process", "runs as user 65534"), ("memory", "was made by user 65534")],
    ids=["process", "memory"],
)
def test_memory_of_another_user_is_refused_by_root_too(what: str, why: str) -> None:
    """The second is what a program of root holds that was started by another user with descriptors left open."""
    with Program(FOREIGN, what) as child:
        blob = bytes.fromhex(child.stdout.readline())
        refused = []
        for is_writable in (True, False):
            try:
                SharedRegion.attach(blob, is_writable).words(0, 1)
            except AuthError as exc:
                refused.append(why in str(exc))
        told = child.communicate(20)[0].split()
    assert refused == [True, True]
    assert told == ["00" * 8]


def test_only_the_owner_can_map_a_sealed_region_for_writing() -> None:
    region = SharedRegion.create(10_000, "test", only_owner_writes=True)
    with pytest.raises(ResourceError, match="cannot map"):
        SharedRegion.attach(region.blob)
    other = SharedRegion.attach(region.blob, is_writable=False)
    region.words(0, 1)[0] = 77
    assert other.words(0, 1)[0] == 77
    assert other.array(np.dtype(np.uint64), 8).tolist() == [77]
    with pytest.raises(TypeError, match="read-only"):
        other.words(0, 1)[0] = 78
    with pytest.raises(ValueError, match="read-only"):
        other.array(np.dtype(np.uint64), 8)[0] = 78
    fd = os.open(f"/proc/self/fd/{region._fd}", os.O_RDWR)
    with pytest.raises(PermissionError):
        os.pwrite(fd, b"x", 100)
    os.close(fd)
    other.close()
    region.close()


@pytest.mark.parametrize("sleeper_is_owner", [True, False])
def test_futexes_work_through_a_mapping_that_cannot_be_written(sleeper_is_owner: bool) -> None:
    """Shared futexes are known by file and offset, so either side may sleep and the other wake it."""
    region = SharedRegion.create(4096, "test", only_owner_writes=True)
    other = SharedRegion.attach(region.blob, is_writable=False)
    asleep, waker = (region, other) if sleeper_is_owner else (other, region)
    answers = []
    timeouts = signals._Timespec(20, 0)

    def sleep() -> None:
        address = ctypes.c_void_p(asleep.address)
        answers.append(
            signals._syscall(signals._SYS_FUTEX, address, signals._FUTEX_WAIT, 0, ctypes.byref(timeouts), None, 0)
        )

    thread = threading.Thread(target=sleep)
    thread.start()
    woken, deadline = 0, time.monotonic() + 20
    while woken == 0 and time.monotonic() < deadline:
        address = ctypes.c_void_p(waker.address)
        woken = signals._syscall(signals._SYS_FUTEX, address, signals._FUTEX_WAKE, 1, None, None, 0)
    thread.join(30)
    assert (woken, answers) == (1, [0])
    other.close()
    region.close()


def test_kernels_that_do_not_know_the_seal_share_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    real = fcntl.fcntl

    def old(fd: int, command: int, argument: int = 0) -> int:
        if command == shared._F_ADD_SEALS and argument & shared._SEAL_FUTURE_WRITE:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, command, argument)

    monkeypatch.setattr(fcntl, "fcntl", old)
    region = SharedRegion.create(4096, "test", only_owner_writes=True)
    other = SharedRegion.attach(region.blob, is_writable=False)
    region.words(0, 1)[0] = 5
    assert other.words(0, 1)[0] == 5
    other.close()
    region.close()


def test_an_array_keeps_the_mapping_alive(region: SharedRegion) -> None:
    array = region.array(np.dtype(np.int32), 20)
    array[:] = 9
    region.close()
    gc.collect()
    assert array.tolist() == [9] * 5
