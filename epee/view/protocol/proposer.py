"""The active part of an agent: it notices that the view must change, notifies the coordinator or is the coordinator.

Every agent that knows of a cause acts, the lowest live slot at once and the others later, each at its own time, so that
one of them succeeds when those before it are silent. A ballot of another agent restarts the wait.

Time is counted inside: a step may be late or a clock may jump (a suspended machine, a stopped process), and a time in
which this process did not run does not count as silence of the others.

A ballot is a `Campaign`; the join requests that an agent knows of are its `Joins`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from .decision import (
    BLANK,
    choose_evicted,
    choose_lost,
    compose,
    has_quorum,
    highest_accepted,
    highest_promise,
    spans_hosts,
    without,
)
from .events import Accused, AgentSettings, Effect, HostLost, NoQuorum, Refused, Send, Wanted
from .messages import (
    MAX_PARTS,
    NO_BALLOT,
    SLOT_TAKEN,
    STALLED,
    UNREACHABLE,
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
    Member,
    Message,
    Nack,
    Obituary,
    Prepare,
    Promise,
    Removal,
    Report,
    Want,
)


class Findings(NamedTuple):
    """The input of a campaign from the agent, for the members of the current epoch.

    Attributes:
        gone: slots that are dead or have left, with the cause.
        boards: the states that their boards showed after their end; no entry where a board was not read.
        accusers: accused slot -> the slots that accuse it; empty unless the policy is to evict.
        joiners: the processes that may join, in order of preference.
        replaced: occupants of joiners' slots that do not answer; they are removed if they stay silent.
        wants: the requested changes of membership in single groups, one per group.
        waited_s: the time for which this ballot has run.
        join_wait_s: the time it may wait for the promises of all members where only joiners or wants need them.
        lost: host that some member cannot reach -> the slots that cannot reach it.
        may_evict: members that are silent for long may be removed (the policy is to evict).
        mute: slots that were asked and have answered nothing for as long as a host may be silent.
    """

    gone: dict[int, str]
    boards: dict[int, BoardState]
    accusers: dict[int, frozenset[int]]
    joiners: tuple[Member, ...]
    replaced: frozenset[int]
    wants: tuple[Want, ...]
    waited_s: float
    join_wait_s: float
    lost: Mapping[str, frozenset[int]] = MappingProxyType({})
    may_evict: bool = True
    mute: frozenset[int] = frozenset()


class Campaign:
    """A ballot for the epoch after `current`: the coordinator's side of one attempt to agree on the next view.

    Phase 1 collects promises, phase 2 acceptances. A decision that was accepted before, here or on the board of a dead
    member, is proposed again; only where there is none may the coordinator compose a decision of its own. The class
    stores the answers and derives the next step. It sends nothing and has no clock: the agent does both, and asks again
    whenever something has changed.

    A coordinator that dies leaves members that have promised (their groups are frozen) and perhaps accepted; the next
    coordinator finds both, or the boards of those that died with it.
    """

    def __init__(self, ballot: Ballot, current: Decision) -> None:
        self.ballot = ballot
        self.current = current
        self.slots = frozenset(member.slot for member in current.members)
        self.promises: dict[int, tuple[GroupState, ...]] = {}
        self.acks: set[int] = set()
        self.proposal: Decision | None = None
        self._adopted: tuple[Ballot, Decision | None] = (Ballot(0, -1), None)

    def note_promise(self, slot: int, promise: Promise) -> None:
        """Count a promise of this ballot; idempotent."""
        if slot not in self.promises:
            self.promises[slot] = promise.groups
            if promise.accepted is not None and promise.accepted_ballot > self._adopted[0]:
                self._adopted = (promise.accepted_ballot, promise.accepted)

    def note_accepted(self, slot: int) -> None:
        """Count an acceptance of this ballot."""
        if self.proposal is not None:
            self.acks.add(slot)

    def lost_to(self, findings: Findings) -> Ballot | None:
        """Return the higher ballot that a dead member had promised, which ends this one; None if there is none."""
        promised = highest_promise(findings.boards, self.current.epoch)
        return promised if promised > self.ballot else None

    def is_chosen(self, findings: Findings) -> bool:
        """Return whether a quorum has accepted the proposal."""
        return self.proposal is not None and self._quorum(self.acks, findings)

    def choose(self, findings: Findings, answer_s: float, wait_limit_s: float) -> Decision | None:
        """Return the decision to propose now, None while more must be known."""
        if not self._quorum(self.promises, findings):
            return None
        adopted = max(self._adopted, highest_accepted(findings.boards, self.current.epoch), key=lambda pair: pair[0])
        if adopted[1] is not None:
            return adopted[1]
        return self._compose(findings, answer_s, wait_limit_s)

    def _quorum(self, acks: set[int] | dict[int, tuple[GroupState, ...]], findings: Findings) -> bool:
        return has_quorum(self.slots, findings.boards, acks)

    def _compose(self, findings: Findings, answer_s: float, wait_limit_s: float) -> Decision | None:
        """Compose a decision.

        Removing a live member and joins need the promise of every remaining member. So does, in a job over several
        hosts, removing a dead one (a group may have no member left on its host, and then its cut counts); a change in
        one group needs the promise of every member that takes part in it afterwards. A member that is put out need not
        answer, and a member that does not answer in time is put out where the want allows it. A lost host says nothing
        about members on other hosts, which may only be slow: they are removed with it once they have been silent as
        long as a host may be, or, where a member is accused, after `wait_limit_s`.
        """
        has_pull = any(state.is_pull for states in self.promises.values() for state in states)
        if has_pull and findings.waited_s < answer_s and not self.slots - findings.gone.keys() <= self.promises.keys():
            return None  # the call continues among the remaining members if all of them have begun it
        if findings.lost and findings.waited_s < answer_s and self._within_reach(findings) - self.promises.keys():
            return None  # a member that answers has precedence
        evicted = self._evicted(findings)
        accused = findings.accusers.keys() - findings.gone.keys()
        if len(accused) > 1 and findings.waited_s < answer_s and accused - self.promises.keys():
            return None  # of several accused members those that do not answer go first
        wanted = evicted | dict.fromkeys((slot for slot in findings.replaced if slot not in self.promises), STALLED)
        joiners = findings.joiners
        has_cuts = self._has_cuts(findings)
        silent = {s for s in self.slots if s not in findings.gone and s not in self.promises and s not in wanted}
        if any(silent.intersection(want.members) for want in findings.wants):
            may_wait_s = answer_s if findings.gone else max(answer_s, findings.join_wait_s)
            if findings.waited_s < may_wait_s:
                return None
        if silent and (wanted or joiners or has_cuts):
            if findings.waited_s < answer_s:
                return None
            if evicted and (has_cuts or not findings.gone):
                if findings.waited_s < wait_limit_s or not findings.may_evict:
                    return None
                if STALLED not in evicted.values() and silent - findings.mute:
                    return None
                wanted |= dict.fromkeys(silent, STALLED)
            elif has_cuts or (not findings.gone and findings.waited_s < findings.join_wait_s):
                return None
            else:
                wanted, joiners = {}, ()  # dead members are handled first; the rest waits for a later epoch
        unheard = self.slots - findings.gone.keys() - self.promises.keys() - wanted.keys()
        silent = (
            set(unheard) if findings.waited_s >= wait_limit_s else set()
        )  # a slow machine is no reason to remove a member
        left = (without(want, silent, findings.gone.keys() | wanted.keys(), self.current) for want in findings.wants)
        wants = tuple(want for want in left if want is not None and not unheard.intersection(want.members))
        return compose(self.current, self.promises, findings.gone, wanted, joiners, wants)

    def _has_cuts(self, findings: Findings) -> bool:
        """Return whether dead slots may count up to a cut, which no remaining member may move then."""
        return bool(findings.gone) and spans_hosts(self.current)

    def _within_reach(self, findings: Findings) -> set[int]:
        """Return the slots that have not failed or left and run on hosts that the coordinator itself can reach."""
        away = {host for host, by in findings.lost.items() if self.ballot.slot in by}
        return {m.slot for m in self.current.members if m.slot not in findings.gone and m.host not in away}

    def _evicted(self, findings: Findings) -> dict[int, str]:
        """Return the members to remove alive, with causes: all members of lost hosts, and else the worst connected
        ones."""
        hosts = {member.slot: member.host for member in self.current.members if member.slot not in findings.gone}
        lost = choose_lost(hosts, findings.lost, self.promises)
        evicted = {slot: UNREACHABLE for slot, host in hosts.items() if host in lost}
        live = hosts.keys() - evicted.keys()
        return evicted | dict.fromkeys(choose_evicted(live, findings.accusers, self.promises), STALLED)


MAX_PENDING = 256


class Request:
    """A pending join. Times are the agent's.

    Attributes:
        admitted: it may be proposed; else a user has to admit it first.
        not_before: time from which on it may be proposed.
        tries: how often it was proposed in vain, because a member did not answer.
        probed: time at which the occupant of its slot was first asked for a sign of life.
        probe_again: the request was repeated since the occupant was last asked; the question may have been lost, or
        have arrived before a new occupant knew that it is one.
    """

    def __init__(self, member: Member, now: float, admitted: bool) -> None:
        self.member = member
        self.heard = now
        self.admitted = admitted
        self.not_before = now
        self.tries = 0
        self.probed: float | None = None
        self.probe_again = False
        self.occupant_lives = False


class Joins:
    """The requests that one agent knows of, in order of arrival.

    A joiner repeats its request to every member that it knows of. A request that is not repeated is dropped, so no
    member waits for a joiner that died. Its slot must be free: without an occupant, or with one that is dead, has left
    or is being evicted. An occupant that seems alive is asked for a sign of life; if it answers the joiner is refused,
    if it stays silent for long it is replaced (a process restarted faster than its predecessor's death was seen).
    """

    def __init__(self) -> None:
        self.requests: dict[bytes, Request] = {}

    def note(self, member: Member, now: float, admitted: bool) -> bool:
        """Store a request or its repetition; True when it is new. More than `MAX_PENDING` are not stored."""
        request = self.requests.get(member.nonce)
        if request is not None:
            request.heard = now
            request.admitted |= admitted
            request.probe_again = True
            return False
        if len(self.requests) >= MAX_PENDING:
            return False
        self.requests[member.nonce] = Request(member, now, admitted)
        return True

    def expire(self, before: float) -> None:
        """Drop requests that were not repeated since `before`."""
        stale = [nonce for nonce, request in self.requests.items() if request.heard < before]
        for nonce in stale:
            del self.requests[nonce]

    def drop(self, nonce: bytes) -> None:
        """Drop one request, if it exists."""
        self.requests.pop(nonce, None)

    def admit(self, slots: Collection[int]) -> None:
        """Mark the requests for these slots as admitted by a user."""
        for request in self.requests.values():
            if request.member.slot in slots:
                request.admitted = True

    def postpone(self, until: float) -> None:
        """Propose none of the present requests before `until`, because some member did not answer in time."""
        for request in self.requests.values():
            request.not_before = until
            request.tries += 1

    def num_tries(self) -> int:
        """Return the highest number of tries of the requests that may be proposed; each time it may take longer."""
        return max((request.tries for request in self.requests.values() if request.admitted), default=0)

    def heard_from(self, nonce: bytes, rank_table: Mapping[int, Member]) -> None:
        """Record a sign of life of a process that was asked because of a joiner."""
        for request in self.requests.values():
            occupant = rank_table.get(request.member.slot)
            if request.probed is not None and occupant is not None and occupant.nonce == nonce:
                request.occupant_lives = True

    def ready(
        self, now: float, rank_table: Mapping[int, Member], leaving: Collection[int], wait_limit_s: float
    ) -> tuple[list[Member], set[int]]:
        """Return the joiners that may be proposed now, and the silent occupants that they replace."""
        members: list[Member] = []
        replaced: set[int] = set()
        for request in self.requests.values():
            slot = request.member.slot
            if not request.admitted or now < request.not_before:
                continue
            if slot not in rank_table or slot in leaving:
                members.append(request.member)
            elif request.probed is not None and not request.occupant_lives and now - request.probed >= wait_limit_s:
                members.append(request.member)
                replaced.add(slot)
        return members, replaced

    def unprobed(self, rank_table: Mapping[int, Member], leaving: Collection[int]) -> list[Request]:
        """Return the admitted requests whose slot has an occupant that is to be asked, perhaps a second time."""
        return [
            request
            for request in self.requests.values()
            if request.admitted
            and (request.probed is None or request.probe_again)
            and request.member.slot in rank_table
            and request.member.slot not in leaving
        ]


NEVER = float("inf")


def obituary_of(member: Member, cause: str, board: BoardState | None) -> Obituary:
    """Return the message to other hosts about a member that writes no more; `board` was read after its end."""
    return Obituary(member.nonce, cause, board and board._replace(decided=Decision(board.decided.epoch, ())))


def _expire(accusers: dict[Any, dict[int, float]], before: float) -> None:
    """Drop accusations from `before`."""
    for accused in list(accusers):
        accusers[accused] = {by: t for by, t in accusers[accused].items() if t >= before}
        if not accusers[accused]:
            del accusers[accused]


class Proposer:
    """State of an agent, and its coordinator role. See `agent.Agent`.

    A base class: both roles change the same promise and the same decision, in one atomic step, and the simulator's
    mutants replace methods of either.
    """

    campaign_type = Campaign  # the simulator's mutants replace it

    def __init__(self, me: Member, settings: AgentSettings) -> None:
        self.me = me
        self.settings = settings
        self.ended = False
        self.next_tick = 0.0
        self.decided = BLANK
        self.epoch = 0
        self.members: dict[int, Member] = {}
        self.slot_of: dict[bytes, int] = {}
        self.promised = self.accepted_ballot = self._pending = NO_BALLOT
        self.accepted: Decision | None = None
        self.gone: dict[int, str] = {}
        self.boards: dict[int, BoardState] = {}
        self._read: set[int] = set()  # slots of `gone` whose boards this process has read itself
        self.joins = Joins()
        self._out: list[Effect] = []
        self._t = 0.0
        self._now: float | None = None
        self._groups: tuple[GroupState, ...] | None = None
        self._freezing = False
        self._contacts: dict[bytes, Member] = {}
        self._join_at = NEVER
        self._refusal = ""
        self._tries = 0  # decisions in a row that met no want, because a member did not answer
        self._no_wants_before = 0.0  # so that these do not delay the calls of all members repeatedly
        self._fresh_epoch()

    def _fresh_epoch(self) -> None:
        """Reset the state of the step out of one epoch; called when an epoch begins."""
        self.campaign: Campaign | None = None
        self._campaign_began = self._resend_at = 0.0
        self._highest = NO_BALLOT
        self._asked_at = 0.0
        self._owing: dict[int, float] = {}  # slot -> time since which a request for its promise is unanswered
        self._accusers: dict[int, dict[int, float]] = {}
        # host -> the slots that cannot reach it, with the time of the last report
        self._lost: dict[str, dict[int, float]] = {}
        self._mourned_at = 0.0
        self._dead_since: float | None = None  # when the first death of this epoch became known
        # group -> the first valid want, and the time of its last report
        self._wants: dict[int, tuple[Want, float]] = {}
        self._start_at: float | None = None
        self._report_at = 0.0
        self._trouble_since: float | None = None
        self._told_no_quorum = False

    def adopt(self, settings: AgentSettings) -> None:
        """Use other settings from the next step on."""
        self.settings = settings

    # ---- time

    def _advance_clock(self, now: float) -> None:
        if self._now is None:
            self._now = now
        passed = now - self._now
        due = max(0.0, self.next_tick - self._now) if self.next_tick != NEVER else 0.0
        allowed = due + 2 * self.settings.answer_s
        self._t += min(max(passed, 0.0), allowed)
        self._now = now
        if passed > allowed + self.settings.wait_limit_s and self.epoch:
            self._ask_everybody()  # this process may have been stopped, and evicted

    def _set_tick(self, now: float) -> None:
        """Compute when the next `Tick` is due."""
        answer_s, wait_limit_s = self.settings.answer_s, self.settings.wait_limit_s
        times = [NEVER]
        if not self.epoch:
            times.append(self._join_at)
        if self.campaign is not None:
            times.append(self._resend_at)
            began = self._campaign_began
            waits = (answer_s, wait_limit_s, self._join_wait())
            times += [began + wait for wait in waits if began + wait > self._t]
        if self._start_at is not None:
            if self.campaign is None:
                times += [max(self._start_at, self._window_end()), max(self._report_at, self._t)]
            if self._trouble_since is not None and not self._told_no_quorum:
                times.append(self._trouble_since + self.settings.no_quorum_s)
        if self._obituaries():
            times.append(self._mourned_at + wait_limit_s / 2)
        for _, heard in self._wants.values():
            times += [t for t in (heard + wait_limit_s, self._no_wants_before) if t > self._t]
        for request in self.joins.requests.values():
            times.append(request.heard + wait_limit_s)
            times += [t for t in (request.not_before, (request.probed or 0.0) + wait_limit_s) if t > self._t]
        self.next_tick = now + max(answer_s / 16, min(times) - self._t)

    # ---- causes

    def _accused(self, event: Accused) -> None:
        member = self.members.get(event.slot)
        is_member = member is not None and member.incarnation == event.incarnation
        if is_member and event.epoch >= self.epoch:
            self._note_accusation(event.slot, self.me.slot)
        if self.settings.policy != "evict" or self.promised != NO_BALLOT:
            self._ask_everybody()  # this process may be the one that was evicted

    def _note_accusation(self, slot: int, by: int) -> None:
        if self.settings.policy == "evict" and slot != by:
            self._accusers.setdefault(slot, {})[by] = self._t

    def _host_lost(self, event: HostLost) -> None:
        self._note_lost(event.host, self.me.slot)

    def _note_lost(self, host: str, by: int) -> None:
        is_there = any(member.host == host for member in self.members.values())
        if is_there and by in self.members and host != self.members[by].host:
            self._lost.setdefault(host, {})[by] = self._t

    def _wanted(self, event: Wanted) -> None:
        if event.epoch >= self.epoch:
            self._note_want(event.want)

    def _note_want(self, want: Want) -> None:
        known = self._wants.get(want.group_id)
        num_locators = len(want.locators) + sum(len(other.locators) for other, _ in self._wants.values())
        if known is None and num_locators > MAX_PARTS:
            return  # a report has to fit into a frame; its engine repeats it when others are met
        if known is None or known[0] == want:
            self._wants[want.group_id] = want, self._t

    def _expire(self) -> None:
        before = self._t - self.settings.wait_limit_s
        for accusers in (self._accusers, self._lost):
            _expire(accusers, before)
        self._wants = {group_id: (want, t) for group_id, (want, t) in self._wants.items() if t >= before}
        if self.joins.requests:
            self.joins.expire(before)

    def _findings(self) -> Findings:
        accusers = {slot: frozenset(by) for slot, by in self._accusers.items() if slot not in self.gone}
        joiners: list[Member] = []
        replaced: set[int] = set()
        if self.joins.requests:
            leaving = {*self.gone, *self._suspected()}
            joiners, replaced = self.joins.ready(self._t, self.members, leaving, self.settings.wait_limit_s)
        wants = tuple(want for want, _ in self._wants.values()) if self._t >= self._no_wants_before else ()
        waited, join_wait_s = self._t - self._campaign_began, self._join_wait()
        lost = {host: frozenset(by) for host, by in self._lost.items()}
        return Findings(
            self.gone,
            self.boards,
            accusers,
            tuple(joiners),
            frozenset(replaced),
            wants,
            waited,
            join_wait_s,
            lost,
            self.settings.policy == "evict",
            frozenset(slot for slot, since in self._owing.items() if self._t - since >= self.settings.silence_s),
        )

    def _suspected(self) -> set[int]:
        """Return the slots that a member accuses, or whose host a member cannot reach."""
        lost = {slot for slot, member in self.members.items() if member.host in self._lost} if self._lost else set()
        return lost | self._accusers.keys()

    def _believed(self) -> list[int]:
        """Return the slots that are able to answer, as far as is known, ascending."""
        suspected = self._suspected()
        return [slot for slot in sorted(self.members) if slot not in self.gone and slot not in suspected]

    def _join_wait(self) -> float:
        """Return the time for which calls may be held up for a joiner or a want: longer after failed tries."""
        if not (self.joins.requests or self._wants):
            return 0.0
        if self._wants and self._tries:
            return self.settings.wait_limit_s
        return min(self.settings.wait_limit_s, self.settings.answer_s * 2.0 ** min(self.joins.num_tries(), 30))

    def _position(self) -> int:
        """Return the number of coordinators before this member: those believed alive in lower slots."""
        return sum(slot < self.me.slot for slot in self._believed())

    def _hurry(self, slot: int) -> None:
        """Handle the end of a member: if it was the expected coordinator, its successor need not wait."""
        if self._start_at is not None and (self.promised.slot == slot or slot < self.me.slot):
            self._start_at = min(self._start_at, self._due())

    def _delay(self, position: int) -> float:
        return self.settings.answer_s * (1 + position) if position else 0.0

    def _yield_to(self, ballot: Ballot) -> None:
        """Yield to another coordinator's `ballot` if this agent's is lower, and restart the wait."""
        if ballot > self._highest:
            self._highest = ballot
        if self.campaign is not None and ballot > self.campaign.ballot:
            self.campaign = None
        if ballot.slot != self.me.slot:
            self._start_at = self._t + self.settings.answer_s * (1 + self._position())

    # ---- what is due

    def _drive(self) -> None:
        """Do what the time and the known causes require. Ends every step."""
        if not self.epoch:
            self._drive_join()
            return
        if self._accusers or self._lost or self._wants or self.joins.requests:
            self._expire()
            self._probe()
        findings = self._findings()
        self._mourn()
        trouble = bool(
            findings.gone or findings.accusers or findings.lost or self.promised != NO_BALLOT or self._freezing
        )
        if not (trouble or findings.joiners or findings.wants or self.campaign is not None):
            self._start_at = self._trouble_since = None
            return
        if self._start_at is None:
            self._start_at = self._due()
        begins_at = max(self._start_at, self._window_end())
        self._watch_quorum(trouble and (self._t >= begins_at or self.promised != NO_BALLOT))
        if self.campaign is None:
            if self._t >= begins_at:
                self._begin()
            elif self._t >= self._report_at:
                self._tell_coordinator(findings)
        if self.campaign is not None:
            self._run(self.campaign)

    def _due(self) -> float:
        """Return the time at which this agent begins a ballot if none before it in the order does."""
        return max(self._t, self._window_end()) + self._delay(self._position())

    def _window_end(self) -> float:
        """Return the time before which this agent begins no ballot, because further deaths may follow the first one."""
        return 0.0 if self._dead_since is None else self._dead_since + self.settings.death_window_s

    def _watch_quorum(self, trouble: bool) -> None:
        if not trouble:
            self._trouble_since = None
        elif self._trouble_since is None:
            self._trouble_since = self._t
        elif not self._told_no_quorum and self._t - self._trouble_since >= self.settings.no_quorum_s:
            self._told_no_quorum = True
            self._out.append(NoQuorum(self.epoch))

    def _drive_join(self) -> None:
        if self._t >= self._join_at and self._refusal:
            self.ended = True
            self._out.append(Refused(self._refusal))
        elif self._t >= self._join_at:
            self._join_at = self._t + self.settings.answer_s
            for member in self._contacts.values():
                self._out.append(Send(member, Join(self.me)))

    def _probe(self) -> None:
        """Ask the occupants of slots that joiners request; refuse the joiner when they answer."""
        leaving = {*self.gone, *self._suspected()}
        for request in self.joins.unprobed(self.members, leaving):
            request.probed = self._t if request.probed is None else request.probed
            request.probe_again = False
            occupant = self.members[request.member.slot]
            if occupant.slot != self.me.slot:
                self._out.append(Send(occupant, Ask(self.epoch)))
            elif self._coordinator() == self.me.slot:
                request.occupant_lives = True
        for request in list(self.joins.requests.values()):
            if request.occupant_lives:
                self.joins.drop(request.member.nonce)
                self._refuse(request.member, SLOT_TAKEN)

    def _refuse(self, joiner: Member, reason: str) -> None:
        self._out.append(Send(joiner, JoinRefused(joiner.slot, joiner.nonce, reason)))

    def _settle_joins(self, decision: Decision) -> None:
        """Drop the requests that `decision` has answered; refuse a joiner that lost its slot to another."""
        new = {member.slot: member.nonce for member in decision.members if member.incarnation == decision.epoch}
        for request in list(self.joins.requests.values()):
            request.probed, request.occupant_lives = None, False
            if request.member.slot in new and decision.epoch > 1:
                self.joins.drop(request.member.nonce)
                if new[request.member.slot] != request.member.nonce:
                    self._refuse(request.member, SLOT_TAKEN)

    def _pass_on(self, message: Join) -> None:
        """Notify the coordinator of an admitted joiner."""
        slot = self._coordinator()
        if slot != self.me.slot:
            self._out.append(Send(self.members[slot], message))

    def _coordinator(self) -> int:
        return min(self._believed(), default=self.me.slot)

    def _tell_coordinator(self, findings: Findings) -> None:
        slot = self._coordinator()
        accused = [slot for slot, by in findings.accusers.items() if self.me.slot in by]
        causes = [Removal(s, self.members[s].incarnation, cause) for s, cause in findings.gone.items()]
        causes += [Removal(s, self.members[s].incarnation, STALLED) for s in accused]
        lost = {host for host, by in findings.lost.items() if self.me.slot in by}
        causes += [
            Removal(*m[:2], UNREACHABLE) for s, m in self.members.items() if m.host in lost and s not in self.gone
        ]
        self._report_at = self._t + self.settings.answer_s
        if (causes or findings.wants) and slot != self.me.slot:
            self._out.append(
                Send(self.members[slot], Report(self.epoch, tuple(sorted(causes)), tuple(sorted(findings.wants))))
            )

    # ---- obituaries of this host's members, for other hosts

    def _elsewhere(self) -> list[Member]:
        return [m for slot, m in self.members.items() if m.host != self.me.host and slot not in self.gone]

    def _obituaries(self) -> list[Obituary]:
        """Return this agent's obituaries of ended members of its host, for members on other hosts."""
        if not self.gone or not self._elsewhere():
            return []
        ours = [(self.members[slot], cause) for slot, cause in self.gone.items() if slot in self._read]
        return [obituary_of(member, cause, self.boards.get(member.slot)) for member, cause in ours]

    def _mourn(self) -> None:
        """Send the obituaries of this host to other hosts, repeatedly: a message may be lost."""
        obituaries = self._obituaries()
        if obituaries and self._t >= self._mourned_at + self.settings.wait_limit_s / 2:
            self._mourned_at = self._t
            for member in self._elsewhere():
                self._out += [Send(member, obituary) for obituary in obituaries]

    def _ask_everybody(self) -> None:
        self._to_others(Ask(self.epoch))

    def _to_others(self, message: Message) -> None:
        for slot, member in self.members.items():
            if slot != self.me.slot and slot not in self.gone:
                self._out.append(Send(member, message))

    # ---- the ballot

    def _begin(self) -> None:
        """Start a ballot above all known ones."""
        above = max(self._highest, self.promised)
        ballot = self._highest = Ballot(above.round + 1, self.me.slot)
        self.campaign = self.campaign_type(ballot, self.decided)
        self._campaign_began = self._t
        self._send_phase(self.campaign)
        self._ask_for_promise(ballot)

    def _send_phase(self, campaign: Campaign) -> None:
        self._resend_at = self._t + self.settings.answer_s / 2
        if campaign.proposal is None:
            self._note_asked()
            self._to_others(Prepare(campaign.ballot, self.epoch))
        else:
            self._to_others(Accept(campaign.ballot, self.epoch, campaign.proposal))

    def _note_asked(self) -> None:
        """Count how long others owe an answer: over several ballots, as a rival may end each one soon."""
        if self._t > self._asked_at + self.settings.wait_limit_s:  # a member that is not asked owes nothing
            self._owing.clear()
        self._asked_at = self._t
        for slot in self.members.keys() - {self.me.slot}:
            self._owing.setdefault(slot, self._t)

    def _note_answer(self, sender: bytes, epoch: int) -> None:
        if epoch == self.epoch and sender in self.slot_of:
            self._owing.pop(self.slot_of[sender], None)

    def _run(self, campaign: Campaign) -> None:
        """Advance the ballot as far as possible."""
        findings = self._findings()
        lost = campaign.lost_to(findings)
        if lost is not None:
            self._highest = max(self._highest, lost)
            self._begin()
            if self.campaign is not None:
                self._run(self.campaign)
            return
        if campaign.proposal is None:
            campaign.proposal = campaign.choose(findings, self.settings.answer_s, self.settings.wait_limit_s)
            if campaign.proposal is not None:
                self._take(campaign.ballot, campaign.proposal)
                campaign.acks.add(self.me.slot)
                self._send_phase(campaign)
        if campaign.is_chosen(findings):
            self._announce(campaign)
        elif self._t >= self._resend_at:
            self._send_phase(campaign)

    def _announce(self, campaign: Campaign) -> None:
        """Send a chosen decision to all members that it concerns, then adopt it.

        Removed members get it, too, the dead last: it costs nothing if they are dead.
        """
        decision = campaign.proposal
        assert decision is not None
        self._to_others(Commit((decision,)))
        for member in decision.members:
            if member.nonce not in self.slot_of:
                self._out.append(Send(member, Commit((decision,))))
        gone = [self.members[slot] for slot in self.gone]
        self._learn(decision)
        for member in gone:
            self._out.append(Send(member, Commit((decision,))))
        if not self.ended:
            self._drive()

    def _promise(self, sender: bytes, message: Promise) -> None:
        self._note_answer(sender, message.epoch)
        campaign = self.campaign
        if campaign is None or message.ballot != campaign.ballot or message.epoch != self.epoch:
            return
        if message.accepted is not None and message.accepted.epoch != self.epoch + 1:
            return
        slot = self.slot_of.get(sender)
        if slot is not None and campaign.proposal is None:
            campaign.note_promise(slot, message)

    def _accepted(self, sender: bytes, message: Accepted) -> None:
        campaign = self.campaign
        slot = self.slot_of.get(sender)
        if (
            campaign is not None
            and slot is not None
            and (message.ballot, message.epoch) == (campaign.ballot, self.epoch)
        ):
            campaign.note_accepted(slot)

    def _nack(self, sender: bytes, message: Nack) -> None:
        self._note_answer(sender, message.epoch)
        campaign = self.campaign
        if campaign is None or message.ballot != campaign.ballot or message.epoch != self.epoch:
            return
        if sender in self.slot_of and message.promised > campaign.ballot:
            self._highest = max(self._highest, message.promised)
            self.campaign = None
            self._start_at = self._t + self.settings.answer_s * (1 + self._position())

    # ---- implemented in agent.py

    def _ask_for_promise(self, ballot: Ballot) -> None:
        raise NotImplementedError

    def _take(self, ballot: Ballot, decision: Decision) -> None:
        raise NotImplementedError

    def _learn(self, decision: Decision) -> None:
        raise NotImplementedError
