"""Addresses of GPU memory in this process: each allocation of the driver is freed once, whatever fails in between.

Two kinds of memory can be lent. VMM memory is a physical allocation (`cuMemCreate`) that a descriptor refers to and
that every process maps for itself. IPC memory is an ordinary allocation (`cuMemAlloc`) that a 64-byte handle refers to;
the driver maps it at the peer. A mapping is released with its last user, from any thread: it knows its context and does
not rely on the thread's.

Every function here either returns a mapping that owns all resources taken, or raises with nothing left. A killed
process leaves nothing: the driver ends its mappings, VMM memory lives on while a peer maps it.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

from ..errors import ProtocolError, ResourceError, UnsupportedError, expected
from ..jit.driver import attribute, check, driver, is_not_offered
from .layout import align_up

IPC_GRANULE_BYTES = 2 << 20  # the driver lends whole blocks of this size, so we never share one with another allocation


class Mapping:
    """An address range on one GPU.

    Attributes:
        address: of its first byte, 0 once released.
        nbytes: its size.
        device: the GPU that uses it.
        is_vmm: whether other memory can be mapped there (`put_in_place`).
        is_bare: whether the memory mapped there, if any, is not its own: a `put_in_place` was interrupted.
    """

    is_bare = False

    def __init__(
        self, address: int, nbytes: int, device: int, release: Callable[[], None], is_vmm: bool = False
    ) -> None:
        self.address = address
        self.nbytes = nbytes
        self.device = device
        self.is_vmm = is_vmm
        self._release = release

    def release(self) -> None:
        """Return the range to the driver; idempotent."""
        if self.address:
            self.address = 0
            self._release()

    __del__ = release


@functools.cache
def _primary_context(device: int) -> Any:
    """Return the device's primary context, the one torch uses; retained once and permanently."""
    return check(driver().cuDevicePrimaryCtxRetain(device), f"open GPU {device}")


@contextlib.contextmanager
def on_device(device: int) -> Iterator[None]:
    """Make the device's primary context current in this thread, and restore the previous one afterwards."""
    cu = driver()
    wanted = _primary_context(device)
    before = check(cu.cuCtxGetCurrent(), "ask for the current context")
    if int(before) == int(wanted):
        yield
        return
    check(cu.cuCtxSetCurrent(wanted), f"use GPU {device}")
    try:
        yield
    finally:
        if int(before):  # a thread without a context keeps the primary one, as with its first CUDA call
            cu.cuCtxSetCurrent(before)


def create_vmm(nbytes: int, device: int) -> tuple[Mapping, int]:
    """Allocate at least `nbytes` bytes of VMM memory and map them; return the mapping and the memory's descriptor.

    Raises:
        UnsupportedError: the machine does not offer it.
        ResourceError: no memory, or no descriptor, is left.
    """
    cu = driver()
    for name in ("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED", "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED"):
        if not attribute(name, device):
            raise UnsupportedError(_no_descriptors(device, f"{name.lower()} is 0"))
    properties = cu.CUmemAllocationProp()
    properties.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = device
    properties.requestedHandleTypes = _posix()
    recommended = cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
    granule = check(cu.cuMemGetAllocationGranularity(properties, recommended), "ask for the allocation granularity")
    nbytes = align_up(nbytes, int(granule))
    created = cu.cuMemCreate(nbytes, properties, 0)
    if is_not_offered(created):
        raise UnsupportedError(_no_descriptors(device, created[0].name))
    handle = check(created, f"allocate {nbytes} bytes on GPU {device}")
    try:
        exported = cu.cuMemExportToShareableHandle(handle, _posix(), 0)
        if is_not_offered(exported):
            raise UnsupportedError(_no_descriptors(device, exported[0].name))
        fd = int(check(exported, f"export memory of GPU {device}"))
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, fd)
            mapping = _map(handle, nbytes, device)
            undo.pop_all()
        return mapping, fd
    finally:
        cu.cuMemRelease(handle)  # the mapping and the descriptor keep the memory


def import_vmm(fd: int, nbytes: int, device: int, pid: int) -> Mapping:
    """Map the VMM memory that `fd` refers to; `nbytes` and `pid` are its owner's claims. Does not close `fd`.

    Raises:
        ResourceError: the driver refuses: it is no GPU memory, it is smaller, or it is out of reach.
    """
    cu = driver()
    handle = check(cu.cuMemImportFromShareableHandle(fd, _posix()), f"import GPU memory of process {pid}")
    try:
        return _map(handle, nbytes, device)
    finally:
        cu.cuMemRelease(handle)


def _map(handle: Any, nbytes: int, device: int) -> Mapping:
    cu = driver()
    address = int(check(cu.cuMemAddressReserve(nbytes, 0, 0, 0), f"reserve {nbytes} bytes of GPU addresses"))
    with contextlib.ExitStack() as undo:
        undo.callback(cu.cuMemAddressFree, address, nbytes)
        _fill(handle, address, nbytes, device)
        undo.pop_all()
    return Mapping(address, nbytes, device, functools.partial(_unmap, cu, address, nbytes), is_vmm=True)


def _fill(handle: Any, address: int, nbytes: int, device: int) -> None:
    """Map memory at reserved addresses, where nothing is mapped, for a GPU; raises with nothing mapped there."""
    cu = driver()
    with contextlib.ExitStack() as undo:
        undo.callback(cu.cuMemUnmap, address, nbytes)  # first: an interrupt may come as soon as it is mapped
        check(cu.cuMemMap(address, nbytes, 0, handle, 0), f"map {nbytes} bytes")
        access = cu.CUmemAccessDesc()
        access.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = device
        access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        check(
            cu.cuMemSetAccess(address, nbytes, [access], 1),
            f"let GPU {device} reach the memory (is there NVLink or P2P between the GPUs? `epee doctor` shows it)",
        )
        undo.pop_all()


def _unmap(cu: Any, address: int, nbytes: int) -> None:
    cu.cuMemUnmap(address, nbytes)  # refused, without harm, where nothing is mapped
    cu.cuMemAddressFree(address, nbytes)


def put_in_place(old: Mapping, new: Mapping) -> None:
    """Map the memory of `new`, of the same size and GPU, at the addresses of `old`, whose own memory is released.

    `new` keeps its mapping; the caller releases it. No work of the GPU may use `old` meanwhile. Between the two steps
    nothing is mapped there; when the second one is refused, or interrupted, the first is undone.

    Raises:
        UnsupportedError: the driver has chosen one of the addresses itself (cudaIpc).
        ResourceError: the driver refuses. The old memory is mapped again, also after an interrupt, which is raised
        unchanged; where even that is refused, nothing is mapped (`is_bare`), the next access is a fault, and another
        attempt may succeed.
    """
    if not (old.is_vmm and new.is_vmm):
        raise UnsupportedError("memory that is lent by cudaIpc cannot be mapped where other memory was")
    cu = driver()
    with contextlib.ExitStack() as held:
        handle = _memory_of(new, held)
        before = None if old.is_bare else _memory_of(old, held)
        old.is_bare = True  # first: an interrupt may come as soon as it is unmapped
        unmapped = cu.cuMemUnmap(old.address, old.nbytes)
        if before is not None:  # else there may be nothing, and that is no failure
            try:
                check(unmapped, f"unmap {old.nbytes} bytes")
            except expected(ResourceError):
                old.is_bare = False
                raise
        try:
            _fill(handle, old.address, old.nbytes, old.device)
        except BaseException:
            cu.cuMemUnmap(old.address, old.nbytes)  # an interrupt may come when all is mapped; else refused, no harm
            if before is not None:
                with contextlib.suppress(ResourceError):  # the original error is to be reported
                    _fill(before, old.address, old.nbytes, old.device)
                    old.is_bare = False
            raise
        old.is_bare = False


def _memory_of(mapping: Mapping, held: contextlib.ExitStack) -> Any:
    """Return a handle of the memory that a VMM mapping maps, until `held` is closed."""
    cu = driver()
    handle = check(cu.cuMemRetainAllocationHandle(mapping.address), "name the memory of a mapping")
    held.callback(cu.cuMemRelease, handle)
    return handle


def create_ipc(nbytes: int, device: int) -> tuple[Mapping, bytes]:
    """Allocate at least `nbytes` ordinary bytes; return the mapping and the 64-byte handle for peers.

    Raises:
        UnsupportedError: the machine does not offer it.
        ResourceError: no memory is left.
    """
    cu = driver()
    nbytes = align_up(nbytes, IPC_GRANULE_BYTES)
    address = int(check(cu.cuMemAlloc(nbytes), f"allocate {nbytes} bytes on GPU {device}"))
    mapping = Mapping(address, nbytes, device, functools.partial(_in_context, device, cu.cuMemFree, address))
    with contextlib.ExitStack() as undo:
        undo.callback(mapping.release)
        lent = cu.cuIpcGetMemHandle(address)
        if is_not_offered(lent):
            raise UnsupportedError(
                f"GPU {device} cannot lend memory to other processes by cudaIpc ({lent[0].name}); use CPU tensors on "
                "this machine"
            )
        handle = check(lent, f"lend memory of GPU {device} by cudaIpc")
        undo.pop_all()
    return mapping, bytes(handle.reserved)


def import_ipc(raw: bytes, nbytes: int, device: int, pid: int) -> Mapping:
    """Map the IPC memory that the 64 bytes `raw` refer to; `nbytes` and `pid` are its owner's claims.

    Raises:
        ProtocolError: the memory is smaller than its owner says.
        ResourceError: the driver refuses.
    """
    cu = driver()
    handle = cu.CUipcMemHandle()
    handle.reserved = raw
    flags = int(cu.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
    address = int(check(cu.cuIpcOpenMemHandle(handle, flags), f"open memory of process {pid} by cudaIpc"))
    mapping = Mapping(address, nbytes, device, functools.partial(_in_context, device, cu.cuIpcCloseMemHandle, address))
    with contextlib.ExitStack() as undo:
        undo.callback(mapping.release)
        base, there = check(cu.cuMemGetAddressRange(address), "ask for the size of a peer's memory")
        if int(base) + int(there) < address + nbytes:
            raise ProtocolError(f"GPU memory of process {pid}: {nbytes} bytes promised, {int(there)} there")
        undo.pop_all()
    return mapping


def _in_context(device: int, give_back: Callable[[int], Any], address: int) -> None:
    with contextlib.ExitStack() as stack:
        # at interpreter exit the driver may be unloaded, and its memory with it
        with contextlib.suppress(ResourceError):
            stack.enter_context(on_device(device))
        give_back(address)


def require_reach(device: int, uuid: bytes, pid: int) -> None:
    """Raise `UnsupportedError` when `device` is known not to reach the GPU `uuid`, which process `pid` uses.

    A GPU that this process does not see (`CUDA_VISIBLE_DEVICES`) cannot be queried; the driver decides then.
    """
    cu = driver()
    for other in range(int(check(cu.cuDeviceGetCount(), "count GPUs"))):
        if other != device and uuid_of(other) == uuid:
            reaches = check(cu.cuDeviceCanAccessPeer(device, other), f"ask whether GPU {device} reaches GPU {other}")
            if not int(reaches):
                raise UnsupportedError(
                    f"GPU {device} cannot reach GPU {other} of process {pid}: no NVLink or P2P between them (MIG "
                    "slices have none); use GPUs that are linked (`epee doctor` shows them), or CPU tensors"
                )


def uuid_of(device: int) -> bytes:
    """Return the 16 bytes that identify a GPU, or a MIG slice of one, in every process of this host."""
    return bytes(check(driver().cuDeviceGetUuid(device), f"ask for the name of GPU {device}").bytes)


def _posix() -> Any:
    return driver().CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def _no_descriptors(device: int, reason: str) -> str:
    return (
        f"GPU {device} cannot lend memory through descriptors ({reason}); update the driver, or leave EPEE_CUDA_SHARE "
        "unset so that cudaIpc is tried"
    )
