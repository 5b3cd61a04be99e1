"""Values that only NVML provides: the number of active NVLinks, and whether a GPU is divided into MIG slices.

Through ctypes, because the driver always installs `libnvidia-ml.so.1`, and a Python package for it would be one more
dependency. A value that cannot be read is None; nothing here raises.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

_MAX_LINKS = 18
_LIBRARY = "libnvidia-ml.so.1"


@contextlib.contextmanager
def opened(library: str = _LIBRARY) -> Iterator[Any]:
    """Yield the started library, or None if there is none."""
    try:
        nvml = ctypes.CDLL(library)
        is_up = nvml.nvmlInit_v2() == 0
    except (OSError, AttributeError):
        yield None
        return
    try:
        yield nvml if is_up else None
    finally:
        if is_up:
            nvml.nvmlShutdown()


def num_nvlinks(nvml: Any, bus_id: str) -> int | None:
    """Return the number of active NVLinks of the GPU at PCI `bus_id`, or None if it cannot be read."""
    handle = _handle(nvml, bus_id)
    if handle is None:
        return None
    count = 0
    for link in range(_MAX_LINKS):
        state = ctypes.c_uint(0)
        if nvml.nvmlDeviceGetNvLinkState(handle, ctypes.c_uint(link), ctypes.byref(state)) == 0:
            count += state.value
    return count


def is_mig(nvml: Any, bus_id: str) -> bool | None:
    """Return whether the GPU is in MIG mode, or None if it cannot be read."""
    handle = _handle(nvml, bus_id)
    current, pending = ctypes.c_uint(0), ctypes.c_uint(0)
    if handle is None or nvml.nvmlDeviceGetMigMode(handle, ctypes.byref(current), ctypes.byref(pending)) != 0:
        return None
    return bool(current.value)


def _handle(nvml: Any, bus_id: str) -> ctypes.c_void_p | None:
    handle = ctypes.c_void_p()
    if nvml is None or nvml.nvmlDeviceGetHandleByPciBusId_v2(bus_id.encode(), ctypes.byref(handle)) != 0:
        return None
    return handle
