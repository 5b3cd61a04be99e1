"""GPU memory that one process lends to others on the same host: a VMM allocation behind a POSIX file descriptor.

Data path: the owner creates a physical allocation (`cuMemCreate`), exports it as a descriptor, maps it, and gives away
a `blob` of fixed size (pid, start time, fd, size, cookie). A peer copies the descriptor out of the owner's process
(`pidfd_getfd`), imports and maps it. Each peer is attached and detached alone, so membership may change; mappings
outlive their owner: kernels may store into the memory of a killed peer without a fault.

What is checked before a mapping is used: the process that has this pid now is the one that made the blob (start time,
before and after the copy), and the cookie in the mapped memory matches, so that a reused descriptor is found out.

Neither `cudaMalloc` memory nor torch's allocator is involved: their blocks cannot be lent one by one.
"""

from __future__ import annotations

import ctypes
import math
import os
import secrets
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..errors import InvalidState, ProtocolError, ResourceError, UnsupportedError
from ..jit.driver import check, driver
from .host import process_start_time
from .layout import align_up

_BLOB = struct.Struct("<8sqqqq16s")
_MAGIC = b"epeegpu1"
_COOKIE_BYTES = 16
BLOB_BYTES = _BLOB.size
HEADER_BYTES = 512  # holds the cookie; user offsets start behind it and stay aligned for bulk copies
_SYS_PIDFD_GETFD = 438


class _Blob(NamedTuple):
    magic: bytes
    pid: int
    start_time: int
    fd: int
    nbytes: int
    cookie: bytes


class _DeviceBytes:
    """What torch needs to make a tensor over raw memory; lives as long as the last tensor made from it."""

    def __init__(self, address: int, nbytes: int, keep: object, released: Callable[[], None] | None) -> None:
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}
        self._keep = keep
        self._released = released

    def __del__(self) -> None:
        if self._released is not None:
            self._released()


class _Mapping:
    """An address range with physical memory behind it; unmapped when the last user has gone."""

    def __init__(self, handle: Any, nbytes: int, device: int) -> None:
        cu = driver()
        self.nbytes = nbytes
        self.address = int(check(cu.cuMemAddressReserve(nbytes, 0, 0, 0), f"reserve {nbytes} bytes of addresses"))
        try:
            check(cu.cuMemMap(self.address, nbytes, 0, handle, 0), f"map {nbytes} bytes")
        except ResourceError:
            cu.cuMemAddressFree(self.address, nbytes)
            raise
        access = cu.CUmemAccessDesc()
        access.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = device
        access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        try:
            check(
                cu.cuMemSetAccess(self.address, nbytes, [access], 1),
                f"let device {device} reach a peer's memory (is there NVLink or P2P between the GPUs?)",
            )
        except ResourceError:
            self.__del__()
            raise

    def __del__(self) -> None:
        if self.address:
            cu = driver()
            cu.cuMemUnmap(self.address, self.nbytes)
            cu.cuMemAddressFree(self.address, self.nbytes)
            self.address = 0


class CudaRegion:
    """GPU memory, own or a peer's, mapped for one device. Make one with `create` or `attach`.

    Attributes:
        nbytes: size that users may address.
        address: of the first user byte, as `device` sees it.
        device: index of the GPU that uses the mapping.
    """

    def __init__(self, mapping: _Mapping, device: int, blob: bytes, fd: int) -> None:
        self._mapping: _Mapping | None = mapping
        self._blob = blob
        self._fd = fd
        self.device = device
        self.nbytes = mapping.nbytes - HEADER_BYTES
        self.address = mapping.address + HEADER_BYTES

    @classmethod
    def create(cls, nbytes: int, device: int) -> CudaRegion:
        """Allocate at least `nbytes` bytes on `device`, all zero, and map them.

        Raises:
            ResourceError: the GPU has no memory left, or the driver cannot share it.
        """
        cu = driver()
        _ensure_context(device)
        properties = _properties(device)
        granularity = int(
            check(
                cu.cuMemGetAllocationGranularity(
                    properties, cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
                ),
                "ask for the allocation granularity",
            )
        )
        mapped_bytes = align_up(nbytes + HEADER_BYTES, granularity)
        handle = check(cu.cuMemCreate(mapped_bytes, properties, 0), f"allocate {mapped_bytes} bytes on GPU {device}")
        fd = -1
        try:
            fd = int(check(cu.cuMemExportToShareableHandle(handle, _posix(), 0), "export GPU memory"))
            mapping = _Mapping(handle, mapped_bytes, device)
        except ResourceError:
            if fd >= 0:
                os.close(fd)
            raise
        finally:
            cu.cuMemRelease(handle)  # the mapping and the descriptor keep the memory
        pid = os.getpid()
        cookie = secrets.token_bytes(_COOKIE_BYTES)
        blob = _BLOB.pack(_MAGIC, pid, process_start_time(pid), fd, mapped_bytes, cookie)
        check(cu.cuMemsetD8(mapping.address, 0, mapped_bytes), "clear GPU memory")
        check(cu.cuMemcpyHtoD(mapping.address, cookie, _COOKIE_BYTES), "write the cookie")
        check(cu.cuCtxSynchronize(), "clear GPU memory")
        return cls(mapping, device, blob, fd)

    @classmethod
    def attach(cls, data: bytes, device: int) -> CudaRegion:
        """Map the region that `data` (a peer's `blob`) describes for use by `device`.

        Raises:
            ProtocolError: the blob is damaged, or names something that is not the region it claims to be.
            ResourceError: the owner is gone, or the system forbids copying its descriptor.
        """
        blob = _parse(data)
        cu = driver()
        _ensure_context(device)
        fd = _copy_fd(blob)
        try:
            handle = check(cu.cuMemImportFromShareableHandle(fd, _posix()), f"import memory of process {blob.pid}")
        finally:
            os.close(fd)
        try:
            mapping = _Mapping(handle, blob.nbytes, device)
        finally:
            cu.cuMemRelease(handle)
        seen = bytearray(_COOKIE_BYTES)
        check(cu.cuMemcpyDtoH(seen, mapping.address, _COOKIE_BYTES), "read the cookie")
        if bytes(seen) != blob.cookie:
            raise ProtocolError(f"GPU memory of process {blob.pid}: cookie differs; descriptor {blob.fd} was reused")
        return cls(mapping, device, bytes(data), -1)

    @property
    def blob(self) -> bytes:
        """`BLOB_BYTES` bytes that let another process of this user and host attach."""
        return self._blob

    def tensor(self, dtype: torch.dtype, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a tensor over the memory at byte `offset`; it keeps the mapping alive."""
        count = math.prod(shape)
        if count == 0:
            return torch.empty(shape, dtype=dtype, device=torch.device("cuda", self.device))
        return self.lease(offset, count * dtype.itemsize, None).view(dtype).view(shape)

    def lease(self, offset: int, nbytes: int, released: Callable[[], None] | None) -> torch.Tensor:
        """Return `nbytes` bytes at `offset` as a uint8 tensor; `released` runs when its last view has gone."""
        assert 0 <= offset <= offset + nbytes <= self.nbytes, (offset, nbytes, self.nbytes)
        if self._mapping is None:
            raise InvalidState("the region is closed")
        source = _DeviceBytes(self.address + offset, nbytes, self._mapping, released)
        return torch.as_tensor(source, device=torch.device("cuda", self.device))

    def close(self) -> None:
        """Drop this object's descriptor and its hold on the mapping; idempotent. Tensors keep theirs."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._mapping = None


def _posix() -> Any:
    return driver().CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def _ensure_context(device: int) -> None:
    """Make the device's primary context current in this thread; the driver API does not do it by itself."""
    cu = driver()
    check(cu.cuInit(0), "start the CUDA driver (is one installed?)")
    context = check(cu.cuDevicePrimaryCtxRetain(device), f"open GPU {device}")
    check(cu.cuCtxSetCurrent(context), f"use GPU {device}")


def _properties(device: int) -> Any:
    cu = driver()
    supported = check(
        cu.cuDeviceGetAttribute(
            cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, device
        ),
        "read the device",
    )
    if not supported:
        raise UnsupportedError(f"GPU {device} cannot share memory through descriptors; use CPU tensors on this machine")
    properties = cu.CUmemAllocationProp()
    properties.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = device
    properties.requestedHandleTypes = _posix()
    return properties


def _parse(data: bytes) -> _Blob:
    if len(data) != BLOB_BYTES:
        raise ProtocolError(f"a GPU region blob has {BLOB_BYTES} bytes, got {len(data)}")
    blob = _Blob(*_BLOB.unpack(data))
    if blob.magic != _MAGIC:
        raise ProtocolError(f"a GPU region blob starts with {_MAGIC!r}, got {blob.magic!r}; mixed CPU and CUDA ranks?")
    if blob.pid <= 0 or blob.fd < 0 or blob.nbytes <= HEADER_BYTES or blob.nbytes >= 1 << 46:
        raise ProtocolError(f"GPU region blob out of range: pid={blob.pid}, fd={blob.fd}, nbytes={blob.nbytes}")
    return blob


def _copy_fd(blob: _Blob) -> int:
    """Copy the owner's descriptor into this process, making sure that it is still the owner's."""
    if process_start_time(blob.pid) != blob.start_time:
        raise ResourceError(
            f"process {blob.pid} has ended, or runs in another PID namespace; its GPU memory is out of reach"
        )
    if blob.pid == os.getpid():
        return os.dup(blob.fd)
    try:
        pidfd = os.pidfd_open(blob.pid)
    except OSError as exc:
        raise ResourceError(f"cannot open process {blob.pid}: {exc}") from exc
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        fd = int(libc.syscall(_SYS_PIDFD_GETFD, pidfd, blob.fd, 0))
        error = ctypes.get_errno()
    finally:
        os.close(pidfd)
    if fd < 0:
        raise ResourceError(
            f"pidfd_getfd from process {blob.pid} is refused ({os.strerror(error)}); it needs ptrace permission: run "
            "the ranks as one user, and allow it in the container's seccomp profile and in kernel.yama.ptrace_scope"
        )
    if process_start_time(blob.pid) != blob.start_time:
        os.close(fd)
        raise ProtocolError(f"process {blob.pid} changed while its GPU memory was being opened")
    return fd
