"""Sizes belong to calls; the mask shows all ranks and the user's tensor what it has room for."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from epee.backend.membership.sizes import Mask, Sizes
from epee.backend.options import MAX_RANKS


def test_a_newcomer_raises_the_size_from_its_first_call_on() -> None:
    sizes = Sizes(2)
    sizes.grow(10, 4)
    sizes.grow(12, 3)  # a replacement that was told less
    assert [sizes.at(seq) for seq in (1, 9, 10, 11, 12, 99)] == [2, 2, 4, 4, 4, 4]
    assert sizes.firsts(0) >= {1, 10}
    assert 10 not in sizes.firsts(10)


def test_a_group_is_made_smaller_from_a_call_on_and_a_later_growth_stays() -> None:
    sizes = Sizes(4)
    sizes.grow(20, 6)
    sizes.put(15, 2)
    assert [sizes.at(seq) for seq in (14, 15, 19, 20)] == [4, 2, 2, 6]


def test_what_is_forgotten_is_not_needed() -> None:
    sizes = Sizes(2)
    for first in range(10, 1000, 10):
        sizes.put(first, 2 + first % 3)
        sizes.forget(first)
        assert sizes.at(first + 1) == 2 + first % 3
    assert len(sizes._changes) <= 2


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, MAX_RANKS)), max_size=12), st.integers(1, MAX_RANKS))
def test_the_order_in_which_a_rank_hears_of_growth_does_not_matter(changes: list[tuple[int, int]], born: int) -> None:
    sizes, other = Sizes(born), Sizes(born)
    for first, size in changes:
        sizes.grow(first, size)
    for first, size in reversed(changes):
        other.grow(first, size)
    for seq in range(1, 60):
        want = max([born, *(size for first, size in changes if first <= seq)])
        assert sizes.at(seq) == other.at(seq) == want


def test_the_mask_goes_beyond_the_users_tensor() -> None:
    tensor = torch.full((3,), 7, dtype=torch.int32)
    mask = Mask(3, (0, 1), tensor)
    assert tensor.tolist() == [1, 1, 0]
    mask[1], mask[2], mask[5] = 0, 1, 1
    assert tensor.tolist() == [1, 0, 1]
    assert mask.first(7) == [1, 0, 1, 0, 0, 1, 0]
    assert mask[5] == 1
