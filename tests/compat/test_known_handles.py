"""Handles whose entries are made late: they pass for plain tuples, whatever is done to them, and are known again."""

from __future__ import annotations

import copy
import gc
import operator
import pickle
import weakref
from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest
import torch
from torch.utils import _pytree, checkpoint

from epee.compat.deep_ep.shared.known import KnownHandles, LateTuple
from epee.errors import InvalidArgument

Handles = KnownHandles[Any]


class Noted:
    """Checked that note which entries were asked for."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def entry(self, idx: int) -> torch.Tensor:
        self.asked.append(idx)
        return torch.full((1,), float(idx))


@pytest.fixture
def made() -> tuple[Handles, Noted, Any]:
    known: Handles = KnownHandles(3)
    checked = Noted()
    return known, checked, known.handle(checked)


def _collect(*entries: Any) -> tuple[Any, ...]:
    return entries


def _match(handle: Any) -> tuple[Any, ...]:
    match handle:
        case (first, *rest):
            return first, *rest
    return ()


def _unpack(handle: Any) -> tuple[Any, ...]:
    one, *others = handle
    return one, *others


READ: dict[str, Callable[[Any], Any]] = {
    "indices": lambda handle: tuple(handle[at] for at in range(3)),
    "negative indices": lambda handle: tuple(handle[at] for at in (-3, -2, -1)),
    "other integers": lambda handle: tuple(handle[at] for at in torch.arange(3)),
    "a slice": lambda handle: handle[:],
    "slices": lambda handle: handle[:1] + handle[1:],
    "a slice backwards": lambda handle: handle[::-1][::-1],
    "iteration": lambda handle: tuple(entry for entry in handle),
    "backwards": lambda handle: tuple(reversed(tuple(reversed(handle)))),
    "unpacking": _unpack,
    "a call": lambda handle: _collect(*handle),
    "a call with more": lambda handle: _collect(0, *handle)[1:],
    "tuple": lambda handle: tuple(handle),
    "its own type": lambda handle: type(handle)(entry for entry in handle),
    "list": lambda handle: tuple(list(handle)[:]),
    "extend": lambda handle: tuple([0, *handle][1:]),
    "zip and chain": lambda handle: tuple(entry for _, entry in zip(handle, chain(handle), strict=True)),
    "plus": lambda handle: operator.add(handle, ()),
    "plus, from the left": lambda handle: operator.add((0,), handle)[1:],
    "sum": lambda handle: sum([handle, ()], ()),
    "times": lambda handle: handle * 1,
    "times, from the left": lambda handle: 1 * handle,
    "match": _match,
    "pytree": lambda handle: tuple(_pytree.tree_leaves({"handle": handle})),
    "pytree, and back": lambda handle: _pytree.tree_map(lambda leaf: leaf, [handle])[0],
    "format": lambda handle: handle if f"{handle}" == f"{tuple(handle)}" else (),
    "a shallow copy": lambda handle: copy.copy(handle),
}


@pytest.mark.parametrize("how", READ)
def test_a_reader_finds_the_entries_and_the_handle_is_known_by_them(how: str, made: tuple[Handles, Noted, Any]) -> None:
    known, checked, handle = made
    found = READ[how](handle)
    assert isinstance(found, tuple)
    assert len(found) == 3
    assert [entry.tolist() for entry in found] == [[0], [1], [2]]
    assert sorted(checked.asked) == [0, 1, 2], "each is made once"
    assert all(entry is own for entry, own in zip(found, handle, strict=True))
    assert known.checked(found) is known.checked(list(found)) is known.checked(handle) is checked


def test_nothing_is_made_before_it_is_read(made: tuple[Handles, Noted, Any]) -> None:
    known, checked, handle = made
    assert isinstance(handle, tuple)
    assert len(handle) == 3
    assert handle
    assert handle == handle  # itself, without a look at its entries
    assert known.checked(handle) is checked
    assert checked.asked == []
    assert handle[1].tolist() == [1]
    assert checked.asked == [1]
    for at in (3, -4):
        with pytest.raises(IndexError):
            handle[at]
    with pytest.raises(TypeError):
        handle["1"]


def test_it_compares_as_the_tuple_of_its_entries(made: tuple[Handles, Noted, Any]) -> None:
    _, _, handle = made
    plain = tuple(handle)
    assert handle == plain
    assert plain == handle
    assert hash(handle) == hash(plain)
    assert handle != plain[:2]
    assert handle != list(plain)
    assert plain[1] in handle
    assert handle.index(plain[0]) == 0
    assert handle.count(plain[0]) == 1


def test_copies_and_pickles_are_plain_tuples_that_are_not_known(made: tuple[Handles, Noted, Any]) -> None:
    known, _, handle = made
    for other in (copy.deepcopy(handle), pickle.loads(pickle.dumps(handle))):  # noqa: S301
        assert type(other) is tuple
        assert [entry.tolist() for entry in other] == [[0], [1], [2]]
        with pytest.raises(InvalidArgument, match="the same tensors, not copies"):
            known.checked(other)


def test_another_buffers_handle_is_not_known(made: tuple[Handles, Noted, Any]) -> None:
    _, _, handle = made
    other: Handles = KnownHandles(3)
    for given in (handle, tuple(handle), other, (), None):
        with pytest.raises(InvalidArgument, match="what a dispatch of this buffer returned"):
            other.checked(given)


class _Twice(torch.autograd.Function):
    """Carries a handle through autograd: as an argument, a result, an attribute, and as saved tensors."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, known: Handles, handle: Any) -> Any:
        ctx.save_for_backward(*handle)
        ctx.known, ctx.handle = known, handle
        return 2 * x, handle

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        assert ctx.known.checked(ctx.saved_tensors) is ctx.known.checked(ctx.handle)
        return 2 * grads[0] + ctx.saved_tensors[1], None, None


def test_autograd_and_checkpoints_carry_it(made: tuple[Handles, Noted, Any]) -> None:
    known, _, handle = made
    x = torch.ones(1, requires_grad=True)
    y, back = _Twice.apply(x, known, handle)  # type: ignore[no-untyped-call]
    assert back is handle
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [3]
    for use_reentrant in (False, True):
        _, back = checkpoint.checkpoint(_Twice.apply, x, known, handle, use_reentrant=use_reentrant)
        assert known.checked(back) is known.checked(handle)


def test_c_code_that_reads_the_tuples_memory_fails_and_sees_no_wrong_entries(made: tuple[Handles, Noted, Any]) -> None:
    _, _, handle = made
    with pytest.raises(TypeError, match="NoneType"):
        torch.cat(handle)
    assert torch.cat(tuple(handle)).tolist() == [0, 1, 2]


def test_entries_die_with_the_handle_and_facts_with_the_entries() -> None:
    known: Handles = KnownHandles(2)
    checked = Noted()
    handle = known.handle(checked)
    first, ends = handle[0], weakref.ref(checked)
    del checked, handle
    gc.collect()
    assert known.checked((first, None)) is ends()
    del first
    gc.collect()
    assert ends() is None


def test_a_tuple_of_its_type_is_plain() -> None:
    assert type(LateTuple([1, 2])) is tuple
    assert LateTuple() == ()
