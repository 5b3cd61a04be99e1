"""How a call ends that is given up: the rule alone, over everything that three peers can say.

That its answers are right is shown by `tests/backend/test_withdrawal_model.py`,
`tests/survive/test_buffer_outcomes.py` and `tests/sim`.
"""

from __future__ import annotations

from itertools import product

import pytest

from epee.view.protocol.withdrawal import End, Look, Stance, end_behind, end_of

EVERYTHING = [dict(enumerate(stances, 1)) for stances in product(Stance, repeat=3)]


def those(stances: dict[int, Stance], *wanted: Stance) -> tuple[int, ...]:
    return tuple(rank for rank, stance in stances.items() if stance in wanted)


def test_who_completes_is_followed_whatever_the_others_say() -> None:
    for stances in EVERYTHING:
        completing = those(stances, Stance.COMPLETES)
        assert (end_of(stances).end is End.COMPLETES) == bool(completing)
        assert not completing or end_of(stances).ranks == completing


def test_a_missing_part_or_one_that_knows_ends_the_call_while_others_are_open() -> None:
    for stances in EVERYTHING:
        if those(stances, Stance.MISSING, Stance.FAILED) and not those(stances, Stance.COMPLETES):
            assert end_of(stances) == Look(End.FAILED)


def test_a_call_is_open_because_of_living_ranks_only() -> None:
    for stances in EVERYTHING:
        look = end_of(stances, dead=[2])
        if look.end is End.OPEN:
            assert look.ranks == tuple(rank for rank in those(stances, Stance.OPEN) if rank != 2)
        as_given_up = {**stances, 2: Stance.GAVE_UP} if stances[2] is Stance.OPEN else stances
        assert look == end_of(as_given_up)


@pytest.mark.parametrize(
    ("others", "look"),
    [
        ([], Look(End.FAILED)),
        ([Stance.UNREADABLE], Look(End.LOST, (3,))),
        ([Stance.UNREADABLE, Stance.OPEN], Look(End.OPEN, (4,))),
        ([Stance.UNREADABLE, Stance.MISSING], Look(End.FAILED)),
    ],
)
def test_one_that_tells_nothing_loses_the_call_once_nobody_else_can_tell(others: list[Stance], look: Look) -> None:
    assert end_of(dict(enumerate([Stance.GAVE_UP, Stance.GAVE_UP, *others], 1))) == look


def test_a_rank_without_peers_has_nobody_to_follow() -> None:
    assert end_of({}) == Look(End.FAILED)


def test_between_hosts_a_part_is_missing_when_it_is_still_missing_behind_everybody_s_answer() -> None:
    for stances in EVERYTHING:
        look, is_missing = end_of(stances), bool(those(stances, Stance.MISSING))
        assert end_behind(stances, (), is_repeated=True) == look
        early = end_behind(stances, (), is_repeated=False)
        assert early == (
            Look(End.OPEN, those(stances, Stance.MISSING)) if look.end is End.FAILED and is_missing else look
        )


def test_between_hosts_a_call_is_open_while_a_rank_has_not_answered() -> None:
    for stances in EVERYTHING:
        for is_repeated in (True, False):
            look = end_behind({**stances, 1: None}, (), is_repeated)
            assert (look.end is End.COMPLETES) == bool(those({**stances, 1: Stance.OPEN}, Stance.COMPLETES))
            assert look.end in (End.COMPLETES, End.OPEN)
