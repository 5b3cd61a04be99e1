"""What the compiler refuses is an error with file and line; what is cached is not compiled again."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings.nvrtc", reason="no cuda-bindings and NVRTC here to compile kernels with")

from epee.cli.kernels import warm_up
from epee.ep.latency.gpu import params as latency_kernels
from epee.errors import CompileError, InvalidArgument
from epee.gpu.layout import COUNT_KERNELS
from epee.gpu.params import KERNELS, kernel_head
from epee.gpu.routing_map import MAP_KERNELS
from epee.jit import kernel as kernel_module
from epee.jit import source as source_module
from epee.jit.cache import CubinCache, cache_key
from epee.jit.compile import Compiled, compile_source, compiler_version, options
from epee.jit.source import flatten
from tests.csrc.compiled import compile_once

BARRIER = "kernels/barrier.cuh"


def test_error_names_file_and_line() -> None:
    text = flatten(BARRIER, kernel_head(2, 16)).replace("finish_call(p.call, tag);\n}", "finish_call(p.call);\n}")
    with pytest.raises(CompileError, match=r"epee/csrc/kernels/barrier\.cuh\(\d+\): error"):
        compile_source(text, "sm_90a", "barrier")


def test_missing_include_names_the_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ptx").mkdir()
    (tmp_path / "ptx/types.cuh").write_text("\n")
    (tmp_path / "bad.cuh").write_text('\n#include "nothing.cuh"\n')
    monkeypatch.setattr(source_module, "CSRC", tmp_path)
    with pytest.raises(CompileError, match=r'bad\.cuh\(2\): no file "nothing\.cuh"'):
        flatten("bad.cuh", "")


def test_second_request_comes_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = CubinCache(tmp_path / "cache", 1 << 24)
    monkeypatch.setattr(kernel_module, "_cache", lambda: cache)
    first = kernel_module.cubins_of([BARRIER], kernel_head(2, 16), "sm_90a")
    monkeypatch.setenv("EPEE_JIT_COMPILE", "0")
    assert kernel_module.cubins_of([BARRIER], kernel_head(2, 16), "sm_90a") == first
    with pytest.raises(CompileError, match=r"is not in .* and EPEE_JIT_COMPILE is 0; run `epee warmup`"):
        kernel_module.cubins_of([BARRIER], kernel_head(4, 16), "sm_90a")


def test_processes_that_need_the_same_files_compile_each_of_them_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads with caches of their own stand for processes: a claim excludes either."""
    made: list[str] = []

    def compile_slowly(text: str, architecture: str, path: str) -> Compiled:
        made.append(path)
        time.sleep(0.2)
        return Compiled(path.encode(), "")

    caches = threading.local()

    def cache() -> CubinCache:
        if not hasattr(caches, "mine"):
            caches.mine = CubinCache(tmp_path / "cache", 1 << 24)
        return caches.mine  # type: ignore[no-any-return]

    monkeypatch.setattr(kernel_module, "_cache", cache)
    monkeypatch.setattr(kernel_module, "compile_source", compile_slowly)
    paths, head = [*KERNELS], kernel_head(2, 16)
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda _: kernel_module.cubins_of(paths, head, "sm_90a"), range(3)))
    assert found == [[path.encode() for path in paths]] * 3
    assert sorted(made) == sorted(paths)


def test_a_process_that_holds_a_file_too_long_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = CubinCache(tmp_path / "cache", 1 << 24)
    monkeypatch.setattr(kernel_module, "_cache", lambda: cache)
    monkeypatch.setattr(kernel_module, "SHARE_S", 0.1)
    monkeypatch.setattr(kernel_module, "compile_source", lambda text, architecture, path: Compiled(b"mine", ""))
    with CubinCache(tmp_path / "cache", 1 << 24).claimed(_key_of(BARRIER)) as is_theirs:
        assert is_theirs
        assert kernel_module.cubins_of([BARRIER], kernel_head(2, 16), "sm_90a") == [b"mine"]


def _key_of(path: str) -> str:
    return cache_key(flatten(path, kernel_head(2, 16)), options("sm_90a"), compiler_version())


@pytest.mark.slow
def test_warm_up_leaves_nothing_to_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = CubinCache(tmp_path / "cache", 1 << 26)
    monkeypatch.setattr(kernel_module, "_cache", lambda: cache)
    monkeypatch.setattr(kernel_module, "compile_source", compile_once)
    local = len(COUNT_KERNELS) + len(MAP_KERNELS)
    assert warm_up([2], ["sm_90a"]) == len(KERNELS) + len(latency_kernels.KERNELS) + local
    monkeypatch.setenv("EPEE_JIT_COMPILE", "0")
    for path in KERNELS:
        kernel_module.cubins_of([path], kernel_head(2, 16), "sm_90a")
    for path in latency_kernels.KERNELS:
        kernel_module.cubins_of([path], latency_kernels.kernel_head(2), "sm_90a")
    with pytest.raises(InvalidArgument, match=r"num_ranks must be 1 \.\.\. 16, got 17"):
        warm_up([17])
