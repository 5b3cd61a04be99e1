"""GPU memory that one process lends to others on the same host.

Data path: the owner allocates and maps memory (`cuda_mapping.py`), writes a random cookie into its first bytes, and
passes on a `blob` of fixed size. A peer gets the memory's descriptor by one of the methods that the blob offers
(`cuda_share.py`), imports and maps it. Each peer is attached and detached alone, so membership may change; mappings of
VMM memory outlive their owner: kernels may store into the memory of a killed peer without a fault.

The blob: a `Claim` (pid, start time, descriptor, size, cookie), the methods offered, the owner's descriptor of its
socket (scm) or 0, the GPU's uuid, and the driver's handle (ipc) or zeros. Checks before a mapping is used: every
number; that the process with this pid is the one that made the blob, before and after its descriptor is taken; that
this GPU can reach the owner's; and that the mapped memory starts with the cookie, so that a reused descriptor is
detected.

A crash of the owner leaves nothing: no names, and the driver frees memory that no process maps. Torch's allocator is
not involved: its blocks cannot be lent one by one.
"""

from __future__ import annotations

import contextlib
import math
import os
import struct
from collections.abc import Callable
from typing import NamedTuple

import torch

from ..descriptors import Descriptor
from ..errors import InvalidArgument, InvalidState, ProtocolError, UnsupportedError, expected
from ..jit.driver import check, driver
from .claim import CLAIM_BYTES, COOKIE_BYTES, Claim, make_claim, naming_death, parse_claim, require_alive
from .cuda_mapping import (
    Mapping,
    create_ipc,
    create_vmm,
    import_ipc,
    import_vmm,
    on_device,
    put_in_place,
    require_reach,
    uuid_of,
)
from .cuda_share import ALL_WAYS, Way, choose, forced_way, obtain_descriptor, ways_to_offer
from .passing import DescriptorServer

_MAGIC = b"epeegpu2"
_TAIL = struct.Struct("<ii16s64s")
BLOB_BYTES = CLAIM_BYTES + _TAIL.size
HEADER_BYTES = 512  # holds the cookie; user offsets start behind it and stay aligned for bulk copies


class _Tail(NamedTuple):
    ways: int
    socket_fd: int
    uuid: bytes
    ipc_handle: bytes


class _DeviceBytes:
    """The interface that torch needs to make a tensor over raw memory; lives as long as the last tensor made from
    it."""

    def __init__(self, address: int, nbytes: int, keep: object, released: Callable[[], None] | None) -> None:
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}
        self._keep = keep
        self._released = released

    def __del__(self) -> None:
        if self._released is not None:
            self._released()


class CudaRegion:
    """GPU memory, own or a peer's, mapped for one device. Make one with `create` or `attach`.

    Attributes:
        blob: `BLOB_BYTES` bytes that let another process of this user and host attach.
        nbytes: size that users may address.
        address: of the first user byte, as `device` sees it.
        device: index of the GPU that uses the mapping.
        ways: the methods by which peers may attach (own memory), or this process did (a peer's).
    """

    def __init__(self, mapping: Mapping, blob: bytes, ways: Way, held: contextlib.ExitStack) -> None:
        self._mapping: Mapping | None = mapping
        self.blob = blob
        self._held = held  # the owner's descriptor and socket
        self.ways = ways
        self.device = mapping.device
        self.nbytes = mapping.nbytes - HEADER_BYTES
        self.address = mapping.address + HEADER_BYTES

    @classmethod
    def create(cls, nbytes: int, device: int) -> CudaRegion:
        """Allocate at least `nbytes` bytes on `device`, all zero, and map them.

        Raises:
            UnsupportedError: this machine cannot lend GPU memory, or not in the way that `EPEE_CUDA_SHARE` forces.
            ResourceError: the GPU has no memory left, or the system no descriptor.
        """
        forced = forced_way()
        with on_device(device):
            if forced is Way.IPC:
                return cls._create_ipc(nbytes, device)
            try:
                return cls._create_vmm(nbytes, device)
            except expected(UnsupportedError):
                if forced is not None:
                    raise
                return cls._create_ipc(nbytes, device)

    @classmethod
    def _create_vmm(cls, nbytes: int, device: int) -> CudaRegion:
        with contextlib.ExitStack() as undo, contextlib.ExitStack() as held:
            mapping, fd = create_vmm(nbytes + HEADER_BYTES, device)
            undo.callback(mapping.release)
            held.callback(os.close, fd)
            claim = make_claim(_MAGIC, fd, mapping.nbytes)
            _clear(mapping, claim.cookie)
            ways, socket_fd = ways_to_offer(), 0
            if ways & Way.SCM:
                server = DescriptorServer(fd, claim.cookie)
                held.callback(server.close)  # runs before the descriptor is closed
                socket_fd = server.socket_fd
            tail = _Tail(int(ways), socket_fd, uuid_of(device), bytes(64))
            undo.pop_all()
            return cls(mapping, claim.pack() + _TAIL.pack(*tail), ways, held.pop_all())

    @classmethod
    def _create_ipc(cls, nbytes: int, device: int) -> CudaRegion:
        with contextlib.ExitStack() as undo:
            mapping, handle = create_ipc(nbytes + HEADER_BYTES, device)
            undo.callback(mapping.release)
            claim = make_claim(_MAGIC, 0, mapping.nbytes)
            _clear(mapping, claim.cookie)
            tail = _Tail(int(Way.IPC), 0, uuid_of(device), handle)
            undo.pop_all()
            return cls(mapping, claim.pack() + _TAIL.pack(*tail), Way.IPC, contextlib.ExitStack())

    @classmethod
    def attach(cls, data: bytes, device: int) -> CudaRegion:
        """Map the region that `data` (a peer's `blob`) describes for use by `device`.

        Raises:
            ProtocolError: the blob is damaged, or names something that is not the region it claims to be.
            OwnerEndedError: the owner has ended, possibly while its memory was being opened.
            ResourceError: the system forbids all methods of access to its memory.
            UnsupportedError: `device` does not reach the owner's GPU.
            InvalidState: `EPEE_CUDA_SHARE` differs between the ranks.
        """
        claim, tail = _parse(data)
        ways = choose(Way(tail.ways), claim)
        with naming_death(claim), on_device(device):
            require_alive(claim)
            require_reach(device, tail.uuid, claim.pid)
            mapping, way = _map_peer(claim, tail, ways, device)
            with contextlib.ExitStack() as undo:
                undo.callback(mapping.release)
                seen = bytearray(COOKIE_BYTES)
                check(driver().cuMemcpyDtoH(seen, mapping.address, COOKIE_BYTES), "read the cookie")
                if bytes(seen) != claim.cookie:
                    raise ProtocolError(
                        f"GPU memory of process {claim.pid}: cookie differs; descriptor {claim.fd} was reused"
                    )
                undo.pop_all()
        return cls(mapping, bytes(data), way, contextlib.ExitStack())

    def replace(self, data: bytes) -> None:
        """Map the region that `data` describes at this one's address, replacing the mapped peer's region.

        It is mapped elsewhere first, and checked as by `attach`; then the two are exchanged. Tensors over the old
        memory, and graphs that have its address, show the new one. No work of any GPU of this process may use the old
        memory meanwhile, and the region must be a peer's.

        Raises:
            UnsupportedError: the memory is lent by cudaIpc, which does not allow choosing an address.
            InvalidArgument: it has another size.
            ResourceError: the driver refuses; the previous memory is mapped again. Else as `attach`.
        """
        assert self._mapping is not None
        new = CudaRegion.attach(data, self.device)
        try:
            if new.nbytes != self.nbytes:
                raise InvalidArgument(f"a peer lends {new.nbytes} bytes, this rank {self.nbytes}; use equal sizes")
            assert new._mapping is not None
            with on_device(self.device):
                put_in_place(self._mapping, new._mapping)
            self.blob, self.ways = new.blob, new.ways
        finally:
            new.close()

    def tensor(self, dtype: torch.dtype, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a tensor over the memory at byte `offset`; it keeps the mapping alive."""
        count = math.prod(shape)
        if count == 0:
            return torch.empty(shape, dtype=dtype, device=torch.device("cuda", self.device))
        return self.lease(offset, count * dtype.itemsize, None).view(dtype).view(shape)

    def lease(self, offset: int, nbytes: int, released: Callable[[], None] | None) -> torch.Tensor:
        """Return `nbytes` bytes at `offset` as a uint8 tensor; `released` runs when its last view has been freed."""
        assert 0 <= offset <= offset + nbytes <= self.nbytes, (offset, nbytes, self.nbytes)
        if self._mapping is None:
            raise InvalidState("the region is closed")
        return _as_tensor(_DeviceBytes(self.address + offset, nbytes, self._mapping, released), self.device)

    def close(self) -> None:
        """Drop this object's descriptor, socket and hold on the mapping; idempotent. Tensors keep the mapping.

        Memory lent by ipc must be closed by peers before its owner closes it; the driver defines nothing else.
        """
        self._mapping = None
        self._held.close()

    __del__ = close


def lends_descriptors(device: int) -> bool:
    """Return whether `CudaRegion.create` lends memory of `device` by descriptors (VMM) rather than by cudaIpc.

    Raises:
        ResourceError: no memory or descriptor is left.
    """
    forced = forced_way()
    if forced is not None:
        return forced is not Way.IPC
    try:
        with on_device(device):
            mapping, fd = create_vmm(1, device)
    except expected(UnsupportedError):
        return False
    os.close(fd)
    mapping.release()
    return True


def _as_tensor(source: _DeviceBytes, device: int) -> torch.Tensor:
    return torch.as_tensor(source, dtype=torch.uint8, device=torch.device("cuda", device))


def _clear(mapping: Mapping, cookie: bytes) -> None:
    cu = driver()
    check(cu.cuMemsetD8(mapping.address, 0, mapping.nbytes), "clear GPU memory")
    check(cu.cuMemcpyHtoD(mapping.address, cookie, COOKIE_BYTES), "write the cookie")
    check(cu.cuCtxSynchronize(), "clear GPU memory")


def _parse(data: bytes) -> tuple[Claim, _Tail]:
    claim = parse_claim(data, _MAGIC, BLOB_BYTES, HEADER_BYTES, "GPU region")
    tail = _Tail(*_TAIL.unpack_from(data, CLAIM_BYTES))
    ways = tail.ways
    if not 0 < ways <= int(ALL_WAYS) or (ways & Way.IPC and ways != Way.IPC) or tail.socket_fd < 0:
        raise ProtocolError(f"GPU region blob out of range: ways={ways:#x}, socket_fd={tail.socket_fd}")
    return claim, tail


def _map_peer(claim: Claim, tail: _Tail, ways: Way, device: int) -> tuple[Mapping, Way]:
    if ways & Way.IPC:
        if claim.pid == os.getpid():
            raise UnsupportedError(
                "memory that is lent by cudaIpc cannot be attached in its own process; use the region"
            )
        return import_ipc(tail.ipc_handle, claim.nbytes, device, claim.pid), Way.IPC
    fd, way = obtain_descriptor(claim, ways, tail.socket_fd)
    with Descriptor(fd):
        return import_vmm(fd, claim.nbytes, device, claim.pid), way
