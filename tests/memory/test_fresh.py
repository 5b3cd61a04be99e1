"""Tensors made by torch's private functions are those that its public ones make."""

from __future__ import annotations

import pytest
import torch

from epee.memory import fresh

CPU = torch.device("cpu")
SHAPES = [((), None), ((0,), None), ((7,), None), ((3, 0), None), ((3, 5), None), ((2, 3, 4), (12, 1, 3))]


def _looks(tensor: torch.Tensor) -> tuple[object, ...]:
    return (
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.device,
        tensor.requires_grad,
        tensor.is_inference(),
        tensor.storage_offset(),
        tensor._base is None,
    )


def test_this_torch_has_the_private_functions() -> None:
    assert fresh._cut is not None
    assert fresh.EMPTY_STRIDED["cuda"] is not None, "which no machine without a GPU can try"


@pytest.mark.parametrize("is_inference", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int32, torch.bool, torch.float8_e4m3fn])
def test_allocators_make_what_torch_makes(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, is_inference: bool
) -> None:
    private = [fresh.allocator(shape, dtype, CPU, strides) for shape, strides in SHAPES]
    monkeypatch.setattr(fresh, "EMPTY_STRIDED", {})
    public = [fresh.allocator(shape, dtype, CPU, strides) for shape, strides in SHAPES]
    with torch.inference_mode(is_inference):
        for make, make_too in zip(private, public, strict=True):
            first, second, other = make(), make(), make_too()
            assert _looks(first) == _looks(other)
            assert first.numel() == 0 or first.data_ptr() != second.data_ptr()
    with torch.device("meta"):  # a default device, and a default dtype
        assert private[2]().device == public[2]().device == CPU


@pytest.mark.parametrize("num_rows", [0, 1, 3, 4])
@pytest.mark.parametrize("is_inference", [False, True])
@pytest.mark.parametrize("columns", [1, 6])
def test_first_rows_are_those_of_a_narrowed_alias(
    monkeypatch: pytest.MonkeyPatch, num_rows: int, is_inference: bool, columns: int
) -> None:
    matrix = torch.arange(100 + 4 * columns, dtype=torch.int64, device=CPU)[100:].view(4, columns).detach()
    with torch.inference_mode(is_inference):
        rows = fresh.first_rows(matrix, (4, columns), num_rows)
        monkeypatch.setattr(fresh, "_cut", None)
        other = fresh.first_rows(matrix, (4, columns), num_rows)
    assert rows.shape == other.shape == (num_rows, columns)
    assert (rows.stride(), rows.dtype, rows.device) == (other.stride(), other.dtype, other.device)
    assert rows.storage_offset() == other.storage_offset() == 100
    assert rows.is_inference() == other.is_inference() is False
    assert rows.untyped_storage().data_ptr() == matrix.untyped_storage().data_ptr()
    assert torch.equal(rows, other)


def test_no_gradient_finds_its_way_from_rows_to_the_matrix() -> None:
    matrix = torch.zeros(4, 2, dtype=torch.float32, device=CPU)
    rows = fresh.first_rows(matrix, (4, 2), 3)
    rows.mul_(torch.ones(1, dtype=torch.float32, device=CPU, requires_grad=True))
    assert rows.requires_grad
    assert not matrix.requires_grad
    assert not fresh.first_rows(matrix, (4, 2), 3).requires_grad
