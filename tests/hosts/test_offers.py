"""A view says all about who comes into a group by an offer, and tells who comes of the others. No processes."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from epee.engine.bootstrap.group_note import ASKS, FOUNDER, IN, Offer, OutboxLocator, locators_of
from epee.engine.membership.admission import Admission
from epee.engine.membership.agent_hooks import AgentHooks
from epee.engine.membership.rank_table import RankTable
from epee.engine.replication.links import Turn
from epee.memory.shared import BLOB_BYTES
from epee.view.protocol.messages import DEAD, Decision, Locator, Member, Part, Removal, Want
from epee.view.transport.wire import Endpoint, pack_endpoint

LANE = 7
END = pack_endpoint(Endpoint(1, 1, 0, bytes(BLOB_BYTES), bytes(BLOB_BYTES), b""))
MEMBERS = tuple(Member(slot, 1, bytes([slot]) * 16, END, "ab"[slot > 0]) for slot in range(5))


def locator(rank: int, port: int = 9, num_ranks: int = 4, blob: bytes = bytes(BLOB_BYTES)) -> bytes:
    return OutboxLocator(rank, num_ranks, blob, port).pack()


OUT = Decision(5, MEMBERS, (), (), (), (Part(LANE, 2, 1, -5),), (LANE,))
IN_AGAIN = Decision(6, MEMBERS, (), (), (), (Part(LANE, 2, 1, 6, locator(2)),), (LANE,))
NEW = Decision(5, MEMBERS, (), (), (), (Part(LANE, 3, 1, 5, locator(3)),), (LANE,))


class Group:
    """Rank 0 of a group of slots 0 to 2 over hosts a and b, as its agent sees it, and what its links are told."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        job_handle: Any = SimpleNamespace(group_id=LANE, is_home=False, slots=[0, 1, 2])
        self.rank_table = RankTable(job_handle, Decision(1, MEMBERS))
        self.rank_table.begin(range(3))
        runtime: Any = SimpleNamespace(member=MEMBERS[0])
        self.hooks = AgentHooks(runtime, self.rank_table, False, False)
        engine: Any = SimpleNamespace(raise_flag=lambda flag: None)
        ways: Any = SimpleNamespace(epoch=1, decided=self.turns.append)
        self.hooks.attach(engine, None, [ways])  # type: ignore[arg-type]

    def newcomers(self) -> list[tuple[int, int, int]]:
        found = [(turn.epoch, one) for turn in self.turns for one in turn.newcomers]
        return [(epoch, one.rank, one.partner.port if one.partner else 0) for epoch, one in found]


def test_a_view_alone_tells_the_links_of_a_new_slot() -> None:
    group_id = Group()
    group_id.hooks.decided(NEW)
    assert group_id.newcomers() == [(5, 3, 9)]
    assert [(one.rank, one.part.port) for one in group_id.rank_table.newcomers(NEW) if one.part] == [(3, 9)]


def test_a_slot_is_known_before_its_view_is_taken_over() -> None:
    """What a freeze says of the group then counts with it, on all ranks."""
    group_id = Group()
    assert 3 in {member.slot for member in group_id.rank_table.ours(NEW).members}


def test_views_are_told_in_order_and_who_comes_may_be_lost_by_the_next() -> None:
    group_id = Group()
    gone = Decision(7, (*MEMBERS[:2], *MEMBERS[3:]), (Removal(2, 1, DEAD),))
    for decision in (OUT, IN_AGAIN, gone):
        group_id.hooks.decided(decision)
    assert [(turn.epoch, sorted(turn.present)) for turn in group_id.turns] == [(5, [0, 1]), (6, [0, 1, 2]), (7, [0, 1])]
    assert group_id.newcomers() == [(6, 2, 9)]


@pytest.mark.parametrize(
    "data",
    [b"", locator(2)[:-1], locator(2) + b"\0", locator(4), locator(2, 1 << 16), locator(2, 9, 65), locator(2, 9, 2)],
)
def test_a_locator_that_cannot_be_right_is_nobodys(data: bytes) -> None:
    decision = IN_AGAIN._replace(parts=(Part(LANE, 1, 1, 1, locator(1)), Part(LANE, 2, 1, 6, data)))
    assert locators_of(decision, LANE).keys() == {1}


def test_locators_of_former_members_and_other_lanes_do_not_count() -> None:
    parts = (Part(LANE, 1, 2, 1, locator(1)), Part(LANE, 9, 1, 1, locator(3)), Part(LANE + 1, 0, 1, 1, locator(0)))
    assert locators_of(Decision(6, MEMBERS, (), (), (), parts), LANE) == {}


class Entry:
    """What a member of slots 0 to 2 asks the agents for when ranks are to come in."""

    def __init__(self, view: Decision, offers: Mapping[int, Offer], is_home: bool = False) -> None:
        self.wants: list[Want] = []
        job_handle: Any = SimpleNamespace(group_id=LANE, is_home=is_home, slots=[0, 1, 2])
        rank_table = RankTable(job_handle, Decision(1, MEMBERS))
        rank_table.begin(range(3))
        runtime: Any = SimpleNamespace(
            view=lambda: view, waiting=lambda: (), want=lambda want, epoch: self.wants.append(want)
        )
        rest: Any = None
        self.admission = Admission(runtime, rest, rank_table, rest, rest, rest, rest, lambda: offers)


def offer(state: int, rank: int, port: int = 9) -> Offer:
    return Offer(state, rank, 4, bytes(BLOB_BYTES), port)


def test_a_want_brings_what_was_offered_and_where_the_founders_are() -> None:
    offers = {slot: offer(FOUNDER, slot) for slot in range(3)} | {3: offer(ASKS, 3)}
    never_here = Decision(5, MEMBERS, (), (), (), (Part(LANE, 3, 1, -5),))
    entry = Entry(never_here, offers)
    assert entry.admission._let_in([3])
    told = tuple(Locator(slot, locator(slot)) for slot in range(4))
    assert entry.wants == [Want(LANE, (0, 1, 2, 3), locators=told)]


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_nobody_is_let_in_before_all_founders_have_told_where_they_are(missing: int) -> None:
    offers = {slot: offer(FOUNDER, slot) for slot in range(3) if slot != missing} | {3: offer(ASKS, 3)}
    entry = Entry(Decision(5, MEMBERS, (), (), (), (Part(LANE, 3, 1, -5),)), offers)
    assert not entry.admission._let_in([3])
    assert entry.wants == []


def test_members_whom_the_view_or_their_endpoints_tell_of_need_not_be_told_again() -> None:
    offers = {0: offer(FOUNDER, 0), 1: offer(FOUNDER, 1), 2: offer(IN, 2), 3: offer(ASKS, 3)}
    entry = Entry(IN_AGAIN._replace(parts=(*IN_AGAIN.parts, Part(LANE, 3, 1, -5))), offers)
    assert entry.admission._let_in([3])
    assert [found.slot for found in entry.wants[0].locators] == [0, 1, 3]
    out = OUT._replace(parts=(*OUT.parts, Part(LANE, 3, 1, -5), Part(LANE, 4, 1, -5)))
    entry = Entry(out, {2: offer(ASKS, 2)}, is_home=True)
    assert entry.admission._let_in([2])
    assert [found.slot for found in entry.wants[0].locators] == [2]


def test_who_asks_anew_with_another_outbox_is_put_out_and_comes_in() -> None:
    """It had given up when a view took it in with what it had offered before."""
    founders = {slot: offer(FOUNDER, slot) for slot in range(3)}
    entry = Entry(NEW, founders | {3: offer(ASKS, 3)})
    assert entry.admission.waiting() == (), "it is in, and about to begin"
    entry = Entry(NEW, founders | {3: offer(ASKS, 3, port=10)})
    assert entry.admission.waiting() == (3,)
    assert entry.admission._let_in([3])
    assert entry.wants == [Want(LANE, (0, 1, 2), (3,))]


def test_an_entry_that_rests_on_what_was_offered_before_is_not_this_processes() -> None:
    group_id = Group()
    group_id.hooks.enter_as(3, locator(3, 10))
    assert not group_id.hooks.is_entry(NEW)
    group_id.hooks.enter_as(3, locator(3))
    assert group_id.hooks.is_entry(NEW)
