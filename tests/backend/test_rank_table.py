"""Which rank a slot has in a group follows from the decisions alone: whoever has seen what, all ranks find the same.

A group of `new_group` is made by some slots of a job. Ranks of it die, processes join the job in their places and ask
for these and for new ranks, members let in who asks as far as they see it, and each rank hears of the views sooner or
later and looks at newer ones before it takes them over.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from epee.engine.bootstrap.group_note import ASKS, FOUNDER, IN, Offer
from epee.engine.membership.admission import Admission
from epee.engine.membership.group_membership import GroupMembership
from epee.engine.membership.rank_table import RankTable
from epee.memory.shared import BLOB_BYTES
from epee.view.protocol.decision import compose, parts_of
from epee.view.protocol.messages import DEAD, Decision, GroupState, Locator, Member, Want
from epee.view.transport.wire import Endpoint, pack_endpoint

LANE = 7
FOUNDERS = (2, 0, 1)  # slots of ranks 0 to 2
NUM_SLOTS, NUM_RANKS, STEPS = 6, 5, 60
END = pack_endpoint(Endpoint(1, 1, 0, bytes(BLOB_BYTES), bytes(BLOB_BYTES), b""))


def member(slot: int, number: int) -> Member:
    return Member(slot, 1, bytes([slot, number]) * 8, END, "ab"[slot % 2])


class Rank:
    """What one process knows of the group."""

    def __init__(self, job: Job, slot: int, known: Decision, joined: bool) -> None:
        job_handle: Any = SimpleNamespace(group_id=LANE, is_home=False, slots=list(FOUNDERS))
        self.slot = slot
        self.news: list[Decision] = []
        self.found: dict[int, dict[int, int]] = {}  # by epoch, slot -> rank
        self.rank_table = RankTable(job_handle, known, joined)
        self.rank_table.begin(range(NUM_RANKS))
        self._note()
        runtime: Any = SimpleNamespace(view=lambda: job.view, waiting=lambda: (), want=lambda want, _: job.hear(want))
        rest: Any = None
        self.admission = Admission(runtime, rest, self.rank_table, rest, rest, rest, rest, job.offers)

    def _note(self) -> None:
        rank_table = self.rank_table
        self.found[rank_table.epoch] = {slot: rank_table.rank_of[slot] for slot in rank_table.since}

    def take_over(self) -> None:
        decision, rank_table = self.news.pop(0), self.rank_table
        for rank in rank_table.remove(decision):
            assert self.found[rank_table.epoch][rank_table.slot_of[rank]] == rank
        for one in list(rank_table.newcomers(decision)):
            rank_table.take_in(one)
        rank_table.is_over(decision)
        self._note()


class Job:
    """A job and one group of it."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.number = dict.fromkeys(range(NUM_SLOTS), 0)
        self.view = Decision(1, tuple(member(slot, 0) for slot in range(NUM_SLOTS)))
        self.wants: list[Want] = []
        self.ranks = {slot: Rank(self, slot, self.view, False) for slot in FOUNDERS}
        self.asks: dict[int, int] = {}  # slot -> rank
        self.came: dict[int, int] = {}  # slot -> rank, of those who were taken in
        self.history: dict[int, dict[int, int]] = {}

    def hear(self, want: Want) -> None:
        self.wants = self.wants or [want]  # one per group, the first

    def offers(self) -> dict[int, Offer]:
        found = {slot: (FOUNDER, FOUNDERS.index(slot)) for slot in self.ranks if slot not in self.came}
        found |= {slot: (IN, rank) for slot, rank in self.came.items() if slot in self.ranks}
        found |= {slot: (ASKS, rank) for slot, rank in self.asks.items()}
        return {slot: Offer(state, rank, NUM_RANKS, bytes(BLOB_BYTES), 9) for slot, (state, rank) in found.items()}

    def decide(self, gone: set[int]) -> None:
        """Make the next decision, with who died, who came to the job, and a want if there is one."""
        empty = set(range(NUM_SLOTS)) - {one.slot for one in self.view.members}
        joiners = []
        for slot in empty:
            if self.dice.random() < 0.5:
                self.number[slot] += 1
                joiners.append(member(slot, self.number[slot]))
        for slot in gone:
            for table in (self.ranks, self.asks, self.came):
                table.pop(slot, None)  # type: ignore[attr-defined]
        wants = [w for w in self.wants if not gone.intersection(w.members)]
        told = {slot: [GroupState(LANE, 0, 0)] for one in self.view.members if (slot := one.slot) not in gone}
        self.view = compose(self.view, told, dict.fromkeys(gone, DEAD), joiners=joiners, wants=wants)
        self.wants = []
        for rank in self.ranks.values():
            rank.news.append(self.view)
        for slot in [slot for want in wants for slot in want.out if slot in self.ranks]:
            del self.ranks[slot], self.came[slot]  # it stays in the job
        since = parts_of(self.view, LANE)
        for slot in [slot for want in wants for slot in want.members if since.get(slot) == self.view.epoch]:
            self.came[slot] = self.asks.pop(slot)
            self.ranks[slot] = Rank(self, slot, self.view, True)
        self.history[self.view.epoch] = {slot: self.came.get(slot, rank) for slot, rank in self._ranks().items()}

    def _ranks(self) -> dict[int, int]:
        return {slot: FOUNDERS.index(slot) if slot in FOUNDERS else -1 for slot in self.ranks}

    def step(self) -> None:
        """Let something happen."""
        dice, here = self.dice, [one.slot for one in self.view.members]
        strangers = [slot for slot in here if slot not in self.ranks]
        if strangers and dice.random() < 0.6:
            slot = dice.choice(strangers)
            self.asks[slot] = FOUNDERS.index(slot) if slot in FOUNDERS else dice.randrange(3, NUM_RANKS)
        for rank in self.ranks.values():
            if dice.random() < 0.3:
                rank.admission.waiting()  # it looks at the newest view before it takes over what came before
            if rank.news and dice.random() < 0.4:
                rank.take_over()
        if self.asks and dice.random() < 0.7:
            rank = dice.choice([*self.ranks.values()])
            waiting = rank.admission.waiting()
            if waiting:
                rank.admission._let_in([dice.choice(waiting)])
        elif self.came and dice.random() < 0.1:
            going, view = dice.choice([*self.came]), self.view
            staying = self.ranks.keys() - {going}
            self.ranks[min(staying)].admission._want(staying, (going,), view.epoch)
        gone = {dice.choice(here)} if dice.random() < 0.3 and len(self.ranks) > 2 else set()
        if len(self.ranks.keys() - gone) < 2:
            gone = set()
        if self.wants or gone or len(here) < NUM_SLOTS:
            self.decide(gone)

    def check(self) -> None:
        """All ranks say the same of the newest view, and of the views that they have taken over."""
        views = [rank.rank_table.present(self.view) for rank in self.ranks.values()]
        assert views == views[:1] * len(views)
        if self.view.epoch > 1:
            assert views[0] == {rank: slot for slot, rank in self.history[self.view.epoch].items()}
        asking = [rank.admission.waiting() for rank in self.ranks.values()]
        assert asking == asking[:1] * len(asking)
        for rank in self.ranks.values():
            for epoch, found in rank.found.items():
                assert epoch == 1 or found == self.history[epoch]
                assert all(rank.rank_table.rank_at(slot, epoch) == at for slot, at in found.items())


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_all_ranks_find_the_same_rank_for_a_slot(first: int) -> None:
    others = 0
    for seed in range(first, first + 50):
        job = Job(seed)
        for _ in range(STEPS):
            job.step()
            job.check()
        had: dict[int, set[int]] = {}
        for found in job.history.values():
            for slot, rank in found.items():
                had.setdefault(rank, set()).add(slot)
        others += any(len(slots) > 1 for rank, slots in had.items())
    assert others > 25, "a rank went from one slot to another in most histories"


def _with(view: Decision, slot: int, rank: int, gone: tuple[int, ...] = (), wanted: tuple[int, ...] = ()) -> Decision:
    """Return the decision that takes in a slot for a rank, where `wanted` are in and `gone` die."""
    offer = Offer(ASKS, rank, NUM_RANKS, bytes(BLOB_BYTES), 9)
    want = Want(LANE, tuple(sorted({*wanted, slot})), (), locators=(Locator(slot, offer.locator.pack()),))
    told = {one.slot: [GroupState(LANE, 10, 10)] for one in view.members if one.slot not in gone}
    return compose(view, told, dict.fromkeys(gone, DEAD), wants=[want])


def test_a_newcomer_judges_a_rank_beyond_the_founders_that_its_own_decision_removes() -> None:
    born = Decision(1, tuple(member(slot, 0) for slot in range(NUM_SLOTS)))
    told = {one.slot: [GroupState(LANE, 10, 10)] for one in born.members}
    first = compose(born, told, {}, wants=[Want(LANE, tuple(sorted(FOUNDERS)), (3, 4, 5))])
    second = _with(first, 3, 3, wanted=FOUNDERS)
    third = _with(second, 4, 4, gone=(3,), wanted=(*FOUNDERS, 3))
    assert third.removed
    assert 4 in parts_of(third, LANE)
    job_handle: Any = SimpleNamespace(group_id=LANE, is_home=False, slots=list(FOUNDERS))
    member_of_it = RankTable(job_handle, first)
    member_of_it.begin(range(3))
    for one in list(member_of_it.newcomers(second)):
        member_of_it.take_in(one)
    member_of_it.is_over(second)
    newcomer = RankTable(job_handle, first, True)
    hooks = SimpleNamespace(
        enter_as=lambda slot, locator: None,
        decisions=[second, third],
        is_entry=lambda decision: decision is third,
        begin_with=lambda decision: None,
    )
    shown: list[bytes] = []
    asking: Any = SimpleNamespace(
        hooks=hooks,
        runtime=SimpleNamespace(view=lambda: third),
        _job=SimpleNamespace(slot=4),
        _row=SimpleNamespace(tell=shown.append),
        _rank_table=newcomer,
        _told=lambda: {0: Offer(FOUNDER, 0, NUM_RANKS, bytes(BLOB_BYTES), 9, request=6)},
    )
    request = Offer(ASKS, 4, NUM_RANKS, bytes(BLOB_BYTES), 9)
    assert GroupMembership.ask(asking, request, 1.0) is third
    assert shown == [request._replace(request=7).pack()]
    assert newcomer.ours(third).removed == member_of_it.ours(third).removed == third.removed
