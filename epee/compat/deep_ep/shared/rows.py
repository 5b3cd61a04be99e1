"""Small helpers about tensors that both DeepEP buffers need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard, TypeVar, cast

import torch

from epee.compat.deep_ep.shared.layout import align_up
from epee.ep import PAYLOAD_DTYPES, Payload
from epee.errors import InvalidArgument, UnsupportedError

_DTYPES = (*PAYLOAD_DTYPES, torch.float8_e4m3fn)  # dtypes of values
_DEVICES = ("cpu", "cuda")  # types


def values_of(x: object) -> torch.Tensor:
    """Return the rows of a payload: a tensor, or the first of an FP8 pair.

    Raises:
        InvalidArgument: it is neither, or the rows are not a matrix of a supported dtype.
    """
    values: Any = x[0] if isinstance(x, (tuple, list)) and x else x
    is_tensor = isinstance(values, torch.Tensor)
    if not is_tensor or values.layout is not torch.strided or values.dim() != 2 or values.dtype not in _DTYPES:
        raise InvalidArgument(
            f"x must be [num_tokens, hidden] or a pair (float8_e4m3fn values, scales), of {_names()}, got "
            f"{described(values)}"
        )
    if values.device.type not in _DEVICES:
        raise UnsupportedError(f"x must be on the CPU or a GPU, got a tensor on the device {values.device}")
    found: torch.Tensor = values
    return found


def has_memory(value: object) -> TypeGuard[torch.Tensor]:
    """Return whether a value is a dense tensor on the CPU or a GPU."""
    return isinstance(value, torch.Tensor) and value.layout is torch.strided and value.device.type in _DEVICES


def check_counters(name: str, value: object, count: object, device: torch.device) -> None:
    """Raise `InvalidArgument` unless a call can add its numbers to a caller's tensor, if there is one.

    Args:
        name: of the argument.
        value: None, or integers `[count]`.
        count: of numbers; anything that is no number is refused elsewhere.
        device: of the call's rows.
    """
    if value is None or not isinstance(count, int):
        return
    is_right = has_memory(value) and not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)
    if not is_right or value.shape != (count,) or value.device != device:  # type: ignore[attr-defined]
        raise InvalidArgument(f"{name} must be integers [{count}] on {device}, got {described(value)}")


def described(value: object) -> str:
    """Return a value's dtype, shape and place for a message; of anything else its type."""
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    place = "" if has_memory(value) else f" ({value.layout}, {value.device})"
    return f"{value.dtype} {list(value.shape)}{place}"


def device_of(x: object) -> torch.device:
    """Return the device of a payload; the CPU for an invalid payload, which is refused later."""
    values = x[0] if isinstance(x, (tuple, list)) and x else x
    return values.device if isinstance(values, torch.Tensor) else torch.device("cpu")


def parts_of(given: Any) -> tuple[Any, ...]:
    """Return the tensors of a payload or a bias: a tensor, a pair, or None."""
    return tuple(given) if isinstance(given, (tuple, list)) else (given,)


def _names() -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)


def int64_routing(topk_idx: object) -> torch.Tensor:
    """Return `topk_idx` as int64; int32 is widened.

    Raises:
        InvalidArgument: it is no integer matrix.
    """
    if has_memory(topk_idx) and topk_idx.dim() == 2:
        dtype = topk_idx.dtype
        if dtype is torch.int64:
            return topk_idx
        if dtype is torch.int32:
            return topk_idx.to(torch.int64)
    raise InvalidArgument(f"topk_idx must be int64 (or int32) [num_tokens, num_topk], got {described(topk_idx)}")


_Rows = TypeVar("_Rows", torch.Tensor, "torch.Tensor | None")


def filled_up(rows: _Rows, num_rows: int, fill: float) -> _Rows:
    """Return `rows` followed by rows of `fill`, `num_rows` in all; itself when it has as many, or is None."""
    if rows is None or rows.shape[0] == num_rows:
        return rows
    tail = rows.new_zeros((num_rows - len(rows), *rows.shape[1:]))
    if fill:
        tail.fill_(fill)
    return torch.cat([rows, tail])


def payload_filled_up(x: Payload, num_rows: int) -> Payload:
    """Return a payload followed by zero rows, `num_rows` in all."""
    if isinstance(x, tuple):
        return filled_up(x[0], num_rows, 0), filled_up(x[1], num_rows, 0)
    return filled_up(x, num_rows, 0)


def cut(rows: object, num_rows: int, num_given: int) -> object:
    """Return the first `num_rows` rows of a tensor that has them, and up to `num_given`; anything else unchanged.

    The call that uses them refuses anything else.
    """
    if isinstance(rows, torch.Tensor) and rows.dim() and num_rows < rows.shape[0] <= num_given:
        return rows[:num_rows]
    return rows


def padded(rows: object, num_read: int, num_rows: int) -> object:
    """Return a tensor of `num_read` rows or more followed by zeros, `num_rows` in all; anything else unchanged."""
    if isinstance(rows, torch.Tensor) and rows.dim() and num_read <= len(rows) < num_rows:
        return filled_up(rows, num_rows, 0)
    return rows


def column_major(scales: torch.Tensor) -> torch.Tensor:
    """Return equal scales with strides `(1, rows rounded up to 4)`, as TMA reads them."""
    num_rows, num_scales = scales.shape
    place = scales.new_zeros((num_scales, align_up(num_rows, 4)))
    place[:, :num_rows].copy_(scales.t())
    return place.t()[:num_rows]


def as_bias(bias: object) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None:
    """Return a bias in the core's form: None, a tensor or a pair; a list is a pair as well."""
    if isinstance(bias, Sequence):
        return cast("tuple[torch.Tensor, torch.Tensor]", tuple(bias))
    return cast("torch.Tensor | None", bias)
