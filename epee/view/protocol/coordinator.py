"""One attempt to agree on the next view: the coordinator's side of one ballot.

Phase 1 collects promises, phase 2 acceptances. What was accepted before, here or on the board of a dead member, is
proposed again; only where there is nothing may the coordinator compose a decision of its own. The class keeps what was
answered and says what follows from it. It sends nothing and knows no clock: the agent does, and asks again whenever
something has changed.

A coordinator that dies leaves members that have promised (their lanes are frozen) and perhaps accepted; the next one
finds both, or the boards of those that died with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from .decision import choose_evicted, choose_lost, compose, spans_hosts, without
from .messages import STALLED, UNREACHABLE, Ballot, BoardState, Decision, LaneState, Member, Promise, Want
from .quorum import has_quorum, highest_accepted, highest_promise


class Facts(NamedTuple):
    """What the agent knows when it asks the campaign, for the members of the current epoch.

    Attributes:
        gone: slots that are dead or have left, with the cause.
        boards: what the boards of those showed after their end; missing where not read.
        accusers: per accused slot who accuses it; empty unless the policy is to evict.
        joiners: who may come in, in order of preference.
        replaced: occupants of joiners' slots that do not answer; they go if they stay silent.
        wants: who is to go or to come back in single lanes, one per lane.
        waited_s: how long this ballot runs.
        join_wait_s: how long it may wait for everybody's promise where only joiners or wants need it.
        lost: per host that somebody cannot reach the slots that cannot.
        may_evict: who is silent for long may be left out (the policy is to evict).
        mute: slots that have answered nothing for as long as a host may be silent, though they were asked.
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
        """Count a promise of this ballot; again changes nothing."""
        if slot not in self.promises:
            self.promises[slot] = promise.lanes
            if promise.accepted is not None and promise.accepted_ballot > self._adopted[0]:
                self._adopted = (promise.accepted_ballot, promise.accepted)

    def note_accepted(self, slot: int) -> None:
        """Count an acceptance of this ballot."""
        if self.proposal is not None:
            self.acks.add(slot)

    def lost_to(self, facts: Facts) -> Ballot | None:
        """Return the higher ballot that a dead member had promised: this one must stop."""
        promised = highest_promise(facts.boards, self.current.epoch)
        return promised if promised > self.ballot else None

    def is_chosen(self, facts: Facts) -> bool:
        """Return whether a quorum has accepted the proposal."""
        return self.proposal is not None and self._quorum(self.acks, facts)

    def choose(self, facts: Facts, answer_s: float, patience_s: float) -> Decision | None:
        """Return what to propose now, None while more must be known."""
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

        Removing a live member and joins need the promise of everybody who stays, and so does, in a job over several
        hosts, removing a dead one (nobody of its host may be left in a lane, whose cut then counts); a change in one
        lane that of everybody who has a part in it afterwards. Who is put out need not answer, and who does not answer
        in time is put out where the want allows it. A lost host says nothing of those on others, who may only be slow:
        they go with it once they have been silent as long as a host may be, or, where somebody is accused, after
        `patience_s`.
        """
        has_pull = any(state.is_pull for states in self.promises.values() for state in states)
        if has_pull and facts.waited_s < answer_s and not self.slots - facts.gone.keys() <= self.promises.keys():
            return None  # it goes on among those who stay if all of them have begun it
        if facts.lost and facts.waited_s < answer_s and self._within_reach(facts) - self.promises.keys():
            return None  # who answers has a better claim to stay
        evicted = self._evicted(facts)
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
                wanted, joiners = {}, ()  # what the dead leave cannot wait; the rest is for a later epoch
        unheard = self.slots - facts.gone.keys() - self.promises.keys() - wanted.keys()
        silent = (
            set(unheard) if facts.waited_s >= patience_s else set()
        )  # a slow machine is no reason to put anybody out
        left = (without(want, silent, facts.gone.keys() | wanted.keys(), self.current) for want in facts.wants)
        wants = tuple(want for want in left if want is not None and not unheard.intersection(want.members))
        return compose(self.current, self.promises, facts.gone, wanted, joiners, wants)

    def _has_cuts(self, facts: Facts) -> bool:
        """Return whether the dead may count up to a cut, which nobody who stays may move then."""
        return bool(facts.gone) and spans_hosts(self.current)

    def _within_reach(self, facts: Facts) -> set[int]:
        """Return the slots that are not gone and on hosts that the coordinator itself can reach."""
        away = {host for host, by in facts.lost.items() if self.ballot.slot in by}
        return {m.slot for m in self.current.members if m.slot not in facts.gone and m.host not in away}

    def _evicted(self, facts: Facts) -> dict[int, str]:
        """Return whom to remove alive, and why: all members of hosts that are lost, and who is worst connected else."""
        hosts = {member.slot: member.host for member in self.current.members if member.slot not in facts.gone}
        lost = choose_lost(hosts, facts.lost, self.promises)
        evicted = {slot: UNREACHABLE for slot, host in hosts.items() if host in lost}
        return evicted | dict.fromkeys(choose_evicted(hosts.keys() - evicted.keys(), facts.accusers), STALLED)
