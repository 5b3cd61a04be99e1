"""Compilation of source text to a cubin with NVRTC, with the compiler's log.

Always a cubin for the exact architecture, never PTX: a driver older than NVRTC would refuse the latter.
"""

from __future__ import annotations

from typing import NamedTuple

from ..errors import CompileError
from .driver import nvrtc


class Compiled(NamedTuple):
    """A cubin and the compiler's log."""

    cubin: bytes
    log: str


def options(architecture: str) -> tuple[str, ...]:
    """Return the compiler's options; a part of the cache key."""
    return (
        f"--gpu-architecture={architecture}",
        "--std=c++17",
        "-lineinfo",
        "--ptxas-options=-v",
        "--fmad=false",  # sums are specified operation by operation
        "--diag-error=1866",  # an ignored attribute would change a struct's layout silently
    )


def compiler_version() -> str:
    """Return NVRTC's version; a part of the cache key."""
    _, major, minor = nvrtc().nvrtcVersion()
    return f"nvrtc {major}.{minor}"


def compile_source(source: str, architecture: str, name: str) -> Compiled:
    """Compile one text.

    Args:
        source: from `source.flatten`.
        architecture: such as `sm_90a`.
        name: of the kernel family, for messages.
    Raises:
        CompileError: the compiler refused it; the message has file, line and the whole log.
    """
    rtc = nvrtc()
    flags = options(architecture)
    status, program = rtc.nvrtcCreateProgram(source.encode(), f"{name}.cu".encode(), 0, None, None)
    if int(status):
        raise CompileError(f"{name}: NVRTC cannot start ({status.name})")
    try:
        status = rtc.nvrtcCompileProgram(program, len(flags), [flag.encode() for flag in flags])[0]
        log = _room(rtc.nvrtcGetProgramLogSize(program)[1])
        rtc.nvrtcGetProgramLog(program, log)
        text = log.rstrip(b"\0 \n").decode(errors="replace")
        if int(status):
            raise CompileError(f"{name} for {architecture} ({' '.join(flags)}) does not compile:\n{text}")
        cubin = _room(rtc.nvrtcGetCUBINSize(program)[1])
        rtc.nvrtcGetCUBIN(program, cubin)
    finally:
        rtc.nvrtcDestroyProgram(program)
    return Compiled(cubin, text)


def _room(num_bytes: int) -> bytes:
    """Return bytes for the compiler to write into, two at least.

    Python has one object for each single byte: the NUL of an empty log, written into it, would change `b" "` in the
    whole process.
    """
    return bytes(max(2, num_bytes))
