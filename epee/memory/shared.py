"""CPU memory that one process lends to others on the same machine: a sealed memfd, mapped by each process with its
blob.

Data path: the owner creates a memfd, seals its size, maps it and writes a random cookie into the first cache line. It
passes on a `blob` of fixed size (pid, start time, fd, size, cookie). A peer opens `/proc/PID/fd/FD`, which needs the
same user and no extra permission, and maps the same pages.

Checks before anything is opened: the process that has this pid now is the one that made the blob (start time), and it
is of our own user (root could open all users' descriptors). Checks before the mapping is used: both once more, the file
was made by our own user, it has the stated size, its size is sealed (so no peer can shrink it under us and cause
SIGBUS), and the cookie matches (so the fd was not closed and reused).

Write access: with `only_owner_writes` the kernel allows new writable mappings to no process; only the owner, which has
mapped the region before, can write (F_SEAL_FUTURE_WRITE; kernels before 5.1 do not know it, there a region is as it is
without). Peers can wait for a word of such a region and wake its owner all the same: a futex needs the address only.

Lifetime: pages live as long as any mapping or fd. A killed owner leaves nothing behind: there is no name in /dev/shm,
and peers keep what they mapped. The mapping itself is reference-counted by Python: it is freed with the region object
and the last tensor made from it. `close` drops the region's own references and its fd.

Memory model: x86-64 keeps stores in order (TSO), so "write data, then write a flag" needs no fence. aarch64 does not;
until there are fences, `require_shared_memory` refuses it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import math
import mmap
import os
import platform
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from ..descriptors import Descriptor
from ..errors import (
    AuthError,
    EpeeError,
    InvalidState,
    ProtocolError,
    ResourceError,
    UnsupportedError,
    expected,
    ignored,
    shortage,
)
from .claim import (
    CLAIM_BYTES,
    COOKIE_BYTES,
    Claim,
    make_claim,
    naming_death,
    parse_claim,
    require_alive,
)
from .claim import process_start_time as process_start_time  # detectors of deaths import it from here
from .layout import CACHE_LINE_BYTES, align_up

_MAGIC = b"epeehst1"
BLOB_BYTES = CLAIM_BYTES
HEADER_BYTES = CACHE_LINE_BYTES  # holds the cookie; user offsets start behind it
_F_ADD_SEALS = 1033  # linux/fcntl.h; Python 3.10's fcntl module has the names only on some builds
_F_GET_SEALS = 1034
_SEAL_SIZE = 0x2 | 0x4 | 0x1  # F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL
_SEAL_FUTURE_WRITE = 0x10


def require_shared_memory() -> None:
    """Raise `UnsupportedError` where the shared-memory path is not known to be correct."""
    if not sys.platform.startswith("linux"):
        raise UnsupportedError(f"epee's shared memory needs Linux, this is {sys.platform}; use a Linux machine")
    if platform.machine() not in ("x86_64", "AMD64"):
        raise UnsupportedError(
            f"epee's shared memory needs x86-64, this is {platform.machine()}: its plain stores are not ordered and "
            "the fences are not written yet; use an x86-64 machine"
        )


def mapped_size(nbytes: int) -> int:
    """Return how many bytes a region of `nbytes` usable bytes maps."""
    return align_up(nbytes + HEADER_BYTES, mmap.PAGESIZE)


class SharedRegion:
    """A shared mapping. Make one with `create` or `attach`.

    Attributes:
        blob: `BLOB_BYTES` bytes that let another process of this user and machine attach.
        nbytes: size that users may address, without the header.
        mapped_bytes: size of the mapping.
        owner_pid: the process that made it.
        owner_start_time: when that process started, in clock ticks since boot.
        address: of the first usable byte in this process.
    """

    def __init__(self, fd: Descriptor, claim: Claim, is_writable: bool = True) -> None:
        self.nbytes = claim.nbytes - HEADER_BYTES
        self.mapped_bytes = claim.nbytes
        self.owner_pid = claim.pid
        self.owner_start_time = claim.start_time
        self._fd = fd  # closed with this object at the latest
        self.blob = claim.pack()
        self._is_writable = is_writable
        self._inode = os.fstat(fd).st_ino
        self._map: mmap.mmap | None = mmap.mmap(
            fd, claim.nbytes, access=mmap.ACCESS_WRITE if is_writable else mmap.ACCESS_READ
        )
        self.address = np.frombuffer(self._map, np.uint8, 1).ctypes.data + HEADER_BYTES

    @classmethod
    def create(cls, nbytes: int, name: str, only_owner_writes: bool = False) -> SharedRegion:
        """Make and map a new region of at least `nbytes` bytes, all zero; `name` shows in /proc/PID/maps.

        With `only_owner_writes` peers must attach it without `is_writable`, and the kernel enforces it.

        Raises:
            UnsupportedError: this machine cannot share memory safely.
            ResourceError: the system has no memory or file descriptor left.
        """
        require_shared_memory()
        mapped_bytes = mapped_size(nbytes)
        try:
            held = Descriptor(os.memfd_create(f"epee-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        except expected(OSError) as exc:
            raise shortage(f"memfd for {name} ({mapped_bytes} bytes)", exc, "memfd_create") from exc
        with held:
            try:
                os.ftruncate(held, mapped_bytes)
                claim = make_claim(_MAGIC, int(held), mapped_bytes)
                region = cls(held, claim)
                _seal(held, only_owner_writes)
            except expected(OSError, ValueError, OverflowError) as exc:
                raise ResourceError(f"memfd for {name} ({mapped_bytes} bytes): {exc}; make the buffer smaller") from exc
            region.mapping[:COOKIE_BYTES] = claim.cookie
        return region

    @classmethod
    def attach(cls, data: bytes, is_writable: bool = True) -> SharedRegion:
        """Map the region that `data` (a peer's `blob`) describes, after checking every claim in it.

        Without `is_writable` a stray store of this process faults instead of damaging the peer's data.

        Raises:
            AuthError: the owner is a process of another user, or the memory was made by one.
            ProtocolError: the blob is damaged, or names something that is not the region it claims to be.
            OwnerEndedError: the owner has ended, possibly while its memory was being opened.
            ResourceError: the system forbids opening the owner's descriptor, or has no memory or descriptor left.
        """
        claim = parse_claim(data, _MAGIC, BLOB_BYTES, HEADER_BYTES, "region")
        with naming_death(claim):
            return cls._attach(claim, is_writable)

    @classmethod
    def _attach(cls, claim: Claim, is_writable: bool) -> SharedRegion:
        with Descriptor(_open_peer_fd(claim, is_writable)) as held:
            try:
                _check_file(held, claim)
                region = cls(held, claim, is_writable)
            except expected(OSError, ValueError) as exc:
                if isinstance(exc, EpeeError):
                    raise
                raise ResourceError(f"cannot map the region of process {claim.pid}: {exc}") from exc
            region.hide()  # the mapping stays; only the owner's descriptor must stay open, for other peers
        if region.mapping[:COOKIE_BYTES] != claim.cookie:
            raise ProtocolError(f"region of process {claim.pid}: cookie differs; descriptor {claim.fd} was reused")
        return region

    @property
    def descriptor(self) -> int:
        """The memory's descriptor, for a child of this process to inherit; -1 once it is hidden, or attached."""
        return int(self._fd)

    @property
    def mapping(self) -> mmap.mmap:
        """The mapping; `InvalidState` after `close`."""
        if self._map is None:
            raise InvalidState("the region is closed")
        return self._map

    def tensor(self, dtype: torch.dtype, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a tensor over the region's memory at byte `offset`; it keeps the mapping alive."""
        count = math.prod(shape)
        self._check_range(offset, count * dtype.itemsize)
        if count == 0:
            return torch.empty(shape, dtype=dtype, device="cpu")
        return torch.frombuffer(self.mapping, dtype=dtype, count=count, offset=HEADER_BYTES + offset).view(shape)

    def words(self, offset: int, count: int) -> memoryview:
        """Return `count` unsigned 64-bit words at byte `offset`; each load and store is one machine access."""
        self._check_range(offset, 8 * count)
        start = HEADER_BYTES + offset
        return memoryview(self.mapping)[start : start + 8 * count].cast("Q")

    def array(self, dtype: np.dtype[Any], nbytes: int) -> np.ndarray[Any, Any]:
        """Return the first `nbytes` bytes as a flat array, cut to whole elements; it keeps the mapping alive.

        Where the mapping can only be read the array is read-only, too. Slices of it may be marked otherwise
        (`flags.writeable`) for the sake of torch, which warns of tensors over such memory; a store faults all the same.
        """
        self._check_range(0, nbytes)
        memory = (ctypes.c_ubyte * nbytes).from_address(self.address)
        memory.mapping = self.mapping  # type: ignore[attr-defined]  # lives as long as the array
        array = np.frombuffer(memoryview(memory), dtype=dtype, count=nbytes // dtype.itemsize)
        array.flags.writeable = self._is_writable
        return array

    def written(self, offset: int, nbytes: int) -> list[tuple[int, int]]:
        """Return the parts (offset, bytes) of a range that have pages: the rest was never written."""
        self._check_range(offset, nbytes)
        begin, end = HEADER_BYTES + offset, HEADER_BYTES + offset + nbytes
        if self._fd >= 0:
            return list(_parts_with_data(self._fd, begin, end))
        with _open_again(self._inode) as held:
            return [(offset, nbytes)] if held < 0 else list(_parts_with_data(held, begin, end))

    def lease(self, offset: int, nbytes: int) -> ctypes.Array[Any]:
        """Return an object over the bytes that supports the buffer protocol and weak references.

        A tensor made from it by `torch.frombuffer` keeps it alive, so a weak-reference callback reports the end of the
        last tensor.
        """
        self._check_range(offset, nbytes)
        return (ctypes.c_ubyte * nbytes).from_buffer(self.mapping, HEADER_BYTES + offset)

    def hide(self) -> None:
        """Allow no process to attach it any more; existing mappings, this process's too, stay. Idempotent."""
        self._fd.close()
        self._fd = Descriptor(-1)

    def close(self) -> None:
        """Drop this object's descriptor and reference to the mapping; idempotent."""
        self.hide()
        self._map = None

    def _check_range(self, offset: int, nbytes: int) -> None:
        assert 0 <= offset <= offset + nbytes <= self.nbytes, (offset, nbytes, self.nbytes)


def _open_again(inode: int) -> Descriptor:
    """Return a descriptor of a memory that this process has mapped: Python's mapping keeps one; -1: not found."""
    for name in os.listdir("/proc/self/fd"):
        with ignored(OSError):  # closed meanwhile, or no file
            found = os.stat(f"/proc/self/fd/{name}")
            if found.st_ino == inode and "/memfd:" in os.readlink(f"/proc/self/fd/{name}"):
                return Descriptor(os.open(f"/proc/self/fd/{name}", os.O_RDONLY | os.O_CLOEXEC))
    return Descriptor(-1)


def _parts_with_data(fd: int, place: int, end: int) -> Iterator[tuple[int, int]]:
    while place < end:
        try:
            first = os.lseek(fd, place, os.SEEK_DATA)
        except expected(OSError) as exc:
            if exc.errno == errno.ENXIO:  # nothing but a hole up to the end
                return
            raise
        if first >= end:
            return
        place = min(os.lseek(fd, first, os.SEEK_HOLE), end)
        yield first - HEADER_BYTES, place - first


def _seal(fd: int, only_owner_writes: bool) -> None:
    """Fix a region's size and, if wanted, its writers: the processes that have it mapped so far."""
    if only_owner_writes:
        try:
            fcntl.fcntl(fd, _F_ADD_SEALS, _SEAL_SIZE | _SEAL_FUTURE_WRITE)
            return
        except expected(OSError) as exc:
            if exc.errno != errno.EINVAL:
                raise
    fcntl.fcntl(fd, _F_ADD_SEALS, _SEAL_SIZE)


def _open_peer_fd(claim: Claim, is_writable: bool = True) -> int:
    path = f"/proc/{claim.pid}/fd/{claim.fd}"
    require_alive(claim)
    try:
        return os.open(path, (os.O_RDWR if is_writable else os.O_RDONLY) | os.O_CLOEXEC)
    except expected(PermissionError) as exc:
        raise ResourceError(
            f"opening {path} is forbidden; the ranks must run as one user, dumpable, in one PID namespace"
        ) from exc
    except expected(OSError) as exc:
        if exc.errno == errno.ENOENT:
            raise ProtocolError(f"process {claim.pid} has no descriptor {claim.fd}; it closed the region") from exc
        raise ResourceError(f"cannot open {path}: {exc}") from exc


def _check_file(fd: int, claim: Claim) -> None:
    require_alive(claim)
    nbytes, user = os.fstat(fd).st_size, os.fstat(fd).st_uid
    if user != os.geteuid():  # another user's process may have passed it on
        raise AuthError(
            f"the memory that process {claim.pid} lends as descriptor {claim.fd} was made by user {user}; memory of "
            f"user {os.geteuid()} only is used"
        )
    if nbytes != claim.nbytes:
        raise ProtocolError(f"region of process {claim.pid}: {claim.nbytes} bytes promised, {nbytes} there")
    try:
        seals = fcntl.fcntl(fd, _F_GET_SEALS)
    except expected(OSError) as exc:
        raise ProtocolError(f"descriptor {claim.fd} of process {claim.pid} is no memfd: {exc}") from exc
    if seals & _SEAL_SIZE != _SEAL_SIZE:
        raise ProtocolError(f"region of process {claim.pid} is not sealed (seals {seals:#x})")
