"""A fast comparison of tensors' metadata with that of tensors compared before.

Reading shapes, strides, types and devices from torch, and comparing the answers, costs the cpu microseconds a call.
torch's compiler guards its programs by one function that compares all of it. It is private, so it is used only where it
proves to distinguish tensors, once in a process. Without it callers compare the answers themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from ..errors import expected

_guards: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
Looks = Callable[..., bool]
MOST_LOOKS = 4  # kinds of calls for which one caller keeps guards: each that does not match costs a call 0.2 us


def looks_of(*tensors: Any) -> Looks | None:
    """Return a check whether as many values are tensors with the metadata of these; None where that cannot be checked
    so.

    The metadata is class, dtype, device, shape and strides, whether gradients are required, and the flags of lazy
    operations, inference mode and the like. False may also mean only that the thread has other modes.
    """
    if any(type(tensor) is not torch.Tensor for tensor in tensors) or not _is_right():
        return None
    return _check_of(*tensors)


def _check_of(*tensors: torch.Tensor) -> Looks | None:
    try:
        check: Looks = _guards.TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    except expected(AttributeError, TypeError, RuntimeError):
        return None
    return check


@cache
def _is_right() -> bool:
    """Return whether the function of this torch detects all required differences."""
    with torch.inference_mode(False):
        first = torch.zeros(4, 8, dtype=torch.float32, device="cpu")
        wide = torch.zeros(4, 16, dtype=torch.float32, device="cpu")
        check = _check_of(first, first)
        if check is None:
            return False
        others = (first[:3], first[:, :7], wide[:, :8], wide[:, ::2], first.double(), first.to("meta"), None, (first,))
        try:
            negated = torch._neg_view(first)
            return check(first, first.clone()) is True and not any(check(first, other) for other in (*others, negated))
        except expected(AttributeError, TypeError, RuntimeError):
            return False
