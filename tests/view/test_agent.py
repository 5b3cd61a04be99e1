"""The agent, step by step and in small groups; long random runs are in tests/sim."""

from __future__ import annotations

from itertools import pairwise

import pytest

from epee.view.protocol.agent import Agent
from epee.view.protocol.events import (
    Accused,
    Admit,
    AgentSettings,
    BoardRead,
    Decide,
    Died,
    Evicted,
    Freeze,
    Frozen,
    JoinAsked,
    JoinPending,
    LeaveAsked,
    MessageReceived,
    NoQuorum,
    Refused,
    Send,
    Thaw,
    Tick,
    WriteBoard,
)
from epee.view.protocol.messages import (
    DEAD,
    LEFT,
    NO_BALLOT,
    STALLED,
    Accept,
    Accepted,
    Ask,
    Ballot,
    BoardState,
    Commit,
    Decision,
    GroupState,
    Join,
    JoinRefused,
    Nack,
    Prepare,
    Promise,
    Removal,
    Report,
    Start,
)
from tests.view.agents import Group, first, member

EVICT = AgentSettings(policy="evict")
NOW = 1 << 40  # an epoch: the engine has taken over all decisions


def alone(slot: int, num_members: int = 3, settings: AgentSettings = EVICT) -> Agent:
    agent = Agent(member(slot), settings, first(num_members))
    effects = agent.step(Tick(), 1.0)
    assert effects == [WriteBoard(BoardState(first(num_members), NO_BALLOT, NO_BALLOT, None))]
    return agent


def sent(effects: list, kind: type) -> list:
    return [effect.message for effect in effects if isinstance(effect, Send) and isinstance(effect.message, kind)]


def test_a_quiet_group_does_nothing() -> None:
    group = Group(3)
    for slot in range(3):
        group.post(member(slot), Tick())
        assert group.agents[member(slot).nonce].next_tick == float("inf")
    assert not group.wire


def test_an_agent_writes_its_board_before_it_promises_and_freezes_before_that() -> None:
    agent = alone(1)
    ballot = Ballot(1, 0)
    assert agent.step(MessageReceived(member(0).nonce, Prepare(ballot, 1)), 1.0) == [Freeze(1)]
    groups = (GroupState(7, 3, 4),)
    board, promise = agent.step(Frozen(1, groups), 1.0)
    assert board == WriteBoard(BoardState(first(3), ballot, NO_BALLOT, None))
    assert promise == Send(member(0), Promise(ballot, 1, NO_BALLOT, None, groups))


def test_a_promise_is_refused_to_lower_ballots_and_repeated_for_the_same() -> None:
    agent = alone(1)
    agent.step(MessageReceived(member(2).nonce, Prepare(Ballot(5, 2), 1)), 1.0)
    agent.step(Frozen(1, ()), 1.0)
    effects = agent.step(MessageReceived(member(0).nonce, Prepare(Ballot(4, 0), 1)), 1.0)
    assert sent(effects, Nack) == [Nack(Ballot(4, 0), 1, Ballot(5, 2))]
    again = agent.step(MessageReceived(member(2).nonce, Prepare(Ballot(5, 2), 1)), 1.0)
    assert len(sent(again, Promise)) == 1
    assert not any(isinstance(effect, WriteBoard | Freeze) for effect in again)


def test_an_acceptance_is_on_the_board_before_it_is_told_and_in_later_promises() -> None:
    agent = alone(1)
    decision = Decision(2, (member(0), member(1)), (Removal(2, 1, DEAD),))
    board, answer = agent.step(MessageReceived(member(0).nonce, Accept(Ballot(1, 0), 1, decision)), 1.0)
    assert board == WriteBoard(BoardState(first(3), Ballot(1, 0), Ballot(1, 0), decision))
    assert answer == Send(member(0), Accepted(Ballot(1, 0), 1))
    agent.step(MessageReceived(member(2).nonce, Prepare(Ballot(2, 2), 1)), 1.0)
    (promise,) = sent(agent.step(Frozen(1, ()), 1.0), Promise)
    assert (promise.accepted_ballot, promise.accepted) == (Ballot(1, 0), decision)


@pytest.mark.parametrize(
    "message",
    [
        Prepare(Ballot(9, 2), 1),  # a ballot of slot 2 from slot 0
        Accept(Ballot(9, 2), 1, Decision(2, (member(0),))),
        Accept(Ballot(9, 0), 1, Decision(3, (member(0),))),  # skips an epoch
        Promise(Ballot(1, 1), 1, NO_BALLOT, None, ()),  # nobody asked
        Accepted(Ballot(1, 1), 1),
        Nack(Ballot(1, 1), 1, Ballot(9, 9)),
        Commit((Decision(1, ()),)),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_message_that_cannot_be_right_changes_nothing(message: object) -> None:
    agent = alone(1)
    assert agent.step(MessageReceived(member(0).nonce, message), 1.0) == []
    assert (agent.promised, agent.accepted, agent.epoch) == (NO_BALLOT, None, 1)


def test_strangers_are_not_heard() -> None:
    agent = alone(1)
    stranger = member(0, tag=9).nonce
    lie = Decision(2, (member(1),), (Removal(0, 1, DEAD), Removal(2, 1, DEAD)))
    for message in (Prepare(Ballot(3, 0), 1), Accept(Ballot(3, 0), 1, lie), Commit((lie,)), Join(member(2, 0, 8))):
        assert agent.step(MessageReceived(stranger, message), 1.0) == []
    assert agent.epoch == 1


def test_a_death_is_agreed_on_without_time_passing() -> None:
    group = Group(4)
    group.kill(member(3))
    group.run()
    assert group.views() == {(2, ((0, 1), (1, 1), (2, 1)))}
    assert [d.removed for d in group.decisions(member(2))] == [(Removal(3, 1, DEAD),)]


def test_the_death_of_the_coordinator_is_no_different() -> None:
    group = Group(4)
    group.kill(member(0))
    group.run()
    assert group.views() == {(2, ((1, 1), (2, 1), (3, 1)))}


def test_deaths_within_the_window_leave_by_one_decision() -> None:
    group = Group(5, AgentSettings(policy="evict", death_window_s=1.0))
    group.kill(member(0))
    group.late(0.5)
    assert group.views() == {(1, tuple((slot, 1) for slot in range(5)))}
    group.kill(member(3))
    group.late(0.6)
    assert group.views() == {(2, ((1, 1), (2, 1), (4, 1)))}
    assert not any(isinstance(effect, NoQuorum) for told in group.told.values() for effect in told)


def test_a_window_longer_than_a_lack_of_quorum_is_not_taken_for_one() -> None:
    group = Group(3, AgentSettings(policy="evict", death_window_s=3.0, no_quorum_s=0.5))
    group.kill(member(2))
    group.late(2.5)
    assert group.views() == {(1, ((0, 1), (1, 1), (2, 1)))}
    group.late(0.6)
    assert group.views() == {(2, ((0, 1), (1, 1)))}
    assert not any(isinstance(effect, NoQuorum) for told in group.told.values() for effect in told)


def test_eight_members_go_one_after_the_other_to_one() -> None:
    group = Group(8)
    for slot in (0, 3, 7, 1, 2, 6, 4):
        group.kill(member(slot))
        group.late(1.0)
    assert group.views() == {(8, ((5, 1),))}


def test_three_of_four_at_once_leave_one_that_goes_on() -> None:
    group = Group(4)
    group.kill(member(0), member(1), member(3))
    group.late(2.0)
    assert {slots for _, slots in group.views()} == {((2, 1),)}


def test_a_coordinator_that_dies_between_phases_hands_its_proposal_over_by_its_board() -> None:
    group = Group(4)
    group.kill(member(3))
    while not isinstance(group.wire[0][2], Accept):
        sender, to, message = group.wire.pop(0)
        if to.nonce not in group.dead:
            group.post(to, MessageReceived(sender, message))
    group.wire.clear()
    proposed = group.boards[member(0).nonce].accepted
    assert proposed is not None
    group.kill(member(0))
    group.late(1.0)
    decided = group.decisions(member(1))
    assert decided[0] == proposed
    assert [m.slot for m in decided[1].members] == [1, 2]


def test_a_half_without_the_lowest_slot_cannot_decide_and_says_so() -> None:
    group = Group(4)
    group.stopped |= {member(0).nonce, member(1).nonce}
    for by in (2, 3):
        group.post(member(by), Accused(0, 1, 7, 1, NOW))
        group.post(member(by), Accused(1, 1, 7, 1, NOW))
    group.late(0.5)
    for _ in range(10):
        for by in (2, 3):
            group.post(member(by), Accused(0, 1, 7, 1, NOW))
        group.late(0.5)
    assert group.views() == {(1, ((0, 1), (1, 1), (2, 1), (3, 1)))}
    assert group.told[member(2).nonce] == [NoQuorum(1)]


def test_the_half_with_the_lowest_slot_goes_on_and_the_others_learn_that_they_are_out() -> None:
    group = Group(4)
    group.stopped |= {member(2).nonce, member(3).nonce}
    for by in (0, 1):
        for slot in (2, 3):
            group.post(member(by), Accused(slot, 1, 7, 1, NOW))
    group.late(0.5)
    assert group.views() == {(2, ((0, 1), (1, 1)))}
    group.stopped.clear()
    group.now += 30.0
    group.post(member(3), Tick())
    group.run()
    assert group.told[member(3).nonce] == [Evicted(2, STALLED)]
    assert group.agents[member(3).nonce].ended


def test_two_that_accuse_each_other_end_in_one_view() -> None:
    group = Group(4)
    group.post(member(1), Accused(3, 1, 7, 1, NOW))
    group.post(member(3), Accused(1, 1, 7, 1, NOW))
    group.late(1.0)
    assert group.views() == {(2, ((0, 1), (1, 1), (2, 1)))}


def test_an_accusation_from_before_a_decision_that_was_not_taken_over_does_not_count() -> None:
    """Rank 0 has moved on to the new view, so it looks silent to rank 2, which has not: it must not be voted out."""
    group = Group(3)
    for by in (0, 2):
        group.post(member(by), Accused(1, 1, 7, 1, 1))
    group.late(0.5)
    assert group.views() == {(2, ((0, 1), (2, 1)))}
    group.post(member(2), Accused(0, 1, 7, 1, 1))
    group.late(0.5)
    assert group.views() == {(2, ((0, 1), (2, 1)))}
    group.post(member(2), Accused(0, 1, 7, 1, 2))
    group.late(0.5)
    assert group.views() == {(3, ((2, 1),))}


@pytest.mark.parametrize("policy", ["error", "wait"])
def test_accusations_change_nothing_unless_the_policy_is_to_evict(policy: str) -> None:
    group = Group(3, AgentSettings(policy=policy))
    group.post(member(0), Accused(2, 1, 7, 1, NOW))
    group.post(member(1), Report(1, ()) and Accused(2, 1, 7, 1, NOW))
    group.late(2.0)
    assert group.views() == {(1, ((0, 1), (1, 1), (2, 1)))}
    assert not group.wire


def test_cuts_and_starts_come_from_those_who_stay() -> None:
    group = Group(3)
    group.groups = {member(slot).nonce: (GroupState(7, done, done + 2),) for slot, done in enumerate((4, 5, 90))}
    group.post(member(0), Accused(2, 1, 7, 6, NOW))
    group.late(0.3)
    (decision,) = group.decisions(member(1))
    assert [(cut.group_id, cut.seq) for cut in decision.cuts] == [(7, 5)]
    assert decision.starts == (Start(7, 8),)


def test_who_is_removed_as_dead_is_told() -> None:
    """It costs nothing if it is dead. Should the proof have been wrong it must not go on in a view of its own."""
    group = Group(3)
    group.kill(member(2))
    group.dead.clear()
    group.run()
    assert group.told[member(2).nonce] == [Evicted(2, DEAD)]
    assert group.views() == {(2, ((0, 1), (1, 1)))}


def test_a_member_that_does_not_freeze_delays_no_death_but_a_join() -> None:
    group = Group(4)
    group.holding.add(member(2).nonce)
    group.kill(member(3))
    group.run()
    assert {epoch for epoch, _ in group.views()} == {2}
    joiner = member(3, 0, 5)
    group.add(joiner)
    group.post(joiner, JoinAsked((member(0), member(1), member(2))))
    group.late(0.3)
    assert all(len(agent.decided.members) == 3 for agent in group.live() if agent.epoch)
    group.holding.clear()
    group.post(member(2), Frozen(group.agents[member(2).nonce].epoch, ()))
    group.late(2.0)
    assert all(len(agent.decided.members) == 4 for agent in group.live())


def test_a_joiner_gets_a_higher_incarnation_and_everybody_the_same_view() -> None:
    group = Group(3)
    group.kill(member(1))
    group.run()
    joiner = member(1, 0, 5)
    group.add(joiner)
    group.post(joiner, JoinAsked((member(0), member(2))))
    group.late(0.3)
    ((epoch, slots),) = group.views()
    assert (epoch, [slot for slot, _ in slots]) == (3, [0, 1, 2])
    assert dict(slots)[1] > 1
    assert group.agents[joiner.nonce].me.incarnation == dict(slots)[1]


def test_a_group_grows_beyond_its_first_size() -> None:
    group = Group(2)
    for slot in (2, 3):
        joiner = member(slot, 0, 5)
        group.add(joiner)
        group.post(joiner, JoinAsked((member(0),)))
    group.late(1.0)
    ((_, slots),) = group.views()
    assert [slot for slot, _ in slots] == [0, 1, 2, 3]


def test_of_two_claimants_one_wins_and_the_other_is_refused() -> None:
    group = Group(3)
    group.kill(member(2))
    group.run()
    claimants = [member(2, 0, 5), member(2, 0, 6)]
    for number, joiner in enumerate(claimants):
        group.add(joiner)
        group.post(joiner, JoinAsked((member(number),)))
    group.late(2.5)
    ends = sorted(type(effect).__name__ for joiner in claimants for effect in group.told[joiner.nonce])
    assert ends == ["Decide", "Refused"]


def test_the_slot_of_a_live_member_is_taken() -> None:
    group = Group(3)
    joiner = member(2, 0, 5)
    group.add(joiner)
    group.post(joiner, JoinAsked((member(0), member(1), member(2))))
    group.late(1.5)
    assert group.told[joiner.nonce] == [Refused("slot taken")]
    assert {epoch for epoch, _ in group.views()} == {1}


def test_a_silent_occupant_is_replaced_in_the_same_change() -> None:
    group = Group(3, AgentSettings(policy="error"))
    group.stopped.add(member(2).nonce)
    joiner = member(2, 0, 5)
    group.add(joiner)
    group.post(joiner, JoinAsked((member(0), member(1))))
    group.late(3.0)
    decision = group.decisions(member(0))[-1]
    assert decision.removed == (Removal(2, 1, STALLED),)
    assert [m.nonce for m in decision.members if m.slot == 2] == [joiner.nonce]


def test_a_joiner_waits_for_a_user_where_that_is_the_setting() -> None:
    group = Group(2, AgentSettings(admit="ask"))
    joiner = member(2, 0, 5)
    group.add(joiner)
    group.post(joiner, JoinAsked((member(0), member(1))))
    group.late(1.0)
    assert {epoch for epoch, _ in group.views()} == {0, 1}
    group.post(member(1), Admit((2,)))
    group.late(1.0)
    assert {epoch for epoch, _ in group.views()} == {2}


def test_a_waiting_joiner_is_told_of_once() -> None:
    agent = alone(1, settings=AgentSettings(admit="ask"))
    joiner = member(3, 0, 5)
    assert agent.step(MessageReceived(joiner.nonce, Join(joiner)), 1.0) == [JoinPending(joiner)]
    assert agent.step(MessageReceived(joiner.nonce, Join(joiner)), 1.1) == []


def test_who_leaves_is_no_longer_asked() -> None:
    group = Group(3)
    group.post(member(1), LeaveAsked())
    group.dead.add(member(1).nonce)
    group.run()
    assert group.views() == {(2, ((0, 1), (2, 1)))}
    assert group.decisions(member(0))[0].removed == (Removal(1, 1, LEFT),)


def test_decisions_come_in_order_and_once_whatever_is_repeated() -> None:
    agent = alone(2)
    second = Decision(2, (member(0), member(2)), (Removal(1, 1, DEAD),))
    third = Decision(3, (member(2),), (Removal(0, 1, DEAD),))
    told = []
    for decisions in ((third,), (second, third), (second,), (third,)):
        effects = agent.step(MessageReceived(member(0).nonce, Commit(decisions)), 1.0)
        told += [effect.decision for effect in effects if isinstance(effect, Decide)]
    assert told == [second, third]
    assert all(earlier.epoch + 1 == later.epoch for earlier, later in pairwise(told))


def test_a_decision_thaws_what_was_frozen_and_nothing_else() -> None:
    agent = alone(2)
    agent.step(MessageReceived(member(0).nonce, Prepare(Ballot(1, 0), 1)), 1.0)
    agent.step(Frozen(1, ()), 1.0)
    second = Decision(2, (member(0), member(2)), (Removal(1, 1, DEAD),))
    effects = agent.step(MessageReceived(member(0).nonce, Commit((second,))), 1.0)
    assert [type(effect) for effect in effects] == [WriteBoard, Decide, Thaw]
    third = second._replace(epoch=3, removed=())
    effects = agent.step(MessageReceived(member(0).nonce, Commit((third,))), 1.0)
    assert [type(effect) for effect in effects] == [WriteBoard, Decide]


def test_lanes_that_froze_too_late_are_not_promised() -> None:
    agent = alone(2)
    agent.step(MessageReceived(member(0).nonce, Prepare(Ballot(1, 0), 1)), 1.0)
    agent.step(MessageReceived(member(0).nonce, Commit((first(3)._replace(epoch=2),))), 1.0)
    assert agent.step(Frozen(1, ()), 1.0) == []
    assert agent.promised == NO_BALLOT


def test_an_asker_that_lags_gets_what_it_lacks() -> None:
    agent = alone(1)
    second = first(3)._replace(epoch=2)
    agent.step(MessageReceived(member(0).nonce, Commit((second,))), 1.0)
    for message in (Ask(1), Prepare(Ballot(1, 0), 1), Report(1, ())):
        assert sent(agent.step(MessageReceived(member(0).nonce, message), 1.0), Commit) == [Commit((second,))]
    ahead = agent.step(MessageReceived(member(0).nonce, Prepare(Ballot(1, 0), 5)), 1.0)
    assert ahead == [Send(member(0), Ask(2))]


def test_a_decision_is_found_on_the_board_of_the_dead() -> None:
    agent = alone(1)
    second = first(3)._replace(epoch=2)
    agent.step(Died(member(0).nonce), 1.0)
    effects = agent.step(BoardRead(member(0).nonce, BoardState(second, NO_BALLOT, NO_BALLOT, None)), 1.0)
    assert Decide(second) in effects


def test_a_board_that_cannot_be_read_makes_no_witness() -> None:
    group = Group(2)
    group.dead.add(member(0).nonce)
    del group.boards
    agent = group.agents[member(1).nonce]
    agent.step(Died(member(0).nonce), group.now)
    agent.step(BoardRead(member(0).nonce, None), group.now)
    agent.step(Frozen(1, ()), group.now)
    assert agent.epoch == 1, "one of two, and not the lowest, without the other's board"


def test_a_clock_that_jumps_makes_nobody_silent() -> None:
    group = Group(3)
    group.kill(member(2))
    group.post(member(1), Tick())
    group.now += 1e6
    effects = group.agents[member(1).nonce].step(Tick(), group.now)
    assert not any(isinstance(effect, NoQuorum) for effect in effects)
    group.agents[member(1).nonce].step(Tick(), 3.0)
    group.late(1.0)
    assert {epoch for epoch, _ in group.views()} == {2}


def test_lost_messages_are_sent_again() -> None:
    group = Group(3)
    group.kill(member(2))
    group.wire.clear()
    group.late(0.5)
    assert group.views() == {(2, ((0, 1), (1, 1)))}


def joining() -> tuple[Agent, Decision, Decision]:
    """Return a joiner of slot 3 that has asked, the decision that takes it in, and the one after it."""
    joiner = member(3, 0, 5)
    agent = Agent(joiner, EVICT)
    asked = agent.step(JoinAsked((member(0), member(1))), 1.0)
    assert [message.member for message in sent(asked, Join)] == [joiner, joiner]
    members = (*first(3).members, joiner._replace(incarnation=2))
    second = Decision(2, members, starts=(Start(7, 6),))
    third = Decision(3, members[1:], (Removal(0, 1, DEAD),))
    return agent, second, third


def test_a_joiner_begins_with_the_decision_that_took_it_in() -> None:
    agent, second, third = joining()
    assert agent.step(MessageReceived(member(0).nonce, Commit((third,))), 1.0) == [Send(member(0), Ask(1))]
    effects = agent.step(MessageReceived(member(0).nonce, Commit((second, third))), 1.0)
    assert [effect.decision for effect in effects if isinstance(effect, Decide)] == [second, third]
    assert agent.me.incarnation == 2


def test_a_joiner_finds_itself_on_the_board_of_a_contact_that_died() -> None:
    agent, second, _ = joining()
    agent.step(Died(member(0).nonce), 1.0)
    effects = agent.step(BoardRead(member(0).nonce, BoardState(second, NO_BALLOT, NO_BALLOT, None)), 1.0)
    assert Decide(second) in effects


def test_a_joiner_that_was_refused_by_who_is_on_its_way_out_may_still_come_in() -> None:
    agent, second, _ = joining()
    assert agent.step(MessageReceived(member(1).nonce, JoinRefused(3, agent.me.nonce, "slot taken")), 1.0) == []
    assert Decide(second) in agent.step(MessageReceived(member(0).nonce, Commit((second,))), 1.1)
    other, _, _ = joining()
    other.step(MessageReceived(member(1).nonce, JoinRefused(3, other.me.nonce, "slot taken")), 1.0)
    assert other.step(Tick(), 1.0 + EVICT.answer_s) == []
    told = [effect for tick in range(9) for effect in other.step(Tick(), 1.1 + tick / 10)]
    assert told == [Refused("slot taken")]
    assert other.ended


def test_a_joiner_promises_no_calls_that_came_before_it() -> None:
    agent, second, _ = joining()
    agent.step(MessageReceived(member(0).nonce, Commit((second,))), 1.0)
    agent.step(MessageReceived(member(0).nonce, Prepare(Ballot(1, 0), 2)), 1.0)
    (promise,) = sent(agent.step(Frozen(2, (GroupState(7, 5, 6), GroupState(9, 2, 2))), 1.0), Promise)
    assert promise.groups == (GroupState(7, 0, 6), GroupState(9, 2, 2))


def test_a_board_of_a_later_epoch_is_no_witness_of_this_one() -> None:
    agent = alone(0, 2)
    agent.step(Died(member(1).nonce), 1.0)
    far = BoardState(first(2)._replace(epoch=4), NO_BALLOT, NO_BALLOT, None)
    agent.step(BoardRead(member(1).nonce, far), 1.0)
    assert not agent.boards
