"""`memory.layout`: one description yields sizes, offsets and views."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from epee.errors import InvalidArgument
from epee.memory.layout import Field, Layout, align_up
from epee.memory.shared import SharedRegion

DTYPES = [torch.uint8, torch.int32, torch.int64, torch.float32, torch.bfloat16]
fields = st.lists(
    st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3), st.sampled_from([8, 64, 256])),
    max_size=6,
)


@given(fields)
def test_fields_are_aligned_and_do_not_overlap(specs: list[tuple[torch.dtype, list[int], int]]) -> None:
    layout = Layout(*(Field(f"f{i}", d, tuple(shape), align) for i, (d, shape, align) in enumerate(specs)))
    end = 0
    for i, (_, _, align) in enumerate(specs):
        field = layout[f"f{i}"]
        assert layout.offset(field.name) % align == 0
        assert layout.offset(field.name) >= end
        end = layout.offset(field.name) + math.prod(field.shape) * field.dtype.itemsize
    assert layout.nbytes >= end


def test_views_of_different_fields_do_not_share_memory() -> None:
    layout = Layout(Field("a", torch.int64, (3,)), Field("b", torch.float32, (2, 2)))
    region = SharedRegion.create(layout.nbytes, "test")
    layout.tensor(region, "a").fill_(-1)
    assert not layout.tensor(region, "b").any()
    layout.tensor(region, "b").fill_(2.5)
    assert layout.tensor(region, "a").tolist() == [-1, -1, -1]
    assert layout.tensor(region, "b").shape == (2, 2)
    region.close()


def test_a_name_stands_for_one_field() -> None:
    with pytest.raises(InvalidArgument, match="'a' twice"):
        Layout(Field("a", torch.int64, (1,)), Field("a", torch.int64, (1,)))


def test_a_negative_extent_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="negative extent"):
        Layout(Field("a", torch.int64, (-1,)))


@given(st.integers(0, 10**12), st.integers(1, 10**6))
def test_align_up_is_the_next_multiple(value: int, multiple: int) -> None:
    result = align_up(value, multiple)
    assert result % multiple == 0
    assert 0 <= result - value < multiple
