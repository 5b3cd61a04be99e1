"""Calls of a throughput buffer meet views, in all kinds of orders of steps: `CallCourse` with rows, inboxes and READY.

A small world of ranks that make calls, a dispatch and a combine in turn. Each step is one that is divided from the next
in the real thing (`ep/membership/epochs.py`): an epoch entered, a row stored into the own inbox, all rows seen, a
promise, a decision heard. Deaths need the promise of a quorum, evictions and joins that of all who stay, as between
agents; who was voted out goes on until it hears of it. Rows are seen at once; how a call is given up is in
`test_row_withdrawal.py`, agents and slow memory are in `tests/sim`.
"""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epee.ep.membership.call_course import CallCourse
from epee.memory.signals import tag
from epee.view.protocol.decision import compose, has_quorum
from epee.view.protocol.messages import DEAD, STALLED, Decision, LaneState, Member, Want

LANE, NUM_CALLS = 7, 5
FAILED = "failed"


def is_pull(seq: int) -> bool:
    """Return whether a call is a combine."""
    return seq % 2 == 0


class _Rank:
    """One process. `rows`: calls that its own inbox shows, by epoch; `offered`: epochs that it has an inbox for."""

    def __init__(self, world: _World, slot: int, known: list[Decision], first: int) -> None:
        self.world, self.slot = world, slot
        self.lock = threading.Lock()
        slots = range(world.num_ranks)
        self.course = CallCourse(LANE, slots, slot, world.raises, lambda _: True, self.lock, known, first)
        self.heard = known[-1].epoch
        self.seq = self.course.first_seq
        self.epoch = self.came_with = self.ready = 0  # the last two: tags of an epoch and a call
        self.peers: dict[int, _Rank] = {}
        self.offered: set[int] = set()
        self.rows: dict[int, set[int]] = {}
        self.has_issued = self.is_dead = self.is_out = False
        self.seen = -1
        self.promise: LaneState | None = None
        self.outcomes: dict[int, Any] = {}

    def is_whole(self, slot: int, epoch: int, seq: int) -> bool:
        """As `EpochLane._is_whole`."""
        return epoch == self.epoch and slot in self.peers and seq in self.peers[slot].rows.get(epoch, ())

    def step(self) -> bool:
        """Do the next thing in a call; False when it must wait."""
        is_wrong = self.world.wrong == "completes while frozen"
        if self.seq > NUM_CALLS or not (self.course.await_thaw(0) or is_wrong):
            return False
        place, self.seen = self.course.place(self.seq, self.is_whole, self.epoch)
        if place.failed:
            return self._end(FAILED)
        members = self.course.members(self.seq, place.epoch)
        if place.epoch != self.epoch or (members.keys() != self.peers.keys() and not self.has_issued):
            self.has_issued = False
            return self._enter(place.epoch, members)
        if any(peer.ready < self.came_with for slot, peer in self.peers.items() if not self._is_gone(slot)):
            return False
        if not self.has_issued:
            self.has_issued = self.course.issue(self.seq, is_pull(self.seq), self.seen, self._publish)
            return self.has_issued
        parties = self.peers.keys() - set(place.without)
        if all(self.is_whole(slot, self.epoch, self.seq) for slot in parties):
            frozen, self.course.frozen = self.course.frozen, self.course.frozen and not is_wrong
            is_complete = self.course.complete(self.seq, self.seen, lambda: None)
            self.course.frozen = frozen
            return is_complete and self._end((self.epoch, tuple(sorted(parties))))
        return False

    def _is_gone(self, slot: int) -> bool:
        return self.world.by_slot.get(slot) is not self.peers[slot] and self.heard == len(self.world.decisions)

    def _publish(self) -> None:
        self.rows.setdefault(self.epoch, set()).add(self.seq)

    def _enter(self, epoch: int, members: Any) -> bool:
        self.offered.add(epoch)
        peers = {slot: self.world.process(slot, member.incarnation) for slot, member in members.items()}
        if not all(peer is not None and epoch in peer.offered for peer in peers.values()):
            return False
        if any(peer.is_dead for peer in peers.values()):
            return False  # what a dead process lends cannot be mapped any more
        self.peers, self.epoch = peers, epoch
        self.came_with = self.ready = 0 if self.world.wrong == "no ready" else tag(epoch, self.seq)
        if self.world.wrong == "ready for the call":
            self.came_with = self.ready = self.seq
        return True

    def _end(self, outcome: Any) -> bool:
        self.outcomes[self.seq] = outcome
        self.seq, self.has_issued = self.seq + 1, False
        return True

    def freeze(self) -> None:
        self.promise = self.course.freeze()

    def hear(self, decision: Decision) -> None:
        with self.lock:
            self.course.add(decision)
        self.heard, self.promise = decision.epoch, None
        self.course.thaw()


class _World:
    """See above. `wrong` breaks the rule on purpose: the test must find it."""

    def __init__(self, seed: int, num_ranks: int, raises: bool, wrong: str = "") -> None:
        self.dice = random.Random(seed)
        self.num_ranks, self.raises, self.wrong = num_ranks, raises, wrong
        members = tuple(Member(slot, 1, bytes([slot]), b"") for slot in range(num_ranks))
        self.decisions = [Decision(1, members)]
        self.ranks = {(slot, 1): _Rank(self, slot, self.decisions[:], 1) for slot in range(num_ranks)}
        self.by_slot = {slot: rank for (slot, _), rank in self.ranks.items()}
        self.doomed: set[int] = set()  # alive, to be voted out by the next decision
        self.joining: list[int] = []  # slots for which a process asks

    def process(self, slot: int, incarnation: int) -> Any:
        """Return a process; None when it has not made its buffer yet."""
        return self.ranks.get((slot, incarnation))

    def run(self) -> None:
        """Take steps until nothing more can happen."""
        num_losses, idle = self.dice.randrange(1, self.num_ranks), 0
        while idle < 300:
            dice = self.dice.random()
            alive = [slot for slot, rank in sorted(self.by_slot.items()) if not rank.is_dead]
            if dice < 0.05 and num_losses and len(alive) > 2:
                num_losses -= 1
                victim = self.dice.choice(alive)
                if self.dice.random() < 0.7:
                    self.by_slot[victim].is_dead = True
                elif not self.doomed:
                    self.doomed.add(victim)
                idle = 0
            elif dice < 0.07 and not self.joining:
                self.joining = [slot for slot in range(self.num_ranks) if slot not in self.by_slot][:1]
            elif dice < 0.25:
                idle = 0 if self._agree() else idle + 1
            elif dice < 0.45:
                idle = 0 if self._tell() else idle + 1
            else:
                rank = self.dice.choice(sorted(self.ranks.values(), key=lambda rank: (rank.slot, rank.heard)))
                idle = 0 if not rank.is_dead and rank.step() else idle + 1

    def _tell(self) -> bool:
        """Let a process hear of the next decision."""
        late = [rank for rank in self.ranks.values() if not rank.is_dead and rank.heard < len(self.decisions)]
        if late:
            rank = self.dice.choice(late)
            rank.hear(self.decisions[rank.heard])
        return bool(late)

    def _agree(self) -> bool:
        """Let a member promise, or decide if enough have."""
        current = self.decisions[-1]
        dead = {slot: DEAD for slot, rank in self.by_slot.items() if rank.is_dead}
        members = {member.slot for member in current.members}
        dead = {slot: cause for slot, cause in dead.items() if slot in members}
        joiners = self.joining
        if not (dead or self.doomed or joiners):
            return self._give_up()
        self.doomed -= dead.keys()
        live = members - dead.keys() - self.doomed
        frozen = {slot for slot in live if self.by_slot[slot].promise and self.by_slot[slot].heard == current.epoch}
        if self.dice.random() < 0.5 and live - frozen:
            rank = self.by_slot[self.dice.choice(sorted(live - frozen))]
            if rank.heard == current.epoch:
                rank.freeze()
            return True
        if frozen == live and not has_quorum(members, dead, frozen):
            self.doomed = set()  # too few are left to vote anybody out
        needs_all = self.doomed or joiners
        if not has_quorum(members, dead, frozen) or (needs_all and frozen != live):
            return False
        lanes = {slot: (self.by_slot[slot].promise,) for slot in frozen}
        self._decide(current, lanes, dead, joiners)
        return True

    def _give_up(self) -> bool:
        """End a ballot that nobody wants any more."""
        frozen = [rank for rank in self.by_slot.values() if rank.promise and rank.heard == len(self.decisions)]
        for rank in frozen:
            rank.promise = None
            rank.course.thaw()
        return bool(frozen)

    def _decide(self, current: Decision, lanes: Any, dead: dict[int, str], joiners: list[int]) -> None:
        coming = tuple(Member(slot, 0, bytes([slot, current.epoch]), b"") for slot in joiners)
        decision = compose(current, lanes, dead, dict.fromkeys(self.doomed, STALLED), coming)
        self.decisions.append(decision)
        for slot in (*dead, *self.doomed):
            self.by_slot.pop(slot).is_out = True
        self.doomed = set()
        self.joining = []
        for slot in joiners:
            rank = _Rank(self, slot, self.decisions[:], 0)
            self.ranks[slot, decision.epoch] = self.by_slot[slot] = rank

    def check(self) -> None:
        """All who are left have made all calls and come to the same ends, and so had those who died.

        But not where somebody was voted out: what it had contributed may have been used by the dead alone (C-3 in
        `tests/sim/history.py`).
        """
        for slot, rank in self.by_slot.items():
            if not rank.is_dead:
                assert rank.seq > NUM_CALLS, f"rank {slot} waits for ever in call {rank.seq}"
        left = list(self.by_slot.values())
        has_evicted = any(rank.is_out and not rank.is_dead for rank in self.ranks.values())
        reliable = left if has_evicted else list(self.ranks.values())
        for seq in range(1, NUM_CALLS + 1):
            ends = {rank.outcomes[seq] for rank in reliable if seq in rank.outcomes}
            assert len(ends) <= 1, f"call {seq} ends in different ways: {ends}"


def _run(seed: int, num_ranks: int, raises: bool, wrong: str = "") -> _World:
    world = _World(seed, num_ranks, raises, wrong)
    world.run()
    world.check()
    return world


@settings(max_examples=400, deadline=None)
@given(st.integers(0, 1 << 32), st.integers(2, 5), st.booleans())
def test_survivors_come_to_the_same_end(seed: int, num_ranks: int, raises: bool) -> None:
    _run(seed, num_ranks, raises)


def test_the_orders_show_all_there_is() -> None:
    """Calls run again, go on with the dead, go on among those who stay, fail, and have newcomers in them."""
    seen = set()
    for seed in range(400):
        world = _run(seed, 4, seed % 3 == 0)
        for rank in world.by_slot.values():
            for outcome in rank.outcomes.values():
                seen.add(outcome if outcome == FAILED else outcome[0] > 1)
                if outcome != FAILED:
                    members = {member.slot for member in world.decisions[outcome[0] - 1].members}
                    seen |= {"among"} if members - set(outcome[1]) else set()
        seen |= {"joined"} if any(rank.course.first_seq > 1 for rank in world.ranks.values()) else set()
    assert seen == {FAILED, True, False, "among", "joined"}


@pytest.mark.parametrize("wrong", ["no ready", "ready for the call", "completes while frozen"])
def test_each_part_of_the_rule_is_needed(wrong: str) -> None:
    """With a part of it left out some order of steps divides the survivors."""
    for seed in range(20_000):
        dice = random.Random(seed)
        try:
            _run(seed, dice.choice((3, 4, 5)), dice.random() < 0.3, wrong)
        except AssertionError:
            return
    pytest.fail(f"20000 orders of steps do not show that {wrong!r} is wrong")


def _never(slot: int, epoch: int, seq: int) -> bool:
    return False


def _member(slot: int, nonce: bytes = b"") -> Member:
    return Member(slot, 1, nonce or bytes([slot]), b"")


def _course(slot: int, known: list[Decision], first: int) -> CallCourse:
    """That of a rank of four; whose nonce is "Z" has taken a slot for another group."""
    is_ours = lambda member: member.nonce != b"Z"  # noqa: E731
    return CallCourse(LANE, range(4), slot, True, is_ours, threading.Lock(), known, first)


def _promises(courses: dict[int, CallCourse]) -> dict[int, tuple[LaneState, ...]]:
    return {slot: (course.freeze(),) for slot, course in courses.items()}


def _tell(courses: dict[int, CallCourse], decision: Decision) -> Decision:
    for course in courses.values():
        course.add(decision)
        course.thaw()
    return decision


def test_a_sync_that_takes_somebody_in_begins_the_lane_alike_for_all() -> None:
    founders = Decision(1, tuple(_member(slot) for slot in range(4)))
    courses = {slot: _course(slot, [founders], 1) for slot in (0, 1)}
    lost = _tell(courses, compose(founders, {}, {2: DEAD}))
    promises = {**_promises(courses), 3: (LaneState(LANE, 0, 0),)}
    want = Want(LANE, (0, 1), (3,), 1, 0)
    synced = _tell(courses, compose(lost, promises, {}, (), [Member(2, 0, b"new", b"")], [want]))
    newcomer = _course(2, [founders, lost, synced], 0)
    places = [course.place(course.first_seq, _never, 0)[0] for course in (*courses.values(), newcomer)]
    assert [place.failed for place in places] == [False] * 3
    assert {course.first_seq for course in (*courses.values(), newcomer)} == {newcomer.first_seq}


def test_the_end_of_a_process_without_a_part_is_no_loss_to_its_successor() -> None:
    founders = Decision(1, tuple(_member(slot) for slot in range(4)))
    courses = {slot: _course(slot, [founders], 1) for slot in (0, 1, 3)}
    lost = _tell(courses, compose(founders, _promises(courses), {2: DEAD}))
    stranger = _tell(courses, compose(lost, _promises(courses), {}, (), [Member(2, 0, b"Z", b"")]))
    for course in courses.values():  # the first call fails, two succeed
        for seq in (1, 2, 3):
            place, version = course.place(seq, _never, 1 if seq == 1 else 2)
            assert place.failed == (seq == 1)
            if not place.failed:
                assert course.issue(seq, False, version, lambda: None)
                assert course.complete(seq, version, lambda: None)
    replaced = compose(stranger, _promises(courses), {2: DEAD}, (), [Member(2, 0, b"N", b"")])
    _tell(courses, replaced)
    newcomer = _course(2, [founders, lost, stranger, replaced], 0)
    assert newcomer.first_seq == 4
    assert not newcomer.place(4, _never, 0)[0].failed
    assert not courses[0].place(4, _never, 2)[0].failed
