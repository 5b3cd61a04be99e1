"""Ranks that go wrong: by a little in each combine, which the demo's check must notice, or by an exception."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from epee.demo import rank
from epee.demo.launch import Send
from epee.nn import layer

_right = layer.combine


def _wrong(*args: Any, **kwargs: Any) -> Tensor:
    return _right(*args, **kwargs) * (1 + 1e-6)


def run_rank(index: int, send: Send, *arguments: Any) -> None:
    """As `epee.demo.rank.run_rank`, with one part in a million lost in each combine."""
    layer.combine = _wrong
    rank.run_rank(index, send, *arguments)


def raise_everywhere(index: int, send: Send, *arguments: Any) -> None:
    """Raise on all ranks."""
    raise ValueError("nonsense")
