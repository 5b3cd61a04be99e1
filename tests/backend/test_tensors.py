"""Which strides are refused as outputs: exactly those whose elements share memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from epee.engine import tensors
from epee.engine.tensors import refuse_overlap
from epee.errors import InvalidArgument

dims = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), min_size=0, max_size=4)


@given(dims)
@example([(1, 0), (2, 3), (3, 2)])
def test_a_view_is_refused_exactly_when_two_elements_share_memory(layout: list[tuple[int, int]]) -> None:
    shape, strides = [extent for extent, _ in layout], [stride for _, stride in layout]
    view = torch.arange(1000).as_strided(shape, strides)
    shares = len(view.reshape(-1).unique()) < view.numel()  # each element holds its own place
    if shares:
        with pytest.raises(InvalidArgument, match="must not overlap itself"):
            refuse_overlap(view, "out")
    else:
        refuse_overlap(view, "out")


def test_interlocking_strides_are_served() -> None:
    refuse_overlap(torch.zeros(8).as_strided((3, 2), (2, 3)), "out")


def test_a_large_view_that_cannot_be_judged_cheaply_is_refused_in_those_words() -> None:
    count = tensors.MAX_OVERLAP_SEARCH
    view = torch.zeros(2 * count + 9).as_strided((count, 2), (2, 3))
    with pytest.raises(InvalidArgument, match="may overlap"):
        refuse_overlap(view, "out")
    refuse_overlap(torch.zeros(4, 2, 50_000).permute(2, 0, 1), "out")  # any permutation is judged at once
    with pytest.raises(InvalidArgument) as caught:
        refuse_overlap(torch.zeros(1).expand(200_000), "out")
    assert "may overlap" not in str(caught.value)
