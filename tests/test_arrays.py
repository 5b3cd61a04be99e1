"""Arrays over the memory of tensors: the same memory, the tensor as it was, and no memory where there is none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

from epee.arrays import array_of, copy_array, flat_array, plain_tensors, writing
from epee.errors import InvalidArgument

FLOAT = np.dtype(np.float32)


class Wrapped(torch.Tensor):
    """Shows another tensor."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapped:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined, no-any-return]

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*tree_map(lambda arg: arg.inner if isinstance(arg, Wrapped) else arg, args), **(kwargs or {}))


def test_an_array_is_the_tensors_memory_and_leaves_its_flags() -> None:
    x = torch.arange(6.0, requires_grad=True)
    array = flat_array(x, FLOAT)
    array[2] = 50
    assert x[2].item() == 50
    assert (x._version, x.is_leaf, x.untyped_storage().resizable()) == (0, True, True)


def test_an_array_keeps_its_tensor_alive() -> None:
    array = flat_array(torch.full((1000,), 3.0), FLOAT)
    others = [torch.full((1000,), float(number)) for number in range(10)]
    assert others
    assert bool((array == 3).all())


def test_strides_are_those_of_the_tensor() -> None:
    x = torch.arange(24.0).view(4, 6)
    assert np.array_equal(array_of(x[1:, ::2].t()), x[1:, ::2].t().tolist())


@pytest.mark.parametrize("shape", [(300, 700), (7, 5), (1, 40_000), (40_000, 1), (257, 513)])
def test_a_transposed_copy_is_right(shape: tuple[int, int]) -> None:
    source = np.random.default_rng(0).random(shape, np.float32).T
    destination = np.empty(source.shape, np.float32)
    copy_array(destination, source)
    assert np.array_equal(destination, source)
    back = np.empty(shape, np.float32)
    copy_array(back.T, destination)
    assert np.array_equal(back, source.T)


def test_a_wrapper_shows_what_it_wraps() -> None:
    inner = torch.ones(4)
    flat_array(Wrapped(inner), FLOAT)[1] = 7
    assert inner.tolist() == [1, 7, 1, 1]


def nothing(kind: str) -> torch.Tensor:
    x = torch.ones(4)
    if kind == "freed":
        x.untyped_storage().resize_(0)
    elif kind == "fake":
        with FakeTensorMode():
            return torch.ones(4)
    elif kind == "zero":
        return torch._efficientzerotensor((4,))  # type: ignore[attr-defined, no-any-return]
    return x


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("kind", ["freed", "fake", "zero"])
def test_a_tensor_without_memory_is_refused(kind: str) -> None:
    for make in (array_of, lambda tensor: flat_array(tensor, FLOAT)):
        with pytest.raises(InvalidArgument, match="has no memory for its elements"):
            make(nothing(kind))


def test_a_tensor_without_elements_has_an_empty_array() -> None:
    assert flat_array(torch.empty(0), FLOAT).shape == (0,)
    assert array_of(torch.empty(3, 0)).shape == (3, 0)


def test_tensors_that_are_kept_can_be_written_in_and_outside_inference_mode() -> None:
    with torch.inference_mode():
        theirs = torch.zeros(3)
        with plain_tensors():
            kept = torch.zeros(3)
        kept += 1
    kept += 1
    assert kept.tolist() == [2.0] * 3
    with writing(theirs):
        theirs += 1
    assert theirs.tolist() == [1.0] * 3
