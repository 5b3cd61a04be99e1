"""Results are written without memory to spare: the peers count on a rank that has said that it completes a call."""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from epee.backend.collectives.reducing_hosts import AllReduce
from epee.engine.tensors import Target
from tests.harness import run_ranks

_C = ctypes.CDLL(None)
_C.malloc.restype, _C.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
_C.free.argtypes = [ctypes.c_void_p]
SIZES = (256 << 10, 64 << 10, 16 << 10, 8 << 10)

CASES: dict[str, tuple[Callable[[], torch.Tensor], Any]] = {
    "sum of halves": (lambda: torch.full((100_000,), 2.0, dtype=torch.bfloat16), dist.ReduceOp.SUM),
    "maximum of halves": (lambda: torch.full((100_000,), 2.0, dtype=torch.float16), dist.ReduceOp.MAX),
    "mean of integers": (lambda: torch.full((60_000,), 2, dtype=torch.int32), dist.ReduceOp.AVG),
    "sum into a transposed tensor": (lambda: torch.full((200, 100), 2.0).t(), dist.ReduceOp.SUM),
}


def starved(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run `function` in a process that gets no more memory and has used up what it had (8 KiB and more in a piece)."""

    def call(*args: Any) -> Any:
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        held = []
        resource.setrlimit(resource.RLIMIT_AS, (1 << 20, most))
        try:
            for size in SIZES:
                while address := _C.malloc(size):
                    held.append(address)
            return function(*args)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
            for address in held:
                _C.free(address)

    return call


def reduces(rank: int, num_ranks: int) -> dict[str, str]:
    for make, op in CASES.values():
        dist.all_reduce(make(), op=op)  # torch and numpy look up their kernels
    AllReduce.take = starved(AllReduce.take)  # type: ignore[method-assign]
    Target.finish = starved(Target.finish)  # type: ignore[method-assign]
    found = {}
    for name, (make, op) in CASES.items():
        x = make()
        try:
            dist.all_reduce(x, op=op)
            wanted = 4 if op == dist.ReduceOp.SUM else 2
            found[name] = "right" if bool((x == wanted).all()) else "wrong"
        except (RuntimeError, MemoryError) as exc:
            found[name] = type(exc).__name__
    return found


def test_writing_the_results_needs_no_memory() -> None:
    assert run_ranks(reduces, 2, backend="epee") == [dict.fromkeys(CASES, "right")] * 2
