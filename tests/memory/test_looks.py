"""Whether tensors look like earlier ones: all that rules of calls look at is seen."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from epee import torch_private as looks

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    looks._is_right.cache_clear()
    yield
    looks._is_right.cache_clear()


def rows(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Zeros."""
    return torch.zeros(*shape, dtype=dtype, device=CPU)


def test_tensors_of_other_data_look_alike_wherever_they_lie() -> None:
    check = looks.metadata_check_of(rows(4, 8), rows(4, 2, dtype=torch.int64))
    assert check is not None
    assert check(rows(9, 8)[3:7].fill_(1), rows(4, 2, dtype=torch.int64))
    with torch.no_grad():
        assert check(rows(4, 8), rows(4, 2, dtype=torch.int64))


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x[:3],
        lambda x: x[:, :7],
        lambda x: rows(4, 16)[:, :8],
        lambda x: rows(4, 16)[:, ::2],
        lambda x: x.double(),
        lambda x: x.to("meta"),
        lambda x: torch._neg_view(x),
        lambda x: x.to_sparse(),
        lambda x: x.clone().requires_grad_(),
        lambda x: torch.nn.Parameter(x, requires_grad=False),
        lambda x: (x, x),
        lambda x: None,
    ],
)
def test_whatever_looks_otherwise_is_seen(change: Callable[[torch.Tensor], object]) -> None:
    first = rows(4, 8)
    check = looks.metadata_check_of(rows(2, 2), first)
    assert check is not None
    assert check(rows(2, 2), first)
    assert not check(rows(2, 2), change(first))


def test_one_row_may_have_any_strides_and_they_are_compared() -> None:
    check = looks.metadata_check_of(rows(1, 8))
    assert check is not None
    assert not check(rows(1, 16)[:, :8])


def test_a_torch_without_the_function_or_with_another_one_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Blind:
        """Finds everything alike."""

        def __init__(self, *tensors: torch.Tensor, **dynamic: object) -> None: ...

        def check(self, *tensors: object) -> bool:
            """See above."""
            return True

    class Module:
        """Of the function."""

        TensorGuards = Blind

    for module in (None, Module):
        looks._is_right.cache_clear()
        monkeypatch.setattr(looks, "_guards", module)
        assert looks.metadata_check_of(rows(4, 8)) is None


def test_nothing_is_said_of_what_is_no_plain_tensor() -> None:
    assert looks.metadata_check_of(rows(4, 8), None) is None
    assert looks.metadata_check_of((rows(4, 8), rows(4, 1))) is None
