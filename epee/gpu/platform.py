"""The machine below a buffer on GPUs: memory to lend, kernels to launch, streams. One class for GPUs.

The tests have a second implementation in which the same kernels, built by g++, run in the calling process; the
interface exists for that reason and is narrow. It knows nothing of dispatches.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any, Protocol

import torch

from ..jit.driver import check, driver
from ..jit.kernel import load_kernels
from ..memory.cuda import CudaRegion, lends_descriptors
from ..memory.shared import HEADER_BYTES, SharedRegion
from ..torch_private import CudaEvent, current_raw_stream, is_capturing
from .event import stream_of
from .shapes import Limits

_STATIC_SHARED_BYTES = 8 << 10  # more than any kernel's own variables


class LentRegion(Protocol):
    """Memory that ranks lend to each other."""

    address: int
    nbytes: int

    @property
    def blob(self) -> bytes:
        """Bytes that a peer needs to attach the memory."""

    def lease(self, offset: int, nbytes: int, released: Callable[[], None] | None) -> torch.Tensor:
        """Return bytes as a tensor; `released` runs when the last view is deleted."""

    def replace(self, blob: bytes) -> None:
        """Map another process's memory at this address instead of a peer's; no kernel may use it meanwhile."""

    def close(self) -> None:
        """Release the memory."""


class Launcher(Protocol):
    """A loaded kernel: set `args`, then call it."""

    args: Any

    def __call__(self, grid: int, block: int, shared_bytes: int, stream: int, mode: str = "plain") -> None:
        """Launch on a raw stream; `mode` as in `jit.kernel.Kernel`."""

    def bind(self) -> Launcher:
        """Return another launcher of the kernel, with its own `args` that begin as a copy of these."""


class MappedWords(Protocol):
    """Words in cpu memory that kernels can write."""

    address: int
    words: memoryview


class Platform(Protocol):
    """The machine below a buffer."""

    device: torch.device
    limits: Limits

    @property
    def keeps_addresses(self) -> bool:
        """Whether the memory of another process can be mapped where a peer's was (`LentRegion.replace`)."""

    def create(self, nbytes: int) -> LentRegion:
        """Allocate memory, all zero."""

    def attach(self, blob: bytes) -> LentRegion:
        """Map a peer's memory."""

    def kernels(self, files: Mapping[str, Mapping[str, type[ctypes.Structure]]], head: str) -> Mapping[str, Launcher]:
        """Compile and load the kernels of some files, each with the struct of its arguments."""

    def mapped_words(self, count: int) -> MappedWords:
        """Allocate 64-bit words that the device can write and the cpu can poll, all zero."""

    def reach(self, region: SharedRegion) -> int:
        """Return the address at which the device uses CPU memory that processes share, until `leave`."""

    def leave(self, region: SharedRegion) -> None:
        """End that, before the region is closed; no kernel may use it."""

    def stream(self) -> int:
        """Return the current stream's raw handle."""

    def is_capturing(self) -> bool:
        """Whether the current stream is recording a graph."""

    def mark(self, stream: int) -> Any:
        """Return a mark at the present end of a stream."""

    def wait(self, mark: Any, stream: int | None = None) -> None:
        """Make a raw stream, the current one if none is named, wait for a mark."""

    def order(self, first: int, second: int, event: torch.cuda.Event) -> None:
        """Order later work on the raw stream `second` after the present work on `first`, by a free event."""

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Copy bytes between addresses of the device, on a raw stream."""

    def is_done(self, mark: Any) -> bool:
        """Whether all work before a mark is done."""

    def synchronize(self) -> None:
        """Wait for all work of the machine."""


class _PinnedWords:
    def __init__(self, count: int) -> None:
        self._tensor = torch.zeros(count, dtype=torch.int64, pin_memory=True, device="cpu")
        self.address = self._tensor.data_ptr()
        self.words = memoryview(self._tensor.numpy().data).cast("B").cast("Q")


class CudaPlatform:
    """One GPU.

    Attributes:
        device: the GPU.
        limits: its multiprocessors and shared memory, of which some is left to static variables.
        stream: returns the current stream's raw handle.
        is_capturing: returns whether the current stream is recording a CUDA graph.
    """

    def __init__(self, device: torch.device) -> None:
        torch.cuda.init()
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        torch.empty(1, dtype=torch.uint8, device=self.device)  # makes the GPU's context, which loading kernels needs
        cu = driver()
        attribute = cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
        shared_bytes = int(check(cu.cuDeviceGetAttribute(attribute, index), "read the device"))
        num_sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        self.limits = Limits(num_sms, shared_bytes - _STATIC_SHARED_BYTES)
        self._index = index
        self._streams: dict[int, torch.cuda.Stream] = {}  # torch's objects by raw handle, which cost more than an event
        # both are asked in every call: torch's own functions, without a Python frame around them
        self.stream: Callable[[], int] = partial(current_raw_stream, index)
        self.is_capturing: Callable[[], bool] = is_capturing
        self._new_event, self._record, self._wait = CudaEvent, CudaEvent.record, CudaEvent.wait
        self._copy = cu.cuMemcpyDtoDAsync

    @cached_property
    def keeps_addresses(self) -> bool:
        """Whether memory is lent by descriptors (VMM), not by cudaIpc.

        Raises:
            ResourceError: no memory or descriptor is available.
        """
        return lends_descriptors(self.device.index)

    def create(self, nbytes: int) -> CudaRegion:
        """Allocate GPU memory, all zero."""
        return CudaRegion.create(nbytes, self.device.index)

    def attach(self, blob: bytes) -> CudaRegion:
        """Map a peer's GPU memory."""
        return CudaRegion.attach(blob, self.device.index)

    def kernels(self, files: Mapping[str, Mapping[str, type[ctypes.Structure]]], head: str) -> Mapping[str, Launcher]:
        """Compile and load the kernels of some files."""
        return load_kernels(files, head, self.device.index, self.limits.shared_bytes)

    def mapped_words(self, count: int) -> MappedWords:
        """Allocate pinned 64-bit words, all zero."""
        return _PinnedWords(count)

    def reach(self, region: SharedRegion) -> int:
        """Map CPU memory that processes share into the GPU's addresses.

        Raises:
            ResourceError: the driver cannot lock it in memory.
        """
        cu, start = driver(), region.address - HEADER_BYTES
        with torch.cuda.device(self.device):
            both = cu.CU_MEMHOSTREGISTER_PORTABLE | cu.CU_MEMHOSTREGISTER_DEVICEMAP
            what = f"lock {region.mapped_bytes} bytes of CPU memory for the GPU"
            check(cu.cuMemHostRegister(start, region.mapped_bytes, both), what)
            return int(check(cu.cuMemHostGetDevicePointer(start, 0), what)) + HEADER_BYTES

    def leave(self, region: SharedRegion) -> None:
        """Undo `reach`."""
        with torch.cuda.device(self.device):
            check(driver().cuMemHostUnregister(region.address - HEADER_BYTES), "unlock CPU memory")

    def mark(self, stream: int) -> Any:
        """Return an event at the present end of a stream: the base class of `torch.cuda.Event`, which costs less."""
        event = self._new_event()
        self._record(event, self._streams.get(stream) or self._stream_of(stream))
        return event

    def wait(self, mark: torch.cuda.Event, stream: int | None = None) -> None:
        """Make a raw stream, the current one if none is named, wait for an event."""
        self._wait(mark, self._stream_of(self.stream() if stream is None else stream))

    def order(self, first: int, second: int, event: torch.cuda.Event) -> None:
        """Order later work on the raw stream `second` after the present work on `first`, by a free event."""
        streams = self._streams
        self._record(event, streams.get(first) or self._stream_of(first))
        self._wait(event, streams.get(second) or self._stream_of(second))

    def _stream_of(self, raw: int) -> torch.cuda.Stream:
        stream = self._streams.get(raw)
        if stream is None:
            stream = self._streams[raw] = stream_of(raw, self.device)
        return stream

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Copy bytes between addresses of the device, on a raw stream: half the time of torch's `copy_`.

        Raises:
            ResourceError: the driver refuses.
        """
        result = self._copy(target, source, nbytes, stream)
        if result[0]:
            check(result, f"copy {nbytes} bytes")

    def is_done(self, mark: torch.cuda.Event) -> bool:
        """Whether all work before an event is done."""
        return mark.query()

    def synchronize(self) -> None:
        """Wait for all work of the GPU."""
        torch.cuda.synchronize(self.device)
