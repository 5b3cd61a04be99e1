"""The one place where `cuda.bindings` is imported and its status codes become exceptions.

Importing this module touches no CUDA; the first call does. A machine without the bindings gets a sentence with the
way out instead of an ImportError.
"""

from __future__ import annotations

import functools
from typing import Any

from ..errors import ResourceError, UnsupportedError


@functools.cache
def driver() -> Any:
    """Return `cuda.bindings.driver`.

    Raises:
        UnsupportedError: the package is not installed.
    """
    try:
        from cuda.bindings import driver as module
    except ImportError as exc:
        raise UnsupportedError(
            f"CUDA tensors need the package cuda-bindings ({exc}); it comes with torch's CUDA builds, "
            "or `pip install cuda-bindings`"
        ) from exc
    return module


@functools.cache
def nvrtc() -> Any:
    """Return `cuda.bindings.nvrtc` (see `driver`)."""
    try:
        from cuda.bindings import nvrtc as module
    except ImportError as exc:
        raise UnsupportedError(
            f"compiling kernels needs the package cuda-bindings ({exc}); it comes with torch's CUDA builds, "
            "or `pip install cuda-bindings nvidia-cuda-nvrtc`"
        ) from exc
    return module


def check(result: tuple[Any, ...], what: str) -> Any:
    """Return the values of a driver call, or raise `ResourceError` that says what was attempted.

    Args:
        result: what the binding returned, status first.
        what: the attempt in words, for the message.
    """
    status = result[0]
    if int(status) != 0:
        raise ResourceError(f"{what}: the CUDA driver says {status.name}")
    if len(result) == 1:
        return None
    return result[1] if len(result) == 2 else result[1:]


def device_architecture(device: int) -> str:
    """Return the exact target of a device, such as `sm_90a`.

    Raises:
        UnsupportedError: the GPU is older than Hopper, whose copy engine and barriers the kernels use.
    """
    cu = driver()
    attribute = cu.CUdevice_attribute
    major = check(
        cu.cuDeviceGetAttribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device), "read the device"
    )
    minor = check(
        cu.cuDeviceGetAttribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device), "read the device"
    )
    if major < 9:
        raise UnsupportedError(
            f"the kernels need compute capability 9.0 (Hopper) or newer, device {device} has {major}.{minor}; "
            "use CPU tensors on this machine"
        )
    return f"sm_{major}{minor}a"
