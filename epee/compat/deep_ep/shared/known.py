"""Handles that are tuples of tensors, and what stands behind them.

The first tensor of a tuple is the key under which the facts are remembered, as long as it lives: a tuple that went
through lists, autograd or pytrees still works, and a copy of its tensors does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar, cast

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from epee.errors import InvalidArgument

_Facts = TypeVar("_Facts")


class KnownHandles(Generic[_Facts]):
    """The handles that one buffer has returned."""

    def __init__(self) -> None:
        self._facts: Any = WeakTensorKeyDictionary()

    def remember(self, handle: Sequence[Any], facts: _Facts) -> None:
        """Keep what stands behind a handle, whose first entry is a tensor, until that tensor dies."""
        self._facts[handle[0]] = facts

    def facts(self, handle: object) -> _Facts:
        """Return what stands behind a handle.

        Raises:
            InvalidArgument: it is none of this buffer's.
        """
        key = handle[0] if isinstance(handle, (tuple, list)) and handle else None
        facts = self._facts.get(key) if isinstance(key, torch.Tensor) else None
        if facts is None:
            raise InvalidArgument(
                "handle must be what a dispatch of this buffer returned (the same tensors, not copies), got "
                f"{type(handle).__name__}; dispatch again"
            )
        return cast(_Facts, facts)
