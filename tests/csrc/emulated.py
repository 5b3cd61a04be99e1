"""A machine without a GPU for the throughput kernels: their own sources, built by g++, run in the calling process.

A launch returns when the kernel has ended, so ranks must be processes (or the first would wait for ever). Regions are
memfds. Libraries are built once for all processes (`tests.csrc.made`).
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import re
import shutil
import subprocess
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from epee.backend.cuda import params as collectives
from epee.ep.latency.gpu import params as latency_kernels
from epee.errors import ResourceError
from epee.gpu import params as throughput_params
from epee.gpu.hosts import HOST_KERNELS
from epee.gpu.shapes import Limits
from epee.jit.params import NAMESPACE
from epee.jit.source import CSRC, flatten
from epee.memory.shared import HEADER_BYTES, SharedRegion
from tests.csrc.made import is_made, made

MAX_WARPS = 2
_FLAGS = ("-O1", "-std=c++17", "-ffp-contract=off", "-w", "-fPIC")
# Numbers of a head that one build serves all of; see CONSTANT and ROOM in `csrc/ptx/types.cuh`.
_VARIABLE = re.compile(
    r"\bconstexpr int (kNumRanks|kStallOneIn|kElement|kReduction"
    r"|kPipelineThreads|kPipelineBlocks|kDirectThreads|kMendThreads) = (\d+);"
)


_MAYMOVE_FIXED = 3
_mremap = ctypes.CDLL(None, use_errno=True).mremap
_mremap.restype = ctypes.c_void_p
_mremap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)


def has_compiler() -> bool:
    """Whether the emulation can be built here."""
    return shutil.which("g++") is not None


def _launcher(name: str, struct: str) -> str:
    return (
        f'extern "C" void launch_{name}(unsigned grid, unsigned block, size_t bytes, const {struct}* params) {{\n'
        f"  const {struct} copy = *params;\n"
        f"  const auto kernel = [](const void* copy) {{ {NAMESPACE}::{name}(*static_cast<const {struct}*>(copy)); }};\n"
        "  emulation::launch(grid, block, bytes, kernel, &copy);\n}\n"
    )


@functools.cache
def build(path: str, head: str, entries: tuple[tuple[str, str], ...]) -> ctypes.CDLL:
    """Build one kernel file as a shared library; `entries` are (kernel, params struct) names.

    A compiled file serves all heads that differ in `_VARIABLE` only: the numbers are linked to it.
    """
    values = "".join(f"extern const int {name} = {value};\n" for name, value in _VARIABLE.findall(head))
    general = _VARIABLE.sub(r"extern const int \1;", head)
    key = _key(path, general, entries)
    if not is_made(f"{key}.o"):
        _compile_family(path, general)
    kernels = made(f"{key}.o", functools.partial(_compile, path, general, entries))
    library = made(f"{key}-{_hash(values)}.so", lambda so: _gxx(values, so, "-shared", str(kernels), "-lpthread"))
    return ctypes.CDLL(str(library))


def _compile_family(path: str, general: str) -> None:
    """Compile what will soon be needed with the file at `path`, as far as no other process is at it already.

    The ranks of a test come here together, so they share the work.
    """
    for family in (throughput_params.KERNELS, latency_kernels.KERNELS, collectives.KERNELS, HOST_KERNELS):
        for other, params in family.items() if path in family else ():
            entries = entries_of(params)
            make = functools.partial(_compile, other, general, entries)
            made(f"{_key(other, general, entries)}.o", make, is_awaited=False)


def _key(path: str, general: str, entries: tuple[tuple[str, str], ...]) -> str:
    return _hash(_sources(), path, general, *itertools.chain(*entries))


def _compile(path: str, general: str, entries: tuple[tuple[str, str], ...], target: Path) -> None:
    _gxx(flatten(path, general) + "".join(itertools.starmap(_launcher, entries)), target, "-c")


def _gxx(text: str, target: Path, *arguments: str) -> None:
    """Let g++ make `target` of a text."""
    command = ["g++", *_FLAGS, "-o", str(target), "-x", "c++", "-", "-x", "none", *arguments]
    subprocess.run(command, input=text.encode(), check=True, timeout=120)


def entries_of(params: Mapping[str, type[ctypes.Structure]]) -> tuple[tuple[str, str], ...]:
    """Return the names of kernels and of their structs."""
    return tuple((name, struct.__name__) for name, struct in params.items())


def _hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


@functools.cache
def _sources() -> str:
    """What all builds are made of: the kernels' sources and this file. Quicker than to put each text together."""
    files = [Path(__file__), *sorted(CSRC.rglob("*.cuh"))]
    return _hash(*(file.read_text(encoding="utf-8") for file in files))


class EmulatedKernel:
    """A kernel with its argument struct; calling it runs it to its end."""

    def __init__(self, function: Any, args: ctypes.Structure) -> None:
        self.args: Any = args
        self._function = function

    def bind(self) -> EmulatedKernel:
        return EmulatedKernel(self._function, type(self.args).from_buffer_copy(self.args))

    def __call__(self, grid: int, block: int, shared_bytes: int, stream: int, mode: str = "plain") -> None:
        del stream, mode  # every block is a thread, so all run at once
        self._function(grid, block, ctypes.c_size_t(shared_bytes), ctypes.byref(self.args))


class EmulatedRegion:
    """Host memory with the interface of `CudaRegion`."""

    def __init__(self, region: SharedRegion) -> None:
        self._region = region
        self.address = region.address
        self.nbytes = region.nbytes
        self.blob = region.blob

    def lease(self, offset: int, nbytes: int, released: Callable[[], None] | None) -> torch.Tensor:
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        lease = self._region.lease(offset, nbytes)
        if released is not None:
            weakref.finalize(lease, released)
        return torch.frombuffer(lease, dtype=torch.uint8)

    def replace(self, blob: bytes) -> None:
        new = SharedRegion.attach(blob)
        assert new.mapped_bytes == self._region.mapped_bytes
        start, source = (region.address - HEADER_BYTES for region in (self._region, new))
        # of shared pages a second mapping is made, in the place of what is there
        if _mremap(source, 0, new.mapped_bytes, _MAYMOVE_FIXED, start) != start:
            raise ResourceError("mremap")
        new.close()
        self.blob = blob

    def close(self) -> None:
        self._region.close()


class EmulatedWords:
    """Host words."""

    def __init__(self, count: int) -> None:
        self._array = (ctypes.c_uint64 * count)()
        self.address = ctypes.addressof(self._array)
        self.words = memoryview(self._array).cast("B").cast("Q")


class EmulatedPlatform:
    """A very small GPU that is a CPU."""

    keeps_addresses = True

    def __init__(self, num_sms: int = 3, shared_bytes: int = 24 << 10) -> None:
        self.device = torch.device("cpu")
        self.limits = Limits(num_sms, shared_bytes, MAX_WARPS)
        self._libraries: dict[str, ctypes.CDLL] = {}
        self._builds: dict[str, list[ctypes.CDLL]] = {}  # of a file, in the order in which they were loaded

    def pause(self, file: str, place: int, seconds: float) -> None:
        """Let threads of this process stand still at a place of the kernels of a file; see `emulated_pause_us`."""
        pauses = (ctypes.c_uint * 16).in_dll(self._libraries[f"kernels/throughput/{file}.cuh"], "emulated_pause_us")
        pauses[place] = int(seconds * 1e6)

    def die_in(self, path: str, passes: int, place: int = 0, build: int = -1) -> None:
        """Let this process be killed when its threads have come so often to a place of a file's kernels; 0: to any.

        Only those of one build (a dtype and reduction) count.
        """
        library = self._builds[path][build]
        ctypes.c_uint.in_dll(library, "emulated_die_at").value = place
        ctypes.c_uint.in_dll(library, "emulated_die_in").value = passes

    def create(self, nbytes: int) -> EmulatedRegion:
        return EmulatedRegion(SharedRegion.create(nbytes, "emulated"))

    def attach(self, blob: bytes) -> EmulatedRegion:
        return EmulatedRegion(SharedRegion.attach(blob))

    def kernels(
        self, files: Mapping[str, Mapping[str, type[ctypes.Structure]]], head: str
    ) -> dict[str, EmulatedKernel]:
        found = {}
        for path, params in files.items():
            library = build(path, head, entries_of(params))
            self._libraries[path] = library
            self._builds.setdefault(path, []).append(library)
            for name, struct in params.items():
                found[name] = EmulatedKernel(getattr(library, f"launch_{name}"), struct())
        return found

    def mapped_words(self, count: int) -> EmulatedWords:
        return EmulatedWords(count)

    def reach(self, region: SharedRegion) -> int:
        return region.address

    def leave(self, region: SharedRegion) -> None:
        return None

    def stream(self) -> int:
        return 0

    def is_capturing(self) -> bool:
        return False

    def mark(self, stream: int) -> None:
        return None

    def wait(self, mark: None, stream: int | None = None) -> None:
        return None

    def order(self, first: int, second: int, event: Any) -> None:
        return None

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        ctypes.memmove(target, source, nbytes)

    def is_done(self, mark: None) -> bool:
        return True

    def synchronize(self) -> None:
        return None


def all_gather_bytes(mine: bytes) -> list[bytes]:
    """Everybody's bytes, over the default process group."""
    size = torch.tensor([len(mine)])
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, size)
    width = int(max(sizes))
    padded = torch.frombuffer(bytearray(mine.ljust(width, b"\0")), dtype=torch.uint8)
    rows = [torch.zeros(width, dtype=torch.uint8) for _ in sizes]
    dist.all_gather(rows, padded)
    return [bytes(row.numpy().tobytes()[: int(n)]) for row, n in zip(rows, sizes, strict=True)]
