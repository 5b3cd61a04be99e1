"""The one module that imports `cuda.bindings` and turns its status codes into exceptions.

Importing this module does not use CUDA; the first call of `driver` starts the driver. On a machine without the
bindings, without a driver, or with one that does not start the error is one sentence with the remedy.
"""

from __future__ import annotations

import functools
from typing import Any

from ..errors import ResourceError, UnsupportedError, expected

OLDEST_DRIVER = 12000  # as `cuDriverGetVersion` counts: CUDA 12.0, the first for Hopper's features as we use them

_WAY_OUT = {
    "CUDA_ERROR_OUT_OF_MEMORY": "free GPU memory or make the buffer smaller",
    "CUDA_ERROR_NO_DEVICE": "no GPU is visible: look at CUDA_VISIBLE_DEVICES and at the container's --gpus",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "libcuda and the kernel's driver differ: reboot, or match the container's",
    "CUDA_ERROR_SYSTEM_NOT_READY": "NVSwitch machines need the service nvidia-fabricmanager: start it",
    "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE": "remove the CUDA compat libraries or update the NVIDIA driver",
    "CUDA_ERROR_STUB_LIBRARY": "the stub libcuda was found: take its folder out of LD_LIBRARY_PATH",
    "CUDA_ERROR_OPERATING_SYSTEM": "the /dev/nvidia* files are missing or forbidden: give the container the GPUs",
    "CUDA_ERROR_DEVICE_UNAVAILABLE": "another process owns the GPU: `nvidia-smi -c DEFAULT` lets several use it",
    "CUDA_ERROR_MPS_CONNECTION_FAILED": "the MPS server does not answer: restart it, or stop it",
    "CUDA_ERROR_NO_BINARY_FOR_GPU": "the driver is older than NVRTC: update it, or install NVRTC of its CUDA version",
    "CUDA_ERROR_INVALID_IMAGE": "the driver is older than NVRTC: update it, or install NVRTC of its CUDA version",
    "CUDA_ERROR_UNSUPPORTED_PTX_VERSION": "the driver is older than NVRTC: update it",
    "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE": "give the call fewer SMs",
    "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED": "use GPUs that NVLink or PCIe P2P connects (`nvidia-smi topo -p2p r`)",
    "CUDA_ERROR_INVALID_CONTEXT": "the process was forked after its first use of CUDA: start ranks by spawn",
}
_NOT_OFFERED = ("CUDA_ERROR_NOT_SUPPORTED", "CUDA_ERROR_NOT_PERMITTED")


@functools.cache
def driver() -> Any:
    """Return `cuda.bindings.driver`, started.

    Raises:
        UnsupportedError: the package or the NVIDIA driver is missing, or too old.
        ResourceError: the driver does not start.
    """
    try:
        from cuda.bindings import driver as module
    except ImportError as exc:
        raise UnsupportedError(
            f"CUDA tensors need the package cuda-bindings ({exc}); it comes with torch's CUDA builds, "
            "or `pip install cuda-bindings`"
        ) from exc
    try:
        check(module.cuInit(0), "start the NVIDIA driver")
        version = int(check(module.cuDriverGetVersion(), "ask for the driver's version"))
    except expected(RuntimeError) as exc:
        if isinstance(exc, ResourceError):
            raise
        raise UnsupportedError(  # the bindings found no libcuda, or none that has the function
            f"there is no usable NVIDIA driver here ({exc}); install one, start the container with --gpus all, "
            "or use CPU tensors"
        ) from exc
    if version < OLDEST_DRIVER:
        raise UnsupportedError(
            f"the NVIDIA driver serves CUDA {version_text(version)}, epee needs {version_text(OLDEST_DRIVER)} or "
            "newer; update the driver"
        )
    return module


@functools.cache
def nvrtc() -> Any:
    """Return `cuda.bindings.nvrtc`, its library found.

    Raises:
        UnsupportedError: the package or NVRTC itself is missing.
    """
    try:
        from cuda.bindings import nvrtc as module
    except ImportError as exc:
        raise UnsupportedError(
            f"compiling kernels needs the package cuda-bindings ({exc}); it comes with torch's CUDA builds, "
            "or `pip install cuda-bindings nvidia-cuda-nvrtc`"
        ) from exc
    try:
        module.nvrtcVersion()
    except expected(RuntimeError) as exc:
        raise UnsupportedError(
            f"compiling kernels needs NVRTC ({exc}); it comes with torch's CUDA builds, or `pip install "
            "nvidia-cuda-nvrtc`"
        ) from exc
    return module


def version_text(version: int) -> str:
    """Return `13.0` for 13000, CUDA's encoding of versions."""
    return f"{version // 1000}.{version % 1000 // 10}"


def is_not_offered(result: tuple[Any, ...]) -> bool:
    """Return whether a driver call failed because this machine does not have, or does not allow, the requested
    feature."""
    return str(result[0].name) in _NOT_OFFERED


def check(result: tuple[Any, ...], what: str) -> Any:
    """Return the values of a driver call, or raise `ResourceError` with the attempted operation and the remedy.

    Args:
        result: the binding's return value, status first.
        what: the attempt in words, for the message.
    """
    status = result[0]
    if int(status) != 0:
        way_out = _WAY_OUT.get(status.name)
        raise ResourceError(f"{what}: the CUDA driver says {status.name}{f'; {way_out}' if way_out else ''}")
    if len(result) == 1:
        return None
    return result[1] if len(result) == 2 else result[1:]


def attribute(name: str, device: int) -> int:
    """Return a device attribute by the end of its name (`MULTIPROCESSOR_COUNT`), 0 where the bindings lack it."""
    cu = driver()
    key = getattr(cu.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}", None)
    if key is None:
        return 0
    return int(check(cu.cuDeviceGetAttribute(key, device), f"read {name.lower()} of GPU {device}"))


def device_architecture(device: int) -> str:
    """Return the exact target of a device, such as `sm_90a`.

    Raises:
        UnsupportedError: the GPU is older than Hopper, whose copy engine and barriers the kernels use.
    """
    major = attribute("COMPUTE_CAPABILITY_MAJOR", device)
    minor = attribute("COMPUTE_CAPABILITY_MINOR", device)
    if major < 9:
        raise UnsupportedError(
            f"the kernels need compute capability 9.0 (Hopper) or newer, device {device} has {major}.{minor}; "
            "use CPU tensors on this machine"
        )
    return f"sm_{major}{minor}a"
