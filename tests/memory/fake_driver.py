"""A CUDA driver in Python, for the host code of `memory.cuda`: GPU memory is a memfd, a mapping is `mmap`.

It has the functions of `cuda.bindings.driver` that epee's memory code calls, with the same arguments and results, and
keeps a ledger of what was taken and not given back. Descriptors are real, so memory is shared between real processes.
`fail_at` lets the n-th call fail without doing anything. What it cannot show: alignment rules, memory order, NVLink.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import functools
import mmap
import os
import struct
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from epee.jit import driver as driver_module
from epee.memory import cuda, cuda_mapping

GRANULE_BYTES = 64 << 10
_IPC = struct.Struct("<qqq40x")
_PROT_RW, _MAP_SHARED, _MAP_FIXED = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, 0x10
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


class Status(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_INVALID_DEVICE = 101
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_ILLEGAL_ADDRESS = 700
    CUDA_ERROR_NOT_PERMITTED = 800
    CUDA_ERROR_NOT_SUPPORTED = 801
    CUDA_ERROR_SYSTEM_NOT_READY = 802
    CUDA_ERROR_UNKNOWN = 999


OK = Status.CUDA_SUCCESS
GIVES_BACK = ("cuMemRelease", "cuMemUnmap", "cuMemAddressFree", "cuMemFree", "cuIpcCloseMemHandle", "cuCtxSetCurrent")


class _Names:
    """An enumeration of the bindings: every attribute is its own name."""

    def __init__(self, *missing: str) -> None:
        self._missing = missing

    def __getattr__(self, name: str) -> str:
        if name in self._missing or not name.startswith("CU_"):
            raise AttributeError(name)
        return name


def _bag(**fields: Any) -> Callable[[], types.SimpleNamespace]:
    return lambda: types.SimpleNamespace(**{k: v() if callable(v) else v for k, v in fields.items()})


def api(function: Callable[..., Any]) -> Callable[..., Any]:
    """Count a call, and fail it if its turn has come."""

    @functools.wraps(function)
    def call(self: FakeDriver, *args: Any) -> Any:
        name = function.__name__
        self.calls.append(name)
        if len(self.calls) - 1 == self.fail_at:
            return (self.failure, None)
        if name in self.refused:
            return (self.refused[name], None)
        result = function(self, *args)
        if len(self.calls) - 1 == self.interrupt_at:
            raise KeyboardInterrupt
        return result if isinstance(result, tuple) else (result,)

    return call


class FakeDriver:
    """Some GPUs.

    Attributes:
        calls: the names of all calls so far.
        fail_at: index of the call that fails.
        failure: with which status.
        interrupt_at: index of the call behind which a signal handler raises.
        refused: calls that always fail, with their status.
        attributes: of every device.
        strangers: pairs of devices that do not reach each other.
    """

    def __init__(self, num_devices: int = 2) -> None:
        self.num_devices = num_devices
        self.calls: list[str] = []
        self.fail_at = -1
        self.failure = Status.CUDA_ERROR_UNKNOWN
        self.interrupt_at = -1
        self.refused: dict[str, Status] = {}
        self.version = 13000
        self.attributes = {
            "COMPUTE_CAPABILITY_MAJOR": 9,
            "COMPUTE_CAPABILITY_MINOR": 0,
            "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED": 1,
            "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED": 1,
            "MULTIPROCESSOR_COUNT": 4,
            "COOPERATIVE_LAUNCH": 1,
        }
        self.name = "Fake GPU"
        self.strangers: set[tuple[int, int]] = set()
        self.handles: dict[int, tuple[int, int]] = {}  # handle -> descriptor, device
        self.reserved: dict[int, int] = {}  # address -> bytes
        self.mapped: dict[int, tuple[int, int]] = {}  # address -> bytes, device
        self.behind: dict[int, int] = {}  # address -> descriptor of what is mapped there
        self.reachable: set[int] = set()
        self.allocated: dict[int, tuple[int, int]] = {}  # address -> bytes, descriptor
        self.opened: dict[int, int] = {}  # address -> bytes
        self._next = 100
        self._local = threading.local()
        for name in ("CUmemAllocationType", "CUmemLocationType", "CUmemAllocationHandleType", "CUmemAccess_flags",
                     "CUmemAllocationGranularity_flags", "CUdevice_attribute", "CUdevice_P2PAttribute"):  # fmt: skip
            setattr(self, name, _Names())
        self.CUipcMem_flags = types.SimpleNamespace(CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS=1)
        self.CUmemAllocationProp = _bag(type=None, requestedHandleTypes=None, location=_bag(type=None, id=None))
        self.CUmemAccessDesc = _bag(flags=None, location=_bag(type=None, id=None))
        self.CUipcMemHandle = _bag(reserved=bytes)

    def leaks(self) -> dict[str, int]:
        """What was taken and not given back, by kind; empty when all is well."""
        names = ("handles", "reserved", "mapped", "allocated", "opened")
        return {name: len(getattr(self, name)) for name in names if getattr(self, name)}

    def _context(self) -> int:
        return getattr(self._local, "context", 0)

    # devices

    @api
    def cuInit(self, flags: int) -> Any:
        return OK

    @api
    def cuDriverGetVersion(self) -> Any:
        return OK, self.version

    @api
    def cuDeviceGetCount(self) -> Any:
        return OK, self.num_devices

    @api
    def cuDeviceGetAttribute(self, key: str, device: int) -> Any:
        if not 0 <= device < self.num_devices:
            return Status.CUDA_ERROR_INVALID_DEVICE, None
        return OK, self.attributes.get(key.removeprefix("CU_DEVICE_ATTRIBUTE_"), 0)

    @api
    def cuDeviceGetUuid(self, device: int) -> Any:
        return OK, types.SimpleNamespace(bytes=b"fake gpu".ljust(15, b"\0") + bytes([device]))

    @api
    def cuDeviceGetName(self, length: int, device: int) -> Any:
        return OK, self.name.encode().ljust(length, b"\0")

    @api
    def cuDeviceTotalMem(self, device: int) -> Any:
        return OK, 80 << 30

    @api
    def cuMemGetInfo(self) -> Any:
        return OK, 79 << 30, 80 << 30

    @api
    def cuDeviceGetPCIBusId(self, length: int, device: int) -> Any:
        return OK, f"0000:0{device}:00.0".encode().ljust(length, b"\0")

    @api
    def cuDeviceCanAccessPeer(self, device: int, peer: int) -> Any:
        return OK, int((device, peer) not in self.strangers and device != peer)

    @api
    def cuDeviceGetP2PAttribute(self, key: str, device: int, peer: int) -> Any:
        return OK, int((device, peer) not in self.strangers)

    @api
    def cuDevicePrimaryCtxRetain(self, device: int) -> Any:
        if not 0 <= device < self.num_devices:
            return Status.CUDA_ERROR_INVALID_DEVICE, None
        return OK, 7000 + device

    @api
    def cuCtxGetCurrent(self) -> Any:
        return OK, self._context()

    @api
    def cuCtxSetCurrent(self, context: int) -> Any:
        self._local.context = context
        return OK

    @api
    def cuCtxSynchronize(self) -> Any:
        return OK if self._context() else Status.CUDA_ERROR_INVALID_CONTEXT

    # memory behind descriptors

    @api
    def cuMemGetAllocationGranularity(self, properties: Any, kind: str) -> Any:
        return OK, GRANULE_BYTES

    @api
    def cuMemCreate(self, nbytes: int, properties: Any, flags: int) -> Any:
        assert properties.requestedHandleTypes == "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR"
        if nbytes % GRANULE_BYTES:
            return Status.CUDA_ERROR_INVALID_VALUE, None
        if nbytes > 80 << 30:
            return Status.CUDA_ERROR_OUT_OF_MEMORY, None
        fd = os.memfd_create(f"fake-gpu-{properties.location.id}")
        os.ftruncate(fd, nbytes)
        return OK, self._handle(fd)

    def _handle(self, fd: int) -> int:
        self._next += 1
        device = int(os.readlink(f"/proc/self/fd/{fd}").split("fake-gpu-")[1].split()[0])
        self.handles[self._next] = fd, device
        return self._next

    @api
    def cuMemExportToShareableHandle(self, handle: int, kind: str, flags: int) -> Any:
        return OK, os.dup(self.handles[handle][0])

    @api
    def cuMemImportFromShareableHandle(self, fd: int, kind: str) -> Any:
        if "fake-gpu-" not in os.readlink(f"/proc/self/fd/{fd}"):
            return Status.CUDA_ERROR_INVALID_VALUE, None
        return OK, self._handle(os.dup(fd))

    @api
    def cuMemRelease(self, handle: int) -> Any:
        os.close(self.handles.pop(handle)[0])
        return OK

    @api
    def cuMemAddressReserve(self, nbytes: int, align: int, wanted: int, flags: int) -> Any:
        address = _libc.mmap(None, nbytes, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        if address == ctypes.c_void_p(-1).value:
            return Status.CUDA_ERROR_OUT_OF_MEMORY, None
        self.reserved[address] = nbytes
        return OK, address

    @api
    def cuMemAddressFree(self, address: int, nbytes: int) -> Any:
        if address in self.mapped:
            return Status.CUDA_ERROR_INVALID_VALUE
        assert self.reserved.pop(address) == nbytes
        _libc.munmap(address, nbytes)
        return OK

    @api
    def cuMemMap(self, address: int, nbytes: int, offset: int, handle: int, flags: int) -> Any:
        fd, device = self.handles[handle]
        if address in self.mapped or nbytes > self.reserved[address] or nbytes > os.fstat(fd).st_size:
            return (Status.CUDA_ERROR_INVALID_VALUE,)
        _libc.mmap(address, nbytes, _PROT_RW, _MAP_SHARED | _MAP_FIXED, fd, 0)
        self.mapped[address] = nbytes, device
        self.behind[address] = os.dup(fd)
        return OK

    @api
    def cuMemRetainAllocationHandle(self, address: int) -> Any:
        return OK, self._handle(os.dup(self.behind[address]))

    @api
    def cuMemSetAccess(self, address: int, nbytes: int, accesses: list[Any], count: int) -> Any:
        _, owner = self.mapped[address]
        if (accesses[0].location.id, owner) in self.strangers:
            return (Status.CUDA_ERROR_INVALID_DEVICE,)
        self.reachable.add(address)
        return OK

    @api
    def cuMemUnmap(self, address: int, nbytes: int) -> Any:
        if address not in self.mapped:
            return Status.CUDA_ERROR_INVALID_VALUE
        assert self.mapped.pop(address)[0] == nbytes
        os.close(self.behind.pop(address))
        self.reachable.discard(address)
        _libc.mmap(address, nbytes, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED, -1, 0)
        return OK

    # ordinary memory, lent by handles

    @api
    def cuMemAlloc(self, nbytes: int) -> Any:
        if not self._context():
            return Status.CUDA_ERROR_INVALID_CONTEXT, None
        fd = os.memfd_create(f"fake-gpu-{self._context() - 7000}")
        os.ftruncate(fd, nbytes)
        address = _libc.mmap(None, nbytes, _PROT_RW, _MAP_SHARED, fd, 0)
        self.allocated[address] = nbytes, fd
        self.reachable.add(address)
        return OK, address

    @api
    def cuMemFree(self, address: int) -> Any:
        if not self._context():
            return Status.CUDA_ERROR_INVALID_CONTEXT
        nbytes, fd = self.allocated.pop(address)
        self.reachable.discard(address)
        os.close(fd)
        _libc.munmap(address, nbytes)
        return OK

    @api
    def cuIpcGetMemHandle(self, address: int) -> Any:
        nbytes, fd = self.allocated[address]
        return OK, types.SimpleNamespace(reserved=_IPC.pack(os.getpid(), fd, nbytes))

    @api
    def cuIpcOpenMemHandle(self, handle: Any, flags: int) -> Any:
        assert flags == 1
        pid, number, nbytes = _IPC.unpack(handle.reserved)
        if pid == os.getpid() or not self._context():
            return Status.CUDA_ERROR_INVALID_CONTEXT, None
        try:
            fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
        except OSError:
            return Status.CUDA_ERROR_INVALID_VALUE, None
        address = _libc.mmap(None, nbytes, _PROT_RW, _MAP_SHARED, fd, 0)
        os.close(fd)
        self.opened[address] = nbytes
        self.reachable.add(address)
        return OK, address

    @api
    def cuIpcCloseMemHandle(self, address: int) -> Any:
        if not self._context():
            return Status.CUDA_ERROR_INVALID_CONTEXT
        self.reachable.discard(address)
        _libc.munmap(address, self.opened.pop(address))
        return OK

    @api
    def cuMemGetAddressRange(self, address: int) -> Any:
        nbytes = self.opened[address] if address in self.opened else self.allocated[address][0]
        return OK, address, nbytes

    # contents

    @api
    def cuMemsetD8(self, address: int, value: int, nbytes: int) -> Any:
        if address not in self.reachable or not self._context():
            return (Status.CUDA_ERROR_ILLEGAL_ADDRESS,)
        ctypes.memset(address, value, nbytes)
        return OK

    @api
    def cuMemcpyHtoD(self, address: int, source: bytes, nbytes: int) -> Any:
        if address not in self.reachable:
            return (Status.CUDA_ERROR_ILLEGAL_ADDRESS,)
        ctypes.memmove(address, source, nbytes)
        return OK

    @api
    def cuMemcpyDtoH(self, target: bytearray, address: int, nbytes: int) -> Any:
        if address not in self.reachable:
            return (Status.CUDA_ERROR_ILLEGAL_ADDRESS,)
        target[:] = ctypes.string_at(address, nbytes)
        return OK


@contextlib.contextmanager
def installed(fake: FakeDriver) -> Iterator[FakeDriver]:
    """Put `fake` in the place of `cuda.bindings.driver`; tensors over its memory are CPU tensors."""
    names = ("cuda", "cuda.bindings", "cuda.bindings.driver")
    before = {name: sys.modules.get(name) for name in names}
    bindings = types.ModuleType("cuda.bindings")
    bindings.driver = fake  # type: ignore[attr-defined]
    sys.modules.update({"cuda": types.ModuleType("cuda"), "cuda.bindings": bindings})
    as_tensor = cuda._as_tensor
    cuda._as_tensor = _cpu_tensor
    forget()
    try:
        yield fake
    finally:
        cuda._as_tensor = as_tensor
        for name, module in before.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module
        forget()


def forget() -> None:
    """Drop what epee remembers of a driver."""
    driver_module.driver.cache_clear()
    cuda_mapping._primary_context.cache_clear()


def _cpu_tensor(source: Any, device: int) -> torch.Tensor:
    (nbytes,) = source.__cuda_array_interface__["shape"]
    address, _ = source.__cuda_array_interface__["data"]

    class Bytes(ctypes.c_ubyte * nbytes):  # type: ignore[misc]
        keep: object = None

    memory = Bytes.from_address(address)
    memory.keep = source
    return torch.frombuffer(memory, dtype=torch.uint8)
