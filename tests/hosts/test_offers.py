"""Offers of other hosts come on another connection than the view that rests on them: it waits. No processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from epee.backend.bootstrap.home import ASKS, FOUNDER, IN, Offer
from epee.backend.hosts.ways import Turn
from epee.backend.membership.lane_hooks import LaneHooks
from epee.backend.membership.occupants import Occupants
from epee.memory.host import BLOB_BYTES
from epee.view.process.endpoint import Endpoint, pack_endpoint
from epee.view.protocol.messages import DEAD, Decision, Member, Part, Removal

LANE = 7
END = pack_endpoint(Endpoint(1, 1, 0, bytes(BLOB_BYTES), bytes(BLOB_BYTES), b""))
MEMBERS = tuple(Member(slot, 1, bytes([slot]) * 16, END, "ab"[slot > 0]) for slot in range(4))
OUT = Decision(5, MEMBERS, (), (), (), (Part(LANE, 2, 1, -5),), (LANE,))
IN_AGAIN = Decision(6, MEMBERS, (), (), (), (Part(LANE, 2, 1, 6),), (LANE,))
NEW = Decision(5, MEMBERS, (), (), (), (Part(LANE, 3, 1, 5),), (LANE,))
LOST = (*MEMBERS[:1], *MEMBERS[2:])


class Lane:
    """Rank 0 of a group of slots 0 to 2 over hosts a and b, as its agent sees it, and what its links are told."""

    def __init__(self) -> None:
        self.told: dict[int, bytes] = {}
        self.turns: list[Turn] = []
        runtime: Any = SimpleNamespace(told=lambda lane: self.told, member=MEMBERS[0])
        seat: Any = SimpleNamespace(lane=LANE, is_home=False, slots=[0, 1, 2])
        self.occupants = Occupants(seat, Decision(1, MEMBERS))
        self.occupants.begin(range(3), False, {})
        self.hooks = LaneHooks(runtime, self.occupants, False, False)
        engine: Any = SimpleNamespace(raise_flag=lambda flag: None)
        ways: Any = SimpleNamespace(epoch=1, decided=self.turns.append)
        self.hooks.attach(engine, None, ways)  # type: ignore[arg-type]

    def hear(self, slot: int, state: int, rank: int, turned: int, port: int = 9) -> None:
        self.told[slot] = Offer(state, rank, 4, bytes(BLOB_BYTES), port, turned).pack()
        self.hooks.heard()

    def newcomers(self) -> list[tuple[int, int, int]]:
        found = [(turn.epoch, one) for turn in self.turns for one in turn.newcomers]
        return [(epoch, one.rank, one.partner.port if one.partner else 0) for epoch, one in found]


def test_a_new_slot_waits_for_its_offer() -> None:
    lane = Lane()
    lane.hooks.decided(NEW)
    assert (lane.hooks.unoffered, lane.turns) == ((5, {3}), [])
    lane.hear(1, FOUNDER, 1, 5)
    assert lane.hooks.unoffered == (5, {3})
    lane.hear(3, ASKS, 3, 4)
    assert (lane.hooks.unoffered, lane.newcomers()) == ((0, frozenset()), [(5, 3, 9)])
    assert lane.hooks.offers[5][3].port == 9, "what is taken over"


def test_what_came_before_the_view_is_not_waited_for() -> None:
    lane = Lane()
    lane.hear(3, ASKS, 3, 4)
    lane.hooks.decided(NEW)
    assert (lane.hooks.unoffered[0], lane.newcomers()) == (0, [(5, 3, 9)])


def test_offers_of_an_earlier_part_do_not_count() -> None:
    for state, turned in ((FOUNDER, 1), (FOUNDER, 3), (IN, 3), (ASKS, 0)):
        lane = Lane()
        lane.hear(2, state, 2, turned, 8)
        lane.hooks.decided(OUT)
        lane.hooks.decided(IN_AGAIN)
        assert lane.hooks.unoffered == (6, {2})
        assert [turn.present for turn in lane.turns] == [{0, 1}]
        lane.hear(2, IN, 2, 6)  # its question is over by now
        assert (lane.hooks.unoffered[0], lane.newcomers()) == (0, [(6, 2, 9)])
        assert lane.hooks.offers[6][2].port == 9


def test_who_is_lost_before_it_has_made_its_offer_is_not_waited_for() -> None:
    lane = Lane()
    lane.hooks.decided(OUT)
    lane.hooks.decided(IN_AGAIN)
    lane.hooks.decided(Decision(7, (*MEMBERS[:2], MEMBERS[3]), (Removal(2, 1, DEAD),)))
    assert lane.hooks.unoffered[0] == 0
    assert lane.newcomers() == [(6, 2, 0)]
    assert [turn.epoch for turn in lane.turns] == [5, 6, 7]
    assert lane.turns[-1].present == {0, 1}


def test_views_are_told_in_order() -> None:
    lane = Lane()
    lane.hooks.decided(OUT)
    lane.hooks.decided(IN_AGAIN)
    lane.hooks.decided(Decision(7, LOST, (Removal(1, 1, DEAD),), (), (), (Part(LANE, 2, 1, 6),)))
    assert [turn.epoch for turn in lane.turns] == [5]
    assert lane.hooks.unoffered == (6, {2})
    lane.hear(2, ASKS, 2, 5)
    assert [(turn.epoch, sorted(turn.present)) for turn in lane.turns] == [(5, [0, 1]), (6, [0, 1, 2]), (7, [0, 2])]
