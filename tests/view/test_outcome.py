"""What decisions mean for calls: the rules one by one. That survivors agree in every history is shown in tests/sim."""

from __future__ import annotations

import pytest

from epee.view.protocol.messages import (
    DEAD,
    FOREVER,
    LEFT,
    STALLED,
    UNREACHABLE,
    Cut,
    Decision,
    Member,
    Part,
    Removal,
    Start,
)
from epee.view.protocol.outcome import CallState, Course, is_whole
from tests.view.agents import member

LANE = 7
FIRST = Decision(1, tuple(member(slot) for slot in range(4)))


def after(
    before: Decision,
    gone: dict[int, str] | None = None,
    issued: int | None = None,
    cut: int = 0,
    joins: tuple[int, ...] = (),
) -> Decision:
    gone = gone or {}
    epoch = before.epoch + 1
    members = [m for m in before.members if m.slot not in gone]
    members += [Member(slot, epoch, bytes([slot, epoch]) * 8, b"") for slot in joins]
    removed = tuple(Removal(m.slot, m.incarnation, gone[m.slot]) for m in before.members if m.slot in gone)
    cuts = (Cut(LANE, cut),) if any(r.cause == STALLED for r in removed) else ()
    starts = () if issued is None else (Start(LANE, issued + 1),)
    return Decision(epoch, tuple(sorted(members)), removed, cuts, starts)


def whole_up_to(last: int):  # type: ignore[no-untyped-def]
    return lambda slot, epoch, seq: seq <= last


def course(raises: bool, *decisions: Decision) -> Course:
    one = Course(LANE, FIRST, raises)
    for decision in decisions:
        assert one.add(decision)
    return one


def places(one: Course, last: int, seqs: range) -> list[tuple[int, bool]]:
    return [one.place(seq, whole_up_to(last))[:2] for seq in seqs]


def test_what_the_dead_left_whole_goes_on_and_the_rest_runs_again() -> None:
    one = course(False, after(FIRST, {3: DEAD}, issued=6))
    assert places(one, 4, range(3, 8)) == [(1, False), (1, False), (2, False), (2, False), (2, False)]
    assert one.contributors(4, 1) == (0, 1, 2, 3)
    assert one.contributors(5, 2) == (0, 1, 2)


def test_in_mode_raise_what_was_issued_fails_and_what_comes_later_runs() -> None:
    one = course(True, after(FIRST, {3: DEAD}, issued=6))
    assert places(one, 4, range(3, 9)) == [(1, False), (1, False), (2, True), (2, True), (2, False), (2, False)]
    assert one.place(5, whole_up_to(4)) == CallState(2, True, (3,))


def test_a_failure_that_nobody_was_calling_in_fails_the_next_call() -> None:
    one = course(True, after(FIRST, {3: DEAD}, issued=4))
    assert places(one, 4, range(3, 7)) == [(1, False), (1, False), (2, True), (2, False)]


def test_after_the_first_call_that_is_not_whole_no_later_one_counts() -> None:
    one = course(False, after(FIRST, {3: DEAD}, issued=6))
    got = [one.place(seq, lambda slot, epoch, seq: seq != 4).epoch for seq in range(3, 7)]
    assert got == [1, 2, 2, 2]


def test_what_nobody_had_issued_runs_in_the_new_epoch_whatever_the_dead_had_written() -> None:
    one = course(False, after(FIRST, {3: DEAD}, issued=4))
    assert places(one, 99, range(4, 6)) == [(1, False), (2, False)]


def test_who_was_voted_out_counts_up_to_its_cut_without_a_look_at_its_words() -> None:
    one = course(False, after(FIRST, {3: STALLED}, issued=6, cut=4))

    def look(slot: int, epoch: int, seq: int) -> bool:
        raise AssertionError("the words of a process that may still write")

    assert [one.place(seq, look).epoch for seq in range(3, 7)] == [1, 1, 2, 2]


def test_a_second_death_is_judged_in_the_epoch_that_the_call_runs_in() -> None:
    second = after(FIRST, {3: DEAD}, issued=6)
    third = after(second, {2: DEAD}, issued=6)
    one = course(False, second, third)
    asked: list[tuple[int, int, int]] = []

    def look(slot: int, epoch: int, seq: int) -> bool:
        asked.append((slot, epoch, seq))
        return seq < 5 if slot == 3 else seq < 6

    assert [one.place(seq, look).epoch for seq in range(4, 8)] == [1, 2, 3, 3]
    assert (2, 1, 4) in asked
    assert (2, 2, 5) in asked


def test_asking_again_after_a_decision_gives_the_same_as_asking_late() -> None:
    second = after(FIRST, {3: DEAD}, issued=6)
    third = after(second, {2: DEAD}, issued=6)
    early, late = course(False, second), course(False, second, third)
    first_answers = {seq: early.place(seq, whole_up_to(4)).epoch for seq in range(4, 8)}
    early.add(third)
    for seq in range(4, 8):
        again, once = early.place(seq, whole_up_to(4), first_answers[seq]), late.place(seq, whole_up_to(4))
        assert again[:3] == once[:3]
        moved_before = (first_answers[seq],) if first_answers[seq] > 1 else ()
        assert (*moved_before, *again.via) == once.via, "who asks late goes through the same epochs"


def test_a_call_that_ends_on_its_way_is_not_what_a_later_decision_hits() -> None:
    """Call 5 has root 3: it ends in epoch 2 for everybody, whether or not epoch 3 is known by then; 2 was in call 6."""
    second = after(FIRST, {3: DEAD}, issued=6)
    third = after(second, {2: DEAD}, issued=7)
    early, late = course(False, second), course(False, second, third)

    def look(slot: int, epoch: int, seq: int) -> bool:
        return seq < 5 if slot == 3 else epoch == 1 or seq == 6

    def has_root(epoch: int) -> bool:
        return epoch < 2

    for one in (early, late):
        assert one.place(5, look, 1, has_root) == CallState(2, False, (), (2,), (), 2)
        one.ended_on_the_way(5, 2)
        one.forget(5)
    early.add(third)
    for one in (early, late):
        assert one.base == 2, "what a program is shown behind call 5"
        assert [one.place(seq, look)[:2] for seq in (6, 7, 8)] == [(2, False), (3, False), (3, False)]


def test_the_next_call_is_planned_behind_a_loss_though_an_earlier_call_is_still_asked_about() -> None:
    """Call 4 was given up, so nothing behind 3 is forgotten; 5, which the loss of 3 has hit, has ended."""
    one = course(False, after(FIRST, {3: DEAD}, issued=5))
    assert places(one, 4, range(4, 6)) == [(1, False), (2, False)]
    one.forget(3)
    assert (one.base, one.planned_in(6)) == (1, 2)
    assert one.place(4, whole_up_to(4), 1).epoch == 1, "it is asked about where it ran"
    one.forget(5)
    assert one.base == one.planned_in(6) == 2


def test_behind_a_call_that_ended_on_its_way_all_plan_alike_whatever_a_later_loss_has_hit_before() -> None:
    """Call 4 was given up and is asked about; 5 has root 3, so it ends in epoch 2. The loss of 2 has hit 4."""
    second = after(FIRST, {3: DEAD}, issued=5)
    third = after(second, {2: DEAD}, issued=5)
    early, late = course(False, second), course(False, second, third)
    whole = whole_up_to(3)
    assert [one.place(4, whole).epoch for one in (early, late)] == [2, 3]
    for one in (early, late):
        assert one.place(5, whole, 1, lambda epoch: epoch < 2).rootless == 2
        one.ended_on_the_way(5, 2)
        one.forget(3)
        assert one.planned_in(6) == 2
        assert one.contributors(6, 2) == (0, 1, 2), "what a program is shown behind call 5"
    early.add(third)
    assert early.place(4, whole, 2).epoch == late.place(4, whole, 3).epoch == 3
    for one in (early, late):
        assert one.planned_in(6) == 2, "until the next call ends, the same is shown"
        assert one.place(6, whole, 2)[:4] == (3, False, (), (3,))
        assert one.planned_in(7) == 3
        one.forget(6)
        assert (one.base, one.turns) == (3, [])


def test_what_has_hit_the_call_behind_one_that_ended_on_its_way_is_behind_those_after_it() -> None:
    """Calls overlap: 5 has ended in epoch 2, and 6, which the second loss has hit, is open in epoch 3."""
    second = after(FIRST, {3: DEAD}, issued=6)
    one = course(False, second, after(second, {2: DEAD}, issued=6))
    assert one.place(5, lambda slot, epoch, seq: slot == 2, 1, lambda epoch: epoch < 2).rootless == 2
    one.ended_on_the_way(5, 2)
    assert one.planned_in(6) == 2
    assert one.place(6, whole_up_to(5)).epoch == 3
    assert one.planned_in(6) == 3


def test_what_an_open_call_has_yet_to_go_through_is_not_forgotten() -> None:
    """Calls overlap: 6 was planned in epoch 1 with root 3, two losses have hit 5, which has ended in epoch 3."""
    second = after(FIRST, {3: DEAD}, issued=6)
    one = course(False, second, after(second, {2: DEAD}, issued=6))
    assert one.place(5, whole_up_to(4)).epoch == 3
    one.forget(5, 1)
    assert (one.base, one.planned_in(6)) == (1, 3)
    assert one.place(6, whole_up_to(4), 1)[:4] == (3, False, (), (2, 3))
    assert one.place(6, whole_up_to(4), 1, lambda epoch: epoch < 2) == CallState(2, False, (), (2,), (), 2)
    one.forget(5, 2)
    assert one.base == 2
    one.forget(6)
    assert (one.base, one.turns) == (3, [])


@pytest.mark.parametrize(("ended", "planned_in"), [(4, 1), (5, 1), (6, 2)])
def test_in_mode_raise_calls_are_planned_in_the_old_view_as_long_as_they_fail(ended: int, planned_in: int) -> None:
    one = course(True, after(FIRST, {3: DEAD}, issued=6))
    assert places(one, 4, range(3, ended + 1))[-1][0] == (1 if ended == 4 else 2)
    assert one.planned_in(ended + 1) == planned_in


def test_who_joins_takes_part_from_the_first_call_that_nobody_had_issued() -> None:
    second = after(FIRST, issued=6, joins=(4,))
    old = course(True, second)
    new = Course(LANE, second, True, joined=True)
    assert new.first_seq == 7
    assert places(old, 0, range(5, 9)) == [(1, False), (1, False), (2, False), (2, False)]
    assert places(new, 0, range(7, 9)) == [(2, False), (2, False)]
    assert old.contributors(7, 2) == new.contributors(7, 2) == (0, 1, 2, 3, 4)
    assert old.contributors(6, 2) == (0, 1, 2, 3)


def test_a_lane_that_nobody_had_begins_anew_with_who_joins() -> None:
    second = after(FIRST, joins=(4,))
    assert Course(LANE, second, True, joined=True).first_seq == 1
    assert places(course(True, second), 0, range(1, 3)) == [(2, False), (2, False)]


def test_who_replaces_the_dead_reports_the_failure_in_the_same_call_as_the_survivors() -> None:
    second = after(FIRST, {3: DEAD}, issued=6, joins=(3,))
    old, new = course(True, second), Course(LANE, second, True, joined=True)
    assert places(old, 6, range(6, 10)) == [(1, False), (2, True), (2, False), (2, False)]
    assert places(new, 6, range(7, 10)) == [(2, True), (2, False), (2, False)]


def test_a_call_that_must_fail_is_told_as_issued_so_who_joins_begins_after_it() -> None:
    one = course(True, after(FIRST, {3: DEAD}, issued=6))
    assert one.claimed(5) == one.claimed(6) == 7
    assert one.claimed(9) == 9
    assert course(False, after(FIRST, {3: DEAD}, issued=6)).claimed(6) == 6


@pytest.mark.parametrize("decision", [FIRST._replace(epoch=2), after(FIRST, {3: DEAD}, issued=4)])
def test_decisions_that_do_not_touch_a_lane_change_nothing(decision: Decision) -> None:
    one = Course(LANE, FIRST, True, frozenset({0, 1}))
    assert not one.add(decision)
    assert places(one, 0, range(1, 9)) == [(1, False)] * 8


@pytest.mark.parametrize("raises", [False, True])
def test_what_is_over_is_forgotten_without_a_change_of_the_answers(raises: bool) -> None:
    decisions = [after(FIRST, {3: DEAD}, issued=6)]
    decisions.append(after(decisions[-1], {2: DEAD}, issued=6))
    kept, forgetful = course(raises, *decisions), course(raises, *decisions)
    for seq in range(5, 20):
        assert kept.place(seq, whole_up_to(5))[:3] == forgetful.place(seq, whole_up_to(5))[:3]
        forgetful.forget(seq)
    assert not forgetful.turns


def test_whole_is_tag_and_all_rounds_and_in_two_phases_the_shares_too() -> None:
    assert is_whole(5, 5, 3, 0, 3, False)
    assert not is_whole(4, 5, 3, 0, 3, False)
    assert not is_whole(5, 5, 2, 3, 3, False)
    assert is_whole(5, 5, 3, 3, 3, True)
    assert not is_whole(5, 5, 3, 2, 3, True)


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("last", range(14))
def test_a_call_that_surely_passes_does_so_whatever_the_words_say(raises: bool, last: int) -> None:
    lost = after(FIRST, {3: DEAD}, issued=6)
    for joined in (
        after(lost, joins=(3,), issued=8),  # the loss may fail one call that nobody has made
        after(lost, {1: DEAD}, joins=(3, 5), issued=8),  # another loss in the same change
    ):
        one = course(raises, lost, joined)
        assert one.present() == tuple(m.slot for m in joined.members)
        passing = [seq for seq in range(1, 15) if one.passes(seq, 3)]
        assert passing == list(range(passing[0], 15))
        assert passing[0] <= 11
        found = {seq: one.place(seq, whole_up_to(last)) for seq in range(1, 15)}
        for seq in passing:
            assert (found[seq].epoch, found[seq].failed) == (3, False), (seq, found[seq])
        if last >= 6:
            assert found[6].epoch == 1, "a call that the lost one has left whole passes only by its words"
            assert 6 not in passing


def test_who_was_put_out_has_no_part_in_calls_beyond_the_cut_whoever_has_begun_them() -> None:
    """Rank 3 was put out; somebody has completed call 4, somebody has begun call 6."""
    out = Decision(2, FIRST.members, (), (Cut(LANE, 4),), (Start(LANE, 7),), (Part(LANE, 3, 1, -2),), (LANE,))
    one = course(False, out)
    assert [seq for seq in range(1, 10) if one.passes(seq, 2)] == [5, 6, 7, 8, 9]
    assert places(one, 99, range(3, 7)) == [(1, False), (1, False), (2, False), (2, False)]
    assert not any(course(True, out).passes(seq, 2) for seq in range(1, 7)), "in mode raise one of them fails"
    dead = course(False, after(FIRST, {3: DEAD}, issued=6))
    assert not dead.passes(6, 2), "what a dead rank has left whole counts"


# ---- over several hosts

HOSTS = {0: "a", 1: "a", 2: "b", 3: "b"}


def over_hosts(decision: Decision) -> Course:
    one = Course(LANE, FIRST, False, hosts=HOSTS)
    assert one.add(decision)
    return one


def with_cut(decision: Decision, cut: int) -> Decision:
    return decision._replace(cuts=(Cut(LANE, cut),))


def test_what_a_dead_slot_left_counts_where_one_of_its_host_stays() -> None:
    one = over_hosts(with_cut(after(FIRST, {3: DEAD}, issued=6), 2))
    assert places(one, 4, range(3, 7)) == [(1, False), (1, False), (2, False), (2, False)]


def test_of_a_lost_host_what_others_have_completed_counts_whatever_the_words_say() -> None:
    one = over_hosts(with_cut(after(FIRST, {2: DEAD, 3: DEAD}, issued=6), 4))
    assert places(one, 6, range(3, 7)) == [(1, False), (1, False), (2, False), (2, False)]
    assert places(one, 0, range(3, 7)) == [(1, False), (1, False), (2, False), (2, False)]


def test_the_last_two_of_a_host_that_die_one_after_the_other_are_judged_each_by_its_own_end() -> None:
    first = with_cut(after(FIRST, {3: DEAD}, issued=6), 2)
    one = over_hosts(first)
    one.add(with_cut(after(first, {2: DEAD}, issued=6), 5))
    assert one.turns[0].removed == ((3, 1, FOREVER),)
    assert one.turns[1].removed == ((2, 1, 5),)


def test_who_comes_to_a_host_has_not_seen_what_its_dead_had_said() -> None:
    second = after(FIRST, {2: DEAD}, issued=3)
    third = with_cut(after(second, {3: DEAD}, issued=6, joins=(2,)), 4)
    one = Course(LANE, FIRST, False, hosts=HOSTS)
    one.add(second)
    one.add(third)
    assert one.turns[1].removed == ((3, 1, 4),)


def test_a_host_that_has_left_in_order_has_told_all() -> None:
    one = over_hosts(with_cut(after(FIRST, {2: LEFT, 3: LEFT}, issued=6), 3))
    assert places(one, 5, range(4, 7)) == [(1, False), (1, False), (2, False)]


@pytest.mark.parametrize("victim", [0, 1])
def test_in_a_lane_that_has_one_host_left_no_witness_is_needed_whenever_the_others_came(victim: int) -> None:
    """Its decisions have no cuts: counted up to none, who stays would end calls that others have completed."""
    second = after(FIRST, {2: UNREACHABLE, 3: UNREACHABLE}, issued=3)
    third = after(second, {1 - victim: DEAD}, issued=4)
    fourth = after(third, {}, issued=5, joins=(1 - victim,))
    fifth = after(fourth, {victim: DEAD}, issued=9)
    one = Course(LANE, FIRST, False, hosts=HOSTS)
    for decision in (with_cut(second, 2), third, fourth, fifth):
        one.add(decision)
    assert one.turns[-1].removed == ((victim, 1, FOREVER),)


def test_of_whom_not_all_was_told_no_more_counts_than_the_cut() -> None:
    one = over_hosts(after(FIRST, {3: DEAD}, issued=6))
    one.turns[0].limit_to(3, 3)
    one.turns[0].limit_to(3, 4)
    assert one.turns[0].removed == ((3, 1, 3),)
    assert places(one, 5, range(3, 5)) == [(1, False), (2, False)]


def test_of_three_hosts_the_dead_count_up_to_the_cut_though_one_of_their_host_stays() -> None:
    one = Course(LANE, FIRST, False, hosts={0: "a", 1: "b", 2: "c", 3: "c"})
    one.add(with_cut(after(FIRST, {3: DEAD}, issued=6), 2))
    assert one.turns[0].removed == ((3, 1, 2),)


def test_of_three_hosts_of_which_one_is_left_the_dead_count_for_what_they_left() -> None:
    hosts = {0: "a", 1: "a", 2: "b", 3: "c"}
    one = Course(LANE, FIRST, False, hosts=hosts)
    second = with_cut(after(FIRST, {2: UNREACHABLE, 3: UNREACHABLE}, issued=6), 2)
    one.add(second)
    one.add(after(second, {1: DEAD}, issued=9))  # no cut: the job has one host
    assert one.turns[1].removed == ((1, 1, FOREVER),)


def test_of_one_host_that_is_left_its_dead_count_for_what_they_left_though_only_later_ones_stay() -> None:
    second = with_cut(after(FIRST, {2: UNREACHABLE, 3: UNREACHABLE}, issued=3), 2)
    third = after(second, issued=5, joins=(4,))  # on host "a", too
    one = Course(LANE, FIRST, False, hosts={**HOSTS, 4: "a"})
    for decision in (second, third, after(third, {0: DEAD, 1: DEAD}, issued=9)):  # no cut: the job has one host
        one.add(decision)
    assert one.turns[-1].removed == ((0, 1, FOREVER), (1, 1, FOREVER))


def test_who_came_after_a_dead_rank_is_no_witness_and_one_that_came_before_is() -> None:
    second = after(FIRST, {2: DEAD}, issued=3)
    third = after(second, {}, issued=5, joins=(2,))
    for victim, cut in ((3, 7), (2, FOREVER)):  # of their host slot 2 has come in the third epoch, slot 3 was there
        one = Course(LANE, FIRST, False, hosts=HOSTS)
        for decision in (second, third, with_cut(after(third, {victim: DEAD}, issued=9), 7)):
            one.add(decision)
        assert one.turns[-1].removed[0][2] == cut
