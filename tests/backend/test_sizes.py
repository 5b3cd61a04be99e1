"""Sizes belong to calls; the mask shows all ranks and the user's tensor what it has room for."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from epee.engine.limits import MAX_RANKS
from epee.engine.membership.sizes import Mask, Sizes


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


def shown_at_once(keeps_lost: bool = False) -> tuple[Mask, torch.Tensor]:
    tensor = torch.zeros(4, dtype=torch.int32)
    return Mask(4, (0, 1, 2, 3), tensor, keeps_lost, shows_at_once=True), tensor


def test_a_loss_shows_before_calls_meet_it_and_a_process_that_comes_later_shows_with_its_first_call() -> None:
    mask, tensor = shown_at_once()
    mask.lose([3], 2, is_agreed=False)
    assert (tensor.tolist(), mask.first(4), mask.span, mask.epoch) == ([1, 1, 1, 0], [1, 1, 1, 1], 3, 0)
    assert not mask.has_agreed([3])
    mask.lose([3], 2, is_agreed=True)
    assert mask.epoch == 2
    assert mask.has_agreed([3])
    mask.put(3, 1, epoch=1)  # a call that was planned before
    assert tensor.tolist() == [1, 1, 1, 0]
    mask.put(3, 1, epoch=3)  # nobody had planned a call between the loss and the join
    assert (tensor.tolist(), mask.span) == ([1, 1, 1, 1], 4)
    assert not mask.has_lost([3], 3)


def test_the_loss_of_a_process_that_calls_have_not_met_yet_shows() -> None:
    mask, tensor = shown_at_once()
    mask.lose([2], 2, is_agreed=True)
    mask.lose([2], 4, is_agreed=True)  # of the one that took its place in view 3
    mask.put(2, 1, epoch=3)
    assert tensor.tolist() == [1, 1, 0, 1]
    mask.put(2, 0, epoch=4)
    assert (tensor.tolist(), mask.first(4)) == ([1, 1, 0, 1], [1, 1, 0, 1])


def test_who_is_lost_is_known_where_the_program_keeps_what_it_is_shown() -> None:
    mask, tensor = shown_at_once(keeps_lost=True)
    mask.lose([3], 2, is_agreed=True)
    assert (tensor.tolist(), mask.span, mask.epoch) == ([1, 1, 1, 1], 4, 2)
    assert mask.has_lost([3], 1)


def test_a_mask_of_other_groups_waits_for_the_call() -> None:
    mask = Mask(2, (0, 1), torch.ones(2, dtype=torch.int32))
    mask.lose([1], 2, is_agreed=True)
    assert (mask.span, mask.epoch, mask.has_lost([1], 1)) == (2, 0, False)
