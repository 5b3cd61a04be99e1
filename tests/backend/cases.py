"""What the backend's tests share: seeded inputs, closed forms written apart from the backend, strided tensors."""

from __future__ import annotations

import functools
import itertools
import operator
import os
import threading
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import epee

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
HALVES = (torch.float16, torch.bfloat16)
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
FLOATS = (*HALVES, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
DTYPES = (torch.bool, *INTEGERS, *FLOATS, *COMPLEX)

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Op = dist.ReduceOp


def init(rank: int, num_ranks: int, folder: str, **options: Any) -> None:
    """Make the default group of the backend "epee" with these `BackendOptions`."""
    warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 calls its older names deprecated
    store = dist.FileStore(f"{folder}/store", num_ranks)
    timeout = timedelta(seconds=options.pop("timeout_s", 30))
    dist.init_process_group(
        "epee", store=store, rank=rank, world_size=num_ranks, timeout=timeout, pg_options=epee.BackendOptions(**options)
    )


def when_asleep(engine: Any, act: Callable[[], Any], thread: int | None = None) -> threading.Thread:
    """Call `act` in a new thread, which is returned, as soon as `thread` (else this one) sleeps in a call."""
    sleeper = threading.get_ident() if thread is None else thread

    def watch() -> None:
        deadline = time.monotonic() + 30
        while sleeper not in engine.entry.asleep:
            if time.monotonic() > deadline:
                return  # the test misses what `act` does
            time.sleep(0.001)
        act()

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    return watcher


def reduce_ops(dtype: torch.dtype) -> list[Any]:
    """Return the reduce operations that must work on `dtype`."""
    if dtype is torch.bool:
        return [Op.MIN, Op.MAX, Op.BAND, Op.BOR, Op.BXOR]
    if dtype.is_complex:
        return [Op.SUM, Op.AVG]
    if dtype.is_floating_point:
        return [Op.SUM, Op.AVG, Op.MIN, Op.MAX, Op.PRODUCT]
    return [Op.SUM, Op.AVG, Op.MIN, Op.MAX, Op.PRODUCT, Op.BAND, Op.BOR, Op.BXOR]


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    """Return the tensor that `rank` contributes; every rank can compute everybody's."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if dtype.is_complex:
        real = torch.randn((*shape, 2), generator=generator, dtype=torch.float64)
        return torch.view_as_complex(real).to(dtype)
    if dtype.is_floating_point:
        numbers = torch.randn(shape, generator=generator, dtype=torch.float64)
        if "EPEE_HOST_KEY" in os.environ:  # hosts add up in an order of their own: whole numbers are exact in any
            numbers = numbers.round()
        return numbers.to(dtype)
    info = torch.iinfo(dtype)
    low, high = max(info.min, -(1 << 60)), min(info.max, 1 << 60)  # the whole range, so that sums leave it
    return torch.randint(low, high + 1, shape, generator=generator, dtype=torch.int64).to(dtype)


def reduced(parts: list[torch.Tensor], op: Any) -> torch.Tensor:
    """Reduce `parts` in rank order, apart from the backend.

    Integers: in 64 bits or more, then cut to the dtype (AVG truncates towards zero). Halves: in float32, rounded once.
    Other floats: step by step in their own dtype.
    """
    dtype = parts[0].dtype
    if not (dtype is torch.bool or dtype.is_floating_point or dtype.is_complex):
        return _reduced_integers(parts, op)
    wide = [part.float() for part in parts] if dtype in HALVES else parts
    steps: dict[Any, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
        Op.SUM: torch.add,
        Op.AVG: torch.add,
        Op.PRODUCT: torch.mul,
        Op.MIN: torch.minimum,
        Op.MAX: torch.maximum,
        Op.BAND: torch.bitwise_and,
        Op.BOR: torch.bitwise_or,
        Op.BXOR: torch.bitwise_xor,
    }
    if dtype is torch.bool and op in (Op.MIN, Op.MAX):
        steps = {Op.MIN: torch.logical_and, Op.MAX: torch.logical_or}
    total = wide[0].clone()
    for part in wide[1:]:
        total = steps[op](total, part)
    if op == Op.AVG and dtype.is_complex:
        total = torch.view_as_complex(torch.view_as_real(total) / len(parts))
    elif op == Op.AVG:
        total = total / len(parts)
    return total.to(dtype)


_NUMPY: dict[Any, Callable[[Any, Any], Any]] = {
    Op.SUM: operator.add,
    Op.AVG: operator.add,
    Op.PRODUCT: operator.mul,
    Op.MIN: np.minimum,
    Op.MAX: np.maximum,
    Op.BAND: operator.and_,
    Op.BOR: operator.or_,
    Op.BXOR: operator.xor,
}


def _reduced_integers(parts: list[torch.Tensor], op: Any) -> torch.Tensor:
    kind = parts[0].numpy().dtype
    # 64 bits hold everything but the sums and the unsigned values of 64-bit integers; those take Python's own integers
    wide = object if kind == np.uint64 or (op == Op.AVG and kind.itemsize == 8) else np.int64
    total = functools.reduce(_NUMPY[op], [np.atleast_1d(part.numpy().astype(wide)) for part in parts])
    if op == Op.AVG:
        total = np.where(total < 0, -1, 1) * (abs(total) // len(parts))
    if wide is object:
        total = np.array([int(value) & ((1 << 64) - 1) for value in total.reshape(-1)], dtype=np.uint64)
    return torch.from_numpy(total.astype(kind)).reshape(parts[0].shape)


class Placed:
    """A tensor with given values, contiguous or strided inside poisoned memory that must stay as it is."""

    def __init__(self, content: torch.Tensor, strided: bool) -> None:
        self._base: torch.Tensor | None = None
        if not strided:
            self.tensor = content.clone(memory_format=torch.contiguous_format)
            return
        if content.dim() == 0:
            base = torch.zeros(3, dtype=content.dtype)
            self.tensor = base[1]
        elif content.dim() == 2:
            base = torch.zeros(content.shape[1] + 2, content.shape[0] * 2, dtype=content.dtype)
            self.tensor = base[1:-1, ::2].t()
        else:
            base = torch.zeros(*content.shape, 3, dtype=content.dtype)
            self.tensor = base[..., 1]
        base.view(-1).view(torch.uint8).fill_(1)
        self.tensor.copy_(content)
        self._base = base

    def check(self, expected: torch.Tensor, what: str) -> None:
        """Compare bit for bit, and look that nothing beside the tensor was written."""
        same(self.tensor, expected, what)
        if self._base is not None:
            kept = self.tensor.clone()
            self.tensor.view(-1 if self.tensor.dim() == 1 else self.tensor.shape).copy_(_ones_bytes(kept))
            assert bool((self._base.view(-1).view(torch.uint8) == 1).all()), f"{what}: wrote beside the tensor"
            self.tensor.copy_(kept)


def _ones_bytes(like: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(like, memory_format=torch.contiguous_format)
    if out.numel():
        out.view(-1).view(torch.uint8).fill_(1)
    return out


def same(got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Assert bitwise equality (NaNs and signed zeros included)."""
    assert got.shape == expected.shape, f"{what}: shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
    assert got.dtype == expected.dtype, f"{what}: dtype {got.dtype}, expected {expected.dtype}"
    if not got.numel():
        return
    left, right = (t.resolve_conj().clone(memory_format=torch.contiguous_format) for t in (got, expected))
    left, right = (t.reshape(-1).view(torch.uint8) for t in (left, right))
    if not torch.equal(left, right):
        wrong = (left != right).nonzero()[0].item() // got.itemsize
        raise AssertionError(
            f"{what}: element {wrong} is {got.reshape(-1)[wrong]}, expected {expected.reshape(-1)[wrong]}"
        )


def salts() -> Callable[[], int]:
    """Return a counter for `values`, so that every call sees new data (equal on all ranks)."""
    counter = itertools.count(1)
    return lambda: next(counter)
