"""Parts: who goes, or comes back, in one group_id and stays in the job. Random histories of that are in tests/sim."""

from __future__ import annotations

from epee.view.protocol.decision import compose, is_null, parts_of, without
from epee.view.protocol.events import AgentSettings, Frozen, MessageReceived, Wanted
from epee.view.protocol.messages import (
    DEAD,
    MAX_PARTS,
    STALLED,
    Ballot,
    Commit,
    Cut,
    Decision,
    GroupState,
    Locator,
    Member,
    Part,
    Prepare,
    Promise,
    Removal,
    Report,
    Start,
    Want,
)
from epee.view.protocol.outcome import Course
from tests.view.agents import Group, first, member
from tests.view.test_agent import alone, sent

LANE, OTHER = 7, 9
OUT = Want(LANE, (0, 1), (2,))
BACK = Want(LANE, (0, 1, 2))


def told(*calls: tuple[int, int]) -> dict[int, tuple[GroupState, ...]]:
    """Where the group is at each slot: completed, issued."""
    return {slot: (GroupState(LANE, *call), GroupState(OTHER, 1, 1)) for slot, call in enumerate(calls)}


def put_out() -> Decision:
    """Slot 2 of three is out of the group; it had completed one call more than the others, which does not count."""
    return compose(first(3), told((3, 5), (3, 4), (4, 4)), {}, wants=(OUT,))


def test_who_is_put_out_stays_in_the_job_and_counts_up_to_a_cut() -> None:
    decision = put_out()
    assert decision.members == first(3).members
    assert decision.removed == ()
    assert decision.parts == (Part(LANE, 2, 1, -2),)
    assert (decision.cuts[0], decision.starts[0]) == (Cut(LANE, 3), Start(LANE, 6))
    assert parts_of(decision, LANE) == {0: 1, 1: 1}
    assert parts_of(decision, OTHER) == {0: 1, 1: 1, 2: 1}
    assert not is_null(decision, first(3))


def test_parts_last_until_the_member_goes_and_who_is_out_counts_no_more() -> None:
    third = compose(put_out(), told((8, 9), (8, 8), (90, 91)), {})
    assert third.parts == (Part(LANE, 2, 1, -2),)
    assert third.starts[0] == Start(LANE, 10)
    assert is_null(third, put_out())
    gone = compose(third, told((8, 9), (8, 8)), {2: DEAD}, joiners=[member(2, 0, 5)])
    assert gone.parts == third.parts  # a newcomer must know that the dead one had no part
    assert parts_of(gone, LANE) == {0: 1, 1: 1, 2: 4}
    assert compose(gone, told((8, 9), (8, 8), (0, 0)), {}).parts == ()


def test_what_a_replacement_of_one_that_was_out_tells_counts() -> None:
    third = compose(put_out(), told((8, 9), (8, 8)), {2: DEAD}, joiners=[member(2, 0, 5)])
    assert third.parts == put_out().parts  # of the one before it
    fourth = compose(third, told((8, 9), (8, 9), (9, 10)), {}, wants=(Want(LANE, (0, 2), (1,)),))
    assert (fourth.cuts[0], fourth.starts[0]) == (Cut(LANE, 9), Start(LANE, 11))


def test_who_comes_back_is_a_newcomer_to_the_lane() -> None:
    third = compose(put_out(), told((8, 9), (8, 8), (4, 4)), {}, wants=(BACK,))
    assert parts_of(third, LANE) == {0: 1, 1: 1, 2: 3}
    assert third.cuts == ()
    assert third.starts[0] == Start(LANE, 10)


def test_what_is_told_of_parts_stays_as_long_as_they_last() -> None:
    locators = tuple(Locator(slot, bytes([slot])) for slot in (0, 2))
    third = compose(put_out(), told((8, 9), (8, 8), (4, 4)), {}, wants=(BACK._replace(locators=locators),))
    assert third.parts == (Part(LANE, 0, 1, 1, b"\0"), Part(LANE, 2, 1, 3, b"\2"))
    assert parts_of(third, LANE) == {0: 1, 1: 1, 2: 3}
    fourth = compose(third, told((8, 9), (8, 8), (8, 8)), {1: DEAD})
    assert fourth.parts == third.parts
    fifth = compose(fourth, told((8, 9), (8, 8), (8, 8)), {}, wants=(Want(LANE, (0,), (2,)),))
    assert fifth.parts == (Part(LANE, 0, 1, 1, b"\0"), Part(LANE, 2, 1, -5))


def test_what_is_told_of_one_that_does_not_come_is_dropped() -> None:
    want = Want(LANE, (0, 1, 2), (), 1, locators=(Locator(2, b"2"),))
    left = without(want, {2}, (), put_out())
    assert left == Want(LANE, (0, 1), (2,), 1, locators=want.locators)
    assert compose(put_out(), told((8, 9), (8, 8)), {}, wants=(left,)).parts == put_out().parts


def test_more_locators_than_a_report_may_have_wait_for_the_next() -> None:
    agent = alone(0)
    for group_id in range(100):
        many = tuple(Locator(slot, bytes(96)) for slot in range(64))
        agent.step(Wanted(Want(group_id, tuple(range(64)), locators=many), 1), 0.0)
    assert len(agent._wants) == MAX_PARTS // 64


def test_one_decision_can_put_out_and_take_back() -> None:
    third = compose(put_out(), told((8, 9), (8, 8), (4, 4)), {}, wants=(Want(LANE, (0, 2), (1,)),))
    assert parts_of(third, LANE) == {0: 1, 2: 3}
    assert third.cuts[0] == Cut(LANE, 8)


def test_parts_of_lanes_that_nobody_has_are_dropped() -> None:
    here = {slot: (GroupState(OTHER, 1, 1),) for slot in range(3)}
    assert compose(put_out(), here, {}).parts == ()
    assert compose(put_out(), {0: here[0]}, {}).parts == put_out().parts  # not everybody has answered


def test_wants_that_would_make_too_many_parts_are_not_met() -> None:
    full = first(3)._replace(parts=tuple(Part(group_id, 2, 1, -1) for group_id in range(100, 100 + MAX_PARTS)))
    assert compose(full, {}, {}, wants=(OUT,)).parts == full.parts


def test_a_want_that_changes_nothing_is_met_all_the_same() -> None:
    decision = compose(first(3), told((3, 5), (3, 5), (3, 5)), {}, wants=(BACK,))
    assert decision.parts == ()
    assert decision.met == (LANE,)
    assert not is_null(decision, first(3))
    assert compose(decision, told((3, 5), (3, 5), (3, 5)), {}).met == ()


def test_what_is_left_of_a_want_without_those_who_do_not_answer() -> None:
    want = Want(LANE, (0, 1, 2), (), 2)
    assert without(want, (), (), first(4)) == want
    assert without(want, {2}, (), first(4)) == Want(LANE, (0, 1), (2,), 2)
    assert without(want, {2}, {1}, first(4)) is None  # too few are left
    assert without(want, {1, 2}, (), first(4)) is None
    assert without(want._replace(least=3), (), {1}, first(4)) is None
    assert without(want._replace(least=0), {2}, (), first(4)) is None  # all of them must answer
    assert without(want._replace(least=0), (), {2}, first(4)) == want._replace(least=0)
    back = Want(LANE, (0, 2), (1,), 2)
    assert without(back, (), (), put_out()) is None  # who comes back does not count


def test_calls_of_the_lane_take_it_for_a_loss_and_other_lanes_do_not() -> None:
    one = Course(LANE, first(3), raises=True)
    assert one.add(put_out())
    assert not Course(OTHER, first(3), raises=True).add(put_out())
    whole = lambda slot, epoch, seq: True  # noqa: E731 - what it shows does not count: it still lives
    assert not one.place(3, whole).failed
    assert one.place(4, whole).failed
    assert one.place(4, whole).lost == (2,)
    assert one.contributors(7, 2) == (0, 1)


def test_who_is_back_and_who_stayed_agree_which_call_is_the_first() -> None:
    third = compose(put_out(), told((8, 9), (8, 8), (4, 4)), {}, wants=(BACK,))
    stayed, back = Course(LANE, put_out(), raises=False), Course(LANE, third, raises=False, joined=True)
    assert stayed.add(third)
    assert back.first_seq == 10
    assert stayed.contributors(9, 3) == (0, 1)
    assert stayed.contributors(10, 3) == back.contributors(10, 3) == (0, 1, 2)


def test_a_newcomer_knows_whether_the_lane_has_lost_somebody_by_the_same_decision() -> None:
    joiner = [member(3, 0, 5)]
    for wants, gone, has_lost in (((OUT,), {}, True), ((), {}, False), ((), {2: DEAD}, True)):
        decision = compose(first(3), told((3, 5), (3, 5), (3, 5)), gone, joiners=joiner, wants=wants)
        newcomer = Course(LANE, decision, raises=True, joined=True)
        stayed = Course(LANE, first(3), raises=True)
        stayed.add(decision)
        assert newcomer.place(6, lambda *_: False).failed is stayed.place(6, lambda *_: False).failed is has_lost
    decision = compose(put_out(), told((8, 9), (8, 8)), {2: DEAD}, joiners=joiner)  # who had no part is no loss
    assert not Course(LANE, decision, raises=True, joined=True).place(10, lambda *_: False).failed


def group_of(num_members: int, policy: str = "error") -> Group:
    group = Group(num_members, AgentSettings(policy=policy))
    for slot in range(num_members):
        group.groups[member(slot).nonce] = (GroupState(LANE, 3, 4),)
    return group


def groups_of(group: Group) -> set[tuple[int, ...]]:
    return {tuple(parts_of(agent.decided, LANE)) for agent in group.live()}


def test_any_member_can_have_another_put_out_and_taken_back() -> None:
    group = group_of(3)
    group.post(member(1), Wanted(OUT, 1))
    group.late(1.0)
    assert groups_of(group) == {(0, 1)}
    assert group.views() == {(2, ((0, 1), (1, 1), (2, 1)))}
    group.post(member(2), Wanted(BACK, 2))
    group.late(1.0)
    assert groups_of(group) == {(0, 1, 2)}
    assert parts_of(group.agents[member(0).nonce].decided, LANE)[2] == 3


def test_who_does_not_answer_can_be_put_out_but_not_a_lane_be_changed_without_those_who_stay() -> None:
    group = group_of(3)
    group.stopped.add(member(2).nonce)
    group.post(member(1), Wanted(OUT, 1))
    group.late(1.0)
    assert groups_of(group) == {(0, 1)}
    held = group_of(3)
    held.holding.add(member(0).nonce)  # its engine does not freeze, so nobody knows how far it is
    held.post(member(1), Wanted(OUT, 1))
    held.late(2.0)
    assert groups_of(held) == {(0, 1, 2)}


def test_who_does_not_answer_is_put_out_where_the_want_allows_it() -> None:
    group = group_of(4)
    group.holding.add(member(2).nonce)
    for _ in range(50):
        group.post(member(0), Wanted(Want(LANE, (0, 1, 2, 3), (), 3), group.agents[member(0).nonce].epoch))
        group.late(0.1)
        if group.agents[member(0).nonce].decided.met:
            break
    assert groups_of(group) == {(0, 1, 3)}
    held = group_of(4)
    held.holding.update((member(2).nonce, member(3).nonce))
    for _ in range(50):
        held.post(member(0), Wanted(Want(LANE, (0, 1, 2, 3), (), 3), held.agents[member(0).nonce].epoch))
        held.late(0.1)
    assert groups_of(held) == {(0, 1, 2, 3)}


def test_a_want_does_not_outlive_the_epoch_in_which_it_was_formed() -> None:
    group = group_of(4)
    group.stopped.add(member(3).nonce)
    group.kill(member(2))
    group.late(1.0)
    assert {epoch for epoch, _ in group.views()} == {2}
    group.post(member(1), Wanted(Want(LANE, (0, 1), (3,)), 1))
    group.late(1.0)
    assert {epoch for epoch, _ in group.views()} == {2}


def test_a_want_that_cannot_be_met_does_not_hold_up_calls_again_and_again() -> None:
    group = group_of(3)
    group.holding.add(member(1).nonce)

    def want_for(seconds: float) -> int:
        before = len(group.told[member(0).nonce])
        for _ in range(round(seconds / 0.1)):
            group.post(member(0), Wanted(OUT, group.agents[member(0).nonce].epoch))
            group.late(0.1)
        return len(group.told[member(0).nonce]) - before

    assert want_for(3.2) <= 4  # null decisions: each ends a freeze, and a pause of `wait_limit_s` follows
    group.holding.clear()
    group.post(member(1), Frozen(group.agents[member(1).nonce].epoch, group.groups[member(1).nonce]))
    assert want_for(2.0) > 0
    assert groups_of(group) == {(0, 1)}


def test_of_two_wants_for_a_lane_the_first_is_met() -> None:
    group = group_of(3)
    group.post(member(0), Wanted(OUT, 1))
    group.post(member(1), Wanted(Want(LANE, (1, 2), (0,)), 1))
    group.late(1.0)
    assert groups_of(group) == {(0, 1)}


def test_a_coordinator_is_told_what_is_wanted() -> None:
    agent = alone(1)
    (report,) = sent(agent.step(Wanted(OUT, 1), 1.0), Report)
    assert report == Report(1, (), (OUT,))


def test_who_is_back_promises_no_calls_that_it_missed() -> None:
    agent = alone(2)
    third = compose(put_out(), told((8, 9), (8, 8), (4, 4)), {}, wants=(BACK,))
    agent.step(MessageReceived(member(0).nonce, Commit((put_out(), third))), 1.0)
    agent.step(MessageReceived(member(0).nonce, Prepare(Ballot(1, 0), 3)), 1.0)
    (promise,) = sent(agent.step(Frozen(3, told((9, 9))[0]), 1.0), Promise)
    assert promise.groups == (GroupState(LANE, 0, 9), GroupState(OTHER, 1, 1))


def test_a_decision_may_remove_the_one_that_was_to_go_in_one_lane_only() -> None:
    decision = compose(first(3), told((3, 5), (3, 5), (3, 5)), {}, {2: STALLED}, wants=(OUT,))
    assert decision.removed == (Removal(2, 1, STALLED),)
    assert decision.parts == ()
    assert [m.slot for m in decision.members] == [0, 1]
    assert Member(2, 1, *member(2)[2:]) not in decision.members


def test_a_lane_starts_above_what_those_had_issued_who_come_back() -> None:
    """They are in no view of the group, so who asks for them says so."""
    third = compose(put_out(), told((8, 9), (8, 8), (4, 40)), {}, wants=(BACK._replace(seq=40),))
    assert third.starts[0] == Start(LANE, 41)
    lower = compose(put_out(), told((8, 9), (8, 8), (4, 4)), {}, wants=(BACK._replace(seq=3),))
    assert lower.starts[0] == Start(LANE, 10)
