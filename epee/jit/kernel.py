"""Loading and launching of compiled kernels.

A kernel is loaded when its object is made and never inside a call: the driver may synchronise the context for a first
load, and a kernel that already spins for a peer would then wait for itself. The argument struct lives as long as the
object; the driver copies it at each launch (and at graph capture). For a kernel with mostly constant arguments the
caller makes a separate launcher (`Kernel.bind`), and writes the varying ones.
"""

from __future__ import annotations

import ctypes
import functools
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from .. import env
from ..errors import CompileError
from .cache import CubinCache, cache_key
from .compile import compile_source, compiler_version, options
from .driver import check, device_architecture, driver
from .params import kernel_symbol
from .source import flatten

SHARE_S = 60.0  # how long another process may take to compile a file, before this one does it as well
_NAP_S = 0.02
_STATIC_SHARED_BYTES = 48 << 10  # more dynamic shared memory than this must be requested explicitly


@functools.cache
def _cache() -> CubinCache:
    return CubinCache()


def cubins_of(paths: Sequence[str], head: str, architecture: str) -> list[bytes]:
    """Return compiled kernel files, from the cache or from the compiler.

    The ranks of a group need the same files at the same time, so processes with one cache share the work: each compiles
    a file that no other one is compiling, and takes from the cache what others have compiled. A process that ends
    meanwhile gives its file up; one that is stopped delays the others by `SHARE_S` at most.

    Args:
        paths: relative to `epee/csrc`.
        head: generated constants and structs.
        architecture: such as `sm_90a`.
    Raises:
        CompileError: one does not compile, or it is not cached and `EPEE_JIT_COMPILE=0`.
    """
    first = os.getpid() % max(1, len(paths))  # processes begin with different files
    missing = {path: flatten(path, head) for path in (*paths[first:], *paths[:first])}
    found: dict[str, bytes] = {}
    until = time.monotonic() + SHARE_S
    while True:
        num_missing = len(missing)
        for path, text in list(missing.items()):
            cubin = _cubin_of(path, text, architecture, is_patient=time.monotonic() < until)
            if cubin is not None:
                found[path] = cubin
                del missing[path]
        if not missing:
            return [found[path] for path in paths]
        if len(missing) == num_missing:
            time.sleep(_NAP_S)


def _cubin_of(path: str, text: str, architecture: str, is_patient: bool) -> bytes | None:
    """Return a compiled text; None if `is_patient` and another process is compiling it."""
    cache, key = _cache(), cache_key(text, options(architecture), compiler_version())
    cached = cache.load(key)
    if cached is not None:
        return cached
    if not env.get_bool("EPEE_JIT_COMPILE"):
        raise CompileError(
            f"{path} for {architecture} is not in {cache.folder} and EPEE_JIT_COMPILE is 0; "
            "run `epee warmup` once with EPEE_JIT_COMPILE=1"
        )
    with cache.claimed(key) as is_mine:
        if is_patient and not is_mine:
            return None
        cached = cache.load(key)  # from another process that has just finished it
        if cached is None:
            cached = compile_source(text, architecture, path).cubin
            cache.store(key, cached)
    return cached


class Kernel:
    """One loaded kernel with its argument struct and its last launch configuration.

    Args:
        function: of the driver.
        args: the struct, which becomes the object's own.

    Attributes:
        args: set its fields, then call the object. Not safe for two threads at once.
    """

    def __init__(self, function: Any, args: ctypes.Structure) -> None:
        cu = driver()
        self.args: Any = args
        self._function = function
        self._argv = (ctypes.c_void_p * 1)(ctypes.addressof(args))
        self._argv_address = ctypes.addressof(self._argv)
        self._config = cu.CUlaunchConfig()
        self._config.blockDimY = self._config.blockDimZ = self._config.gridDimY = self._config.gridDimZ = 1
        self._configured: tuple[int, int, int, int, str] | None = None
        self._launch = cu.cuLaunchKernelEx

    def bind(self) -> Kernel:
        """Return another launcher of this kernel; its arguments begin as a copy of these and are its own from then on.

        Cheap compared with loading a kernel, expensive compared with a launch: it is made once for many.
        """
        return Kernel(self._function, type(self.args).from_buffer_copy(self.args))

    def __call__(self, grid: int, block: int, shared_bytes: int, stream: int, mode: str = "plain") -> None:
        """Launch `grid` blocks of `block` threads on the raw stream handle `stream`.

        Args:
            mode: "together": no block starts before all fit on the GPU (required by a grid barrier); "early": blocks
            may become resident while the kernel before still runs, if that kernel allows it.
        Raises:
            ResourceError: the blocks do not fit on the GPU, or the driver refuses otherwise.
        """
        wanted = grid, block, shared_bytes, stream, mode
        if wanted != self._configured:
            self._configure(*wanted)
        result = self._launch(self._config, self._function, self._argv_address, 0)
        if result[0]:
            check(result, f"launch {grid} blocks of {block}")

    def _configure(self, grid: int, block: int, shared_bytes: int, stream: int, mode: str) -> None:
        """Write the launch into the driver's struct: its setters cost more than a check whether it is the last one."""
        config, before = self._config, self._configured
        self._configured = None  # after an interrupt in here the next launch writes everything
        config.gridDimX, config.blockDimX, config.sharedMemBytes = grid, block, shared_bytes
        if before is None or mode != before[4]:
            config.attrs = _attributes(mode)
            config.numAttrs = len(_attributes(mode))
        if before is None or stream != before[3]:
            config.hStream = driver().CUstream(stream)
        self._configured = grid, block, shared_bytes, stream, mode


@functools.cache
def _attributes(mode: str) -> list[Any]:
    cu = driver()
    if mode == "plain":
        return []
    attribute = cu.CUlaunchAttribute()
    if mode == "early":
        attribute.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
    else:
        assert mode == "together", mode
        attribute.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        attribute.value.cooperative = 1
    return [attribute]


class Module:
    """The kernels of one file, loaded on one device."""

    def __init__(self, path: str, cubin: bytes) -> None:
        cu = driver()
        self._path = path
        self._library = check(cu.cuLibraryLoadData(cubin, [], [], 0, [], [], 0), f"load {path}")

    def kernel(self, name: str, params: type[ctypes.Structure], max_shared_bytes: int) -> Kernel:
        """Return the kernel `name`, loaded now; it may use up to `max_shared_bytes` of dynamic shared memory."""
        cu = driver()
        symbol = kernel_symbol(name, params).encode()
        kernel = check(cu.cuLibraryGetKernel(self._library, symbol), f"find {name} in {self._path}")
        function = check(cu.cuKernelGetFunction(kernel), f"load {name}")
        if max_shared_bytes > _STATIC_SHARED_BYTES:
            attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            check(cu.cuFuncSetAttribute(function, attribute, max_shared_bytes), "reserve shared memory")
        return Kernel(function, params())


def load_kernels(
    files: Mapping[str, Mapping[str, type[ctypes.Structure]]], head: str, device: int, max_shared_bytes: int
) -> dict[str, Kernel]:
    """Compile and load the entry points that `files` names, by file and kernel."""
    found: dict[str, Kernel] = {}
    for path, cubin in zip(files, cubins_of([*files], head, device_architecture(device)), strict=True):
        module = Module(path, cubin)
        found.update({name: module.kernel(name, struct, max_shared_bytes) for name, struct in files[path].items()})
    return found
