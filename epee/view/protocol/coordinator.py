"""One attempt to agree on the next view: the coordinator's side of one ballot.

Phase 1 collects promises, phase 2 acceptances. A decision that was accepted before, here or on the board of a dead
member, is proposed again; only where there is none may the coordinator compose a decision of its own. The class stores
the answers and derives the next step. It sends nothing and has no clock: the agent does both, and asks again whenever
something has changed.

A coordinator that dies leaves members that have promised (their groups are frozen) and perhaps accepted; the next
coordinator finds both, or the boards of those that died with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from .decision import (
    choose_evicted,
    choose_lost,
    compose,
    has_quorum,
    highest_accepted,
    highest_promise,
    spans_hosts,
    without,
)
from .messages import STALLED, UNREACHABLE, Ballot, BoardState, Decision, LaneState, Member, Promise, Want


class Facts(NamedTuple):
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
    """A ballot for the epoch after `current`."""

    def __init__(self, ballot: Ballot, current: Decision) -> None:
        self.ballot = ballot
        self.current = current
        self.slots = frozenset(member.slot for member in current.members)
        self.promises: dict[int, tuple[LaneState, ...]] = {}
        self.acks: set[int] = set()
        self.proposal: Decision | None = None
        self._adopted: tuple[Ballot, Decision | None] = (Ballot(0, -1), None)

    def note_promise(self, slot: int, promise: Promise) -> None:
        """Count a promise of this ballot; idempotent."""
        if slot not in self.promises:
            self.promises[slot] = promise.lanes
            if promise.accepted is not None and promise.accepted_ballot > self._adopted[0]:
                self._adopted = (promise.accepted_ballot, promise.accepted)

    def note_accepted(self, slot: int) -> None:
        """Count an acceptance of this ballot."""
        if self.proposal is not None:
            self.acks.add(slot)

    def lost_to(self, facts: Facts) -> Ballot | None:
        """Return the higher ballot that a dead member had promised, which ends this one; None if there is none."""
        promised = highest_promise(facts.boards, self.current.epoch)
        return promised if promised > self.ballot else None

    def is_chosen(self, facts: Facts) -> bool:
        """Return whether a quorum has accepted the proposal."""
        return self.proposal is not None and self._quorum(self.acks, facts)

    def choose(self, facts: Facts, answer_s: float, patience_s: float) -> Decision | None:
        """Return the decision to propose now, None while more must be known."""
        if not self._quorum(self.promises, facts):
            return None
        adopted = max(self._adopted, highest_accepted(facts.boards, self.current.epoch), key=lambda pair: pair[0])
        if adopted[1] is not None:
            return adopted[1]
        return self._compose(facts, answer_s, patience_s)

    def _quorum(self, acks: set[int] | dict[int, tuple[LaneState, ...]], facts: Facts) -> bool:
        return has_quorum(self.slots, facts.boards, acks)

    def _compose(self, facts: Facts, answer_s: float, patience_s: float) -> Decision | None:
        """Compose a decision.

        Removing a live member and joins need the promise of every remaining member. So does, in a job over several
        hosts, removing a dead one (a group may have no member left on its host, and then its cut counts); a change in
        one group needs the promise of every member that takes part in it afterwards. A member that is put out need not
        answer, and a member that does not answer in time is put out where the want allows it. A lost host says nothing
        about members on other hosts, which may only be slow: they are removed with it once they have been silent as
        long as a host may be, or, where a member is accused, after `patience_s`.
        """
        has_pull = any(state.is_pull for states in self.promises.values() for state in states)
        if has_pull and facts.waited_s < answer_s and not self.slots - facts.gone.keys() <= self.promises.keys():
            return None  # the call continues among the remaining members if all of them have begun it
        if facts.lost and facts.waited_s < answer_s and self._within_reach(facts) - self.promises.keys():
            return None  # a member that answers has precedence
        evicted = self._evicted(facts)
        accused = facts.accusers.keys() - facts.gone.keys()
        if len(accused) > 1 and facts.waited_s < answer_s and accused - self.promises.keys():
            return None  # of several accused members those that do not answer go first
        wanted = evicted | dict.fromkeys((slot for slot in facts.replaced if slot not in self.promises), STALLED)
        joiners = facts.joiners
        has_cuts = self._has_cuts(facts)
        silent = {s for s in self.slots if s not in facts.gone and s not in self.promises and s not in wanted}
        if any(silent.intersection(want.members) for want in facts.wants):
            may_wait_s = answer_s if facts.gone else max(answer_s, facts.join_wait_s)
            if facts.waited_s < may_wait_s:
                return None
        if silent and (wanted or joiners or has_cuts):
            if facts.waited_s < answer_s:
                return None
            if evicted and (has_cuts or not facts.gone):
                if facts.waited_s < patience_s or not facts.may_evict:
                    return None
                if STALLED not in evicted.values() and silent - facts.mute:
                    return None
                wanted |= dict.fromkeys(silent, STALLED)
            elif has_cuts or (not facts.gone and facts.waited_s < facts.join_wait_s):
                return None
            else:
                wanted, joiners = {}, ()  # dead members are handled first; the rest waits for a later epoch
        unheard = self.slots - facts.gone.keys() - self.promises.keys() - wanted.keys()
        silent = (
            set(unheard) if facts.waited_s >= patience_s else set()
        )  # a slow machine is no reason to remove a member
        left = (without(want, silent, facts.gone.keys() | wanted.keys(), self.current) for want in facts.wants)
        wants = tuple(want for want in left if want is not None and not unheard.intersection(want.members))
        return compose(self.current, self.promises, facts.gone, wanted, joiners, wants)

    def _has_cuts(self, facts: Facts) -> bool:
        """Return whether dead slots may count up to a cut, which no remaining member may move then."""
        return bool(facts.gone) and spans_hosts(self.current)

    def _within_reach(self, facts: Facts) -> set[int]:
        """Return the slots that have not failed or left and run on hosts that the coordinator itself can reach."""
        away = {host for host, by in facts.lost.items() if self.ballot.slot in by}
        return {m.slot for m in self.current.members if m.slot not in facts.gone and m.host not in away}

    def _evicted(self, facts: Facts) -> dict[int, str]:
        """Return the members to remove alive, with causes: all members of lost hosts, and else the worst connected
        ones."""
        hosts = {member.slot: member.host for member in self.current.members if member.slot not in facts.gone}
        lost = choose_lost(hosts, facts.lost, self.promises)
        evicted = {slot: UNREACHABLE for slot, host in hosts.items() if host in lost}
        live = hosts.keys() - evicted.keys()
        return evicted | dict.fromkeys(choose_evicted(live, facts.accusers, self.promises), STALLED)
