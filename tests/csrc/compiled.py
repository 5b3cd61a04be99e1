"""What NVRTC makes of a text, once for all tests that ask for the same text and options."""

from __future__ import annotations

from epee.jit.cache import cache_key
from epee.jit.compile import Compiled, compile_source, compiler_version, options
from tests.csrc.made import made


def compile_once(source: str, architecture: str, name: str) -> Compiled:
    """Return what `compile_source` returns."""
    key = cache_key(source, (*options(architecture), name), compiler_version())

    def as_bytes() -> bytes:
        compiled = compile_source(source, architecture, name)
        return compiled.log.encode() + b"\0" + compiled.cubin

    log, _, cubin = made(f"{key}.nvrtc", lambda path: path.write_bytes(as_bytes())).read_bytes().partition(b"\0")
    return Compiled(cubin, log.decode())
