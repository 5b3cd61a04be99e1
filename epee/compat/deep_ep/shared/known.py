"""Handles that are tuples, and the data that they refer to.

Most handles are only passed back, so a dispatch returns a `LateTuple`: a tuple that refers to its data, and whose
entries are made when they are first read. A handle that was taken apart (through lists, autograd or pytrees) is found
by its first entry, a tensor, under which the data is registered from its creation as long as it lives. A copy of the
tensors is not found.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar, cast, overload

import torch
from torch.utils import _pytree
from torch.utils.weak import WeakTensorKeyDictionary

from epee.errors import InvalidArgument


class Facts(Protocol):
    """The data of a handle; makes its entries."""

    def entry(self, idx: int) -> Any:
        """Return the entry of a position, 0 ... length - 1."""
        ...


_Facts = TypeVar("_Facts", bound=Facts)


class KnownHandles(Generic[_Facts]):
    """The handles that one buffer has returned.

    Args:
        length: entries of a handle.
    """

    def __init__(self, length: int) -> None:
        self._nothing = (None,) * length
        self._checked: Any = WeakTensorKeyDictionary()

    def handle(self, checked: _Facts) -> Any:
        """Return a handle that refers to these checked; they make its entries."""
        made = tuple.__new__(LateTuple, self._nothing)
        made._owner, made._checked, made._made = self, checked, {}
        return made

    def remember(self, first: torch.Tensor, checked: _Facts) -> None:
        """Register the checked of a handle with this first entry, until that tensor is deleted."""
        self._checked[first] = checked

    def checked(self, handle: object) -> _Facts:
        """Return the checked of a handle.

        Raises:
            InvalidArgument: it is none of this buffer's.
        """
        known: _Facts
        if type(handle) is LateTuple and handle._owner is self:
            known = handle._checked
            return known
        key = handle[0] if isinstance(handle, (tuple, list)) and handle else None
        checked = self._checked.get(key) if isinstance(key, torch.Tensor) else None
        if checked is None:
            raise InvalidArgument(
                "handle must be what a dispatch of this buffer returned (the same tensors, not copies), got "
                f"{type(handle).__name__}; dispatch again"
            )
        return cast(_Facts, checked)


class LateTuple(tuple[Any, ...]):
    """A tuple whose entries are made when they are first read, each once.

    Access through Python's protocols finds the entries: indices, slices, iteration, unpacking, `*handle`,
    `tuple(handle)`, comparison, `+`, pytrees. Copies and pickles of it, and `type(handle)(entries)`, are plain tuples.
    C code that reads a tuple's memory directly (`PyTuple_GET_ITEM`: `torch.cat(handle)`, a `Function.forward` that
    returns nothing but the handle) finds None in each entry: a tuple's memory is written only when it is created. Give
    such code `tuple(handle)`.
    """

    _owner: KnownHandles[Any]
    _checked: Any  # as of `KnownHandles`
    _made: dict[int, Any]

    def __new__(cls, entries: Any = ()) -> Any:
        """Return a plain tuple, as expected by code that makes a tuple of the type that it was given."""
        return tuple(entries)

    @overload  # type: ignore[override]
    def __getitem__(self, idx: int) -> Any: ...
    @overload
    def __getitem__(self, idx: slice) -> tuple[Any, ...]: ...
    def __getitem__(self, idx: Any) -> Any:
        if isinstance(idx, slice):
            return tuple(self[at] for at in range(*idx.indices(len(self))))
        at = operator.index(idx)
        at += len(self) if at < 0 else 0
        if not 0 <= at < len(self):
            raise IndexError("tuple index out of range")
        if at not in self._made:
            made = self._made.setdefault(at, self._checked.entry(at))
            if at == 0:
                self._owner.remember(made, self._checked)
        return self._made[at]

    def __iter__(self) -> Iterator[Any]:
        return (self[at] for at in range(len(self)))

    def __contains__(self, value: object) -> bool:
        return value in tuple(self)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, tuple) and tuple(self) == tuple(other))

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __add__(self, other: Any) -> Any:
        return tuple(self) + tuple(other) if isinstance(other, tuple) else NotImplemented

    def __radd__(self, other: Any) -> Any:
        return tuple(other) + tuple(self) if isinstance(other, tuple) else NotImplemented

    def __mul__(self, times: Any) -> Any:
        return tuple(self) * times

    __rmul__ = __mul__

    def index(self, *args: Any) -> int:
        """Return the first position of a value, as a tuple does."""
        return tuple(self).index(*args)

    def count(self, value: Any) -> int:
        """Return the number of occurrences of a value, as a tuple does."""
        return tuple(self).count(value)

    def __repr__(self) -> str:
        return repr(tuple(self))

    def __copy__(self) -> LateTuple:
        return self  # as a tuple

    def __reduce_ex__(self, protocol: Any) -> Any:
        return tuple, (list(self),)


def _flatten(handle: LateTuple) -> tuple[list[Any], None]:
    return list(handle), None


def _unflatten(entries: Sequence[Any], context: None) -> tuple[Any, ...]:
    return tuple(entries)


_pytree.register_pytree_node(LateTuple, _flatten, _unflatten)  # type: ignore[arg-type]  # else it is one leaf
