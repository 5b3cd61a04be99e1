"""A call leaves its arguments as they were, but for the values that it writes."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.harness import run_ranks

from . import every_call
from .cases import init, same


def state(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return what a program can find out about a tensor, its values left out."""
    storage = tensor.untyped_storage()
    return (
        storage.resizable(),
        storage.nbytes(),
        storage.data_ptr(),
        tensor.data_ptr(),
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
        tensor.requires_grad,
        tensor.is_leaf,
        tensor.grad,
        tensor.is_inference(),
        type(tensor),
        None if tensor.is_inference() else tensor._version,
    )


def references(tensors: list[torch.Tensor]) -> list[int]:
    """Return how many references there are to each tensor, with one of this list and one of the loop."""
    return [sys.getrefcount(tensor) for tensor in tensors]


def check_results(call: every_call.Call, told: str) -> None:
    for tensor, expected in zip(call.written, call.expected, strict=True):
        same(tensor, expected, told)


def resize(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        tensor.untyped_storage().resize_(tensor.untyped_storage().nbytes() + 8)


def unchanged(rank: int, num_ranks: int, new: Callable[..., torch.Tensor]) -> None:
    for later in (False, True):
        for name, make in every_call.CASES.items():
            call = make(rank, num_ranks, new)
            tensors = [*call.written, *call.read]
            before, num_before = [state(tensor) for tensor in tensors], references(tensors)
            for work in call.start(later):
                if later:
                    work.wait()
            work = None
            after, num_after = [state(tensor) for tensor in tensors], references(tensors)
            told = f"{name}, {'asynchronous' if later else 'blocking'}"
            check_results(call, told)
            assert after == before, told
            until = time.monotonic() + 10
            while num_after != num_before and time.monotonic() < until:  # the background thread looks at open calls
                gc.collect()
                time.sleep(0.01)
                num_after = references(tensors)
            assert num_after == num_before, told
            resize(tensors)


@pytest.mark.parametrize("layout", every_call.LAYOUTS)
def test_a_call_leaves_all_but_the_values_of_its_arguments(layout: str) -> None:
    run_ranks(unchanged, 2, every_call.LAYOUTS[layout], backend="epee")


def parameters(rank: int, num_ranks: int) -> None:
    """Leaves that need grad, also in another thread's inference mode, keep their flags and stay leaves."""
    import torch.distributed as dist

    weight = torch.nn.Parameter(torch.full((4,), float(rank)))
    before = state(weight)
    dist.broadcast(weight, 1)
    assert state(weight) == before
    assert weight.tolist() == [1.0] * 4
    (weight * 2).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [2.0] * 4


def test_a_parameter_stays_a_leaf_that_needs_grad() -> None:
    run_ranks(parameters, 2, backend="epee")


def masks(rank: int, num_ranks: int, folder: str) -> bool:
    mask = torch.zeros(num_ranks, dtype=torch.int32)
    before = state(mask)[:-1]
    init(rank, num_ranks, folder, active_ranks=mask)
    assert state(mask)[:-1] == before
    return mask.tolist() == [1] * num_ranks


def test_the_tensor_of_active_ranks_stays_resizable(tmp_path: Any) -> None:
    assert run_ranks(masks, 2, str(tmp_path), backend=None) == [True, True]


def freed(rank: int, num_ranks: int) -> list[str]:
    """A tensor whose storage was freed, on rank 0 only."""
    import torch.distributed as dist

    told = []
    for new in every_call.LAYOUTS.values():
        x = new(torch.ones(64))
        if rank == 0:
            x.untyped_storage().resize_(0)
        try:
            dist.all_reduce(x)
        except Exception as exc:  # noqa: BLE001 - looked at by the test
            told.append(f"{type(exc).__name__}: {exc}")
        assert rank == 0 or x.tolist() == [1.0] * 64
    dist.barrier()
    return told


def test_a_tensor_whose_storage_was_freed_is_refused_on_all_ranks() -> None:
    first, second = run_ranks(freed, 2, backend="epee")
    assert [told.split(":")[0] for told in first] == ["InvalidArgument"] * 2, first
    assert all("has no memory" in told for told in first), first
    assert [told.split(":")[0] for told in second] == ["MismatchError"] * 2, second
