"""What NVRTC makes of a text, once for all tests that ask for the same text and options, and what each kernel needs."""

from __future__ import annotations

import re
from typing import NamedTuple

from epee.jit.cache import cache_key
from epee.jit.compile import Compiled, compile_source, compiler_version, options
from tests.csrc.made import made

_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_ENTRY = re.compile(r"Compiling entry function '(\w+)'")
_REGISTERS = re.compile(r"Used (\d+) registers")


class Resources(NamedTuple):
    """What one kernel needs.

    Attributes:
        registers: per thread.
        stack_bytes: per thread.
        spill_bytes: per thread, stores and loads together.
    """

    registers: int
    stack_bytes: int
    spill_bytes: int


def compile_once(source: str, architecture: str, name: str) -> Compiled:
    """Return what `compile_source` returns."""
    key = cache_key(source, (*options(architecture), name), compiler_version())

    def as_bytes() -> bytes:
        compiled = compile_source(source, architecture, name)
        return compiled.log.encode() + b"\0" + compiled.cubin

    log, _, cubin = made(f"{key}.nvrtc", lambda path: path.write_bytes(as_bytes())).read_bytes().partition(b"\0")
    return Compiled(cubin, log.decode())


def resources(log: str) -> dict[str, Resources]:
    """Read registers, stack and spills of every kernel from the compiler's log."""
    found = {}
    for block in log.split("Compiling entry function")[1:]:
        entry = _ENTRY.match("Compiling entry function" + block)
        spills = _SPILLS.search(block)
        registers = _REGISTERS.search(block)
        if entry and spills and registers:
            stack, stores, loads = (int(text) for text in spills.groups())
            found[entry[1]] = Resources(int(registers[1]), stack, stores + loads)
    return found
