"""Counting votes and composing decisions: small cases, and the meeting of quorums by exhaustion."""

from __future__ import annotations

from itertools import combinations

import pytest

from epee.view.protocol.decision import choose_evicted, compose, has_quorum
from epee.view.protocol.messages import DEAD, LEFT, STALLED, Cut, Decision, GroupState, Removal, Start
from tests.view.agents import first, member


def subsets(slots: range) -> list[frozenset[int]]:
    return [frozenset(some) for size in range(len(slots) + 1) for some in combinations(slots, size)]


@pytest.mark.parametrize(
    ("num_members", "dead", "acks", "enough"),
    [
        (4, [], [0, 1], True),
        (4, [], [2, 3], False),
        (4, [], [1, 2, 3], True),
        (4, [0, 1, 2], [3], True),
        (5, [1, 2], [3, 4], True),
        (5, [], [3, 4], False),
        (5, [1, 2], [1, 2, 4], False),
        (2, [0], [1], True),
        (1, [], [0], True),
        (2, [0, 1], [], False),
    ],
)
def test_a_quorum_is_more_than_half_or_the_half_with_the_lowest(
    num_members: int, dead: list[int], acks: list[int], enough: bool
) -> None:
    assert has_quorum(range(num_members), dead, acks) is enough


@pytest.mark.parametrize("num_members", range(1, 6))
def test_two_quorums_that_count_the_same_deaths_meet(num_members: int) -> None:
    slots = range(num_members)
    for dead in subsets(slots):
        quorums = [acks for acks in subsets(slots) if not acks & dead and has_quorum(slots, dead, acks)]
        assert all(one & other for one, other in combinations(quorums, 2))


@pytest.mark.parametrize("num_members", range(1, 6))
def test_quorums_with_different_deaths_meet_or_one_sees_the_others_board(num_members: int) -> None:
    """The proof of decision 40: acceptances A1 with deaths D1, promises M2 with deaths D2; D1 took no part in M2."""
    slots = range(num_members)
    for d1 in subsets(slots):
        for a1 in (acks for acks in subsets(slots) if not acks & d1 and has_quorum(slots, d1, acks)):
            for d2 in (d2 for d2 in subsets(slots) if not d2 & a1):
                m2s = (acks for acks in subsets(slots) if not acks & (d1 | d2) and has_quorum(slots, d2, acks))
                assert all(m2 & a1 for m2 in m2s)


def test_a_decision_says_who_goes_and_why_and_what_counts() -> None:
    groups = {0: (GroupState(7, 3, 5), GroupState(9, 1, 1)), 1: (GroupState(7, 4, 4),), 2: (GroupState(7, 90, 91),)}
    decision = compose(first(5), groups, {3: DEAD, 4: LEFT}, {2: STALLED})
    assert [m.slot for m in decision.members] == [0, 1]
    assert decision.removed == (Removal(2, 1, STALLED), Removal(3, 1, DEAD), Removal(4, 1, LEFT))
    assert decision.cuts == (Cut(7, 4), Cut(9, 1))
    assert decision.starts == (Start(7, 6), Start(9, 2))


def test_of_joiners_for_one_slot_the_first_comes_in_and_an_occupied_slot_stays() -> None:
    joiners = [member(2, 0, 5), member(2, 0, 6), member(1, 0, 7), member(4, 0, 8)]
    decision = compose(first(3), {}, {2: DEAD}, None, joiners)
    got = [(m.slot, m.incarnation, m.nonce[1]) for m in decision.members]
    assert got == [(0, 1, 0), (1, 1, 0), (2, 2, 5), (4, 2, 8)]


def test_an_incarnation_is_higher_than_any_before_it_in_its_slot() -> None:
    current = Decision(8, (member(0),))
    assert compose(current, {}, {}, None, [member(1, 0, 5)]).members[1].incarnation == 9


@pytest.mark.parametrize(
    ("accusers", "removed"),
    [
        ({}, set()),
        ({3: {0, 1, 2}}, {3}),
        ({0: {3}, 1: {3}, 2: {3}}, {3}),  # one that accuses everybody is cut off itself
        ({1: {3}, 3: {1}}, {3}),
        ({3: {0, 1}, 1: {0}}, {3}),  # 0 waited for 1, and 1 for 3
        ({2: {0, 1}, 3: {0, 1}}, {2, 3}),
        ({3: {3}}, set()),
        ({5: {0}}, set()),  # not live
    ],
)
def test_the_worst_connected_goes(accusers: dict[int, set[int]], removed: set[int]) -> None:
    assert choose_evicted(range(4), accusers, range(4)) == removed


@pytest.mark.parametrize(
    ("accusers", "silent", "removed"),
    [
        ({2: {0, 1}, 3: {0, 1}}, {2}, {2}),  # 3 may have waited for 2, and accuse it a moment later
        ({2: {0, 1, 3}, 3: {0, 1}}, {2}, {2}),
        ({2: {0, 1}, 3: {0, 1}}, {2, 3}, {2, 3}),
        ({1: {3}, 3: {0}}, {3}, {3}),
        ({2: {0, 1}, 3: {1}}, {3}, {2, 3}),  # 0 waits for 2 alone
        ({3: {0, 1, 2}}, {2}, {3}),  # who has not answered is not accused
    ],
)
def test_an_accused_member_that_does_not_answer_goes_before_one_that_does(
    accusers: dict[int, set[int]], silent: set[int], removed: set[int]
) -> None:
    assert choose_evicted(range(4), accusers, set(range(4)) - silent) == removed
