"""One ballot and the joins that wait, without an agent around them."""

from __future__ import annotations

from epee.view.protocol.messages import (
    DEAD,
    NO_BALLOT,
    STALLED,
    Ballot,
    BoardState,
    Decision,
    Promise,
    Removal,
    Want,
)
from epee.view.protocol.proposer import MAX_PENDING, Campaign, Findings, Joins
from tests.view.agents import first, member

BALLOT = Ballot(3, 0)
CALM = Findings({}, {}, {}, (), frozenset(), (), 0.0, 0.0)
BLANK = BoardState(first(4), NO_BALLOT, NO_BALLOT, None)


def campaign(promised: tuple[int, ...]) -> Campaign:
    one = Campaign(BALLOT, first(4))
    for slot in promised:
        one.note_promise(slot, Promise(BALLOT, 1, NO_BALLOT, None, ()))
    return one


def test_nothing_is_proposed_without_a_quorum() -> None:
    assert campaign((1, 2)).choose(CALM, 1.0, 2.0) is None
    assert campaign((0, 1)).choose(CALM, 1.0, 2.0) is not None


def test_the_dead_go_as_soon_as_a_quorum_has_promised() -> None:
    findings = CALM._replace(gone={3: DEAD}, boards={3: BLANK})
    decision = campaign((0, 1)).choose(findings, 1.0, 2.0)
    assert decision is not None
    assert decision.removed == (Removal(3, 1, DEAD),)
    assert [m.slot for m in decision.members] == [0, 1, 2]


def test_the_live_are_voted_out_only_with_the_promise_of_all_who_stay() -> None:
    findings = CALM._replace(accusers={3: frozenset({0})})
    assert campaign((0, 1)).choose(findings, 1.0, 2.0) is None
    decision = campaign((0, 1, 2)).choose(findings, 1.0, 2.0)
    assert decision is not None
    assert decision.removed == (Removal(3, 1, STALLED),)


def test_of_two_accused_members_the_one_that_answers_in_time_stays() -> None:
    findings = CALM._replace(accusers={2: frozenset({0, 1}), 3: frozenset({0, 1})})
    assert campaign((0, 1)).choose(findings, 1.0, 2.0) is None, "both may answer yet"
    decision = campaign((0, 1, 3)).choose(findings._replace(waited_s=1.5), 1.0, 2.0)
    assert decision is not None
    assert [removal.slot for removal in decision.removed] == [2]


def test_who_stays_silent_while_others_are_voted_out_goes_with_them_after_a_while() -> None:
    findings = CALM._replace(accusers={3: frozenset({0})}, waited_s=2.5)
    decision = campaign((0, 1)).choose(findings, 1.0, 2.0)
    assert decision is not None
    assert [removal.slot for removal in decision.removed] == [2, 3]


def test_a_joiner_waits_for_everybody_and_is_put_off_rather_than_anybody_voted_out() -> None:
    findings = CALM._replace(joiners=(member(4, 0, 5),), join_wait_s=4.0)
    assert campaign((0, 1, 2)).choose(findings._replace(waited_s=3.9), 1.0, 2.0) is None
    put_off = campaign((0, 1, 2)).choose(findings._replace(waited_s=4.1), 1.0, 2.0)
    assert put_off is not None
    assert put_off.members == first(4).members
    taken_in = campaign((0, 1, 2, 3)).choose(findings, 1.0, 2.0)
    assert taken_in is not None
    assert [m.slot for m in taken_in.members] == [0, 1, 2, 3, 4]


def test_what_was_accepted_in_the_highest_ballot_is_proposed_again_wherever_it_is_found() -> None:
    old, new = (first(4)._replace(epoch=2, removed=(Removal(9, epoch, DEAD),)) for epoch in (1, 2))
    one = campaign((0, 1))
    one.note_promise(2, Promise(BALLOT, 1, Ballot(1, 1), old, ()))
    assert one.choose(CALM, 1.0, 2.0) == old
    findings = CALM._replace(gone={3: DEAD}, boards={3: BLANK._replace(accepted_ballot=Ballot(2, 1), accepted=new)})
    assert one.choose(findings, 1.0, 2.0) == new


def test_a_higher_promise_on_the_board_of_the_dead_ends_the_ballot() -> None:
    findings = CALM._replace(gone={3: DEAD}, boards={3: BLANK._replace(promised=Ballot(4, 1))})
    assert campaign((0, 1)).lost_to(findings) == Ballot(4, 1)
    later = BLANK._replace(decided=Decision(0, ()), promised=Ballot(4, 1))
    assert campaign((0, 1)).lost_to(findings._replace(boards={3: later})) is None, "a promise about another epoch"


def test_acceptances_count_only_for_a_proposal() -> None:
    one = campaign((0, 1, 2))
    for slot in (0, 1, 2):
        one.note_accepted(slot)
    assert not one.is_chosen(CALM)
    one.proposal = one.choose(CALM, 1.0, 2.0)
    one.note_accepted(1)
    assert not one.is_chosen(CALM)
    one.note_accepted(0)
    assert one.is_chosen(CALM)


def test_requests_are_forgotten_when_they_are_not_repeated() -> None:
    joins = Joins()
    assert joins.note(member(4, 0, 5), 1.0, True)
    assert not joins.note(member(4, 0, 5), 2.0, False)
    joins.expire(1.5)
    assert joins.ready(2.0, {}, (), 1.0)[0] == [member(4, 0, 5)]
    joins.expire(2.5)
    assert joins.ready(2.5, {}, (), 1.0)[0] == []


def test_no_more_requests_are_kept_than_the_limit() -> None:
    joins = Joins()
    for tag in range(MAX_PENDING + 9):
        joins.note(member(4)._replace(nonce=tag.to_bytes(16, "big")), 1.0, True)
    assert len(joins.requests) == MAX_PENDING


def test_an_occupied_slot_is_free_only_when_its_occupant_goes_or_stays_silent() -> None:
    joins, rank_table = Joins(), {2: member(2)}
    joins.note(member(2, 0, 5), 0.0, True)
    assert joins.ready(9.0, rank_table, (), 1.0) == ([], set())
    assert joins.ready(9.0, rank_table, {2}, 1.0) == ([member(2, 0, 5)], set())
    (request,) = joins.unprobed(rank_table, ())
    request.probed = 9.0
    assert joins.ready(9.5, rank_table, (), 1.0) == ([], set())
    assert joins.ready(10.0, rank_table, (), 1.0) == ([member(2, 0, 5)], {2})
    joins.heard_from(member(2).nonce, rank_table)
    assert joins.ready(10.0, rank_table, (), 1.0) == ([], set())


def test_a_repeated_request_has_the_occupant_asked_once_more() -> None:
    """The first question may have come before a new occupant knew that it was in (simulator, seed 3536705)."""
    joins, rank_table = Joins(), {2: member(2)}
    joins.note(member(2, 0, 5), 0.0, True)
    (request,) = joins.unprobed(rank_table, ())
    request.probed = 0.0
    assert joins.unprobed(rank_table, ()) == []
    joins.note(member(2, 0, 5), 0.2, True)
    assert joins.unprobed(rank_table, ()) == [request]


def test_a_lane_is_not_changed_without_the_promise_of_one_who_is_spared_at_the_last_moment() -> None:
    """Slot 2 is accused, and silent; it stays because slot 4 has died, and then it has a part in what is wanted."""
    one = Campaign(BALLOT, first(5))
    for slot in (0, 1):
        one.note_promise(slot, Promise(BALLOT, 1, NO_BALLOT, None, ()))
    findings = CALM._replace(gone={4: DEAD}, boards={4: BLANK}, accusers={2: frozenset({0})}, waited_s=1.5)
    decision = one.choose(findings._replace(wants=(Want(7, (0, 1, 2), (3,)),)), 1.0, 2.0)
    assert decision is not None
    assert [removal.slot for removal in decision.removed] == [4]
    assert decision.parts == ()
    decision = one.choose(findings._replace(wants=(Want(7, (0, 1), (3,)),)), 1.0, 2.0)
    assert decision is not None
    assert [(part.slot, part.since) for part in decision.parts] == [(3, -2)]
