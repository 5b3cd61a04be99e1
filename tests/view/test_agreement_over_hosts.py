"""Agents of several hosts: obituaries, lost hosts, cuts and their holders. No processes."""

from __future__ import annotations

from epee.view.protocol.agent import BLANK_BOARD, Agent
from epee.view.protocol.decision import choose_lost, compose
from epee.view.protocol.events import (
    AgentSettings,
    BoardRead,
    Decide,
    Died,
    Freeze,
    Frozen,
    HostLost,
    LeaveAsked,
    MessageReceived,
    ReadBoard,
    Send,
    Tick,
)
from epee.view.protocol.messages import (
    DEAD,
    LEFT,
    NO_BALLOT,
    STALLED,
    UNREACHABLE,
    Accept,
    Ballot,
    BoardState,
    Cut,
    Decision,
    GroupState,
    Member,
    Message,
    Nack,
    Obituary,
    Prepare,
    Promise,
    Removal,
    Report,
)
from epee.view.protocol.outcome import holder_of
from epee.view.protocol.proposer import Campaign, Findings

LANE = 7
WAIT = AgentSettings(policy="wait")


def over(hosts: str) -> Decision:
    members = (Member(slot, 1, bytes([slot]) * 16, b"", host) for slot, host in enumerate(hosts))
    return Decision(1, tuple(members))


def told(*completed: int) -> dict[int, tuple[GroupState, ...]]:
    return {slot: (GroupState(LANE, seq, seq),) for slot, seq in enumerate(completed)}


def agent(slot: int, hosts: str) -> Agent:
    made = Agent(over(hosts).members[slot], WAIT, over(hosts))
    made.step(Tick(), 0.0)
    return made


def board(promised: Ballot = NO_BALLOT) -> BoardState:
    return BoardState(Decision(1, ()), promised, NO_BALLOT, None)


def sent(effects: list[object], kind: type) -> list[tuple[int, object]]:
    return [(e.to.slot, e.message) for e in effects if isinstance(e, Send) and isinstance(e.message, kind)]


def campaign(hosts: str, promised: tuple[int, ...]) -> Campaign:
    made = Campaign(Ballot(3, 0), over(hosts))
    for slot in promised:
        made.note_promise(slot, Promise(Ballot(3, 0), 1, NO_BALLOT, None, (GroupState(LANE, 4, 5),)))
    return made


CALM = Findings({}, {}, {}, (), frozenset(), (), 0.0, 0.0)


def test_who_has_read_the_board_of_a_dead_one_tells_other_hosts_and_no_others() -> None:
    one = agent(1, "aaabb")
    dead = over("aaabb").members[2]
    effects = one.step(Died(dead.nonce), 0.0)
    assert [e.member for e in effects if isinstance(e, ReadBoard)] == [dead]
    assert sent(effects, Obituary) == []
    effects = one.step(BoardRead(dead.nonce, BLANK_BOARD._replace(decided=over("aaabb"))), 0.0)
    will = Obituary(dead.nonce, DEAD, board())
    assert sent(effects, Obituary) == [(3, will), (4, will)]
    assert sent(one.step(Tick(), 0.0), Obituary) == []
    again = [sent(one.step(Tick(), 0.1 * turn), Obituary) for turn in range(1, 6)]
    assert [each for each in again if each] == [[(3, will), (4, will)]]


def test_an_obituary_counts_as_a_look_at_the_board() -> None:
    one = agent(0, "abb")
    members = over("abb").members
    effects = one.step(MessageReceived(members[1].nonce, Obituary(members[2].nonce, DEAD, board(Ballot(9, 2)))), 0.0)
    assert one.gone == {2: DEAD}
    assert one.boards[2].promised == Ballot(9, 2)
    assert not any(isinstance(e, ReadBoard) for e in effects)


def test_nobody_speaks_for_the_dead_of_another_host_nor_for_those_of_ours() -> None:
    members = over("abbc").members
    for sender, victim in ((3, 2), (1, 0), (2, 2)):
        one = agent(0, "abbc")
        one.step(MessageReceived(members[sender].nonce, Obituary(members[victim].nonce, DEAD, board())), 0.0)
        assert one.gone == {}, (sender, victim)


def test_who_leaves_is_its_own_witness() -> None:
    last = agent(1, "ab")
    words = sent(last.step(LeaveAsked(), 0.0), Obituary)
    assert words == [(0, Obituary(last.me.nonce, LEFT, board()))]
    one = agent(0, "ab")
    effects = one.step(MessageReceived(last.me.nonce, words[0][1]), 0.0)  # type: ignore[arg-type]
    assert one.gone == {1: LEFT}
    assert set(one.boards) == {1}
    assert sent(effects, Prepare) == []  # nobody is left to be asked


def test_a_death_without_a_board_is_no_witness() -> None:
    one = agent(0, "abb")
    members = over("abb").members
    one.step(MessageReceived(members[1].nonce, Obituary(members[2].nonce, DEAD, None)), 0.0)
    assert one.gone == {2: DEAD}
    assert one.boards == {}


def test_a_lost_host_is_reported_with_all_its_members_whatever_the_policy() -> None:
    one = agent(1, "aabb")
    effects = one.step(HostLost("b"), 0.0)
    ((to, report),) = sent(effects, Report)
    assert to == 0
    assert report == Report(1, (Removal(2, 1, UNREACHABLE), Removal(3, 1, UNREACHABLE)))
    zero = agent(0, "aabb")
    effects = zero.step(MessageReceived(one.me.nonce, report), 0.0)  # type: ignore[arg-type]
    assert sorted(to for to, _ in sent(effects, Prepare)) == [1, 2, 3]
    assert not any(isinstance(e, Decide) for e in effects)


def test_a_lost_host_goes_as_a_whole_with_the_promises_of_those_who_stay() -> None:
    findings = CALM._replace(lost={"b": frozenset({0})}, may_evict=False)
    assert campaign("aabb", (0,)).choose(findings, 1.0, 2.0) is None
    decision = campaign("aabb", (0, 1)).choose(findings, 1.0, 2.0)
    assert decision is not None
    assert decision.removed == (Removal(2, 1, UNREACHABLE, "b"), Removal(3, 1, UNREACHABLE, "b"))
    assert decision.cuts == (Cut(LANE, 4, 0),)


def test_silent_members_of_other_hosts_stay_unless_the_policy_is_to_evict() -> None:
    findings = CALM._replace(lost={"c": frozenset({0})}, may_evict=False, waited_s=9.0)
    assert campaign("aabbc", (0, 1, 2)).choose(findings, 1.0, 2.0) is None
    findings = findings._replace(mute=frozenset({3}))
    assert campaign("aabbc", (0, 1, 2)).choose(findings, 1.0, 2.0) is None
    decision = campaign("aabbc", (0, 1, 2)).choose(findings._replace(may_evict=True), 1.0, 2.0)
    assert decision is not None
    assert [(r.slot, r.cause) for r in decision.removed] == [(3, STALLED), (4, UNREACHABLE)]


def test_a_lost_host_takes_with_it_only_who_has_been_silent_as_long_as_a_host_may_be() -> None:
    findings = CALM._replace(lost={"c": frozenset({0})}, waited_s=9.0)
    assert campaign("aabbbc", (0, 1, 2)).choose(findings._replace(mute=frozenset({3})), 1.0, 2.0) is None, (
        "4 may be slow"
    )
    decision = campaign("aabbbc", (0, 1, 2)).choose(findings._replace(mute=frozenset({3, 4})), 1.0, 2.0)
    assert decision is not None
    assert [r.slot for r in decision.removed] == [3, 4, 5]
    decision = campaign("aabbbc", (0, 1, 2, 3, 4)).choose(findings, 1.0, 2.0)
    assert decision is not None
    assert [r.slot for r in decision.removed] == [5]


def test_where_somebody_is_accused_the_silent_go_after_the_shorter_time() -> None:
    findings = CALM._replace(lost={"c": frozenset({0})}, accusers={3: frozenset({0})})
    assert campaign("aabbbc", (0, 1, 2)).choose(findings._replace(waited_s=1.9), 1.0, 2.0) is None
    decision = campaign("aabbbc", (0, 1, 2)).choose(findings._replace(waited_s=2.0), 1.0, 2.0)
    assert decision is not None
    assert [r.slot for r in decision.removed] == [3, 4, 5]
    on_lost = findings._replace(accusers={5: frozenset({0})}, waited_s=9.0)
    assert campaign("aabbbc", (0, 1, 2)).choose(on_lost, 1.0, 2.0) is None, "who is lost anyway stands for nobody else"


def patient(slot: int) -> Agent:
    settings = AgentSettings("evict", answer_s=0.1, wait_limit_s=0.8, silence_s=3.0)
    made = Agent(over("abc").members[slot], settings, over("abc"))
    made.step(Tick(), 0.0)
    return made


def lose(one: Agent, since: float, until: float, answers: dict[float, Message]) -> list[Decision]:
    """Let slot 0 lose host c from `since` on, and slot 1 answer at certain times; return the decisions of 0."""
    found: list[Decision] = []
    for turn in range(round(since * 20), round(until * 20)):
        now = turn / 20
        effects = list(one.step(HostLost("c"), now))
        if now in answers:
            effects += one.step(MessageReceived(over("abc").members[1].nonce, answers[now]), now)
        if any(isinstance(e, Freeze) for e in effects):
            effects += one.step(Frozen(1, ()), now)
        found += [e.message.decision for e in effects if isinstance(e, Send) and isinstance(e.message, Accept)]
    return found


def test_a_living_slow_member_is_waited_for_when_another_host_is_lost() -> None:
    one = patient(0)
    assert lose(one, 0.05, 2.5, {}) == []
    decisions = lose(one, 2.5, 2.6, {2.5: Promise(Ballot(1, 0), 1, NO_BALLOT, None, ())})
    assert [r.slot for r in decisions[0].removed] == [2]


def test_silence_counts_over_the_ballots_that_a_rival_ends() -> None:
    """Slot 1 is stopped, and delays the removal of host c by no more; slot 3 promises a rival's ballots between."""
    settings = AgentSettings("evict", answer_s=0.1, wait_limit_s=0.8, silence_s=3.0)
    one = Agent(over("abcb").members[0], settings, over("abcb"))
    one.step(Tick(), 0.0)
    nonce = over("abcb").members[3].nonce
    ballots: list[Ballot] = []
    decided: list[Decision] = []
    for turn in range(1, 90):
        now = turn / 20
        effects = list(one.step(HostLost("c"), now))
        if any(isinstance(e, Freeze) for e in effects):
            effects += one.step(Frozen(1, ()), now)
        asked = [
            e.message for e in effects if isinstance(e, Send) and e.to.slot == 3 and isinstance(e.message, Prepare)
        ]
        for message in asked:
            if message.ballot not in ballots:
                ballots.append(message.ballot)
                answer = Promise(message.ballot, 1, NO_BALLOT, None, ())
            elif now < 2.8:
                answer = Nack(message.ballot, 1, Ballot(message.ballot.round + 1, 2))
            effects += one.step(MessageReceived(nonce, answer), now)
        decided += [e.message.decision for e in effects if isinstance(e, Send) and isinstance(e.message, Accept)]
        if decided:
            assert 3.0 <= now <= 3.6
            break
    assert len(ballots) > 5
    assert [r.slot for r in decided[0].removed] == [1, 2]


def test_over_hosts_the_dead_go_with_the_promises_of_all_who_stay() -> None:
    findings = CALM._replace(gone={3: DEAD}, boards={3: board()}, waited_s=9.0)
    assert campaign("aabb", (0, 1)).choose(findings, 1.0, 2.0) is None
    assert campaign("aaaa", (0, 1)).choose(findings, 1.0, 2.0) is not None
    assert campaign("aabb", (0, 1, 2)).choose(findings, 1.0, 2.0) is not None


def test_who_may_answer_is_waited_for_before_a_host_is_chosen() -> None:
    """Slots 1 and 2 say that they cannot reach 3, which has answered first."""
    findings = CALM._replace(lost={"c": frozenset({1, 2})})
    assert campaign("abbc", (0, 3)).choose(findings, 1.0, 2.0) is None
    decision = campaign("abbc", (0, 1, 2, 3)).choose(findings, 1.0, 2.0)
    assert decision is not None
    assert [removal.slot for removal in decision.removed] == [3]


def test_which_host_goes() -> None:
    def lost(hosts: str, accusers: dict[str, list[int]], answered: tuple[int, ...]) -> set[str]:
        return choose_lost(dict(enumerate(hosts)), accusers, answered)

    assert lost("aabb", {"b": [0], "a": [2]}, (0, 1)) == {"b"}
    assert lost("abbb", {"b": [0]}, (0,)) == {"b"}, "whoever answers stays, be it the smaller"
    assert lost("aaabc", {"b": [0], "c": [1]}, (0, 1, 2)) == {"b", "c"}, "a switch has failed"
    assert lost("abbc", {"b": [3]}, (0, 1, 2, 3)) == {"c"}, "the smaller, whoever says it"
    assert lost("ab", {"c": [0], "a": [9]}, ()) == set()


def test_cuts_name_the_lowest_who_has_completed_that_call() -> None:
    decision = compose(over("aabb"), told(4, 6, 6, 5), {3: DEAD})
    assert decision.cuts == (Cut(LANE, 6, 1),)
    assert holder_of(decision, LANE) == 1
    assert holder_of(decision, LANE + 1) == -1
    assert compose(over("aaaa"), told(4, 6, 6), {3: DEAD}).cuts == ()
    assert compose(over("aaaa"), told(4, 6, 6), {}, {3: STALLED}).cuts == (Cut(LANE, 6, -1),)
